"""JAX's transformations of every op: vmap, grad, ahead of time, export, caches."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

from xmla import UnsupportedError, jax_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.jax_api._all_ops import JAX_OPS

OPS = registry()


def smallest(op: Op) -> Case:
    """The op's smallest case; workspace_bytes is for a whole batch, so none that just has enough for itself."""
    cases = [case for case in op.cases if "workspace_bytes" not in case.attrs] or list(op.cases)
    return min(cases, key=kit.size)


SMALL = [(op, smallest(op)) for op in OPS.values()]


def function_of(op: Op, case: Case, names: list[str]) -> Callable[..., object]:
    def call(*arrays: jax.Array) -> object:
        given = dict(zip(names, arrays, strict=True))
        return getattr(JAX_OPS, op.name)(*[given.get(name) for name in op.tensors], **case.attrs)

    return call


def batch(op: Op, case: Case, size: int) -> dict[str, list[np.ndarray]]:
    """Inputs of `size` calls with other values, by name; arrays of a call that are the same for all are not."""
    made = [kit.make(case, seed) for seed in range(size)]
    return {name: [np.ascontiguousarray(m[name]) for m in made] for name in op.tensors if name in made[0]}


def same(op: Op, name: str, got: object, want: object, where: np.ndarray | None) -> None:
    if name in op.mutates or (tolerance := op.outputs[name].agreement) is None:
        kit.assert_bits_equal(name, got, want, where)
    else:
        kit.assert_close(name, got, np.asarray(want), tolerance, where)


def check_vmap(op: Op, case: Case, axes: dict[str, int | None], size: int = 3) -> None:
    """vmap over the axes given against a call for each element; arguments without one are the first call's.

    Its rule may not lean on what a program can forbid: implicit promotion of dtypes and of ranks.
    """
    inputs = batch(op, case, size)
    names = list(inputs)
    shared = {name for name in names if axes.get(name) is None}
    stacked = [
        jnp.asarray(values[0] if name in shared else np.stack(values, axis=axes[name]))
        for name, values in inputs.items()
    ]
    function = function_of(op, case, names)
    mapped = jax.jit(jax.vmap(function, in_axes=tuple(axes.get(name) for name in names)))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = kit.as_tuple(mapped(*stacked))
    for element in range(size):
        arrays = {name: values[0 if name in shared else element] for name, values in inputs.items()}
        where = None
        if op.partial:
            where = kit.written(op, op.reference(**arrays, **kit.attributes(op, case)))
        want = kit.as_tuple(function(*map(jnp.asarray, arrays.values())))
        for name, mine, theirs in zip([*op.outputs, *op.mutates], got, want, strict=True):
            same(op, name, mine[element], theirs, where)


# Arguments of the whole op, which no batch element can have of its own.
SHARED = {"sink", "ape", "norm_weight"}
# Positions that place a token in its request too cannot be shifted to an element's own rotations.
SHARED_ROTATIONS = {"compress_kv": {"cos_sin"}}


@pytest.mark.parametrize(("op", "case"), [pair for pair in SMALL if pair[0].name != "split_batch"], ids=kit.case_id)
def test_vmap_over_everything(op: Op, case: Case) -> None:
    """Every argument has a batch axis, first in one half of them and last in the other: pools of their own too."""
    arrays = kit.make(case)
    shared = SHARED | SHARED_ROTATIONS.get(op.name, set())
    given = [name for name in op.tensors if name in arrays and name not in shared]
    axes = {name: 0 if index % 2 == 0 else arrays[name].ndim for index, name in enumerate(given)}
    check_vmap(op, case, axes)


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("sparse_mla", ("q",)),
        ("sparse_mla", ("slots",)),
        ("sparse_mla", ("cache",)),
        ("read_mla_cache", ("cache",)),
        ("write_mla_cache", ("latent", "rope")),
        ("write_indexer_cache", ("cache",)),
        ("indexer_logits", ("q8",)),
        ("indexer_logits", ("keys", "key_scales")),
        ("indexer_topk", ("keys", "key_scales")),
        ("indexer_logits_paged", ("lengths",)),
        ("indexer_topk_paged", ("cache",)),
        ("indexer_topk_paged", ("block_table", "lengths")),
        ("map_slots", ("block_table",)),
        ("select_topk", ("ends",)),
        ("merge_attention", ("lses",)),
    ],
)
def test_vmap_over_some(name: str, mapped: tuple[str, ...]) -> None:
    """The others are the same for the whole batch."""
    op = OPS[name]
    case = next(case for op_, case in SMALL if op_ is op)
    check_vmap(op, case, dict.fromkeys(mapped, 0), size=2)


