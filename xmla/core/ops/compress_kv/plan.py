from xmla.core.device import Device
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Problem
from xmla.core.ops.compress_kv.kernels import compress_entries_kernel, keep_states_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.requests import tokens_a_request

POOLED = 8192  # elements of the window that a program holds at once: scores and values take 64 registers of 256 threads


def plan(problem: Problem, device: Device) -> Plan:
    specs, attrs = problem.specs, problem.attrs
    layout = problem.formats["cache"]
    if isinstance(layout, IndexerLayout):
        min_exponent, num_warps = layout.min_exponent, 4
    else:
        min_exponent, num_warps = layout.min_exponent(attrs["scale_floor"]), 8
    dim, width, ratio = problem["D"], problem["C·D"], problem["r"]
    arrays = problem.stand_ins(request_ids="positions")
    # Pages without entries hold nothing, as if there were none, and kernels divide by the size of a page.
    state_size, page_size = (max(problem[axis], 1) for axis in ("STATE_R", "R"))
    sizes = {
        "num_requests": problem["B"],
        "next_n": tokens_a_request(problem),
        "state_stride": specs["state_table"].stride(0),
        "state_width": problem["STATE_M"],
        "state_pages": problem["STATE_P"] if problem["STATE_R"] else 0,
    }
    keep = Launch(
        keep_states_kernel,
        grid=(problem["T"],),
        arrays=arrays,
        sizes=sizes,
        constexprs={
            "KV_STRIDE": specs["kv"].stride(0),
            "SCORE_STRIDE": specs["score"].stride(0),
            "APE_STRIDE": specs["ape"].stride(0),
            "PAGE_STRIDE": specs["state"].stride(0),
            "PAGE_SIZE": state_size,
            "RATIO": ratio,
            "WIDTH": width,
            "HAS_REQUEST_IDS": problem.has("request_ids"),
        },
    )
    compress = Launch(
        compress_entries_kernel,
        grid=(problem["T"],),
        arrays=arrays,
        sizes={
            **sizes,
            "table_stride": specs["block_table"].stride(0),
            "table_width": problem["M"],
            "num_pages": problem["P"] if problem["R"] else 0,
            "num_angles": problem["S"],
        },
        constexprs={
            "ANGLE_STRIDE": specs["cos_sin"].stride(0),
            "STATE_PAGE_STRIDE": specs["state"].stride(0),
            "STATE_PAGE_SIZE": state_size,
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": page_size,
            "RATIO": ratio,
            "SERIES": width // dim,
            "D": dim,
            "E": problem["E"],
            "EPS": float(attrs["eps"]),
            "LAYOUT": layout,
            "MIN_EXPONENT": min_exponent,
            "HAS_REQUEST_IDS": problem.has("request_ids"),
            "BLOCK_W": min(next_power_of_2(width // dim * ratio), POOLED // dim),
        },
        num_warps=num_warps,
    )
    return Plan((keep, compress), {}, ())
