"""What tensors are beside their shape: lazily negated, without memory, sparse, nested, shared with another."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from xmla import ArgumentError, UnsupportedError, jax_api, torch_api
from xmla.core.op import Op, memory
from xmla.core.registry import registry
from xmla.core.values import Spec
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
PROGRAMS = Path(__file__).parent / "programs"
EVERY = pytest.mark.parametrize("op", OPS.values(), ids=kit.case_id)
BOTH = pytest.mark.parametrize("implementation", [None, "reference"])


def call(op: Op, arguments: list[Any], implementation: str | None = None, **options: Any) -> tuple[Any, ...]:
    function = getattr(TORCH_OPS, op.name)
    return kit.as_tuple(function(*arguments, **op.cases[0].attrs, implementation=implementation, **options))


def arguments_of(op: Op, device: str) -> list[torch.Tensor | None]:
    return kit.torch_inputs(op, kit.copies(kit.make(op.cases[0])), device)


def with_each(op: Op, arguments: list[Any]) -> list[tuple[int, str]]:
    return [(place, name) for place, name in enumerate(op.tensors) if arguments[place] is not None]


def assert_same(op: Op, found: Any, wanted: Any) -> None:
    """Assert equal bits, where the op writes."""
    with np.errstate(all="ignore"):
        values = op.reference(**kit.copies(kit.make(op.cases[0])), **kit.attributes(op, op.cases[0]))
    for (name, result), got, want, value in zip(op.outputs.items(), found, wanted, values, strict=True):
        kit.assert_bits_equal(name, got, want, result.written(np.asarray(value)))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of equal values that is the negative of memory, as `x.conj().imag` is."""
    lazy = torch._neg_view(-tensor)
    assert lazy.is_neg() and torch.equal(lazy.isnan(), tensor.isnan())
    return lazy


@EVERY
def test_negated_views(op: Op, device: str) -> None:
    """Torch keeps a sign outside of memory: values count, on the paths of a first and of a later call; none is written.

    Of integers too, whose negatives wrap.
    """
    arguments = arguments_of(op, device)
    want = [tensor.clone() for tensor in call(op, arguments)]
    for place, name in with_each(op, arguments):
        tensor = arguments[place]
        if tensor.dtype.itemsize == 1 or tensor.stride() != torch.empty_like(tensor).stride():
            continue
        for _ in range(2):
            lazy = [negated(other) if i == place else other for i, other in enumerate(arguments_of(op, device))]
            if name not in op.mutates:
                assert_same(op, call(op, lazy), want)
                continue
            with pytest.raises(ArgumentError) as refused:
                call(op, lazy)
            assert str(refused.value) == (f"{op.name}: {name} is a negated view, expected memory that holds its values")
    if not op.outputs:
        return
    out = [torch.empty_like(tensor) for tensor in want]
    lazy_out = tuple(torch._neg_view(tensor) for tensor in out if tensor.dtype != torch.float8_e4m3fn)
    if len(lazy_out) == len(out):
        with pytest.raises(ArgumentError, match=f"{op.name}: out {next(iter(op.outputs))} is a negated view"):
            call(op, arguments, out=lazy_out)
    space = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    call(op, arguments, out=tuple(out), workspace=space)
    with pytest.raises(ArgumentError, match=f"{op.name}: workspace is a negated view"):
        call(op, arguments, out=tuple(out), workspace=torch._neg_view(space))


def test_a_view_of_a_conjugate(device: str) -> None:
    weights = torch.complex(torch.zeros(3, 1), torch.arange(3.0)[:, None]).to(device).conj().imag
    q = torch.ones(3, 1, 64, device=device)
    assert weights.is_neg()
    for _ in range(2):
        _, folded = torch_api.quantize_indexer_query(q, weights, scale=1.0)
        assert torch.equal(folded, torch_api.quantize_indexer_query(q, weights.resolve_neg(), scale=1.0)[1])


class Sub(torch.Tensor):
    pass


# Tensors of one's shape and dtype that no kernel can read, and what they are said to be.
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "layout is sparse_coo, expected strided": lambda x: x.to_sparse(),
    "layout is _mkldnn, expected strided": lambda x: (x if x.dtype == torch.float32 else x.float()).cpu().to_mkldnn(),
    "layout is nested, expected strided": lambda x: torch.nested.nested_tensor([x.reshape(-1)], layout=torch.jagged),
    "device is meta, supported: cpu and cuda": lambda x: x.to("meta"),
    "is list, expected torch.Tensor": lambda x: [x],
    "is ndarray, expected torch.Tensor": lambda x: x.cpu().numpy(),
}
FLOATS = (torch.float32, torch.int32)


