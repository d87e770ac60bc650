"""The JAX front-end as JAX users meet it: jit, Refs, donation, Pallas beside it, imports."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from conftest import HAS_GPU
from jax.experimental import pallas as pl

from xmla import ArgumentError, UnsupportedError, jax_api
from xmla.core.op import Op, plan_call
from xmla.core.registry import registry
from xmla.core.values import ATTENTION_OUT, B200, H200, Tolerance, assume_device
from xmla.jax_api import _jax_triton
from xmla.jax_api._all_ops import JAX_OPS
from xmla.jax_api._primitive import is_ref

OPS = list(registry().values())
WRITERS = [op for op in OPS if op.mutates]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_new_values_do_not_trace_again(op: Op) -> None:
    case = op.cases[min(1, len(op.cases) - 1)]
    traces = []

    @jax.jit
    def call(*arrays: jax.Array) -> object:
        traces.append(1)
        return getattr(JAX_OPS, op.name)(*arrays, **case.attrs)

    first = kit.as_tuple(call(*kit.jax_inputs(op, kit.make(case, 0))))
    second = kit.as_tuple(call(*kit.jax_inputs(op, kit.make(case, 1))))
    assert len(traces) == 1
    assert any(not np.array_equal(kit.as_numpy(a).view(np.uint8), kit.as_numpy(b).view(np.uint8))
               for a, b in zip(first, second, strict=True)), "other inputs gave the same outputs"  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("op", WRITERS, ids=lambda op: op.name)
def test_ref_and_functional_forms_write_the_same(op: Op, jitted: bool) -> None:
    case = op.cases[1]
    inputs = kit.make(case)
    arrays = dict(zip(op.tensors, kit.jax_inputs(op, inputs), strict=True))
    before = {name: np.asarray(arrays[name]).copy() for name in op.mutates}

    def function(refs: dict[str, object]) -> object:
        return getattr(JAX_OPS, op.name)(*(arrays | refs).values(), **case.attrs)

    found = kit.as_tuple((jax.jit(function) if jitted else function)({n: arrays[n] for n in op.mutates}))
    results, updated = found[: len(op.outputs)], found[len(op.outputs) :]
    refs = {name: jax.new_ref(arrays[name]) for name in op.mutates}
    returned = kit.as_tuple((jax.jit(function) if jitted else function)(refs))
    for name, ours, theirs in zip(op.outputs, returned, results, strict=True):
        kit.assert_bits_equal(name, ours, theirs)
    op.reference(**inputs, **kit.attributes(op, case))
    for name, value in zip(op.mutates, updated, strict=True):
        kit.assert_bits_equal(name, arrays[name], before[name])  # the functional form leaves its arguments
        kit.assert_bits_equal(name, refs[name][...], value)
        kit.assert_updated(op, case.attrs, inputs, name, value)


@pytest.mark.parametrize("op", WRITERS, ids=lambda op: op.name)
def test_a_ref_outside_jit_compiles_once(op: Op) -> None:
    """Also while `jit` is told to do nothing."""
    case = op.cases[1]
    arrays = dict(zip(op.tensors, kit.jax_inputs(op, kit.make(case)), strict=True))

    def step(caches: dict[str, object]) -> object:
        return getattr(JAX_OPS, op.name)(*(arrays | caches).values(), **case.attrs)

    want = {name: arrays[name] for name in op.mutates}
    for _ in range(3):
        want = dict(zip(op.mutates, kit.as_tuple(step(want))[len(op.outputs) :], strict=True))
    refs = {name: jax.new_ref(arrays[name]) for name in op.mutates}
    step(refs)
    with compiles() as counted:
        step(refs)
        with jax.disable_jit():
            step(refs)
    assert counted == []
    for name, value in want.items():
        kit.assert_bits_equal(name, refs[name][...], value)


@contextmanager
def compiles() -> Iterator[list[str]]:
    """XLA's compilations inside."""
    found: list[str] = []

    def listen(event: str, *_: object, **__: object) -> None:
        found.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Subclass(np.ndarray):
    pass


@dataclass
class Variable:
    """What a module holds, as Flax does."""

    array: jax.Array

    def __jax_array__(self) -> jax.Array:
        return self.array


def strided(array: np.ndarray) -> np.ndarray:
    """Every other element of each row of a larger array."""
    wide = np.repeat(array, 2, axis=-1)
    wide[..., 1::2] = 1
    return wide[..., ::2]


def readonly(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def on_a_mesh(array: np.ndarray) -> jax.Array:
    mesh = jax.make_mesh((1,), "x", devices=jax.devices()[:1])
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P()))


