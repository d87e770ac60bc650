"""NeMo AutoModel's sparse attention of GLM-5, `backend.attn: tilelang`, by xmla's ops; TileLang need not be installed.

    automodel_glm.install()  # before the model is made

Packed sequences, context parallelism and layers that share a selection stay AutoModel's.
"""

import torch
from nemo_automodel.components.models.glm_moe_dsa import layers
from torch import Tensor

from xmla import torch_api as xt

AT_ONCE = 1 << 27  # scores, of 4 bytes


@torch.no_grad()
def select(
    q: Tensor, k: Tensor, weights: Tensor, cu_seqlens: Tensor, topk: int, query_indices: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The places of the keys that each query selects in its document, [T, 1, topk] int32, −1 at the end."""
    begins = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    place = torch.arange(len(q), device=q.device) if query_indices is None else query_indices.flatten().long()
    document = (torch.searchsorted(begins, place, right=True) - 1).clamp(max=len(begins) - 2)
    starts = begins[document].int()
    ends = torch.minimum(place + 1, starts + cu_seqlens.diff()[document]).int()
    parts = (each.split(max(1, AT_ONCE // len(k))) for each in (q, weights, ends, starts))
    rows = [
        xt.select_topk(xt.indexer_scores(part, k, scale, end, start), end, start, k=topk)
        for part, scale, end, start in zip(*parts, strict=True)
    ]
    counted = torch.cat(rows)
    return torch.where(counted < 0, -1, counted + starts[:, None])[:, None]


def attend(q: Tensor, latents: Tensor, selected: Tensor, up_value: Tensor, scale: float) -> Tensor:
    """Values [T, H, V] of absorbed queries [T, H, 576], latents [N, 1, 576] and up-projections [H, V, 512]."""
    out, _ = xt.sparse_mla(q, latents, selected[:, 0], softmax_scale=scale)
    return torch.einsum("thl,hvl->thv", out, up_value)


def install() -> None:
    layers.tilelang_indexer_topk, layers.tilelang_sparse_attention = select, attend
    layers.is_dsa_kernel_available = layers.should_use_tilelang = lambda *_, **how: True
