"""The attention of SGLang's backends "flashmla_sparse" and "flashmla_kv": `sparse_mla`, heads not padded."""

import logging
from functools import cache
from typing import Any

import torch

from xmla import torch_api as xt
from xmla.compat import flash_mla

Tensor = torch.Tensor

SERVED = ("flashmla_sparse", "flashmla_kv", "flashmla_auto")
FORMATS = {"V32": "v32", "V32_NO_ROPE": "nope"}  # SGLang's names of the rows of its fp8 pool


def forward_flashmla_sparse(
    self: Any, q_all: Tensor, kv_cache: Tensor, v_head_dim: int, page_table_1: Tensor, sm_scale: float,
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`_forward_flashmla_sparse`: q_all [T, H, D] over rows kv_cache [N, 1, ·], the pool's or gathered; [T, H, 512]."""
    lengths = lengths_of(q_all, topk_length)
    return xt.sparse_mla(q_all, kv_cache, page_table_1, lengths, attn_sink, softmax_scale=sm_scale)[0]


def forward_flashmla_kv(
    self: Any, q_all: Tensor, kv_cache: Tensor, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any,
    page_table_1: Tensor,
) -> Tensor:  # fmt: skip
    """`_forward_flashmla_kv`: over the pool, fp8 or bfloat16, which FlashMLA would quantise first; [T, 1, H, 512].

    FlashMLA reads all K slots of a token. With its length, the first tokens of a prompt take as long as their keys.
    """
    q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
    cache = kv_cache.view(-1, self.physical_page_size, self.kv_cache_dim)
    lengths = lengths_of(q, metadata.dsa_cache_seqlens_int32)
    cache_format = FORMATS[self.flashmla_kv_format] if self.dsa_kv_cache_store_fp8 else None
    return xt.sparse_mla(q, cache, page_table_1, lengths, softmax_scale=sm_scale, cache_format=cache_format)[0][:, None]


def lengths_of(q: Tensor, lengths: Tensor | None) -> Tensor | None:
    """The lengths, unless SGLang has padded the tokens or these alone."""
    return lengths if lengths is not None and len(lengths) == len(q) else None


def compute_flashmla_metadata(self: Any, cache_seqlens: Tensor, seq_len_q: int) -> Any:
    """`_compute_flashmla_metadata`: a schedule that is not read, of shapes that SGLang slices and copies in graphs."""
    from sglang.srt.layers.attention.dsa_backend import DSAFlashMLAMetadata

    return DSAFlashMLAMetadata(
        *flash_mla.get_mla_decoding_metadata(cache_seqlens, seq_len_q, 1, topk=self.dsa_index_topk)
    )


def tell(_: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """After `DeepseekSparseAttnBackend.__init__`."""
    tell_once(backend.dsa_prefill_impl, backend.dsa_decode_impl)


@cache
def tell_once(prefill: str, decode: str) -> None:
    whose = [f"{impl} is {'xmla' if impl in SERVED else 'SGLang'}'s" for impl in (prefill, decode)]
    logging.getLogger(__name__).info(
        "DeepSeek sparse attention runs on xmla: indexer logits, top-k and slots; in prefill %s, in decode %s", *whose
    )
