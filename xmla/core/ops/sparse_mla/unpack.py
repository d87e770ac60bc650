"""Dequantise packed entries to plain rows first: each entry that a slot names once, however often it is referenced."""

from dataclasses import dataclass, replace

from xmla.core.clearing import clear
from xmla.core.composition import Composition, same_names
from xmla.core.device import INTERPRETER, Device
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.implementation import Condition, Implementation, choose
from xmla.core.lang.marks import mark_entries_kernel
from xmla.core.ops.sparse_mla.gluon_sm90.plan import IMPLEMENTATION as SM90
from xmla.core.ops.sparse_mla.gluon_sm90.plan import takes_few_heads
from xmla.core.ops.sparse_mla.gluon_sm120.plan import IMPLEMENTATION as SM120
from xmla.core.ops.sparse_mla.kernels import unpack_entries_kernel
from xmla.core.ops.sparse_mla.plan import IMPLEMENTATION as PORTABLE
from xmla.core.plan import Constants, Launch, Part, Plan, cdiv
from xmla.core.problem import Problem
from xmla.core.spec import Spec

# Entries are dequantised first from this many references per entry of the pool on. It would pay from 16 on, 4.9 against
# 6.4 ms (H200, 2026-11-21); with 32 the rows take at most 36 bytes per reference, as much as queries and outputs of 32
# heads.
REUSE = 32
FIRST_MARKS = 4  # references per entry among the tokens whose slots are marked first
# Stores to marks meet in lines of the L2 cache: each has a word to itself where all stay within an SM's L1 cache.
MARK_STRIDE, MARKS = 4, 128 << 10  # bytes, of a mark and of all
BLOCK, BLOCK_K = 4, 512  # entries that a program unpacks at once, and slots that it looks at
ROWS = {V32: PLAIN, V4: PLAIN_V4}
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
    HAS_LENGTHS: bool
    BLOCK: int  # entries at once
    BLOCK_K: int  # slots at once


def rows_of(problem: Problem) -> Spec:
    """The pool of plain rows, with the same slots."""
    return Spec((problem["P"], problem["R"], problem.formats["cache"].dims), problem.specs["q"].dtype)


def over_rows(problem: Problem) -> Problem:
    """The same call over the rows."""
    rows = rows_of(problem)
    return replace(
        problem,
        specs={**problem.specs, "cache": rows},
        axes={**problem.axes, "ROW": rows.shape[2]},
        formats={"cache": ROWS[problem.formats["cache"]]},
    )


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device)
    composition.add(Part("unpack", unpack(problem), {"rows": "rows"}))
    # The device's serves it by the conditions below, but for the interpreter.
    attention, _ = choose((*OVER_ROWS.values(), PORTABLE), over_rows(problem), device, problem.implementation)
    names = same_names(*problem.specs, *problem.results) | {"cache": "rows"}
    composition.add(Part(problem.op, attention.plan(over_rows(problem), device), names))
    return composition.plan()


def unpack(problem: Problem) -> Plan:
    """The launches that dequantise the entries that slots name to the buffer `rows`."""
    specs, tokens, keys, entries = problem.specs, problem["T"], problem["K"], problem["P"] * problem["R"]
    layout: MlaLayout = problem.formats["cache"]
    stride = max(1, min(MARK_STRIDE, MARKS // entries))
    marks = cdiv(entries * stride, 4) * 4
    buffers = {"marks": Spec((marks,), "int8"), "rows": rows_of(problem)}
    # Some tokens first, so that most entries are marked when all follow: 27 against 98 µs at 8192 entries, 56 against
    # 114 at 131072 (H200, 2026-11-21).
    step = tokens * keys // (FIRST_MARKS * entries)
    slots = {
        "num_slots": entries, "num_keys": keys, "slot_stride": specs["slots"].stride(0), "mark_stride": stride,
    }  # fmt: skip
    first = Launch(
        mark_entries_kernel,
        grid=(cdiv(tokens, step),),
        outputs=("marks",),
        arrays=problem.stand_ins(lengths="slots"),
        sizes={**slots, "step": step},
        constexprs={"HAS_LENGTHS": problem.has("lengths"), "BLOCK": 1024},
    )
    write = Launch(
        unpack_entries_kernel,
        grid=(max(tokens, cdiv(entries, BLOCK)),),
        outputs=("marks", "rows"),
        arrays=problem.stand_ins(lengths="slots"),
        sizes={**slots, "num_tokens": tokens},
        constexprs={
            "C": Unpacked(
                PAGE_STRIDE=specs["cache"].stride(0),
                PAGE_SIZE=problem.page_size(),
                LAYOUT=layout,
                ROWS=ROWS[layout],
                HAS_LENGTHS=problem.has("lengths"),
                BLOCK=BLOCK,
                BLOCK_K=BLOCK_K,
            )
        },
    )
    return Plan((clear("marks", marks), first, write), buffers, ())


def _seldom(problem: Problem, device: Device) -> str | None:
    entries = problem["P"] * problem["R"]
    references = problem["T"] * min(problem["K"], entries)
    return None if 0 < REUSE * entries <= references else f"over {entries} entries that {references} slots name"


def _kept(problem: Problem, device: Device) -> str | None:
    if problem.formats["cache"] not in ROWS:
        return f"over {problem.formats['cache'].name!r} entries"
    if problem.has("extra_cache") or problem.attrs.batch_invariant:
        return "with extra_cache" if problem.has("extra_cache") else "with batch_invariant"
    # Hopper's tile of 16 heads dequantises during its products at no cost, so its entries stay packed.
    return f"of {problem['H']} heads" if device.arch != 120 and takes_few_heads(problem) else None


def _rows_unserved(problem: Problem, device: Device) -> str | None:
    if device == INTERPRETER:
        return None
    unmet = OVER_ROWS[device.arch].unmet(over_rows(problem), device)
    return unmet and unmet[0]


def _elsewhere(problem: Problem, device: Device) -> str | None:
    # The interpreter does not need it, but tests run these kernels there.
    return None if device.arch in (INTERPRETER.arch, *OVER_ROWS) else f"on {device.name}"


CONDITIONS = (
    Condition("compute capability 9.0 or 12.0", _elsewhere),
    Condition("one source of 'v32' or 'v4' entries, no batch_invariant, more heads than 16 of 'v32' on 9.0", _kept),
    Condition(f"entries that slots name {REUSE} times on average", _seldom),
    Condition("queries on multiples of 16 bytes", _rows_unserved),
)
IMPLEMENTATION = Implementation("gluon_unpacked", plan, CONDITIONS, "gluon")
