"""A training step over documents packed in one batch, in PyTorch: each token has the keys of its own. Runs anywhere.

python examples/train_packed.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt

device = "cuda" if torch.cuda.is_available() else "cpu"
documents, heads, k, scale = [9, 5], 4, 4, 0.1352  # tokens of each document
tokens = sum(documents)
torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, *shape, device=device, dtype=dtype)


# Queries and rows of attention; queries, keys and weights of the indexer: what a layer's projections give.
inputs = normal(heads, 576), normal(576), normal(2, 64), normal(64), normal(2, dtype=torch.float32)


def step(first: int, last: int, starts: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention's output for some of the tokens, and the gradients of their arrays; starts: of each one's document."""
    q, rows, index_q, index_k, index_weights = leaves = [x[first:last].clone().requires_grad_() for x in inputs]
    ends = torch.arange(1, last - first + 1, device=device, dtype=torch.int32)  # a token sees itself and those before
    with torch.no_grad():  # the selection is a constant
        scores = xt.indexer_scores(index_q, index_k, index_weights, ends, starts)
        chosen = xt.select_topk(scores, ends, starts, k=k)  # relative to the document's start
    slots = torch.where(chosen >= 0, chosen + starts[:, None], -1)
    out, lse = xt.sparse_mla(q, rows[:, None], slots, softmax_scale=scale, batch_invariant=True)
    # The loss is a mean over the tokens of the call; here a sum, so that it is that of the documents.
    loss, *_ = xt.indexer_loss(
        index_q, index_k, index_weights, q.detach(), rows.detach(), lse.detach(), ends, starts, slots,
        softmax_scale=scale, coeff=last - first,
    )  # fmt: skip
    (out.float().square().sum() + loss.sum()).backward()
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


lengths = torch.tensor(documents, device=device)
begins = lengths.cumsum(0) - lengths
out, gradients = step(0, tokens, begins.repeat_interleave(lengths).int())

for first, length in zip(begins.tolist(), documents, strict=True):
    alone, wanted = step(first, first + length, torch.zeros(length, device=device, dtype=torch.int32))
    assert torch.equal(out[first : first + length], alone)
    for packed, own in zip(gradients, wanted, strict=True):
        assert bool(own.any()) and torch.equal(packed[first : first + length], own)
print(f"out {tuple(out.shape)} of {len(documents)} packed documents")
print(f"output and all {len(gradients)} gradients have the bits that each document has in a batch of its own")
