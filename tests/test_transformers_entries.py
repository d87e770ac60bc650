"""DeepSeek-V4 of transformers by xmla: selections, caches, gradients and refusals beside its own eager attention."""

import copy
from typing import Any

import pytest
import torch
from conftest import require_transformers

require_transformers()

from small_transformers import TOKENS, assert_as_near, attending, build, distance, first_layer, padded, text
from transformers import DynamicCache

from xmla.core.errors import UnsupportedError
from xmla.transformers import IndexerLoss, LatentCache, passes

# transformers warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

KIND, TOP = "deepseek_v4", 4
PARTS = (3, 2, 4, 1, 1, 1, 1, 1, 2, 1, 8)  # of a text: within a group of tokens, across some, and one by one


def logits(model: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **given).logits.float()


@pytest.mark.parametrize("how", ["none", "left", "right"])
def test_selected_entries_are_those_of_transformers(how: str, device: str) -> None:
    """In the first layer, where both have the same hidden states; the others are left out."""
    model, tokens = build(KIND, device), text(device)
    del model.get_decoder().layers[1:]
    given = padded(tokens, how)
    found: list[torch.Tensor] = []
    first_layer(model).compressor.indexer.register_forward_hook(lambda module, args, result: found.append(result))
    for name in ("eager", "xmla"):
        logits(attending(model, name), tokens, **given)
    entries = TOKENS // 4
    chosen = torch.zeros(2, 2, TOKENS, entries + 1, dtype=torch.bool, device=device)
    for each, indices in zip(chosen, found, strict=True):
        each.scatter_(2, indices.where(indices >= 0, entries).long(), True)
    eager, ours = chosen[..., :entries]
    complete = (torch.arange(TOKENS, device=device) + 1) // 4
    assert (ours.sum(-1) == complete.clamp(max=TOP)).all()
    assert not ours[:, torch.arange(entries, device=device) >= complete[:, None]].any()
    assert (eager == ours).float().mean() > 0.99, "but for ties: scores of heads that are all negative are 0"


