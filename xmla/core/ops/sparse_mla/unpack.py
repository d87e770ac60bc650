"""Packed entries as plain rows: each converted once, however often it is referred to, if a slot names it at all."""

from xmla.core.layout import mla_layout
from xmla.core.op import Problem
from xmla.core.ops.sparse_mla.kernels import clear_marks_kernel, mark_entries_kernel, unpack_entries_kernel
from xmla.core.plan import Launch, Plan, cdiv
from xmla.core.spec import Spec

FIRST_MARKS = 4  # references an entry among the tokens whose slots are marked before the others'


def unpacking(problem: Problem, rows: Problem) -> Plan:
    """The launches that write the entries of `problem` that slots name to the buffer `rows`, the cache of that call."""
    specs, entries, keys = problem.specs, problem["P"] * problem["R"], problem["K"]
    buffers = {"marks": Spec((problem["P"], problem["R"]), "int8"), "rows": rows.specs["cache"]}
    clear = Launch(clear_marks_kernel, (cdiv(entries, 4096),), (), (entries,), ("marks",), (("BLOCK", 4096),))

    def mark(step: int) -> Launch:
        return Launch(
            mark_entries_kernel,
            grid=(cdiv(problem["T"], step),),
            inputs=("slots", problem.either("lengths", "slots")),
            sizes=(entries, keys, step),
            outputs=("marks",),
            constexprs=(
                ("SLOT_STRIDE", specs["slots"].stride(0)),
                ("HAS_LENGTHS", problem.has("lengths")),
                ("BLOCK", 1024),
            ),
        )

    # Some tokens first, so that most entries are marked when all follow: 27 against 98 µs at 8192 entries, 56 against
    # 114 at 131072 (H200, 2026-11-21).
    first = mark(problem["T"] * keys // (FIRST_MARKS * entries))
    unpack = Launch(
        unpack_entries_kernel,
        grid=(cdiv(entries, 4),),
        inputs=("cache", "marks"),
        sizes=(entries,),
        outputs=("rows",),
        constexprs=(
            ("PAGE_STRIDE", specs["cache"].stride(0)),
            ("PAGE_SIZE", problem["R"]),
            ("LAYOUT", mla_layout(problem)),
            ("ROWS", mla_layout(rows)),
            ("BLOCK", 4),
        ),
    )
    return Plan((clear, first, mark(1), unpack), buffers, ())
