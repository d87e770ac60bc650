"""Calls that are differentiated: the call of an op's derivative, and what is refused because there is none."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from xmla.core.call import CalledAs
from xmla.core.errors import UnsupportedError
from xmla.core.op.op import Op
from xmla.core.values import Attributes, Spec


@dataclass(frozen=True, slots=True)
class DerivativeCall:
    """A call of an op's derivative: `arguments` are those given."""

    op: Op
    arguments: dict[str, Any]
    attrs: Attributes
    implementation: str | None


def derivative_call(
    op: Op, arguments: Mapping[str, Any], results: Iterable[Any], gradients: Iterable[Any],
    zeros_like: Callable[[Any], Any], attrs: Attributes, implementation: str | None,
) -> DerivativeCall:  # fmt: skip
    """The derivative's call, of a call's arguments, results and their gradients, None for one that is zero."""
    if op.derivative is None:
        raise RuntimeError(f"{op.name} has no derivative")
    named = dict(arguments)
    for name, result, gradient in zip(op.outputs, results, gradients, strict=True):
        named[f"forward_{name}"] = result
        if name in op.differentiable:
            if gradient is None and f"d{name}" not in op.derivative.optional:
                gradient = zeros_like(result)
            named[f"d{name}"] = gradient
        elif gradient is not None:
            supported = f"derivatives of {', '.join(op.differentiable)}"
            raise UnsupportedError(f"{op.name}: the result {name} is differentiated, supported: {supported}")
    return DerivativeCall(
        op.derivative,
        {name: named[name] for name in op.derivative.tensors if named.get(name) is not None},
        op.derivative.Values(*[getattr(attrs, name) for name in op.derivative.defaults]),
        implementation if implementation in (*op.derivative.choices, "reference") else None,
    )


def refuse_second_derivative(op: Op, constant: str) -> NoReturn:
    _refuse(op, "a gradient is differentiated", "constants", constant)


def refuse_forward_mode(op: Op, argument: str, reverse: str) -> NoReturn:
    """Raise for an argument that has a derivative in reverse mode alone, which the framework calls `reverse`."""
    what = f"{argument} is differentiated in forward mode"
    raise UnsupportedError(f"{op.name}: {what}, supported: reverse mode ({reverse})")


def check_derivative(
    op: Op, constants: Mapping[str, str], specs: Mapping[str, Spec | None], attrs: Attributes,
    implementation: str | None, out: bool = False,
) -> None:  # fmt: skip
    """Refuse a call that is differentiated with respect to some arguments, if there is no such derivative.

    `constants`: for each of them the framework's call that makes it a constant.
    `out`: whether the caller gives the tensors that results are written to.

    Raises:
        UnsupportedError: The op or the argument has no derivative, or the derivative does not take an argument or a
            format of the call.
    """
    supported = f"derivatives of {', '.join(op.gradients)}" if op.gradients else _constants(op)
    for argument, constant in constants.items():
        if argument not in op.gradients:
            _refuse(op, f"{argument} is differentiated", supported, constant)
    if op.derivative is None or not constants:
        return
    argument, constant = next(iter(constants.items()))
    if out:
        _refuse(op, f"{argument} is differentiated with out", f"{supported} without", constant)
    problem = op.bind(specs, attrs, implementation)
    of_results_alone = op.derivative.tensors.keys().isdisjoint(op.tensors)
    for name in problem.specs:
        if name not in op.derivative.tensors and not of_results_alone:
            _refuse(op, f"{argument} is differentiated with {name}", f"{supported} without", constant)
    gradients = [spec if name in op.differentiable else None for name, spec in problem.results.items()]
    operands = problem.specs, problem.results.values(), gradients
    call = derivative_call(op, *operands, lambda spec: spec, attrs, implementation)
    results = call.op.bind(call.arguments, call.attrs, call.implementation, CalledAs(op.name, {})).results
    served = [n for n, d in op.gradients.items() if n in problem.specs and results[d].shape == problem.specs[n].shape]
    for argument, constant in constants.items():
        if argument not in served:
            _refuse(op, f"{argument} is differentiated", f"derivatives of {', '.join(served)} in this call", constant)


def _constants(op: Op) -> str:
    """What an argument without a derivative has to be, and which steps of a composed op have derivatives."""
    steps = [step.name for step in op.steps if step.derivative is not None]
    return "constants" + (f" (its step {', '.join(steps)} has derivatives)" if steps else "")


def _refuse(op: Op, what: str, supported: str, constant: str) -> NoReturn:
    raise UnsupportedError(f"{op.name}: {what}, supported: {supported}; {constant} makes it a constant")
