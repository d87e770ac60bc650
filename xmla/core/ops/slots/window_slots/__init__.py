from collections.abc import Iterator
from typing import Any

from xmla.core.call import INDEX, Arrays, Limit, Problem, Result, Tensor, check_requests, id_limits
from xmla.core.op import Op
from xmla.core.ops.slots.window_slots.cases import CASES
from xmla.core.ops.slots.window_slots.plan import plan
from xmla.core.ops.slots.window_slots.reference import reference
from xmla.core.plan import Implementation


def window_slots(block_table, lengths, request_ids=None, *, window: int, page_size: int, ratio: int = 1) -> Any:
    """The slots of the last `window` entries visible to each token, ascending by position.

        n[t]       = min(max(lengths[t], 0) // ratio, M · page_size)                entries visible to token t
        counts[t]  = min(n[t], window)
        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,  i = n[t] − counts[t] + k
        slots[t,k] = −1                                              for k ≥ counts[t], or where the page id is invalid

    DeepSeek-V4's sliding window is ratio=1, window=128. Its ratio-128 layers attend to all visible entries: ratio=128
    and a window of at least the most entries. The entries that its indexer selects are mapped by `map_slots`.

    Args:
        block_table: [B, M] int32, page ids of a cache with one entry every `ratio` tokens. The slots on a page are −1
            if its id is negative or its slots pass 2**31. Page ids before and after a token's window are never read.
        lengths: [T] int32, tokens visible to each token, itself included, clamped to the table's capacity; a negative
            length counts as 0.
        request_ids: [T] int32, each token's row of block_table; with an id outside [0, B) the token sees nothing.
            Without it T is a multiple of B and every request has T / B adjacent tokens.
        window: The most entries that a token attends to.
        page_size: R, entries per page.
        ratio: Tokens that an entry stands for; an entry that is not complete at the token is not visible.

    Returns:
        slots: [T, window] int32.
        counts: [T] int32, the length of the used prefix of each row: `sparse_mla` takes it as lengths.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; an attribute is < 1; T is not a multiple of B.

    Example:
        >>> block_table, lengths = xp.asarray([[7, 3]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> slots, counts = ops.window_slots(block_table, lengths, window=2, page_size=4)
        >>> slots.tolist(), counts.tolist()
        ([[31, 12]], [2])
    """


def check(problem: Problem) -> None:
    check_requests(problem, "lengths")
    for name in ("window", "page_size", "ratio"):
        problem.require_count(name)


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    # The last tokens of a table's capacity may belong to an entry that is not complete.
    most = (problem["M"] * problem.attrs.page_size + 1) * problem.attrs.ratio - 1
    yield Limit("lengths", 0, most)
    yield from id_limits(problem, arrays)


OP = Op(
    prototype=window_slots,
    tensors={
        "block_table": Tensor("B M", INDEX),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={
        "slots": Result("T WINDOW", "int32", sizes={"WINDOW": lambda p: p.attrs.window}),
        "counts": Result("T", "int32"),
    },
    check=check,
    limits=limits,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
