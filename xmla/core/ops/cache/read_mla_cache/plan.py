from xmla.core.call import Problem
from xmla.core.ops.cache.read_mla_cache.kernels import read_mla_cache_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T = 4


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    launch = Launch(
        read_mla_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        outputs=("rows",),
        sizes={"num_tokens": problem["T"], "num_slots": problem["P"] * problem["R"]},
        constexprs={
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "LAYOUT": problem.formats["cache"],
            "BLOCK_T": BLOCK_T,
        },
    )
    return Plan((launch,), problem.results, ("rows",))
