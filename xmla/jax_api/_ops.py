"""Derives the public functions from the declarations."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmla.core.config import settings
from xmla.core.debug import shadow
from xmla.core.debug.checks import check_values
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import Op, plan_call
from xmla.core.values import Attributes, Device, Spec, assumed_device
from xmla.jax_api import _private
from xmla.jax_api._primitive import call, is_ref
from xmla.jax_api._run import describe


def _checked_spec(op: Op, name: str, array: Any) -> Spec:
    """The argument as it is given.

    Raises:
        UnsupportedError: A size is symbolic, as in an export of any size: a plan's grids and constants follow from it.
            Or the array is in the host's memory: XLA has the new value of an updated one elsewhere.
    """
    for axis, (label, size) in enumerate(zip(op.tensors[name].names, array.shape, strict=False)):
        if not isinstance(size, int):
            raise UnsupportedError(
                f"{op.name}: {name} axis {label} (axis {axis}) is {size}, supported: sizes that are numbers"
            )
    if not isinstance(array, np.ndarray) and jax.typeof(array).memory_space == jax.memory.Space.Host:
        to_device = f"jax.device_put({name}, jax.memory.Space.Device)"
        raise UnsupportedError(f"{op.name}: {name} is in the host's memory, supported: the device's, as by {to_device}")
    dtype = array.dtype.name if getattr(array.dtype, "isnative", True) else str(array.dtype)  # ">f4" is no float32
    return Spec(tuple(array.shape), dtype)


def _devices(array: Any) -> str | None:
    """The devices of an array, if it is a value."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or is_ref(array):
        return None
    return ", ".join(sorted(str(device) for device in array.devices()))


def _known_device(arrays: Mapping[str, Any]) -> Device | None:
    """The device of a call as far as it is known before lowering: the assumed one, or that of a concrete array."""
    if (assumed := assumed_device()) is not None:
        return assumed
    for array in arrays.values():
        if not isinstance(array, jax.core.Tracer) and hasattr(array, "devices"):
            device = next(iter(array.devices()))
            return describe(device) if device.platform in ("cpu", "gpu") else None
    return None


