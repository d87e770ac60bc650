from collections.abc import Hashable

from xmla.core.device import Device
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.ops.compress_kv.kernels import compress_entries_kernel, keep_states_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.problem import Problem
from xmla.core.requests import tokens_a_request

POOLED = 8192  # elements of the window that a program holds at once: scores and values take 64 registers of 256 threads


def plan(problem: Problem, device: Device) -> Plan:
    sizes = {"num_angles": problem["S"]}
    constexprs: dict[str, Hashable] = {"E": problem["E"], "EPS": float(problem.attrs.eps)}
    layout = problem.formats["cache"]
    if isinstance(layout, IndexerLayout):
        return compress(problem, {}, layout.min_exponent, 4, sizes, constexprs)
    return compress(problem, {}, layout.min_exponent(problem.attrs.scale_floor), 8, sizes, constexprs)


def compress(
    problem: Problem, arrays: dict[str, str], min_exponent: int, num_warps: int, sizes: dict[str, int],
    constexprs: dict[str, Hashable],
) -> Plan:  # fmt: skip
    """The plan that keeps states, then writes entries: `arrays` as in `Launch`, `sizes` and `constexprs` of entries."""
    specs = problem.specs
    kv, score = (specs[arrays.get(name, name)] for name in ("kv", "score"))
    dim, width, ratio = problem["D"], kv.shape[1], problem["r"]
    ids = problem.stand_ins(request_ids="positions")
    shared = {
        "num_requests": problem["B"],
        "next_n": tokens_a_request(problem),
        "state_stride": specs["state_table"].stride(0),
        "state_width": problem["STATE_M"],
        "state_pages": problem["STATE_P"] if problem["STATE_R"] else 0,
    }
    keep = Launch(
        keep_states_kernel,
        grid=(problem["T"],),
        arrays=ids | {name: array for name, array in arrays.items() if name in ("kv", "score")},
        sizes=shared,
        constexprs={
            "KV_STRIDE": kv.stride(0),
            "SCORE_STRIDE": score.stride(0),
            "APE_STRIDE": specs["ape"].stride(0),
            "PAGE_STRIDE": specs["state"].stride(0),
            "PAGE_SIZE": problem.page_size("state"),
            "RATIO": ratio,
            "WIDTH": width,
            "HAS_REQUEST_IDS": problem.has("request_ids"),
        },
    )
    write = Launch(
        compress_entries_kernel,
        grid=(problem["T"],),
        arrays=ids | {name: array for name, array in arrays.items() if name in ("norm_weight", "cos_sin")},
        sizes={
            **shared,
            "table_stride": specs["block_table"].stride(0),
            "table_width": problem["M"],
            "num_pages": problem["P"] if problem["R"] else 0,
            **sizes,
        },
        constexprs={
            "ANGLE_STRIDE": specs["cos_sin"].stride(0) if problem.has("cos_sin") else 0,
            "STATE_PAGE_STRIDE": specs["state"].stride(0),
            "STATE_PAGE_SIZE": problem.page_size("state"),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem.page_size(),
            "RATIO": ratio,
            "SERIES": width // dim,
            "D": dim,
            "HAS_NORM": problem.has("norm_weight"),
            **constexprs,
            "LAYOUT": problem.formats["cache"],
            "MIN_EXPONENT": min_exponent,
            "HAS_REQUEST_IDS": problem.has("request_ids"),
            "BLOCK_W": min(next_power_of_2(width // dim * ratio), POOLED // dim),
        },
        num_warps=num_warps,
    )
    return Plan((keep, write), {}, ())
