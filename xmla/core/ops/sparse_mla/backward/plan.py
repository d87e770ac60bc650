from xmla.core.device import Device
from xmla.core.lang.marks import clear_kernel, mark_entries_kernel
from xmla.core.op import Implementation, Problem
from xmla.core.ops.sparse_mla.backward.kernels import (
    prepare_kernel,
    round_sums_kernel,
    sparse_mla_backward_kernel,
    start_sums_kernel,
    sum_sinks_kernel,
)
from xmla.core.plan import Launch, Plan, cdiv, most_registers
from xmla.core.spec import Spec

LOG2E = 1.4426950408889634
PREPARED_HEADS = 4  # of a program of `prepare_kernel`
ENTRIES = 4  # of a program that starts or rounds sums


def configure(heads: int, device: Device) -> tuple[int, int, int]:
    """Heads and keys of a tile, and its warps."""
    if device.smem_bytes < 128 << 10:
        return 16, 16, 8
    return (16, 32, 8) if heads <= 16 else (32, 32, 8)


def plan(problem: Problem, device: Device) -> Plan:
    """Probabilities are computed again from lse. A gradient of entries is summed in integers (`kernels.py`)."""
    specs, attrs = problem.specs, problem.attrs
    tokens, heads, layout = problem["T"], problem["H"], problem.formats["cache"]
    has_sink, has_dlse, extra = problem.has("sink"), problem.has("dlse"), problem.has("extra_cache")
    block_h, block_n, warps = configure(heads, device)
    programs = tokens * cdiv(heads, block_h)
    log2_parts = max(programs - 1, 0).bit_length()
    sources = ["", "extra_"] if extra else [""]
    workspace = {
        "bounds": Spec((2,), "int32"),
        "total": Spec((tokens, heads), "float32"),
        "delta": Spec((tokens, heads), "float32"),
        "dsinks": Spec((tokens, heads) if has_sink else (1,), "float32"),
    }
    for source in ("", "extra_"):
        pages, entries, row = specs[f"{source}cache"].shape if source in sources else (1, 1, 1)
        workspace[f"{source}marks"] = Spec((pages, entries), "int8")
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
        outputs=("bounds", "total", "delta", "dsinks"),
        arrays={"out": "forward_out", "lse": "forward_lse"} | problem.stand_ins(dlse="forward_lse", sink="forward_lse"),
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
    differentiate = Launch(
        sparse_mla_backward_kernel,
        grid=(programs,),
        outputs=("marks", "sums", "extra_marks", "extra_sums", "dq"),
        arrays={"lse": "forward_lse"}
        | problem.stand_ins(
            lengths="slots", dlse="forward_lse", extra_cache="cache", extra_slots="slots", extra_lengths="slots"
        ),
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "num_extra_slots": problem["EXTRA_P"] * problem["EXTRA_R"] if extra else 0,
            "num_extra_keys": problem["EXTRA_K"] if extra else 0,
            "log2_parts": log2_parts,
        },
        constexprs={
            **strides,
            "SLOT_STRIDE": specs["slots"].stride(0),
            "PAGE_STRIDE": specs["cache"].stride(0),
            "PAGE_SIZE": problem["R"],
            "LAYOUT": layout,
            "EXTRA_SLOT_STRIDE": specs["extra_slots"].stride(0) if extra else 0,
            "EXTRA_PAGE_STRIDE": specs["extra_cache"].stride(0) if extra else 0,
            "EXTRA_PAGE_SIZE": problem["EXTRA_R"] if extra else 1,
            "EXTRA_LAYOUT": problem.formats.get("extra_cache"),
            "HAS_LENGTHS": problem.has("lengths"),
            "HAS_EXTRA_LENGTHS": problem.has("extra_lengths"),
            "OWN_LSE": has_dlse and has_sink and not attrs["lse_sink"],
            "BLOCK_H": block_h,
            "BLOCK_N": block_n,
        },
        num_warps=warps,
        num_stages=1,
        max_registers=most_registers(warps),
    )
    launches = [_clear("bounds", 2), *[launch for source in sources for launch in _start(problem, source)]]
    launches += [prepare, differentiate, *[_round(problem, source, log2_parts) for source in sources]]
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


def _clear(array: str, elements: int) -> Launch:
    return Launch(
        clear_kernel,
        grid=(cdiv(elements, 4096),),
        outputs=("cleared",),
        arrays={"cleared": array},
        sizes={"num_elements": elements},
        constexprs={"BLOCK": 4096},
    )


def _entries(problem: Problem, source: str) -> int:
    pages, entries, _ = problem.specs[f"{source}cache"].shape
    return pages * entries


def _start(problem: Problem, source: str) -> tuple[Launch, ...]:
    """Mark the entries that slots name, find their greatest value and start their sums."""
    specs, entries = problem.specs, _entries(problem, source)
    cache, slots, lengths = (f"{source}{name}" for name in ("cache", "slots", "lengths"))
    mark = Launch(
        mark_entries_kernel,
        grid=(problem["T"],),
        outputs=("marks",),
        arrays={"slots": slots, "lengths": lengths if problem.has(lengths) else slots, "marks": f"{source}marks"},
        sizes={"num_slots": entries, "num_keys": specs[slots].shape[1], "step": 1},
        constexprs={"SLOT_STRIDE": specs[slots].stride(0), "HAS_LENGTHS": problem.has(lengths), "BLOCK": 1024},
    )
    start = Launch(
        start_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("bounds", "sums"),
        arrays={"cache": cache, "marks": f"{source}marks", "sums": f"{source}sums"},
        sizes={"num_slots": entries},
        constexprs={
            "PAGE_STRIDE": specs[cache].stride(0),
            "PAGE_SIZE": specs[cache].shape[1],
            "LAYOUT": problem.formats[cache],
            "BLOCK": ENTRIES,
        },
    )
    return _clear(f"{source}marks", entries), mark, start


def _round(problem: Problem, source: str, log2_parts: int) -> Launch:
    cache, entries = f"{source}cache", _entries(problem, source)
    return Launch(
        round_sums_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("dcache",),
        arrays={"marks": f"{source}marks", "sums": f"{source}sums", "dcache": f"d{cache}"},
        sizes={"num_slots": entries, "log2_parts": log2_parts},
        constexprs={"LAYOUT": problem.formats[cache], "PAGE_SIZE": problem.specs[cache].shape[1], "BLOCK": ENTRIES},
    )


IMPLEMENTATION = Implementation("triton", plan)
