"""The JAX primitives of all ops, and their rules: shapes, Refs, lowering, vmap, reverse mode.

The operands are the given tensors in the order of the declaration. A mutated operand is a Ref, which is updated in
place, or an array, whose new value is an additional result.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from xmla.core.errors import UnsupportedError
from xmla.core.op import Op, check_derivative, derivative_call, refuse_forward_mode, refuse_second_derivative
from xmla.core.registry import registry
from xmla.core.values import INTERPRETER, Attributes, Device, Spec
from xmla.jax_api import _batching, _launcher, _private, _sharding
from xmla.jax_api._private import AbstractRef
from xmla.jax_api._run import execute, host_function, lowered_for

call_p = Primitive("xmla")
# The primitive of a call that `jit` may partition over devices. JAX passes the devices to its lowering, and then
# refuses an AbstractMesh or a second mesh in the program. A call that cannot be partitioned, as in a shard_map, uses
# the other primitive.
partitioned_call_p = Primitive("xmla")


def bind(*operands: Any, op: Op, names: tuple[str, ...], **params: Any) -> list[Any]:
    """A call; params are attrs, implementation, device, the one that is known (None: the lowering finds it), and
    derivative_of, if the call is the derivative of another op's."""
    split = _private.MESHES and _sharding.shared_axes(op, names) and not get_abstract_mesh().are_all_axes_manual
    return (partitioned_call_p if split else call_p).bind(*operands, op=op, names=names, **params)


def is_ref(value: Any) -> bool:
    return isinstance(jax.typeof(value), AbstractRef)


@cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, **params))