KINDS = (strided, np.asfortranarray, on_a_mesh, lambda array: array[::-1].copy()[::-1], jax.new_ref, readonly,
         lambda array: array.view(Subclass), jnp.asarray)  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_arrays_of_every_kind(op: Op) -> None:
    """Each argument in another kind of array, and then in the next one: the same results."""
    case = min(op.cases, key=lambda case: sum(array.size for array in kit.make(case).values()))
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    function = getattr(JAX_OPS, op.name)

    def call(arrays: dict[str, object]) -> tuple[object, ...]:
        found = kit.as_tuple(function(*[arrays.get(name) for name in op.tensors], **case.attrs))
        updated = iter(found[len(op.outputs) :])  # no results of those that are Refs
        given = [arrays[name] for name in op.mutates]
        return *found[: len(op.outputs)], *(next(updated) if not is_ref(a) else a[...] for a in given)

    want = call({name: jnp.asarray(array) for name, array in inputs.items()})
    where = None
    if op.partial:
        where = kit.written(op, op.reference(**kit.copies(inputs), **kit.attributes(op, case)))
    for first in range(2):
        kinds = {name: KINDS[(first + place) % len(KINDS)] for place, name in enumerate(inputs)}
        got = call(
            {name: kinds[name](jnp.asarray(a) if kinds[name] is jax.new_ref else a) for name, a in inputs.items()}
        )
        for name, mine, theirs in zip([*op.outputs, *op.mutates], got, want, strict=True):
            kit.assert_bits_equal(name, mine, theirs, where)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_arrays_that_jax_would_read_otherwise_are_refused(op: Op) -> None:
    """Those with a mask, those of the other byte order, and what JAX would make an array of."""
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(op.cases[0]).items()}
    for name, array in inputs.items():
        wrong: list[tuple[object, str]] = [
            (np.ma.array(array), "is MaskedArray, expected jax.Array"),
            (Variable(jnp.asarray(array)), "is Variable, expected jax.Array; jnp.asarray makes one of it"),
        ]
        if array.dtype.kind in "iuf" and array.dtype.itemsize > 1:
            other = array.astype(array.dtype.newbyteorder())
            wrong.append((other, f"dtype is {other.dtype}, expected "))
        for value, message in wrong:
            with pytest.raises(ArgumentError, match=re.escape(f"{op.name}: {name} {message}")):
                arguments = [(inputs | {name: value}).get(n) for n in op.tensors]
                getattr(JAX_OPS, op.name)(*arguments, **op.cases[0].attrs)


LOGITS, ENDS = np.arange(40, dtype=np.float32).reshape(4, 10) % 11, np.full(4, 10, np.int32)
CHOSEN = np.sort(np.argsort(LOGITS, axis=1)[:, -3:], axis=1)
SHAPES = jax.ShapeDtypeStruct(LOGITS.shape, LOGITS.dtype), jax.ShapeDtypeStruct(ENDS.shape, ENDS.dtype)


def select() -> Callable[..., jax.Array]:
    """A function that JAX has not traced yet."""
    return jax.jit(lambda logits, ends: jax_api.select_topk(logits, ends, k=3))


WIDE = [(op, name) for op in registry().values() for name, tensor in op.tensors.items() if "int64" in tensor.dtypes]


@pytest.mark.parametrize(("op", "name"), WIDE, ids=kit.case_id)
def test_indices_that_jax_truncates_name_nothing_or_are_refused(op: Op, name: str) -> None:
    """2**32 + n is n in 32 bits; in a pool of 2**31 entries and more the greatest index of 32 bits is another's."""
    case = kit.smallest(op)
    inputs = kit.make(case)
    inputs[name] = inputs[name].astype(np.int64)
    wide = inputs[name] + np.where(inputs[name] >= 0, 2**32, -(2**32))
    function = getattr(JAX_OPS, op.name)
    want, found = (
        kit.as_tuple(function(*({**inputs, name: indices}.get(n) for n in op.tensors), **case.attrs))
        for indices in (np.full_like(wide, -1), wide)
    )
    for got, expected in zip(found, want, strict=True):
        kit.assert_bits_equal(op.name, got, expected)
    page, *_ = [n for n, tensor in op.tensors.items() if tensor.names[:2] == op.tensors[name].index_of.split()]
    sizes = dict(zip(op.tensors[page].names, inputs[page].shape, strict=True)) | {op.tensors[page].names[0]: 2**31}
    for pool, tensor in op.tensors.items():
        if pool in inputs and set(tensor.names[:1]) & sizes.keys() and len(tensor.names) == 3:
            shape = (2**31, *inputs[pool].shape[1:])
            inputs[pool] = np.broadcast_to(inputs[pool][:1], shape)
    inputs[name][:1] = 2**31 + 5
    message = f"{op.name}: {name} has an index of {2**31 + 5}, supported: indices below 2**31, or jax_enable_x64"
    with pytest.raises(UnsupportedError) as caught:
        function(*(inputs.get(n) for n in op.tensors), **case.attrs)
    assert str(caught.value) == message


