from xmla.core.device import Device
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.ops.quantize_indexer_query.kernels import quantize_indexer_query_kernel
from xmla.core.plan import Launch, Plan, cdiv
from xmla.core.problem import Problem

BLOCK = 32


def plan(problem: Problem, device: Device) -> Plan:
    q = problem.specs["q"]
    scale = problem.attrs.scale
    layout = IndexerLayout(problem["D"], problem.attrs.format)
    rows = problem["T"] * problem["I"]
    launch = Launch(
        quantize_indexer_query_kernel,
        grid=(cdiv(rows, BLOCK),),
        outputs=("q8", "folded_weights"),
        sizes={"num_rows": rows},
        constexprs={
            "Q_STRIDE_T": q.stride(0),
            "Q_STRIDE_I": q.stride(1),
            "WEIGHT_STRIDE": problem.specs["weights"].stride(0),
            "HEADS": problem["I"],
            "D": problem["D"],
            "SCALE": float(scale) if scale is not None else max(problem["D"] * problem["I"], 1) ** -0.5,
            "MXFP4": layout.format == "mxfp4",
            "MIN_EXPONENT": layout.min_exponent,
            "BLOCK": BLOCK,
            "OVERLAP_LIMIT": device.overlap_limit,
        },
    )
    return Plan((launch,), problem.results, ("q8", "folded_weights"))
