"""The torch front-end as torch users meet it: opcheck, torch.compile, out-variants, CUDA graphs, streams."""

import functools
import pickle
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
import torch
from conftest import EVERYTHING

from xmla import UnsupportedError, jax_api, torch_api
from xmla.core.op import Case, Op
from xmla.core.op.docstrings import TORCH, document
from xmla.core.registry import public_ops, registry
from xmla.torch_api._all_ops import TORCH_OPS
from xmla.torch_api._arrays import NAMES, to_numpy

OPS = list(registry().values())
by_name = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


# Their smallest cases have no room for more tokens, or for more of the newest blocks.
WITH_ROOM = {"resolve_slots": "b3-next2-k17-places181-of500", "indexer_blocks": "parts"}


@functools.cache
def case_of_most_arguments(op: Op) -> Case:
    """The smallest of them without an axis of 1: values of every case are compared elsewhere."""
    if op.name in WITH_ROOM:
        return next(case for case in op.cases if case.name == WITH_ROOM[op.name])
    sizes = {}
    for case in op.cases:
        inputs = kit.make(case)
        alone = min(size for array in inputs.values() for size in array.shape) < 2
        sizes[case.name] = alone, -len(inputs), sum(array.size for array in inputs.values())
    return min(op.cases, key=lambda case: sizes[case.name])


def call_arguments(op: Op, device: str) -> tuple[list[torch.Tensor | None], dict[str, object]]:
    chosen = case_of_most_arguments(op)
    arguments = kit.torch_inputs(op, kit.make(chosen), device)
    return [a.contiguous() if a is not None else None for a in arguments], dict(chosen.attrs)


def defined(op: Op, arguments: list[torch.Tensor | None], attrs: dict[str, object]) -> np.ndarray | None:
    """Where the results are written: everywhere but in logits over pages, by the reference of this very call."""
    if not op.partial:
        return None
    reference = getattr(TORCH_OPS, op.name)(*arguments, **attrs, implementation="reference")
    return kit.written(op, tuple(map(kit.as_numpy, kit.as_tuple(reference))))


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_views_for_the_interpreter(dtype: torch.dtype) -> None:
    """They are of the tensor's own memory, and leave its storage one that FSDP can resize."""
    matrix = torch.arange(12).reshape(3, 4).to(dtype)
    for tensor in (matrix, matrix.T[1:], matrix[:1, :1].expand(2, 5), matrix[1, 2], matrix[:0]):
        view = to_numpy(tensor)
        assert view.shape == tensor.shape and view.flags.writeable and tensor.untyped_storage().resizable()
        assert view.ravel().tolist() == tensor.flatten().tolist()
        assert not tensor.numel() or view.ctypes.data == tensor.data_ptr()


@by_name
def test_opcheck(op: Op, device: str) -> None:
    arguments, attrs = call_arguments(op, device)
    packet = getattr(torch.ops.xmla, op.name)
    utilities = ["test_autograd_registration", "test_faketensor"]
    if not op.partial:  # columns that are never written differ from run to run
        utilities.append("test_aot_dispatch_dynamic")
    results = kit.as_tuple(packet(*arguments, **attrs))
    if torch.float8_e4m3fn not in {t.dtype for t in (*arguments, *results) if t is not None}:
        utilities.append("test_schema")  # it multiplies, which torch cannot do with fp8 on the CPU
    torch.library.opcheck(packet.default, tuple(arguments), attrs, test_utils=utilities)
    if op.outputs:
        out = {f"out_{name}": torch.empty_like(t) for name, t in zip(op.outputs, results, strict=True)}
        if not EVERYTHING and "test_aot_dispatch_dynamic" in utilities:  # of an op's two overloads the one is traced
            utilities.remove("test_aot_dispatch_dynamic")
        torch.library.opcheck(packet.out, tuple(arguments), attrs | out, test_utils=utilities)


