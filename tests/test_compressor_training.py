"""Compressed rows and their derivative: against autodiff, finite differences, the caches' entries and transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from compressor import compressed
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACompressor, DeepseekV4HCACompressor

from xmla import UnsupportedError, interop, jax_api, torch_api
from xmla.core.op import Case
from xmla.core.ops.training.compress_rows.cases import CASES, make_case
from xmla.core.registry import registry
from xmla.core.values import cosine_difference
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
ROWS, BACKWARD = OPS["compress_rows"], OPS["compress_rows_backward"]
LEAVES = ("kv", "score", "ape", "norm_weight")
SCALE = 0.0721688


def wide(case: Case) -> dict[str, np.ndarray]:
    """A case's arguments in float64."""
    return {n: a.astype(np.float64) if a.dtype.kind != "i" else a for n, a in kit.make(case).items()}


@pytest.mark.parametrize("case", CASES, ids=kit.case_id)
def test_finite_differences(case: Case) -> None:
    """Of the reference, in float64, in a direction of each argument."""
    given, attrs, rng = wide(case), dict(case.attrs), np.random.default_rng(1)
    (rows,) = ROWS.reference(**given, **attrs)
    drows = rng.standard_normal(rows.shape)
    found = dict(zip(BACKWARD.outputs, BACKWARD.reference(**given, drows=drows, **attrs), strict=True))
    for name in LEAVES:
        if name not in given:
            assert not found[f"d{name}"].size
            continue
        direction, step = rng.standard_normal(given[name].shape), 2.0**-14
        ends = [ROWS.reference(**given | {name: given[name] + sign * step * direction}, **attrs)[0] for sign in (1, -1)]
        slope = float(((ends[0] - ends[1]) * drows).sum()) / (2 * step)
        assert float((found[f"d{name}"] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6), name


DOCUMENTS = ((0, 9), (0, 3), (0, 17))
OVERLAPPING = make_case(DOCUMENTS, 4, 512, 2, rope=64)


ONE_SERIES = make_case(((0, 40), (0, 30)), 16, 64, rope=32, eps=1e-3)


@pytest.mark.parametrize("case", [OVERLAPPING, ONE_SERIES], ids=kit.case_id)
def test_the_reference_is_what_autodiff_finds(case: Case) -> None:
    given = {n: torch.from_numpy(a).requires_grad_(n in LEAVES) for n, a in wide(case).items()}
    positions = given.pop("positions")
    host = {n: t.detach().numpy() for n, t in given.items()} | {"positions": positions.numpy()}
    (rows,) = ROWS.reference(**host, **case.attrs)
    drows, total = torch.from_numpy(np.random.default_rng(1).standard_normal(rows.shape)), torch.zeros(())
    for part in torch.tensor_split(torch.arange(len(positions)), (positions == 0).nonzero().flatten()[1:]):
        own = {n: given[n][part] if n in ("kv", "score") else t for n, t in given.items()}
        entries = compressed(**own, **case.attrs)
        ratio = len(given["ape"])
        last = part[ratio - 1 :: ratio][: len(entries)]
        np.testing.assert_allclose(rows[last.numpy()], entries.detach().numpy(), rtol=1e-9, atol=1e-11)
        total = total + (entries * drows[last]).sum()
    total.backward()
    found = dict(zip(BACKWARD.outputs, BACKWARD.reference(**host, drows=drows.numpy(), **case.attrs), strict=True))
    for name in LEAVES:
        want = given[name].grad
        assert want is not None and bool(want.any())
        np.testing.assert_allclose(found[f"d{name}"], want.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.fixture
def given(device: str) -> dict[str, torch.Tensor]:
    tensors = kit.torch_inputs(ROWS, kit.make(OVERLAPPING), device)
    return {n: t for n, t in zip(ROWS.tensors, tensors, strict=True) if t is not None}


def test_fewer_tokens_than_a_window(device: str) -> None:
    """The entry of a token whose window began before the call is of the tokens that are there."""
    values = np.random.default_rng(3).normal(size=(3, 2, 512)).astype(np.float32)
    kv, score = values.transpose(1, 0, 2)
    arrays = kv, score, np.zeros((128, 512), np.float32), np.array([125, 126, 127], np.int32)
    (want,) = registry()["compress_rows"].reference(*arrays)
    weights = np.exp(score.astype(np.float64))
    np.testing.assert_allclose(want[2], (weights * kv).sum(0) / weights.sum(0), rtol=1e-12)
    got = torch_api.compress_rows(*(torch.tensor(array, device=device) for array in arrays))
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-5, atol=1e-6)


def test_documents_do_not_see_each_other(given: dict[str, torch.Tensor]) -> None:
    rows = torch_api.compress_rows(**given)
    first = 0
    for _, count in DOCUMENTS:
        part = slice(first, first + count)
        own = {n: t[part] if n in ("kv", "score", "positions") else t for n, t in given.items()}
        kit.assert_bits_equal("rows", torch_api.compress_rows(**own), rows[part])
        first += count


@pytest.mark.parametrize(
    ("documents", "ratio"),
    [(((0, 40),), 1), (((2, 1), (5, 1), (8, 1)), 3), (((2**31 - 1, 1),), 1), (((2**31 - 1, 1),), 4)],
)
def test_a_token_alone_in_its_window_is_its_entry(documents: tuple, ratio: int, device: str) -> None:
    """To the bit, so that no score has a gradient: not even of roundings, which would have any direction."""
    inputs = kit.make(make_case(documents, ratio, 128, dtype=np.dtype(np.float32), norm=False))
    arguments = dict(zip(ROWS.tensors, kit.torch_inputs(ROWS, inputs, device), strict=True))
    rows = torch_api.compress_rows(**arguments)
    kit.assert_bits_equal("rows", rows, inputs["kv"])
    tensors = kit.torch_inputs(BACKWARD, inputs | {"drows": inputs["kv"]}, device)
    dkv, dscore, dape, _ = TORCH_OPS.compress_rows_backward(*tensors)
    kit.assert_bits_equal("dkv", dkv, inputs["kv"])
    assert not dscore.any() and not dape.any()


def of_one_document(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last document alone."""
    count = DOCUMENTS[-1][1]
    return {n: t[-count:] if n in ("kv", "score", "positions") else t for n, t in given.items()}


def stored(given: dict[str, torch.Tensor], pages: int, page: int) -> torch.Tensor:
    """V4's fp8 entries of one document, by `compress_kv`."""
    tokens, width = given["kv"].shape
    device = given["kv"].device
    state = torch.full((1, tokens, 2 * width), torch.nan, device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    cache = torch.zeros(pages, page, 584, dtype=torch.uint8, device=device)
    names = ("kv", "score", "ape", "norm_weight", "cos_sin", "positions")
    torch_api.compress_kv(*(given[name] for name in names), state, table[:, :1] * 0, cache, table)
    return cache


def test_rows_are_what_compress_kv_stores(given: dict[str, torch.Tensor]) -> None:
    """Before it rounds them: written to a cache they are its entries, but for a rounding the other way."""
    given = of_one_document(given)
    cache, last = stored(given, 2, 2), given["positions"][3::4].long()
    rows = torch_api.compress_rows(**given)
    assert not rows[given["positions"] % 4 != 3].any()
    again, slots = torch.zeros_like(cache), torch.arange(len(last), device=cache.device)
    latent, rope = rows[last].split([448, 64], dim=1)
    torch_api.write_mla_cache(latent, rope, slots, again, scale_floor="amax")
    kept, written = (torch_api.read_mla_cache(c, slots, dtype="float32") for c in (cache, again))
    assert bool(kept.any()) and float((kept != written).float().mean()) < 0.01
    assert torch.allclose(kept, written, rtol=2**-3, atol=2**-14)


def test_rows_without_norm_are_pool_keys(device: str) -> None:
    case = make_case(((0, 22),), 4, 128, norm=False)
    keys, gates, ape, positions, *_ = kit.torch_inputs(ROWS, kit.make(case), device)
    rows = torch_api.compress_rows(keys, gates, ape, positions)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    state = torch.full((1, 22, 256), torch.nan, device=device)
    cache, again = (torch.zeros(1, 8, 132, dtype=torch.uint8, device=device) for _ in range(2))
    torch_api.pool_keys(keys, gates, ape, positions, state, table, cache, table)
    slots = torch.arange(5, device=device)
    torch_api.write_indexer_cache(rows[3::4].contiguous(), slots, again)
    kept, written = (values.float() * scales[:, None] for values, scales in
                     (torch_api.read_indexer_cache(c, slots) for c in (cache, again)))  # fmt: skip
    assert bool(kept.any()) and float((kept != written).float().mean()) < 0.01
    assert torch.allclose(kept, written, rtol=2**-3, atol=2**-14)


def loss_of(given: dict[str, Any], *leaves: Any, compress: Callable[..., Any] = torch_api.compress_rows) -> Any:
    rows = compress(**given | dict(zip(LEAVES, leaves, strict=True)))
    return (rows * rows).sum()


def by_backward(function: Callable[..., Any], given: dict[str, Any]) -> list[torch.Tensor]:
    leaves = [given[name].detach().clone().requires_grad_() for name in LEAVES]
    function(given, *leaves).backward()
    return [leaf.grad for leaf in leaves]


def compiled(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(partial(loss_of, given), fullgraph=True, backend="aot_eager")(*leaves)


def checkpointed(given: dict[str, Any], *leaves: torch.Tensor) -> Any:
    return checkpoint(partial(loss_of, given), *leaves, use_reentrant=False)


def test_both_front_ends_and_their_transformations(given: dict[str, torch.Tensor]) -> None:
    """The same bits; those of a call by name too."""
    rows = torch_api.compress_rows(**given)
    drows = 2 * rows
    order = [n for n in BACKWARD.tensors if n != "drows"]
    call = torch.ops.xmla.compress_rows_backward
    wanted = call(*(given[n] for n in order[:4]), drows, *(given[n] for n in order[4:]))
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}
    jax_loss = partial(loss_of, arrays, compress=jax_api.compress_rows)
    ways = [by_backward(way, given) for way in (loss_of, compiled, checkpointed)]
    for way in (jax_loss, jax.jit(jax_loss), jax.checkpoint(jax_loss)):
        found = jax.grad(way, tuple(range(len(LEAVES))))(*[arrays[name] for name in LEAVES])
        ways.append([interop.to_torch(gradient) for gradient in found])
    for found in ways:
        for name, got, want in zip(LEAVES, found, wanted, strict=True):
            assert bool(want.any())
            kit.assert_bits_equal(name, got.cpu(), want.cpu())


def test_what_is_refused(given: dict[str, torch.Tensor]) -> None:
    moving = given | {"cos_sin": given["cos_sin"].clone().requires_grad_()}
    message = "compress_rows: cos_sin is differentiated, supported: derivatives of kv, score, ape, norm_weight"
    with pytest.raises(UnsupportedError, match=message):
        torch_api.compress_rows(**moving)


def test_gradients_of_a_batch_of_calls(given: dict[str, torch.Tensor]) -> None:
    """Those of each call alone, in JAX's vmap."""
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}

    def gradient(kv: jax.Array) -> jax.Array:
        return jax.grad(lambda kv: (jax_api.compress_rows(**arrays | {"kv": kv}) ** 2).sum())(kv)

    batch = jnp.stack([arrays["kv"], arrays["kv"][::-1]])
    for got, kv in zip(jax.vmap(gradient)(batch), batch, strict=True):
        assert bool(jnp.array_equal(got, gradient(kv))) and bool(got.any())


HEADS, WINDOW = 3, 4


def attention_slots(positions: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of one document's tokens: those of the window, and those that completed an entry by then."""
    place = torch.arange(len(positions), device=positions.device)
    back = place[:, None] - torch.arange(WINDOW, device=positions.device)
    last = place[ratio - 1 :: ratio]
    return torch.where(back >= 0, back, -1).int(), torch.where(last <= place[:, None], last, -1).int()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "fp8"])
def test_a_window_and_compressed_entries_under_one_softmax(packed: bool, given: dict[str, torch.Tensor]) -> None:
    """Against autograd of the whole in float64, at the values that are stored; gradients reach the projections."""
    given = of_one_document(given)
    positions, device = given["positions"], given["kv"].device
    tokens = len(positions)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)
    leaves = {"q": draw(tokens, HEADS, 512).bfloat16(), "window": draw(tokens, 512).bfloat16(), "sink": draw(HEADS)}
    leaves |= {name: given[name] for name in LEAVES}
    slots, entry_slots = attention_slots(positions, 4)
    upstream, last = draw(tokens, HEADS, 512).bfloat16(), positions[3::4].long()

    own = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    rows = torch_api.compress_rows(**given | {name: own[name] for name in LEAVES}).bfloat16()
    entries: dict[str, Any] = {"extra_cache": rows[:, None], "extra_slots": entry_slots}
    values = rows.detach()[last].double()
    if packed:  # entries stand one after another, and so do the rows beside them
        cache = stored(given, 2, 2)
        pages = torch.where(entry_slots >= 0, entry_slots // 4, -1)
        entries = {"extra_cache": cache, "extra_slots": pages, "extra_rows": rows[last].view(2, 2, 512)}
        values = torch_api.read_mla_cache(cache, torch.arange(4, device=device), dtype="float32").double()
    out, _ = torch_api.sparse_mla(
        own["q"], own["window"][:, None], slots, sink=own["sink"], softmax_scale=SCALE, **entries
    )  # fmt: skip
    (out * upstream).float().sum().backward()

    wide = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}
    made = compressed(*(wide[name] for name in LEAVES), given["cos_sin"].cpu().double())
    keys = made + (values.cpu() - made).detach()
    total = torch.zeros(())
    for token in range(tokens):
        named = wide["window"][slots[token][slots[token] >= 0].cpu().long()]
        seen = torch.cat([named, keys[: (token + 1) // 4]])
        scores = torch.cat([SCALE * wide["q"][token] @ seen.T, wide["sink"][:, None]], dim=1)
        total = total + ((scores.softmax(1)[:, :-1] @ seen) * upstream[token].cpu().double()).sum()
    total.backward()
    for name, leaf in own.items():
        got, want = leaf.grad.double().cpu().numpy(), wide[name].grad.numpy()
        # Gradients of rows, and of their projections, are rounded to bfloat16: 2**-9 each, the square of it here.
        assert want.any() and cosine_difference(got, want) <= 4 * 2.0**-18 * 2, name


CONFIG: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 32,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "num_hash_layers": 2,
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", [DeepseekV4CSACompressor, DeepseekV4HCACompressor])
def test_transformers_compressors(kind: Any, device: str) -> None:
    """DeepSeek-V4's of transformers, in float32: the same entries, and the same gradients of all that it trains."""
    torch.manual_seed(0)
    config = DeepseekV4Config(**CONFIG)
    module = kind(config).float()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0, 0.2) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.3)
    ratio = module.compress_rate
    tokens = 2 * ratio + 5
    hidden, positions = torch.randn(1, tokens, 64), torch.arange(tokens)
    cos, sin = module.rotary_emb(hidden, position_ids=positions[None], layer_type="compress")
    cos_sin = torch.cat([cos[0], sin[0]], dim=-1)

    theirs = hidden.clone().requires_grad_()
    entries, *_ = module(theirs, torch.randn(1, tokens, 32), positions[None], None, 0)
    upstream = torch.randn(entries.shape)
    (entries * upstream).sum().backward()
    parameters = (module.kv_proj.weight, module.gate_proj.weight, module.position_bias, module.kv_norm.weight)
    wanted = [theirs.grad, *[parameter.grad for parameter in parameters]]

    ours = hidden[0].to(device).requires_grad_()
    mine = [parameter.detach().to(device).requires_grad_() for parameter in parameters]
    rows = torch_api.compress_rows(
        ours @ mine[0].T, ours @ mine[1].T, mine[2], positions.int().to(device), mine[3], cos_sin.to(device),
        eps=config.rms_norm_eps,
    )  # fmt: skip
    found = rows[ratio - 1 :: ratio]
    assert torch.allclose(found.cpu(), entries[0, 0], rtol=1e-4, atol=1e-5)
    (found * upstream[0, 0].to(device)).sum().backward()
    for got, want in zip([ours, *mine], wanted, strict=True):
        assert bool(want.any())
        assert cosine_difference(got.grad.double().cpu().numpy(), want.double().view(got.shape).numpy()) < 1e-9
