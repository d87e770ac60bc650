from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.formats.mla import MlaLayout
from xmla.core.ops.cache.write_mla_cache.kernels import write_mla_cache_kernel
from xmla.core.plan import Constants, Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries(Constants):
    """Constants of the kernel."""

    LATENT_STRIDE: int
    ROPE_STRIDE: int
    SLOT_STRIDE: int
    PAGE_STRIDE: int
    PAGE_SIZE: int
    LAYOUT: MlaLayout
    MIN_EXPONENT: int
    BLOCK_T: int  # tokens of a program


def plan(problem: Problem, device: Device) -> Plan:
    specs, layout = problem.specs, problem.formats["cache"]
    constants = Entries(
        LATENT_STRIDE=specs["latent"].stride(0),
        ROPE_STRIDE=specs["rope"].stride(0),
        SLOT_STRIDE=specs["slots"].stride(0),
        PAGE_STRIDE=specs["cache"].stride(0),
        PAGE_SIZE=problem.page_size(),
        LAYOUT=layout,
        MIN_EXPONENT=layout.min_exponent(problem.attrs.scale_floor),
        BLOCK_T=BLOCK_T,
    )
    launch = Launch(
        write_mla_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        sizes={"num_tokens": problem["T"], "num_slots": problem["P"] * problem["R"]},
        constexprs={"C": constants},
    )
    return Plan((launch,), {}, ())
