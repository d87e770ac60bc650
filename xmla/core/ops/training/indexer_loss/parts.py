"""What both ways to compute the loss launch alike: the target and the mean, and the parts of tokens that they take."""

from collections.abc import Mapping

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_loss.constants import RangeTarget
from xmla.core.ops.training.indexer_loss.kernels import average_kernel, range_target_kernel
from xmla.core.ops.training.indexer_scores.constants import Ranges
from xmla.core.ops.training.indexer_target.constants import Attention
from xmla.core.ops.training.indexer_target.plan import target_launch
from xmla.core.plan import ALIGNMENT, Launch, Plan, Rows, divided
from xmla.core.values import Spec, cdiv, larger, round_up, smaller

TARGET_BLOCK_N, TARGET_STAGES = 128, 3  # two programs an SM of Hopper
TURN = 16  # tokens that take a tile of keys one after the other: their queries stay in the L2 cache
MAX_PARTS = 4096  # of tokens whose target is stored at a time: each has three to five launches


def target(problem: Problem, tokens: Rows) -> list[Launch]:
    """Write the target of these tokens to `own_target`, if none is given."""
    if problem.has("target"):
        return []
    if problem.has("indices"):
        return [target_launch(problem, "own_target", tokens)]
    constants = RangeTarget(
        ATTENTION=Attention.of(problem), COLUMNS=Ranges.of(problem), BLOCK_N=TARGET_BLOCK_N, TURN=TURN
    )
    launch = Launch(
        range_target_kernel,
        grid=(cdiv(tokens.count, TURN) * TURN * cdiv(problem["N"], TARGET_BLOCK_N),),
        outputs=("target",),
        arrays={"target": "own_target"} | problem.stand_ins(ends="lse", starts="lse"),
        sizes={"first_token": tokens.first, "part_tokens": tokens.count, "num_keys": problem["N"]},
        constexprs={"C": constants},
        num_warps=4 if problem["H"] <= 64 else 8,
        num_stages=TARGET_STAGES,
    )
    return [launch]


def target_stride(problem: Problem) -> int:
    """Elements between the targets of two tokens; rows over ranges are as long as there are keys."""
    if problem.has("target"):
        return problem.specs["target"].stride(0)
    return problem["K"] if problem.has("indices") else 0


def average(problem: Problem) -> Launch:
    return Launch(
        average_kernel,
        grid=(1,),
        outputs=("loss",),
        sizes={"num_tokens": problem["T"]},
        constexprs={"COEFF": float(problem.attrs.coeff), "BLOCK": 1024},
    )


def parts_of_tokens(
    problem: Problem, workspace: Mapping[str, Spec], rows: Mapping[str, int], multiple: int = 1
) -> list[Rows]:
    """The parts whose buffers, a row of so many floats a token, fit beside the workspace; all tokens without any.

    Those of a part are a multiple of so many, but for the last part.

    Raises:
        UnsupportedError: `workspace_bytes` is too small.
    """
    tokens, given = problem["T"], problem.attrs.workspace_bytes
    fixed = Plan((), workspace, ()).workspace_bytes
    least = smaller(larger(cdiv(tokens, MAX_PARTS) // multiple, 1) * multiple, tokens)
    needed = fixed + sum(round_up(least * 4 * row, ALIGNMENT) for row in rows.values())
    if needed > given:
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    row_bytes = 4 * sum(rows.values())
    beside = fixed + ALIGNMENT * (len(rows) - 1)  # each buffer ends on a multiple
    fitting = (given - beside) // ALIGNMENT * ALIGNMENT // row_bytes if row_bytes else tokens
    size = tokens if fitting >= tokens else larger(fitting // multiple * multiple, least)
    return divided(tokens, larger(size, 1)) or [Rows(0, 0)]
