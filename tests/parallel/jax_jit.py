"""`jit` over arrays that are shared out over devices; a script, since the devices are made first.

python jax_jit.py 2 or 8      Prints a JSON line for each call: its collectives and how its results are shared out.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

import json
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import kit
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xmla import jax_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.jax_api._all_ops import JAX_OPS
from xmla.jax_api._sharding import shared_axes

OPS = registry()
COLLECTIVES = re.compile(r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def mesh_of(kind: AxisType, **axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=jax.devices()[:count]
    )


def function_of(op: Op, names: Sequence[str], attrs: Mapping[str, object]) -> Callable[..., object]:
    def call(*arrays: jax.Array) -> object:
        given = dict(zip(names, arrays, strict=True))
        return getattr(JAX_OPS, op.name)(*[given.get(name) for name in op.tensors], **attrs)

    return call


def check(label: str, function: Callable[..., object], arrays: Sequence[jax.Array], mesh: Mesh, specs: Sequence[P],
          same: Callable[[int, object, object], None], alone: Callable[..., object] | None = None,
          **options: object) -> None:  # fmt: skip
    """`function` of arrays shared out as `specs` say against the same, or `alone`, on one device."""
    want = kit.as_tuple(jax.jit(alone or function)(*arrays))
    pairs = zip(map(np.asarray, arrays), specs, strict=True)  # what is on a device would be cut by programs
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs]
    compiled = jax.jit(function, **options).lower(*placed).compile()
    got = kit.as_tuple(compiled(*placed))
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for copy in [shard.data for shard in mine.addressable_shards] if mine.is_fully_replicated else [mine]:
            same(index, copy, theirs)
    kinds = sorted(set(COLLECTIVES.findall(compiled.as_text())))
    spread = [[*result.sharding.spec, *[None] * result.ndim][: result.ndim] for result in got]
    print(json.dumps({"call": label, "collectives": kinds, "specs": spread}), flush=True)


def comparison(op: Op, case: Case, arrays: Mapping[str, np.ndarray]) -> Callable[[int, object, object], None]:
    where = None
    if op.partial:
        where = kit.written(op, op.reference(**arrays, **kit.attributes(op, case)))

    def same(index: int, mine: object, theirs: object) -> None:
        name = [*op.outputs, *op.mutates][index]
        agreement = None if name in op.mutates else op.outputs[name].agreement
        exact = jax.default_backend() == "cpu" or "batch_invariant" in op.defaults
        if exact or agreement is None:
            kit.assert_bits_equal(name, mine, theirs, where)
        else:
            kit.assert_close(name, mine, np.asarray(theirs), agreement, where)

    return same


def even(op: Op, arrays: dict[str, np.ndarray], axis: str) -> dict[str, np.ndarray] | None:
    """A case's inputs with an even number of tokens; None if `axis` is not shared out, or summed (jax_explicit.py)."""
    arrays = dict(arrays)
    if axis not in shared_axes(op, list(arrays)) or op.sums_over_tokens:
        return None
    if axis == "T":
        for name, array in arrays.items():
            for place, label in enumerate(op.tensors[name].names):
                if label == "T":
                    array = np.take(array, range(array.shape[place] // 2 * 2), axis=place)
            arrays[name] = np.ascontiguousarray(array)
    if axis == "T" and "request_ids" in op.tensors and "request_ids" not in arrays:
        return None  # check_requests_without_ids
    (size,) = {
        array.shape[op.tensors[name].names.index(axis)]
        for name, array in arrays.items()
        if axis in op.tensors[name].names
    }
    return arrays if size > 0 and size % 2 == 0 else None


def check_every_op(mesh: Mesh) -> None:
    """Tokens over the mesh, then heads, of the smallest case that has them in pairs."""
    for op in OPS.values():
        made = [(case, kit.make(case)) for case in op.cases]
        for axis in ("T", "H"):
            found = [(case, arrays) for case, whole in made if (arrays := even(op, whole, axis)) is not None]
            if not found:
                continue
            case, arrays = min(found, key=lambda pair: sum(array.size for array in pair[1].values()))
            attrs = dict(case.attrs) | ({"batch_invariant": True} if "batch_invariant" in op.defaults else {})
            specs = [P(*("x" if label == axis else None for label in op.tensors[name].names)) for name in arrays]
            given = [jnp.asarray(array) for array in arrays.values()]
            check(f"{op.name} over {axis}", function_of(op, list(arrays), attrs), given, mesh, specs,
                  comparison(op, case, arrays))  # fmt: skip


def exact(index: int, mine: object, theirs: object) -> None:
    kit.assert_bits_equal(str(index), mine, theirs)


def check_a_step(mesh: Mesh) -> None:
    """Several ops in one `jit`: tokens over one mesh axis, heads over another, nothing exchanged but over tokens."""
    rng = np.random.default_rng(0)
    tokens, requests, pages, page, heads = 4, 3, 6, 16, 4
    arrays = {
        "q": jnp.asarray(rng.standard_normal((tokens, heads, 576)), jnp.bfloat16),
        "logits": jnp.asarray(rng.standard_normal((tokens, 2 * page)), jnp.float32),
        "ends": jnp.asarray([5, 32, 0, 17], jnp.int32),
        "cache": jnp.asarray(rng.standard_normal((pages, page, 576)), jnp.bfloat16),
        "block_table": jnp.asarray(rng.permutation(pages).reshape(requests, 2), jnp.int32),
        "request_ids": jnp.asarray([2, 0, 1, 0], jnp.int32),
        "sink": jnp.asarray(rng.standard_normal(heads), jnp.float32),
    }
    specs = [P("tokens", "heads"), P("tokens"), P("tokens"), P(), P(), P("tokens"), P("heads")]

    def step(q: jax.Array, logits: jax.Array, ends: jax.Array, cache: jax.Array, block_table: jax.Array,
             request_ids: jax.Array, sink: jax.Array) -> tuple[jax.Array, ...]:  # fmt: skip
        chosen = jax_api.select_topk(logits, ends, k=8)
        slots, counts = jax_api.map_slots(chosen, block_table, request_ids, page_size=page)
        return jax_api.sparse_mla(q, cache, slots, counts, sink, softmax_scale=0.1, batch_invariant=True)

    kind = mesh.axis_types[0].name.lower()
    check(f"step, {kind}", step, list(arrays.values()), mesh, specs, exact)
    # A batch that is shared out, by vmap.
    batch = ("q", "logits", "ends", "request_ids")
    mapped = jax.vmap(step, in_axes=tuple(0 if name in batch else None for name in arrays))
    if mesh.axis_types[0] is AxisType.Auto:
        size = mesh.shape["tokens"]
        stacked = [
            jnp.stack([jnp.roll(array, shift, axis=0) for shift in range(size)]) if name in batch else array
            for name, array in arrays.items()
        ]
        over = [P("tokens") if name in batch else P() for name in arrays]
        check("vmap over the tokens' mesh axis", mapped, stacked, mesh, over, exact)
    # Inside a shard_map each device has its own already.
    mapped = jax.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=(P("tokens", "heads"),) * 2)
    check(f"shard_map, {kind}", mapped, list(arrays.values()), mesh, specs, exact, step)
    # Heads stay the mesh's in a shard_map over tokens alone: each device has all of its own tokens'.
    own = tuple(P(*spec[:1]) if "tokens" in spec else P() for spec in specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=own, out_specs=(P("tokens"),) * 2, axis_names={"tokens"})
    check(f"shard_map over tokens, {kind}", mapped, list(arrays.values()), mesh, specs, exact, step)


def check_what_stays_whole(mesh: Mesh) -> None:
    """Writes into replicated caches, as arrays, donated and and through a Ref."""
    op = OPS["write_mla_cache"]
    case = next(case for case in op.cases if len(kit.make(case)["slots"]) > 1)
    *tokens, cache = (jnp.asarray(np.ascontiguousarray(array)) for array in kit.make(case).values())
    tokens = [array[: len(array) // 2 * 2] for array in tokens]
    specs = [P("x"), P("x"), P("x"), P()]

    def write(latent: jax.Array, rope: jax.Array, slots: jax.Array, cache: jax.Array) -> jax.Array:
        return jax_api.write_mla_cache(latent, rope, slots, cache)

    def through_a_ref(latent: jax.Array, rope: jax.Array, slots: jax.Array, cache: jax.Array) -> tuple[jax.Array, ...]:
        ref = jax.new_ref(cache)
        jax_api.write_mla_cache(latent, rope, slots, ref)
        return jax_api.read_mla_cache(ref, slots), ref[...]

    check("write", write, [*tokens, cache], mesh, specs, exact)
    check("Ref", through_a_ref, [*tokens, cache], mesh, specs, exact)
    check("donated", write, [*tokens, cache.copy()], mesh, specs, exact, donate_argnums=3)


def check_requests_without_ids(mesh: Mesh) -> None:
    """Eight tokens, also where a device's begin or end inside a request."""
    for name, requests in (("window_slots", 1), ("indexer_logits_paged", 2)):
        op = OPS[name]
        cases = ((case, kit.make(case)) for case in op.cases)
        case, arrays = next((c, a) for c, a in cases if "request_ids" not in a and len(a["block_table"]) >= 2)
        for label, array in arrays.items():
            axes = op.tensors[label].names
            if "T" in axes:
                array = np.take(array, np.arange(8) % array.shape[axes.index("T")], axis=axes.index("T"))
            elif "B" in axes:
                array = array[:requests]
            arrays[label] = np.ascontiguousarray(array)
        specs = [P(*("x" if axis == "T" else None for axis in op.tensors[label].names)) for label in arrays]
        given = [jnp.asarray(array) for array in arrays.values()]
        call = f"{name} without ids, {mesh.axis_types[0].name.lower()}"
        check(call, function_of(op, list(arrays), case.attrs), given, mesh, specs, comparison(op, case, arrays))


if __name__ == "__main__":
    check_every_op(mesh_of(AxisType.Auto, x=2))
    for kind in (AxisType.Auto, AxisType.Explicit):
        check_a_step(mesh_of(kind, tokens=4, heads=2) if sys.argv[1] == "8" else mesh_of(kind, tokens=2, heads=1))
        check_requests_without_ids(mesh_of(kind, x=int(sys.argv[1])))
    check_what_stays_whole(mesh_of(AxisType.Auto, x=2))
