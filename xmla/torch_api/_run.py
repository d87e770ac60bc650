"""Runs plans on torch tensors; derives `torch.library` ops, fakes and public functions from the declarations."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from xmla.core.device import INTERPRETER, Device
from xmla.core.errors import ArgumentError
from xmla.core.op import Op, plan_call
from xmla.core.plan import COMPILE_OPTIONS, Plan
from xmla.core.spec import DTYPES, Spec, row_major

_library = torch.library.Library("xmla", "DEF")
_NAMES = {getattr(torch, name): name for name in DTYPES}
_SCHEMA_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}


# An op's tensor arguments in order; optional ones may be None, the first never is.
Tensors = Sequence[Any]


def _spec(tensor: torch.Tensor) -> Spec:
    name = _NAMES.get(tensor.dtype, str(tensor.dtype))
    return Spec(tuple(tensor.shape), name, tensor.stride(), str(tensor.device))


def _specs(tensors: Tensors) -> tuple[Spec | None, ...]:
    return tuple(None if tensor is None else _spec(tensor) for tensor in tensors)


@lru_cache
def _device(device: torch.device) -> Device:
    if device.type == "cpu":
        return INTERPRETER
    facts = torch.cuda.get_device_properties(device)
    return Device.of(facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view of a CPU tensor under its NumPy dtype; 8- and 16-bit floats pass through integers of their size."""
    dtype = DTYPES[_NAMES[tensor.dtype]][0]
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.detach().view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)
    return tensor.detach().numpy().view(dtype)


