"""Runs plans inside JAX computations, on arrays only: Refs have been discharged to values."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmla.core.errors import UnsupportedError
from xmla.core.op import Op, plan_call
from xmla.core.plan import Plan
from xmla.core.values import DTYPES, INTERPRETER, Attributes, Device, Spec
from xmla.core.values import device as devices

HostFunction = Callable[..., tuple[np.ndarray, ...]]
devices.entered_with.append(jax.make_user_context())  # JAX traces and lowers anew for another assumed device


def spec_of(array: Any) -> Spec:
    return Spec(tuple(array.shape), jnp.dtype(array.dtype).name)


def describe(device: Any) -> Device:
    """A CPU or a GPU of JAX as the planner sees it."""
    if device.platform == "cpu":
        return INTERPRETER
    return Device.of(device.device_kind, round(float(device.compute_capability) * 10), device.core_count)


def lowered_for(
    platform: str | None, op: Op, implementation: str | None, device: Device | None, names: Sequence[str]
) -> Device:
    """The device that a call is lowered for on `platform`, "cpu", "cuda" or None, of JAX's `names`.

    `device` is what was known when the call was traced. A jitted function is traced once for all platforms.

    Raises:
        UnsupportedError: Nothing computes the call there.
    """
    if platform == "cpu" or implementation == "reference":
        return INTERPRETER
    if platform is None:
        raise UnsupportedError(f"{op.name}: platform is {', '.join(names)}, supported: cpu and cuda")
    if device is not None and device != INTERPRETER:
        return device
    try:
        return describe(jax.local_devices(backend="gpu")[0])
    except RuntimeError as error:
        supported = "a GPU, or a device named by xmla.core.values.assume_device"
        raise UnsupportedError(f"{op.name}: platform is cuda without a GPU, supported: {supported}") from error


def _run_on_gpu(plan: Plan, arrays: dict[str, Any], specs: Mapping[str, Spec], device: Device) -> tuple[jax.Array, ...]:
    from xmla.jax_api import _jax_triton

    shared = plan.shared
    # In the buffers' order, not a set's: JAX caches programs by their text.
    parted = {name: spec for name, spec in plan.buffers.items() if name in shared}
    refs = {name: jax.empty_ref(jax.ShapeDtypeStruct(spec.shape, spec.dtype)) for name, spec in parted.items()}
    arrays |= refs
    for launch in plan.active:
        inputs = [arrays[name] for name in launch.reads]
        parts = [refs[name] for name in launch.writes if name in refs]
        outputs = _jax_triton.launch(launch, plan, specs, inputs, parts, device)
        arrays |= zip(launch.writes[len(parts) :], outputs, strict=True)
    arrays |= {name: ref[...] for name, ref in refs.items() if name in plan.results}
    # An empty call launches nothing; its results have no elements.
    return tuple(
        arrays[n] if n in arrays else jnp.empty(plan.buffers[n].shape, plan.buffers[n].dtype) for n in plan.results
    )


def host_function(op: Op, names: Sequence[str], attrs: Attributes, implementation: str | None) -> HostFunction:
    """A call of any sizes on NumPy arrays in the order of `names`: results, then the new values of the mutated."""

    def compute(*operands: Any) -> tuple[np.ndarray, ...]:
        host = {name: np.array(value, order="C") for name, value in zip(names, operands, strict=True)}
        specs = {name: spec_of(host[name]) if name in host else None for name in op.tensors}
        if implementation == "reference":
            results = op.bind(specs, attrs).results.values()
            outputs = op.reference(**host, **attrs._asdict())
        else:
            from xmla.core.compile import interpreter

            plan, results = plan_call(op, tuple(specs.values()), attrs, INTERPRETER, implementation)
            outputs = interpreter.run(op.name, plan, host)
        rounded = (np.asarray(a).astype(DTYPES[s.dtype][0], copy=False) for a, s in zip(outputs, results, strict=True))
        return *rounded, *(host[name] for name in op.mutates)

    return compute


def _launch(
    plan: Plan, arrays: dict[str, Any], specs: Mapping[str, Spec], mutated: Sequence[str], device: Device,
    launch: Callable[..., Any] | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """A plan on a GPU: results, then the new values of the mutated arguments.

    XLA moves slices of a custom call's operands, and updates of stacks by its results, into a fusion with the call, and
    ignores the call's aliases there: the call would write into the caller's stack, or over an operand that it still
    reads. It does not look through a barrier. The updated operands have one barrier: with one each, an array that is
    updated as two of them would be one operand of the fusion, and both new values one. A constant is in it, too: a
    loop with a barrier of one array on its carry does not compile where XLA double-buffers or unrolls it. Each result
    has its own barrier: one of all would be another user of the call's tuple, for which XLA copies read operands, too.
    """
    if mutated:
        *updated, _ = jax.lax.optimization_barrier([*(arrays[name] for name in mutated), np.int32(0)])
        arrays = arrays | dict(zip(mutated, updated, strict=True))
    if plan.active and launch is not None:
        results = launch(plan, arrays, specs, mutated, device)
    else:
        refs = {name: jax.new_ref(arrays[name]) for name in mutated}
        results = *_run_on_gpu(plan, arrays | refs, specs, device), *(ref[...] for ref in refs.values())
    return tuple(map(jax.lax.optimization_barrier, results))


def execute(
    op: Op, arrays: dict[str, Any], attrs: Attributes, implementation: str | None, device: Device,
    callback: Callable[..., Any] | None = None, launch: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The computation of a call: results, then the new values of the mutated arguments.

    On the host, by the interpreter or the reference, it is a callback of `host_function`; `callback(types, *arrays)`
    replaces `jax.pure_callback`. On a GPU it is one custom call by `launch`, which is `_launcher.run`, or without it
    jaxlib's for each kernel.
    """
    specs = {name: spec_of(arrays[name]) if name in arrays else None for name in op.tensors}
    if implementation == "reference":
        outputs = op.bind(specs, attrs).results.values()
    else:
        plan, outputs = plan_call(op, tuple(specs.values()), attrs, device, implementation)
        if device != INTERPRETER:
            present = {name: spec for name, spec in specs.items() if spec is not None}
            return _launch(plan, arrays, present, op.mutates, device, launch)
        from xmla.core.compile import interpreter

        interpreter.require(op.name, plan)
    results = [*outputs, *(spec_of(arrays[name]) for name in op.mutates)]
    types = tuple(jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype][0]) for spec in results)
    if callback is None:
        callback = partial(jax.pure_callback, host_function(op, list(arrays), attrs, implementation))
    return tuple(callback(types, *arrays.values()))
