"""Derives `torch.library` ops, fakes and public functions from the declarations."""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from xmla.core.errors import ArgumentError
from xmla.core.op import (
    Op,
    check_derivative,
    check_overlap,
    derivative_call,
    refuse_forward_mode,
    refuse_second_derivative,
    spaces,
)
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import Attributes, Spec, assumed_device
from xmla.torch_api import _private
from xmla.torch_api._arrays import from_numpy, to_numpy
from xmla.torch_api._batching import call_each, results_of_none
from xmla.torch_api._checks import (
    Tensors,
    by_name,
    check_devices,
    check_memory,
    check_out,
    check_placed,
    check_tensor,
    check_tensors,
    check_workspace,
    written_names,
)
from xmla.torch_api._prepared import plan_tensors, recall, specs_of
from xmla.torch_api._run import call, look_up, run

_library = torch.library.Library("xmla", "DEF")
_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}


def _result_specs(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None = None) -> tuple[Spec, ...]:
    return tuple(op.bind(specs_of(op, tensors), attrs, implementation).results.values())


def _fake(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None = None) -> tuple[torch.Tensor, ...]:
    specs = _result_specs(op, tensors, attrs, implementation)
    return tuple(tensors[0].new_empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)


def _reference(op: Op, tensors: Tensors, attrs: Attributes) -> tuple[torch.Tensor, ...]:
    """The reference, on the host; results are rounded to the op's dtypes and mutated arguments copied back."""
    fakes = _fake(op, tensors, attrs, "reference")
    host = {name: to_numpy(t.cpu()) for name, t in zip(op.tensors, tensors, strict=True) if t is not None}
    with np.errstate(all="ignore"):
        values = op.reference(**host, **attrs._asdict())
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if name in op.mutates and tensor.device.type != "cpu":
            tensor.copy_(from_numpy(host[name], tensor))
    return tuple(from_numpy(value, fake) for value, fake in zip(values, fakes, strict=True))


