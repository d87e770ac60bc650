from dataclasses import dataclass
from typing import Any

from xmla.core.call import Problem, tokens_a_request
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import MlaLayout
from xmla.core.ops.cache.compress_kv.kernels import (
    begin_entries_kernel,
    compress_entries_kernel,
    compress_parts_kernel,
    keep_states_kernel,
)
from xmla.core.plan import Constants, Launch, Plan, most_registers, overlap_limit
from xmla.core.values import Device, Spec, cdiv, next_power_of_2

POOLED = 8192  # elements of the window that a program holds at once: scores and values take 64 registers of 256 threads
LEAST_DIMS = 32  # of a part: whole lines
ROWS = 1024  # tokens whose entries several programs may pool: 2 MB of workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class States(Constants):
    """Constants of the launch that keeps states."""

    KV_STRIDE: int
    SCORE_STRIDE: int
    APE_STRIDE: int
    PAGE_STRIDE: int
    PAGE_SIZE: int
    RATIO: int
    WIDTH: int
    HAS_REQUEST_IDS: bool
    OVERLAP_LIMIT: int  # core/lang/launches.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries(Constants):
    """Constants of the launch that writes entries."""

    ANGLE_STRIDE: int
    STATE_PAGE_STRIDE: int
    STATE_PAGE_SIZE: int
    PAGE_STRIDE: int
    PAGE_SIZE: int
    RATIO: int
    SERIES: int  # C
    D: int
    E: int
    HADAMARD: bool
    HAS_NORM: bool
    EPS: float
    LAYOUT: MlaLayout | IndexerLayout
    MIN_EXPONENT: int
    HAS_REQUEST_IDS: bool
    OVERLAP_LIMIT: int
    BLOCK_W: int  # positions at once
    BLOCK_D: int  # dims at once


def plan(problem: Problem, device: Device) -> Plan:
    sizes = {"num_angles": problem["S"]}
    constants: dict[str, Any] = {"E": problem["E"], "EPS": float(problem.attrs.eps), "HADAMARD": problem.attrs.hadamard}
    layout = problem.formats["cache"]
    if isinstance(layout, IndexerLayout):
        return compress(problem, device, {}, layout.min_exponent, 4, sizes, constants)
    return compress(problem, device, {}, layout.min_exponent(problem.attrs.scale_floor), 8, sizes, constants)


def compress(
    problem: Problem, device: Device, arrays: dict[str, str], min_exponent: int, num_warps: int, sizes: dict[str, int],
    constants: dict[str, Any],
) -> Plan:  # fmt: skip
    """The plan that keeps states, then writes entries: `arrays` as in `Launch`, `sizes` and `constants` of entries."""
    specs = problem.specs
    kv, score = (specs[arrays.get(name, name)] for name in ("kv", "score"))
    tokens, dim, width, ratio = problem["T"], problem["D"], kv.shape[1], problem["r"]
    window = next_power_of_2(width // dim * ratio)
    dims = min(dim, max(POOLED // window, LEAST_DIMS))
    rows = max(min(tokens, ROWS), 1)
    ids = problem.stand_ins(request_ids="positions")
    shared = {
        "num_requests": problem["B"],
        "next_n": tokens_a_request(problem),
        "state_stride": specs["state_table"].stride(0),
        "state_width": problem["STATE_M"],
        "state_pages": problem["STATE_P"] if problem["STATE_R"] else 0,
    }
    states = States(
        KV_STRIDE=kv.stride(0),
        SCORE_STRIDE=score.stride(0),
        APE_STRIDE=specs["ape"].stride(0),
        PAGE_STRIDE=specs["state"].stride(0),
        PAGE_SIZE=problem.page_size("state"),
        RATIO=ratio,
        WIDTH=width,
        HAS_REQUEST_IDS=problem.has("request_ids"),
        OVERLAP_LIMIT=device.overlap_limit,
    )
    entries = Entries(
        ANGLE_STRIDE=specs["cos_sin"].stride(0) if problem.has("cos_sin") else 0,
        STATE_PAGE_STRIDE=specs["state"].stride(0),
        STATE_PAGE_SIZE=problem.page_size("state"),
        PAGE_STRIDE=specs["cache"].stride(0),
        PAGE_SIZE=problem.page_size(),
        RATIO=ratio,
        SERIES=width // dim,
        D=dim,
        HAS_NORM=problem.has("norm_weight"),
        LAYOUT=problem.formats["cache"],
        MIN_EXPONENT=min_exponent,
        HAS_REQUEST_IDS=problem.has("request_ids"),
        OVERLAP_LIMIT=overlap_limit(problem, device, "positions", "state_table", "block_table", "request_ids"),
        BLOCK_W=min(window, POOLED // dims),
        BLOCK_D=dims,
        **constants,
    )
    table = {
        **shared,
        "table_stride": specs["block_table"].stride(0),
        "table_width": problem["M"],
        "num_pages": problem["P"] if problem["R"] else 0,
        **sizes,
    }
    to_keep = ids | {name: array for name, array in arrays.items() if name in ("kv", "score")}
    to_write = ids | {name: array for name, array in arrays.items() if name in ("norm_weight", "cos_sin")}
    if dims == dim:
        keep = Launch(keep_states_kernel, grid=(tokens,), arrays=to_keep, sizes=shared, constexprs={"C": states})
        write = Launch(
            compress_entries_kernel,
            grid=(tokens,),
            arrays=to_write,
            sizes=table,
            constexprs={"C": entries},
            num_warps=num_warps,
        )
        return Plan((keep, write), {}, ())
    # Four waves of programs, of which most have nothing to do, since a token completes an entry seldom. Of tokens that
    # share a row the next one's dims take the place of those that one program alone has finished.
    tokens_a_row = max(cdiv(tokens, rows), 1)
    parts = dim // dims if tokens_a_row == 1 else 1
    while parts > 2 and tokens * parts > 8 * device.num_sms:
        parts //= 2
    begin = Launch(
        begin_entries_kernel,
        grid=(tokens,),
        outputs=("counts",),
        arrays=to_keep,
        sizes={**shared, "num_rows": rows},
        constexprs={"C": states},
    )
    write = Launch(
        compress_parts_kernel,
        grid=(cdiv(tokens, tokens_a_row) * parts,),
        outputs=("counts", "pooled"),
        arrays=to_write,
        sizes={**table, "num_tokens": tokens, "chunk": tokens_a_row, "parts": parts},
        constexprs={"C": entries},
        num_warps=num_warps,
        max_registers=most_registers(2 * num_warps),
    )
    return Plan((begin, write), {"counts": Spec((rows,), "int32"), "pooled": Spec((rows, dim), "float32")}, ())
