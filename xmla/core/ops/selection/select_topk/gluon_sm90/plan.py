from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.lang.gluon import gl
from xmla.core.ops.selection.select_topk.gluon_sm90.kernel import WARPS, topk_rows_sm90_kernel
from xmla.core.ops.selection.select_topk.sample import Sample
from xmla.core.plan import ON_HOPPER, Condition, Constants, Implementation, Launch, Plan
from xmla.core.values import Device, arithmetic, larger, next_power_of_2

MAX_K = 2048  # of which a sample leaves at most 4096 candidates, 16 of each thread, at up to MAX_COLUMNS
MAX_COLUMNS = 131072  # a bit each, and their counts, in the shared memory of three programs an SM
# Programs of three an SM: 685 µs at 8192 × 65536, 746 with 64 registers, four and spills (H200, 2026-11-29).
REGISTERS = 80

# Of rows that are no more than SMs: fewer are for clusters, wider ones for the portable kernels.
MOST_ROWS_OF_CLUSTERS, MOST_COLUMNS_OF_FEW = 64, 32768

BY_INLINE_PTX = Condition("Triton 3.9 or newer", lambda *_: None if hasattr(gl, "inline_asm") else "by an older Triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Constants):
    """Constants of Hopper's kernel of many rows."""

    HAS_STARTS: bool
    ALIGNED: bool  # logits start on a multiple of 16 bytes
    CAPACITY: int  # candidates of a row
    WORDS: int  # of bits of a row's columns
    LANES: int  # of a sample
    STEP: int  # one of so many elements is sampled
    OVERLAP_LIMIT: int  # core/lang/launches.py


def plan(problem: Problem, device: Device) -> Plan:
    rows, columns, k = problem["T"], problem["N"], problem.attrs.k
    sample, logits = Sample.of(columns, k), problem.specs["logits"]
    launch = Launch(
        topk_rows_sm90_kernel,
        grid=(rows,),
        outputs=("indices",),
        arrays=problem.stand_ins(starts="ends"),
        sizes={
            "first_row": 0,
            "num_columns": columns,
            "row_stride": logits.stride(0),
            "k": k,
            "sample_rank": sample.rank,
        },
        constexprs={
            "C": Rows(
                HAS_STARTS=problem.has("starts"),
                ALIGNED=logits.alignment == 16,
                CAPACITY=sample.capacity,
                WORDS=larger(1024, next_power_of_2(columns) // 32),
                LANES=sample.lanes,
                STEP=sample.step,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
        num_warps=WARPS.value,
        num_stages=1,
        max_registers=REGISTERS,
    )
    return Plan((launch,), problem.results, ("indices",))


def _wide(problem: Problem, _: Device) -> str | None:
    return None if problem["N"] <= MAX_COLUMNS else f"with {problem['N']} columns"


def _many_of_a_row(problem: Problem, _: Device) -> str | None:
    return None if problem.attrs.k <= MAX_K else f"with k of {problem.attrs.k}"


def _few(problem: Problem, device: Device) -> str | None:
    rows, columns = problem["T"], problem["N"]
    return None if are_many(rows, columns, device) else f"with {rows} rows of {columns} columns on {device.num_sms} SMs"


@arithmetic
def are_many(rows: int, columns: int, device: Device) -> bool:
    """Whether rows are more than SMs, or more than clusters serve and not wide."""
    return rows > device.num_sms or (rows > MOST_ROWS_OF_CLUSTERS and columns <= MOST_COLUMNS_OF_FEW)


IMPLEMENTATION = Implementation(
    "gluon_rows",
    plan,
    (
        ON_HOPPER,
        BY_INLINE_PTX,
        Condition(f"at most {MAX_COLUMNS} columns", _wide),
        Condition(f"a k of at most {MAX_K}", _many_of_a_row),
        # A program has a row, for 46 µs at 131072 columns whatever the others do, so that fewer rows leave SMs idle. At
        # that width 512 rows, of a short last round, are 0.95 times as fast, all others 1.06 to 1.33 times (H200).
        # 65 to 132 rows of 32768 columns take 12.9 to 16.0 µs, by the portable kernels 15.8 to 17.6 (H200, 2026-11-30).
        Condition(
            f"more rows than SMs, or more than {MOST_ROWS_OF_CLUSTERS} of at most {MOST_COLUMNS_OF_FEW} columns", _few
        ),
    ),
    # Not "gluon", by which ops over an indexer's keys ask for the kernels of their logits alone.
    "gluon_sm90",
)
