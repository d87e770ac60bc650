"""Selections whose members are blocks of adjacent columns: the granularity of a selection, on the host.

Device code that their kernels share is in `xmla.core.lang.blocks`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from xmla.core.call import INDEX, Problem, Tensor, Work, all_but_pools_once
from xmla.core.lang.blocks import GRANULARITIES
from xmla.core.ops.indexer.shared import capacity_of
from xmla.core.plan import Parts, Plan, fewest_of_a_part

BLOCKS = Tensor("T BLOCKS", INDEX)  # the selected blocks of each token


def check_granularity(problem: Problem) -> None:
    if problem.attrs.granularity not in GRANULARITIES:
        problem.refuse("granularity", "value", problem.attrs.granularity, "a power of two, at most 128")


def check_newest(problem: Problem) -> None:
    """Rules of a selection of blocks: its size, its granularity and the blocks that are always in it."""
    k, newest = problem.attrs.k, problem.attrs.newest
    problem.require_count("k")
    check_granularity(problem)
    if not 0 <= newest <= k:
        problem.refuse("newest", "value", newest, f"at least 0 and at most k = {k}")


def entries_of(problem: Problem) -> int:
    """Columns of a row over selected blocks: all entries of all of them."""
    return problem["BLOCKS"] * problem.attrs.granularity


def block_logits_work(problem: Problem, keys: float | None) -> Work:
    """The scores, and every logit and other array once."""
    logits = problem["T"] * min(entries_of(problem), keys or capacity_of(problem)) * problem.results["logits"].itemsize
    return block_scoring_work(problem, keys) + Work(logits + problem.bytes_besides_pools)


def block_scoring_work(problem: Problem, keys: float | None) -> Work:
    """The keys in tokens' blocks read once, and their products."""
    pool, capacity = problem.specs["cache" if problem.has("cache") else "keys"], keys or capacity_of(problem)
    scores = problem["T"] * min(entries_of(problem), capacity)
    read = min(scores, capacity * (problem["B"] if problem.has("block_table") else 1)) * pool.shape[-1] * pool.itemsize
    return Work(read, fp8_flops=2.0 * scores * problem["I"] * problem["D"])


def block_selection_work(problem: Problem, keys: float | None) -> Work:
    """The scores, and every other array once."""
    return block_scoring_work(problem, keys) + all_but_pools_once(problem)


def selection_attributes(problem: Problem) -> dict[str, Any]:
    """The attributes of a selection of blocks."""
    return {name: getattr(problem.attrs, name) for name in ("k", "granularity", "newest")}


def refuse_workspace(problem: Problem, part: Callable[[int], Plan], together: int, whole: tuple[str, ...]) -> NoReturn:
    """Refuse a workspace without room for parts of a multiple of `together` tokens; arguments as of `in_parts`."""
    needed = Parts.of(problem, part, fewest_of_a_part(problem["T"], together), whole).workspace_bytes
    given = problem.attrs.workspace_bytes
    problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")


def expanded_columns(problem: Problem) -> int:
    """Columns of a row of positions: those of the blocks and, with the attribute `tail`, of an incomplete one."""
    return entries_of(problem) + (problem.attrs.granularity - 1 if problem.attrs.tail else 0)
