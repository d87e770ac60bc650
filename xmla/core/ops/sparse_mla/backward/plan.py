from collections.abc import Hashable
from dataclasses import dataclass

from xmla.core.clearing import clear
from xmla.core.device import Device
from xmla.core.lang.marks import mark_entries_kernel
from xmla.core.op import Implementation, Problem
from xmla.core.ops.sparse_mla.backward.kernels import (
    bound_sums_kernel,
    bound_values_kernel,
    prepare_kernel,
    round_sums_kernel,
    sparse_mla_dcache_kernel,
    sparse_mla_dq_kernel,
    start_sums_kernel,
    sum_sinks_kernel,
)
from xmla.core.plan import Launch, Plan, cdiv, log2_of, most_registers, next_power_of_2
from xmla.core.spec import Spec

LOG2E = 1.4426950408889634
PREPARED_HEADS = 4  # of a program of `prepare_kernel`
MOST_TOKENS = 1 << 20  # of calls that have the same units
ENTRIES = 4  # of a program that starts or rounds sums


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads against keys of a program, and its warps."""

    block_h: int
    block_n: int
    num_warps: int = 8


def configure(heads: int, device: Device) -> tuple[Tile, Tile]:
    """The tiles of dq's kernel and of the caches' gradients'."""
    if device.arch != 90:  # larger tiles of the second kernel spill
        return Tile(16, 16 if device.smem_bytes < 128 << 10 else 32), Tile(16, 16)
    return (Tile(16, 32), Tile(16, 32)) if heads <= 16 else (Tile(32, 64), Tile(64, 32))


