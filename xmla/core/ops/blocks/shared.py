"""Selections whose members are blocks of adjacent columns: the granularity of a selection, on the host.

Device code that their kernels share is in `xmla.core.lang.blocks`.
"""

from dataclasses import replace
from typing import Any

from xmla.core.call import Problem, Work
from xmla.core.lang.blocks import GRANULARITIES
from xmla.core.ops.indexer.shared import capacity_of, logit_bytes, logits_work
from xmla.core.values import cdiv


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


def block_logits_work(problem: Problem, keys: int | None) -> list[Work]:
    """The keys in tokens' blocks read once, products, logits written; then the other arguments."""
    capacity, dim = keys or capacity_of(problem), problem["D"]
    logits = problem["T"] * min(entries_of(problem), capacity)
    read = min(logits, capacity * (problem["B"] if problem.has("block_table") else 1)) * (dim + 4)
    written = logit_bytes(problem) * logits
    return [Work(read + written, fp8_flops=2.0 * logits * problem["I"] * dim), Work(problem.bytes_besides_pools)]


def block_selection_work(problem: Problem, keys: int | None) -> list[Work]:
    """The work of the logits, reading them again, and writing the indices."""
    logits, rest = block_logits_work(problem, keys)
    again = 4 * problem["T"] * min(entries_of(problem), keys or capacity_of(problem))
    return [logits, Work(again), Work(rest.bytes + 4 * problem["T"] * problem.attrs.k)]


def largest_logits_work(problem: Problem, keys: int | None) -> list[Work]:
    """The work of the logits, of which each block's largest is written; reading these, and writing the indices."""
    tokens, count = problem["T"], keys or capacity_of(problem)
    logits, rest = logits_work(problem, keys)
    stored, largest = logit_bytes(problem) * tokens * count, 4 * tokens * cdiv(count, problem.attrs.granularity)
    score = replace(logits, bytes=logits.bytes - stored + largest)
    return [score, Work(largest), Work(rest.bytes + 4 * tokens * problem.attrs.k)]


def selection_attributes(problem: Problem) -> dict[str, Any]:
    """The attributes of a selection of blocks."""
    return {name: getattr(problem.attrs, name) for name in ("k", "granularity", "newest")}


def expanded_columns(problem: Problem) -> int:
    """Columns of a row of positions: those of the blocks and, with the attribute `tail`, of an incomplete one."""
    return entries_of(problem) + (problem.attrs.granularity - 1 if problem.attrs.tail else 0)
