"""Derivatives: against float64, in every way that PyTorch and JAX ask for one, the same bits in both."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from torch.utils.checkpoint import checkpoint

from xmla import UnsupportedError, interop, jax_api, torch_api
from xmla.core.formats.mla import PLAIN, VALUE_DIMS, mla_layouts
from xmla.core.op import Case, Op
from xmla.core.ops.attention.sparse_mla.backward.cases import backward_of, duplicates, with_large_gradients
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.registry import registry
from xmla.core.values import GRADIENT, Spec, cosine_difference
from xmla.core.versions import older
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
ATTENTION, BACKWARD = OPS["sparse_mla"], OPS["sparse_mla_backward"]
TRAINED = [(BACKWARD, case) for case in kit.cases(BACKWARD)]
SCALE = 0.0721688


def call_of(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """The arguments of the call that a case differentiates, the gradients of its results, and its attributes."""
    given = kit.make(case)
    gradients = {name: array for name, array in given.items() if name in ("dout", "dlse")}
    return {name: array for name, array in given.items() if name in ATTENTION.tensors}, gradients, dict(case.attrs)


def dense(arguments: dict[str, torch.Tensor], attrs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 that torch differentiates by itself."""
    q, sink = arguments["q"], arguments.get("sink")
    outs, lses = [], []
    for token in range(len(q)):
        keys = []
        for source in ("", "extra_"):
            if f"{source}cache" in arguments:
                slots = arguments[f"{source}slots"][token]
                if f"{source}lengths" in arguments:
                    slots = slots[: max(int(arguments[f"{source}lengths"][token]), 0)]
                rows = arguments[f"{source}cache"].flatten(0, 1)
                keys.append(rows[slots[(slots >= 0) & (slots < len(rows))].long()])
        entries = torch.cat(keys)
        scores = attrs["softmax_scale"] * q[token] @ entries.T
        own = scores.logsumexp(1) if len(entries) else q.new_full((q.shape[1],), -torch.inf)
        total = own if sink is None else torch.logaddexp(own, sink)
        outs.append((scores - total[:, None]).exp() @ entries[:, :VALUE_DIMS])
        lses.append(total if attrs.get("lse_sink") else own)
    lse = torch.stack(lses)
    return torch.stack(outs), lse / np.log(2) if attrs.get("lse_base") == "2" else lse


