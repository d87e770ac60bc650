"""Gradients, and vmap, of arrays that a mesh shards, over explicit axes (the default of `jax.make_mesh`) and automatic
ones, against those on one device; a script, since the devices are made first.

python jax_explicit.py 2 or 4      Prints a JSON line for each call: its collectives and how its results are sharded.
Without a GPU, unless XMLA_ALL is set, one device takes the first of the gradients alone, and explicit and automatic
axes take turns with those that are not in BOTH.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_jit import COLLECTIVES, OPS, comparison, function_of, mesh_of

from tools.environment import EVERYTHING
from xmla import jax_api
from xmla.core.op import Case, Op
from xmla.core.values import GRADIENT

RNG = np.random.default_rng(0)
TOKENS, ROWS, K = 4, 8, 5
BOTH = ("attention, tokens", "attention, heads", "scores, tokens")
# What no batch element can have of its own.
SHARED = {"sink", "ape", "norm_weight"}


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


SLOTS = jnp.asarray(RNG.integers(-1, ROWS, (TOKENS, K)), jnp.int32)
TARGET = jnp.asarray(RNG.random((TOKENS, K)), jnp.float32)
INDEXER = normal(TOKENS, 2, 32), normal(ROWS, 32), normal(TOKENS, 2, dtype=jnp.float32)


def attend(q: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    return jax_api.sparse_mla(q, rows, slots, softmax_scale=0.05)[0]


def score(q: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
    return jax_api.indexer_scores(q, keys, weights)


def learn(q: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
    return jax_api.indexer_loss(q, keys, weights, indices=SLOTS, target=TARGET)[0]


def gradients(call: Callable[..., jax.Array], count: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Gradients of half the sum of squares by the first `count` arrays, with no operation of JAX's own."""

    def derived(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda *own: call(*own, *arrays[count:]), *arrays[:count])
        return pull(out)

    return derived


def tell(call: str, collectives: Sequence[str], results: Sequence[jax.Array]) -> None:
    specs = [[*result.sharding.spec, *[None] * result.ndim][: result.ndim] for result in results]
    print(json.dumps({"call": call, "collectives": sorted(set(collectives)), "specs": specs}), flush=True)


def placed(mesh: Mesh, arrays: Sequence[jax.Array], specs: Sequence[P]) -> list[jax.Array]:
    pairs = zip(map(np.asarray, arrays), specs, strict=True)  # what is on a device would be cut by programs
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs]


def agree(name: str, mine: jax.Array, theirs: object) -> None:
    """Compare bit for bit on the CPU; on a GPU attention may divide the keys of fewer tokens otherwise."""
    if jax.default_backend() == "cpu":
        kit.assert_bits_equal(name, mine, theirs)
    else:
        values = (np.asarray(array, np.float32) for array in (mine, theirs))
        np.testing.assert_allclose(*values, rtol=2**-6, atol=2**-6, err_msg=name)


def sum_of_parts(
    derived: Callable[..., tuple[jax.Array, ...]], arrays: Sequence[jax.Array], cut: Mapping[int, int], count: int
) -> np.ndarray:
    """The second gradient of `count` devices, each of which has its part of some arrays along an axis."""
    parts = []
    for part in range(count):
        own = list(arrays)
        for place, axis in cut.items():
            own[place] = jnp.asarray(np.split(np.asarray(arrays[place]), count, axis)[part])
        parts.append(np.asarray(derived(*own)[1], np.float32))
    return sum(parts[1:], parts[0]).astype(arrays[1].dtype)


def check_gradients(mesh: Mesh) -> None:
    """Compare gradients with one device's, or where sums are divided with the sum of the devices' parts, by bits."""
    attention = normal(TOKENS, 4, 576), normal(ROWS, 1, 576), SLOTS
    tokens, heads, whole = P("x"), P(None, "x"), P()
    of_the_mesh = f"{mesh.axis_types[0].name.lower()}, {mesh.size}"
    automatic = mesh.axis_types[0] is AxisType.Auto
    for place, (name, call, arrays, count, specs, cut) in enumerate((
        ("attention, tokens", attend, attention, 2, (tokens, whole, tokens), {0: 0, 2: 0}),
        ("attention, queries", attend, attention, 2, (tokens, whole, whole), {0: 0, 2: 0}),
        ("attention, slots", attend, attention, 2, (whole, whole, tokens), {0: 0, 2: 0}),
        ("attention, heads", attend, attention, 2, (heads, whole, whole), {0: 1}),
        ("attention, rows", attend, attention, 2, (whole, tokens, whole), {}),
        ("scores, tokens", score, INDEXER, 3, (tokens, whole, tokens), {0: 0, 2: 0}),
        ("scores, keys", score, INDEXER, 3, (whole, tokens, whole), {}),
        ("loss, tokens", learn, INDEXER, 3, (tokens, whole, tokens), {}),
    )):  # fmt: skip
        if not EVERYTHING and (place > 0 if mesh.size == 1 else name not in BOTH and place % 2 == automatic):
            continue
        derived = gradients(call, count)
        want = list(derived(*arrays))
        if cut:
            want[1] = sum_of_parts(derived, arrays, cut, mesh.size)
        over = placed(mesh, arrays, specs)
        compiled = jax.jit(derived).lower(*over).compile()
        found = compiled(*over)
        with jax.set_mesh(mesh):  # which JAX's own operations need outside of `jit`
            eager = derived(*over)
        for each in (found, eager):
            for number, (mine, theirs) in enumerate(zip(each, want, strict=True)):
                given = over[number].sharding
                assert automatic or mine.sharding.is_equivalent_to(given, mine.ndim), name
                agree(f"{name} {number}", mine, theirs)
        tell(f"{name}: {of_the_mesh}", COLLECTIVES.findall(compiled.as_text()), found)
    # Gradients of every batch element, whose tokens or whose batch is sharded.
    queries, slots = normal(4, TOKENS, 4, 576), jnp.stack([jnp.roll(SLOTS, shift, axis=0) for shift in range(4)])
    each = jax.vmap(gradients(attend, 1), in_axes=(0, None, 0))
    (want,) = each(queries, attention[1], slots)
    for name, spec in (("tokens", P(None, "x")), ("batch", P("x"))):
        over = placed(mesh, (queries, attention[1], slots), (spec, whole, spec))
        with jax.set_mesh(mesh):
            for (found,) in (each(*over), jax.jit(each)(*over)):
                agree(f"vmap over {name}", found, want)
        tell(f"vmap of gradients, {name}: {of_the_mesh}", [], [found])


