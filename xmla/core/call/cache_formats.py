"""Formats of a call's paged caches: `Tensor.format` finds them once, when the call is bound."""

from xmla.core.call.problem import Problem
from xmla.core.call.work import Work, all_but_pools_once
from xmla.core.formats.indexer import (
    INDEXER_DIMS,
    INDEXER_FORMATS,
    INDEXER_LAYOUTS,
    IndexerLayout,
    indexer_layouts,
    indexer_rows,
)
from xmla.core.formats.mla import MLA_LAYOUTS, SCALE_FLOORS, MlaLayout, mla_layouts

INDEXER_ALIGNMENT = 4  # bytes: an entry's scales are one word


def mla_format(problem: Problem, cache: str) -> MlaLayout:
    """The format of the latent cache `cache`, which its `format_attribute` may name.

    Raises:
        ArgumentError: No format has such rows, or several have them and none is named; a stride, address or name is
            wrong.
    """
    spec, attribute = problem.specs[cache], problem.tensors[cache].format_attribute
    name = getattr(problem.attrs, attribute)
    if name is not None and name not in [layout.name for layout in MLA_LAYOUTS]:
        problem.refuse(attribute, "value", repr(name), "one of " + ", ".join(layout.name for layout in MLA_LAYOUTS))
    candidates = [layout for layout in MLA_LAYOUTS if name in (None, layout.name)]
    fitting = mla_layouts(spec, name)
    if not fitting:
        rows = (f"{k.row} {'bytes' if k.packed else 'elements'} ({k.name})" for k in candidates)
        problem.refuse(cache, f"axis ROW (axis 2) of {spec.dtype}", spec.shape[2], " or ".join(rows))
    if len(fitting) > 1:
        problem.refuse(attribute, "value", None, " or ".join(repr(layout.name) for layout in fitting))
    (layout,) = fitting
    problem.require_pages(cache, layout.alignment)
    return layout


def check_scale_floor(problem: Problem) -> None:
    if problem.attrs.scale_floor not in SCALE_FLOORS:
        problem.refuse("scale_floor", "value", repr(problem.attrs.scale_floor), " or ".join(map(repr, SCALE_FLOORS)))


def check_indexer_dim(problem: Problem) -> None:
    """Check that D is a size that indexer keys and queries can have."""
    name, axis = next((n, t.names.index("D")) for n, t in problem.tensors.items() if "D" in t.names)
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse(name, f"axis D (axis {axis})", problem["D"], "32, 64 or 128")


def indexer_format(problem: Problem, cache: str) -> IndexerLayout:
    """The format of an indexer cache: determined by D and by its rows, unless `format_attribute` names another.

    Raises:
        ArgumentError: D or the name is wrong, no format has such rows, or a stride or address is wrong.
    """
    check_indexer_dim(problem)
    attribute, row, dim = problem.tensors[cache].format_attribute, problem.tensors[cache].names[2], problem["D"]
    check_indexer_format_name(problem, attribute)
    name = getattr(problem.attrs, attribute)
    layouts = indexer_layouts(problem[row], dim, name)
    if not layouts and not indexer_rows(dim, name):
        served = " or ".join(repr(layout.format) for layout in INDEXER_LAYOUTS if layout.dim == dim)
        problem.refuse(attribute, "value", repr(name), f"{served} with D = {dim}")
    if not layouts:
        problem.refuse(cache, f"axis {row} (axis 2)", problem[row], indexer_rows(dim, name))
    problem.require_pages(cache, INDEXER_ALIGNMENT)
    return layouts[0]


def check_indexer_format_name(problem: Problem, attribute: str) -> None:
    name = getattr(problem.attrs, attribute)
    if name not in (None, *INDEXER_FORMATS):
        problem.refuse(attribute, "value", repr(name), " or ".join(map(repr, INDEXER_FORMATS)))


def entries_once(problem: Problem, keys: float | None) -> Work:
    """The work of an op that reads or writes one entry per token: these entries, and every other array once."""
    specs = problem.specs
    entries = sum(problem["T"] * specs[name].shape[2] * specs[name].itemsize for name in problem.pools)
    return Work(entries) + all_but_pools_once(problem)