def _as_jax(value: Any) -> Any:
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def _narrow(op: Op, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays; NumPy's indices that JAX would truncate to 32 bits as −1, since they name nothing.

    Raises:
        UnsupportedError: One of them names something.
    """
    longs = {name: a for name, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype == np.int64}
    if not longs or jax.config.jax_enable_x64:
        return dict(arrays)
    sizes = {axis: n for name, a in arrays.items() for axis, n in zip(op.tensors[name].names, a.shape, strict=True)}
    narrow = {}
    for name, indices in longs.items():
        wide = indices > np.iinfo(np.int32).max
        if (wide & (indices < prod(sizes[axis] for axis in op.tensors[name].index_of.split()))).any():
            got, supported = int(indices[wide].min()), "indices below 2**31, or jax_enable_x64"
            raise UnsupportedError(f"{op.name}: {name} has an index of {got}, supported: {supported}")
        narrow[name] = np.where((indices < 0) | wide, -1, indices).astype(np.int32)
    return {**arrays, **narrow}


def public(op: Op) -> Callable[..., Any]:
    """What runs a call of `op`, of a list of its tensors and a tuple of its attributes."""

    def function(tensors: list[Any], attrs: tuple[Any, ...], implementation: str | None) -> Any:
        op.check_implementation(implementation)
        arrays = {}
        for name, value in zip(op.tensors, tensors, strict=True):
            if value is None and name in op.optional:
                continue
            if isinstance(value, _private.RefView):
                part = "ref[i], whose new value is to be assigned to ref[i]" if name in op.mutates else "ref[i]"
                raise ArgumentError(
                    f"{op.name}: {name} is a view of a Ref (ref.at[i]), expected the Ref itself, or a jax.Array: {part}"
                )
            if not _is_array(value):
                written = value is None and (name in op.pools or name in op.mutates)
                remedy = "; a write through a Ref returns None, and the Ref is the cache" if written else ""
                remedy = "; jnp.asarray makes one of it" if hasattr(value, "__jax_array__") else remedy
                raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected jax.Array{remedy}")
            arrays[name] = value
        _check_refs(op, arrays)
        _check_attributes(op, attrs)
        attrs = op.attributes(*attrs)
        # Checked here, so that an error names the user's line, and of arrays as they are given.
        op.check_devices({name: _devices(array) for name, array in arrays.items()})
        device = _known_device(arrays)
        specs = {name: _checked_spec(op, name, arrays[name]) if name in arrays else None for name in op.tensors}
        if device is None or implementation == "reference":
            op.bind(specs, attrs, implementation)
        else:
            plan_call(op, tuple(specs.values()), attrs, device, implementation)
        arrays = {name: _as_jax(array) for name, array in _narrow(op, arrays).items()}
        if settings.check:
            read = {name: array[...] if is_ref(array) else array for name, array in arrays.items()}
            jax.debug.callback(lambda host: check_values(op, _to_host(host), attrs, _default_device()), read)
        taken = _sample(op, arrays, attrs) if settings.shadow and implementation != "reference" else None
        results = call(op, arrays, attrs, implementation, device)
        if taken is not None:
            returned = [name for name in op.mutates if not is_ref(arrays[name])]
            after = arrays | dict(zip(returned, results[len(op.outputs) :], strict=True))
            shadow.compare(taken, after, results[: len(op.outputs)], _take)
        return results if len(results) > 1 else results[0] if results else None

    return function


def _check_refs(op: Op, arrays: Mapping[str, Any]) -> None:
    """Check that no Ref that a call updates stands twice: inside of `jit` the last of its new values would stay."""
    for written in op.mutates:
        for name, array in arrays.items():
            if name != written and array is arrays[written] and is_ref(array):
                raise ArgumentError(f"{op.name}: {written} memory is shared with {name}, expected memory of its own")


def _check_attributes(op: Op, attrs: tuple[Any, ...]) -> None:
    """Check that no attribute is JAX's: kernels are chosen and compiled by their values."""
    for attr, value in zip(op.attrs, attrs, strict=True):
        for element in value if isinstance(value, tuple | list) else (value,):
            if isinstance(element, jax.Array):
                kind = attr.type.__name__
                got = "traced" if isinstance(element, jax.core.Tracer) else "a jax.Array"
                remedy = f"static_argnames={attr.name!r} of jax.jit, or {kind}(…) of a concrete array"
                raise ArgumentError(f"{op.name}: {attr.name} is {got}, expected {kind}: {remedy}")


def _to_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _take(array: Any, places: np.ndarray | None) -> np.ndarray:
    return np.array(array[...] if places is None else array[places])


def _sample(op: Op, arrays: Mapping[str, Any], attrs: Attributes) -> shadow.Sample | None:
    """XMLA_SHADOW's sample of an eager call. Under a trace there are no values, so the pages used are unknown.

    The arguments may be values there: arrays that a jitted function closes over. Then what it makes is traced.
    """
    if any(isinstance(array, jax.core.Tracer) for array in (*arrays.values(), jnp.zeros(()))):
        return None
    specs = {name: _checked_spec(op, name, array) for name, array in arrays.items()}
    return shadow.sample(op, arrays, specs, attrs, _take, _default_device())


def _default_device() -> Device:
    """The device that calls run on, for reports."""
    return describe(jax.local_devices()[0])


def _is_array(value: Any) -> bool:
    """An array of JAX, a Ref, or an array of NumPy without a mask, which JAX has not."""
    if isinstance(value, jax.Array | np.ndarray):
        return not isinstance(value, np.ma.MaskedArray)
    try:
        return is_ref(value)
    except (TypeError, ValueError):  # of what jax.numpy, but not a primitive, makes an array: a variable of Flax
        return False