@by_name
def test_schema_declares_exactly_what_is_mutated(op: Op) -> None:
    packet = getattr(torch.ops.xmla, op.name)
    mutated = {a.name for a in packet.default._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == set(op.mutates)
    if op.outputs:
        written = {a.name for a in packet.out._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == {f"out_{name}" for name in op.outputs} | {"workspace", *op.mutates}


@pytest.mark.parametrize("op", [op for op in OPS if op.outputs], ids=lambda op: op.name)
def test_out_variant_writes_the_given_tensors(op: Op, device: str) -> None:
    arguments, attrs = call_arguments(op, device)
    function = getattr(TORCH_OPS, op.name)
    fresh = kit.as_tuple(function(*call_arguments(op, device)[0], **attrs))
    given = tuple(torch.full_like(t, 7) for t in fresh)
    returned = function(*arguments, **attrs, out=given if len(given) > 1 else given[0])
    for name, want, tensor, back in zip(op.outputs, fresh, given, kit.as_tuple(returned), strict=True):
        assert back is tensor
        kit.assert_bits_equal(name, tensor, want, defined(op, arguments, attrs))


# Among them is every type of an argument, and calls of no, one and more results; `make floors` takes all ops.
AT_FLOORS = {
    "sparse_mla", "sparse_mla_backward", "select_topk", "indexer_topk", "indexer_logits_paged", "dsa_step",
    "write_mla_cache", "split_batch",
}  # fmt: skip


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.floors if op.name in AT_FLOORS else ()) for op in OPS],
    ids=lambda op: op.name,
)
def test_compiles_whole_and_dynamic(op: Op, device: str) -> None:
    """fullgraph: no graph break. dynamic: another number of tokens does not compile again."""
    arguments, attrs = call_arguments(op, device)
    if "workspace_bytes" in attrs:  # for the most tokens below
        attrs["workspace_bytes"] *= 5
    function = getattr(TORCH_OPS, op.name)
    compiled = torch.compile(lambda *a: function(*a, **attrs), fullgraph=True, dynamic=True, backend="aot_eager")
    first_axes = {name: tensor.names[0] for name, tensor in op.tensors.items()}
    rows = "T" if "T" in first_axes.values() else next(iter(first_axes.values()))
    token_first = [name for name, axis in first_axes.items() if axis == rows]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for repeat in (3, 5):  # no axis may happen to equal another: dynamo would take them for one
        many = [
            a if a is None or n not in token_first or op.name.startswith("read") else torch.cat([a] * repeat)
            for n, a in zip(op.tensors, arguments, strict=True)
        ]
        if op.name == "split_batch":
            many[0] = torch.arange(repeat * len(arguments[1]) + 1, device=device, dtype=torch.int32)
            many[1:] = [torch.cat([a] * repeat) for a in arguments[1:] if a is not None]
        if op.mutates and "slots" in op.tensors:  # valid slots must be distinct
            place = list(op.tensors).index("slots")
            distinct = torch.arange(many[place].numel(), device=device, dtype=torch.int32)
            many[place] = distinct.view_as(many[place])
        if (
            "block_table" in op.tensors
            and "request_ids" in op.tensors
            and many[list(op.tensors).index("request_ids")] is None
        ):
            place = list(op.tensors).index("block_table")
            many[place] = torch.cat([arguments[place]] * repeat)
        clones = [a.clone() if a is not None else None for a in many]
        want = (*kit.as_tuple(function(*clones, **attrs)), *(clones[place] for place in op.mutated))
        got = (*kit.as_tuple(compiled(*many)), *(many[place] for place in op.mutated))
        where = defined(op, many, attrs)
        for a, b in zip(got, want, strict=True):
            kit.assert_bits_equal(op.name, a, b, where)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert frames == 1, f"{frames} graphs for two batch sizes"