@pytest.mark.parametrize(("op", "case"), TRAINED, ids=kit.case_id)
def test_the_reference_is_what_autodiff_finds(op: Op, case: Case) -> None:
    """In float64, of finite sinks: autodiff has NaN where an infinite one makes a weight 0."""
    arguments, gradients, attrs = call_of(case)
    given = {}
    for name, array in arguments.items():
        tensor = torch.from_numpy(array.astype(np.int64 if array.dtype.kind == "i" else np.float64))
        tensor = tensor.clamp(-50, 50) if name == "sink" else tensor
        given[name] = tensor.nan_to_num().requires_grad_(name in ATTENTION.gradients)
    stored = {name: array for name, array in arguments.items() if array.dtype == np.uint8}
    for name, array in stored.items():  # their gradients are those of the rows beside them
        (layout,) = mla_layouts(Spec.of_numpy(array), attrs.get(f"{name}_format"))
        rows = layout.gather(array, np.arange(array.shape[0] * array.shape[1])).astype(np.float64)
        given[name] = torch.from_numpy(rows.reshape(*array.shape[:2], -1)).nan_to_num().requires_grad_()
    out, lse = dense(given, attrs)
    known = torch.isfinite(lse.detach())
    upstream = {name: torch.from_numpy(array.astype(np.float64)) for name, array in gradients.items()}
    total = (out * upstream["dout"]).sum()
    if "dlse" in upstream:
        total = total + torch.where(known, lse * upstream["dlse"], 0.0).sum()
    total.backward()
    host = {name: tensor.detach().numpy() for name, tensor in given.items()} | stored
    host |= {"forward_out": out.detach().numpy(), "forward_lse": lse.detach().numpy()}
    host |= {name: tensor.numpy() for name, tensor in upstream.items()}
    found = dict(zip(op.outputs, op.reference(**host, **attrs), strict=True))
    for name, result in ATTENTION.gradients.items():
        if name in given and name not in stored:
            want = given[name.replace("rows", "cache")].grad
            assert want is not None
            np.testing.assert_allclose(found[result], want.nan_to_num().numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def test_gradcheck(device: str) -> None:
    """Finite differences of the reference, in float64 through torch's own check."""
    rng = np.random.default_rng(0)
    q, cache = (
        torch.tensor(rng.standard_normal(shape) / 8, requires_grad=True) for shape in ((2, 1, 512), (1, 3, 512))
    )
    slots = torch.tensor([[0, 2, -1], [1, 1, 2]], dtype=torch.int32)

    def attend(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        out, _ = torch_api.sparse_mla(q, cache, slots, softmax_scale=0.5, implementation="reference")
        return out[..., :8]

    assert torch.autograd.gradcheck(attend, (q, cache), fast_mode=True, atol=1e-6)


@pytest.fixture
def arguments(device: str) -> dict[str, torch.Tensor | None]:
    """A call of two sources and a sink, in which every entry is a number."""
    rng = np.random.default_rng(7)

    def of(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device, torch.bfloat16)

    given: dict[str, torch.Tensor | None] = dict.fromkeys(ATTENTION.tensors)
    given |= {"q": of(4, 6, 512), "cache": of(3, 8, 512), "extra_cache": of(5, 2, 512)}
    given["slots"] = torch.from_numpy(rng.integers(-1, 26, (4, 9)).astype(np.int32)).to(device)
    given["extra_slots"] = torch.from_numpy(rng.integers(-1, 10, (4, 5)).astype(np.int32)).to(device)
    given["lengths"] = torch.tensor([9, 4, 0, 20], dtype=torch.int32, device=device)
    given["sink"] = torch.from_numpy(rng.standard_normal(6).astype(np.float32)).to(device)
    return given


LEAVES = tuple(name for name in ATTENTION.gradients if "rows" not in name)  # those are test_quantised_training.py's


def loss_of(given: dict[str, Any], *leaves: Any, attend: Callable[..., Any] = torch_api.sparse_mla) -> Any:
    """A loss that depends on both results, and on a part of them alone."""
    out, lse = attend(*(given | dict(zip(LEAVES, leaves, strict=True))).values(), softmax_scale=SCALE)
    wide = out.float() if isinstance(out, torch.Tensor) else out.astype(jnp.float32)
    return (wide * wide).sum() + (lse[:2] * 0.5).sum()


def by_backward(function: Callable[..., Any], given: dict[str, Any]) -> list[torch.Tensor]:
    leaves = [given[name].detach().clone().requires_grad_() for name in LEAVES]
    function(given, *leaves).backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture
def wanted(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return by_backward(loss_of, arguments)


def assert_same(found: Any, wanted: list[torch.Tensor]) -> None:
    for name, got, want in zip(LEAVES, found, wanted, strict=True):
        got = got if isinstance(got, torch.Tensor) else interop.to_torch(got)
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want.cpu()), name


def compiled(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(partial(loss_of, given), fullgraph=True, backend="aot_eager")(*leaves)


def checkpointed(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    return checkpoint(partial(loss_of, given), *leaves, use_reentrant=False)


def under_autocast(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16):
        return loss_of(given, *leaves)


def by_inductor(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    if HAS_GPU:
        pytest.skip("kernels of inductor need the Triton that their torch was made with")
    torch._dynamo.reset()
    return torch.compile(partial(loss_of, given), fullgraph=True)(*leaves)


@pytest.mark.parametrize("way", [compiled, by_inductor, checkpointed, under_autocast])
def test_torch(way: Callable[..., Any], arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    assert all(bool(gradient.any()) for gradient in wanted)
    assert_same(by_backward(way, arguments), wanted)


def test_torch_func(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    leaves = [arguments[name] for name in LEAVES]
    assert_same(torch.func.grad(partial(loss_of, arguments), tuple(range(len(LEAVES))))(*leaves), wanted)


@pytest.mark.skipif(older("torch", "2.12.1") is not None, reason="an untested torch, which does not trace this")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at each
def test_compiled_autograd(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    """The backward pass as a graph of its own, and the bits of the pass that is not compiled."""
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
        assert_same(by_backward(loss_of, arguments), wanted)


def test_some_leaves_only(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    q = arguments["q"].clone().requires_grad_()
    loss_of(arguments, q, *[arguments[name] for name in LEAVES[1:]]).backward()
    assert torch.equal(q.grad, wanted[0])


def test_a_packed_cache_has_no_derivative(device: str) -> None:
    q = torch.zeros(1, 2, 576, device=device, dtype=torch.bfloat16, requires_grad=True)
    cache, slots = torch.zeros(1, 4, 656, device=device, dtype=torch.uint8), torch.zeros(1, 3, device=device).int()
    message = "sparse_mla: cache format is 'v32', supported: derivatives over plain rows, 'plain' or 'plain_v4', or "
    message += "of rows beside the entries"
    with pytest.raises(UnsupportedError) as caught:
        torch_api.sparse_mla(q, cache, slots, softmax_scale=1.0)
    assert str(caught.value) == message
    arrays = [kit.torch_to_jax(tensor.detach()) for tensor in (q, cache, slots)]
    with pytest.raises(UnsupportedError) as caught:
        jax.grad(lambda q: jax_api.sparse_mla(q, *arrays[1:], softmax_scale=1.0)[1].sum())(arrays[0])
    assert str(caught.value) == message


def test_a_rank_without_tokens_or_keys(device: str) -> None:
    """Its gradients, of any loss, are empty or 0: torch's own of a sum has strides of 0."""
    for tokens, keys, entries in ((0, 4, 9), (3, 0, 9), (3, 4, 0)):
        losses = (lambda out, _: out.sum(), lambda out, _: out.float().square().sum(), lambda _, lse: lse.sum())
        for loss in losses[: 3 if tokens == 0 else 2]:
            q = torch.ones(tokens, 2, 576, device=device, dtype=torch.bfloat16).requires_grad_()
            cache = torch.ones(entries, 1, 576, device=device, dtype=torch.bfloat16).requires_grad_()
            slots = torch.zeros(tokens, keys, device=device, dtype=torch.int32)
            loss(*torch_api.sparse_mla(q, cache, slots, softmax_scale=SCALE)).backward()
            for leaf in (q, cache):
                assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


def test_gradients_of_a_batch_of_calls(device: str) -> None:
    """`vmap` of `grad`, and `jacrev`, which is one: the bits of each call's own."""
    rng = np.random.default_rng(2)
    q, cache = (torch.from_numpy(rng.standard_normal(shape)).to(device, torch.bfloat16) for shape in
                ((2, 2, 576), (5, 1, 576)))  # fmt: skip
    slots = torch.from_numpy(rng.integers(0, 5, (2, 3)).astype(np.int32)).to(device)

    def lse(q: torch.Tensor) -> torch.Tensor:
        return torch_api.sparse_mla(q, cache, slots, softmax_scale=SCALE)[1][:, 0]

    gradient = torch.func.grad(lambda q: lse(q).sum())
    found = torch.func.vmap(gradient)(torch.stack([q, 2 * q]))
    assert torch.equal(found[0], gradient(q)) and torch.equal(found[1], gradient(2 * q)) and bool(found.any())
    rows = torch.func.jacrev(lse)(q)
    for token in range(2):
        assert torch.equal(rows[token], torch.func.grad(lambda q, token=token: lse(q)[token])(q))


def test_a_second_derivative_is_refused(arguments: dict[str, Any]) -> None:
    q = arguments["q"].clone().requires_grad_()
    loss = loss_of(arguments, q, *[arguments[name] for name in LEAVES[1:]])
    (first,) = torch.autograd.grad(loss, q, create_graph=True)
    message = "sparse_mla: a gradient is differentiated, supported: constants"
    with pytest.raises(UnsupportedError, match=message):
        first.sum().backward()
    of_sink = lambda sink: torch_api.sparse_mla(**(arguments | {"sink": sink}), softmax_scale=SCALE)[0].float().sum()
    gradient = lambda sink: torch.func.grad(of_sink)(sink).sum()
    for derive in (
        lambda sink: torch.func.grad(gradient)(sink),
        lambda sink: torch.func.jvp(gradient, (sink,), (sink,)),
        lambda sink: torch.func.hessian(of_sink)(sink),
    ):
        with pytest.raises(UnsupportedError, match=message):
            derive(arguments["sink"])
    given = in_jax(arguments)
    with pytest.raises(UnsupportedError, match=message):
        jax.grad(lambda q: jax.grad(jax_loss, 1)(given, q, *[given[n] for n in LEAVES[1:]]).sum())(given["q"])


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else kit.torch_to_jax(tensor) for name, tensor in given.items()}


jax_loss = partial(loss_of, attend=jax_api.sparse_mla)
EVERY = tuple(range(1, 1 + len(LEAVES)))


def grad(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    return jax.grad(function, EVERY)(given, *[given[name] for name in LEAVES])


def saved_by_name(given: dict[str, Any], *leaves: jax.Array) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("sparse_mla_out", "sparse_mla_lse")
    return jax.checkpoint(partial(jax_loss, given), policy=policy)(*leaves)


def jitted(given: dict[str, Any], *leaves: jax.Array) -> Any:
    return jax.jit(partial(jax_loss, given))(*leaves)


def rematerialised(given: dict[str, Any], *leaves: jax.Array) -> Any:
    return jax.checkpoint(partial(jax_loss, given))(*leaves)


@pytest.mark.parametrize("way", [jax_loss, jitted, rematerialised, saved_by_name])
def test_jax_has_torchs_bits(way: Callable[..., Any], arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    assert_same(grad(way, in_jax(arguments)), wanted)


def test_residuals_have_names(arguments: dict[str, Any]) -> None:
    """A policy that keeps them saves the second run of attention."""
    given = in_jax(arguments)
    calls = {}
    for way in (saved_by_name, rematerialised):
        text = str(jax.make_jaxpr(lambda q, way=way: grad(way, given | {"q": q}))(given["q"]))
        assert "sparse_mla_out" in text and "sparse_mla_lse" in text
        calls[way] = text.count("op=Op(sparse_mla)\n")
    assert calls == {saved_by_name: 1, rematerialised: 2}


def test_value_and_grad_and_vjp(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    given = in_jax(arguments)
    leaves = [given[name] for name in LEAVES]
    value, found = jax.jit(jax.value_and_grad(partial(jax_loss, given), tuple(range(len(LEAVES)))))(*leaves)
    assert_same(found, wanted)
    again, pull = jax.vjp(partial(jax_loss, given), *leaves)
    assert value == again
    assert_same(pull(jnp.ones_like(again)), wanted)


def test_donated_arrays_are_consumed(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    """A step that replaces what it trains; the gradients are those of the arrays that were."""
    given = in_jax(arguments)
    leaves = [given[name] + 0 for name in LEAVES]
    places = tuple(range(len(LEAVES)))

    def trained(*leaves: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(partial(jax_loss, given), places)(*leaves)
        return [leaf - gradient for leaf, gradient in zip(leaves, gradients, strict=True)]

    step = jax.jit(trained, donate_argnums=places)
    assert step.lower(*leaves).as_text().count("tf.aliasing_output") == len(LEAVES)
    found = step(*leaves)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert_same(found, [arguments[name] - gradient for name, gradient in zip(LEAVES, wanted, strict=True)])


def test_scan_over_layers(arguments: dict[str, Any]) -> None:
    """A scan's gradients are those of the layers one after another."""
    given = in_jax(arguments)
    pools = jnp.stack([given["cache"], given["cache"][::-1], given["cache"] * 2])

    def layer(q: jax.Array, cache: jax.Array) -> jax.Array:
        out, _ = jax_api.sparse_mla(q, cache, given["slots"], softmax_scale=SCALE)
        return q + out

    def scanned(q: jax.Array, pools: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, c: (jax.checkpoint(layer)(x, c), None), q, pools)[0].astype(jnp.float32).sum()

    def unrolled(q: jax.Array, pools: jax.Array) -> jax.Array:
        for cache in pools:
            q = layer(q, cache)
        return q.astype(jnp.float32).sum()

    found, want = (jax.jit(jax.grad(f, (0, 1)))(given["q"], pools) for f in (scanned, unrolled))
    for got, expected in zip(found, want, strict=True):
        assert bool(jnp.array_equal(got, expected)) and bool(expected.any())


def test_vmap_over_sequences(arguments: dict[str, Any]) -> None:
    """Each element has its own cache, or all share one, whose gradients stay apart."""
    given = in_jax(arguments)
    many = {name: jnp.stack([given[name], given[name][::-1]]) for name in ("q", "cache", "slots")}

    def one(q: jax.Array, cache: jax.Array, slots: jax.Array) -> jax.Array:
        out, _ = jax_api.sparse_mla(q, cache, slots, softmax_scale=SCALE)
        return (out.astype(jnp.float32) ** 2).sum()

    for axes in ((0, 0, 0), (0, None, 0)):
        operands = [many[n] if axis == 0 else given[n] for n, axis in zip(many, axes, strict=True)]
        found = jax.vmap(jax.grad(one, (0, 1)), axes)(*operands)
        for element in range(2):
            alone = jax.grad(one, (0, 1))(*[x[element] if a == 0 else x for x, a in zip(operands, axes, strict=True)])
            for got, want in zip(found, alone, strict=True):
                assert bool(jnp.array_equal(got[element], want))


def test_forward_mode_is_refused(arguments: dict[str, Any]) -> None:
    given = in_jax(arguments)
    function = lambda q: jax_loss(given, q, *[given[name] for name in LEAVES[1:]])
    message = "sparse_mla: q is differentiated in forward mode, supported: reverse mode"
    for derive in (
        lambda: jax.jvp(function, (given["q"],), (given["q"],)),
        lambda: jax.jit(lambda q: jax.jvp(function, (q,), (q,)))(given["q"]),
        lambda: jax.linearize(function, given["q"])[1](given["q"]),
        lambda: jax.jacfwd(function)(given["q"]),
    ):
        with pytest.raises(UnsupportedError, match=message.replace("(", r"\(")):
            derive()


def test_export(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    if not HAS_GPU:
        pytest.skip("callbacks of the interpreter cannot be exported")
    given = in_jax(arguments)
    leaves = [given[name] for name in LEAVES]
    derived = jax.jit(jax.grad(partial(jax_loss, given), tuple(range(len(LEAVES)))))
    exported = jax.export.export(derived, disabled_checks=jax_api.EXPORT_CHECKS)(*leaves)
    assert_same(jax.export.deserialize(exported.serialize()).call(*leaves), wanted)


def gradients_of(case: Case, order: np.ndarray, device: str) -> list[np.ndarray]:
    """The results of a case whose tokens stand in another order."""
    inputs = kit.make(case)
    moved = {n: a[order] if "T" in BACKWARD.tensors[n].names else a for n, a in inputs.items()}
    tensors = kit.torch_inputs(BACKWARD, moved, device)
    found = TORCH_OPS.sparse_mla_backward(*tensors, **case.attrs)
    return [kit.as_numpy(tensor) for tensor in found]


@pytest.mark.parametrize(("op", "case"), TRAINED, ids=kit.case_id)
def test_the_order_of_tokens_does_not_change_a_bit(op: Op, case: Case, device: str) -> None:
    """Sums over tokens are exact, so that they have no order; dsink alone is summed in the order of tokens."""
    tokens = kit.make(case)["q"].shape[0]
    straight, turned = (gradients_of(case, order, device) for order in (np.arange(tokens), np.arange(tokens)[::-1]))
    names = list(op.outputs)
    np.testing.assert_array_equal(straight[0], turned[0][::-1])
    for name in ("dcache", "dextra_cache", "drows", "dextra_rows"):
        np.testing.assert_array_equal(straight[names.index(name)], turned[names.index(name)])


def test_the_order_of_slots_does_not_change_a_bit(device: str) -> None:
    case = BACKWARD.cases[-1]
    inputs = kit.make(case)
    turned, rng = inputs | {"slots": inputs["slots"].copy()}, np.random.default_rng(1)
    for slots, length in zip(turned["slots"], inputs["lengths"], strict=True):
        slots[:length] = rng.permutation(slots[:length])
    assert (turned["slots"] != inputs["slots"]).any()
    straight, other = (
        TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, given, device), **case.attrs)[1]
        for given in (inputs, turned)
    )
    kit.assert_bits_equal("dcache", other, straight)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_thousands_of_references(deterministic: bool, device: str) -> None:
    """To one entry, of summands with high parts and without, some of which cancel out."""
    case = with_large_gradients(backward_of(duplicates(1000)))
    case = replace(case, attrs={**case.attrs, "deterministic": deterministic})
    inputs = kit.make(case)
    named, count = np.unique([slot for slots, n in zip(inputs["slots"], inputs["lengths"], strict=True)
                              for slot in slots[:n]], return_counts=True)  # fmt: skip
    assert count.max() > 1900
    want = BACKWARD.reference(**inputs, **case.attrs)[1].reshape(-1, 576)
    got = TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, inputs, device), **case.attrs)[1]
    found = got.float().cpu().numpy().reshape(-1, 576)
    entry = named[count.argmax()]
    cancelled, added = ((a[entry, first:VALUE_DIMS:2] for a in (found, want)) for first in (0, 1))
    for got, expected in (cancelled, added):  # as a whole: the same rounding of a probability is added 991 times
        assert cosine_difference(got, expected) <= GRADIENT.cosine
    assert np.abs(want[entry, 1:VALUE_DIMS:2]).max() > 16 * np.abs(want[entry, :VALUE_DIMS:2]).max() > 0


def test_bounds_whose_sum_over_heads_overflows_give_nan(device: str) -> None:
    """Each head's is finite, and so is another entry's gradient."""
    bf16 = ml_dtypes.bfloat16
    q, cache = np.ones((2, 64, 512), bf16), np.full((1, 2, 512), 2.0**-10, bf16)
    slots, dout = np.array([[0], [1]], np.int32), np.ones((2, 64, 512), bf16)
    dout[0] = 2.0**123
    tensors = [kit.to_torch(array, device) for array in (q, cache, slots)]
    out, lse = torch_api.sparse_mla(*tensors, softmax_scale=SCALE)
    dq, dcache, *_ = TORCH_OPS.sparse_mla_backward(*tensors, out, lse, kit.to_torch(dout, device), softmax_scale=SCALE)
    given = (*(x.float().cpu().numpy() for x in (out, lse)), dout)
    want = BACKWARD.reference(q, cache, slots, *given, softmax_scale=SCALE)[1]
    assert np.isnan(want[0, 0]).all() and np.isfinite(want[0, 1]).all()
    assert dcache[0, 0].isnan().all() and dq.isfinite().all()
    kit.assert_close("dcache", dcache.float().cpu().numpy(), want, BACKWARD.outputs["dcache"].agreement)


@pytest.mark.parametrize(("value", "upstream"), [(3e38, 1.0), (2.0**-100, 3e38), (1e25, 1e20)])
def test_factors_of_a_bound_that_overflow_give_nan(value: float, upstream: float, device: str) -> None:
    """The bound itself is small, and another token's are."""
    bf16 = ml_dtypes.bfloat16
    q, cache = np.full((2, 1, 512), 2.0**-126, bf16), np.ones((1, 2, 512), bf16)
    slots, dout = np.array([[0], [1]], np.int32), np.ones((2, 1, 512), bf16)
    cache[0, 0], dout[0] = value, upstream
    tensors = [kit.to_torch(array, device) for array in (q, cache, slots)]
    out, lse = torch_api.sparse_mla(*tensors, softmax_scale=SCALE)
    dq, dcache, *_ = TORCH_OPS.sparse_mla_backward(*tensors, out, lse, kit.to_torch(dout, device), softmax_scale=SCALE)
    given = (*(x.float().cpu().numpy() for x in (out, lse)), dout)
    wanted = BACKWARD.reference(q, cache, slots, *given, softmax_scale=SCALE)
    for found, want in zip((dq, dcache[0]), (wanted[0], wanted[1][0]), strict=True):
        assert np.isnan(want[0]).all() and np.isfinite(want[1]).all()
        assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_duplicates_and_nobody(deterministic: bool, device: str) -> None:
    """A slot that stands twice counts twice; rows without keys, and entries that nobody names, have zeros."""
    bf16 = ml_dtypes.bfloat16
    rng = np.random.default_rng(3)
    q, cache = rng.standard_normal((3, 2, 576)).astype(bf16), np.full((1, 6, 576), np.nan, bf16)
    cache[0, [1, 4]] = rng.standard_normal((2, 576)).astype(bf16)
    slots = np.array([[1, 1, 4], [-1, 6, -7], [4, -1, 1]], np.int32)
    tensors = [kit.to_torch(array, device) for array in (q, cache, slots)]
    out, lse = torch_api.sparse_mla(*tensors, softmax_scale=SCALE)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dq, dcache, *others = TORCH_OPS.sparse_mla_backward(
        *tensors, out, lse, dout, dlse, softmax_scale=SCALE, deterministic=deterministic
    )
    assert not dq[1].any() and not dcache[0, [0, 2, 3, 5]].any()
    assert dcache[0, [1, 4]].isfinite().all() and not any(other.numel() for other in others)
    want = BACKWARD.reference(
        q, cache, slots, *(x.float().cpu().numpy() for x in (out, lse, dout)), np.ones((3, 2)), softmax_scale=SCALE
    )
    for name, got, expected in zip(BACKWARD.outputs, (dq, dcache, *others), want, strict=True):
        kit.assert_close(name, got.float().cpu().numpy(), expected, BACKWARD.outputs[name].agreement)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("heads", [1, 16, 63, 64, 65, 128])
def test_any_number_of_heads(heads: int, deterministic: bool, device: str) -> None:
    call = make_case(2, heads, 5, 4, PLAIN, with_sink=True, deterministic=deterministic)
    case = backward_of(call, with_dlse=True)
    inputs = kit.make(case)
    found = TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, inputs, device), **case.attrs)
    wanted = BACKWARD.reference(**inputs, **case.attrs)
    for got, want in zip(found[:2], wanted, strict=False):  # as a whole: sums over heads of probabilities near 1
        assert bool(got.any()) and cosine_difference(got.float().cpu().numpy(), want) <= GRADIENT.cosine
    kit.assert_close("dsink", found[2].cpu().numpy(), wanted[2], BACKWARD.outputs["dsink"].agreement)


@pytest.mark.parametrize("deterministic", [True, False])
def test_another_calls_lse_is_nan_not_garbage(deterministic: bool, device: str) -> None:
    case = BACKWARD.cases[0]
    inputs = kit.make(case)
    inputs["forward_lse"] = inputs["forward_lse"] - 5
    attrs = {**case.attrs, "deterministic": deterministic}
    found = TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, inputs, device), **attrs)
    for got, want in zip(found[:2], BACKWARD.reference(**inputs, **case.attrs)[:2], strict=True):  # dq, dcache
        assert np.isnan(want).any() and np.array_equal(got.isnan().cpu().numpy(), np.isnan(want))


@pytest.mark.parametrize("deterministic", [True, False])
def test_another_calls_lse_is_nan_beside_a_great_sink(deterministic: bool, device: str) -> None:
    """The probabilities in out are small then, those of the lse, by which dlse is multiplied, are not."""
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((2, 3, 576), (1, 4, 576)))
    slots, sink = np.array([[0, 1], [2, 2]], np.int32), np.full(3, 20, np.float32)
    out, lse = (x.float().cpu().numpy() for x in torch_api.sparse_mla(
        *(kit.to_torch(x, device) for x in (q, cache, slots)), sink=kit.to_torch(sink, device), softmax_scale=SCALE
    ))  # fmt: skip
    lse[1] -= 5
    given = q, cache, slots, out.astype(q.dtype), lse, np.ones((2, 3, 512), q.dtype), np.ones((2, 3), np.float32)
    found = TORCH_OPS.sparse_mla_backward(
        *(kit.to_torch(x, device) for x in given), sink=kit.to_torch(sink, device), softmax_scale=SCALE,
        deterministic=deterministic,
    )  # fmt: skip
    want = BACKWARD.reference(*given, sink=sink, softmax_scale=SCALE)
    assert np.isnan(want[1][0, 2]).all() and np.isfinite(want[1][0, [0, 1, 3]]).all()
    assert np.isnan(want[0][1]).all() and np.isfinite(want[0][0]).all()
    for got, defined in zip(found[:2], want[:2], strict=True):
        assert np.array_equal(got.isnan().cpu().numpy(), np.isnan(defined))


def test_a_large_gradient_costs_others_no_bit(device: str) -> None:
    """Nor does a padding row's garbage: the unit of an entry's sum follows from the tokens that name it."""
    case = BACKWARD.cases[1]
    inputs = kit.make(case)
    few = {n: a[:1] if "T" in BACKWARD.tensors[n].names else a for n, a in inputs.items()}
    inputs["slots"] = np.where(np.isin(inputs["slots"], inputs["slots"][0]), -1, inputs["slots"])
    inputs["slots"][0] = few["slots"][0]
    inputs["dout"] = inputs["dout"].copy()
    inputs["dout"][1] = 1e30
    whole, alone = (TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, i, device), **case.attrs)[1]
                    for i in (inputs, few))  # fmt: skip
    named = np.unique(few["slots"][(few["slots"] >= 0) & (few["slots"] < inputs["cache"].shape[0])])
    kit.assert_bits_equal("dcache", kit.as_numpy(whole)[named], kit.as_numpy(alone)[named])
    assert kit.as_numpy(alone)[named].astype(np.float32).any()


# Sums in any order.


def in_runs(inputs: dict[str, np.ndarray], attrs: dict[str, Any], order: list[int], device: str) -> np.ndarray:
    """dcache of the tokens `order`."""
    moved = {n: a[order] if "T" in BACKWARD.tensors[n].names else a for n, a in inputs.items()}
    found = TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, moved, device), **attrs)[1]
    return found.float().cpu().numpy().astype(np.float64)


def test_runs_in_any_order_are_within_the_stated_bound(device: str) -> None:
    """Large gradients of two tokens cancel out. In several orders of tokens: the interpreter adds in the one given."""
    case = backward_of(make_case(8, 3, 40, 7, PLAIN))
    attrs, inputs = {**case.attrs, "deterministic": False}, kit.make(case)
    inputs["slots"][-1] = inputs["slots"][0]
    for name in ("q", "forward_lse", "forward_out", "dout"):
        inputs[name][-1] = inputs[name][0]
    inputs["dout"][0] *= 4096
    inputs["dout"][-1] = -inputs["dout"][0]
    tokens = [*range(8)]
    # One token has one summand of an entry, here rounded to bfloat16.
    summands = (1 + 2.0**-7) * sum(np.abs(in_runs(inputs, attrs, [token], device)) for token in tokens)
    bound = 2 * len(tokens) * (2.0**-23 * summands + 2.0**-126)
    first, *others = (in_runs(inputs, attrs, order, device) for order in
                      (tokens, [0, 7, 1, 2, 3, 4, 5, 6], [3, 6, 0, 2, 7, 1, 4, 5]))  # fmt: skip
    for one in others:
        apart = np.abs(one - first)
        assert (apart <= bound + 2.0**-7 * np.maximum(np.abs(one), np.abs(first))).all()
        assert 0 < np.count_nonzero(apart) < apart.size  # sums have an order


def in_any_order(given: dict[str, Any], *leaves: Any, attend: Callable[..., Any] = torch_api.sparse_mla) -> Any:
    return loss_of(given, *leaves, attend=partial(attend, deterministic=False))


def compiled_in_any_order(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(partial(in_any_order, given), fullgraph=True, backend="aot_eager")(*leaves)


def test_both_front_ends_in_any_order(arguments: dict[str, Any], wanted: list[torch.Tensor]) -> None:
    """Gradients of queries and sinks have the same bits, those of caches are nearly the deterministic ones."""
    jax_any = partial(in_any_order, attend=jax_api.sparse_mla)
    jitted_any = lambda given, *leaves: jax.jit(partial(jax_any, given))(*leaves)
    found = [by_backward(way, arguments) for way in (in_any_order, compiled_in_any_order)]
    found += [[interop.to_torch(x) for x in grad(way, in_jax(arguments))] for way in (jax_any, jitted_any)]
    for gradients in found:
        for name, got, first, want in zip(LEAVES, gradients, found[0], wanted, strict=True):
            if "cache" not in name:
                assert torch.equal(got.cpu(), first.cpu()), name
            assert torch.allclose(got.float().cpu(), want.float().cpu(), rtol=2**-6, atol=2**-6), name


def test_the_option_changes_nothing_but_the_derivative(arguments: dict[str, Any]) -> None:
    given = {name: value for name, value in arguments.items() if value is not None}
    plans = [torch_api.sparse_mla.plan(**given, softmax_scale=SCALE, deterministic=way) for way in (True, False)]
    assert plans[0] == plans[1]
    results = [torch_api.sparse_mla(**given, softmax_scale=SCALE, deterministic=way) for way in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("case", [case for case in kit.cases(BACKWARD) if case.attrs.get("deterministic", True)],
                         ids=kit.case_id)  # fmt: skip
def test_in_any_order_agrees_with_the_reference(case: Case, device: str) -> None:
    attrs, inputs = {**case.attrs, "deterministic": False}, kit.make(case)
    found = TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(BACKWARD, inputs, device), **attrs)
    for (name, want), got in zip(kit.results(BACKWARD, BACKWARD.reference(**inputs, **attrs)), found, strict=True):
        kit.assert_close(name, got, want, BACKWARD.outputs[name].agreement)


@pytest.mark.parametrize("name", ["q", "cache", "dout", "forward_out"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_in_any_order_what_is_not_finite_stays_with_its_token(name: str, bad: float, device: str) -> None:
    """As in order: an entry's gradient is NaN in all dims or in none."""
    case = BACKWARD.cases[0]
    inputs, slot = kit.make(case), None
    if name == "cache":
        slot = next(slot for slot in inputs["slots"][0] if 0 <= slot < inputs["cache"].shape[0] * 16)
        inputs[name][slot // 16, slot % 16, 3] = bad
    else:
        inputs[name][0, 0, 3] = bad
    want, got = (
        TORCH_OPS.sparse_mla_backward(
            *kit.torch_inputs(BACKWARD, inputs, device), **case.attrs, deterministic=deterministic
        )[1]
        for deterministic in (True, False)
    )
    wrong = want.isnan()
    assert wrong.any() and not wrong.all() and torch.equal(wrong, got.isnan())
