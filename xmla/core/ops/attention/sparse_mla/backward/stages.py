"""What the plans of the derivative share: its launches before and after the products, which are a plan's own."""

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from xmla.core.call import Problem
from xmla.core.lang.sums import SUM_WORDS
from xmla.core.ops.attention.sparse_mla.backward.constants import Preparation
from xmla.core.ops.attention.sparse_mla.backward.kernels import (
    bound_sums_kernel,
    bound_values_kernel,
    clear_sums_kernel,
    count_references_kernel,
    prepare_kernel,
    round_sums_kernel,
    start_sums_kernel,
    store_sums_kernel,
    sum_sinks_kernel,
)
from xmla.core.ops.attention.sparse_mla.constants import Pages
from xmla.core.plan import Kernel, Launch, Plan, clear
from xmla.core.values import Spec, cdiv, next_power_of_2

LOG2E = 1.4426950408889634
PREPARED_HEADS = 4  # of a program of `prepare_kernel`
ENTRIES = 4  # of a program that starts or rounds sums


def sources_of(problem: Problem) -> tuple[str, ...]:
    """The prefixes of the sources' arrays."""
    return ("", "extra_") if problem.has("extra_cache") else ("",)


def row_constants(problem: Problem) -> dict[str, Any]:
    """The fields of `Rows`."""
    specs, has_dlse = problem.specs, problem.has("dlse")
    return {
        "HEADS": problem["H"],
        "Q_STRIDE_T": specs["q"].stride(0),
        "Q_STRIDE_H": specs["q"].stride(1),
        "DOUT_STRIDE_T": specs["dout"].stride(0),
        "DOUT_STRIDE_H": specs["dout"].stride(1),
        "LSE_STRIDE": specs["forward_lse"].stride(0),
        "DLSE_STRIDE": specs["dlse"].stride(0) if has_dlse else 0,
        "SCALE": float(problem.attrs.softmax_scale),
        "LSE_UNIT": 1.0 if problem.attrs.lse_base == "2" else LOG2E,
    }


def product_constants(problem: Problem, source: Pages) -> dict[str, Any]:
    """The fields of `Products`."""
    own_lse = problem.has("dlse") and problem.has("sink") and not problem.attrs.lse_sink
    return {**row_constants(problem), "OWN_LSE": own_lse, "SOURCE": source}


def entries_of(problem: Problem, source: str) -> int:
    pages, entries, _ = problem.specs[f"{source}cache"].shape
    return pages * entries


def around(
    problem: Problem, products: Iterable[Launch], additions: int, paired: bool, touched: int = 0,
    workspace: Mapping[str, Spec] = MappingProxyType({}),
) -> Plan:  # fmt: skip
    """The whole plan: entries' sums are started and bounded, `products` add to them, and they are rounded.

    `additions`: how often products add to an entry for each slot that names it. `paired`: as in `kernels.load_sums`.
    `touched`: so many of the first entries' sums get a 0 added, whether a slot names them or not. `workspace`: buffers
    of the products alone.
    """
    sources = sources_of(problem)
    of_heads = Spec((problem["T"], problem["H"]), "float32")
    workspace = {**workspace, **_prepared(problem), "slope": of_heads, "bound": of_heads}
    for source in sources:
        pages, entries, row = problem.specs[f"{source}cache"].shape
        workspace[f"{source}reach"] = Spec((problem["T"],), "float32")
        workspace[f"{source}references"] = Spec((pages, entries), "int32")
        workspace[f"{source}norms"] = Spec((pages, entries), "float32")
        workspace[f"{source}bounds"] = Spec((pages, entries), "int32")
        workspace[f"{source}sums"] = Spec((pages, entries, SUM_WORDS * row), "int32")
    launches = (
        *[launch for source in sources for launch in _start(problem, source, touched)],
        _prepare(problem),
        *[_bound(problem, source) for source in sources],
        *products,
        *[_round(problem, source, additions, paired) for source in sources],
        *_sum_sinks(problem),
    )
    return Plan(launches, {**workspace, **problem.results}, tuple(problem.results))


def in_any_order(
    problem: Problem, products: Iterable[Launch], fours: bool = False,
    workspace: Mapping[str, Spec] = MappingProxyType({}),
) -> Plan:  # fmt: skip
    """The whole plan without an order of sums: `products` add float32 to entries' sums.

    `fours`: as in `kernels.store_sums_kernel`. `workspace`: buffers of the products alone.
    """
    sources = sources_of(problem)
    unused = {"slope": Spec((1,), "float32"), "bound": Spec((1,), "float32")}
    sums = {f"{source}sums": Spec(problem.specs[f"{source}cache"].shape, "float32") for source in sources}
    launches = (
        # `clear` counts elements in 32 bits.
        *[_of_entries(problem, source, clear_sums_kernel, "sums", {"sums": f"{source}sums"}) for source in sources],
        _prepare(problem),
        *products,
        *[_store(problem, source, fours) for source in sources],
        *_sum_sinks(problem),
    )
    workspace = {**workspace, **_prepared(problem), **unused, **sums}
    return Plan(launches, {**workspace, **problem.results}, tuple(problem.results))


def _prepared(problem: Problem) -> dict[str, Spec]:
    """Buffers of what `_prepare` finds of a token's heads."""
    of_heads = Spec((problem["T"], problem["H"]), "float32")
    return {"total": of_heads, "delta": of_heads, "dsinks": of_heads if problem.has("sink") else Spec((1,), "float32")}


