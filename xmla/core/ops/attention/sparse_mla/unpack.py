"""Dequantise packed entries to plain rows first: each entry that a slot names once, however often it is referenced."""

from dataclasses import dataclass, replace

from xmla.core.call import Problem
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.op import Composition, same_names
from xmla.core.ops.attention.sparse_mla.gluon_marks import mark_entries_kernel
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plan import IMPLEMENTATION as SM90
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plan import takes_few_heads
from xmla.core.ops.attention.sparse_mla.gluon_sm120.plan import IMPLEMENTATION as SM120
from xmla.core.ops.attention.sparse_mla.kernels import unpack_entries_kernel
from xmla.core.plan import Condition, Constants, Implementation, Launch, Part, Plan
from xmla.core.values import Device, Spec, cdiv, larger, next_power_of_2, smaller

# Entries are dequantised first from this many references per entry of the pool on. It would pay from 16 on, 4.9 against
# 6.4 ms (H200, 2026-11-21); with 32 the rows take at most 36 bytes per reference, as much as queries and outputs of 32
# heads.
MIN_REFERENCES = 32
WARPS, SLOTS, SLOTS_A_TOKEN = 16, 8192, 2048  # of a program that marks: slots at once, and the most of one token
BLOCK, ENTRIES = 4, 8  # entries that a program unpacks at once, and in all
ROWS = {V32: PLAIN, NVFP4: PLAIN, V4: PLAIN_V4}
# What attends to the rows, by architecture. GB10 is left out: 48 SMs would read rows at 1.5 TB/s where they take
# 273 GB/s from memory, and fewer of them than of packed entries are in its L2 cache.
OVER_ROWS = {120: SM120, 90: SM90}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked(Constants):
    """Constants of the kernel that dequantises."""

    PAGE_STRIDE: int
    PAGE_SIZE: int
    LAYOUT: MlaLayout
    ROWS: MlaLayout
    BLOCK: int  # entries at once
    ENTRIES: int  # of a program; they divide 32
    PARTS: int  # a power of two, at least as many as programs have marked an entry
    OVERLAP_LIMIT: int  # core/lang/launches.py


def rows_of(problem: Problem) -> Spec:
    """The pool of plain rows, with the same slots."""
    return Spec((problem["P"], problem["R"], problem.formats["cache"].dims), problem.specs["q"].dtype)


def over_rows(problem: Problem) -> Problem:
    """A call over the unpacked rows instead of its cache."""
    rows = rows_of(problem)
    return replace(
        problem,
        specs={**problem.specs, "cache": rows},
        axes={**problem.axes, "ROW": rows.shape[2]},
        formats={"cache": ROWS[problem.formats["cache"]]},
    )


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device)
    composition.add(Part("unpack", unpack(problem, device), {"rows": "rows"}))
    names = same_names(*problem.specs, *problem.results) | {"cache": "rows"}
    composition.add(Part(problem.op, OVER_ROWS[device.arch].plan(over_rows(problem), device), names))
    return composition.plan()


def unpack(problem: Problem, device: Device) -> Plan:
    """The launches that dequantise the entries that slots name to the buffer `rows`."""
    specs, tokens, keys, entries = problem.specs, problem["T"], problem["K"], problem["P"] * problem["R"]
    layout: MlaLayout = problem.formats["cache"]
    # Of whatever size the pool is, so that it has no kernel of its own; a byte of the map is of no entry.
    size = 1 << (device.smem_bytes.bit_length() - 1)
    ranges = cdiv(entries, size - 32)
    tokens_at_once = SLOTS // min(next_power_of_2(keys), SLOTS_A_TOKEN)
    parts = larger(1, smaller(device.num_sms // ranges, cdiv(tokens, tokens_at_once)))
    words = cdiv(entries, 32)
    mark = Launch(
        mark_entries_kernel,
        grid=(parts * ranges,),
        outputs=("marks",),
        arrays=problem.stand_ins(lengths="slots"),
        sizes={
            "num_tokens": tokens,
            "num_slots": entries,
            "num_keys": keys,
            "slot_stride": specs["slots"].stride(0),
            "chunk": cdiv(words, ranges) * 32,
            "num_parts": parts,
            "num_words": words,
        },
        constexprs={
            "HAS_LENGTHS": problem.has("lengths"),
            "BLOCK": SLOTS,
            "BLOCK_K": SLOTS // tokens_at_once,
            "MAP": size,
            "WARPS": WARPS,
            "OVERLAP_LIMIT": device.overlap_limit,
        },
        num_warps=WARPS,
        spreads=device.arch == 90,  # an SM has room for one map; only there attention's programs spread, too
    )
    write = Launch(
        unpack_entries_kernel,
        grid=(cdiv(entries, ENTRIES),),
        outputs=("rows",),
        sizes={"num_parts": parts, "num_words": words},
        constexprs={
            "C": Unpacked(
                PAGE_STRIDE=specs["cache"].stride(0),
                PAGE_SIZE=problem.page_size(),
                LAYOUT=layout,
                ROWS=ROWS[layout],
                BLOCK=BLOCK,
                ENTRIES=ENTRIES,
                PARTS=next_power_of_2(device.num_sms),
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
    )
    return Plan((mark, write), {"marks": Spec((parts, words), "int32"), "rows": rows_of(problem)}, ())


def _seldom(problem: Problem, device: Device) -> str | None:
    entries = problem["P"] * problem["R"]
    references = problem["T"] * smaller(problem["K"], entries)
    if 0 < MIN_REFERENCES * entries <= references:
        return None
    return f"over {entries} entries that {references} slots name"


def _kept(problem: Problem, device: Device) -> str | None:
    if problem.formats["cache"] not in ROWS:
        return f"over {problem.formats['cache'].name!r} entries"
    if problem.has("extra_cache") or problem.attrs.batch_invariant:
        return "with extra_cache" if problem.has("extra_cache") else "with batch_invariant"
    if problem.formats["cache"] != V32:
        return None
    # Hopper's tile of 16 heads converts V3.2's entries during its products at no cost, and SM12x's of 32. SM12x's of 16
    # takes 617 µs for 1024 tokens of a prefill where rows, first written, take 577 (as its code on an H200).
    converted = problem["H"] > 16 if device.arch == 120 else takes_few_heads(problem)
    return f"of {problem['H']} heads" if converted else None


def _rows_unserved(problem: Problem, device: Device) -> str | None:
    unmet = OVER_ROWS[device.arch].unmet(over_rows(problem), device)
    return unmet and unmet[0]


def _elsewhere(problem: Problem, device: Device) -> str | None:
    return None if device.arch in OVER_ROWS else f"on {device.name}"


CONDITIONS = (
    Condition("compute capability 9.0 or 12.0", _elsewhere),
    Condition(
        "one source of 'v32', 'nvfp4' or 'v4' entries, no batch_invariant, "
        "of 'v32' more than 16 heads on 9.0, at most 16 on 12.0",
        _kept,
    ),
    Condition(f"entries that slots name {MIN_REFERENCES} times on average", _seldom),
    Condition("queries on multiples of 16 bytes", _rows_unserved),
)
IMPLEMENTATION = Implementation("gluon_unpacked", plan, CONDITIONS, "gluon")
