from collections.abc import Mapping
from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_loss.constants import Loss, RangeTarget
from xmla.core.ops.training.indexer_loss.kernels import (
    average_kernel,
    bound_kernel,
    indexer_loss_kernel,
    measure_kernel,
    range_target_kernel,
)
from xmla.core.ops.training.indexer_scores.backward.plan import clear_sums, round_sums, sums_workspace
from xmla.core.ops.training.indexer_scores.constants import Columns, Indexer
from xmla.core.ops.training.indexer_scores.plan import column_sizes, num_columns
from xmla.core.ops.training.indexer_target.constants import Attention
from xmla.core.ops.training.indexer_target.plan import target_launch
from xmla.core.plan import ALIGNMENT, Launch, Plan, Rows, divided, most_registers
from xmla.core.values import Device, Spec, cdiv, log2_of, round_up

MEASURE_WARPS, MEASURE_BLOCK_N = 4, 64
TARGET_BLOCK_N, TARGET_STAGES = 128, 3  # two programs an SM of Hopper
TURN = 16  # tokens that take a tile of keys one after the other: their queries stay in the L2 cache
MAX_PARTS = 4096  # of tokens whose target is stored at a time: each has three launches


def differentiating(device: Device, sparse: bool) -> tuple[int, int]:
    """Warps of a program that computes gradients, and the keys of its tile."""
    if device.arch == 90:
        # Two programs an SM: one multiplies while the other waits. 64 keys at indices spill their addresses.
        return 4, 32 if sparse else 64
    return 4 if device.has_tensor_memory else 8, 32


def plan(problem: Problem, device: Device) -> Plan:
    """The bounds of all summands first; then, in parts of tokens whose target fits the workspace, all that reads it."""
    tokens, sparse = problem["T"], problem.has("indices")
    workspace = sums_workspace(problem) | {name: Spec((tokens,), "float32") for name in ("total", "mass", "losses")}
    own_target = not problem.has("target")
    parts = _parts(problem, workspace)
    stand_ins = problem.stand_ins(ends="index_q", starts="index_q", indices="index_q")
    reading, (warps, block_n) = dict(stand_ins), differentiating(device, sparse)
    if own_target:
        workspace["own_target"] = Spec((parts[0].count, num_columns(problem)), "float32")
        reading["target"] = "own_target"
    # The summands of one token add up to less than the bound, but for a target that is given.
    log2_parts = log2_of(tokens * (1 if own_target else problem["K"]))
    constants = Loss(
        INDEXER=Indexer.of(problem, "index_q", "index_k", "index_weights"),
        COLUMNS=Columns.of(problem),
        TARGET_STRIDE=problem.specs["target"].stride(0) if problem.has("target") else problem["K"] if sparse else 0,
        COEFF=float(problem.attrs.coeff),
        BLOCK_N=block_n,
    )
    sizes = column_sizes(problem)
    bound = Launch(
        bound_kernel,
        grid=(tokens,),
        outputs=("bounds",),
        arrays=stand_ins,
        sizes={"num_tokens": tokens, **sizes},
        constexprs={"C": replace(constants, BLOCK_N=1024)},
    )

    def target(part: Rows) -> list[Launch]:
        if not own_target:
            return []
        return [target_launch(problem, "own_target", part) if sparse else _range_target(problem, part)]

    def measure(part: Rows) -> Launch:
        return Launch(
            measure_kernel,
            grid=(part.count,),
            outputs=("total", "mass"),
            arrays=reading,
            sizes={"first_token": part.first, **sizes},
            constexprs={"C": replace(constants, BLOCK_N=MEASURE_BLOCK_N)},
            num_warps=MEASURE_WARPS,
        )

    def differentiate(part: Rows) -> Launch:
        return Launch(
            indexer_loss_kernel,
            grid=(part.count,),
            outputs=("marks", "sums", "losses", "dindex_q", "dindex_weights"),
            arrays=reading,
            sizes={"first_token": part.first, "num_tokens": tokens, **sizes, "log2_parts": log2_parts},
            constexprs={"C": constants},
            num_warps=warps,
            num_stages=1,
            max_registers=most_registers(warps),
        )

    launches = [*clear_sums(problem), bound]
    for part in parts:
        launches += [*target(part), measure(part), differentiate(part)]
    average = Launch(
        average_kernel,
        grid=(1,),
        outputs=("loss",),
        sizes={"num_tokens": tokens},
        constexprs={"COEFF": float(problem.attrs.coeff), "BLOCK": 1024},
    )
    launches += [round_sums(problem, "dindex_k", log2_parts), average]
    results = problem.results
    return Plan(tuple(launches), {**workspace, **results}, tuple(results))


def _range_target(problem: Problem, tokens: Rows) -> Launch:
    """Write the target over the ranges of these tokens."""
    constants = RangeTarget(
        ATTENTION=Attention.of(problem), COLUMNS=Columns.of(problem), BLOCK_N=TARGET_BLOCK_N, TURN=TURN
    )
    return Launch(
        range_target_kernel,
        grid=(cdiv(tokens.count, TURN) * TURN * cdiv(problem["N"], TARGET_BLOCK_N),),
        outputs=("target",),
        arrays={"target": "own_target"} | problem.stand_ins(ends="lse", starts="lse"),
        sizes={"first_token": tokens.first, "part_tokens": tokens.count, "num_keys": problem["N"]},
        constexprs={"C": constants},
        num_warps=4 if problem["H"] <= 64 else 8,
        num_stages=TARGET_STAGES,
    )


def _parts(problem: Problem, workspace: Mapping[str, Spec]) -> list[Rows]:
    """The tokens whose target is stored at a time, in parts that fit the call's workspace; all of them if none is."""
    tokens, given = problem["T"], problem.attrs.workspace_bytes
    row = 0 if problem.has("target") else 4 * num_columns(problem)
    fixed = Plan((), workspace, ()).workspace_bytes
    least = cdiv(tokens, MAX_PARTS)
    needed = fixed + round_up(least * row, ALIGNMENT)
    if needed > given:
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    size = min(tokens, (given - fixed) // ALIGNMENT * ALIGNMENT // row) if row else tokens
    return divided(tokens, max(size, 1)) or [Rows(0, 0)]
