from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xmla.core.checks import Limit
from xmla.core.op import INDEX, Op, Problem, Tensor
from xmla.core.ops.indexer_logits_paged import check_requests
from xmla.core.ops.window_slots.cases import CASES
from xmla.core.ops.window_slots.plan import plan
from xmla.core.ops.window_slots.reference import reference
from xmla.core.spec import Spec


def window_slots(block_table, lengths, request_ids=None, *, window: int, page_size: int, ratio: int = 1) -> Any:
    """Slots of the last `window` entries that each token sees, ascending by position.

        n[t]       = min(max(lengths[t], 0) // ratio, M · page_size)                entries that token t sees
        counts[t]  = min(n[t], window)
        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,  i = n[t] − counts[t] + k
        slots[t,k] = −1                                              for k ≥ counts[t], or where the page id is invalid

    DeepSeek-V4's sliding window is ratio=1, window=128; the entries of its ratio-128 layers, all of which are visible,
    are ratio=128 with a window of at least the most entries. Those that its indexer picks come from `map_slots`.

    Args:
        block_table: [B, M] int32, page ids of a cache with one entry every `ratio` tokens. A negative id, or one whose
            slots pass 2**31, makes its entries −1. Pages before and after a token's window are never read.
        lengths: [T] int32, tokens visible to each, itself included; clamped to the table's capacity, negative is none.
        request_ids: [T] int32, each token's row of block_table; outside [0, B) the token sees nothing. Without it T is
            a multiple of B and every request has T / B adjacent tokens.
        window: The most entries a token attends to.
        page_size: R, entries a page.
        ratio: Tokens an entry stands for; one that is not complete at the token is not visible.

    Returns:
        slots: [T, window] int32.
        counts: [T] int32, the leading slots of a row that count: `sparse_mla` takes them as lengths.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; an attribute is < 1; T is not a multiple of B.
    """


def check(problem: Problem) -> None:
    check_requests(problem, "lengths")
    for name in ("window", "page_size", "ratio"):
        if problem.attrs[name] < 1:
            problem.refuse(name, "value", problem.attrs[name], "at least 1")


def limits(problem: Problem, arrays: Mapping[str, np.ndarray]) -> Iterator[Limit]:
    # The last tokens of a table's capacity may belong to an entry that is not complete.
    most = (problem["M"] * problem.attrs["page_size"] + 1) * problem.attrs["ratio"] - 1
    yield Limit("lengths", 0, most)
    if "request_ids" in arrays:
        yield Limit("request_ids", -1, problem["B"] - 1)


OP = Op(
    prototype=window_slots,
    tensors={
        "block_table": Tensor("B M", INDEX),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={
        "slots": lambda p: Spec((p["T"], p.attrs["window"]), "int32"),
        "counts": lambda p: Spec((p["T"],), "int32"),
    },
    check=check,
    limits=limits,
    plan=plan,
    reference=reference,
    cases=CASES,
)
