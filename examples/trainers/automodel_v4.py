"""NeMo AutoModel's sparse attention of DeepSeek-V4, `backend.attn: tilelang`, by xmla's ops; TileLang is not needed.

    automodel_v4.install()  # before the model is made

Windows, entries, packed sequences and context parallelism stay AutoModel's.
"""

import torch
from nemo_automodel.components.models.deepseek_v4 import layers
from torch import Tensor

from xmla import torch_api as xt


def attend(q: Tensor, rows: Tensor, sinks: Tensor, selected: Tensor, scale: float, *, backend: str) -> Tensor:
    """Values [B, S, H, 512] of queries and rows [B, N, 512]; `selected` [B, S, K] are rows of the sequence, or −1."""
    batch, count, _ = rows.shape
    first = torch.arange(batch, device=q.device)[:, None, None] * count
    slots = torch.where(selected < 0, -1, selected + first).int().flatten(0, 1)
    out, _ = xt.sparse_mla(q.flatten(0, 1), rows.flatten(0, 1)[:, None], slots, sink=sinks.float(), softmax_scale=scale)
    return out.unflatten(0, (batch, -1))


@torch.no_grad()
def scores(
    q: Tensor, entries: Tensor, weights: Tensor, *, softmax_scale: float, backend: str, **others: int | None
) -> Tensor:
    """The indexer's scores [B, S, N] of queries [B, S, I, D] and entries [B, N, D]; AutoModel masks those to come."""
    if backend != "tilelang":
        return own_scores(q, entries, weights, softmax_scale=softmax_scale, backend=backend, **others)
    ends = torch.full(q.shape[1:2], entries.shape[1], dtype=torch.int32, device=q.device)
    sequences = zip(q, entries, weights * softmax_scale, strict=True)
    return torch.stack([xt.indexer_scores(*sequence, ends) for sequence in sequences])


own_scores = layers.dsv4_indexer_scores  # of other backends


def install() -> None:
    layers.dsv4_sparse_attention, layers.dsv4_indexer_scores = attend, scores