def plan(problem: Problem, device: Device) -> Plan:
    """Probabilities are computed again from lse. A gradient of entries is summed in integers (`kernels.py`)."""
    specs, attrs = problem.specs, problem.attrs
    tokens, heads, layout = problem["T"], problem["H"], problem.formats["cache"]
    has_sink, has_dlse, extra = problem.has("sink"), problem.has("dlse"), problem.has("extra_cache")
    tile, key_tile = configure(heads, device)
    log2_parts = log2_of(max(tokens, MOST_TOKENS))  # padding a call does not change its sums
    sources = ["", "extra_"] if extra else [""]
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
        workspace[f"{source}marks"] = Spec((pages, entries), "int8")
        workspace[f"{source}greatest"] = Spec((pages, entries), "float32")
        workspace[f"{source}bounds"] = Spec((pages, entries), "int32")
        workspace[f"{source}sums"] = Spec((pages, entries, 2 * row), "int32")

    strides = {
        "Q_STRIDE_T": specs["q"].stride(0),
        "Q_STRIDE_H": specs["q"].stride(1),
        "LSE_STRIDE": specs["forward_lse"].stride(0),
        "DOUT_STRIDE_T": specs["dout"].stride(0),
        "DOUT_STRIDE_H": specs["dout"].stride(1),
        "DLSE_STRIDE": specs["dlse"].stride(0) if has_dlse else 0,
        "HEADS": heads,
        "SCALE": float(attrs["softmax_scale"]),
        "LSE_UNIT": 1.0 if attrs["lse_base"] == "2" else LOG2E,
    }
    prepare = Launch(
        prepare_kernel,
        grid=(tokens * cdiv(heads, PREPARED_HEADS),),
        outputs=("total", "delta", "slope", "bound", "dsinks"),
        arrays={
            **{"out": "forward_out", "lse": "forward_lse", "extra_reach": "extra_reach" if extra else "reach"},
            **problem.stand_ins(dlse="forward_lse", sink="forward_lse"),
        },
        constexprs={
            **strides,
            "OUT_STRIDE_T": specs["forward_out"].stride(0),
            "OUT_STRIDE_H": specs["forward_out"].stride(1),
            "TAIL": layout.tail,
            "HAS_DLSE": has_dlse,
            "HAS_SINK": has_sink,
            "LSE_SINK": attrs["lse_sink"],
            "BLOCK_H": PREPARED_HEADS,
        },
    )
    products = {**strides, "OWN_LSE": has_dlse and has_sink and not attrs["lse_sink"]}
    dq = Launch(
        sparse_mla_dq_kernel,
        grid=(tokens * cdiv(heads, tile.block_h),),
        outputs=("dq",),
        arrays={"lse": "forward_lse"}
        | problem.stand_ins(
            lengths="slots", dlse="forward_lse", extra_cache="cache", extra_slots="slots", extra_lengths="slots"
        ),
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "num_extra_slots": problem["EXTRA_P"] * problem["EXTRA_R"] if extra else 0,
            "num_extra_keys": problem["EXTRA_K"] if extra else 0,
        },
        constexprs={
            **products,
            **_source(problem, ""),
            "EXTRA_SLOT_STRIDE": specs["extra_slots"].stride(0) if extra else 0,
            "EXTRA_PAGE_STRIDE": specs["extra_cache"].stride(0) if extra else 0,
            "EXTRA_PAGE_SIZE": problem["EXTRA_R"] if extra else 1,
            "EXTRA_LAYOUT": problem.formats.get("extra_cache"),
            "HAS_EXTRA_LENGTHS": problem.has("extra_lengths"),
            "BLOCK_H": tile.block_h,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=1,
        max_registers=most_registers(tile.num_warps),
    )
    dcaches = [
        Launch(
            sparse_mla_dcache_kernel,
            grid=(tokens * cdiv(specs[f"{source}slots"].shape[1], key_tile.block_n),),
            outputs=("marks", "sums"),
            arrays={
                **{name: f"{source}{name}" for name in ("cache", "slots", "bounds", "marks", "sums")},
                "lengths": f"{source}lengths" if problem.has(f"{source}lengths") else f"{source}slots",
                "dlse": "dlse" if has_dlse else "forward_lse",
                "lse": "forward_lse",
            },
            sizes={
                "num_slots": _entries(problem, source),
                "num_keys": specs[f"{source}slots"].shape[1],
                "log2_parts": log2_parts,
            },
            constexprs={
                **products,
                **_source(problem, source),
                "BLOCK_H": key_tile.block_h,
                "BLOCK_N": key_tile.block_n,
                "PART": 128 if device.arch == 90 else 64,  # of 128 sm_100 spills
            },
            num_warps=key_tile.num_warps,
            num_stages=1,
            max_registers=most_registers(key_tile.num_warps),
        )
        for source in sources
    ]
    launches = [launch for source in sources for launch in _start(problem, source)]
    launches += [
        prepare,
        *[_bound(problem, source) for source in sources],
        dq,
        *dcaches,
        *[_round(problem, source, log2_parts) for source in sources],
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
    results = problem.op.result_specs(problem)
    return Plan(tuple(launches), workspace | results, tuple(results))


def _entries(problem: Problem, source: str) -> int:
    pages, entries, _ = problem.specs[f"{source}cache"].shape
    return pages * entries


def _source(problem: Problem, source: str) -> dict[str, Hashable]:
    """The constants by which a kernel finds a source's slots and entries."""
    cache = problem.specs[f"{source}cache"]
    return {
        "SLOT_STRIDE": problem.specs[f"{source}slots"].stride(0),
        "PAGE_STRIDE": cache.stride(0),
        "PAGE_SIZE": cache.shape[1],
        "LAYOUT": problem.formats[f"{source}cache"],
        "HAS_LENGTHS": problem.has(f"{source}lengths"),
    }


def _start(problem: Problem, source: str) -> tuple[Launch, ...]:
    """Mark the entries that slots name, find their greatest value and start their sums."""
    specs, entries, cache = problem.specs, _entries(problem, source), f"{source}cache"
    named = _named(problem, source)
    mark = Launch(
        mark_entries_kernel,
        grid=(problem["T"],),
        outputs=("marks",),
        arrays={**named, "marks": f"{source}marks"},
        sizes={**_slots(problem, source), "step": 1},
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )
    start = Launch(
        start_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("bounds", "sums", "greatest"),
        arrays={name: f"{source}{name}" for name in ("cache", "marks", "greatest", "bounds", "sums")},
        sizes={"num_slots": entries},
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
        arrays={**named, "greatest": f"{source}greatest", "reach": f"{source}reach"},
        sizes=_slots(problem, source),
        constexprs={"HAS_LENGTHS": problem.has(f"{source}lengths"), "BLOCK": 1024},
    )
    return clear(f"{source}marks", entries), mark, start, reach


def _named(problem: Problem, source: str) -> dict[str, str]:
    slots, lengths = f"{source}slots", f"{source}lengths"
    return {"slots": slots, "lengths": lengths if problem.has(lengths) else slots}


def _slots(problem: Problem, source: str) -> dict[str, int]:
    slots = problem.specs[f"{source}slots"]
    return {"num_slots": _entries(problem, source), "num_keys": slots.shape[1], "slot_stride": slots.stride(0)}


def _bound(problem: Problem, source: str) -> Launch:
    """Bound the summands of each entry by those of the tokens that name it: others do not cost it precision."""
    return Launch(
        bound_sums_kernel,
        grid=(problem["T"],),
        outputs=("bounds",),
        arrays={**_named(problem, source), "bounds": f"{source}bounds"},
        sizes=_slots(problem, source),
        constexprs={
            "HEADS": problem["H"],
            "HAS_LENGTHS": problem.has(f"{source}lengths"),
            "BLOCK_H": next_power_of_2(max(problem["H"], 1)),
            "BLOCK": 1024,
        },
    )


def _round(problem: Problem, source: str, log2_parts: int) -> Launch:
    cache, entries = f"{source}cache", _entries(problem, source)
    return Launch(
        round_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("dcache",),
        arrays={**{name: f"{source}{name}" for name in ("marks", "sums", "bounds")}, "dcache": f"d{cache}"},
        sizes={"num_slots": entries, "log2_parts": log2_parts},
        constexprs={"LAYOUT": problem.formats[cache], "PAGE_SIZE": problem.specs[cache].shape[1], "BLOCK": ENTRIES},
    )


IMPLEMENTATION = Implementation("triton", plan)
