"""What a call writes lies apart from what it reads: kernels read and write in no order that a caller could know."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, combinations, product

from xmla.core.errors import ArgumentError
from xmla.core.op import Op
from xmla.core.signature import generated
from xmla.core.spec import Spec

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


def distances(op: Op, specs: Mapping[str, Spec]) -> Callable[..., bool]:
    """The function that tells by the addresses of `spaces` that they lie apart; it may not see it of a few that do.

    Pages of one length that lie between each other's are seen. The function is generated, since it runs before
    launches: for an argument that is updated and two that are read

        def apart(a0, a1, a2):
            return not (low0 < a0 - a2 < high0 or low1 < a1 - a2 < high1 and not near1 <= (a1 - a2) % page1 <= far1)
    """
    places = {name: place for place, name in enumerate(specs)}
    spans = {name: spec.span for name, spec in specs.items()}  # once, not for each pair
    pages = {name: _page(spec) for name, spec in specs.items()}
    scope: dict[str, int] = {}
    tests = []
    for number, (written, other) in enumerate(_pairs(op, specs)):
        first, second = specs[written], specs[other]
        if not (spans[written] and spans[other]):
            continue
        scope |= {f"low{number}": -spans[other], f"high{number}": spans[written]}
        page = pages[written]
        paged = page is not None and page == pages[other]
        if paged:
            near, far = _inner(first), page - _inner(second)
            scope |= {f"page{number}": page, f"near{number}": near, f"far{number}": far}
        tests.append((number, places[written], places[other], paged))
    return generated(_text(len(places), tuple(tests)), "apart", **scope)


@cache
def _text(count: int, tests: tuple[tuple[int, int, int, bool], ...]) -> str:
    near = [
        f"low{n} < a{other} - a{written} < high{n}"
        + f" and not near{n} <= (a{other} - a{written}) % page{n} <= far{n}" * paged
        for n, written, other, paged in tests
    ]
    return f"def apart({', '.join(f'a{n}' for n in range(count))}):\n    return not ({' or '.join(near) or False})"


def _page(spec: Spec) -> int | None:
    """The bytes from a page to the next."""
    return None if len(spec.shape) < 3 or spec.strides is None else spec.strides[0] * spec.itemsize


def _inner(spec: Spec) -> int:
    """The bytes that a page spans."""
    return Spec(spec.shape[1:], spec.dtype, spec.strides and spec.strides[1:]).span


def refuse_shared(op: Op, specs: Mapping[str, Spec], addresses: Iterable[int]) -> None:
    """Raise if something that a call writes shares memory with something else.

    Raises:
        ArgumentError: It does.
    """
    at = dict(zip(specs, addresses, strict=True))
    for written, other in _pairs(op, specs):
        if specs[written].overlaps(at[written], specs[other], at[other]):
            raise ArgumentError(f"{op.name}: {written} memory is shared with {other}, expected memory of its own")