@pytest.mark.parametrize("form", ["mxfp4", "fp8_ue8m0"])
def test_vmap_over_rows_of_keys_in_other_formats(form: str) -> None:
    """Each element's rows become a page of its own, in the format that their dtypes tell."""
    op = OPS["indexer_logits"]
    case = next(case for case in op.cases if case.name.startswith(form))
    check_vmap(op, case, {"keys": 0, "key_scales": 0}, size=2)


@pytest.mark.parametrize("optional", ["extra_cache", "cos_sin"])
def test_vmap_over_other_pools(optional: str) -> None:
    """A second source and a table of rotations, each batch element's own."""
    op = OPS["sparse_mla"]
    case = next(case for case in op.cases if optional in kit.make(case))
    check_vmap(op, case, {name: 0 for name in kit.make(case) if name not in SHARED}, size=2)


def test_vmap_twice_and_over_requests_with_ids() -> None:
    op = OPS["map_slots"]
    case = op.cases[2]
    inputs = batch(op, case, 4)
    function = function_of(op, case, list(inputs))
    stacked = [np.stack(values).reshape(2, 2, *values[0].shape) for values in inputs.values()]
    slots, counts = jax.vmap(jax.vmap(function))(*map(jnp.asarray, stacked))
    for element in range(4):
        want = function(*(jnp.asarray(values[element]) for values in inputs.values()))
        kit.assert_bits_equal("slots", slots[element // 2, element % 2], want[0])
        kit.assert_bits_equal("counts", counts[element // 2, element % 2], want[1])


@pytest.mark.parametrize(("op", "case"), [pair for pair in SMALL if pair[0].name != "split_batch"], ids=kit.case_id)
def test_vmap_over_none(op: Op, case: Case) -> None:
    """A batch of no calls has no elements, of the shapes that a call's results have."""
    arrays = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    shared = SHARED | SHARED_ROTATIONS.get(op.name, set())
    function = function_of(op, case, list(arrays))
    none = [jnp.asarray(array if name in shared else array[None][:0]) for name, array in arrays.items()]
    axes = [None if name in shared else 0 for name in arrays]
    got = kit.as_tuple(jax.jit(jax.vmap(function, in_axes=axes))(*none))
    want = kit.as_tuple(jax.eval_shape(function, *map(jnp.asarray, arrays.values())))
    assert [(a.shape, a.dtype) for a in got] == [((0, *a.shape), a.dtype) for a in want]


@pytest.mark.parametrize(("op", "case"), [pair for pair in SMALL if pair[0].name != "split_batch"], ids=kit.case_id)
def test_vmap_over_a_symbolic_number_of_calls(op: Op, case: Case) -> None:
    """Calls made one after the other are a loop, of any length; those folded into one have a plan, of numbers."""
    arrays = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    shared = SHARED | SHARED_ROTATIONS.get(op.name, set())
    (size,) = jax.export.symbolic_shape("size")
    axes = [None if name in shared else 0 for name in arrays]
    leading = [() if axis is None else (size,) for axis in axes]
    dtypes = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays.values()]
    shapes = [(*first, *array.shape) for first, array in zip(leading, arrays.values(), strict=True)]
    mapped = jax.vmap(function_of(op, case, list(arrays)), in_axes=axes)
    given = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
    if op.sums_over_tokens or not {"T", "B"} & {axis for tensor in op.tensors.values() for axis in tensor.names}:
        assert all(result.shape[0] == size for result in kit.as_tuple(jax.eval_shape(mapped, *given)))
        return
    with pytest.raises(UnsupportedError) as caught:
        jax.eval_shape(mapped, *given)
    assert str(caught.value) == f"{op.name}: vmap is over size calls, supported: sizes that are numbers"


def test_vmap_over_none_of_a_ref() -> None:
    case = smallest(OPS["resolve_slots"])
    indices, held, slots = (jnp.asarray(np.ascontiguousarray(array))[None][:0] for array in kit.make(case).values())
    refs = jax.new_ref(held), jax.new_ref(slots)
    selected, *_ = jax.vmap(lambda *arrays: jax_api.resolve_slots(*arrays, **case.attrs))(indices, *refs)
    assert selected.shape == indices.shape and refs[0][...].shape == held.shape


def test_vmap_is_one_call() -> None:
    op, case = OPS["sparse_mla"], OPS["sparse_mla"].cases[1]
    arrays = kit.make(case)
    stacked = [jnp.asarray(np.stack([a] * 5)) for name, a in arrays.items() if name != "sink"]
    jaxpr = str(jax.make_jaxpr(jax.vmap(function_of(op, case, [n for n in arrays if n != "sink"])))(*stacked))
    assert jaxpr.count("xmla[") == 1 and "while" not in jaxpr and "scan" not in jaxpr


def test_vmap_of_a_ref_with_a_batch_axis() -> None:
    """Each element writes its own cache in place, then reads it through the Ref."""
    op, size = OPS["write_mla_cache"], 3
    inputs = batch(op, op.cases[1], size)
    latent, rope, slots, cache = (jnp.asarray(np.stack(values)) for values in inputs.values())
    ref = jax.new_ref(cache)

    @jax.jit
    def step(ref: jax.Ref, latent: jax.Array, rope: jax.Array, slots: jax.Array) -> jax.Array:
        jax.vmap(jax_api.write_mla_cache)(latent, rope, slots, ref)
        return jax.vmap(jax_api.read_mla_cache)(ref, slots)

    rows = step(ref, latent, rope, slots)
    for element in range(size):
        arrays = {name: values[element] for name, values in inputs.items()}
        op.reference(**arrays)
        kit.assert_bits_equal("cache", ref[...][element], arrays["cache"])
        kit.assert_bits_equal("rows", rows[element], jax_api.read_mla_cache(arrays["cache"], arrays["slots"]))


@pytest.mark.parametrize("name", ["select_topk", "sparse_mla", "indexer_topk_paged", "sparse_mla_backward"])
def test_vmap_beside_refs_of_rows_and_pools(name: str) -> None:
    """Those that have no batch axis are read: each call has the same."""
    op, case = OPS[name], smallest(OPS[name])
    first, *others = arrays = {n: jnp.asarray(np.ascontiguousarray(a)) for n, a in kit.make(case).items()}
    function = function_of(op, case, list(arrays))
    batch = jnp.stack([arrays[first], arrays[first][::-1]])
    refs = [jax.new_ref(arrays[other]) for other in others]
    got = kit.as_tuple(jax.vmap(lambda x: function(x, *refs))(batch))
    for element, given in enumerate(batch):
        want = kit.as_tuple(function(given, *[arrays[other] for other in others]))
        for output, mine, theirs in zip(op.outputs, got, want, strict=True):
            same(op, output, mine[element], theirs, None)


def test_refs_of_calls_in_turn_under_vmap() -> None:
    """An op whose results have no row a token, and that updates what it reads."""
    op = OPS["resolve_slots"]
    case, made = op.cases[0], [kit.make(op.cases[0], seed) for seed in range(3)]
    indices, *states = (jnp.stack([np.ascontiguousarray(each[name]) for each in made]) for name in op.tensors)
    refs = [jax.new_ref(state) for state in states]

    def call(*arrays: jax.Array) -> object:
        return jax_api.resolve_slots(*arrays, **case.attrs)

    results = kit.as_tuple(jax.jit(lambda indices, *refs: jax.vmap(call)(indices, *refs))(indices, *refs))
    for element, arrays in enumerate(made):
        want = op.reference(**arrays, **case.attrs)
        for name, got, wanted in zip(op.outputs, results, want, strict=True):
            kit.assert_bits_equal(name, got[element], wanted)
        for name, ref in zip(op.mutates, refs, strict=True):
            kit.assert_bits_equal(name, ref[...][element], arrays[name])


def refused(error: type[Exception], message: str, name: str, axes: dict[str, int], case: int = 0) -> None:
    op = OPS[name]
    arrays = kit.make(op.cases[case])
    stacked = [jnp.asarray(np.stack([a] * 2) if n in axes else a) for n, a in arrays.items()]
    with pytest.raises(error) as caught:
        function = function_of(op, op.cases[case], list(arrays))
        jax.vmap(function, in_axes=tuple(axes.get(n) for n in arrays))(*stacked)
    assert str(caught.value) == message


def test_what_vmap_refuses() -> None:
    refused(
        UnsupportedError, "sparse_mla: sink has a batch axis under vmap, supported: the same sink for all of a batch",
        "sparse_mla", {"q": 0, "sink": 0}, case=1,
    )  # fmt: skip
    refused(
        UnsupportedError, "dsa_attention: indexer_cache has no batch axis under vmap, supported: one, as mla_cache",
        "dsa_attention", {"q": 0, "mla_cache": 0},
    )  # fmt: skip
    refused(
        UnsupportedError, "indexer_logits: key_scales has no batch axis under vmap, supported: one, as keys",
        "indexer_logits", {"keys": 0},
    )  # fmt: skip
    refused(
        UnsupportedError, "dsa_attention: mla_cache has no batch axis under vmap, supported: one, as indexer_cache",
        "dsa_attention", {"q": 0, "indexer_cache": 0},
    )  # fmt: skip
    refused(
        UnsupportedError, "split_batch: vmap is given, supported: ops with an axis T", "split_batch", {"lengths": 0}
    )
    op = OPS["write_mla_cache"]
    latent, rope, slots, cache = (jnp.asarray(a) for a in kit.make(op.cases[0]).values())
    with pytest.raises(UnsupportedError) as caught:
        ref = jax.new_ref(cache)
        jax.vmap(lambda x: jax_api.write_mla_cache(x, rope, slots, ref))(latent[None])
    assert str(caught.value) == (
        "write_mla_cache: cache is a Ref without a batch axis under vmap, supported: a Ref with one, or an array"
    )
    many = jax.ShapeDtypeStruct((40000, 64, 1024, 656), jnp.uint8)
    with pytest.raises(UnsupportedError, match="slots counts 40000 × 65536 places under vmap, supported: what int32"):
        jax.eval_shape(
            jax.vmap(jax_api.read_mla_cache), many, jax.ShapeDtypeStruct((40000, 1), jnp.int32)
        )  # fmt: skip


FLOATING = [(op, case) for op, case in SMALL if any(a.dtype.kind == "f" or a.dtype.name == "bfloat16"
            for a in kit.make(case).values())]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), FLOATING, ids=kit.case_id)
def test_grad_names_the_op(op: Op, case: Case) -> None:
    """Whichever argument is differentiated: an error, never a gradient."""
    arrays = kit.make(case)
    names = list(arrays)
    function = function_of(op, case, names)
    for name in names:
        if not jnp.issubdtype(arrays[name].dtype, jnp.floating) or arrays[name].dtype.itemsize == 1:
            continue
        if name in op.gradients:
            continue  # tests/test_training.py

        def loss(x: jax.Array, name: str = name) -> jax.Array:
            found = kit.as_tuple(function(*(x if n == name else jnp.asarray(a) for n, a in arrays.items())))
            return sum(jnp.sum(f.astype(jnp.float32)) for f in found)

        with pytest.raises(UnsupportedError) as caught:
            jax.jit(jax.grad(loss))(jnp.asarray(arrays[name]))
        none = "constants (its step sparse_mla has derivatives)" if OPS["sparse_mla"] in op.steps else "constants"
        has = f"derivatives of {', '.join(op.gradients)}" if op.gradients else none
        assert str(caught.value) == (
            f"{op.name}: {name} is differentiated, supported: {has}; jax.lax.stop_gradient({name}) makes it a constant"
        )
        with pytest.raises(UnsupportedError):
            jax.jvp(loss, (jnp.asarray(arrays[name]),), (jnp.ones_like(arrays[name]),))


def test_a_constant_is_not_differentiated() -> None:
    logits = jnp.arange(6.0)[None]

    def loss(x: jax.Array) -> jax.Array:
        chosen = jax_api.select_topk(jax.lax.stop_gradient(x), jnp.array([6], jnp.int32), k=2)
        return jnp.sum(jnp.take_along_axis(x, chosen, axis=1) ** 2)

    assert jax.grad(loss)(logits).tolist() == [[0, 0, 0, 0, 8, 10]]

    def beside(x: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, jax_api.select_topk(logits, ends, k=2)

    _, chosen = jax.jvp(beside, (1.0, jnp.array([6], jnp.int32)), (1.0, np.zeros(1, jax.dtypes.float0)))[0]
    assert chosen.tolist() == [[4, 5]]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_ahead_of_time(op: Op) -> None:
    """lower().compile() of shapes alone, then the values."""
    case = next(case for op_, case in SMALL if op_ is op)
    arrays = kit.make(case)
    function = function_of(op, case, list(arrays))
    dense = [jnp.asarray(np.ascontiguousarray(a)) for a in arrays.values()]
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in dense)).compile()
    where = None
    if op.partial:
        where = kit.written(op, op.reference(**arrays, **kit.attributes(op, case)))
    for name, got, want in zip([*op.outputs, *op.mutates], kit.as_tuple(compiled(*dense)),
                               kit.as_tuple(function(*dense)), strict=True):  # fmt: skip
        kit.assert_bits_equal(name, got, want, where)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.mutates], ids=lambda op: op.name)