@cache
def with_even_tokens(op: Op) -> tuple[Case, int] | None:
    """The smallest case with an even number of tokens, or where they may stand twice with each of them twice."""
    found = []
    for case in op.cases:
        arrays = kit.make(case)
        tokens = {arrays[n].shape[op.tensors[n].names.index("T")] for n in arrays if "T" in op.tensors[n].names}
        repeats = 1 if all(size % 2 == 0 for size in tokens) else 2
        if tokens and 0 not in tokens and "workspace_bytes" not in case.attrs and (repeats == 1 or not op.mutates):
            found.append((sum(array.size for array in arrays.values()), case, repeats))
    return min(found, key=lambda each: each[0])[1:] if found else None


def inputs(op: Op, case: Case, repeats: int, seed: int) -> dict[str, np.ndarray]:
    arrays = kit.make(case, seed)
    for name, array in arrays.items():
        if repeats > 1 and "T" in op.tensors[name].names:
            array = np.repeat(array, repeats, axis=op.tensors[name].names.index("T"))
        arrays[name] = np.ascontiguousarray(array)
    return arrays


def check_vmap(mesh: Mesh, op: Op, over: Sequence[str | None], wrap: Callable[[Any], Any] = jax.jit) -> None:
    """Check two calls with tokens and pools of their own; the mesh shards batch and tokens `over` its axes."""
    chosen = with_even_tokens(op)
    assert chosen is not None, op.name
    case = chosen[0]
    made = [inputs(op, *chosen, seed) for seed in range(2)]
    names = [name for name in op.tensors if name in made[0]]
    shared = SHARED | ({"cos_sin"} if op.name == "compress_kv" else set())
    batch = [made[0][n] if n in shared else np.stack([each[n] for each in made]) for n in names]
    mapped = jax.vmap(function_of(op, names, case.attrs), in_axes=tuple(None if n in shared else 0 for n in names))
    specs = [
        P(*over[:1] * (name not in shared), *(over[1] if axis == "T" else None for axis in op.tensors[name].names))
        for name in names
    ]
    want = map(np.asarray, kit.as_tuple(jax.jit(mapped)(*batch)))
    with jax.set_mesh(mesh):
        found = kit.as_tuple(wrap(mapped)(*placed(mesh, batch, specs)))
    results = zip([*op.outputs, *op.mutates], map(np.asarray, found), want, strict=True)
    for index, (result, mine, theirs) in enumerate(results):
        for element, arrays in enumerate(made):
            if op.name == "convert_mla_cache":  # XLA moves NaNs as others
                np.testing.assert_array_equal(mine[element].astype(np.float32), theirs[element].astype(np.float32))
            elif index < len(op.outputs) and op.outputs[result].sum_over:
                kit.assert_close(result, mine[element], theirs[element], GRADIENT)
            else:
                same(op, case, arrays)(index, mine[element], theirs[element])
    tell(f"vmap of {op.name} over {over}", [], found)


def same(op: Op, case: Case, arrays: Mapping[str, np.ndarray]) -> Callable[[int, object, object], None]:
    return comparison(op, case, {name: array.copy() for name, array in arrays.items()})


def check_vmap_twice(mesh: Mesh) -> None:
    logits, ends = normal(2, 3, TOKENS, 9, dtype=jnp.float32), jnp.full((2, 3, TOKENS), 8, jnp.int32)
    twice = jax.vmap(jax.vmap(lambda *arrays: jax_api.select_topk(*arrays, k=3)))
    found = jax.jit(twice)(*placed(mesh, (logits, ends), [P(None, None, "x")] * 2))
    kit.assert_bits_equal("vmap twice", found, twice(logits, ends))
    tell("vmap twice", [], [found])


def main(devices: int) -> None:
    for count in (1, 2, 4)[: devices.bit_length()]:
        for kind in (AxisType.Explicit, AxisType.Auto)[:count]:
            check_gradients(mesh_of(kind, x=count))
    mesh = mesh_of(AxisType.Explicit, x=2)
    for op in OPS.values():
        if with_even_tokens(op) is not None:
            check_vmap(mesh, op, (None, "x"))
    check_vmap_twice(mesh)
    for name in ("map_slots", "sparse_mla", "indexer_logits"):
        check_vmap(mesh, OPS[name], (None, "x"), lambda mapped: mapped)
        check_vmap(mesh, OPS[name], ("x", None))
        check_vmap(mesh_of(AxisType.Explicit, x=1), OPS[name], (None, "x"))
        check_vmap(mesh_of(AxisType.Explicit, y=1, x=2), OPS[name], ("y", "x"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