@BOTH
@pytest.mark.parametrize("kind", OTHERS)
@EVERY
def test_other_kinds_are_refused(op: Op, kind: str, implementation: str | None, device: str) -> None:
    """By name, also after a call of the same shapes."""
    arguments = arguments_of(op, device)
    call(op, arguments)
    for place, name in with_each(op, arguments):
        if arguments[place].dtype not in FLOATS:
            continue
        other = [OTHERS[kind](x) if i == place else x for i, x in enumerate(arguments)]
        with pytest.raises((ArgumentError, UnsupportedError)) as refused:
            call(op, other, implementation)
        assert str(refused.value) == f"{op.name}: {name} {kind}"


@EVERY
def test_a_subclass_is_a_tensor(op: Op, device: str) -> None:
    arguments = arguments_of(op, device)
    want = [tensor.clone() for tensor in call(op, arguments)]
    found = call(op, [None if x is None else x.as_subclass(Sub) for x in arguments_of(op, device)])
    assert_same(op, [tensor.as_subclass(torch.Tensor) for tensor in found], want)


def test_a_tensor_of_all_ranks(device: str) -> None:
    """By name, as argument, result and workspace, also where it requires grad: ops know this rank's memory alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        everywhere = lambda x: DTensor.from_local(x.cpu(), mesh)
        logits, ends = torch.zeros(2, 8, device=device), torch.full((2,), 8, device=device).int()
        out, space = torch.empty(2, 2, dtype=torch.int32), torch.empty(1 << 16, dtype=torch.uint8)
        for name, call in {
            "logits": lambda: torch_api.select_topk(everywhere(logits).requires_grad_(), ends, k=2),
            "ends": lambda: torch_api.select_topk(logits, everywhere(ends), k=2),
            "out indices": lambda: torch_api.select_topk(logits, ends, k=2, out=everywhere(out)),
            "workspace": lambda: torch_api.select_topk(
                logits, ends, k=2, out=out.to(device), workspace=everywhere(space)
            ),
        }.items():
            with pytest.raises(ArgumentError) as refused:
                call()
            assert str(refused.value) == f"select_topk: {name} is DTensor, expected this rank's part (to_local())"
    finally:
        dist.destroy_process_group()


@EVERY
def test_memory_that_is_not_there(op: Op, device: str) -> None:
    """A storage that was freed, as trainers free those of gathered parameters: refused at a first and a later call.

    So are a zero tensor, and what `torch.vmap` has passed, once it has ended.
    """
    arguments = arguments_of(op, device)
    found = [tensor.clone() for tensor in call(op, arguments)]
    space = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    if op.outputs:
        call(op, arguments_of(op, device), out=tuple(map(torch.clone, found)), workspace=space)
    kinds: list[Callable[[torch.Tensor], torch.Tensor]] = [freed, escaped]
    for kind, implementation in [(kind, i) for kind in kinds for i in (None, "reference")]:
        for place, name in with_each(op, arguments):
            given = arguments_of(op, device)
            if not given[place].numel():
                continue
            given[place] = kind(given[place])
            with pytest.raises(ArgumentError, match=f"^{op.name}: {name} has no memory, expected memory"):
                call(op, given, implementation)
        for place, name in enumerate(op.outputs):
            out = [x.clone() for x in found]
            if out[place].numel():
                out[place] = kind(out[place])
                with pytest.raises(ArgumentError, match=f"^{op.name}: out {name} has no memory, expected memory"):
                    call(op, arguments_of(op, device), implementation, out=tuple(out))
        if op.outputs and implementation is None:
            with pytest.raises(ArgumentError, match=f"^{op.name}: workspace has no memory, expected memory"):
                call(op, arguments_of(op, device), out=tuple(map(torch.clone, found)), workspace=kind(space))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    other.untyped_storage().resize_(0)
    return other


def escaped(tensor: torch.Tensor) -> torch.Tensor:
    """What a function that `torch.vmap` maps is given, after it."""
    passed = []
    torch.vmap(lambda x: (passed.append(x), x)[1])(tensor[None])
    return passed[0]


def test_no_tensor_ends_the_process(device: str) -> None:
    """Kinds at which torch's own functions end it, in each argument after a good call of each op: refused by name."""
    run = subprocess.run(
        [sys.executable, PROGRAMS / "nested_arguments.py", device], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
    refusals = run.stdout.splitlines()
    assert {line.split(":")[0] for line in refusals} == set(OPS)
    assert not [line for line in refusals if not line.endswith(" layout is nested, expected strided")]


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_parameter_without_a_shape(kind: str, device: str) -> None:
    lazy = torch.nn.UninitializedParameter() if kind == "parameter" else torch.nn.UninitializedBuffer()
    ends = torch.full((2,), 8, device=device).int()
    with pytest.raises(ArgumentError, match=f"select_topk: logits is Uninitialized{kind.title()}, expected a tensor"):
        torch_api.select_topk(lazy, ends, k=2)
    out = torch_api.select_topk(torch.zeros(2, 8, device=device), ends, k=2)
    with pytest.raises(ArgumentError, match=f"select_topk: out indices is Uninitialized{kind.title()}, expected"):
        torch_api.select_topk(torch.zeros(2, 8, device=device), ends, k=2, out=lazy)
    assert out.tolist() == [[0, 1]] * 2


def test_a_result_that_is_no_tensor(device: str) -> None:
    arguments = arguments_of(OPS["sparse_mla"], device)
    with pytest.raises(ArgumentError, match=r"sparse_mla: out lse is NoneType, expected torch\.Tensor"):
        call(OPS["sparse_mla"], arguments, out=(torch.empty_like(call(OPS["sparse_mla"], arguments)[0]), None))


def test_a_zero_tensor_has_no_memory(device: str) -> None:
    logits, ends = torch._efficientzerotensor((2, 8), device=device), torch.full((2,), 8, device=device).int()
    with pytest.raises(ArgumentError, match=r"select_topk: logits has no memory, expected memory \(clone\(\)"):
        torch_api.select_topk(logits, ends, k=2)
    assert torch_api.select_topk(logits.clone(), ends, k=2).tolist() == [[0, 1]] * 2


@EVERY
def test_what_is_written_lies_apart(op: Op, device: str) -> None:
    """Each result and workspace in each argument's memory, and each updated argument in what is read: refused."""
    arguments = arguments_of(op, device)
    found = call(op, arguments)
    before = [x if x is None else x.clone() for x in arguments]
    for (place, name), kind in ((pair, kind) for pair in with_each(op, arguments) for kind in ("out", "workspace")):
        tensor = arguments[place]
        size = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or not op.outputs or not size:
            continue
        room = torch.zeros(size + 4096 + (1 << 22), dtype=torch.uint8, device=device)
        held = room[:size].view(tensor.dtype).view(tensor.shape)
        held.view(torch.uint8).copy_(tensor.view(torch.uint8))
        given = [held if i == place else x for i, x in enumerate(arguments)]
        out = [torch.empty_like(x) for x in found]
        options: dict[str, Any] = {}
        if kind == "out":
            need = out[0].numel() * out[0].element_size()
            start = max(size // 16 * 16 - 16, 0)
            out[0] = room[start : start + need].view(out[0].dtype).view(out[0].shape)
            message = (
                f"{op.name}: out {next(iter(op.outputs))} memory is shared with {name}, expected memory of its own"
            )
        else:
            if not getattr(TORCH_OPS, op.name).plan(*arguments, **op.cases[0].attrs).workspace_bytes:
                continue
            options["workspace"] = room
            message = f"{op.name}: workspace memory is shared with {name}, expected memory of its own"
        for implementation in (None, "reference") if kind == "out" else (None,):
            with pytest.raises(ArgumentError) as refused:
                call(op, given, implementation, out=tuple(out), **options)
            assert str(refused.value) == message
    for x, y in zip(arguments, before, strict=True):
        assert x is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@BOTH
def test_a_pool_is_not_moved_within_itself(implementation: str | None, device: str) -> None:
    slots = torch.arange(11, dtype=torch.int32, device=device)
    for op, pool in (
        (torch_api.convert_mla_cache, torch.zeros(3, 4, 576, device=device, dtype=torch.bfloat16)),
        (TORCH_OPS.convert_indexer_cache, torch.zeros(3, 4, 132, device=device, dtype=torch.uint8)),
    ):
        before = pool.clone()
        for cache in (pool, pool[1:], pool[:, 1:]):
            with pytest.raises(ArgumentError, match="cache memory is shared with source, expected memory of its own"):
                op(pool, slots, slots + 1, cache, implementation=implementation)
        assert torch.equal(pool, before)
        layers = torch.zeros(3, 2, *pool.shape[1:], device=device, dtype=pool.dtype)
        op(layers[:, 0], slots, slots, layers[:, 1], implementation=implementation)  # pages beside each other


@BOTH
def test_lists_that_are_updated_lie_apart(implementation: str | None, device: str) -> None:
    """The two of a request; side by side in the rows of one tensor they do."""
    indices = torch.tensor([[4, 2], [1, 6]], dtype=torch.int32, device=device)
    held, slots = ([[-1, 2, 3], [6, 5, -1]], [[10, 11, 12], [13, 14, 15]])
    both = torch.tensor([held, slots], dtype=torch.int32, device=device).transpose(0, 1).reshape(2, 6)
    before = both.clone()
    op = partial(torch_api.resolve_slots, num_entries=8, implementation=implementation)
    for first, second in ((both[:, :3], both[:, :3]), (both[:, :4], both[:, 2:])):
        with pytest.raises(ArgumentError, match="resolve_slots: held memory is shared with slots, expected"):
            op(indices, first, second)
    assert torch.equal(both, before)
    selected, *_ = op(indices, both[:, :3], both[:, 3:])
    assert selected.tolist() == [[10, 11], [14, 13]]


def test_a_ref_that_is_updated_stands_once(device: str) -> None:
    indices, held = jnp.array([[4, 2]], jnp.int32), jax.new_ref(jnp.array([[-1, 2, 3]], jnp.int32))
    pool = jax.new_ref(jnp.zeros((2, 4, 576), jnp.bfloat16))
    slots = jnp.arange(3, dtype=jnp.int32)
    for jitted in (lambda f: f, jax.jit):
        with pytest.raises(ArgumentError, match="resolve_slots: held memory is shared with slots, expected"):
            jitted(lambda i: jax_api.resolve_slots(i, held, held, num_entries=8))(indices)
        with pytest.raises(ArgumentError, match="convert_mla_cache: cache memory is shared with source"):
            jitted(lambda s: jax_api.convert_mla_cache(pool, s, s + 3, pool))(slots)
    assert held[...].tolist() == [[-1, 2, 3]]


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.mutates], ids=kit.case_id)
def test_pages_that_are_written_lie_apart(op: Op, device: str) -> None:
    for name in op.mutates:
        arguments = arguments_of(op, device)
        place = list(op.tensors).index(name)
        pool = arguments[place]
        page, pages = prod(pool.shape[1:]), "pages" if pool.dim() > 2 else "rows"
        for stride in (0, page - pool.shape[-1] if pool.dim() > 2 else page - 1):
            for other in op.mutated:  # pools behind one table have as many pages
                if op.tensors[name].names[0] == op.tensors[list(op.tensors)[other]].names[0]:
                    arguments[other] = arguments[other][:2]
            arguments[place] = pool.as_strided((2, *pool.shape[1:]), (stride, *pool.stride()[1:]))
            for implementation in (None, "reference"):
                with pytest.raises(ArgumentError) as refused:
                    call(op, arguments, implementation)
                expected = f"at least {page}: {pages} that are written lie apart"
                label = op.tensors[name].names[0]
                assert str(refused.value) == (
                    f"{op.name}: {name} stride of axis {label} (axis 0) is {stride}, expected {expected}"
                )


def test_spans_and_pages_tell_what_numpy_does() -> None:
    """What runs before launches sees no array apart that shares a byte, and sees pages between pages apart."""
    rng = np.random.default_rng(0)
    op = OPS["convert_mla_cache"]
    seen = 0
    for _ in range(2000):
        specs = {}
        for name in ("source", "cache"):
            shape = tuple(int(n) for n in rng.integers(1, 4, 3))
            inner = shape[1] * shape[2]
            specs[name] = Spec(shape, "uint8", (max(int(rng.choice([12, inner, 2 * inner])), inner), shape[2], 1))
        addresses = [int(x) for x in rng.integers(1 << 20, (1 << 20) + 60, 2)]
        pairs, numbers = memory.distances(op, specs)
        apart = memory.disjoint_check(pairs, len(addresses))(numbers, *addresses)
        shared = specs["source"].overlaps(addresses[0], specs["cache"], addresses[1])
        assert not (apart and shared)
        seen += apart and not shared
    assert seen > 500
