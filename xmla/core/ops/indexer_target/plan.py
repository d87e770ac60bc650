from collections.abc import Hashable

from xmla.core.device import Device
from xmla.core.implementation import Implementation
from xmla.core.ops.indexer_target.kernels import indexer_target_kernel
from xmla.core.plan import Launch, Plan, cdiv, next_power_of_2
from xmla.core.problem import Problem

BLOCK_N = 64


def attention_constexprs(problem: Problem) -> dict[str, Hashable]:
    """Constexprs of attention's queries, rows and lse."""
    specs = problem.specs
    return {
        "Q_STRIDE_T": specs["q"].stride(0),
        "Q_STRIDE_H": specs["q"].stride(1),
        "ROW_STRIDE": specs["rows"].stride(0),
        "LSE_STRIDE": specs["lse"].stride(0),
        "HEADS": problem["H"],
        "DIMS": problem["L+E"],
        "SCALE": float(problem.attrs.softmax_scale),
        "BLOCK_H": max(16, next_power_of_2(problem["H"])),
    }


def target_launch(problem: Problem, target: str, tokens: range) -> Launch:
    """Write the target at the call's indices, of these tokens, to the array of this name."""
    return Launch(
        indexer_target_kernel,
        grid=(len(tokens) * cdiv(problem["K"], BLOCK_N),),
        outputs=("target",),
        arrays={"target": target} | problem.stand_ins(ends="indices", starts="indices"),
        sizes={"first_token": tokens.start, "num_keys": problem["N"], "num_columns": problem["K"]},
        constexprs={
            **attention_constexprs(problem),
            "INDEX_STRIDE": problem.specs["indices"].stride(0),
            "HAS_ENDS": problem.has("ends"),
            "HAS_STARTS": problem.has("starts"),
            "BLOCK_N": BLOCK_N,
        },
        num_warps=4 if problem["H"] <= 64 else 8,
    )


def plan(problem: Problem, device: Device) -> Plan:
    return Plan((target_launch(problem, "target", range(problem["T"])),), problem.results, ("target",))


IMPLEMENTATION = Implementation("triton", plan)
