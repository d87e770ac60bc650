from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import KEYS, ROWS, indexer_logits_sm90_kernel
from xmla.core.ops.indexer.shared import SM90_CONDITIONS, Query, head_rows
from xmla.core.plan import Constants, Implementation, Launch, Plan
from xmla.core.values import Device, arithmetic, cdiv

# Keys of a CTA: 1902 µs with 1024, 2043 with 2048 at 2048 × 65536 (H200, 2026-11-22).
CHUNKS = (1024, 512, 256, 128)
PROGRAMS_A_SM = 3
REGISTERS = 168  # per thread, so that they fit


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperLogits(Constants):
    """Constants of Hopper's kernel."""

    QUERY: Query
    KEY_STRIDE: int


def tokens_a_program(problem: Problem, device: Device) -> int:
    return ROWS.value // head_rows(problem)


def grid_of(problem: Problem, device: Device, tokens: int) -> tuple[tuple[int, ...], int]:
    """The programs of so many tokens, and the keys of each."""
    keys = problem["N"]
    groups = cdiv(tokens, tokens_a_program(problem, device))
    chunk = chunk_of(groups, keys, device)
    return (groups * cdiv(keys, chunk),), chunk


@arithmetic
def chunk_of(groups: int, keys: int, device: Device) -> int:
    """The keys of a program, of so many groups of tokens."""

    def steps(chunk: int) -> int:
        """Sequential products: in each wave of CTAs those of one CTA, and about two for its queries."""
        programs = groups * cdiv(keys, chunk)
        return cdiv(programs, PROGRAMS_A_SM * device.num_sms) * (chunk // KEYS.value + 2)

    return min(CHUNKS, key=steps)


def plan(problem: Problem, device: Device) -> Plan:
    tokens, keys = problem["T"], problem["N"]
    grid, chunk = grid_of(problem, device, tokens)
    launch = Launch(
        indexer_logits_sm90_kernel,
        grid=grid,
        outputs=("logits",),
        sizes={"first_row": 0, "num_tokens": tokens, "num_keys": keys, "chunk": chunk},
        constexprs={"C": HopperLogits(QUERY=Query.of(problem), KEY_STRIDE=problem.specs["keys"].stride(0))},
        num_warps=4,
        num_stages=1,
        max_registers=REGISTERS,
    )
    return Plan((launch,), problem.results, ("logits",))


IMPLEMENTATION = Implementation("gluon_sm90", plan, SM90_CONDITIONS, "gluon", tokens_a_program)
