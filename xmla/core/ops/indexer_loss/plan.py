from collections.abc import Hashable

from xmla.core.device import Device
from xmla.core.op import Implementation, Problem
from xmla.core.ops.indexer_loss.kernels import average_kernel, indexer_loss_kernel, measure_kernel
from xmla.core.ops.indexer_scores.backward.plan import clear_sums, round_sums, sums_workspace
from xmla.core.ops.indexer_scores.plan import column_sizes, columns, query_and_keys
from xmla.core.ops.indexer_target.plan import attention_constexprs, target_launch
from xmla.core.plan import Launch, Plan, log2_of, most_registers
from xmla.core.spec import Spec

BLOCK_N = 32
WARPS = 8
NO_ATTENTION = dict.fromkeys(("Q_STRIDE_T", "Q_STRIDE_H", "ROW_STRIDE", "LSE_STRIDE", "HEADS", "DIMS"), 0) | {
    "SCALE": 0.0, "BLOCK_H": 16
}  # fmt: skip


def plan(problem: Problem, device: Device) -> Plan:
    """Two passes over the keys of a token, of which the second knows the softmax's denominator and the target's sum.

    At selected keys the target is computed once, as large as the indices; over a range of keys in both passes.
    """
    tokens, sparse = problem["T"], problem.has("indices")
    launches, workspace = clear_sums(problem), sums_workspace(problem)
    stand_ins = problem.stand_ins(ends="index_q", starts="index_q", indices="index_q", target="index_q")
    if sparse:
        stand_ins |= {"q": "index_q", "rows": "index_k", "lse": "index_weights"}
        if not problem.has("target"):
            workspace["own_target"] = Spec(problem.specs["indices"].shape, "float32")
            stand_ins["target"] = "own_target"
            launches.append(target_launch(problem, "own_target"))
    workspace |= {name: Spec((tokens,), "float32") for name in ("total", "mass", "losses")}
    # The summands of one token add up to less than the bound, but for a target that is given.
    log2_parts = log2_of(tokens * (problem["K"] if problem.has("target") else 1))
    constexprs = {
        **_renamed(query_and_keys(problem, "index_q", "index_k", "index_weights")),
        **(NO_ATTENTION if sparse else attention_constexprs(problem)),
        **columns(problem),
        "TARGET_STRIDE": problem.specs["target"].stride(0) if problem.has("target") else problem["K"] if sparse else 0,
        "HAS_TARGET": sparse,
        "COEFF": float(problem.attrs["coeff"]),
        "BLOCK_N": BLOCK_N,
    }
    sizes = {"num_tokens": tokens, **column_sizes(problem)}
    measure = Launch(
        measure_kernel,
        grid=(tokens,),
        outputs=("bounds", "total", "mass"),
        arrays=stand_ins,
        sizes=sizes,
        constexprs=constexprs,
        num_warps=WARPS,
    )
    differentiate = Launch(
        indexer_loss_kernel,
        grid=(tokens,),
        outputs=("marks", "sums", "losses", "dindex_q", "dindex_weights"),
        arrays=stand_ins,
        sizes={**sizes, "log2_parts": log2_parts},
        constexprs=constexprs,
        num_warps=WARPS,
        num_stages=1,
        max_registers=most_registers(WARPS),
    )
    average = Launch(
        average_kernel,
        grid=(1,),
        outputs=("loss",),
        sizes={"num_tokens": tokens},
        constexprs={"COEFF": float(problem.attrs["coeff"]), "BLOCK": 1024},
    )
    launches += [measure, differentiate, round_sums(problem, "dindex_k", log2_parts), average]
    results = problem.op.result_specs(problem)
    return Plan(tuple(launches), workspace | results, tuple(results))


def _renamed(constexprs: dict[str, Hashable]) -> dict[str, Hashable]:
    """The indexer's constants beside attention's."""
    return {name if name in ("D", "BLOCK_I") else f"INDEX_{name}": value for name, value in constexprs.items()}


IMPLEMENTATION = Implementation("triton", plan)
