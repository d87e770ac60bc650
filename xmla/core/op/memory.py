"""What a call writes lies apart from what it reads: kernels read and write in no order that a caller could know."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, combinations, product

from xmla.core.compile import exec_function
from xmla.core.errors import ArgumentError
from xmla.core.op.op import Op
from xmla.core.values import Spec

WORKSPACE = "workspace"


def spaces(op: Op, arguments: Mapping[str, Spec], results: Iterable[Spec] = (), nbytes: int = 0) -> dict[str, Spec]:
    """The memory of a call by the names that errors have: arguments, results and workspace that the caller gives."""
    out = {f"out {name}": spec for name, spec in zip(op.outputs, results, strict=False)}
    return {**arguments, **out, **({WORKSPACE: Spec((nbytes,), "uint8")} if nbytes else {})}


def _pairs(op: Op, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What is written, and what may not share its memory.

    Two arguments that are updated may, if they have pages: those of one pool, which tables tell apart, hold the entries
    of both. Rows of requests, as `resolve_slots` updates them, may not.
    """
    *names, last = names
    names, space = (names, [last]) if last == WORKSPACE else ([*names, last], [])
    out = [name for name in names if name not in op.tensors]
    read = [name for name in names if name in op.tensors and name not in op.mutates]
    updated = [name for name in op.mutates if name in names]
    rows = [name for name in updated if op.tensors[name].names[0] == "B"]
    pairs = product(updated, read), combinations(rows, 2), product(out, [*read, *updated]), combinations(out, 2)
    return chain(*pairs, product(space, names))


# Of two places among a call's addresses whether pages of one length are compared.
Pair = tuple[int, int, bool]


def distances(op: Op, specs: Mapping[str, Spec]) -> tuple[tuple[Pair, ...], tuple[int, ...]]:
    """Which of `spaces` have to lie apart, and the numbers by which `disjoint_check` tells it. Sizes may be symbols."""
    places = {name: place for place, name in enumerate(specs)}
    pages = {name: _page(spec) for name, spec in specs.items()}
    pairs, of_pages = [], []
    for written, other in _pairs(op, specs):
        page = pages[written]
        paged = page is not None and page == pages[other]
        if paged:
            of_pages += [page, _inner(specs[written]), page - _inner(specs[other])]
        pairs.append((places[written], places[other], paged))
    named = [*specs.values()]
    return tuple(pairs), (*(named[place].span for place in _places(pairs)), *of_pages)


def _places(pairs: Iterable[Pair]) -> list[int]:
    return sorted({place for written, other, _ in pairs for place in (written, other)})


@cache
def disjoint_check(pairs: tuple[Pair, ...], count: int) -> Callable[..., bool]:
    """The function that tells by the addresses of the first `count` spaces that they lie apart.

    It may not see it of a few that do; pages of one length that lie between each other's are seen. It is generated,
    since it runs before launches: for an argument that is updated and two that are read

        def disjoint(numbers, a0, a1, a2):
            span0, span1, span2, page1, near1, far1, = numbers
            e0 = a0 + span0
            e1 = a1 + span1
            e2 = a2 + span2
            return not (a2 < e0 and a0 < e2 or a2 < e1 and a1 < e2 and not near1 <= (a1 - a2) % page1 <= far1)
    """
    places = _places(pairs)
    names, tests = [f"span{place}" for place in places], []
    for n, (written, other, paged) in enumerate(pairs):
        names += [f"page{n}", f"near{n}", f"far{n}"] * paged
        if max(written, other) < count:
            between = f" and not near{n} <= (a{other} - a{written}) % page{n} <= far{n}" * paged
            tests.append(f"a{written} < e{other} and a{other} < e{written}{between}")

    ends = "".join(f"    e{place} = a{place} + span{place}\n" for place in places if place < count)
    text = f"""def disjoint(numbers{"".join(f", a{place}" for place in range(count))}):
    {"".join(f"{name}, " for name in names) or "()"} = numbers
{ends}    return not ({" or ".join(tests) or False})"""
    return exec_function(text, "disjoint")


def _page(spec: Spec) -> int | None:
    """The bytes from a page to the next."""
    return None if len(spec.shape) < 3 or spec.strides is None else spec.strides[0] * spec.itemsize


def _inner(spec: Spec) -> int:
    """The bytes that a page spans."""
    return Spec(spec.shape[1:], spec.dtype, spec.strides and spec.strides[1:]).span


def check_overlap(op: Op, specs: Mapping[str, Spec], addresses: Iterable[int]) -> None:
    """Check that what a call writes shares memory with nothing else.

    Raises:
        ArgumentError: It shares memory.
    """
    at = dict(zip(specs, addresses, strict=True))
    for written, other in _pairs(op, specs):
        if specs[written].overlaps(at[written], specs[other], at[other]):
            raise ArgumentError(f"{op.name}: {written} memory is shared with {other}, expected memory of its own")