def _impl(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """A call outside any transformation. A Ref has no value before `jit` discharges it, whatever JAX is told."""
    if _private.apply_primitive and not any(map(is_ref, operands)):
        return _private.apply_primitive(primitive, *operands, **params)
    with jax.disable_jit(False):
        return _jitted(primitive, **params)(*operands)


def _specs(names: tuple[str, ...], avals: Sequence[Any]) -> dict[str, Spec]:
    return {name: Spec(tuple(aval.shape), aval.dtype.name) for name, aval in zip(names, avals, strict=True)}


def _shapes(*avals: Any, op: Op, names: tuple[str, ...], attrs: Attributes, **_: Any) -> tuple[list[Any], set]:
    inner: list[Any] = [aval.inner_aval if isinstance(aval, AbstractRef) else aval for aval in avals]
    problem = op.bind(_specs(names, inner), attrs)
    # Over a mesh of explicit axes a result has the partitioned axes of the arguments.
    mesh = next((aval.sharding.mesh for aval in inner if not aval.sharding.mesh.empty), get_abstract_mesh())
    specs = _sharding.result_specs(op, problem, [aval.sharding.spec for aval in inner])

    def value(result: str, shape: Sequence[int], dtype: Any, spec: P) -> ShapedArray:
        # Inside a shard_map a result varies over every mesh axis that an argument varies over which it needs.
        needed = op.needs[result].split() if result in op.needs else names
        manual = _private.varying([aval for name, aval in zip(names, inner, strict=True) if name in needed])
        return ShapedArray(shape, dtype, sharding=NamedSharding(mesh, spec), **manual)

    results = zip(problem.results.items(), specs, strict=True)
    out = [value(name, x.shape, jnp.dtype(x.dtype), spec) for (name, x), spec in results]
    effects: set[Any] = set()
    for index, (name, aval) in enumerate(zip(names, avals, strict=True)):
        if isinstance(aval, AbstractRef):
            effects.add(_private.ReadEffect(index))
            if name in op.mutates:
                effects.add(_private.WriteEffect(index))
        elif name in op.mutates:
            out.append(value(name, aval.shape, aval.dtype, P()))
    return out, effects


def _discharge(context: Any, *operands: Any, op: Op, names: tuple[str, ...], **params: Any):
    """Discharge Refs to values: the new values of those that the op updates, and the results."""
    outputs = bind(*operands, op=op, names=names, **params)
    results, updated = outputs[: len(op.outputs)], iter(outputs[len(op.outputs) :])
    new: list[Any] = [None] * len(operands)
    returned = []
    for index, name in enumerate(names):
        if name in op.mutates and not is_ref(operands[index]):
            value = next(updated)
            if isinstance(context.in_avals[index], AbstractRef):
                new[index] = value
            else:
                returned.append(value)
    return new, [*results, *returned]


def _compute(
    *operands: Any, op: Op, names: tuple[str, ...], attrs: Attributes, implementation: str | None, device: Device,
    derivative_of: Op | None = None, callback: Callable[..., Any] | None = None,
    launch: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    arrays = dict(zip(names, operands, strict=True))
    return execute(op, arrays, attrs, implementation, device, callback, launch)


def _on(platform: str | None, context: mlir.LoweringRuleContext, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call that is lowered for `platform`."""
    names = context.platforms or context.module_context.platforms
    return params | {"device": lowered_for(platform, params["op"], params["implementation"], params["device"], names)}


def _launch(context: mlir.LoweringRuleContext) -> Callable[..., Any] | None:
    """How a plan is launched on a GPU; None by jaxlib, as in exports, which run where xmla is not installed."""
    exported = context.module_context.lowering_parameters.for_export
    return None if exported or _launcher.library() is None else _launcher.run


def _lower(platform: str | None, context: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    """A call that each device makes whole."""
    params = _on(platform, context, params)
    interpreted = platform == "cpu" and params["device"] == INTERPRETER
    several = interpreted and _sharding.over_devices(context.module_context)
    callback = _callback(context, **params) if several else None
    return mlir.lower_fun(_compute)(context, *operands, **params, callback=callback, launch=_launch(context))


def _callback(
    context: mlir.LoweringRuleContext, op: Op, names: tuple[str, ...], attrs: Attributes, implementation: str | None,
    **_: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A callback that every device makes; of `jax.pure_callback` JAX 0.12 leaves the results on the first alone."""
    return _sharding.callback_of(context.module_context, host_function(op, names, attrs, implementation))


def _lower_in_parts(platform: str | None, context: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    if params["implementation"] == "reference" or not _sharding.over_a_mesh(context.module_context):
        return _lower(platform, context, *operands, **params)
    params = _on(platform, context, params)
    op, names, attrs = (params[name] for name in ("op", "names", "attrs"))
    launch = _launch(context)

    def function_of(names: tuple[str, ...]) -> Callable[..., Any]:
        its = params | {"names": names}
        callback = _callback(context, **its) if params["device"] == INTERPRETER else None

        def compute(*parts: Any) -> tuple[Any, ...]:
            return _compute(*parts, **its, callback=callback, launch=launch)

        return compute

    problem = op.bind(_specs(names, context.avals_in), attrs)
    return mlir.lower_fun(_sharding.partitioned(op, function_of, problem))(context, *operands)


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, op: Op, names: tuple[str, ...], **params: Any):
    arrays = dict(zip(names, operands, strict=True))
    dims = {n: d if isinstance(d, int) else None for n, d in zip(names, axes, strict=True)}
    size = next(arrays[name].shape[dim] for name, dim in dims.items() if dim is not None)
    refs = {name: array for name, array in arrays.items() if is_ref(array)}
    for name in refs:
        if name in op.mutates and dims[name] is None:
            raise UnsupportedError(
                f"{op.name}: {name} is a Ref without a batch axis under vmap, supported: a Ref with one, or an array"
            )
    rows = {name for name in refs if _batching.row_axis(op.tensors[name]) is not None}  # a pool is not copied
    arrays |= {name: ref[...] for name, ref in refs.items() if dims[name] is not None or name in rows}
    # Of an op without rows every argument is of a whole call.
    apart = op.sums_over_tokens or not any(map(_batching.row_axis, op.tensors.values()))
    pools = set() if apart else _batching.batched_pools(op, dims)
    if apart:
        outputs = _batch_sequentially(op, arrays, dims, params)
    elif not isinstance(size, int):
        raise UnsupportedError(f"{op.name}: vmap is over {size} calls, supported: sizes that are numbers")
    elif size == 0:
        outputs = _batch_of_size_0(op, arrays, dims, params["attrs"])
    elif pools and op.batch is not None:
        return _batch_of_pools(op.batch, arrays, dims, size, params)
    else:
        # Each element updates its own cache, even if all start from the same one.
        for name in op.mutates:
            if dims[name] is None:
                arrays[name], dims[name] = jnp.broadcast_to(arrays[name], (size, *arrays[name].shape)), 0
        division = _batching.Division.of(op, arrays, dims)
        folded = _batching.fold(op, arrays, dims, size, division)
        results = bind(*folded.values(), op=op, names=tuple(folded), **params)
        outputs = [_batching.unfold(result, size, division) for result in results]
    results, updated = outputs[: len(op.outputs)], dict(zip(op.mutates, outputs[len(op.outputs) :], strict=True))
    for name, ref in refs.items():
        if name in updated:
            ref[...] = _batching.move(updated.pop(name), 0, dims[name])
    outputs = [*results, *updated.values()]
    return outputs, [0] * len(outputs)


def _batch_of_size_0(
    op: Op, arrays: Mapping[str, Any], dims: Mapping[str, int | None], attrs: Attributes
) -> list[jax.Array]:
    """The results of a batch of 0 calls, of which folding could not tell how many rows each would have."""
    specs = {}
    for name, array in arrays.items():
        shape = [count for axis, count in enumerate(array.shape) if axis != dims[name]]
        specs[name] = Spec(tuple(shape), array.dtype.name)
    results = [*op.bind(specs, attrs).results.values(), *(specs[name] for name in op.mutates)]
    return [jnp.zeros((0, *spec.shape), spec.dtype) for spec in results]


def _batch_sequentially(
    op: Op, arrays: dict[str, Any], dims: dict[str, int | None], params: dict[str, Any]
) -> list[Any]:
    """One call after another, of an op that sums over rows, or has none: folded, they would be of the whole batch."""
    moved = {
        name: _batching.replicate(_batching.move(arrays[name], dim, 0), 0)
        for name, dim in dims.items()
        if dim is not None
    }

    def one(element: dict[str, Any]) -> list[Any]:
        operands = arrays | element
        return bind(*operands.values(), op=op, names=tuple(operands), **params)

    return jax.lax.map(one, moved)


def _batch_of_pools(
    batch: Callable[..., Any], arrays: dict[str, Any], dims: dict[str, int | None], size: int, params: dict[str, Any]
) -> tuple[list[Any], list[int]]:
    """A batch whose calls have separate pools, computed as `Op.batch` declares."""

    def first(name: str) -> jax.Array:
        array, dim = _batching.replicate(arrays[name], *range(arrays[name].ndim)), dims[name]
        return jnp.broadcast_to(array, (size, *array.shape)) if dim is None else _batching.move(array, dim, 0)

    def call_op(name: str, operands: dict[str, Any], **attrs: Any) -> list[Any]:
        other = registry()[name]
        theirs = params | {"attrs": other.Values(**attrs)}
        return bind(*operands.values(), op=other, names=tuple(operands), **theirs)

    outputs = batch(jnp, call_op, {name: first(name) for name in arrays}, params["attrs"])
    return list(outputs), [0] * len(outputs)


# The tangents of a call's results, linear in those of its arguments. Only transposed: it has no value.
tangent_p = Primitive("xmla_tangent")


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, op: Op, names: tuple[str, ...], **params: Any):
    moving = {n: t for n, t in zip(names, tangents, strict=True) if not isinstance(t, ad.Zero)}
    if not moving:
        out = bind(*primals, op=op, names=names, **params)
        return out, [ad.Zero.from_primal_value(value) for value in out]  # pyrefly: ignore
    if derivative_of := params.get("derivative_of"):
        refuse_second_derivative(derivative_of, "jax.lax.stop_gradient")
    arrays = {n: v[...] if is_ref(v) else v for n, v in zip(names, primals, strict=True)}
    specs = _specs(names, [jax.typeof(value) for value in arrays.values()])
    constants = {name: f"jax.lax.stop_gradient({name})" for name in moving}
    check_derivative(op, constants, specs, params["attrs"], params["implementation"])
    arrays, moving = _private.vary_over_same_axes(arrays, moving)
    results = bind(*arrays.values(), op=op, names=names, **params)
    out = [checkpoint_name(v, f"{op.name}_{name}") for v, name in zip(results, op.outputs, strict=True)]
    moved = tangent_p.bind(*arrays.values(), *out, *moving.values(), op=op, names=names, moving=tuple(moving), **params)
    return out, moved


def _refuse_tangent(*_: Any, op: Op, moving: tuple[str, ...], **params: Any) -> Any:
    refuse_forward_mode(op, moving[0], "jax.grad, jax.vjp")


def _tangent_shapes(*avals: Any, op: Op, names: tuple[str, ...], **_: Any) -> list[Any]:
    return list(avals[len(names) : len(names) + len(op.outputs)])


def _transpose(
    cotangents: Sequence[Any], *operands: Any, op: Op, names: tuple[str, ...], moving: tuple[str, ...],
    attrs: Attributes, implementation: str | None, device: Device | None,
) -> list[Any]:  # fmt: skip
    """The gradients of the arguments `moving`: a call of the op's derivative."""
    saved = operands[: len(names) + len(op.outputs)]
    results = saved[len(names) :]
    gradients = [None if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents]
    arguments = dict(zip(names, saved, strict=False))
    its = derivative_call(op, arguments, results, gradients, jnp.zeros_like, attrs, implementation)
    outputs = bind(
        *its.arguments.values(), op=its.op, names=tuple(its.arguments), attrs=its.attrs, device=device,
        implementation=its.implementation, derivative_of=op,
    )  # fmt: skip
    computed = dict(zip(its.op.outputs, outputs, strict=True))
    primals = zip(moving, operands[len(saved) :], strict=True)
    return [*[None] * len(saved), *[_placed_as(primal.aval, computed[op.gradients[name]]) for name, primal in primals]]


def _placed_as(aval: Any, gradient: jax.Array) -> jax.Array:
    """The gradient with its argument's sharding over explicit axes of a mesh, a part of the type that JAX asks for."""
    if jax.typeof(gradient).sharding.spec == aval.sharding.spec:
        return gradient
    return jax.sharding.reshard(gradient, aval.sharding)


tangent_p.multiple_results = True
tangent_p.def_impl(_refuse_tangent)
tangent_p.def_abstract_eval(_tangent_shapes)
mlir.register_lowering(tangent_p, _refuse_tangent)
batching.primitive_batchers[tangent_p] = _refuse_tangent
ad.primitive_transposes[tangent_p] = _transpose
for primitive in (call_p, partitioned_call_p):
    primitive.multiple_results = True
    primitive.def_impl(partial(_impl, primitive))
    primitive.def_effectful_abstract_eval(_shapes)
    _private.register_discharge_rule(primitive, _discharge)
    batching.primitive_batchers[primitive] = _batch
    ad.primitive_jvps[primitive] = _differentiate
for platform in ("cpu", "cuda", None):
    mlir.register_lowering(call_p, partial(_lower, platform), platform)
    mlir.register_lowering(partitioned_call_p, partial(_lower_in_parts, platform), platform)
_private.require_devices_during_lowering(partitioned_call_p)


def call(
    op: Op, arrays: dict[str, Any], attrs: Attributes, implementation: str | None, device: Device | None
) -> tuple[Any, ...]:
    """Results, then the new values of mutated arguments that are not Refs."""
    outputs = bind(
        *arrays.values(), op=op, names=tuple(arrays), attrs=attrs, implementation=implementation, device=device
    )
    return tuple(outputs)
