"""Packed entries in the derivative: those that slots name become plain rows first, of which it then is one."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from xmla.core.call import Problem
from xmla.core.formats.mla import PLAIN, PLAIN_V4
from xmla.core.op import Composition, same_names
from xmla.core.ops.attention.sparse_mla.backward.constants import PackedEntries
from xmla.core.ops.attention.sparse_mla.backward.kernels import unpack_references_kernel
from xmla.core.ops.attention.sparse_mla.backward.stages import ENTRIES, count_references, entries_of, sources_of
from xmla.core.plan import Launch, Part, Plan, clear
from xmla.core.values import Device, Spec, cdiv

ROWS = {layout.dims: layout for layout in (PLAIN, PLAIN_V4)}  # by the dims of an entry


def packed_sources(problem: Problem) -> list[str]:
    """The prefixes of the sources whose entries are packed."""
    return [source for source in sources_of(problem) if problem.formats[f"{source}cache"].packed]


def over_rows(problem: Problem) -> Problem:
    """A call over plain rows in place of packed entries; their gradients are those of the rows beside the entries."""
    specs, axes, formats = dict(problem.specs), dict(problem.axes), dict(problem.formats)
    results = dict(problem.results)
    for source in packed_sources(problem):
        cache, rows = f"{source}cache", f"{source}rows"
        specs[cache] = rows_of(problem, source)
        del specs[rows]
        axes[f"{source}row".upper()] = problem["L+E"]
        formats[cache] = ROWS[problem["L+E"]]
        results[f"d{cache}"], results[f"d{rows}"] = results[f"d{rows}"], results[f"d{cache}"]
    return replace(problem, specs=specs, axes=axes, formats=formats, results=results)


def rows_of(problem: Problem, source: str) -> Spec:
    return Spec((*problem.specs[f"{source}cache"].shape[:2], problem["L+E"]), problem.specs["q"].dtype)


def unpacking(plan: Callable[[Problem, Device], Plan]) -> Callable[[Problem, Device], Plan]:
    """A plan of calls over plain rows as one of any call."""

    @wraps(plan)
    def whole(problem: Problem, device: Device) -> Plan:
        sources = packed_sources(problem)
        if not sources:
            return plan(problem, device)
        composition = Composition(problem, device)
        names = same_names(*problem.specs, *problem.results)
        for source in sources:
            entries, cache, rows = f"{source}entries", f"{source}cache", f"{source}rows"
            composition.add(Part(f"{source}unpack", unpack(problem, source), {"entries": entries}))
            names |= {cache: entries, f"d{cache}": f"d{rows}", f"d{rows}": f"d{cache}"}
        composition.add(Part(problem.op, plan(over_rows(problem), device), names))
        return composition.plan()

    return whole


def unpack(problem: Problem, source: str) -> Plan:
    """The launches that dequantise the entries that slots name to the buffer `entries`."""
    cache, count = f"{source}cache", entries_of(problem, source)
    layout = problem.formats[cache]
    write = Launch(
        unpack_references_kernel,
        grid=(cdiv(count, ENTRIES),),
        outputs=("entries",),
        arrays={"cache": cache},
        sizes={"num_slots": count},
        constexprs={
            "C": PackedEntries(
                LAYOUT=layout,
                PAGE_STRIDE=problem.specs[cache].stride(0),
                PAGE_SIZE=problem.page_size(cache),
                ROWS=ROWS[layout.dims],
                BLOCK=ENTRIES,
            )
        },
    )
    launches = clear("references", count), count_references(problem, source, "references"), write
    buffers = {"references": Spec(problem.specs[cache].shape[:2], "int32"), "entries": rows_of(problem, source)}
    return Plan(launches, buffers, ())
