"""`Selections` of a rollout in transformers' models: the rollout's keys and bits in one pass, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from conftest import require_transformers

require_transformers()

from small_transformers import DOCUMENT, HOW, KEYED, TOKENS, attending, build, distance, padded, pairs, text

from xmla import torch_api as xt
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.transformers import IndexerLoss, LatentCache, Selections, attention, passes

# transformers warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

TOPK = 8


class Noted:
    """What each indexer of a model selects from now on, as places in the sequence, pass after pass."""

    def __init__(self, model: Any) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        indexers = [each for name, each in model.named_modules() if name.endswith("self_attn.indexer")]
        self.hooks = [each.register_forward_hook(self.note) for each in indexers if each is not None]

    def note(self, indexer: Any, _: Any, result: torch.Tensor) -> None:
        rows = torch.nn.functional.pad(result, (0, TOPK - result.shape[-1]), value=-1)
        self.layers.setdefault(indexer.layer_idx, []).append(rows)

    def drop(self, tokens: int) -> None:
        """Forget the last tokens of the last pass."""
        for rows in self.layers.values():
            rows[-1] = rows[-1][:, :-tokens]

    def taken(self) -> dict[int, torch.Tensor]:
        made = {layer: torch.cat(rows, 1) for layer, rows in self.layers.items()}
        self.layers.clear()
        return made


def config_of(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def counted(layers: dict[int, torch.Tensor], starts: torch.Tensor) -> dict[int, torch.Tensor]:
    """Places of keys, counted from the first key [B, S] that each token sees, as a rollout counts them."""
    return {layer: torch.where(rows < 0, -1, rows - starts[..., None]) for layer, rows in layers.items()}


def first_keys(tokens: torch.Tensor, how: str) -> torch.Tensor:
    starts = torch.zeros_like(tokens, dtype=torch.int32)
    if how == "packed":
        starts[:, DOCUMENT:] = DOCUMENT
    elif how == "left":
        starts[0] = 9
    return starts


def other(rows: torch.Tensor) -> torch.Tensor:
    """A selection of as many keys that no indexer made: of tokens that see more than are selected the last ones."""
    place = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)[:, None]
    column = torch.arange(TOPK, dtype=torch.int32, device=rows.device)
    behind = (place - TOPK + 1).clamp(min=0) + column
    return torch.where(behind <= place, behind, -1).expand_as(rows).contiguous()


@pytest.mark.parametrize(("kind", "how"), pairs(KEYED, HOW))
def test_a_pass_with_its_own_selections_has_its_bits(kind: str, how: str, device: str) -> None:
    """Whatever stands before the first key of a document, also where layers share a selection."""
    model, tokens = build(kind, device), text(device)
    noted, given = Noted(model), {"use_cache": False} | padded(tokens, how)
    with torch.no_grad():
        own = model(tokens, **given).logits
        layers = counted(noted.taken(), first_keys(tokens, how))
        again = model(tokens, selections=Selections(model.config, layers), **given).logits
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()
    assert torch.equal(again[real], own[real])


def test_given_keys_are_attended_to_and_no_others(device: str) -> None:
    """Other keys than the indexers', from the host; indexers are not asked, and their keys are where a loss is."""
    model, tokens = build("glm_moe_dsa", device), text(device)
    noted = Noted(model)
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits
        layers = {layer: other(rows).cpu() for layer, rows in noted.taken().items()}
        replayed = model(tokens, use_cache=False, selections=Selections(model.config, layers)).logits
    used = noted.taken()
    assert used.keys() == layers.keys() and all(torch.equal(used[layer].cpu(), layers[layer]) for layer in layers)
    assert not torch.equal(replayed, own)
    losses = IndexerLoss()
    out = model(
        tokens, labels=tokens, use_cache=False, selections=Selections(model.config, layers), indexer_loss=losses
    )
    losses.added_to(out.loss).backward()
    assert torch.equal(out.logits.detach(), replayed) and losses.layers.keys() == layers.keys()
    assert all(torch.equal(rows.cpu(), layers[layer]) for layer, rows in noted.taken().items())


def test_a_pass_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("deepseek_v32", device), text(device)
    noted, mask = Noted(model), padded(tokens, "left")
    with torch.no_grad():
        model(tokens, use_cache=False, **mask)
        layers = counted(noted.taken(), first_keys(tokens, "left"))
        selections = Selections(model.config, layers)
        monkeypatch.setattr(passes, "AT_ONCE", 7)
        model(tokens, use_cache=False, selections=selections, **mask)
    parts = counted(noted.taken(), first_keys(tokens, "left"))
    assert all(torch.equal(parts[layer], layers[layer]) for layer in layers)


GROUPED = {"deepseek_v4": 4, "glm5_next_text": 4}  # tokens of an entry, of a pool


