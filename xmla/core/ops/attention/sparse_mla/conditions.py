"""What Gluon kernels of attention are written for, on any architecture."""

from collections.abc import Mapping

from xmla.core.call import Problem
from xmla.core.formats.mla import MlaLayout
from xmla.core.plan import Condition
from xmla.core.values import Device


def entries_of(formats: tuple[MlaLayout, ...]) -> Condition:
    """The condition that entries have one of these formats."""

    def other(problem: Problem, device: Device) -> str | None:
        layout = problem.formats["cache"]
        return None if layout in formats else f"over {layout.name!r} entries"

    return Condition(f"{_names(formats)} entries", other)


def one_format(but: tuple[MlaLayout, ...] = ()) -> Condition:
    """The condition that two sources have one format, which is none of `but`."""

    def mixed(problem: Problem, device: Device) -> str | None:
        layout, extra = problem.formats["cache"], problem.formats.get("extra_cache")
        if extra is None or (extra == layout and layout not in but):
            return None
        return f"with {extra.name!r} entries beside {layout.name!r} ones"

    return Condition(f"one source, or two of one format{f' but {_names(but)}' if but else ''}", mixed)


def _names(formats: tuple[MlaLayout, ...]) -> str:
    return " or ".join(repr(layout.name) for layout in formats)


def _other_queries(problem: Problem, device: Device) -> str | None:
    dtype = problem.specs["q"].dtype
    return f"for {dtype} queries" if problem.formats["cache"].packed and dtype != "bfloat16" else None


BFLOAT16_QUERIES = Condition("bfloat16 queries over packed entries", _other_queries)


def between_rows(problem: Problem, units: Mapping[str, int]) -> str | None:
    """The first argument, in words, some of whose rows begin on no multiple of so many bytes."""
    for name, unit in units.items():
        if problem.has(name) and not problem.specs[name].on_multiples(unit, (0, 1) if name == "q" else (0,)):
            return f"over rows of {problem.called(name)} between multiples of {unit} bytes"
    return None
