from collections.abc import Hashable

from xmla.core.device import Device
from xmla.core.implementation import Implementation
from xmla.core.indexer import head_rows
from xmla.core.ops.indexer_scores.kernels import indexer_scores_kernel
from xmla.core.plan import Launch, Plan, cdiv
from xmla.core.problem import Problem


def query_and_keys(problem: Problem, q: str = "q", k: str = "k", weights: str = "weights") -> dict[str, Hashable]:
    """Constexprs of every kernel that scores 16-bit keys."""
    specs = problem.specs
    return {
        "Q_STRIDE_T": specs[q].stride(0),
        "Q_STRIDE_I": specs[q].stride(1),
        "K_STRIDE": specs[k].stride(0),
        "WEIGHT_STRIDE": specs[weights].stride(0),
        "HEADS": problem["I"],
        "D": problem["D"],
        "BLOCK_I": head_rows(problem),
    }


def columns(problem: Problem) -> dict[str, Hashable]:
    """Constexprs of every kernel that takes a token's keys from a range, or from indices."""
    return {
        "HAS_ENDS": problem.has("ends"),
        "HAS_STARTS": problem.has("starts"),
        "HAS_INDICES": problem.has("indices"),
        "INDEX_STRIDE": problem.specs["indices"].stride(0) if problem.has("indices") else 0,
    }


def column_sizes(problem: Problem) -> dict[str, int]:
    return {"num_keys": problem["N"], "num_columns": num_columns(problem)}


def num_columns(problem: Problem) -> int:
    return problem["K" if problem.has("indices") else "N"]


def plan(problem: Problem, device: Device) -> Plan:
    block_n = 64
    launch = Launch(
        indexer_scores_kernel,
        grid=(problem["T"] * cdiv(num_columns(problem), block_n),),
        outputs=("scores",),
        arrays=problem.stand_ins(ends="q", starts="q", indices="q"),
        sizes=column_sizes(problem),
        constexprs={**query_and_keys(problem), **columns(problem), "BLOCK_N": block_n},
    )
    return Plan((launch,), problem.results, ("scores",))


IMPLEMENTATION = Implementation("triton", plan)
