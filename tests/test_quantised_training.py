"""Attention over packed entries, differentiated as if these were the rows beside them (straight-through estimator)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from xmla import ArgumentError, UnsupportedError, interop, jax_api, torch_api
from xmla.core.formats.mla import MLA_LAYOUTS, V4, V32, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.attention.sparse_mla.backward.cases import backward_of
from xmla.core.ops.attention.sparse_mla.cases import F16, make_case
from xmla.core.registry import registry
from xmla.core.values import H200
from xmla.torch_api._all_ops import TORCH_OPS

BACKWARD = registry()["sparse_mla_backward"]
PACKED = [layout for layout in MLA_LAYOUTS if layout.packed]
SCALE = 0.0721688
Tensors = dict[str, Any]


def dequantised(cache: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The entries that a cache stands for, as plain rows."""
    pages, entries, _ = cache.shape
    slots = torch.arange(pages * entries, device=cache.device)
    rows = torch_api.read_mla_cache(cache, slots, cache_format=name, dtype="float32")
    return rows.to(dtype).unflatten(0, (pages, entries))


def written(layout: MlaLayout, rows: torch.Tensor) -> torch.Tensor:
    """A cache in which rows [P, R, L+E] stand."""
    pages, entries, _ = rows.shape
    cache = torch.zeros(pages, entries, layout.row, dtype=torch.uint8, device=rows.device)
    latent, rope = rows.flatten(0, 1).bfloat16().split([layout.latent, layout.rope], dim=1)
    slots = torch.arange(pages * entries, device=rows.device)
    torch_api.write_mla_cache(latent.contiguous(), rope.contiguous(), slots, cache, cache_format=layout.name)
    return cache


