"""Megatron-Core's own `DSAttention`, forward and backward with the indexer's loss, by its PyTorch code and by xmla."""

from dataclasses import replace

import pytest
import torch

import xmla.megatron
from benchmarks import megatron
from benchmarks.layer import difference

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
