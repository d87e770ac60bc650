"""One JAX primitive for all ops, and its rules: shapes, Refs, lowering, vmap, no derivative.

The operands are the given tensors in the order of the declaration; a mutated one is a Ref, updated in place, or an
array, whose new value is then a further result.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.state import discharge
from jax._src.state.types import AbstractRef, ReadEffect, WriteEffect

from xmla.core.device import Device
from xmla.core.errors import UnsupportedError
from xmla.core.op import Op
from xmla.core.ops import indexer_logits, indexer_logits_paged
from xmla.core.spec import Spec
from xmla.jax_api import _batching
from xmla.jax_api._run import execute

call_p = core.Primitive("xmla")
call_p.multiple_results = True

# The parameters of every bind: op, given (names of the operands), attrs, implementation, device.


def is_ref(value: Any) -> bool:
    return isinstance(core.typeof(value), AbstractRef)


def _impl(*operands: Any, **params: Any) -> Any:
    if any(map(is_ref, operands)):
        return jax.jit(partial(call_p.bind, **params))(*operands)
    return dispatch.apply_primitive(call_p, *operands, **params)


def _shapes(*avals: Any, op: Op, given: tuple[str, ...], attrs: tuple[Any, ...], **_: Any) -> tuple[list[Any], set]:
    inner: dict[str, Any] = {
        name: aval.inner_aval if isinstance(aval, AbstractRef) else aval
        for name, aval in zip(given, avals, strict=True)
    }
    specs = {name: Spec(tuple(aval.shape), aval.dtype.name) for name, aval in inner.items()}
    problem = op.bind(specs, dict(zip(op.defaults, attrs, strict=True)))
    # Inside a shard_map, a result varies over every mesh axis that an argument varies over.
    varying = frozenset[Any]().union(*(aval.mat.varying for aval in inner.values()))
    manual = core.ManualAxisType(varying=varying)
    out = [
        core.ShapedArray(spec.shape, jnp.dtype(spec.dtype), manual_axis_type=manual)
        for spec in op.result_specs(problem).values()
    ]
    effects: set[Any] = set()
    for index, (name, aval) in enumerate(zip(given, avals, strict=True)):
        if isinstance(aval, AbstractRef):
            effects.add(ReadEffect(index))
            if name in op.mutates:
                effects.add(WriteEffect(index))
        elif name in op.mutates:
            out.append(core.ShapedArray(aval.shape, aval.dtype, manual_axis_type=manual))
    return out, effects


def _discharge(context: discharge.DischargeContext, *operands: Any, op: Op, given: tuple[str, ...], **params: Any):
    """Refs that have become values: the new ones of those that the op updates, and the results."""
    found = call_p.bind(*operands, op=op, given=given, **params)
    results, updated = found[: len(op.outputs)], iter(found[len(op.outputs) :])
    new: list[Any] = [None] * len(operands)
    returned = []
    for index, name in enumerate(given):
        if name in op.mutates and not is_ref(operands[index]):
            value = next(updated)
            if isinstance(context.in_avals[index], AbstractRef):
                new[index] = value
            else:
                returned.append(value)
    return new, [*results, *returned]


def _lower(*operands: Any, op: Op, given: tuple[str, ...], attrs: tuple[Any, ...], **params: Any) -> Sequence[Any]:
    return execute(op, dict(zip(given, operands, strict=True)), dict(zip(op.defaults, attrs, strict=True)), **params)


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, op: Op, given: tuple[str, ...], **params: Any):
    arrays = dict(zip(given, operands, strict=True))
    dims = {n: d if isinstance(d, int) else None for n, d in zip(given, axes, strict=True)}
    size = next(arrays[name].shape[dim] for name, dim in dims.items() if dim is not None)
    refs = {name: array for name, array in arrays.items() if is_ref(array)}
    for name in refs:
        if name in op.mutates and dims[name] is None:
            raise UnsupportedError(
                f"{op.name}: {name} is a Ref without a batch axis under vmap, supported: a Ref with one, or an array"
            )
    pools = _batching.batched_pools(op, dims)
    arrays |= {name: ref[...] for name, ref in refs.items() if dims[name] is not None}
    if op is indexer_logits.OP and "N" in pools:
        return _batch_logits(arrays, dims, size, params)
    # A cache that is updated is each element's own, also where all begin with the same.
    for name in op.mutates:
        if dims[name] is None:
            arrays[name], dims[name] = jnp.broadcast_to(arrays[name], (size, *arrays[name].shape)), 0
    folded = _batching.fold(op, arrays, dims, size)
    found = [_batching.unfold(r, size) for r in call_p.bind(*folded.values(), op=op, given=given, **params)]
    results, updated = found[: len(op.outputs)], dict(zip(op.mutates, found[len(op.outputs) :], strict=True))
    for name, ref in refs.items():
        if name in updated:
            ref[...] = _batching.move(updated.pop(name), 0, dims[name])
    found = [*results, *updated.values()]
    return found, [0] * len(found)


def _batch_logits(arrays: dict[str, Any], dims: dict[str, int | None], size: int, params: dict[str, Any]):
    folded, count = _batching.keys_as_pages(arrays, dims, size)
    op = indexer_logits_paged.OP
    attrs = tuple((op.defaults | {"max_len": count}).values())
    (logits,) = call_p.bind(*folded.values(), op=op, given=tuple(folded), **params | {"attrs": attrs})
    starts = jnp.broadcast_to(arrays["starts"], (size, logits.shape[0] // size))
    if dims["starts"] is not None:
        starts = _batching.move(arrays["starts"], dims["starts"], 0)
    column = jnp.arange(count, dtype=jnp.int32)
    seen = (column >= starts[..., None]) & (column < folded["lengths"].reshape(*starts.shape, 1))
    return [jnp.where(seen, _batching.unfold(logits, size), -jnp.inf)], [0]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, op: Op, given: tuple[str, ...], **params: Any):
    for name, tangent in zip(given, tangents, strict=True):
        if not isinstance(tangent, ad.Zero):
            raise UnsupportedError(
                f"{op.name}: {name} is differentiated, supported: no derivative; "
                f"jax.lax.stop_gradient({name}) makes it a constant"
            )
    out = call_p.bind(*primals, op=op, given=given, **params)
    return out, [ad.p2tz(value) for value in out]


call_p.def_impl(_impl)
call_p.def_effectful_abstract_eval(_shapes)
discharge.register_discharge_rule(call_p)(_discharge)
mlir.register_lowering(call_p, mlir.lower_fun(_lower))
batching.primitive_batchers[call_p] = _batch
ad.primitive_jvps[call_p] = _differentiate


def call(
    op: Op, arrays: dict[str, Any], attrs: tuple[Any, ...], implementation: str | None, device: Device
) -> tuple[Any, ...]:
    """Results, then the new values of mutated arguments that are not Refs."""
    found = call_p.bind(
        *arrays.values(), op=op, given=tuple(arrays), attrs=attrs, implementation=implementation, device=device
    )
    return tuple(found)
