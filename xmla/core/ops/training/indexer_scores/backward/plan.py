from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.ops.indexer.shared import Query
from xmla.core.ops.training.indexer_scores.backward.kernels import (
    bound_scores_kernel,
    indexer_scores_backward_kernel,
    round_keys_kernel,
)
from xmla.core.ops.training.indexer_scores.constants import Indexer, ScoresDerivative, columns
from xmla.core.ops.training.indexer_scores.plan import column_sizes, num_columns
from xmla.core.plan import Launch, Plan, clear, most_registers
from xmla.core.values import Device, Spec, cdiv, log2_of

BLOCK_N = 32
WARPS = 8
KEYS = 16  # of a program that rounds sums


def sums_workspace(problem: Problem) -> dict[str, Spec]:
    """The buffers of sums over tokens of the keys' gradients: integers, whose order does not matter."""
    return {
        "bounds": Spec((problem["N"],), "int32"),
        "marks": Spec((problem["N"],), "int8"),
        "sums": Spec((problem["N"], 2 * problem["D"]), "int32"),
    }


def clear_sums(problem: Problem) -> list[Launch]:
    counts = {"bounds": problem["N"], "marks": problem["N"], "sums": 2 * problem["N"] * problem["D"]}
    return [clear(name, count) for name, count in counts.items()]


def round_sums(problem: Problem, dk: str, log2_parts: int) -> Launch:
    return Launch(
        round_keys_kernel,
        grid=(cdiv(problem["N"], KEYS),),
        outputs=("dk",),
        arrays={"dk": dk},
        sizes={"num_keys": problem["N"], "log2_parts": log2_parts},
        constexprs={"D": problem["D"], "BLOCK": KEYS},
    )


def plan(problem: Problem, device: Device) -> Plan:
    # With indices a token may name a key as often as it has columns.
    log2_parts = log2_of(problem["T"] * (num_columns(problem) if problem.has("indices") else 1))
    stand_ins = problem.stand_ins(ends="q", starts="q", indices="q")
    constants = ScoresDerivative(
        INDEXER=Indexer.with_keys(problem),
        COLUMNS=columns(problem),
        BLOCK_N=BLOCK_N,
        DSCORE_STRIDE=problem.specs["dscores"].stride(0),
    )
    bound = Launch(
        bound_scores_kernel,
        grid=(problem["T"],),
        outputs=("bounds",),
        arrays=stand_ins,
        sizes=column_sizes(problem),
        constexprs={"C": replace(constants, INDEXER=Query.of(problem, "q"), BLOCK_N=1024)},
    )
    differentiate = Launch(
        indexer_scores_backward_kernel,
        grid=(problem["T"],),
        outputs=("marks", "sums", "dq", "dweights"),
        arrays=stand_ins,
        sizes={**column_sizes(problem), "log2_parts": log2_parts},
        constexprs={"C": constants},
        num_warps=WARPS,
        num_stages=1,
        max_registers=most_registers(WARPS),
    )
    results = problem.results
    launches = (*clear_sums(problem), bound, differentiate, round_sums(problem, "dk", log2_parts))
    return Plan(launches, {**sums_workspace(problem), **results}, tuple(results))