def _prepare(problem: Problem) -> Launch:
    specs, attrs = problem.specs, problem.attrs
    constants = Preparation(
        **row_constants(problem),
        DETERMINISTIC=attrs.deterministic,
        OUT_STRIDE_T=specs["forward_out"].stride(0),
        OUT_STRIDE_H=specs["forward_out"].stride(1),
        TAIL=problem.formats["cache"].tail,
        HAS_DLSE=problem.has("dlse"),
        HAS_SINK=problem.has("sink"),
        LSE_SINK=attrs.lse_sink,
        BLOCK_H=PREPARED_HEADS,
    )
    reach = "reach" if attrs.deterministic else "forward_lse"  # not read
    return Launch(
        prepare_kernel,
        grid=(problem["T"] * cdiv(problem["H"], PREPARED_HEADS),),
        outputs=("total", "delta", "slope", "bound", "dsinks"),
        arrays={
            **{"out": "forward_out", "lse": "forward_lse", "reach": reach},
            "extra_reach": "extra_reach" if attrs.deterministic and problem.has("extra_cache") else reach,
            **problem.stand_ins(dlse="forward_lse", sink="forward_lse"),
        },
        constexprs={"C": constants},
    )


def _sum_sinks(problem: Problem) -> list[Launch]:
    if not problem.has("sink"):
        return []
    constexprs = {"HEADS": problem["H"], "BLOCK_T": 1024}
    return [Launch(sum_sinks_kernel, (problem["H"],), ("dsink",), {"num_tokens": problem["T"]}, constexprs)]


def _of_entries(
    problem: Problem, source: str, kernel: Kernel, output: str, arrays: Mapping[str, str], **constexprs: Hashable
) -> Launch:
    """A launch over the entries of a source."""
    entries = entries_of(problem, source)
    return Launch(
        kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=(output,),
        arrays=arrays,
        sizes={"num_slots": entries},
        constexprs={"LAYOUT": problem.formats[f"{source}cache"], **constexprs, "BLOCK": ENTRIES},
    )


def _start(problem: Problem, source: str, touched: int) -> tuple[Launch, ...]:
    """Count the slots that name each entry; find norms of those that are named; start sums, touched ones too."""
    specs, entries, cache = problem.specs, entries_of(problem, source), f"{source}cache"
    start = Launch(
        start_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("bounds", "sums", "norms"),
        arrays={name: f"{source}{name}" for name in ("cache", "references", "norms", "bounds", "sums")},
        sizes={"num_slots": entries, "num_touched": touched},
        constexprs={
            "PAGE_STRIDE": specs[cache].stride(0),
            "PAGE_SIZE": problem.page_size(cache),
            "LAYOUT": problem.formats[cache],
            "BLOCK": ENTRIES,
        },
    )
    reach = Launch(
        bound_values_kernel,
        grid=(problem["T"],),
        outputs=("reach",),
        arrays={**_named(problem, source), "norms": f"{source}norms", "reach": f"{source}reach"},
        sizes=_slots(problem, source),
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )
    references = f"{source}references"
    return clear(references, entries), count_references(problem, source, references), start, reach


def count_references(problem: Problem, source: str, references: str) -> Launch:
    """Count in the buffer `references` the slots that name each entry."""
    return Launch(
        count_references_kernel,
        grid=(problem["T"],),
        outputs=("references",),
        arrays={**_named(problem, source), "references": references},
        sizes=_slots(problem, source),
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )


def _named(problem: Problem, source: str) -> dict[str, str]:
    slots, lengths = f"{source}slots", f"{source}lengths"
    return {"slots": slots, "lengths": lengths if problem.has(lengths) else slots}


def _slots(problem: Problem, source: str) -> dict[str, int]:
    slots = problem.specs[f"{source}slots"]
    return {"num_slots": entries_of(problem, source), "num_keys": slots.shape[1], "slot_stride": slots.stride(0)}


def _bound(problem: Problem, source: str) -> Launch:
    """Bound the summands of each entry by those of the tokens that name it: others do not cost it precision."""
    return Launch(
        bound_sums_kernel,
        grid=(problem["T"],),
        outputs=("references", "bounds"),
        arrays={**_named(problem, source), **{name: f"{source}{name}" for name in ("references", "bounds")}},
        sizes=_slots(problem, source),
        constexprs={
            "HEADS": problem["H"],
            "HAS_LENGTHS": problem.has(f"{source}lengths"),
            "BLOCK_H": next_power_of_2(max(problem["H"], 1)),
            "BLOCK": 1024,
        },
    )


def _round(problem: Problem, source: str, additions: int, paired: bool) -> Launch:
    arrays = {name: f"{source}{name}" for name in ("references", "sums", "bounds")}
    return _of_entries(
        problem, source, round_sums_kernel, "dcache", {**arrays, "dcache": f"d{source}cache"},
        PAGE_SIZE=problem.page_size(f"{source}cache"), ADDITIONS=additions, PAIRED=paired,
    )  # fmt: skip


def _store(problem: Problem, source: str, fours: bool) -> Launch:
    arrays = {"sums": f"{source}sums", "dcache": f"d{source}cache"}
    return _of_entries(problem, source, store_sums_kernel, "dcache", arrays, FOURS=fours)