def test_a_function_traced_for_another_device_runs_here() -> None:
    """And the other way round: JAX keeps what it traced, and calls on either side must not find it."""
    first, second = select(), select()
    with assume_device(H200):
        jax.eval_shape(first, LOGITS, ENDS)
    assert np.array_equal(second(LOGITS, ENDS), CHOSEN)
    programs = []
    for function in (first, second):
        assert np.array_equal(function(LOGITS, ENDS), CHOSEN)
        for device in (H200, B200):
            with assume_device(device):
                programs.append(str(jax.make_jaxpr(function)(*SHAPES)))
    assert ["H200" in program for program in programs] == [True, False] * 2
    assert ["B200" in program for program in programs] == [False, True] * 2


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("named", [True, False])
def test_the_default_device_by_name(platform: str, named: bool) -> None:
    if platform == "gpu" and not HAS_GPU:
        pytest.skip("needs a CUDA device")
    device = jax.local_devices(backend=platform)[0]
    implementation = "reference" if HAS_GPU and platform == "cpu" else None
    with jax.default_device(platform if named else device):
        for call in (jax_api.select_topk, jax.jit(jax_api.select_topk, static_argnames=("k", "implementation"))):
            chosen = call(LOGITS, ENDS, k=3, implementation=implementation)
            assert chosen.devices() == {device} and np.array_equal(chosen, CHOSEN)


@pytest.mark.gpu
def test_one_jitted_function_for_both_devices() -> None:
    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    for order in ((gpu, cpu), (cpu, gpu)):
        function, by_reference = select(), jax.jit(lambda *a: jax_api.select_topk(*a, k=3, implementation="reference"))
        for device in order:
            arrays = jax.device_put((LOGITS, ENDS), device)
            chosen = by_reference(*arrays)
            assert chosen.devices() == {device} and np.array_equal(chosen, CHOSEN)
            if device is gpu:
                assert np.array_equal(function(*arrays), CHOSEN)
            else:
                with pytest.raises(UnsupportedError, match="select_topk: arrays on the CPU need Triton's interpreter"):
                    function(*arrays)


def test_a_platform_without_kernels_is_named() -> None:
    for platform, message in (
        ("tpu", "select_topk: platform is tpu, supported: cpu and cuda"),
        ("rocm", "select_topk: platform is rocm, supported: cpu and cuda"),
        ("cuda", "select_topk: platform is cuda without a GPU, supported: a GPU, or a device named by xmla.core.val"),
    ):
        if platform == "cuda" and HAS_GPU:
            continue
        with pytest.raises(UnsupportedError, match=message):
            jax.export.export(select(), platforms=[platform])(*SHAPES)