def _run(plan: Plan, arrays: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    for name, spec in plan.buffers.items():
        if name not in arrays:
            arrays[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    if device.type == "cpu":
        from xmla.core import interpreter

        interpreter.run(plan, {name: _as_numpy(array) for name, array in arrays.items()})
    else:
        with torch.cuda.device(device):
            for launch in plan.active:
                launch.kernel[launch.grid](
                    *[arrays[name] for name in launch.inputs],
                    *launch.sizes,
                    *[arrays[name] for name in launch.outputs],
                    **dict(launch.constexprs),
                    **launch.options(),
                    **COMPILE_OPTIONS,
                )
    return tuple(arrays[name] for name in plan.results)


def _check_out(op: Op, specs: Sequence[Spec], names: Sequence[str], out: Sequence[torch.Tensor]) -> None:
    for name, spec, tensor in zip(names, specs, out, strict=True):
        got = _spec(tensor)
        for what, have, want in (
            ("shape", tuple(got.shape), tuple(spec.shape)),
            ("dtype", got.dtype, spec.dtype),
            ("strides", tuple(tensor.stride()), row_major(spec.shape)),
        ):
            if have != want:
                raise ArgumentError(f"{op.name}: out {name} {what} is {have}, expected {want}")


def _call(op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Sequence[torch.Tensor] = ()) -> Any:
    plan, specs = plan_call(op, _specs(tensors), attrs, _device(tensors[0].device))
    arrays = {name: tensor for name, tensor in zip(op.tensors, tensors, strict=True) if tensor is not None}
    if out:
        _check_out(op, specs, plan.results, out)
        arrays |= zip(plan.results, out, strict=True)
    return _run(plan, arrays, tensors[0].device)


def _fake(op: Op, tensors: Tensors, attrs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    specs = dict(zip(op.tensors, _specs(tensors), strict=True))
    problem = op.bind(specs, {attr.name: value for attr, value in zip(op.attrs, attrs, strict=True)})
    return tuple(
        tensors[0].new_empty(s.shape, dtype=getattr(torch, s.dtype)) for s in op.result_specs(problem).values()
    )


def _reference(op: Op, tensors: Tensors, attrs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The definition, on the host; results are rounded to the op's dtypes and mutated arguments copied back."""
    fakes = _fake(op, tensors, attrs)
    host = {name: _as_numpy(t.cpu()) for name, t in zip(op.tensors, tensors, strict=True) if t is not None}
    values = op.reference(**host, **{attr.name: value for attr, value in zip(op.attrs, attrs, strict=True)})
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if name in op.mutates and tensor.device.type != "cpu":
            tensor.copy_(_from_numpy(host[name], tensor))
    values = values if isinstance(values, tuple) else (values,)
    return tuple(_from_numpy(value, fake) for value, fake in zip(values, fakes, strict=True)) if fakes else ()


def _from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    dtype = DTYPES[_NAMES[like.dtype]][0]
    raw = torch.from_numpy(np.array(array.astype(dtype, copy=False), order="C").view(f"u{dtype.itemsize}"))
    return raw.view(like.dtype).to(like.device)


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
        shown = f'"{attr.default}"' if isinstance(attr.default, str) else attr.default
        keywords.append(f"{kind} {attr.name}" + ("" if attr.default is None and not attr.optional else f"={shown}"))
    inputs = ", ".join([*arguments, "*", *keywords] if keywords else arguments)
    returns = "()" if not results else f"({', '.join(['Tensor'] * len(results))})"
    _library.define(f"{op.name}({inputs}) -> {returns}")

    tensor_names, attr_names = list(op.tensors), [attr.name for attr in op.attrs]
    defaults = dict.fromkeys(op.optional) | {attr.name: attr.default for attr in op.attrs}

    def unpack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
        values = defaults | dict(zip(tensor_names, args, strict=False)) | kwargs
        return [values[name] for name in tensor_names], tuple(values[name] for name in attr_names)

    def single(values: tuple[torch.Tensor, ...]) -> Any:
        return values if len(results) > 1 else values[0] if results else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return single(_call(op, *unpack(args, kwargs)))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return single(_fake(op, *unpack(args, kwargs)))

    def kernel_out(*args: Any, **kwargs: Any) -> None:
        out = [kwargs.pop(f"out_{name}") for name in results]
        _call(op, *unpack(args, kwargs), out)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        out = [kwargs.pop(f"out_{name}") for name in results]
        tensors, attrs = unpack(args, kwargs)
        problem = op.bind(
            dict(zip(op.tensors, _specs(tensors), strict=True)), dict(zip(attr_names, attrs, strict=True))
        )
        _check_out(op, list(op.result_specs(problem).values()), results, out)

    variants = [(op.name, kernel, fake)]
    if results:
        out = [f"Tensor({chr(ord('a') + index)}!) out_{name}" for index, name in enumerate(results)]
        star = [] if keywords else ["*"]
        _library.define(f"{op.name}.out({', '.join([inputs, *star, *out])}) -> ()")
        variants.append((f"{op.name}.out", kernel_out, fake_out))
    for name, implementation, abstract in variants:
        _library.impl(name, implementation, "CPU")
        _library.impl(name, implementation, "CUDA")
        torch.library.register_fake(f"xmla::{name}", abstract, lib=_library)
    packet = getattr(torch.ops.xmla, op.name)
    return packet.default, packet.out if results else None


def public(op: Op) -> Callable[..., Any]:
    """The user's function for `op`: its prototype's signature and docstring, plus `out=` and `implementation=`."""
    functional, out_variant = _register(op)
    names = list(op.tensors)

    def function(
        *tensors: torch.Tensor | None, out: Any = None, implementation: str | None = None, **attrs: Any
    ) -> Any:
        op.check_implementation(implementation)
        bound = signature.bind(*tensors, **attrs)
        bound.apply_defaults()
        values = [bound.arguments[name] for name in names]
        keywords = {attr.name: bound.arguments[attr.name] for attr in op.attrs}
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, torch.Tensor) and not (value is None and name in op.optional):
                raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected torch.Tensor")
        op.check_attributes(keywords)  # before the dispatcher, whose messages do not name the op
        if implementation == "reference":
            results = _reference(op, values, tuple(keywords.values()))
            return results if len(results) > 1 else results[0] if results else None
        if out is None:
            return functional(*values, **keywords)
        if out_variant is None:
            raise ArgumentError(f"{op.name}: out is given, expected none: the op updates {op.mutates[0]} in place")
        results = out if isinstance(out, tuple | list) else (out,)
        if len(results) != len(out_names):
            raise ArgumentError(f"{op.name}: out has {len(results)} tensors, expected {len(out_names)}: {out_names}")
        out_variant(*values, **keywords, **{f"out_{n}": tensor for n, tensor in zip(out_names, results, strict=True)})
        return out

    out_names = list(op.outputs)
    signature = inspect.signature(op.prototype)
    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = op.prototype.__doc__
    extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("out", "implementation")]
    function.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # pyrefly: ignore
    return function
