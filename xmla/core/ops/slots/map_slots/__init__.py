from collections.abc import Iterator
from typing import Any

from xmla.core.call import INDEX, Arrays, Limit, Problem, Result, Tensor, check_requests, id_limits
from xmla.core.op import Op
from xmla.core.ops.slots.map_slots.cases import CASES
from xmla.core.ops.slots.map_slots.plan import plan
from xmla.core.ops.slots.map_slots.reference import reference
from xmla.core.plan import Implementation


def map_slots(
    indices, block_table, request_ids=None, lengths=None, *, page_size: int, compact: bool = False
) -> Any:  # fmt: skip
    """Map key indices within a request to slots of the paged cache.

        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,     i = indices[t,k]
        slots[t,k] = −1                                                    where i or its page id is not valid

    Args:
        indices: [T, K] int32. An index outside [0, M · page_size) gives −1 in its place: −1 may stand anywhere in a
            row.
        block_table: [B, M] int32, page ids. The slots on a page are −1 if its id is negative or its slots pass 2**31.
            Only page ids that an index refers to are read.
        request_ids: [T] int32, each token's row of block_table; an id outside [0, B) makes the row −1. Without it T is
            a multiple of B and every request has T / B adjacent tokens.
        lengths: [T] int32, keys visible to each token. An index at or past its token's length gives −1; without it
            every page of the table counts.
        page_size: R, entries per page.
        compact: List the valid slots of a row first, in their order.

    Returns:
        slots: [T, K] int32.
        counts: [T] int32, valid slots per row. `sparse_mla` takes them as lengths if the valid slots come first: with
            `compact`, or if they come first in `indices`.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; page_size < 1; T is not a multiple of B.

    Example:
        >>> block_table = xp.asarray([[7, 3]], dtype=xp.int32)
        >>> indices = xp.asarray([[0, 5, -1]], dtype=xp.int32)
        >>> slots, counts = ops.map_slots(indices, block_table, page_size=4)
        >>> slots.tolist(), counts.tolist()
        ([[28, 13, -1]], [2])
    """


def check(problem: Problem) -> None:
    check_requests(problem, "indices")
    problem.require_count("page_size")


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    capacity = problem["M"] * problem.attrs.page_size
    yield Limit("indices", -1, capacity - 1)
    yield from id_limits(problem, arrays)
    if "lengths" in arrays:
        yield Limit("lengths", 0, capacity)


OP = Op(
    prototype=map_slots,
    tensors={
        "indices": Tensor("T K", INDEX),
        "block_table": Tensor("B M", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
        "lengths": Tensor("T", INDEX),
    },
    outputs={"slots": Result("T K", "int32"), "counts": Result("T", "int32")},
    check=check,
    limits=limits,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
