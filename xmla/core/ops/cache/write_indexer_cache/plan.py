from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.cache.write_indexer_cache.kernels import write_indexer_cache_kernel
from xmla.core.plan import Constants, Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedKeys(Constants):
    """Constants of the kernel."""

    KEY_STRIDE: int
    SLOT_STRIDE: int
    PAGE_STRIDE: int
    PAGE_SIZE: int
    D: int
    FORMAT: str
    MIN_EXPONENT: int
    BLOCK_T: int  # tokens of a program


def plan(problem: Problem, device: Device) -> Plan:
    specs, layout = problem.specs, problem.formats["cache"]
    constants = CachedKeys(
        KEY_STRIDE=specs["keys"].stride(0),
        SLOT_STRIDE=specs["slots"].stride(0),
        PAGE_STRIDE=specs["cache"].stride(0),
        PAGE_SIZE=problem.page_size(),
        D=problem["D"],
        FORMAT=layout.format,
        MIN_EXPONENT=layout.min_exponent,
        BLOCK_T=BLOCK_T,
    )
    launch = Launch(
        write_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        sizes={"num_tokens": problem["T"], "num_slots": problem["P"] * problem["R"]},
        constexprs={"C": constants},
    )
    return Plan((launch,), {}, ())
