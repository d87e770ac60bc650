from xmla.core.call import Problem
from xmla.core.ops.slots.split_batch.kernels import split_counts_kernel, token_rows_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK_T, BLOCK_B = 64, 128


def plan(problem: Problem, device: Device) -> Plan:
    attrs = problem.attrs
    sizes = {"num_requests": problem["B"], "num_tokens": attrs.num_tokens}
    counts = Launch(
        split_counts_kernel,
        grid=(1,),
        outputs=("counts",),
        arrays=problem.stand_ins(has_context="query_starts"),
        sizes=sizes,
        constexprs={
            "HAS_CONTEXT": problem.has("has_context"),
            "THRESHOLD": attrs.decode_threshold,
            "UNIFORM": attrs.require_uniform,
            "BLOCK_B": BLOCK_B,
        },
    )
    rows = Launch(
        token_rows_kernel,
        grid=(cdiv(attrs.num_tokens, BLOCK_T),),
        outputs=("request_ids", "token_lengths"),
        sizes=sizes,
        constexprs={"BLOCK_T": BLOCK_T, "BLOCK_B": BLOCK_B},
    )
    return Plan((counts, rows), problem.results, tuple(problem.results))
