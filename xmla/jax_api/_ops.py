"""Derives the public functions from the declarations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmla.core.config import settings
from xmla.core.device import Device, assumed_device
from xmla.core.documents import JAX, document
from xmla.core.errors import ArgumentError
from xmla.core.live import shadow
from xmla.core.live.checks import check_values
from xmla.core.op import Op, plan_call
from xmla.core.signature import define
from xmla.core.spec import Spec
from xmla.jax_api._primitive import call, is_ref
from xmla.jax_api._run import describe, on_host


def _spec(array: Any) -> Spec:
    device = None
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and not is_ref(array):
        device = ", ".join(sorted(str(d) for d in array.devices()))
    return Spec(tuple(array.shape), jnp.dtype(array.dtype).name, None, device)


def _device(arrays: Mapping[str, Any]) -> Device:
    """The device to run on: the assumed one, that of the first concrete array, or the default one (under a trace)."""
    if (assumed := assumed_device()) is not None:
        return assumed
    concrete = [a for a in arrays.values() if not isinstance(a, jax.core.Tracer) and hasattr(a, "devices")]
    return describe(
        next(iter(concrete[0].devices())) if concrete else jax.config.jax_default_device or jax.devices()[0]
    )


def _as_jax(value: Any) -> Any:
    """A NumPy array as JAX's. An index that JAX would truncate to 32 bits is out of range before and after."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.int64 and not jax.config.jax_enable_x64:
        value = np.clip(value, -1, np.iinfo(np.int32).max).astype(np.int32)
    return jnp.asarray(value)


def public(op: Op) -> Callable[..., Any]:
    """The user's function for `op`: its prototype's signature and docstring, plus `implementation=`."""

    def function(tensors: list[Any], attrs: tuple[Any, ...], implementation: str | None) -> Any:
        op.check_implementation(implementation)
        arrays = {}
        for name, value in zip(op.tensors, tensors, strict=True):
            if value is None and name in op.optional:
                continue
            if not isinstance(value, jax.Array | np.ndarray) and not _is_jax_type(value):
                raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected jax.Array")
            arrays[name] = value
        values = op.plain_attributes(dict(zip(op.defaults, attrs, strict=True)))
        attrs = tuple(values.values())
        # Planned here, so that an error names the user's line.
        device = _device(arrays)
        specs = tuple(_spec(arrays[name]) if name in arrays else None for name in op.tensors)
        plan, _ = plan_call(op, specs, attrs, device, None if implementation == "reference" else implementation)
        if implementation != "reference" and on_host(implementation, device):
            from xmla.core import interpreter

            interpreter.require(op.name, plan)
        arrays = {name: _as_jax(array) for name, array in arrays.items()}
        if settings.check:
            read = {name: array[...] if is_ref(array) else array for name, array in arrays.items()}
            jax.debug.callback(lambda host: check_values(op, _to_host(host), values), read)
        taken = _sample(op, arrays, values) if settings.shadow and implementation != "reference" else None
        found = call(op, arrays, attrs, implementation, device)
        if taken is not None:
            returned = [name for name in op.mutates if not is_ref(arrays[name])]
            after = arrays | dict(zip(returned, found[len(op.outputs) :], strict=True))
            shadow.compare(taken, after, found[: len(op.outputs)], _take)
        return found if len(found) > 1 else found[0] if found else None

    return define(op, function, ("implementation",), document(op, JAX))


def _to_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _take(array: Any, places: np.ndarray | None) -> np.ndarray:
    return np.array(array[...] if places is None else array[places])


def _sample(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> shadow.Sample | None:
    """XMLA_SHADOW's sample of an eager call. Under a trace there are no values, so the pages used are unknown."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return None
    return shadow.sample(op, arrays, {name: _spec(array) for name, array in arrays.items()}, attrs, _take)


def _is_jax_type(value: Any) -> bool:
    try:
        return is_ref(value)
    except TypeError:
        return False
