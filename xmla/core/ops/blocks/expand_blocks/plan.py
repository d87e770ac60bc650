from xmla.core.call import Problem
from xmla.core.ops.blocks.expand_blocks.kernels import expand_blocks_kernel
from xmla.core.ops.blocks.shared import entries_of, expanded_columns
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_C = 1024  # columns of a program; of 256, programs that have hardly begun wait for one another


def plan(problem: Problem, device: Device) -> Plan:
    results = problem.results
    parts = max(cdiv(expanded_columns(problem), BLOCK_C), 1)
    launch = Launch(
        expand_blocks_kernel,
        grid=(problem["T"] * parts,),
        outputs=("indices",),
        sizes={
            "num_columns": entries_of(problem),
            "blocks_stride": problem.specs["blocks"].stride(0),
            "width": expanded_columns(problem),
            "parts": parts,
        },
        constexprs={
            "UNIT": results["indices"].vector(expanded_columns(problem)),
            "GRANULARITY": problem.attrs.granularity,
            "TAIL": problem.attrs.tail,
            "BLOCK_C": BLOCK_C,
        },
    )
    return Plan((launch,), results, ("indices",))
