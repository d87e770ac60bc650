from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.ops.indexer.quantize_indexer_query.kernels import quantize_indexer_query_kernel
from xmla.core.plan import Constants, Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedQuery(Constants):
    """Constants of the kernel."""

    Q_STRIDE_T: int
    Q_STRIDE_I: int
    WEIGHT_STRIDE: int
    HEADS: int
    D: int
    SCALE: float
    MXFP4: bool
    MIN_EXPONENT: int
    BLOCK: int  # heads of a program
    OVERLAP_LIMIT: int  # core/lang/launches.py


def plan(problem: Problem, device: Device) -> Plan:
    q = problem.specs["q"]
    scale = problem.attrs.scale
    layout = IndexerLayout(problem["D"], problem.attrs.format)
    rows = problem["T"] * problem["I"]
    constants = QuantizedQuery(
        Q_STRIDE_T=q.stride(0),
        Q_STRIDE_I=q.stride(1),
        WEIGHT_STRIDE=problem.specs["weights"].stride(0),
        HEADS=problem["I"],
        D=problem["D"],
        SCALE=float(scale) if scale is not None else max(problem["D"] * problem["I"], 1) ** -0.5,
        MXFP4=layout.format == "mxfp4",
        MIN_EXPONENT=layout.min_exponent,
        BLOCK=BLOCK,
        OVERLAP_LIMIT=device.overlap_limit,
    )
    launch = Launch(
        quantize_indexer_query_kernel,
        grid=(cdiv(rows, BLOCK),),
        outputs=("q8", "folded_weights"),
        sizes={"num_rows": rows},
        constexprs={"C": constants},
    )
    return Plan((launch,), problem.results, ("q8", "folded_weights"))