def test_an_attribute_that_is_an_array_is_refused() -> None:
    """Kernels are compiled for its value, which a trace does not know."""
    message = "select_topk: k is {}, expected int: static_argnames='k' of jax.jit, or int(…) of a concrete array"
    for call, got in (
        (lambda: jax.jit(lambda k: jax_api.select_topk(LOGITS, ENDS, k=k))(3), "traced"),
        (lambda: jax_api.select_topk(LOGITS, ENDS, k=jnp.int32(3)), "a jax.Array"),
    ):
        with pytest.raises(ArgumentError) as refused:
            call()
        assert str(refused.value) == message.format(got)
    static = jax.jit(jax_api.select_topk, static_argnames="k")
    assert np.array_equal(static(LOGITS, ENDS, k=3), CHOSEN)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_symbolic_sizes_are_refused_by_name(op: Op) -> None:
    """The first axis of every argument: a plan needs numbers."""
    case = op.cases[0]
    arrays = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    (size,) = jax.export.symbolic_shape("size")
    for name in arrays:
        shapes = []
        for other, array in arrays.items():
            shape = (size, *array.shape[1:]) if other == name else array.shape
            shapes.append(jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(array.dtype)))

        def call(*given: jax.Array) -> object:
            by_name = dict(zip(arrays, given, strict=True))
            return getattr(JAX_OPS, op.name)(*[by_name.get(n) for n in op.tensors], **case.attrs)

        with pytest.raises(UnsupportedError) as refused:
            jax.export.export(jax.jit(call))(*shapes)
        axis = f"{op.name}: {name} axis {op.tensors[name].names[0]} (axis 0)"
        assert str(refused.value) == f"{axis} is size, supported: sizes that are numbers"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_arrays_in_the_hosts_memory_are_refused(op: Op) -> None:
    """Whichever it is; XLA refuses to compile the call of an updated one, or ends the process if it is donated."""
    case = op.cases[0]
    arrays = dict(zip(op.tensors, kit.jax_inputs(op, kit.make(case)), strict=True))
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    call = partial(getattr(JAX_OPS, op.name), **case.attrs)
    for name in (name for name, array in arrays.items() if array is not None):
        there = arrays | {name: jax.device_put(arrays[name], host)}
        for function in (call, partial(jax.eval_shape, call)):
            with pytest.raises(UnsupportedError) as refused:
                function(*there.values())
            assert str(refused.value) == (
                f"{op.name}: {name} is in the host's memory, supported: the device's, as by "
                f"jax.device_put({name}, jax.memory.Space.Device)"
            )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_random_keys_are_refused(op: Op) -> None:
    """An array of keys has a dtype that no other library knows."""
    case = op.cases[0]
    inputs = kit.make(case)
    for name in inputs:
        arrays = dict(zip(op.tensors, kit.jax_inputs(op, inputs), strict=True))
        with pytest.raises(ArgumentError, match=rf"^{op.name}: {name} dtype is key<fry>, expected "):
            keys = jax.random.wrap_key_data(jnp.zeros((*inputs[name].shape, 2), jnp.uint32))
            getattr(JAX_OPS, op.name)(*(arrays | {name: keys}).values(), **case.attrs)


def test_what_a_write_through_a_ref_returned_is_no_cache() -> None:
    keys, slots = jnp.ones((2, 128), jnp.bfloat16), jnp.arange(2, dtype=jnp.int32)
    ref = jax.new_ref(jnp.zeros((1, 64, 132), jnp.uint8))
    returned = jax_api.write_indexer_cache(keys, slots, ref)
    for call in (
        lambda: jax_api.write_indexer_cache(keys, slots, returned),
        lambda: jax_api.read_indexer_cache(returned, slots),
    ):
        with pytest.raises(ArgumentError, match=r"cache is NoneType, expected jax\.Array; a write through a Ref"):
            call()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_view_of_a_ref_is_refused_by_name(op: Op) -> None:
    """Whichever argument it is, as the others are arrays; what the error names instead is taken."""
    case = op.cases[min(1, len(op.cases) - 1)]
    arrays = dict(zip(op.tensors, kit.jax_inputs(op, kit.make(case)), strict=True))
    given = [name for name, array in arrays.items() if array is not None]

    def of(name: str, part: Callable[[jax.Ref], object]) -> object:
        def call(stack: jax.Array) -> object:
            return getattr(JAX_OPS, op.name)(*(arrays | {name: part(jax.new_ref(stack))}).values(), **case.attrs)

        return jax.eval_shape(call, arrays[name][None])

    for name in given:
        of(name, lambda stack: stack[0])
        with pytest.raises(ArgumentError) as caught:
            of(name, lambda stack: stack.at[0])
        part = "ref[i], whose new value is to be assigned to ref[i]" if name in op.mutates else "ref[i]"
        assert str(caught.value) == (
            f"{op.name}: {name} is a view of a Ref (ref.at[i]), expected the Ref itself, or a jax.Array: {part}"
        )


