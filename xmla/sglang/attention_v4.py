"""DeepSeek-V4's attention in SGLang's backend "dsv4": `sparse_mla` in FlashMLA's place, heads not padded.

Decodes attend to both pools, of the window and of compressed entries, at once. Prefills attend to rows that SGLang
gathers of both.
"""

import logging
from functools import cache
from typing import Any

import torch

from xmla import torch_api as xt
from xmla.compat import flash_mla

Tensor = torch.Tensor


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False, indices: Tensor | None = None, attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None, kv_format: str | None = None, *,
    use_legacy: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashMLA's, in SGLang's order of parameters: q [T, 1, H, 512] over pools [P, R, 1, 584]; [T, 1, H, 512]."""
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
        is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
        use_legacy=use_legacy, kv_format=kv_format, descale_q=descale_q, descale_k=descale_k,
    )  # fmt: skip


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, *, use_legacy: bool = True,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """q [T, H, 512] over rows kv [N, 1, 512]; [T, H, 512], without the statistics, which SGLang does not read."""
    out, _ = xt.sparse_mla(q, kv, indices[:, 0], topk_length, attn_sink, softmax_scale=sm_scale)
    return out, None, None


def kernel_num_heads(self: Any, num_tokens: int) -> int:
    """`MqaAttentionBase._kernel_num_heads`: the rank's own, of which FlashMLA takes 64 or 128."""
    return self.n_local_heads


@cache
def tell() -> None:
    """Say what runs on xmla in SGLang's log, which is set up when its backend is made."""
    logging.getLogger(__name__).info(
        "DeepSeek sparse attention runs on xmla: indexer logits, top-k and slots of DeepSeek-V4, attention in prefill "
        "and decode"
    )
