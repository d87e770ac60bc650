from collections.abc import Iterator
from typing import Any

from xmla.core.call import INDEX, Arrays, Limit, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.slots.resolve_slots.cases import CASES
from xmla.core.ops.slots.resolve_slots.plan import plan
from xmla.core.ops.slots.resolve_slots.reference import reference
from xmla.core.plan import Implementation


def resolve_slots(indices, held, slots, *, num_entries: int) -> Any:
    """Find selected entries in a pool that holds a part of a cache, and give those that it lacks a place in it.

    Of a cache that lies elsewhere, as in the host's memory, each request has PLACES entries in a pool of the device.
    Its places stand in a list, the one named least recently first: place j holds entry held[b, j] in slot slots[b, j].
    Of one call, for each request:

        named     the entries of its columns that lie in [0, num_entries), each once, by their first columns
        missing   the named ones that no place holds
        free      the places whose entry is not named; the first of them get the missing entries, in order
        selected  the slot of each column's entry, −1 of a column that names none
        the list  the free places that are left, those just given, those that held a named entry; each part in its order

    So what is given up was named least recently, and nothing that this call names is. A place that is given holds its
    entry once the caller has copied it, before anything reads the slot: for each i < counts[b] entry missing[b, i] into
    slot destinations[b, i]. An entry that this step makes is named, too, in a column of its own, and written to the
    slot that it gets.

    Args:
        indices: [T, K] int32, selected entries of each token's request; −1 may stand anywhere. T is a multiple of B
            and every request has T / B adjacent tokens, which share its places. An entry may stand for a block of a
            cache, if a slot holds one.
        held: [B, PLACES] int32, the entry in each place, −1 of an empty one. PLACES is at least T / B · K, so that
            there is always room. Of several places that hold an entry the last counts. Updated in place.
        slots: [B, PLACES] int32, the slot of each place, in the same order: any numbers. Updated in place. A request
            begins with its slots in any order, and with held = −1.
        num_entries: Entries that a request can name.

    Returns:
        selected: [T, K] int32, slots, as `sparse_mla` takes them.
        missing: [B, T / B · K] int32, the entries to copy, −1 after them. `map_slots` maps them to slots of the cache.
        destinations: [B, T / B · K] int32, the slots to copy them to, −1 after them.
        counts: [B] int32, entries to copy.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; PLACES is less than T / B · K;
            num_entries < 1; held and slots share memory that is updated.

    The call's workspace has num_entries words for each request and three for each place. One program serves a request:
    calls of many columns take their time. Nothing is read by the host, so that the calls of a CUDA graph replay, each
    from the list that the last one left.

    Example:
        >>> indices = xp.asarray([[4, 2]], dtype=xp.int32)
        >>> held = xp.asarray([[-1, 2, 3]], dtype=xp.int32)
        >>> slots = xp.asarray([[10, 11, 12]], dtype=xp.int32)
        >>> selected, missing, to, counts, held, slots = ops.resolve_slots(indices, held, slots, num_entries=8)
        >>> selected.tolist(), missing.tolist(), to.tolist(), counts.tolist()
        ([[10, 11]], [[4, -1]], [[10, -1]], [1])
        >>> held.tolist(), slots.tolist()
        ([[3, 4, 2]], [[12, 10, 11]])
    """


def columns(problem: Problem) -> int:
    """The columns of a request: the most entries that a call can name of it."""
    return problem["T"] // max(problem["B"], 1) * problem["K"]


def check(problem: Problem) -> None:
    tokens, requests = problem["T"], problem["B"]
    if tokens % requests if requests else tokens:
        problem.refuse("indices", "axis T (axis 0)", tokens, f"a multiple of B = {requests}")
    problem.require_count("num_entries")
    if problem["PLACES"] < (most := columns(problem)):
        expected = f"at least {most}: T / B · K, all that a call may name of a request"
        problem.refuse("held", "axis PLACES (axis 1)", problem["PLACES"], expected)


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    for name in ("indices", "held"):
        yield Limit(name, -1, problem.attrs.num_entries - 1)


OP = Op(
    prototype=resolve_slots,
    tensors={
        "indices": Tensor("T K", INDEX),
        "held": Tensor("B PLACES", INDEX),
        "slots": Tensor("B PLACES", INDEX),
    },
    outputs={
        "selected": Result("T K", "int32"),
        "missing": Result("B MISSES", "int32", sizes={"MISSES": columns}),
        "destinations": Result("B MISSES", "int32", sizes={"MISSES": columns}),
        "counts": Result("B", "int32"),
    },
    updates={"held": None, "slots": None},
    check=check,
    limits=limits,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
