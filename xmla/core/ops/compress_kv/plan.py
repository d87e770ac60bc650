from xmla.core.device import Device
from xmla.core.layout import IndexerLayout, MlaLayout, indexer_layouts, mla_layout
from xmla.core.op import BYTES, Problem
from xmla.core.ops.compress_kv.kernels import compress_entries_kernel, keep_states_kernel
from xmla.core.ops.write_indexer_cache import INDEXER_DIMS, check_indexer_pages, check_indexer_row
from xmla.core.plan import Launch, Plan, next_power_of_2

POOLED = 8192  # elements of the window that a program holds at once: 64 registers of 256 threads, scores and values


def entry_layout(problem: Problem) -> MlaLayout | IndexerLayout:
    """How the entries of `cache` are stored: by D, then by ROW and `cache_format`."""
    if problem["D"] == 512:
        layout = mla_layout(problem)
        if layout.dims != 512:
            problem.refuse("cache", "dims an entry", f"{layout.dims} ({layout.name!r})", "512, as norm_weight")
        return layout
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse("norm_weight", "axis D (axis 0)", problem["D"], "512, 128, 64 or 32")
    if problem.specs["cache"].dtype not in BYTES:
        problem.refuse("cache", "dtype", problem.specs["cache"].dtype, " or ".join(BYTES))
    check_indexer_row(problem, "cache", "ROW")
    if problem.attrs["cache_format"] is not None:
        problem.refuse("cache_format", "value", repr(problem.attrs["cache_format"]), f"None with D = {problem['D']}")
    check_indexer_pages(problem)
    (layout,) = indexer_layouts(problem["ROW"], problem["D"])
    return layout


def plan(problem: Problem, device: Device) -> Plan:
    specs, attrs = problem.specs, problem.attrs
    layout = entry_layout(problem)
    if isinstance(layout, IndexerLayout):
        min_exponent, num_warps = layout.min_exponent, 4
    else:
        min_exponent, num_warps = layout.min_exponent(attrs["scale_floor"]), 8
    dim, width, ratio = problem["D"], problem["C·D"], problem["r"]
    window = width // dim * ratio
    ids = problem.has("request_ids")
    request_ids = problem.either("request_ids", "positions")
    requests = (problem["B"], problem.tokens_a_request)
    state_table = (specs["state_table"].stride(0), problem["STATE_M"], problem["STATE_P"])
    keep = Launch(
        keep_states_kernel,
        grid=(problem["T"],),
        inputs=("kv", "score", "ape", "positions", "state_table", request_ids, "state"),
        sizes=(*requests, *state_table),
        outputs=(),
        constexprs=(
            ("KV_STRIDE", specs["kv"].stride(0)),
            ("SCORE_STRIDE", specs["score"].stride(0)),
            ("APE_STRIDE", specs["ape"].stride(0)),
            ("PAGE_STRIDE", specs["state"].stride(0)),
            ("PAGE_SIZE", problem["STATE_R"]),
            ("RATIO", ratio),
            ("WIDTH", width),
            ("HAS_REQUEST_IDS", ids),
        ),
    )
    compress = Launch(
        compress_entries_kernel,
        grid=(problem["T"],),
        inputs=(
            "norm_weight", "cos_sin", "positions", "state", "state_table", "block_table", request_ids, "cache",
        ),
        sizes=(
            *requests, *state_table, specs["block_table"].stride(0), problem["M"], problem["P"], problem["S"],
        ),
        outputs=(),
        constexprs=(
            ("ANGLE_STRIDE", specs["cos_sin"].stride(0)),
            ("STATE_PAGE_STRIDE", specs["state"].stride(0)),
            ("STATE_PAGE_SIZE", problem["STATE_R"]),
            ("PAGE_STRIDE", specs["cache"].stride(0)),
            ("PAGE_SIZE", problem["R"]),
            ("RATIO", ratio),
            ("SERIES", width // dim),
            ("D", dim),
            ("E", problem["E"]),
            ("EPS", float(attrs["eps"])),
            ("LAYOUT", layout),
            ("MIN_EXPONENT", min_exponent),
            ("HAS_REQUEST_IDS", ids),
            ("BLOCK_W", min(next_power_of_2(window), POOLED // dim)),
        ),
        num_warps=num_warps,
    )  # fmt: skip
    return Plan((keep, compress), {}, ())
