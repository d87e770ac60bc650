"""What the plans of the derivative share: its launches before and after the products, which are a plan's own."""

from collections.abc import Hashable, Iterable

from xmla.core.clearing import clear
from xmla.core.lang.sums import SUM_WORDS
from xmla.core.ops.sparse_mla.backward.kernels import (
    bound_sums_kernel,
    bound_values_kernel,
    count_references_kernel,
    prepare_kernel,
    round_sums_kernel,
    start_sums_kernel,
    sum_sinks_kernel,
)
from xmla.core.plan import Launch, Plan, cdiv, next_power_of_2
from xmla.core.problem import Problem
from xmla.core.spec import Spec

LOG2E = 1.4426950408889634
PREPARED_HEADS = 4  # of a program of `prepare_kernel`
ENTRIES = 4  # of a program that starts or rounds sums


def sources_of(problem: Problem) -> tuple[str, ...]:
    """The prefixes of the sources' arrays."""
    return ("", "extra_") if problem.has("extra_cache") else ("",)


def row_constants(problem: Problem) -> dict[str, Hashable]:
    """The constants by which a kernel finds the rows of a token's heads."""
    specs, has_dlse = problem.specs, problem.has("dlse")
    return {
        "Q_STRIDE_T": specs["q"].stride(0),
        "Q_STRIDE_H": specs["q"].stride(1),
        "LSE_STRIDE": specs["forward_lse"].stride(0),
        "DOUT_STRIDE_T": specs["dout"].stride(0),
        "DOUT_STRIDE_H": specs["dout"].stride(1),
        "DLSE_STRIDE": specs["dlse"].stride(0) if has_dlse else 0,
        "HEADS": problem["H"],
        "SCALE": float(problem.attrs.softmax_scale),
        "LSE_UNIT": 1.0 if problem.attrs.lse_base == "2" else LOG2E,
    }


def product_constants(problem: Problem) -> dict[str, Hashable]:
    """The constants of kernels that compute probabilities again."""
    own_lse = problem.has("dlse") and problem.has("sink") and not problem.attrs.lse_sink
    return {**row_constants(problem), "OWN_LSE": own_lse}


def entries_of(problem: Problem, source: str) -> int:
    pages, entries, _ = problem.specs[f"{source}cache"].shape
    return pages * entries


def around(problem: Problem, products: Iterable[Launch], additions: int, paired: bool, touched: int = 0) -> Plan:
    """The whole plan: entries' sums are started and bounded, `products` add to them, and they are rounded.

    `additions`: how often products add to an entry for each slot that names it. `paired`: as in `kernels.load_sums`.
    `touched`: so many of the first entries' sums get a 0 added, whether a slot names them or not.
    """
    specs, attrs = problem.specs, problem.attrs
    tokens, heads = problem["T"], problem["H"]
    has_sink, extra, sources = problem.has("sink"), problem.has("extra_cache"), sources_of(problem)
    workspace = {
        "total": Spec((tokens, heads), "float32"),
        "delta": Spec((tokens, heads), "float32"),
        "slope": Spec((tokens, heads), "float32"),
        "bound": Spec((tokens, heads), "float32"),
        "dsinks": Spec((tokens, heads) if has_sink else (1,), "float32"),
    }
    for source in sources:
        pages, entries, row = specs[f"{source}cache"].shape
        workspace[f"{source}reach"] = Spec((tokens,), "float32")
        workspace[f"{source}references"] = Spec((pages, entries), "int32")
        workspace[f"{source}norms"] = Spec((pages, entries), "float32")
        workspace[f"{source}bounds"] = Spec((pages, entries), "int32")
        workspace[f"{source}sums"] = Spec((pages, entries, SUM_WORDS * row), "int32")
    prepare = Launch(
        prepare_kernel,
        grid=(tokens * cdiv(heads, PREPARED_HEADS),),
        outputs=("total", "delta", "slope", "bound", "dsinks"),
        arrays={
            **{"out": "forward_out", "lse": "forward_lse", "extra_reach": "extra_reach" if extra else "reach"},
            **problem.stand_ins(dlse="forward_lse", sink="forward_lse"),
        },
        constexprs={
            **row_constants(problem),
            "OUT_STRIDE_T": specs["forward_out"].stride(0),
            "OUT_STRIDE_H": specs["forward_out"].stride(1),
            "TAIL": problem.formats["cache"].tail,
            "HAS_DLSE": problem.has("dlse"),
            "HAS_SINK": has_sink,
            "LSE_SINK": attrs.lse_sink,
            "BLOCK_H": PREPARED_HEADS,
        },
    )
    launches = [launch for source in sources for launch in _start(problem, source, touched)]
    launches += [
        prepare,
        *[_bound(problem, source) for source in sources],
        *products,
        *[_round(problem, source, additions, paired) for source in sources],
    ]
    if has_sink:
        launches.append(
            Launch(
                sum_sinks_kernel,
                grid=(heads,),
                outputs=("dsink",),
                sizes={"num_tokens": tokens},
                constexprs={"HEADS": heads, "BLOCK_T": 1024},
            )
        )
    results = problem.results
    return Plan(tuple(launches), {**workspace, **results}, tuple(results))


def _start(problem: Problem, source: str, touched: int) -> tuple[Launch, ...]:
    """Count the slots that name each entry; find norms of those that are named; start sums, touched ones too."""
    specs, entries, cache = problem.specs, entries_of(problem, source), f"{source}cache"
    named = _named(problem, source)
    count = Launch(
        count_references_kernel,
        grid=(problem["T"],),
        outputs=("references",),
        arrays={**named, "references": f"{source}references"},
        sizes=_slots(problem, source),
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )
    start = Launch(
        start_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("bounds", "sums", "norms"),
        arrays={name: f"{source}{name}" for name in ("cache", "references", "norms", "bounds", "sums")},
        sizes={"num_slots": entries, "num_touched": touched},
        constexprs={
            "PAGE_STRIDE": specs[cache].stride(0),
            "PAGE_SIZE": specs[cache].shape[1],
            "LAYOUT": problem.formats[cache],
            "BLOCK": ENTRIES,
        },
    )
    reach = Launch(
        bound_values_kernel,
        grid=(problem["T"],),
        outputs=("reach",),
        arrays={**named, "norms": f"{source}norms", "reach": f"{source}reach"},
        sizes=_slots(problem, source),
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )
    return clear(f"{source}references", entries), count, start, reach


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
    cache, entries = f"{source}cache", entries_of(problem, source)
    return Launch(
        round_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("dcache",),
        arrays={**{name: f"{source}{name}" for name in ("references", "sums", "bounds")}, "dcache": f"d{cache}"},
        sizes={"num_slots": entries},
        constexprs={
            "LAYOUT": problem.formats[cache],
            "PAGE_SIZE": problem.specs[cache].shape[1],
            "ADDITIONS": additions,
            "PAIRED": paired,
            "BLOCK": ENTRIES,
        },
    )
