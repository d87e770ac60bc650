"""Runs plans inside JAX computations; derives the public functions from the declarations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.state.types import AbstractRef

from xmla.core import shadow
from xmla.core.checks import check_values
from xmla.core.config import settings
from xmla.core.device import INTERPRETER, Device, assumed_device
from xmla.core.errors import ArgumentError
from xmla.core.op import Op, plan_call
from xmla.core.plan import Plan
from xmla.core.signature import define
from xmla.core.spec import DTYPES, Spec


def _is_ref(value: Any) -> bool:
    return isinstance(jax.typeof(value), AbstractRef)


def _spec(array: Any) -> Spec:
    device = None
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and not _is_ref(array):
        device = ", ".join(sorted(str(d) for d in array.devices()))
    return Spec(tuple(array.shape), jnp.dtype(array.dtype).name, None, device)


def _device(arrays: Mapping[str, Any]) -> Device:
    """Where to run: the device assumed, that of the first concrete array, or the default one (under a trace)."""
    if (assumed := assumed_device()) is not None:
        return assumed
    concrete = [a for a in arrays.values() if not isinstance(a, jax.core.Tracer) and hasattr(a, "devices")]
    return describe(
        next(iter(concrete[0].devices())) if concrete else jax.config.jax_default_device or jax.devices()[0]
    )


def describe(device: Any) -> Device:
    """A JAX device as the planner sees it."""
    if device.platform == "cpu":
        return INTERPRETER
    return Device.of(device.device_kind, round(float(device.compute_capability) * 10), device.core_count)


def _run_on_gpu(plan: Plan, arrays: dict[str, Any], specs: Mapping[str, Spec], device: Device) -> tuple[jax.Array, ...]:
    from xmla.jax_api import _jax_triton

    for launch in plan.active:
        inputs = [arrays[name] for name in launch.inputs]
        arrays |= zip(launch.outputs, _jax_triton.launch(launch, plan, specs, inputs, device), strict=True)
    # An empty call launches nothing; its results have no elements.
    return tuple(
        arrays[n] if n in arrays else jnp.empty(plan.buffers[n].shape, plan.buffers[n].dtype) for n in plan.results
    )


def _run_on_host(
    compute: Callable[[dict[str, np.ndarray]], tuple[np.ndarray, ...]],
    arrays: Mapping[str, Any],
    mutated: tuple[str, ...],
    results: Mapping[str, Spec],
) -> tuple[jax.Array, ...]:
    """`compute` on NumPy copies behind a pure callback: its results, then the new values of the mutated arguments."""
    values = {name: array[...] if _is_ref(array) else array for name, array in arrays.items()}
    specs = [*results.values(), *(_spec(values[name]) for name in mutated)]

    def callback(*operands: Any) -> tuple[np.ndarray, ...]:
        host = {name: np.array(value, order="C") for name, value in zip(values, operands, strict=True)}
        outputs = compute(host)
        found = [*outputs, *(host[name] for name in mutated)]
        return tuple(np.asarray(a).astype(DTYPES[s.dtype][0], copy=False) for a, s in zip(found, specs, strict=True))

    types = tuple(jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype][0]) for spec in specs)
    return jax.pure_callback(callback, types, *values.values())


def _to_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _take(array: Any, places: np.ndarray | None) -> np.ndarray:
    return np.array(array[...] if places is None else array[places])


def _sample(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> shadow.Sample | None:
    """XMLA_SHADOW's part of an eager call. Under a trace there are no values, and no telling which pages they name."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return None
    return shadow.sample(op, arrays, {name: _spec(array) for name, array in arrays.items()}, attrs, _take)


def _execute(op: Op, arrays: dict[str, Any], attrs: Mapping[str, Any], implementation: str | None) -> tuple[Any, ...]:
    """Results, then the new values of the mutated arguments (Refs are updated and not repeated)."""
    specs = {name: _spec(arrays[name]) if name in arrays else None for name in op.tensors}
    device = _device(arrays)
    kernels = None if implementation == "reference" else implementation
    plan, outputs = plan_call(op, tuple(specs.values()), tuple(attrs.values()), device, kernels)
    if settings.check:
        values = {name: array[...] if _is_ref(array) else array for name, array in arrays.items()}
        jax.debug.callback(lambda host: check_values(op, _to_host(host), attrs), values)
    results = dict(zip(op.outputs, outputs, strict=True))
    if implementation != "reference" and device is not INTERPRETER:
        refs = {name: arrays[name] if _is_ref(arrays[name]) else jax.new_ref(arrays[name]) for name in op.mutates}
        given = {name: spec for name, spec in specs.items() if spec is not None}
        values = _run_on_gpu(plan, arrays | refs, given, device)
        return *values, *(refs[name][...] for name in op.mutates if refs[name] is not arrays[name])

    def interpret(host: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        from xmla.core import interpreter

        return interpreter.run(plan, host)

    def define(host: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        found = op.reference(**host, **attrs)
        return found if isinstance(found, tuple) else () if found is None else (found,)

    compute = define if implementation == "reference" else interpret
    found = _run_on_host(compute, arrays, op.mutates, results)
    values, updated = found[: len(results)], found[len(results) :]
    returned = []
    for name, value in zip(op.mutates, updated, strict=True):
        if _is_ref(arrays[name]):
            arrays[name][...] = value
        else:
            returned.append(value)
    return *values, *returned


def public(op: Op) -> Callable[..., Any]:
    """The user's function for `op`: its prototype's signature and docstring, plus `implementation=`."""
    names = [attr.name for attr in op.attrs]

    def function(tensors: list[Any], attrs: tuple[Any, ...], implementation: str | None) -> Any:
        op.check_implementation(implementation)
        arrays = {}
        for name, value in zip(op.tensors, tensors, strict=True):
            if value is None and name in op.optional:
                continue
            if not isinstance(value, jax.Array | np.ndarray) and not _is_jax_type(value):
                raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected jax.Array")
            arrays[name] = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        values = dict(zip(names, attrs, strict=True))
        taken = _sample(op, arrays, values) if settings.shadow and implementation != "reference" else None
        found = _execute(op, arrays, values, implementation)
        if taken is not None:
            returned = [name for name in op.mutates if not _is_ref(arrays[name])]
            after = arrays | dict(zip(returned, found[len(op.outputs) :], strict=True))
            shadow.compare(taken, after, found[: len(op.outputs)], _take)
        return found if len(found) > 1 else found[0] if found else None

    return define(op, function, ("implementation",))


def _is_jax_type(value: Any) -> bool:
    try:
        return _is_ref(value)
    except TypeError:
        return False