def selected(op: Op, name: str, tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if "T" not in op.tensors[name].names:
        return tensor
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # not every one-byte dtype is indexed
    return raw.index_select(op.tensors[name].names.index("T"), tokens).view(tensor.dtype)


def of_many_tokens(op: Op, device: str) -> tuple[dict[str, torch.Tensor], dict[str, object]] | None:
    """A call of tokens that can be left out one by one."""
    for case in op.cases:
        inputs = kit.make(case)
        axes = {n: op.tensors[n].names for n in inputs}
        tokens = {a.shape[axes[n].index("T")] for n, a in inputs.items() if "T" in axes[n]}
        apart = "request_ids" in inputs or not any("B" in names for names in axes.values())
        if tokens and min(tokens) > 1 and apart:
            return {n: kit.to_torch(a, device).contiguous() for n, a in inputs.items()}, dict(case.attrs)
    return None


@by_name
def test_a_number_of_tokens_that_data_decide(op: Op, device: str) -> None:
    """Tokens chosen by `nonzero`: a call compiles whole though their number is known to no shape."""
    call = of_many_tokens(op, device)
    if call is None:
        alone = ("map_slots", "split_batch", "indexer_loss_backward", "resolve_slots")
        whole = ("compress_rows", "compress_rows_backward")  # a document's tokens stand beside each other
        assert op.name in (*alone, *whole), "its cases have one token, or as many of each request"
        return
    given, attrs = call
    attrs |= {"workspace_bytes": 1 << 24} if "workspace_bytes" in attrs else {}
    function = getattr(TORCH_OPS, op.name)

    def chosen(mask: torch.Tensor, tensors: dict[str, torch.Tensor]) -> tuple[object, ...]:
        tokens = mask.nonzero()[:, 0]
        mine = {n: selected(op, n, t, tokens) for n, t in tensors.items()}
        return (*kit.as_tuple(function(**mine, **attrs)), *(mine[name] for name in op.mutates))

    first = next(n for n in given if "T" in op.tensors[n].names)
    mask = torch.ones(given[first].shape[op.tensors[first].names.index("T")], dtype=torch.bool, device=device)
    mask[-1] = False
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
        found = compiled(mask, {n: t.clone() for n, t in given.items()})
    want = chosen(mask, {n: t.clone() for n, t in given.items()})
    tokens = mask.nonzero()[:, 0]
    where = defined(op, [selected(op, n, given[n], tokens) if n in given else None for n in op.tensors], attrs)
    for got, wanted in zip(found, want, strict=True):
        kit.assert_bits_equal(op.name, got, wanted, where)


# A granularity is a model's constant, of a few values.
INTEGERS = [(op, attr.name) for op in OPS for attr in op.attrs if attr.type is int and attr.name != "granularity"]


@pytest.mark.parametrize(("op", "name"), INTEGERS, ids=lambda value: getattr(value, "name", value))
def test_integers_that_change_do_not_compile_again(
    op: Op, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sizes, they are symbols from the second value on: `k = min(64, keys)`, the tokens of a step."""
    for what in ("_launch", "_interpret"):  # values are compared elsewhere
        monkeypatch.setattr(torch_api._run, what, lambda *_: None)
    arguments, attrs = call_arguments(op, device)
    first = int(attrs.get(name) or (1 << 24 if name == "workspace_bytes" else 8))
    function = getattr(TORCH_OPS, op.name)
    rest = {n: value for n, value in attrs.items() if n != name}
    compiled = torch.compile(lambda n, *a: function(*a, **rest, **{name: n}), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for value in range(first, first + 5):
        want = kit.as_tuple(function(*arguments, **rest, **{name: value}))
        found = kit.as_tuple(compiled(value, *arguments))
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in want]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("api", [torch_api, jax_api], ids=["torch", "jax"])
@pytest.mark.parametrize("op", public_ops().values(), ids=kit.case_id)
def test_is_found_again_in_another_process(op: Op, api: object) -> None:
    function = getattr(api, op.name)
    assert pickle.loads(pickle.dumps(function)) is function
    if api is torch_api:
        assert pickle.loads(pickle.dumps(function.plan)) is function.plan


def mapped(op: Op, device: str, size: int) -> tuple[Any, list[torch.Tensor], list[str]]:
    """A call of the op's smallest case that returns what it updates, too, a batch of its arguments and their names."""
    case = kit.smallest(op)
    inputs = {name: array.copy() for name, array in kit.make(case).items()}
    names = list(inputs)

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_name = dict(zip(names, tensors, strict=True))
        results = getattr(TORCH_OPS, op.name)(*[by_name.get(name) for name in op.tensors], **case.attrs)
        return *kit.as_tuple(results), *(by_name[name] for name in op.mutates if name in by_name)

    arrays = [kit.to_torch(array, device)[None] for array in inputs.values()]
    batch = [torch.cat([array] * size) if size else array[:0] for array in arrays]
    return call, batch, names


@by_name
def test_vmap_calls_an_op_for_each_element(op: Op, device: str) -> None:
    """An op that updates an argument updates each element's own."""
    call, batch, names = mapped(op, device, 3)
    for array in batch:  # elements differ
        array[1] = array[1].view(torch.uint8).flip(0).view(array.dtype)
    copies = [array.clone() for array in batch]
    results = torch.func.vmap(call)(*batch)
    for element in range(3):
        arguments = {name: copy[element] for name, copy in zip(names, copies, strict=True)}
        want = call(*arguments.values())
        where = defined(op, [arguments.get(name) for name in op.tensors], dict(kit.smallest(op).attrs))
        for got, one in zip(results, want, strict=True):
            kit.assert_bits_equal("result", got[element], one, where)


@by_name
def test_vmap_over_none(op: Op, device: str) -> None:
    """A batch of no calls has no elements, of the shapes that a call's results have; in JAX likewise."""
    call, batch, _ = mapped(op, device, 0)
    _, ones, _ = mapped(op, device, 1)
    got, want = torch.func.vmap(call)(*batch), call(*(array[0] for array in ones))
    assert [(a.shape, a.dtype) for a in got] == [((0, *a.shape), a.dtype) for a in want]


def test_vmap_over_none_is_differentiated(device: str) -> None:
    op = registry()["sparse_mla"]
    call, batch, names = mapped(op, device, 0)
    q = batch[names.index("q")].requires_grad_()
    out, lse = torch.func.vmap(call)(*batch)
    (out.sum() + lse.sum()).backward()
    assert q.grad is not None and q.grad.shape == q.shape


def test_vmap_twice_and_over_an_axis_between(device: str) -> None:
    logits, ends = torch.randn(2, 3, 4, 8, device=device), torch.full((2, 3, 4), 8, dtype=torch.int32, device=device)
    select = partial(torch_api.select_topk, k=2)
    twice = torch.func.vmap(torch.func.vmap(select))(logits, ends)
    between = torch.func.vmap(select, in_dims=(1, 1))(logits[0].transpose(0, 1), ends[0].transpose(0, 1))
    kit.assert_bits_equal("indices", twice[0], between)
    kit.assert_bits_equal("indices", twice[1, 2], select(logits[1, 2], ends[1, 2]))
    assert torch.func.vmap(torch.func.vmap(select))(logits[:, :0], ends[:, :0]).shape == (2, 0, 4, 2)


def test_vmap_refuses_to_update_what_calls_share(device: str) -> None:
    op = registry()["write_indexer_cache"]
    call, batch, names = mapped(op, device, 2)
    place = names.index("cache")
    before = batch[place].clone()
    for cache, axis, message in (
        (batch[place][0], None, "cache is updated without a batch axis under vmap, supported: with one"),
        (batch[place][0].expand(2, -1, -1, -1), 0, "cache has elements that share memory under vmap, supported: none"),
    ):
        arguments = [*batch[:place], cache, *batch[place + 1 :]]
        in_dims = tuple(axis if array is cache else 0 for array in arguments)
        with pytest.raises(UnsupportedError, match=f"^write_indexer_cache: {message}$"):
            torch.func.vmap(call, in_dims=in_dims)(*arguments)
    assert torch.equal(batch[place], before)


@by_name
def test_results_do_not_alias_arguments(op: Op, device: str) -> None:
    arguments, attrs = call_arguments(op, device)
    before = [None if a is None else a.clone() for a in arguments]
    results = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **attrs))
    storages = {a.untyped_storage().data_ptr() for a in arguments if a is not None}
    assert not storages & {r.untyped_storage().data_ptr() for r in results}
    for name, old, new in zip(op.tensors, before, arguments, strict=True):
        if old is not None and name not in op.mutates:
            kit.assert_bits_equal(name, new, old)


