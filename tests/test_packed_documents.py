"""A document's results and gradients are those of its own call, wherever it lies in a packed batch: bit for bit."""

import pytest
import torch
from conftest import HAS_GPU

from xmla import torch_api

SCALE = 0.0721688
K = 64
MEMORY = 40 << 30

# The elements of q pass 2**31 in the larger batch. Numbers of tokens are powers of two: a GPU rounds `coeff` over any
# other, which is to be 1 for a document and for all.
BATCHES = [
    (32, 8, 2),
    pytest.param(1 << 18, 1 << 12, 16, marks=pytest.mark.skipif(not HAS_GPU, reason="takes days in the interpreter")),
]
Tensors = dict[str, torch.Tensor]


def draw(tokens: int, document: int, heads: int, device: str) -> tuple[Tensors, Tensors]:
    """A batch of documents of as many tokens each, which see all keys before them: for attention, and the indexer."""
    torch.manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    place = torch.arange(tokens, dtype=torch.int32, device=device)
    starts = place // document * document
    seen = torch.rand(tokens, K, device=device) * (place - starts + 1)[:, None]
    keys = starts[:, None] + seen.int().clamp(max=document - 1)
    attention = {
        "q": normal(tokens, heads, 576).requires_grad_(),
        "cache": normal(tokens, 1, 576).requires_grad_(),
        "slots": torch.where(keys <= place[:, None], keys, -1),
    }
    indexer = {
        "index_q": normal(tokens, 2, 64).requires_grad_(),
        "index_k": normal(tokens, 64).requires_grad_(),
        "index_weights": normal(tokens, 2, dtype=torch.float32).requires_grad_(),
        "starts": starts,
        "ends": place + 1,
    }
    return attention, indexer


def step(attention: Tensors, indexer: Tensors) -> Tensors:
    """Results and gradients of attention and of the indexer's loss over its keys, that of every token alike."""
    out, lse = torch_api.sparse_mla(**attention, softmax_scale=SCALE)
    out.backward(out.detach())
    loss, *_ = torch_api.indexer_loss(
        **indexer, q=attention["q"].detach(), rows=attention["cache"].detach()[:, 0], lse=lse.detach(),
        indices=attention["slots"], softmax_scale=SCALE, coeff=len(out),
    )  # fmt: skip
    loss.sum().backward()
    leaves = {name: tensor for name, tensor in {**attention, **indexer}.items() if tensor.requires_grad}
    return {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(("tokens", "document", "heads"), BATCHES)
def test_a_document_has_the_bits_of_its_own_call(tokens: int, document: int, heads: int, device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < MEMORY:
        pytest.skip("needs 40 GiB of device memory")
    attention, indexer = draw(tokens, document, heads, device)
    whole = step(attention, indexer)
    at = 2**31 // (heads * 576)  # the token whose queries pass 2**31 elements
    for first in sorted({0, min(at, tokens - 1) // document * document, tokens - document}):
        own = slice(first, first + document)

        def alone(name: str, tensor: torch.Tensor, own: slice = own, first: int = first) -> torch.Tensor:
            part = tensor.detach()[own]
            if name == "slots":
                part = torch.where(part < 0, -1, part - first)
            elif name in ("starts", "ends"):
                part = part - first
            return part.clone().requires_grad_(tensor.requires_grad)

        found = step(*({n: alone(n, t) for n, t in given.items()} for given in (attention, indexer)))
        for name, tensor in found.items():
            assert bool(tensor.any()), name
            assert torch.equal(whole[name][own], tensor), f"{name} of the document from token {first} on"