def test_a_donated_cache_is_consumed(op: Op) -> None:
    case = op.cases[0]
    inputs = kit.make(case)
    arrays = kit.jax_inputs(op, inputs)
    places = {name: list(op.tensors).index(name) for name in op.mutates if name in inputs}
    step = jax.jit(lambda *a: getattr(JAX_OPS, op.name)(*a, **case.attrs), donate_argnums=tuple(places.values()))
    assert step.lower(*arrays).as_text().count("tf.aliasing_output") == len(places)
    updated = kit.as_tuple(step(*arrays))[len(op.outputs) :]
    op.reference(**inputs, **kit.attributes(op, case))
    for (name, place), new in zip(places.items(), updated, strict=True):
        assert arrays[place].is_deleted()
        kit.assert_bits_equal(name, new, inputs[name])


@pytest.mark.gpu
def test_persistent_compilation_cache(tmp_path: Path) -> None:
    """A second process finds the executable of the first."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "from xmla import jax_api\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))\n"
        "call = jax.jit(lambda x, e: jax_api.select_topk(x, e, k=3))\n"
        "print(call(jnp.arange(9.0)[None], jnp.array([9], jnp.int32)).tolist())\n"
        "print(hits.count('/jax/compilation_cache/cache_hits') > 0)\n"
    )
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said == ["[[6, 7, 8]]\nFalse\n", "[[6, 7, 8]]\nTrue\n"]


@pytest.mark.gpu
def test_an_export_runs_after_a_round_trip() -> None:
    op = OPS["sparse_mla"]
    arrays = kit.make(op.cases[1])
    function = jax.jit(function_of(op, op.cases[1], list(arrays)))
    dense = [jnp.asarray(np.ascontiguousarray(a)) for a in arrays.values()]
    exported = jax.export.export(function, disabled_checks=jax_api.EXPORT_CHECKS)(*dense)
    restored = jax.export.deserialize(exported.serialize())
    for name, got, want in zip(op.outputs, restored.call(*dense), function(*dense), strict=True):
        kit.assert_bits_equal(name, got, want)
