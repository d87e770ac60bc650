"""XTuner's sparse attention of GLM-5, `sparse_mla_backend="tilelang"`, by xmla's ops; TileLang need not be installed.

    xtuner_glm.install()  # before the model is made

Packed sequences, sequence parallelism and layers that share a selection stay XTuner's.
"""

import torch
from torch import Tensor
from xtuner.v1.data_proto import SequenceContext
from xtuner.v1.module.attention import dsa_mla
from xtuner.v1.ops.sparse_mla import SparseMLAOutputs

from xmla import torch_api as xt

AT_ONCE = 1 << 27  # scores, of 4 bytes


def attend(q: Tensor, kv: Tensor, indices: Tensor, scaling: float | None, value_dim: int | None = None) -> object:
    """Results of absorbed queries [T, H, 576] over latents [N, 1, 576] at `indices` [T, 1, K], or −1."""
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return SparseMLAOutputs(*xt.sparse_mla(q, kv, indices[:, 0].int(), softmax_scale=scale))


@torch.no_grad()
def select(
    q: Tensor, k: Tensor, weights: Tensor, seq_ctx: SequenceContext, *, index_head_dim: int, index_topk: int
) -> Tensor:
    """The places of the keys that each query selects in its sequence, [T, 1, K] int32, −1 at the end."""
    q, k, weights = q[0], k[0], weights[0] * index_head_dim**-0.5
    starts, ends = seq_ctx.packed_causal_query_ranges(len(q), q.device)
    parts = (each.split(max(1, AT_ONCE // len(k))) for each in (q, weights, ends, starts))
    rows = [
        xt.select_topk(xt.indexer_scores(part, k, scale, end, start), end, start, k=min(index_topk, len(k)))
        for part, scale, end, start in zip(*parts, strict=True)
    ]
    counted = torch.cat(rows)
    return torch.where(counted < 0, -1, counted + starts[:, None])[:, None]


def install() -> None:
    ops = {"tilelang": attend}, {"tilelang": select}
    own = dsa_mla.get_sparse_mla, dsa_mla.get_dsa_topk_indices
    dsa_mla.get_sparse_mla, dsa_mla.get_dsa_topk_indices = (
        lambda backend, table=table, other=other: table.get(backend) or other(backend)
        for table, other in zip(ops, own, strict=True)
    )
    dsa_mla.ensure_tilelang_runtime_available = lambda: None