class NotedGroups(Noted):
    """Entries, or pools, that each indexer of a model selects, counted from the first token that is no padding."""

    def __init__(self, model: Any, kind: str) -> None:
        self.layers, self.pools = {}, kind == "glm5_next_text"
        for name, each in model.named_modules():
            if name.endswith(".indexer"):
                number = int(name.partition("layers.")[2].partition(".")[0])
                each.register_forward_hook(lambda *given, number=number: self.take(number, given[-1]))

    def take(self, number: int, result: torch.Tensor) -> None:
        if self.pools:
            members = result[..., : result.shape[-1] // 4 * 4 : 4]
            first = torch.where(result < 0, TOKENS, result).amin((1, 2), keepdim=True)
            result = torch.where(members < 0, -1, (members - first) // 4)
        rows = torch.nn.functional.pad(result, (0, 4 - result.shape[-1]), value=-1)
        self.layers.setdefault(number, []).append(rows.to(torch.int32))


def newest(rows: torch.Tensor) -> torch.Tensor:
    """A selection of as many groups that no indexer made: of those that a token sees the last ones."""
    complete = (torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)[:, None] + 1) // 4
    column = torch.arange(4, dtype=torch.int32, device=rows.device)
    chosen = (complete - 4).clamp(min=0) + column
    return torch.where(chosen < complete, chosen, -1).expand_as(rows).contiguous()


@pytest.mark.parametrize("how", ["none", "left", "right"])
@pytest.mark.parametrize("kind", GROUPED)
def test_a_pass_with_its_own_groups_has_its_bits(
    kind: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of entries and of pools; also in parts, which a cache joins."""
    model, tokens = build(kind, device), text(device)
    noted, given = NotedGroups(model, kind), {"use_cache": False} | padded(tokens, how)
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()
    with torch.no_grad():
        own = model(tokens, **given).logits
        layers = noted.taken()
        selections = Selections(model.config, layers)
        assert torch.equal(model(tokens, selections=selections, **given).logits[real], own[real])
        noted.taken()
        monkeypatch.setattr(passes, "AT_ONCE", 12)
        parts = model(tokens, selections=selections, **given).logits
    assert all(torch.equal(rows[real], layers[layer][real]) for layer, rows in noted.taken().items())
    assert distance(parts.float(), own.float(), real) < 0.02


@pytest.mark.parametrize("kind", GROUPED)
def test_given_groups_are_attended_to_and_no_others(kind: str, device: str) -> None:
    """Others than the indexers', from the host; indexers learn from them, and are not asked without a loss."""
    model, tokens = build(kind, device), text(device)
    noted = NotedGroups(model, kind)
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits
        layers = {layer: newest(rows).cpu() for layer, rows in noted.taken().items()}
        selections = Selections(model.config, layers)
        replayed = model(tokens, use_cache=False, selections=selections).logits
    assert all(torch.equal(rows.cpu(), layers[layer]) for layer, rows in noted.taken().items())
    assert not torch.equal(replayed, own)
    losses = IndexerLoss()
    out = model(tokens, labels=tokens, use_cache=False, selections=selections, indexer_loss=losses)
    losses.added_to(out.loss).backward()
    assert torch.equal(out.logits.detach(), replayed) and losses.layers.keys() == layers.keys()
    assert all(each.grad.any() for name, each in model.named_parameters() if ".indexer." in name)


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_that_do_not_fit_are_refused(kind: str, device: str) -> None:
    model, tokens = build(kind, device), text(device)
    rows = newest(torch.zeros(2, TOKENS, 4, dtype=torch.int32, device=device))
    with pytest.raises(ArgumentError, match=r"given for layers \[0, 1\], expected \[0\], which select keys"):
        Selections(model.config, {0: rows, 1: rows})
    with pytest.raises(ArgumentError, match=r"layer 0 has shape \(2, 25, 16\), expected \[batch, tokens, 4\]"):
        Selections(model.config, {0: rows.repeat(1, 1, 4)})
    early = rows.clone()
    early[1, 6, 0] = 1  # of tokens 4 to 7
    with pytest.raises(
        ArgumentError, match="token 6 has keys that it does not see: 1 keys up to 1, expected 1 below 1"
    ):
        model(tokens, use_cache=False, selections=Selections(model.config, {0: early}))
    few = rows.clone()
    few[0, 9] = -1
    with pytest.raises(ArgumentError, match="token 9 has another number of keys: 0 keys up to -1, expected 2 below 2"):
        model(tokens, use_cache=False, selections=Selections(model.config, {0: few}))


def exact(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the model that show no order of sums, which on a CPU follows the number of rows."""
    einsum = torch.einsum

    def product(formula: str, *factors: torch.Tensor) -> torch.Tensor:
        return einsum(formula, *(each.double() for each in factors)).to(factors[0].dtype)

    monkeypatch.setattr(torch, "einsum", product)
    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            linear = partial(product, "...i,oi->...o")
            monkeypatch.setattr(each, "forward", lambda x, each=each, linear=linear: linear(x, each.weight))


def test_log_probabilities_are_those_of_the_rollout(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: four layers, a prompt in chunks, tokens alone or drafted, and another batch in the trainer's pass.

    Of the second sequence two drafted tokens are verified at a time, behind which a third is rejected.
    """
    shared = {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2, "mlp_layer_types": ["dense"] * 4}
    model, tokens = build("glm_moe_dsa", device, **shared), text(device)
    exact(model, monkeypatch)
    noted, rollouts, layers = Noted(model), [], []
    with monkeypatch.context() as engine, torch.no_grad():  # a rollout that is to have its bits in any batch
        engine.setattr(attention.xt, "sparse_mla", partial(xt.sparse_mla, batch_invariant=True))
        for sequence, steps in enumerate(((13, 5, *[1] * 7), (5, 3, 3, *[2] * 7))):
            cache, logits, first = LatentCache(model.config), [], 0
            for count in steps:
                fed = tokens[sequence, None, first : first + count]
                rejected = torch.where(fed[:, -1:] == 2, 3, 2)[:, : int(count == 2)]
                logits.append(model(torch.cat([fed, rejected], 1), cache=cache).logits[:, :count])
                if count == 2:
                    cache.crop(-1)
                    noted.drop(1)
                first += count
            rollouts.append(torch.cat(logits, 1))
            layers.append(noted.taken())
    recorded = {layer: torch.cat([each[layer] for each in layers]) for layer in layers[0]}
    selections = Selections(model.config, recorded, batch_invariant=True)
    out = model(tokens, use_cache=False, selections=selections)
    assert all(torch.equal(rows, recorded[layer]) for layer, rows in noted.taken().items())
    trainers, rollouts = (each.detach().float().log_softmax(-1) for each in (out.logits, torch.cat(rollouts)))
    assert torch.equal(trainers, rollouts)
    out.logits.float().log_softmax(-1).sum().backward()
    assert all(each.grad is not None or "indexer" in name for name, each in model.named_parameters())


def test_what_does_not_fit_is_refused_by_name(device: str) -> None:
    model, tokens = build("glm_moe_dsa", device), text(device)
    config = config_of(model)
    rows = other(torch.zeros(2, TOKENS, TOPK, dtype=torch.int32, device=device))
    for layers, told in (
        ({0: rows}, r"given for layers \[0\], expected \[0, 2\], which select keys"),
        ({0: rows, 1: rows, 2: rows}, r"given for layers \[0, 1, 2\], expected \[0, 2\]"),
        ({0: rows, 2: rows.cpu().numpy()}, r"layer 2 is ndarray, expected Tensor"),
        ({0: None, 2: rows}, r"layer 0 is NoneType, expected Tensor"),
        ({0: rows, 2: rows.long()}, r"layer 2 has dtype torch\.int64, expected int32"),
        ({0: rows[..., :7], 2: rows}, r"layer 0 has shape \(2, 25, 7\), expected \[batch, tokens, 8\]"),
        ({0: rows, 2: rows[:1]}, r"layer 2 has \[batch, tokens\] \(1, 25\), expected \(2, 25\)"),
    ):
        with pytest.raises(ArgumentError, match=f"selections: {told}"):
            Selections(model.config, layers)

    def changed(place: tuple[Any, ...], key: int) -> torch.Tensor:
        copy = rows.clone()
        copy[place] = key
        return copy

    ran: list[Any] = []
    model.get_decoder().layers[0].self_attn.q_a_proj.register_forward_hook(lambda *_: ran.append(1))
    for wrong, told in (
        (rows[:, :-1], r"layer 0 has \[batch, tokens\] \(2, 24\), expected \(2, 25\)"),
        (
            changed((1, 5, 5), 6),
            "sequence 1, token 5 has keys that it does not see: 6 keys up to 6, expected 6 below 6",
        ),
        (changed((0, 20, 3), 15), "token 20 has keys out of order, or twice: 8 keys up to 20"),
        (changed((0, 20, 0), -2), "token 20 has keys out of order, or twice"),
        (changed((0, 20, 7), -1), "token 20 has another number of keys: 7 keys up to 19, expected 8 below 21"),
        (changed((0, 3), -1), "token 3 has another number of keys: 0 keys up to -1, expected 4 below 4"),
    ):
        layers = {0: rows if wrong.shape == rows.shape else wrong, 2: wrong}
        with pytest.raises(ArgumentError, match=f"selections: .*{told}"):
            model(tokens, use_cache=False, selections=Selections(model.config, layers))
    assert not ran, "refused before the first layer's projections"
    selections = Selections(model.config, {0: rows, 2: changed((slice(None), TOKENS - 1), -1)})
    assert model(tokens, use_cache=False, selections=selections).logits.isfinite().all(), "the last token needs none"
    for given, error, told in (
        ({"selections": {0: rows}}, ArgumentError, "selections: is dict, expected Selections"),
        ({"indexer_loss": IndexerLoss(dense=True)}, ArgumentError, r"given with IndexerLoss\(dense=True\)"),
    ):
        with pytest.raises(error, match=told):
            model(tokens, **{"use_cache": False, "selections": selections} | given)
    cache = LatentCache(config)
    with torch.no_grad():
        model(tokens[:, :3], cache=cache)
        with pytest.raises(UnsupportedError, match="selections: 3 tokens are cached, supported: none"):
            model(tokens, cache=cache, selections=selections)
        with pytest.raises(UnsupportedError, match="selections: the model attends by 'eager', supported: 'xmla'"):
            attending(model, "eager")(tokens, use_cache=False, selections=selections)
