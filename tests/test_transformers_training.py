"""The indexers' loss of transformers' models: `IndexerLoss` beside the model's own attention."""

import copy
import importlib
import re
from inspect import signature
from typing import Any

import pytest
import torch
from conftest import HAS_GPU, require_transformers

require_transformers()

from small_transformers import KEYED, TOKENS, assert_as_near, attending, build, distance, first_layer, padded, text
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache
from transformers.integrations.finegrained_fp8 import FP8Linear

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.transformers import IndexerLoss, LatentCache, models

# transformers warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


def attentions(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if re.search(r"layers\.\d+\.self_attn$", name)]


def recorded(model: Any, tokens: torch.Tensor, **given: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """The results of a pass, and what each layer's indexer selected."""
    selected: dict[int, torch.Tensor] = {}
    hooks = [
        each.indexer.register_forward_hook(lambda indexer, _, result: selected.update({indexer.layer_idx: result}))
        for each in attentions(model)
        if each.indexer is not None
    ]
    out = model(tokens, **given)
    for hook in hooks:
        hook.remove()
    return out, selected


def eager_losses(
    model: Any, kind: str, tokens: torch.Tensor, selected: dict[int, torch.Tensor], given: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """Each layer's loss, of attention's own probabilities at given keys and of scores by PyTorch's operations."""
    losses: dict[int, torch.Tensor] = {}
    asked: dict[int, dict[str, Any]] = {}
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()

    def select(indexer: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor:
        bound = signature(type(indexer).forward).bind(indexer, *args, **kwargs).arguments
        asked[indexer.layer_idx] = tree_map_only(torch.Tensor, torch.Tensor.detach, dict(bound))
        keys = selected[indexer.layer_idx]
        return torch.where(keys < 0, keys[..., :1].clamp(min=0), keys)  # a key twice, where there are fewer

    def note(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        if module.indexer is None:
            return
        keys = selected[module.layer_idx].long()
        index_q, index_k, weights = models._CLASSES[kind][2](module.indexer, asked[module.layer_idx])
        scores = torch.einsum("bsid,bnd->bsin", index_q.float(), index_k.float()).relu()
        scores = torch.einsum("bsin,bsi->bsn", scores, weights)
        chosen = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool, device=keys.device)
        chosen = chosen.scatter(2, keys.where(keys >= 0, scores.shape[2]), True)[..., :-1]
        logs = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
        target = result[1].detach().float().sum(1) * chosen
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
        each = (torch.special.xlogy(target, target) - target * logs).sum(-1)
        losses[module.layer_idx] = each[real].sum() / real.sum()

    for each in attentions(model):
        each.register_forward_hook(note, with_kwargs=True)
        if each.indexer is not None:
            each.indexer.register_forward_hook(select, with_kwargs=True)
    model(tokens, **given)
    return losses


@pytest.mark.parametrize(
    ("kind", "how", "dense"),
    [("deepseek_v32", "none", False), ("deepseek_v32", "left", True), ("deepseek_v32", "packed", True),
     ("glm_moe_dsa", "packed", False), ("hy_v4", "right", False), ("mistral_large4_text", "left", False)],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_eager_attention(kind: str, how: str, dense: bool, device: str) -> None:
    """At the keys that xmla selected; only indexers learn from them, and padding does not count."""
    model, tokens = build(kind, device, index_topk=16), text(device, 2, 26)
    given = {"use_cache": False} | padded(tokens, how)
    eager = attending(copy.deepcopy(model), "eager")
    losses = IndexerLoss(dense)
    out, selected = recorded(model, tokens, labels=tokens, indexer_loss=losses, **given)
    assert all(keys.shape[-1] == (26 if dense else 16) for keys in selected.values())
    total = losses.added_to(0 * out.loss, 0.5)
    total.backward()
    expected = eager_losses(eager, kind, tokens, selected, given)
    assert losses.layers.keys() == expected.keys()
    for layer, loss in expected.items():
        assert float(losses.layers[layer]) == pytest.approx(loss.item(), rel=0.03), layer
    assert float(total.detach()) == pytest.approx(0.5 * sum(map(float, losses.layers.values())), rel=1e-6)
    (0.5 * torch.stack([*expected.values()]).sum()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if ".indexer." in name:
            # Behind the first layer hidden states are rounded otherwise, which turns ReLUs on and off.
            everything, bound = torch.ones_like(theirs).bool(), 0.02 if ".layers.0." in name else 0.25
            assert distance(ours.grad.float(), theirs.grad.float(), everything) < bound, name
        else:
            assert theirs.grad is None and (ours.grad is None or not ours.grad.any()), name


def indexed(model: Any) -> list[tuple[Any, Any]]:
    """Layers of groups of tokens, and their indexers."""
    layers = [layer for layer in attentions(model) if hasattr(layer, "indexer") or hasattr(layer, "compressor")]
    return [(layer, indexer) for layer in layers if (indexer := models._indexer_of(layer)) is not None]


class Eager:
    """A model's losses by its own eager attention and PyTorch's operations, where indexers score groups of tokens."""

    def __init__(self, model: Any, selected: dict[int, torch.Tensor]) -> None:
        self.selected, self.losses = selected, {}
        self.scores: dict[int, torch.Tensor] = {}
        for layer, indexer in indexed(model):
            number = layer.layer_idx
            indexer.register_forward_hook(lambda *_, number=number: self.selected[number])
            layer.register_forward_hook(lambda module, args, result: self.note(module, result[1]))
            if hasattr(indexer, "scorer"):
                note = lambda module, args, result, number=number: self.scores.update({number: result})
                indexer.scorer.register_forward_hook(note)
            else:
                indexer.register_forward_pre_hook(self.score_pools, with_kwargs=True)

    def score_pools(self, indexer: Any, args: Any, given: dict[str, Any]) -> None:
        """Scores [B, S, P], −inf of pools with padding, with the gradient that transformers' own indexer lacks."""
        x, residual = given["hidden_states"].detach(), given["q_resid"].detach()
        query = indexer.wq_b(residual).unflatten(-1, (-1, indexer.head_dim)).float()
        gates = torch.nn.functional.linear(x, indexer.index_kpool_compress_gate)
        states = torch.cat([indexer.k_norm(indexer.wk(x)), gates, given["attention_mask"][..., None].to(x.dtype)], -1)
        keys, self.members, _ = indexer.get_pooled_states(states)
        scores = torch.einsum("bsid,bpd->bsip", query, keys.float()).relu() * indexer.softmax_scale
        weights = indexer.weights_proj(x).float() * indexer.n_heads**-0.5
        self.scores[indexer.layer_idx] = torch.einsum("bsip,bsi->bsp", scores, weights)

    def note(self, layer: Any, probabilities: torch.Tensor) -> None:
        number = layer.layer_idx
        scores, attended, keys = self.scores[number], probabilities.detach().float().sum(1), self.selected[number]
        count = scores.shape[2]
        if hasattr(layer, "compressor"):  # entries stand behind the window
            target = attended[..., -count:]
        else:
            target = torch.stack([attended[..., members[0]].sum(-1) for members in self.members.unbind(1)], -1)
            pool = layer.indexer.index_kpool
            first = keys[..., : keys.shape[2] // pool * pool : pool]
            keys = torch.where(first < 0, -1, (first - self.members[:, :1, :1]) // pool)
        chosen = torch.zeros(*scores.shape[:2], count + 1, dtype=torch.bool, device=keys.device)
        chosen = chosen.scatter(2, keys.where(keys >= 0, count).long(), True)[..., :-1]
        target = target * chosen
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
        logs = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
        each = (torch.special.xlogy(target, target) - target * logs).sum(-1)
        self.losses[number] = each.sum() / each.numel()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next_text"])
def test_losses_over_groups_are_those_of_eager_attention(kind: str, dense: bool, device: str) -> None:
    """Of entries, and of pools, at those that xmla selected."""
    model, tokens = build(kind, device), text(device, 2, TOKENS)
    eager = attending(copy.deepcopy(model), "eager")
    losses, selected = IndexerLoss(dense), {}
    for layer, indexer in indexed(model):
        note = lambda *given, number=layer.layer_idx: selected.update({number: given[-1]})
        indexer.register_forward_hook(note)
    out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
    total = losses.added_to(0 * out.loss, 0.5)
    total.backward()
    expected = Eager(eager, {number: each.long() for number, each in selected.items()})
    eager(tokens, use_cache=False)
    assert losses.layers.keys() == expected.losses.keys() and losses.layers
    for layer, loss in expected.losses.items():
        assert float(losses.layers[layer]) == pytest.approx(loss.item(), rel=0.03), layer
        assert loss > 0.01
    (0.5 * torch.stack([*expected.losses.values()]).sum()).backward()
    learning = 0
    for (name, ours), theirs in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        if ".indexer." in name:
            everything = torch.ones_like(ours).bool()
            assert distance(ours.grad.float(), theirs[1].grad.float(), everything) < 0.05, name
            learning += 1
        else:
            assert ours.grad is None or not ours.grad.any(), name
    assert learning >= 6


@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next_text"])
def test_a_text_shorter_than_a_group_has_a_loss_of_zero(kind: str, device: str) -> None:
    model, tokens = build(kind, device), text(device, 1, 3)
    losses = IndexerLoss()
    out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
    losses.added_to(out.loss).backward()
    assert losses.layers and not any(map(float, losses.layers.values()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_has_the_same_bits(reentrant: bool, device: str) -> None:
    """Layers that are computed again in the backward pass."""
    model, tokens = build("glm_moe_dsa", device).train(), text(device, 1, TOKENS)
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        losses = IndexerLoss()
        out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
        losses.added_to(out.loss).backward()
        runs.append([*losses.layers.values(), *(each.grad for each in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_a_compiled_pass_has_the_same_bits(device: str) -> None:
    """In several graphs, between which the losses are computed."""
    model, tokens = build("deepseek_v32", device, num_hidden_layers=2), text(device, 1, TOKENS)
    torch.compiler.reset()
    runs = []
    for forward in (model.forward, torch.compile(model.forward, backend="aot_eager")):
        model.zero_grad()
        losses = IndexerLoss()
        out = forward(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
        losses.added_to(out.loss).backward()
        runs.append([*losses.layers.values(), *(each.grad for each in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_evaluation_has_the_loss_without_gradients(device: str) -> None:
    model, tokens = build("deepseek_v32", device), text(device, 1, TOKENS)
    totals = []
    for grads in (True, False):
        losses = IndexerLoss()
        with torch.set_grad_enabled(grads):
            out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
        totals.append(losses.added_to(out.loss))
    assert torch.equal(*totals) and not totals[1].requires_grad


def test_what_has_no_loss_is_refused(device: str) -> None:
    model, tokens = build("deepseek_v32", device), text(device, 1, 8)
    with pytest.raises(ArgumentError, match=r"indexer_loss: is bool, expected IndexerLoss"):
        model(tokens, use_cache=False, indexer_loss=True)
    losses = IndexerLoss()
    with pytest.raises(ArgumentError, match="no layer has a loss, expected after model"):
        losses.added_to(attending(model, "eager")(tokens, labels=tokens, indexer_loss=losses).loss)
    attending(model)
    out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
    with pytest.raises(ArgumentError, match="given to two passes, expected a new IndexerLoss for each"):
        model(tokens, use_cache=False, indexer_loss=losses)
    with pytest.raises(ArgumentError, match=r"loss has shape \(1, 8, 64\), expected one number"):
        losses.added_to(out.logits)
    with pytest.raises(
        ArgumentError, match=r"loss is NoneType, expected torch\.Tensor, which model\(…, labels=…\) gives"
    ):
        losses.added_to(attending(model)(tokens, use_cache=False).loss)
    with pytest.raises(ArgumentError, match=r"IndexerLoss\.added_to: coeff type is str, expected float"):
        losses.added_to(out.loss, "1")
    with pytest.raises(ArgumentError, match="IndexerLoss: dense type is str, expected bool"):
        IndexerLoss("dense")
    with pytest.raises(ArgumentError, match=r"the backward pass is of another loss than IndexerLoss\.added_to gives"):
        out.loss.backward(retain_graph=True)
    losses.added_to(out.loss)
    with pytest.raises(ArgumentError, match="called twice, expected a new IndexerLoss for each pass"):
        losses.added_to(out.loss)
    for cache in (DynamicCache(config=model.config), LatentCache(model.config)):
        with torch.no_grad():
            model(tokens, cache=cache)
        named = f"4 tokens have 12 keys of a {type(cache).__name__}, supported: their own; pass use_cache=False"
        with pytest.raises(UnsupportedError, match=named), torch.no_grad():
            model(tokens[:, :4], cache=cache, indexer_loss=IndexerLoss())
    with pytest.raises(UnsupportedError, match="8 tokens have 8 keys of a LatentCache"), torch.no_grad():
        model(tokens, cache=LatentCache(model.config), indexer_loss=IndexerLoss())
    first_layer(model).num_heads = 8
    with pytest.raises(UnsupportedError, match=r"indexer_loss: this rank has 4 of 8 heads, supported: all"):
        model(tokens, use_cache=False, indexer_loss=IndexerLoss())


class Adapted(torch.nn.Module):
    """A linear map with a low-rank addition, and its weight as adapters have it: that of the map alone."""

    def __init__(self, base: torch.nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.weight, self.dropout = base, base.weight, torch.nn.Dropout(dropout)
        self.down, self.up = (
            torch.nn.Parameter(torch.randn(size, dtype=base.weight.dtype, device=base.weight.device) * 0.05)
            for size in ((4, base.in_features), (base.out_features, 4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.dropout(x) @ self.down.T @ self.up.T


def adapt(model: Any, how: str) -> None:
    if how == "peft":
        peft = pytest.importorskip("peft") if HAS_GPU else importlib.import_module("peft")
        names = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))
        return
    for each in attentions(model):
        if how == "adapter":
            each.kv_b_proj = Adapted(each.kv_b_proj)
        else:
            each.kv_b_proj.register_forward_hook(lambda module, x, result: 1.5 * result)


@pytest.mark.parametrize("how", ["adapter", "hook", "peft"])
def test_what_is_added_to_the_up_projection_counts(how: str, device: str) -> None:
    """Its weight is not read past an adapter: gradients are as near to float32 as eager attention's."""
    model, tokens = build("deepseek_v32", device, index_topk=64), text(device, 2, 14)
    adapt(model, how)
    exact, eager = (attending(copy.deepcopy(model).to(dtype), "eager") for dtype in (torch.float32, torch.bfloat16))
    losses = [float(loss_of(each, tokens)) for each in (attending(model), exact, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    for (name, ours), theirs, others in zip(
        model.named_parameters(), exact.parameters(), eager.parameters(), strict=True
    ):
        if theirs.grad is not None:
            everything = torch.ones_like(theirs).bool()
            errors = [distance(each.grad.float(), theirs.grad, everything) for each in (ours, others)]
            assert errors[0] < 1.5 * errors[1] + 0.02, name


def quantized(linear: torch.nn.Linear) -> FP8Linear:
    """transformers' own layer of a checkpoint in fp8, with a scale for each 128 by 128 weights."""
    layer = FP8Linear(linear.in_features, linear.out_features, block_size=(128, 128)).to(linear.weight.device)
    blocks = linear.weight.detach().float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    layer.weight.data = (blocks / scales).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = scales[:, 0, :, 0]
    return layer


def test_a_quantised_up_projection_is_scaled(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where published checkpoints are in fp8; the product by transformers' kernel, which it downloads, is torch's."""

    def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: Any, *_: Any) -> torch.Tensor:
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return (x.float() @ (weight.float() * spread).T).to(x.dtype)

    monkeypatch.setattr("transformers.integrations.finegrained_fp8.fp8_linear", product)
    model, tokens = build("deepseek_v32", device, index_topk=64), text(device, 2, 14)
    for each in attentions(model):
        each.kv_b_proj = quantized(each.kv_b_proj)
    with torch.no_grad():
        eager = attending(model, "eager")(tokens).logits.float()
        ours = attending(model)(tokens).logits.float()
    assert distance(ours, eager, torch.ones_like(eager).bool()) < 0.05


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def test_dropout_of_an_adapter_on_the_up_projection_is_refused(device: str) -> None:
    model = build("deepseek_v32", device)
    first_layer(model).kv_b_proj = Adapted(first_layer(model).kv_b_proj, 0.1)
    model.eval()(text(device, 1, 8))
    with pytest.raises(UnsupportedError, match=r"kv_b_proj has an adapter's dropout of 0\.1, supported: 0"):
        model.train()(text(device, 1, 8))


@pytest.mark.parametrize("kind", KEYED)
def test_autocast_of_a_model_in_float32(kind: str, device: str) -> None:
    """Losses and gradients are as near to float32 as eager attention's under autocast."""
    model, tokens = build(kind, device, index_topk=64).float(), text(device, 2, 14)
    exact, eager = (attending(copy.deepcopy(model), "eager") for _ in range(2))
    losses = IndexerLoss()
    with torch.autocast(device, torch.bfloat16):
        out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
        loss_of(eager, tokens)
    losses.added_to(out.loss).backward()
    assert float(out.loss.detach()) == pytest.approx(float(loss_of(exact, tokens)), rel=0.01)
    assert_as_near(model, exact, eager)
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is None and ".indexer." in name:
            assert ours.grad.any(), name
