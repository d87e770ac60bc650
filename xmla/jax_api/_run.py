"""Runs plans inside JAX computations, on arrays alone: Refs have become values here."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmla.core.device import INTERPRETER, Device
from xmla.core.op import Op, plan_call
from xmla.core.plan import Plan
from xmla.core.spec import DTYPES, Spec


def _spec(array: Any) -> Spec:
    return Spec(tuple(array.shape), jnp.dtype(array.dtype).name)


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
    specs = [*results.values(), *(_spec(arrays[name]) for name in mutated)]

    def callback(*operands: Any) -> tuple[np.ndarray, ...]:
        host = {name: np.array(value, order="C") for name, value in zip(arrays, operands, strict=True)}
        outputs = compute(host)
        found = [*outputs, *(host[name] for name in mutated)]
        return tuple(np.asarray(a).astype(DTYPES[s.dtype][0], copy=False) for a, s in zip(found, specs, strict=True))

    types = tuple(jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype][0]) for spec in specs)
    return jax.pure_callback(callback, types, *arrays.values())


def execute(
    op: Op, arrays: dict[str, Any], attrs: Mapping[str, Any], implementation: str | None, device: Device
) -> tuple[Any, ...]:
    """The computation of a call: results, then the new values of the mutated arguments."""
    specs = {name: _spec(arrays[name]) if name in arrays else None for name in op.tensors}
    kernels = None if implementation == "reference" else implementation
    plan, outputs = plan_call(op, tuple(specs.values()), tuple(attrs.values()), device, kernels)
    results = dict(zip(op.outputs, outputs, strict=True))
    if implementation != "reference" and device is not INTERPRETER:
        refs = {name: jax.new_ref(arrays[name]) for name in op.mutates}
        given = {name: spec for name, spec in specs.items() if spec is not None}
        return *_run_on_gpu(plan, arrays | refs, given, device), *(ref[...] for ref in refs.values())

    def interpret(host: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        from xmla.core import interpreter

        return interpreter.run(plan, host)

    def define(host: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        found = op.reference(**host, **attrs)
        return found if isinstance(found, tuple) else () if found is None else (found,)

    compute = define if implementation == "reference" else interpret
    return _run_on_host(compute, arrays, op.mutates, results)
