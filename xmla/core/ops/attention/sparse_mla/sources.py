"""The sources of attention, a cache and its slots, once or twice: checks, limits, work and results of ops over them."""

from collections.abc import Iterator

import numpy as np

from xmla.core.call import HALVES, Arrays, Limit, Problem, Result, Tensor, Work
from xmla.core.formats.mla import VALUE_DIMS, MlaLayout
from xmla.core.values import ATTENTION_LSE, ATTENTION_OUT

ATTENTION_RESULTS = {
    "out": Result("T H V", lambda p: p.specs["q"].dtype, sizes={"V": lambda p: VALUE_DIMS}, agreement=ATTENTION_OUT),
    "lse": Result("T H", "float32", agreement=ATTENTION_LSE),
}

# Beside packed entries: what a derivative gives the gradient of these to.
ROWS_OF_SOURCES = {
    "rows": Tensor("P R L+E", HALVES, pool=True),
    "extra_rows": Tensor("EXTRA_P EXTRA_R L+E", HALVES, pool=True),
}


def check_sources(problem: Problem) -> MlaLayout:
    """Check queries, sources and lse_base; the layout of the first source."""
    layout, extra = problem.formats["cache"], problem.formats.get("extra_cache")
    _check_dtype(problem, "cache", layout)
    if problem["L+E"] != layout.dims:
        problem.refuse("q", "axis L+E (axis 2)", problem["L+E"], f"{layout.dims} for {layout.name!r} entries")
    if problem["H"] > 128:
        problem.unsupported("q", "axis H (axis 1)", problem["H"], "at most 128 heads")
    require_both(problem, "extra_cache", "extra_slots")
    if extra is not None:
        _check_dtype(problem, "extra_cache", extra)
        if (extra.dims, extra.tail) != (layout.dims, layout.tail):
            problem.refuse("extra_cache", "format", repr(extra.name), f"one with the dims of {layout.name!r}")
    elif problem.has("extra_lengths"):
        problem.refuse("extra_lengths", "argument", "given", "none without extra_cache")
    for source in ("", "extra_"):
        _check_rows(problem, f"{source}rows", f"{source}cache")
    if problem.attrs.lse_base not in ("e", "2"):
        problem.refuse("lse_base", "value", repr(problem.attrs.lse_base), "'e' or '2'")
    return layout


def _check_dtype(problem: Problem, cache: str, layout: MlaLayout) -> None:
    dtype, expected = problem.specs[cache].dtype, problem.specs["q"].dtype
    if not layout.packed and dtype != expected:
        problem.refuse(cache, "dtype", dtype, f"{expected}, as q")


def _check_rows(problem: Problem, rows: str, cache: str) -> None:
    if not problem.has(rows):
        return
    if not problem.has(cache):
        problem.refuse(rows, "argument", "given", f"none without {cache}")
    if not (layout := problem.formats[cache]).packed:
        problem.refuse(rows, "argument", "given", f"none beside {layout.name!r} entries, which have a gradient")
    dtype, expected = problem.specs[rows].dtype, problem.specs["q"].dtype
    if dtype != expected:
        problem.refuse(rows, "dtype", dtype, f"{expected}, as q")


def require_both(problem: Problem, one: str, other: str) -> None:
    """Refuse one of two arguments without the other."""
    for present, missing in ((one, other), (other, one)):
        if problem.has(present) and not problem.has(missing):
            problem.refuse(missing, "argument", "missing", f"an array beside {present}")


def source_limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    """The limits of lengths, and of the slots within them."""
    sources = [("slots", "lengths", problem["K"], problem["P"] * problem["R"])]
    if "extra_slots" in arrays:
        entries = problem["EXTRA_P"] * problem["EXTRA_R"]
        sources.append(("extra_slots", "extra_lengths", problem["EXTRA_K"], entries))
    for slots, lengths, keys, entries in sources:
        seen = None
        if lengths in arrays:
            yield Limit(lengths, 0, keys)
            seen = np.arange(keys) < arrays[lengths][:, None]
        yield Limit(slots, -1, entries - 1, seen)


def attention_work(problem: Problem, cache: str, keys: int) -> Work:
    """Entries of `cache` read for `keys` slots per token, and their products."""
    pool, q = problem.specs[cache], problem.specs["q"]
    references = problem["T"] * keys
    read = min(references, pool.shape[0] * pool.shape[1]) * pool.shape[2] * pool.itemsize
    return Work(read, bf16_flops=2.0 * references * problem["H"] * (q.shape[2] + VALUE_DIMS))
