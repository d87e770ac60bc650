"""Megatron-Core's own `DSAttention`, forward and backward with the indexer's loss, by its PyTorch code and by xmla."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import xmla.megatron
from benchmarks import megatron
from benchmarks.layer import difference
from xmla import ArgumentError, UnsupportedError

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's own
# Roundings of probabilities, their gradients and results to bfloat16.
BOUND = 2.0**-6
# With fewer indexer heads more scores are zeros, which are equal: Megatron selects any of those.
SIZES = megatron.Sizes(tokens=24, heads=3, hidden=32, q_latent=32, values=16, index_heads=8, index_dims=64, k=8)


@pytest.fixture
def on_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's layer asks for a GPU by name; without one it gets the CPU."""
    if device == "cuda":
        return
    tensor = torch.tensor
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(torch, "tensor", lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs))
    from megatron.core.transformer import transformer_config

    monkeypatch.setattr(transformer_config, "_validate_dsa_kernel_backend_dependencies", lambda *_: None)


@pytest.mark.parametrize(("sparse_loss", "document"), [(True, None), (False, None), (True, 12), (False, 12)])
def test_outputs_and_gradients_are_megatrons(on_device: None, sparse_loss: bool, document: int | None) -> None:
    xmla.megatron.install()
    sizes = replace(SIZES, document=document)
    with megatron.ranks(tensor_parallel=1, context_parallel=1):
        own, ours = (megatron.Step.random(sizes, backend, sparse_loss).run() for backend in megatron.BACKENDS)
    assert {"out", "q", "k", "up", "indexer.linear_weights_proj.weight"} <= own.keys() == ours.keys()
    assert all(tensor.any() for tensor in own.values())
    assert all(error < BOUND for error in difference(ours, own).values())


def rows_of(step: megatron.Step, run: Callable[[], Any]) -> torch.Tensor:
    """What a step's layer selects [1, S, k], counted from each token's first key."""
    found: list[torch.Tensor] = []
    select = xmla.megatron._select

    def noted(q: Any, k: Any, weights: Any, topk: int, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        indices = select(q, k, weights, topk, starts, ends)
        found.append(torch.where(indices < 0, -1, indices - starts[:, None]))
        return indices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xmla.megatron, "_select", noted)
        run()
    return found[0]


@pytest.mark.parametrize(("sparse_loss", "document"), [(True, None), (True, 12), (False, 12)])
def test_a_replayed_selection_has_the_bits_of_the_same_one(
    on_device: None, sparse_loss: bool, document: int | None
) -> None:
    """Outputs, the loss's gradients and attention's; in documents whose keys are counted from their first."""
    xmla.megatron.install()
    with megatron.ranks(tensor_parallel=1, context_parallel=1):
        step = megatron.Step.random(replace(SIZES, document=document), "xmla", sparse_loss)
        made: list[Any] = []
        rows = rows_of(step, lambda: made.append(step.run()))
        own = {name: tensor.clone() for name, tensor in made[0].items()}
        with pytest.MonkeyPatch.context() as patch, xmla.megatron.replay(step.layer, {0: rows}):
            patch.setattr(xmla.megatron, "_select", None)  # nothing is selected
            again = step.run()
        assert own.keys() == again.keys() and all(torch.equal(again[name], own[name]) for name in own)


class Again(torch.nn.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def test_replayed_keys_are_attended_to(on_device: None) -> None:
    """Other keys than the indexer's, of a token none, and a layer that is computed again in the backward pass."""
    xmla.megatron.install()
    with megatron.ranks(tensor_parallel=1, context_parallel=1):
        step = megatron.Step.random(SIZES, "xmla", True)
        place = torch.arange(SIZES.tokens, dtype=torch.int32, device=step.q.device)[:, None]
        column = torch.arange(SIZES.k, dtype=torch.int32, device=step.q.device)
        last = (place - SIZES.k + 1).clamp(min=0) + column  # the newest keys
        rows = torch.where(last <= place, last, -1)[None]
        rows[:, 5] = -1
        layer = step.layer
        with xmla.megatron.replay(layer, {0: rows.cpu(), 7: rows}, batch_invariant=True):
            whole = step.run()
            step.layer = Again(layer)
            again = step.run()
    assert not whole["out"].unflatten(-1, (SIZES.heads, -1))[5].any()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    query, key = step.q.detach().float()[:, 0], step.k.detach().float()[:, 0, 0]
    scores = torch.einsum("shd,nd->shn", query, key) * SIZES.scale
    seen = torch.zeros(SIZES.tokens, SIZES.tokens + 1, dtype=torch.bool, device=key.device)
    seen = seen.scatter(1, torch.where(rows[0] < 0, SIZES.tokens, rows[0]).long(), True)[:, None, :-1]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    want = torch.einsum("shn,nl,hvl->shv", weights, key[:, :512], step.up.detach().float()).flatten(1)
    assert difference({"out": whole["out"].float().flatten(1)}, {"out": want})["out"] < BOUND


def test_selections_that_do_not_fit_are_refused(on_device: None) -> None:
    xmla.megatron.install()
    with megatron.ranks(tensor_parallel=1, context_parallel=1):
        step = megatron.Step.random(SIZES, "xmla", True)
        rows = rows_of(step, step.run)

        def replay(layers: dict[int, Any], of: Any = step) -> None:
            with xmla.megatron.replay(of.layer, layers):
                of.run()

        far, long = rows.clone(), rows.long()
        far[0, 3, 3] = 4
        for layers, told in (
            ({1: rows}, r"given for layers \[\], expected \[0\], which select keys"),
            ({0: rows[:, 1:]}, r"layer 0 has \[batch, tokens\] \(1, 23\), expected \(1, 24\)"),
            ({0: rows.cpu().numpy()}, "layer 0 is ndarray, expected Tensor"),
            ({0: long}, r"layer 0 has dtype torch\.int64, expected int32"),
            ({0: rows[..., 1:]}, r"layer 0 has shape \(1, 24, 7\), expected \[batch, tokens, 8\]"),
            (
                {0: far},
                "layer 0, sequence 0, token 3 has keys that it does not see: 4 keys up to 4, expected 4 below 4",
            ),
        ):
            with pytest.raises(ArgumentError, match=f"selections: {told}"):
                replay(layers)
        told = "replay: model is Linear, expected one with layers that select keys"
        with pytest.raises(ArgumentError, match=told), xmla.megatron.replay(torch.nn.Linear(1, 1), {0: rows}):
            pass
        told = "a replay is open, supported: one at a time"
        with xmla.megatron.replay(step.layer, {0: rows}), pytest.raises(UnsupportedError, match=told):
            replay({0: rows})
        with pytest.raises(UnsupportedError, match="layer 1 attended by Megatron's own code"):
            replay({0: rows}, megatron.Step.random(SIZES, "none", True))
        replay({0: rows})


def test_a_benchmark_tells_what_a_backend_leaves_to_megatron(on_device: None) -> None:
    """An indexer of other dims than xmla's hooks take; attention at its keys is xmla's."""
    xmla.megatron.install()
    with megatron.ranks(tensor_parallel=1, context_parallel=1), megatron.declined() as hooks:
        megatron.Step.random(replace(SIZES, index_dims=128), "xmla", True).run()
        assert not hooks
        megatron.Step.random(replace(SIZES, index_dims=256), "xmla", True).run()
    assert hooks and "run_fused_absorbed_sparse_attention" not in hooks