@pytest.mark.parametrize("op", public_ops().values(), ids=kit.case_id)
def test_signature_and_documentation_are_the_declaration(op: Op) -> None:
    function = getattr(torch_api, op.name)
    assert function.__doc__ == document(op, TORCH) and "Args:" in function.__doc__ and "Raises:" in function.__doc__
    assert function.__name__ == op.name


def test_every_public_op_has_its_line_in_both_front_ends() -> None:
    assert set(torch_api.__all__) == set(jax_api.__all__) == set(public_ops())


TRACERS = {
    "fx": lambda step, example: torch.fx.symbolic_trace(step),
    "script": lambda step, example: torch.jit.script(step),
    "trace": lambda step, example: torch.jit.trace(step, example, check_trace=False),  # some results are not written
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("op", public_ops().values(), ids=kit.case_id)
def test_older_tracers(op: Op, tracer: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.fx notes a call of the op, torch.jit.trace also after calls like it; torch.jit.script finds the op."""
    arguments, attrs = call_arguments(op, device)
    names = [name for name, tensor in zip(op.tensors, arguments, strict=True) if tensor is not None]
    given = ", ".join([*(f"{name}={name}" for name in names), *(f"{name}={value!r}" for name, value in attrs.items())])
    lines = [f"    {'return ' * bool(op.outputs)}{op.name}({given})", *(f"    return {name}" for name in op.mutates)]
    head = f"from xmla.torch_api import {op.name}\n\n\ndef step({', '.join(names)}):"
    (tmp_path / f"step_of_{op.name}_{tracer}.py").write_text("\n".join([head, *lines[: 1 + (not op.outputs)]]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    step = import_module(f"step_of_{op.name}_{tracer}").step

    def present() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in call_arguments(op, device)[0] if tensor is not None]

    want = present()
    results = [step(*want), step(*present())]
    traced = TRACERS[tracer](step, tuple(map(torch.zeros_like, want)))
    found = present()
    results.append(traced(*found))
    where = defined(op, arguments, attrs)
    for each in results[1:]:
        for x, y in zip(kit.as_tuple(results[0]), kit.as_tuple(each), strict=True):
            kit.assert_bits_equal(op.name, x, y, where)
    for name, x, y in zip(names, want, found, strict=True):
        kit.assert_bits_equal(name, x, y)


@pytest.mark.gpu
@by_name
def test_cuda_graph_replays_with_new_values(op: Op) -> None:
    """Captured once, replayed with other contents of the same shapes: the bits of an eager call."""
    case = op.cases[min(1, len(op.cases) - 1)]
    first, second = (kit.torch_inputs(op, kit.make(case, seed), "cuda") for seed in (0, 1))
    function = getattr(TORCH_OPS, op.name)
    function(*[None if a is None else a.clone() for a in first], **case.attrs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads
        captured = kit.as_tuple(function(*first, **case.attrs))
    for a, b in zip(first, second, strict=True):
        if a is not None:
            a.copy_(b)
    graph.replay()
    got = (*captured, *(first[place] for place in op.mutated))
    want = (*kit.as_tuple(function(*second, **case.attrs)), *(second[place] for place in op.mutated))
    for name, a, b in zip([*op.outputs, *op.mutates], got, want, strict=True):
        where = None
        if op.partial:
            inputs = kit.make(case, 1)
            where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
        kit.assert_bits_equal(name, a, b, where)


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    op = registry()["select_topk"]
    logits, ends = torch.randn(64, 65536, device="cuda"), torch.full((64,), 65536, device="cuda", dtype=torch.int32)
    want = torch_api.select_topk(logits, ends, k=2048)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        shifted = logits.roll(1, 0)
        got = torch_api.select_topk(shifted, ends, k=2048)
    stream.synchronize()
    kit.assert_bits_equal(op.name, got, want.roll(1, 0))
