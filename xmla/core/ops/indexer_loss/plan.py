from collections.abc import Mapping

from xmla.core.device import Device
from xmla.core.implementation import Implementation
from xmla.core.ops.indexer_loss.constants import Loss
from xmla.core.ops.indexer_loss.kernels import average_kernel, indexer_loss_kernel, measure_kernel
from xmla.core.ops.indexer_scores.backward.plan import clear_sums, round_sums, sums_workspace
from xmla.core.ops.indexer_scores.constants import Columns, Indexer
from xmla.core.ops.indexer_scores.plan import column_sizes
from xmla.core.ops.indexer_target.constants import Attention
from xmla.core.ops.indexer_target.plan import target_launch
from xmla.core.plan import ALIGNMENT, Launch, Plan, cdiv, log2_of, most_registers
from xmla.core.problem import Problem
from xmla.core.spec import Spec

BLOCK_N = 32
WARPS = 8
MAX_PARTS = 1024  # of tokens whose target is stored at a time: each has four launches


def plan(problem: Problem, device: Device) -> Plan:
    """Two passes over the keys of a token, of which the second knows the softmax's denominator and the target's sum.

    Over a range of keys the target is computed in both passes. At selected keys it is stored, for as many tokens as fit
    the workspace, and computed again only if those are not all.
    """
    tokens, sparse = problem["T"], problem.has("indices")
    launches, workspace = clear_sums(problem), sums_workspace(problem)
    workspace |= {name: Spec((tokens,), "float32") for name in ("total", "mass", "losses")}
    own_target = sparse and not problem.has("target")
    parts = _parts(problem, workspace, own_target)
    stand_ins = problem.stand_ins(ends="index_q", starts="index_q", indices="index_q", target="index_q")
    if sparse:
        stand_ins |= {"q": "index_q", "rows": "index_k", "lse": "index_weights"}
    if own_target:
        workspace["own_target"] = Spec((len(parts[0]), problem["K"]), "float32")
        stand_ins["target"] = "own_target"
    # The summands of one token add up to less than the bound, but for a target that is given.
    log2_parts = log2_of(tokens * (problem["K"] if problem.has("target") else 1))
    constants = Loss(
        INDEXER=Indexer.of(problem, "index_q", "index_k", "index_weights"),
        COLUMNS=Columns.of(problem),
        ATTENTION=None if sparse else Attention.of(problem),
        TARGET_STRIDE=problem.specs["target"].stride(0) if problem.has("target") else problem["K"] if sparse else 0,
        COEFF=float(problem.attrs.coeff),
        BLOCK_N=BLOCK_N,
    )
    sizes = {"num_tokens": tokens, **column_sizes(problem)}

    def target(part: range) -> list[Launch]:
        return [target_launch(problem, "own_target", part)] if own_target else []

    def measure(part: range) -> Launch:
        return Launch(
            measure_kernel,
            grid=(len(part),),
            outputs=("bounds", "total", "mass"),
            arrays=stand_ins,
            sizes={"first_token": part.start, **sizes},
            constexprs={"C": constants},
            num_warps=WARPS,
        )

    def differentiate(part: range) -> Launch:
        return Launch(
            indexer_loss_kernel,
            grid=(len(part),),
            outputs=("marks", "sums", "losses", "dindex_q", "dindex_weights"),
            arrays=stand_ins,
            sizes={"first_token": part.start, **sizes, "log2_parts": log2_parts},
            constexprs={"C": constants},
            num_warps=WARPS,
            num_stages=1,
            max_registers=most_registers(WARPS),
        )

    for part in parts:
        launches += [*target(part), measure(part)]
    # A key's unit is known when all tokens are measured. The target of the last part is still there.
    launches.append(differentiate(parts[-1]))
    for part in parts[:-1]:
        launches += [*target(part), differentiate(part)]
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


def _parts(problem: Problem, workspace: Mapping[str, Spec], own_target: bool) -> list[range]:
    """The tokens whose target is stored at a time, in parts that fit the call's workspace; all of them if none is."""
    tokens, given = problem["T"], problem.attrs.workspace_bytes
    row = 4 * problem["K"] if own_target else 0
    fixed = Plan((), workspace, ()).workspace_bytes
    least = cdiv(tokens, MAX_PARTS)
    needed = fixed + cdiv(least * row, ALIGNMENT) * ALIGNMENT
    if needed > given:
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    size = min(tokens, (given - fixed) // ALIGNMENT * ALIGNMENT // row) if row else tokens
    return [range(first, min(first + size, tokens)) for first in range(0, tokens, max(size, 1))] or [range(0)]


IMPLEMENTATION = Implementation("triton", plan)