def call_reference(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Sequence[torch.Tensor] = (),
    workspace: torch.Tensor | None = None, implementation: str | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run `op` by its reference, with the arguments of `call`; `workspace` is not used."""
    check_tensors(op, tensors)
    check_devices(op, tensors)
    attrs = op.attributes(*attrs)
    specs = _result_specs(op, tensors, attrs, "reference")
    if out:
        check_out(op, specs, out, tensors[0].device)
    check_memory(op, by_name(op, tensors) | written_names(op, out))
    if out or op.mutated:
        present = {name: spec for name, spec in specs_of(op, tensors).items() if spec is not None}
        memory = [tensor.data_ptr() for tensor in (*tensors, *out) if tensor is not None]
        check_overlap(op, spaces(op, present, specs[: len(out)]), memory)
    results = _reference(op, tensors, attrs)
    for target, result in zip(out, results, strict=False):
        target.copy_(result)
    increment_version([tensors[place] for place in op.mutated])
    return out or results


def _runner_for(implementation: str | None) -> Callable[..., Any]:
    """The function that runs a call on real tensors."""
    return call_reference if implementation == "reference" else call


def _single(values: Any) -> Any:
    return tuple(values) if len(values) > 1 else values[0] if values else None


def _register(op: Op) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Define `xmla::<op>` and, for an op with results, `xmla::<op>.out`; return both overloads."""
    results = list(op.outputs)
    arguments = []
    for index, name in enumerate(op.tensors):
        mutated = f"({chr(ord('a') + index)}!)" if name in op.mutates else ""
        arguments.append(f"Tensor{mutated}? {name}=None" if name in op.optional else f"Tensor{mutated} {name}")
    keywords = []
    for attr in op.attrs:
        kind = _SCHEMA_TYPES[attr.type] + ("?" if attr.optional else "")
        default = f'"{attr.default}"' if isinstance(attr.default, str) else attr.default
        keywords.append(f"{kind} {attr.name}" + ("" if attr.default is None and not attr.optional else f"={default}"))
    inputs = ", ".join([*arguments, "*", *keywords, "str? implementation=None"])
    returns = "()" if not results else f"({', '.join(['Tensor'] * len(results))})"
    _library.define(f"{op.name}({inputs}) -> {returns}")

    tensor_names, attr_names = list(op.tensors), [attr.name for attr in op.attrs]
    defaults = dict.fromkeys(op.optional) | op.defaults

    def unpack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
        values = defaults | dict(zip(tensor_names, args, strict=False)) | kwargs
        return [values[name] for name in tensor_names], tuple(values[name] for name in attr_names)

    def kernel(*args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        return _single(_runner_for(implementation)(op, *unpack(args, kwargs), implementation=implementation))

    def fake(*args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        tensors, attrs = unpack(args, kwargs)
        return _single(_fake(op, tensors, op.attributes(*attrs), implementation))

    def kernel_out(*args: Any, workspace: Any = None, implementation: str | None = None, **kwargs: Any) -> None:
        out = [kwargs.pop(f"out_{name}") for name in results]
        _runner_for(implementation)(op, *unpack(args, kwargs), out, workspace, implementation)

    def fake_out(*args: Any, workspace: Any = None, implementation: str | None = None, **kwargs: Any) -> None:
        out = [kwargs.pop(f"out_{name}") for name in results]
        tensors, attrs = unpack(args, kwargs)
        check_out(op, _result_specs(op, tensors, op.attributes(*attrs), implementation), out, tensors[0].device)

    variants = [(op.name, kernel, fake)]
    if results:
        first = ord("a") + len(op.tensors)  # those before are of arguments that are updated
        out = [f"Tensor({chr(first + index)}!) out_{name}" for index, name in enumerate(results)]
        space = f"Tensor({chr(first + len(results))}!)? workspace=None"
        _library.define(f"{op.name}.out({', '.join([inputs, *out, space])}) -> ()")
        variants.append((f"{op.name}.out", kernel_out, fake_out))
    for name, implementation, abstract in variants:
        for backend in _private.BACKENDS:
            _library.impl(name, implementation, backend)
        torch.library.register_fake(f"xmla::{name}", abstract, lib=_library)
    packet = getattr(torch.ops.xmla, op.name)
    overloads = (packet.default, packet.out if results else None)

    def batched(info: Any, dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if info.batch_size:
            returned = call_each(op, overloads[0], info.batch_size, args, dims, kwargs)
        else:
            _, attrs = unpack(args, kwargs)
            returned = results_of_none(op, args, dims, op.attributes(*attrs), kwargs.get("implementation"))
        return _single(returned), _single([0] * len(returned))

    torch.library.register_vmap(f"xmla::{op.name}", batched, lib=_library)
    for (name, implementation, _), overload in zip(variants, overloads if _private.AUTOGRAD else (), strict=False):
        _library.impl(name, _autograd(op, overload, implementation, unpack), "Autograd", with_keyset=True)
    return overloads


def _autograd(op: Op, overload: Any, kernel: Callable[..., Any], unpack: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel: the dispatcher calls it before `kernel` in every eager, traced or transformed call.

    A call that is differentiated and has no derivative is refused before anything is computed.
    """
    differentiable = _differentiable(op, op.derivative, overload, kernel) if op.derivative is not None else None

    def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = [*zip(op.tensors, args, strict=False), *kwargs.items()]
        moving = {n: constant for n, t in arguments if isinstance(t, torch.Tensor) and (constant := _detaching_call(t))}
        if not moving:
            return _private.below_autograd(keyset, overload, kernel, args, kwargs)
        for name, constant in moving.items():
            if constant is FORWARD_MODE and name in op.gradients:
                refuse_forward_mode(op, name, "backward, torch.func.grad")
        constants = {name: constant.format(name) for name, constant in moving.items()}
        written = any(name.startswith("out_") for name in kwargs)
        tensors, attrs = unpack(args, kwargs)
        implementation = kwargs.get("implementation")
        attrs = op.attributes(*attrs)
        check_derivative(op, constants, specs_of(op, tensors), attrs, implementation, written)
        return _private.apply(differentiable, keyset, implementation, attrs, *tensors)

    return autograd


def _differentiable(op: Op, derivative: Op, overload: Any, kernel: Callable[..., Any]) -> Any:
    """A call of `op` as an autograd function: its gradients are a call of `derivative`."""

    def forward(keyset: Any, implementation: str | None, attrs: Attributes, *tensors: Any) -> Any:
        named = attrs._asdict() | {"implementation": implementation}
        return _private.below_autograd(keyset, overload, kernel, tensors, named)

    def setup_context(context: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, context.implementation, context.attrs, *tensors = inputs
        results = output if isinstance(output, tuple) else (output,)
        context.save_for_backward(*tensors, *results)
        # No result is marked as a constant: `derivative_call` refuses the gradient of one that has no derivative.
        context.set_materialize_grads(False)

    def backward(context: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = context.saved_tensors
        tensors, results = dict(zip(op.tensors, saved, strict=False)), saved[len(op.tensors) :]
        upstream = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        call = derivative_call(op, tensors, results, upstream, torch.zeros_like, context.attrs, context.implementation)
        # They depend on what is differentiated also where they are computed from the call's results alone.
        moving = [tensors[name] for name in op.gradients]
        # One object, not a tuple of attributes, which torch.vmap would take for a tree of tensors.
        packet = getattr(torch.ops.xmla, derivative.name)
        compute = partial(packet, **call.attrs._asdict(), implementation=call.implementation)
        outputs = once.apply(compute, *[call.arguments.get(name) for name in derivative.tensors], *moving)
        computed = dict(zip(derivative.outputs, outputs, strict=True))
        needs = dict(zip(op.tensors, context.needs_input_grad[3:], strict=True))
        return None, None, None, *[computed[op.gradients[n]] if needs[n] else None for n in op.tensors]

    once = _differentiable_once(op, derivative)
    return _function(_private.Function, op.name, forward=forward, setup_context=setup_context, backward=backward)


def _differentiable_once(op: Op, derivative: Op) -> Any:
    """A call of `derivative`, whose own derivative, the second one of `op`, is refused when it is computed.

    Not before: `torch.func.grad` records it always.
    """

    def forward(call: Callable[..., Any], *tensors: Any) -> Any:
        return call(*tensors[: len(derivative.tensors)])

    def refuse(*_: Any) -> Any:
        refuse_second_derivative(op, "detach()")

    function = _function(
        torch.autograd.Function, derivative.name, forward=forward, setup_context=lambda *_: None, backward=refuse,
        jvp=refuse,
    )  # fmt: skip
    function.generate_vmap_rule = True
    return function


def _function(base: Any, name: str, **methods: Callable[..., Any]) -> Any:
    methods["_compiled_autograd_key"] = _private.compiled_autograd_key
    return type(name, (base,), {method: staticmethod(function) for method, function in methods.items()})


# The calls that make a tensor a constant.
REVERSE_MODE = "{0}.detach() or torch.no_grad()"
FORWARD_MODE = "{0}.detach()"  # no_grad does not affect forward mode


def _detaching_call(tensor: torch.Tensor) -> str | None:
    """The call that makes `tensor` a constant, if it is differentiated in backward or forward mode, else None."""
    if _private.forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None:
        return FORWARD_MODE
    return REVERSE_MODE if tensor.requires_grad and torch.is_grad_enabled() else None


def _are_constants(tensors: Tensors) -> bool:
    """Whether the dispatcher would only call the kernel for them: no wrappers, no view to be negated, no autograd."""
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not torch.Tensor or tensor.is_neg() or (grad and tensor.requires_grad)
        ):
            return False
    return True


def _resolve_negated(
    op: Op, tensors: Tensors, results: Tensors, workspace: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Tensors that are negatives of their memory as tensors of their own; the dispatcher's way takes no `None`."""
    written = written_names(op, results)
    written |= {op.mutates[i]: tensors[place] for i, place in enumerate(op.mutated)}
    for name, tensor in (written if workspace is None else written | {"workspace": workspace}).items():
        check_tensor(op, name, tensor, written=True)
    return [tensor if tensor is None else tensor.resolve_neg() for tensor in tensors]


class Planned[**P, R](Protocol):
    """The function of an op."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @property
    def plan(self) -> Callable[P, Plan]:
        """The plan of a call with these arguments, which is not run; its `workspace_bytes` are what the call needs.

        Under `assume_device` it takes fake and meta tensors, too. The reference has no plan.
        """


def planned[**P, R](function: Callable[P, R]) -> Planned[P, R]:
    """Gives an op's function its attribute `plan`: the same code, hence the same signature, over `_plan`."""
    caller: Any = function
    name = caller.__name__
    names = {"__name__": caller.__module__, f"_{name}": partial(_plan, registry()[name])}
    plan: Any = FunctionType(caller.__code__, names, name, caller.__defaults__)
    plan.__kwdefaults__ = caller.__kwdefaults__
    plan.__annotations__ = caller.__annotations__ | {"return": Plan}
    plan.__qualname__ = f"{name}.plan"
    caller.plan = plan
    _private.script_as(caller, f"xmla::{name}")
    return caller


def _plan(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Any, workspace: torch.Tensor | None,
    implementation: str | None,
) -> Plan:  # fmt: skip
    """The plan of a call, after its checks, but for those of where what it writes lies beside what it reads."""
    results = _preallocated(op, out, workspace)
    plan, specs, _ = plan_tensors(op, tensors, op.attributes(*attrs), assumed_device(), implementation)
    if results:
        check_out(op, specs, results, tensors[0].device)
        check_placed(op, results)
    if workspace is not None:
        check_workspace(op, workspace, plan.workspace_bytes, tensors[0].device)
    return plan


def _preallocated(op: Op, out: Any, workspace: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The results that a call is given."""
    results = () if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if out is not None and len(results) != len(op.outputs):
        if not op.outputs:
            raise ArgumentError(f"{op.name}: out is given, expected none: the op updates {op.mutates[0]} in place")
        raise ArgumentError(f"{op.name}: out has {len(results)} tensors, expected {len(op.outputs)}: {[*op.outputs]}")
    if workspace is not None and not results:
        raise ArgumentError(f"{op.name}: workspace is given, expected none without out")
    return results


def public(op: Op) -> Callable[..., Any]:
    """What runs a call of `op`, of a list of its tensors and a tuple of its attributes."""
    functional, out_variant = _register(op)

    def function(
        tensors: Tensors, attrs: tuple[Any, ...], out: Any, workspace: torch.Tensor | None, implementation: str | None
    ) -> Any:
        if implementation is not None:
            op.check_implementation(implementation)
        results = () if out is None and workspace is None else _preallocated(op, out, workspace)
        if not (torch.compiler.is_compiling() or _private.dispatches()):  # a trace, a mode, a transformation
            recalled = recall(op, tensors, attrs, implementation)
            if recalled is not None and (not results or _are_constants(results)):
                outputs = run(op, tensors, *recalled, results, workspace)
                return _single(outputs) if out is None else out
            # A trace of torch.jit notes what the dispatcher sees; `recall` finds no call in one, whose keys are others.
            if _are_constants((*tensors, *results)) and not torch.jit.is_tracing():
                runner = call_reference if implementation == "reference" else look_up
                outputs = runner(op, tensors, attrs, results, workspace, implementation)
                return _single(outputs) if out is None else out
            if any(isinstance(tensor, torch.fx.Proxy) for tensor in (*tensors, *results)):
                return dispatch(tensors, attrs, out, results, workspace, implementation)
        # Before the dispatcher, whose messages do not name the op.
        check_tensors(op, tensors)
        check_devices(op, tensors)
        if not torch.compiler.is_compiling():
            tensors = _resolve_negated(op, tensors, results, workspace)
        return dispatch(tensors, attrs, out, results, workspace, implementation)

    def dispatch(
        tensors: Tensors, attrs: tuple[Any, ...], out: Any, results: tuple[torch.Tensor, ...],
        workspace: torch.Tensor | None, implementation: str | None,
    ) -> Any:  # fmt: skip
        keywords = dict(zip(op.defaults, op.attributes(*attrs), strict=True))
        if out is None or out_variant is None:
            return functional(*tensors, **keywords, implementation=implementation)
        out_arguments = {f"out_{name}": tensor for name, tensor in zip(op.outputs, results, strict=True)}
        out_variant(*tensors, **keywords, **out_arguments, workspace=workspace, implementation=implementation)
        return out

    return function
