from xmla.core.caches import check_indexer_dim
from xmla.core.problem import Problem

MAX_HEADS = 64


def check_scores(problem: Problem, q: str = "q", k: str = "k") -> None:
    """Rules of an indexer's 16-bit queries and keys."""
    check_indexer_dim(problem)
    if problem["I"] > MAX_HEADS:
        problem.unsupported(q, "axis I (axis 1)", problem["I"], f"at most {MAX_HEADS} indexer heads")
    if problem.specs[k].dtype != problem.specs[q].dtype:
        problem.refuse(k, "dtype", problem.specs[k].dtype, f"{problem.specs[q].dtype}, as {q}")
