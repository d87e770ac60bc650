from xmla.core.call import Problem
from xmla.core.ops.training.indexer_scores.constants import columns
from xmla.core.ops.training.indexer_target.constants import Attention, Target
from xmla.core.ops.training.indexer_target.kernels import indexer_target_kernel
from xmla.core.plan import Launch, Plan, Rows
from xmla.core.values import Device, cdiv

BLOCK_N = 64


def target_launch(problem: Problem, target: str, tokens: Rows) -> Launch:
    """Write the target at the call's indices, of these tokens, to the array of this name."""
    return Launch(
        indexer_target_kernel,
        grid=(tokens.count * cdiv(problem["K"], BLOCK_N),),
        outputs=("target",),
        arrays={"target": target} | problem.stand_ins(ends="indices", starts="indices"),
        sizes={"first_token": tokens.first, "num_keys": problem["N"], "num_columns": problem["K"]},
        constexprs={"C": Target(ATTENTION=Attention.of(problem), COLUMNS=columns(problem), BLOCK_N=BLOCK_N)},
        num_warps=4 if problem["H"] <= 64 else 8,
    )


def plan(problem: Problem, device: Device) -> Plan:
    return Plan((target_launch(problem, "target", Rows(0, problem["T"])),), problem.results, ("target",))
