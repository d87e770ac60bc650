"""GLM-5.3-Flash of transformers by xmla: selections, caches, gradients and refusals beside its own eager attention."""

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import require_transformers

require_transformers()

from small_transformers import TOKENS, assert_as_near, attending, build, distance, first_layer, padded, text

from xmla.core.errors import UnsupportedError
from xmla.transformers import IndexerLoss, LatentCache

# transformers warns of its own deprecations, and of slow code of layers that are not xmla's.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

KIND = "glm5_next_text"
PARTS = (3, 2, 5, 1, 1, 1, 1, 6, 1, 4)  # of a text: within a pool, across some, and token by token
MOST = 48


def logits(model: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **given).logits.float()


def masked(tokens: torch.Tensor, how: str) -> torch.Tensor:
    mask = padded(tokens, how).get("attention_mask", torch.ones_like(tokens))
    if how == "between":
        mask[0, 11:14] = 0
        mask[1, 21] = 0
    return mask


@pytest.mark.parametrize("how", ["none", "left", "right", "between"])
@pytest.mark.parametrize("pool", [4, 3])
def test_selected_tokens_are_those_of_transformers(pool: int, how: str, device: str) -> None:
    """In the first layer, where both have the same hidden states; none twice. The others are left out."""
    model, tokens = build(KIND, device, index_kpool=pool, index_topk=4 * pool), text(device)
    del model.get_decoder().layers[1:]
    mask, found = masked(tokens, how), []
    first_layer(model).indexer.register_forward_hook(lambda module, args, result: found.append(result))
    for name in ("eager", "xmla"):
        logits(attending(model, name), tokens, attention_mask=mask)
    chosen = torch.zeros(2, 2, TOKENS, TOKENS + 1, dtype=torch.int32, device=device)
    for each, indices in zip(chosen, found, strict=True):
        each.scatter_add_(2, indices.where(indices >= 0, TOKENS).long(), torch.ones_like(indices))
    eager, ours = chosen[..., :TOKENS]
    assert ours.max() == 1
    assert ((eager > 0) == (ours > 0)).float().mean() > 0.99, (
        "but for ties: scores of heads that are all negative are 0"
    )


@pytest.mark.parametrize("cache", ["own", "latents", "static"])
@pytest.mark.parametrize("how", ["none", "left", "between"])
def test_steps_over_a_cache(how: str, cache: str, device: str) -> None:
    """Logits of each are as near to float32 as eager ones."""
    model, tokens = build(KIND, device, index_topk=64), text(device)
    mask = masked(tokens, how)
    models = [attending(copy.deepcopy(model).float(), "eager"), attending(copy.deepcopy(model), "eager"), model]
    found = []
    for each in models:
        if cache == "latents" and each is model:
            kept: Any = LatentCache(each.config)
        elif cache == "static":
            kept = transformers.StaticCache(config=each.config, max_cache_len=MOST)
        else:
            kept = transformers.DynamicCache(config=each.config)
        first, steps = 0, []
        for count in PARTS:
            part = slice(first, first + count)
            steps.append(logits(each, tokens[:, part], attention_mask=mask[:, : part.stop], cache=kept))
            first = part.stop
        assert first == TOKENS
        found.append(torch.cat(steps, 1))
    exact, eager, ours = found
    assert distance(ours, exact, mask.bool()) < 1.2 * distance(eager, exact, mask.bool())


@pytest.mark.parametrize("cache", ["own", "latents"])
def test_generated_tokens_are_those_of_a_pass_without_a_cache(cache: str, device: str) -> None:
    """Where the two best of a step are not within rounding of each other."""
    model, prompt = build(KIND, device), text(device, tokens=21)
    mask = masked(prompt, "left")
    given = {"cache": LatentCache(model.config)} if cache == "latents" else {}
    found = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, **given)
    mask = torch.cat([mask, torch.ones_like(found[:, 21:])], 1)
    best = logits(model, found, attention_mask=mask)[:, 20:-1].topk(2)
    tied = best.values[..., 0] - best.values[..., 1] < 0.1
    same = best.indices[..., 0] == found[:, 21:]
    assert (same | tied).all() and same.float().mean() > 0.7


def test_a_compiled_step_of_a_static_cache(device: str) -> None:
    """One graph for all steps, which has the bits of the calls that it is of."""
    model, tokens = build(KIND, device), text(device, tokens=22)
    runs = []
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for step in (model.forward, torch.compile(model.forward, fullgraph=True, backend="aot_eager")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=MOST)
        found = [logits(model, tokens[:, :19], cache=cache)]
        for place in range(19, 22):
            with torch.no_grad():
                found.append(step(tokens[:, place : place + 1], cache=cache).logits.float())
        runs.append(torch.cat(found, 1))
    assert torch.equal(*runs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_eager_attention(autocast: bool, device: str) -> None:
    """As near to those in float32, also of a model in float32 under autocast. All pools are selected."""
    model, tokens = build(KIND, device, index_topk=64), text(device, 2, 26)
    exact = attending(copy.deepcopy(model).float(), "eager")
    if autocast:
        model = model.float()
    eager = attending(copy.deepcopy(model), "eager")
    for each in (model, exact, eager):
        with torch.autocast(device, torch.bfloat16, enabled=autocast and each is not exact):
            loss = each(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is None:
            assert (".indexer." in name or ".visual." in name) and ours.grad is None, name
    assert_as_near(model, exact, eager, ".self_attn.")


def test_what_is_not_served_is_refused(device: str) -> None:
    model, tokens = build(KIND, device), text(device, 1, 8)
    named = "indexer_loss: a LatentCache is given, supported: none; pass use_cache=False"
    with pytest.raises(UnsupportedError, match=named), torch.no_grad():
        model(tokens, cache=LatentCache(model.config), indexer_loss=IndexerLoss())
    with pytest.raises(
        UnsupportedError, match="LatentCache: the indexer's keys are pooled by gates, those of fp8 have"
    ):
        LatentCache(model.config, indexer_keys="fp8")
    with pytest.raises(UnsupportedError, match="latents of 512 and 0 dims, entries of fp8 have 512 and 64"):
        LatentCache(model.config, "fp8")
    with pytest.raises(UnsupportedError, match=r"the model is torch\.float32, supported are bfloat16"):
        logits(copy.deepcopy(model).float(), tokens)
    with pytest.raises(UnsupportedError, match=r"LatentCache: the model attends by 'eager', supported: 'xmla'"):
        logits(attending(model, "eager"), tokens, cache=LatentCache(model.config))