@pytest.mark.parametrize("layout", PACKED, ids=lambda layout: layout.name)
def test_finite_differences(layout: MlaLayout, device: str) -> None:
    """Of attention over the dequantised rows, which is smooth, in float64: of queries, rows and sink."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(device) / 4
    rows, slots = draw(2, 3, layout.dims), torch.tensor([[0, 4, -1], [1, 1, 5]], dtype=torch.int32, device=device)
    cache = written(layout, rows)
    leaves = {"q": draw(2, 2, layout.dims), "rows": rows, "sink": draw(2).float()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    call = partial(torch_api.sparse_mla, slots=slots, softmax_scale=0.5, implementation="reference")
    weights = draw(2, 2, 512)

    def loss(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (results[0] * weights).sum()  # an lse is float32

    loss(call(cache=cache, cache_format=layout.name, **leaves)).backward()
    point = {name: leaf.detach() for name, leaf in leaves.items()}
    point["rows"] = dequantised(cache, layout.name, rows.dtype)
    for name, leaf in leaves.items():
        direction = (4 * draw(*leaf.shape)).to(leaf.dtype)
        step = 2.0**-14 if name != "sink" else 2.0**-6  # of float32
        at = [point | {name: point[name] + sign * step * direction} for sign in (1, -1)]
        ends = [loss(call(given["q"], cache=given["rows"], sink=given["sink"])) for given in at]
        slope = float(ends[0] - ends[1]) / (2 * step)
        assert leaf.grad is not None and abs(slope) > 1e-3
        assert float((leaf.grad * direction).sum()) == pytest.approx(slope, rel=1e-6 if name != "sink" else 1e-4), name


def of_formats() -> list[Case]:
    """A derivative over each format, and over two caches of one, in both orders of sums and both dtypes of queries."""
    calls = [
        make_case(3, 3, 30, 7, layout, F16 if index % 2 else np.dtype("bfloat16"), with_lengths=True, with_sink=True,
                  rows=True, cache_format=layout.name, deterministic=index % 3 > 0)
        for index, layout in enumerate(PACKED)
    ]  # fmt: skip
    calls.append(make_case(3, 5, 30, 7, V4, with_lengths=True, extra=(V4, 20, 4), rows=True))
    return [backward_of(call, with_dlse=True) for call in calls]


@pytest.mark.parametrize("case", of_formats(), ids=kit.case_id)
def test_the_bits_are_those_over_dequantised_rows(case: Case, device: str) -> None:
    given = dict(zip(BACKWARD.tensors, kit.torch_inputs(BACKWARD, kit.make(case), device), strict=True))
    attrs = dict(case.attrs)
    found = dict(zip(BACKWARD.outputs, TORCH_OPS.sparse_mla_backward(**given, **attrs), strict=True))
    plain = dict(given)
    for source in ("", "extra_"):
        if plain[f"{source}cache"] is not None:
            name = attrs.pop(f"{source}cache_format", None)
            plain[f"{source}cache"] = dequantised(given[f"{source}cache"], name, given["q"].dtype)
            plain[f"{source}rows"] = None
    wanted = dict(zip(BACKWARD.outputs, TORCH_OPS.sparse_mla_backward(**plain, **attrs), strict=True))
    assert not found["dcache"].numel() and not found["dextra_cache"].numel()
    for name in ("dq", "dsink"):
        kit.assert_bits_equal(name, found[name], wanted[name])
    for source in ("", "extra_"):
        got, want = found[f"d{source}rows"], wanted[f"d{source}cache"]
        assert bool(got.any()) == (given[f"{source}cache"] is not None)
        if case.attrs.get("deterministic", True) or device == "cpu":  # the interpreter adds in one order
            kit.assert_bits_equal(f"d{source}rows", got, want)


def without(given: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in given.items() if name not in names}


LEAVES = ("q", "sink", "rows", "extra_rows")


@pytest.fixture
def arguments(device: str) -> Tensors:
    """A call over two packed caches, whose rows are what they were written from."""
    torch.manual_seed(3)
    rows, extra_rows = torch.randn(3, 8, 512), torch.randn(5, 2, 512)
    given = {"q": torch.randn(4, 6, 512), "rows": rows, "extra_rows": extra_rows}
    given = {name: tensor.to(device, torch.bfloat16) for name, tensor in given.items()}
    given |= {"cache": written(V4, given["rows"]), "extra_cache": written(V4, given["extra_rows"])}
    given["slots"] = torch.randint(-1, 26, (4, 9), dtype=torch.int32, device=device)
    given["extra_slots"] = torch.randint(-1, 10, (4, 5), dtype=torch.int32, device=device)
    return given | {"sink": torch.randn(6, device=device)}


def loss_of(given: Tensors, *leaves: Any, attend: Callable[..., Any] = torch_api.sparse_mla) -> Any:
    out, lse = attend(**given | dict(zip(LEAVES, leaves, strict=True)), softmax_scale=SCALE)
    wide = out.float() if isinstance(out, torch.Tensor) else out.astype(jnp.float32)
    return (wide * wide).sum() + (lse[:2] * 0.5).sum()


def by_backward(function: Callable[..., Any], given: Tensors) -> list[torch.Tensor]:
    leaves = [given[name].detach().clone().requires_grad_() for name in LEAVES]
    function(given, *leaves).backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture
def wanted(arguments: Tensors) -> list[torch.Tensor]:
    """The gradients of a call over plain rows, of which the stored bits are the values."""
    plain = {name: dequantised(arguments[name], "v4", torch.bfloat16) for name in ("cache", "extra_cache")}
    out, lse = torch_api.sparse_mla(**arguments, softmax_scale=SCALE)
    dlse = torch.zeros_like(lse)
    dlse[:2] = 0.5
    dq, dcache, dsink, dextra_cache, *_ = TORCH_OPS.sparse_mla_backward(
        **without(arguments, "rows", "extra_rows") | plain, forward_out=out, forward_lse=lse,
        dout=(2 * out.float()).bfloat16(), dlse=dlse, softmax_scale=SCALE,
    )  # fmt: skip
    return [dq, dsink, dcache, dextra_cache]


def assert_same(found: Any, wanted: list[torch.Tensor]) -> None:
    for name, got, want in zip(LEAVES, found, wanted, strict=True):
        got = got if isinstance(got, torch.Tensor) else interop.to_torch(got)
        assert bool(want.any())
        kit.assert_bits_equal(name, got.cpu(), want.cpu())


def compiled(given: Tensors, *leaves: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(partial(loss_of, given), fullgraph=True, backend="aot_eager")(*leaves)


def checkpointed(given: Tensors, *leaves: torch.Tensor) -> Any:
    return checkpoint(partial(loss_of, given), *leaves, use_reentrant=False)


@pytest.mark.parametrize("way", [loss_of, compiled, checkpointed])
def test_torch(way: Callable[..., Any], arguments: Tensors, wanted: list[torch.Tensor]) -> None:
    assert_same(by_backward(way, arguments), wanted)


def in_jax(given: Tensors) -> Tensors:
    return {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}


jax_loss = partial(loss_of, attend=jax_api.sparse_mla)
EVERY = tuple(range(len(LEAVES)))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_jax_has_torchs_bits(way: Callable[..., Any], arguments: Tensors, wanted: list[torch.Tensor]) -> None:
    given = in_jax(arguments)
    assert_same(jax.grad(way(partial(jax_loss, given)), EVERY)(*[given[name] for name in LEAVES]), wanted)


@pytest.mark.parametrize("layout", PACKED, ids=lambda layout: layout.name)
def test_jax_has_torchs_bits_of_every_format(layout: MlaLayout, device: str) -> None:
    torch.manual_seed(4)
    rows = torch.randn(2, 8, layout.dims).to(device, torch.bfloat16)
    given = {"q": torch.randn(4, 3, layout.dims).to(device, torch.bfloat16), "cache": written(layout, rows)}
    given |= {"slots": torch.randint(-1, 16, (4, 9), dtype=torch.int32, device=device), "rows": rows}
    attrs: Any = {"softmax_scale": SCALE, "cache_format": layout.name}
    leaves = {name: given[name].clone().requires_grad_() for name in ("q", "rows")}
    (torch_api.sparse_mla(**given | leaves, **attrs)[0].float() ** 2).sum().backward()
    arrays = in_jax(given)

    def loss(q: jax.Array, rows: jax.Array) -> jax.Array:
        out, _ = jax_api.sparse_mla(**arrays | {"q": q, "rows": rows}, **attrs)
        return (out.astype(jnp.float32) ** 2).sum()

    found = jax.jit(jax.grad(loss, (0, 1)))(arrays["q"], arrays["rows"])
    for (name, leaf), got in zip(leaves.items(), found, strict=True):
        assert leaf.grad is not None and bool(leaf.grad.any())
        kit.assert_bits_equal(name, interop.to_torch(got).cpu(), leaf.grad.cpu())


def test_vmap_over_sequences(arguments: Tensors) -> None:
    """Each with its own cache and rows."""
    given = in_jax(arguments)
    names = ("q", "cache", "slots", "rows")
    many = {name: jnp.stack([given[name], given[name][::-1]]) for name in names}

    def one(q: jax.Array, cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
        out, _ = jax_api.sparse_mla(q, cache, slots, rows=rows, softmax_scale=SCALE)
        return (out.astype(jnp.float32) ** 2).sum()

    gradient = jax.grad(one, (0, 3))
    found = jax.vmap(gradient)(*many.values())
    for element in range(2):
        for got, want in zip(found, gradient(*[each[element] for each in many.values()]), strict=True):
            assert bool(jnp.array_equal(got[element], want)) and bool(want.any())


def test_results_are_those_of_the_stored_bits(arguments: Tensors) -> None:
    """The plan is that of a call without rows, whatever they hold."""
    inference = arguments | {"rows": None, "extra_rows": None}
    call = partial(torch_api.sparse_mla, softmax_scale=SCALE)
    rows = {name: torch.full_like(arguments[name], torch.nan) for name in ("rows", "extra_rows")}
    for got, want in zip(call(**arguments | rows), call(**inference), strict=True):
        kit.assert_bits_equal("result", got, want)
    plan = partial(torch_api.sparse_mla.plan, softmax_scale=SCALE)
    assert plan(**arguments) == plan(**inference)


def test_constant_rows_leave_the_gradient_of_queries(arguments: Tensors, wanted: list[torch.Tensor]) -> None:
    q = arguments["q"].clone().requires_grad_()
    loss_of(arguments, q, *[arguments[name] for name in LEAVES[1:]]).backward()
    kit.assert_bits_equal("q", q.grad, wanted[0])


def test_hopper_takes_the_kernel_of_plain_rows() -> None:
    case = backward_of(make_case(3, 64, 40, 16, V32, rows=True))
    kernels = [launch.name for launch in kit.plan_of(BACKWARD, case, H200).launches]
    assert kernels[:3] == ["clear_kernel", "count_references_kernel", "unpack_references_kernel"]
    assert "sparse_mla_backward_sm90_kernel" in kernels


def refused(given: Tensors, *moving: str) -> list[Exception]:
    """What a call that is differentiated raises in each front-end."""
    errors = []
    for name in moving:
        leaf = given[name].detach().clone().requires_grad_()
        with pytest.raises((ArgumentError, UnsupportedError)) as caught:
            torch_api.sparse_mla(**given | {name: leaf}, softmax_scale=SCALE)
        errors.append(caught.value)
    arrays = in_jax(given)

    def loss(*leaves: jax.Array) -> jax.Array:
        call = arrays | dict(zip(moving, leaves, strict=True))
        return jax_api.sparse_mla(**call, softmax_scale=SCALE)[1].sum()

    with pytest.raises((ArgumentError, UnsupportedError)) as caught:
        jax.grad(loss, tuple(range(len(moving))))(*[arrays[name] for name in moving])
    return [*errors, caught.value]


OVER, BESIDE = "derivatives over plain rows, 'plain' or 'plain_v4', or of", "beside the entries"
NONE = "argument is given, expected none"


def test_what_is_refused(arguments: Tensors) -> None:
    of_one = without(arguments, "extra_cache", "extra_slots", "extra_rows")
    rows, q = arguments["rows"], arguments["q"]
    cases = [
        (without(of_one, "rows"), f"cache format is 'v4', supported: {OVER} rows {BESIDE}"),
        (without(arguments, "extra_rows"), f"extra_cache format is 'v4', supported: {OVER} extra_rows {BESIDE}"),
        (of_one | {"rows": rows.half()}, "rows dtype is float16, expected bfloat16, as q"),
        (of_one | {"rows": rows[:1]}, "rows axis P (axis 0) is 1, expected 3, as cache"),
        (of_one | {"cache": rows}, f"rows {NONE} beside 'plain_v4' entries, which have a gradient"),
        (of_one | {"extra_rows": rows}, f"extra_rows {NONE} without extra_cache"),
    ]
    for given, message in cases:
        for error in refused(given, "q"):
            assert str(error) == f"sparse_mla: {message}"
    turned = {"cos_sin": torch.ones(1, 64, device=q.device), "positions": torch.zeros(4, device=q.device).int()}
    for error in refused(of_one | turned, "rows"):
        assert str(error).startswith("sparse_mla: rows is differentiated with cos_sin, supported: derivatives of q, ")


def test_entries_of_e4m3_are_no_rows(arguments: Tensors) -> None:
    """A float as far as frameworks see, so that they would differentiate it."""
    given = without(arguments, "extra_cache", "extra_slots", "extra_rows")
    given["cache"] = given["cache"].view(torch.float8_e4m3fn)
    torch_error, jax_error = refused(given, "cache")
    message = "sparse_mla: cache is differentiated, supported: derivatives of q, sink, rows in this call; "
    assert str(torch_error) == f"{message}cache.detach() or torch.no_grad() makes it a constant"
    assert str(jax_error) == f"{message}jax.lax.stop_gradient(cache) makes it a constant"
