"""The plan of a call: `plan_call` has it once for all calls of the same specs, attributes and device."""

import logging
from functools import lru_cache

from xmla.core.call import LARGEST_SIZE, Problem
from xmla.core.errors import UnsupportedError
from xmla.core.op.op import Op
from xmla.core.plan import Plan
from xmla.core.values import INTERPRETER, MIN_ARCH, Attributes, Device, Spec, largest

log = logging.getLogger("xmla.plans")


def make_plan(
    op: Op, specs: tuple[Spec | None, ...], attrs: Attributes, device: Device, implementation: str | None = None
) -> tuple[Plan, tuple[Spec, ...]]:
    """Bind and plan a call: the plan and the specs of its results, in order. `specs` follow `op.tensors`."""
    op.check_implementation(implementation)
    if implementation == "reference":
        raise UnsupportedError(f"{op.name}: implementation 'reference' is the function's alone; a plan has kernels")
    problem = op.bind(dict(zip(op.tensors, specs, strict=True)), attrs, implementation)
    plan = op.plan(problem, device)
    _check_architecture(problem, device)
    sizes = [(launch, name, size) for launch in plan.launches for name, size in launch.sizes.items()]
    if largest({id(size): size for _, _, size in sizes}.values()) > LARGEST_SIZE:
        launch, name, size = next(each for each in sizes if each[2] > LARGEST_SIZE)
        supported = f"sizes and strides in elements up to {LARGEST_SIZE}"
        raise UnsupportedError(f"{op.name}: {name} of {launch.name} is {size}, supported: {supported}")
    log.debug("%s on %s: %s", op.name, device.name, plan)
    return plan, tuple(problem.results.values())


# A full collection of garbage looks at some twenty objects of each plan.
plan_call = lru_cache(maxsize=1 << 11)(make_plan)


def _check_architecture(problem: Problem, device: Device) -> None:
    """Refuse a device older than the kernels' instructions."""
    if INTERPRETER.arch < device.arch < MIN_ARCH:
        got, supported = (f"{arch // 10}.{arch % 10}" for arch in (device.arch, MIN_ARCH))
        raise UnsupportedError(
            f"{problem.op}: device {device.name} has compute capability {got}, supported: {supported} and later"
        )
