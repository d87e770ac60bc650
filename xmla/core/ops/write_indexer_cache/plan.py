from xmla.core.device import Device
from xmla.core.ops.write_indexer_cache.kernels import write_indexer_cache_kernel
from xmla.core.plan import Launch, Plan, cdiv
from xmla.core.problem import Problem

BLOCK_T = 16


def plan(problem: Problem, device: Device) -> Plan:
    specs, layout = problem.specs, problem.formats["cache"]
    launch = Launch(
        write_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        sizes={"num_tokens": problem["T"], "num_slots": problem["P"] * problem["R"]},
        constexprs={
            "KEY_STRIDE": specs["keys"].stride(0),
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "D": problem["D"],
            "MXFP4": layout.format == "mxfp4",
            "MIN_EXPONENT": layout.min_exponent,
            "BLOCK_T": BLOCK_T,
        },
    )
    return Plan((launch,), {}, ())
