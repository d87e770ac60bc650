from xmla.core.call import Problem, check_indexer_dim
from xmla.core.ops.indexer.shared import check_heads

MAX_HEADS = 64


def check_scores(problem: Problem, q: str = "q", k: str = "k") -> None:
    """Rules of an indexer's 16-bit queries and keys."""
    check_indexer_dim(problem)
    check_heads(problem, q, MAX_HEADS)
    if problem.specs[k].dtype != problem.specs[q].dtype:
        problem.refuse(k, "dtype", problem.specs[k].dtype, f"{problem.specs[q].dtype}, as {q}")
