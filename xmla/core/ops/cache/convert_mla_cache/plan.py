from xmla.core.call import Problem
from xmla.core.ops.cache.convert_mla_cache.kernels import convert_mla_cache_kernel, copy_mla_cache_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv, next_power_of_2

BLOCK_T = 4


def plan(problem: Problem, device: Device) -> Plan:
    specs, layout = problem.specs, problem.formats["cache"]
    alike = layout == problem.formats["source"] and (layout.packed or specs["source"].dtype == specs["cache"].dtype)
    conversion = {
        "SOURCE_LAYOUT": problem.formats["source"],
        "MIN_EXPONENT": layout.min_exponent(problem.attrs.scale_floor),
    }
    launch = Launch(
        copy_mla_cache_kernel if alike else convert_mla_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        sizes={
            "num_tokens": problem["T"],
            "num_source_slots": problem["SOURCE_P"] * problem["SOURCE_R"],
            "num_slots": problem["P"] * problem["R"],
        },
        constexprs={
            "SOURCE_SLOT_STRIDE": specs["source_slots"].stride(0),
            "SOURCE_PAGE_STRIDE": specs["source"].stride(0),
            "SOURCE_PAGE_SIZE": problem.page_size("source"),
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "LAYOUT": layout,
            "BLOCK_T": BLOCK_T,
            **({"LANES": next_power_of_2(layout.data)} if alike else conversion),
        },
    )
    return Plan((launch,), {}, ())