def test_pallas_kernels_around_an_op_in_one_jit() -> None:
    """A Pallas kernel (RMSNorm and rope of the query) feeds sparse_mla, another consumes its output."""
    op = registry()["sparse_mla"]
    inputs = kit.make(op.cases[1])
    q, cache, slots, lengths, sink, *_ = kit.jax_inputs(op, inputs)
    tokens, heads, width = q.shape
    weight = jnp.linspace(0.5, 1.5, width)
    angles = jnp.linspace(0.0, 3.0, 32)

    # The Triton lowering of Pallas has no slices: the even and odd rope dims are arrays of their own.
    def prepare(latent_ref, even_ref, odd_ref, weight_ref, angle_ref, latent_out, even_out, odd_out) -> None:
        latent, even, odd = (ref[...].astype(jnp.float32) for ref in (latent_ref, even_ref, odd_ref))
        square = jnp.sum(latent * latent, axis=-1) + jnp.sum(even * even, axis=-1) + jnp.sum(odd * odd, axis=-1)
        inverse = jax.lax.rsqrt(square / width + 1e-6)[:, None]
        latent_out[...] = (latent * inverse * weight_ref[...]).astype(latent_out.dtype)
        cos, sin = jnp.cos(angle_ref[...]), jnp.sin(angle_ref[...])
        even_out[...] = ((even * cos - odd * sin) * inverse).astype(even_out.dtype)
        odd_out[...] = ((odd * cos + even * sin) * inverse).astype(odd_out.dtype)

    def halve(x_ref, out_ref) -> None:
        out_ref[...] = x_ref[...] * 0.5

    def a_token(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda t: (t, *[0] * len(shape)))

    def shared(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size,), lambda t: (0,))

    def like(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    rows = [a_token(heads, 512), a_token(heads, 32), a_token(heads, 32)]

    @jax.jit
    def step(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = q[..., :512], q[..., 512::2], q[..., 513::2]
        latent, even, odd = pl.pallas_call(
            prepare, grid=(tokens,), out_shape=[like(part) for part in parts],
            in_specs=[*rows, shared(512), shared(32)], out_specs=rows, interpret=not HAS_GPU,
        )(*parts, weight[:512], angles)  # fmt: skip
        prepared = jnp.concatenate([latent, even, odd], axis=-1)
        out, _ = jax_api.sparse_mla(prepared, cache, slots, lengths, sink, softmax_scale=0.1)
        half = pl.pallas_call(
            halve, grid=(tokens,), out_shape=like(out), in_specs=rows[:1], out_specs=rows[0], interpret=not HAS_GPU
        )(out)
        return half, prepared

    got, prepared = step(q)

    wide = np.asarray(q).astype(np.float64)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    pairs = wide[..., 512:].reshape(tokens, heads, 32, 2)
    cos, sin = np.cos(np.asarray(angles, np.float64)), np.sin(np.asarray(angles, np.float64))
    even, odd = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin
    want = np.concatenate([wide[..., :512] * np.linspace(0.5, 1.5, width)[:512], even, odd], axis=-1)
    kit.assert_close("query", prepared, want, Tolerance(1e-6, 2**-8, 1e-5))
    out, _ = op.reference(
        np.asarray(prepared), inputs["cache"], inputs["slots"], inputs["lengths"], inputs["sink"], softmax_scale=0.1
    )
    kit.assert_close("out", got, out * 0.5, ATTENTION_OUT)


def run_python(code: str, **environment: str) -> str:
    import os

    kept = {name: value for name, value in os.environ.items() if name not in environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_import_needs_neither_torch_nor_a_gpu() -> None:
    code = (
        "import sys, jax, xmla.jax_api as api, jax.numpy as jnp\n"
        "print(api.select_topk(jnp.arange(5.0)[None], jnp.array([5]), k=2).tolist(), 'torch' in sys.modules)"
    )
    assert run_python(code, JAX_PLATFORMS="cpu", TRITON_INTERPRET="1") == "[[3, 4]] False"


def test_triton_cache_dir_survives() -> None:
    code = (
        "import os\nfrom xmla.jax_api import _jax_triton\n_jax_triton._import()\n"
        "import sys; assert 'jax_triton' in sys.modules\nprint(os.environ.get('TRITON_CACHE_DIR'))"
    )
    assert run_python(code, JAX_PLATFORMS="cpu", TRITON_CACHE_DIR="/tmp/kept") == "/tmp/kept"


def test_gpu_kernels_without_jaxs_cuda_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    _jax_triton._import()
    monkeypatch.delattr("jaxlib.gpu_triton.TritonKernel")
    with pytest.raises(UnsupportedError, match=r"GPU kernels under JAX need JAX's CUDA plugin, .*: pip install 'xmla"):
        _jax_triton._import.__wrapped__()


def test_a_call_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, or lowered before: what a call is planned by does not tell where its arrays are."""
    made: list[str] = []
    bind = Op.bind
    monkeypatch.setattr(Op, "bind", lambda op, *given: [made.append(op.name), bind(op, *given)][1])
    op = registry()["dsa_attention"]
    arrays = {name: jnp.asarray(array) for name, array in kit.make(op.cases[0]).items()}
    calls = jax_api.dsa_attention, jax.jit(jax_api.dsa_attention, static_argnames=list(op.defaults))
    for first, second in (calls, calls[::-1]):
        plan_call.cache_clear()
        jax.clear_caches()
        first(**arrays, **op.cases[0].attrs)
        assert made.count("sparse_mla") == 1
        made.clear()
        second(**arrays, **op.cases[0].attrs)
        assert {*made} == {"dsa_attention"}  # for the shapes of a trace
        made.clear()