@pytest.mark.parametrize("how", ["none", "left", "right"])
def test_steps_over_a_cache(how: str, device: str) -> None:
    """Logits of each are as near to float32 as eager ones, beside a cache whose sequences change places."""
    model, tokens = build(KIND, device, index_topk=64), text(device)
    mask = padded(tokens, how).get("attention_mask", torch.ones_like(tokens))
    if how == "right":  # the last tokens alone, since no token may follow padding
        mask = torch.ones_like(tokens)
        mask[0, -8:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    compared = [attending(copy.deepcopy(model).float(), "eager"), attending(copy.deepcopy(model), "eager"), model]
    caches = [DynamicCache(config=each.config) for each in compared]
    first, found = 0, []
    for count in PARTS:
        part = slice(first, first + count)
        found.append(
            [
                logits(
                    each, tokens[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part],
                    cache=cache,
                )
                for each, cache in zip(compared, caches, strict=True)
            ]
        )  # fmt: skip
        first, order = part.stop, torch.tensor([1, 0], device=device)
        for cache in caches:
            cache.reorder_cache(order)
        tokens, mask, positions = (each[order] for each in (tokens, mask, positions))
        found[-1] = [each if len(found) % 2 else each[order] for each in found[-1]]
    assert first == TOKENS and len(PARTS) % 2
    exact, eager, ours = (torch.cat(each, 1) for each in zip(*found, strict=True))
    real = mask[[1, 0]].bool()
    assert distance(ours, exact, real) < 1.2 * distance(eager, exact, real)


def test_no_part_of_a_prefill_has_one_token(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it would attend to entries of its whole row, and behind padding these are more than by its position."""
    model, tokens = build(KIND, device), text(device)
    mask = padded(tokens, "left")["attention_mask"]
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    at_once = logits(model, tokens, **given)
    monkeypatch.setattr(passes, "AT_ONCE", 8)
    assert TOKENS % 8 == 1
    in_parts = logits(model, tokens, **given)
    assert distance(in_parts[:, -1:], at_once[:, -1:], mask[:, -1:].bool()) < 0.02


@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_are_those_of_a_pass_without_a_cache(beams: int, device: str) -> None:
    """Where the two best of a step are not within rounding of each other; of beams the best is at least as likely."""
    model, prompt = build(KIND, device), text(device, 2, 13)
    found = model.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=beams)
    best = logits(model, found)[:, 12:-1]
    new = found[:, 13:]
    if beams > 1:
        greedy = model.generate(prompt, max_new_tokens=8, do_sample=False)
        likely = [
            logits(model, each).log_softmax(-1)[:, 12:-1].gather(2, each[:, 13:, None]).sum((1, 2))
            for each in (found, greedy)
        ]
        assert (likely[0] > likely[1] - 0.1).all()
        return
    values, indices = best.topk(2)
    tied = values[..., 0] - values[..., 1] < 0.1
    same = indices[..., 0] == new
    assert (same | tied).all() and same.float().mean() > 0.7


@pytest.mark.parametrize("count", [26, 6])  # of 6 tokens one compressor makes no entry
def test_gradients_are_those_of_eager_attention(count: int, device: str) -> None:
    """As near to those in float32: of projections, compressors, norms and sinks. All entries are selected."""
    model, tokens = build(KIND, device, index_topk=64), text(device, 2, count)
    exact, eager = (attending(copy.deepcopy(model).to(dtype), "eager") for dtype in (torch.float32, torch.bfloat16))
    for each in (model, exact, eager):
        each(tokens, labels=tokens, use_cache=False).loss.backward()
    for (name, ours), theirs, others in zip(
        model.named_parameters(), exact.parameters(), eager.parameters(), strict=True
    ):
        if theirs.grad is None:
            assert ours.grad is None, name
        elif ".self_attn." in name:
            everything = torch.ones_like(theirs).bool()
            errors = [distance(each.grad.float(), theirs.grad, everything) for each in (ours, others)]
            assert errors[0] < 1.2 * errors[1] + 0.02, name


def test_checkpointing_has_the_same_bits(device: str) -> None:
    model, tokens = build(KIND, device).train(), text(device, 1, 26)
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        runs.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_autocast_of_a_model_in_float32(device: str) -> None:
    """Gradients are as near to float32 as eager attention's under autocast."""
    model, tokens = build(KIND, device, index_topk=64).float(), text(device, 2, 14)
    exact, eager = (attending(copy.deepcopy(model), "eager") for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        losses = [each(tokens, labels=tokens, use_cache=False).loss for each in (model, eager)]
    for loss in (*losses, exact(tokens, labels=tokens, use_cache=False).loss):
        loss.backward()
    assert_as_near(model, exact, eager)


def test_what_is_not_served_is_refused(device: str) -> None:
    model, tokens = build(KIND, device), text(device, 1, 8)
    with pytest.raises(UnsupportedError, match="LatentCache: layers of deepseek_v4 cache no latents, supported: Dyn"):
        LatentCache(model.config)
    with pytest.raises(UnsupportedError, match="layer 0 of a DynamicCache keeps no compressed entries, supported: Dyn"):
        logits(model, tokens, cache=DynamicCache())
    with pytest.raises(UnsupportedError, match="indexer_loss: a DynamicCache is given, supported: none; pass use_c"):
        model(tokens, cache=DynamicCache(config=model.config), indexer_loss=IndexerLoss())
    with pytest.raises(UnsupportedError, match=r"attention_mask is torch\.float32 of shape \(1, 1, 8, 10\), supported"):
        logits(model, tokens, attention_mask=torch.zeros(1, 1, 8, 8, device=device))
    with pytest.raises(UnsupportedError, match="a query's keys are not one after another"):
        mask = torch.ones_like(tokens)
        mask[0, 3] = 0
        logits(model, tokens, attention_mask=mask)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(UnsupportedError, match=rf"the model is {dtype}, supported are bfloat16 and float16"):
            logits(copy.deepcopy(model).to(dtype), tokens)
    with pytest.raises(UnsupportedError, match=r"head_dim is 128, supported: 512"):
        logits(build(KIND, device, head_dim=128), tokens)
    first_layer(model).attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"attention_dropout is 0\.1, supported: 0"):
        model.train()(tokens)
