from xmla.core.call import Problem
from xmla.core.ops.cache.convert_indexer_cache.kernels import convert_indexer_cache_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T = 16


def plan(problem: Problem, device: Device) -> Plan:
    specs, origin, layout = problem.specs, problem.formats["source"], problem.formats["cache"]
    launch = Launch(
        convert_indexer_cache_kernel,
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
            "SOURCE_FORMAT": origin.format,
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "FORMAT": layout.format,
            "D": layout.dim,
            "MIN_EXPONENT": layout.min_exponent,
            "BLOCK_T": BLOCK_T,
        },
    )
    return Plan((launch,), {}, ())
