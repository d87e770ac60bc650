from xmla.core.call import Problem
from xmla.core.ops.cache.read_indexer_cache.kernels import read_indexer_cache_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T = 16


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    launch = Launch(
        read_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        outputs=("keys", "key_scales"),
        sizes={"num_tokens": problem["T"], "num_slots": problem["P"] * problem["R"]},
        constexprs={
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "VALUE_BYTES": problem.formats["cache"].value_bytes,
            "BLOCK_T": BLOCK_T,
        },
    )
    return Plan((launch,), problem.results, ("keys", "key_scales"))
