from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xmla.core.checks import Limit
from xmla.core.op import INDEX, Op, Problem, Tensor
from xmla.core.ops.indexer_logits_paged import check_requests
from xmla.core.ops.map_slots.cases import CASES
from xmla.core.ops.map_slots.plan import plan
from xmla.core.ops.map_slots.reference import reference
from xmla.core.spec import Spec


def map_slots(indices, block_table, request_ids=None, *, page_size: int, compact: bool = False) -> Any:
    """Request-local key indices to slots of the paged cache.

        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,     i = indices[t,k]
        slots[t,k] = −1                                                    where i or its page id is not valid

    Args:
        indices: [T, K] int32. An index outside [0, M · page_size) becomes −1, in place: −1 may stand anywhere in a row.
        block_table: [B, M] int32, page ids; a negative id, or one whose slots pass 2**31, makes its
            entries −1. Other entries are never read.
        request_ids: [T] int32, each token's row of block_table; outside [0, B) the row becomes −1. Without it T is a
            multiple of B and every request has T / B adjacent tokens.
        page_size: R, entries a page.
        compact: List the valid slots of a row first, in their order.

    Returns:
        slots: [T, K] int32.
        counts: [T] int32, valid slots a row: a length for `sparse_mla` where the valid ones come first, with `compact`
            and wherever they do in `indices`.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; page_size < 1; T is not a multiple of B.
    """


def check(problem: Problem) -> None:
    check_requests(problem, "indices")
    if problem.attrs["page_size"] < 1:
        problem.refuse("page_size", "value", problem.attrs["page_size"], "at least 1")


def limits(problem: Problem, arrays: Mapping[str, np.ndarray]) -> Iterator[Limit]:
    table, size = arrays["block_table"], problem.attrs["page_size"]
    yield Limit("indices", -1, table.shape[1] * size - 1)
    if "request_ids" in arrays:
        yield Limit("request_ids", -1, len(table) - 1)


OP = Op(
    prototype=map_slots,
    tensors={
        "indices": Tensor("T K", INDEX),
        "block_table": Tensor("B M", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={"slots": lambda p: Spec((p["T"], p["K"]), "int32"), "counts": lambda p: Spec((p["T"],), "int32")},
    check=check,
    limits=limits,
    plan=plan,
    reference=reference,
    cases=CASES,
)
