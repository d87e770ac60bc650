from xmla.core.device import Device
from xmla.core.layout import IndexerLayout, indexer_pairs
from xmla.core.op import Problem
from xmla.core.ops.convert_indexer_cache.kernels import convert_indexer_cache_kernel
from xmla.core.plan import Launch, Plan, cdiv

BLOCK_T = 16


def pairs_of(problem: Problem) -> list[tuple[IndexerLayout, IndexerLayout]]:
    """The layouts of source and cache that rows and attributes allow."""
    attrs = problem.attrs
    return indexer_pairs(problem["SOURCE_ROW"], problem["ROW"], attrs["source_format"], attrs["cache_format"])


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    ((origin, layout),) = pairs_of(problem)
    launch = Launch(
        convert_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        inputs=("source", "source_slots", "slots", "cache"),
        sizes=(problem["T"], problem["SOURCE_P"] * problem["SOURCE_R"], problem["P"] * problem["R"]),
        outputs=(),
        constexprs=(
            ("SOURCE_SLOT_STRIDE", specs["source_slots"].stride(0)),
            ("SOURCE_PAGE_STRIDE", specs["source"].stride(0)),
            ("SOURCE_PAGE_SIZE", problem["SOURCE_R"]),
            ("SOURCE_MXFP4", origin.format == "mxfp4"),
            ("SLOT_STRIDE", specs["slots"].stride(0)),
            ("PAGE_STRIDE", specs["cache"].stride(0)),
            ("PAGE_SIZE", problem["R"]),
            ("MXFP4", layout.format == "mxfp4"),
            ("D", layout.dim),
            ("MIN_EXPONENT", layout.min_exponent),
            ("BLOCK_T", BLOCK_T),
        ),
    )
    return Plan((launch,), {}, ())
