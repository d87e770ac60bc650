"""`attn_implementation="xmla"` of transformers: each served model beside its own eager attention, caches, refusals."""

import copy
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from conftest import require_transformers

require_transformers()

from small_transformers import (
    DOCUMENT,
    HOW,
    KEYED,
    LAYERS,
    TOKENS,
    attending,
    build,
    distance,
    first_layer,
    padded,
    pairs,
    text,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, MiniMaxM3VLTextConfig

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.transformers import SERVED, LatentCache, Selections, attention, models, passes
from xmla.transformers.selection import quantized

# transformers warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

# Of a config with an indexer: selected blocks of grouped-query attention, no indices given to attention, other latents.
REFUSED = (
    "minimax_m3_vl_text", "qwen4_exp_text", "axk2", "dots3_note_text", "hy_v4_vl_text",
)  # fmt: skip


def logits(model: Any, implementation: str, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return attending(model, implementation)(tokens, **given).logits.float()


@pytest.mark.parametrize(("kind", "how"), pairs(SERVED, HOW))
def test_logits_are_as_near_to_float32_as_eager_ones(kind: str, how: str, device: str) -> None:
    """All keys are selected: behind a rounding that selects another key the two would go apart."""
    model = build(kind, device, index_topk=64)
    tokens = text(device)
    given = padded(tokens, how)
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()
    exact = logits(copy.deepcopy(model).float(), "eager", tokens, **given)
    eager, ours = (logits(model, name, tokens, **given) for name in ("eager", "xmla"))
    assert ours.isfinite().all()
    assert distance(ours, exact, real) < 1.2 * distance(eager, exact, real)


@pytest.mark.parametrize(("kind", "how"), pairs(KEYED, HOW))
def test_selected_keys_are_those_of_transformers(kind: str, how: str, device: str) -> None:
    """In the first layer, where both have the same hidden states; the others are left out."""
    model, tokens = build(kind, device), text(device)
    del model.get_decoder().layers[1:]
    given = padded(tokens, how)
    found: list[torch.Tensor] = []
    first_layer(model).indexer.register_forward_hook(lambda module, args, result: found.append(result))
    for name in ("eager", "xmla"):
        logits(model, name, tokens, **given)
    theirs, ours = found
    length = torch.arange(TOKENS, device=device)
    starts = length.new_zeros(2, TOKENS)
    if how == "packed":
        starts[:, DOCUMENT:] = DOCUMENT
    seen = (length <= length[:, None]) & (length >= starts[..., None])
    if "attention_mask" in given:
        seen &= given["attention_mask"][:, None].bool()
    chosen = [torch.zeros(2, TOKENS, TOKENS + 1, dtype=torch.bool, device=device) for _ in range(2)]
    for each, indices in zip(chosen, (theirs, ours), strict=True):
        each.scatter_(2, torch.where(indices < 0, TOKENS, indices).long(), True)
    eager, ours = (each[..., :TOKENS] for each in chosen)
    assert not (ours & ~seen).any(), "a key that the query must not see"
    assert (ours.sum(-1) == seen.sum(-1).clamp(max=8)).all()
    assert ((eager & seen) == ours).float().mean() > 0.995, "but for ties: scores of heads that are all negative are 0"


WITHOUT_ROTATED_KEYS = "mistral_large4_text", "fp8"  # refused: `test_entries_of_fp8_have_rotated_keys`
CACHES = [pair for pair in pairs(KEYED, ["own", "latents", "fp8", "static"]) if pair != WITHOUT_ROTATED_KEYS]


@pytest.mark.parametrize(("kind", "cache"), CACHES)
def test_generated_tokens_are_those_of_a_pass_without_a_cache(kind: str, cache: str, device: str) -> None:
    """Where the two best of a step are not within rounding of each other."""
    model, prompt = build(kind, device), text(device, tokens=21)
    given = padded(prompt, "left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    elif cache != "own":
        options["cache"] = LatentCache(model.config, "fp8" if cache == "fp8" else None)
    found = model.generate(prompt, **given, **options)
    new = torch.ones_like(found[:, 21:])
    mask = torch.cat([given["attention_mask"], new], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    best = logits(model, "xmla", found, attention_mask=mask, position_ids=positions)[:, 20:-1].topk(2)
    tied = best.values[..., 0] - best.values[..., 1] < (0.5 if cache == "fp8" else 0.1)
    same = best.indices[..., 0] == found[:, 21:]
    assert (same | tied).all() and same.float().mean() > 0.7


def test_entries_of_fp8_have_rotated_keys(device: str) -> None:
    with pytest.raises(UnsupportedError, match="layers without rotated keys, entries of fp8 have them"):
        LatentCache(build("mistral_large4_text", device).config, "fp8")


def test_beams_and_drafts_of_another_model(device: str) -> None:
    """Caches are reordered, repeated and cropped: tokens as with transformers' own cache."""
    model, prompt = build("deepseek_v32", device), text(device, 1, 21)
    for options in ({"num_beams": 3}, {"assistant_model": build("glm_moe_dsa", device)}):
        made = [
            model.generate(prompt, max_new_tokens=6, do_sample=False, cache=cache, **options)
            for cache in (None, LatentCache(model.config))
        ]
        assert torch.equal(*made)


@pytest.mark.parametrize(("kind", "how"), pairs(KEYED, ["none", "left"]))
def test_indexer_keys_in_fp8(kind: str, how: str, device: str) -> None:
    """Bytes and scales are those of the model's own keys after any change, and most keys are selected as from these."""
    model, tokens = build(kind, device, index_topk=16), text(device, tokens=33)
    mask = padded(tokens, how).get("attention_mask", torch.ones_like(tokens))
    caches = [transformers.DynamicCache(config=model.config), LatentCache(model.config, indexer_keys="fp8")]
    selected: list[torch.Tensor] = []
    first_layer(model).indexer.register_forward_hook(lambda module, args, result: selected.append(result))
    changes = (
        lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=device)),
        lambda cache: cache.crop(-3),
        lambda cache: cache.batch_repeat_interleave(2),
    )
    both = [tokens, mask]
    for first, last, change in ((0, 30, changes[0]), (30, 31, changes[1]), (28, 32, changes[2]), (32, 33, None)):
        positions = (both[1].cumsum(1) - 1).clamp(min=0)[:, first:last]
        for cache in caches:
            logits(
                model, "xmla", both[0][:, first:last], attention_mask=both[1][:, :last], position_ids=positions,
                cache=cache,
            )  # fmt: skip
        own, ours = (cache.layers[0] for cache in caches)
        values, scales = quantized(own.indexer_keys)
        assert torch.equal(ours.indexer_keys, values) and torch.equal(ours.scales.written()[..., 0], scales)
        theirs, chosen = (torch.zeros(len(both[0]), last - first, last + 1, device=device) for _ in range(2))
        for each, indices in zip((theirs, chosen), selected[-2:], strict=True):
            each.scatter_(2, indices.where(indices >= 0, last).long(), 1)
        seen = theirs[..., :-1].sum(-1)
        assert torch.equal(chosen[..., :-1].sum(-1), seen)
        assert (theirs * chosen)[..., :-1].sum() > 0.9 * seen.sum()
        if change is not None:
            for cache in caches:
                change(cache)
            order = {0: [1, 0], 28: [0, 0, 1, 1]}.get(first)
            both = both if order is None else [each[order] for each in both]


def test_a_cache_that_changes_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own, after every change that it can be asked for."""
    monkeypatch.setattr("xmla.transformers.cache.LEAST", 32)
    model, tokens = build("deepseek_v32", device), text(device, 3, 80)  # beyond its first array
    caches = [transformers.DynamicCache(config=model.config), LatentCache(model.config)]

    def both(part: torch.Tensor) -> list[torch.Tensor]:
        return [logits(model, "xmla", part, cache=cache) for cache in caches]

    changes = (
        lambda cache: None,
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1], device=device)),
        lambda cache: cache.crop(-7),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 2], device=device)),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reset(),
    )
    both(tokens[:, :30])
    for place, change in enumerate(changes):
        for cache in caches:
            change(cache)
        rows = 2 if place == 3 else 3
        part = tokens[:1].expand(4 if place == 4 else rows, -1)[:, 30 + 4 * place :][:, :4]
        want, got = both(part)
        assert torch.equal(want, got), place
        assert caches[0].get_seq_length() == caches[1].get_seq_length()


PARTS = (
    ("model", "none", False), ("model", "left", True), ("model", "right", False), ("layers", "none", True),
    ("layers", "left", False), ("model", "packed", False),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "of", "how", "cache"), [(kind, *way) for kind, way in pairs(SERVED, PARTS)])
def test_a_prefill_in_parts(
    kind: str, of: str, how: str, cache: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of all queries at once, but for rounding in products of other sizes.

    A hook sees its layer's whole pass, of which attention has parts then; so it is where positions begin again.
    """
    model, tokens = build(kind, device, index_topk=64), text(device)
    given = padded(tokens, how)
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()
    at_once = logits(model, "xmla", tokens, **given)
    seen: list[int] = []
    layer = next(module for module in model.modules() if getattr(module, "self_attn", None) is first_layer(model))
    if of == "layers":
        layer.register_forward_hook(lambda module, args, result: seen.append(args[0].shape[1]))
    else:
        norm = type(layer.input_layernorm)
        own = norm.forward
        monkeypatch.setattr(norm, "forward", lambda self, x: (seen.append(x.shape[1]), own(self, x))[1])
    monkeypatch.setattr(passes, "AT_ONCE", 7)
    monkeypatch.setattr(attention, "ABSORBED", 6)
    in_parts = logits(model, "xmla", tokens, **{"use_cache": cache} | given)
    assert distance(in_parts, at_once, real) < 0.01
    assert max(seen) == (TOKENS if of == "layers" or how == "packed" else 7)


@pytest.mark.parametrize("kind", SERVED)
def test_parts_of_a_pass_go_on_behind_a_cache(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With positions, embedded tokens, a tuple asked for; what is recorded is of the whole pass."""
    model, tokens = build(kind, device, index_topk=64), text(device)
    mask = padded(tokens, "left")["attention_mask"]
    want = logits(model, "xmla", tokens, attention_mask=mask)
    monkeypatch.setattr(passes, "AT_ONCE", 7)
    with torch.no_grad():
        cache = model(tokens[:, :12], attention_mask=mask[:, :12]).cache
        places = torch.arange(12, TOKENS, device=device)[None].expand(2, -1)
        given: dict[str, Any] = {"input_ids": tokens[:, 12:]}
        if kind != "deepseek_v4":  # whose experts are chosen by tokens
            given = {"inputs_embeds": model.get_input_embeddings()(tokens[:, 12:])}
        result = model(**given, attention_mask=mask, position_ids=places, cache=cache, return_dict=False)
        recorded = model(tokens, attention_mask=mask, output_hidden_states=True)
        again = logits(model, "xmla", tokens, attention_mask=mask)
    assert isinstance(result, tuple) and result[1] is cache and cache.get_seq_length() == TOKENS
    assert distance(result[0].float(), want[:, 12:], mask[:, 12:].bool()) < 0.01
    assert {each.shape[1] for each in recorded.hidden_states} == {TOKENS}
    assert distance(again, want, mask.bool()) < 0.01
    assert model(tokens, use_cache=False).cache is None


class Largest(TorchDispatchMode):
    """The most elements of a result."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self.most = max(self.most, leaf.untyped_storage().nbytes() // leaf.element_size())
        return results


class Live(TorchDispatchMode):
    """The most bytes at once of what a pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage()) not in self.known:
                self.known.add(storage)
                size = storage.nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, size)
        return results

    def free(self, size: int) -> None:
        self.now -= size


def test_a_long_pass_holds_its_result_and_its_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many tokens take twice their results and rows more, of which growing takes another half."""
    model, most = build("deepseek_v32", device), []
    monkeypatch.setattr(passes, "AT_ONCE", 32)
    for count in (128, 256):
        tokens, cache = text(device, 1, count), LatentCache(model.config)
        with torch.no_grad(), Live() as live:
            model(tokens, cache=cache, logits_to_keep=1)
        most.append(live.most)
    rows = LAYERS * (576 + 128) * 2
    assert most[1] - most[0] < 128 * (64 * 2 + 3 * rows)


def test_nothing_of_all_heads_by_keys_is_made(device: str) -> None:
    model, tokens = build("deepseek_v32", device), text(device, 1, 200)
    with Largest() as by_xmla:
        logits(model, "xmla", tokens)
    with Largest() as eager:
        logits(model, "eager", tokens)
    assert by_xmla.most <= 200 * 4 * 576 and eager.most >= 200 * 200 * 4  # queries of each head; scores of each


def test_gradients_are_those_of_eager_attention(device: str) -> None:
    """All tokens are selected, so that no rounding selects others."""
    model, tokens = build("deepseek_v32", device, index_topk=64), text(device, 2, 14)
    exact = copy.deepcopy(model).float()
    for each, name in ((exact, "eager"), (model, "xmla")):
        each.set_attn_implementation(name)
        each(tokens, labels=tokens, use_cache=False).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is None:
            assert "indexer" in name and ours.grad is None
        else:
            assert distance(ours.grad.float(), theirs.grad, torch.ones_like(theirs).bool()) < 0.05, name


def test_models_with_an_indexer_are_served_or_refused_by_name() -> None:
    """A new release's that is in neither list fails here."""
    found = {
        kind
        for kind, config in transformers.CONFIG_MAPPING.items()
        if any(field.name.startswith(("index_", "indexer_")) for field in fields(config))
    } - {"rag"}
    assert found == {*SERVED, *REFUSED}


@pytest.mark.parametrize("config", [LlamaConfig, MiniMaxM3VLTextConfig])
def test_other_models_are_refused_by_name(config: type) -> None:
    named = f"model_type is {config.model_type}, supported: deepseek_v32, "
    with pytest.raises(UnsupportedError, match=named):
        models.mask(1, 4, 4, config=config())


@pytest.mark.parametrize("kind", SERVED)
def test_probabilities_are_refused(kind: str, device: str) -> None:
    """Before any launch; without them the tuple of layers was empty."""
    model, tokens = build(kind, device), text(device, 1, 8)
    message = "output_attentions is True, supported: False; attention's probabilities are not made, attn_impl"
    with pytest.raises(UnsupportedError, match=message):
        logits(model, "xmla", tokens, output_attentions=True)
    with pytest.raises(UnsupportedError, match=message):
        model.generate(tokens, max_new_tokens=2, return_dict_in_generate=True, output_attentions=True)


@pytest.mark.parametrize("kind", SERVED)
def test_weights_that_hooks_bring(kind: str, device: str) -> None:
    """accelerate keeps them elsewhere, and the modules have none of their own before they are called."""
    accelerate = pytest.importorskip("accelerate")
    model, tokens = build(kind, device), text(device, 1, 21)
    own, eager = (logits(model, by, tokens) for by in ("xmla", "eager"))
    brought = logits(accelerate.cpu_offload(model, execution_device=torch.device(device)), "xmla", tokens)
    every = torch.ones_like(own).bool()
    # PyTorch may round products otherwise where weights lie elsewhere, and that is less than what eager's roundings do.
    assert distance(brought, own, every) < distance(own, eager, every) / 2


def test_an_exported_pass(device: str) -> None:
    """With a mask of tokens it has the bits of the model; without one the positions of packed texts are looked at."""
    model, tokens = build("deepseek_v32", device, num_hidden_layers=1), text(device)
    given = {"input_ids": tokens, "use_cache": False}
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"torch\.export of a mask whose values are looked at, supp"):
            torch.export.export(model, (), given, strict=False)
        given |= padded(tokens, "left")
        exported = torch.export.export(model, (), given, strict=False).module()(**given)
        assert torch.equal(exported.logits, model(**given).logits)


def test_what_is_not_served_is_refused(device: str) -> None:
    model, tokens = build("deepseek_v32", device), text(device, 1, 8)
    with pytest.raises(UnsupportedError, match=r"attention_mask is torch\.float32 of shape \(1, 8, 8\)"):
        logits(model, "xmla", tokens, attention_mask=torch.zeros(1, 1, 8, 8, device=device))
    for given in (tokens, text(device, 1, 20)):  # with more keys than are selected, the indexer comes first
        with pytest.raises(UnsupportedError, match=r"the model is torch\.float32, supported are bfloat16"):
            logits(copy.deepcopy(model).float(), "xmla", given)
    for cache in (LatentCache(model.config), LatentCache(model.config, "fp8", "fp8")):
        logits(model, "xmla", tokens.expand(3, -1), cache=cache)
        with pytest.raises(ArgumentError, match="LatentCache: got 1 sequences, expected 3, as before"):
            logits(model, "xmla", tokens[:, :1], cache=cache)
        with pytest.raises(UnsupportedError, match="LatentCache: the model attends by 'eager', supported: 'xmla'"):
            logits(model, "eager", tokens[:, :1].expand(3, -1), cache=cache)
    attending(model)
    first_layer(model).attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"attention_dropout is 0\.1, supported: 0"):
        model.train()(tokens)
    model.eval()
    with pytest.raises(UnsupportedError, match="a gradient is recorded, which it has none of"):
        model(tokens, cache=LatentCache(model.config))
    with pytest.raises(ArgumentError, match="entries is 'fp4', expected None or 'fp8'"):
        LatentCache(model.config, "fp4")
    with pytest.raises(ArgumentError, match="indexer_keys is 'fp4', expected None or 'fp8'"):
        LatentCache(model.config, indexer_keys="fp4")
    for owner, make in (("LatentCache", LatentCache), ("Selections", lambda config: Selections(config, {}))):
        for other in (model, None, {}):
            with pytest.raises(ArgumentError, match=rf"{owner}: config is \w+, expected a model's: model\.config"):
                make(other)
    with pytest.raises(
        UnsupportedError, match="LatentCache: layers of llama cache no latents, supported: DynamicCache"
    ):
        LatentCache(transformers.LlamaConfig())
    model.config.kv_lora_rank = 256
    with pytest.raises(UnsupportedError, match="latents of 256 and 64 dims, entries of fp8 have 512 and 64"):
        LatentCache(model.config, "fp8")
    model.config.index_head_dim = 96
    with pytest.raises(UnsupportedError, match="the indexer's keys have 96 dims, those of fp8 have 32, 64 or 128"):
        LatentCache(model.config, indexer_keys="fp8")


@pytest.mark.parametrize("kind", models.SERVED)
def test_sizes_that_no_op_takes_are_refused_by_their_names(kind: str, device: str) -> None:
    refused = {"index_head_dim": (96, "32 or 64 or 128")}
    refused |= {"head_dim": (256, "512")} if kind == models.ENTRIES else {"kv_lora_rank": (256, "512")}
    refused |= {"qk_rope_head_dim": (32, "64")} if kind in KEYED else {}
    for name, (value, supported) in refused.items():
        model = build(kind, device, **{name: value})
        message = f"xmla.transformers: {name} is {value}, supported: {supported}$"
        with pytest.raises(UnsupportedError, match=message), torch.no_grad():
            model(text(device, tokens=3))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.floors if kind == "deepseek_v32" else ()) for kind in KEYED]
)
def test_a_compiled_step_of_a_static_cache(kind: str, device: str) -> None:
    """One graph for all steps, which has the bits of the calls that it is of."""
    model, tokens, most = build(kind, device), text(device, tokens=22), 32
    mask = torch.ones(2, most, dtype=torch.long, device=device)
    mask[0, :9] = 0
    runs = []
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for step in (model.forward, torch.compile(model.forward, fullgraph=True, backend="aot_eager")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=most)
        found = [logits(model, "xmla", tokens[:, :19], attention_mask=mask, cache=cache)]
        for place in range(19, 22):
            with torch.no_grad():
                found.append(step(tokens[:, place : place + 1], attention_mask=mask, cache=cache).logits.float())
        runs.append(torch.cat(found, 1))
    assert torch.equal(*runs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
