from math import prod

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_loss.backward.kernels import scale_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv

BLOCK = 1024


def plan(problem: Problem, device: Device) -> Plan:
    results = problem.results
    return Plan(tuple(_scale(problem, name) for name in results), results, tuple(results))


def _scale(problem: Problem, result: str) -> Launch:
    spec = problem.specs[f"forward_{result}"]
    elements, three = prod(spec.shape), len(spec.shape) == 3
    return Launch(
        scale_kernel,
        grid=(cdiv(elements, BLOCK),),
        outputs=("scaled",),
        arrays={"gradient": f"forward_{result}", "scaled": result},
        sizes={"num_elements": elements},
        constexprs={
            "STRIDE_OUTER": spec.stride(0),
            "STRIDE_INNER": spec.stride(1) if three else 0,
            "INNER": max(spec.shape[1], 1) if three else 1,
            "DIMS": max(spec.shape[-1], 1),
            "BLOCK": BLOCK,
        },
    )
