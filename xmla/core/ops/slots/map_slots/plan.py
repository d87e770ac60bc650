from dataclasses import dataclass

from xmla.core.call import Problem, tokens_a_request
from xmla.core.ops.slots.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Constants, Launch, Plan
from xmla.core.values import Device

BLOCKS = (128, 512, 2048)  # indices of a step; few, since each is a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping(Constants):
    """Constants of a kernel that maps rows of indices."""

    PAGE_SIZE: int
    HAS_REQUEST_IDS: bool
    HAS_LENGTHS: bool
    COMPACT: bool
    BLOCK_K: int  # indices of a step
    ONE_STEP: bool  # K ≤ BLOCK_K


def plan(problem: Problem, device: Device) -> Plan:
    indices, keys = problem.specs["indices"], problem["K"]
    block = next((block for block in BLOCKS if keys <= block), BLOCKS[-1])
    launch = Launch(
        map_slots_kernel,
        grid=(problem["T"],),
        outputs=("slots", "counts"),
        arrays=problem.stand_ins(request_ids="indices", lengths="indices"),
        sizes={
            "num_keys": keys,
            "index_stride": indices.stride(0),
            "num_requests": problem["B"],
            "table_stride": problem.specs["block_table"].stride(0),
            "table_width": problem["M"],
            "next_n": tokens_a_request(problem),
        },
        constexprs={
            "UNIT": indices.vector(keys, indices.stride(0)),
            "MAPPING": Mapping(
                PAGE_SIZE=problem.attrs.page_size,
                HAS_REQUEST_IDS=problem.has("request_ids"),
                HAS_LENGTHS=problem.has("lengths"),
                COMPACT=problem.attrs.compact,
                BLOCK_K=block,
                ONE_STEP=keys <= block,
            ),
            "OVERLAP_LIMIT": device.overlap_limit,
        },
    )
    return Plan((launch,), problem.results, ("slots", "counts"))
