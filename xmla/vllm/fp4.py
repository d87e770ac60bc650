"""Caches of 4 bits, which vLLM's own kernels write on sm_100 and later alone.

They round to e2m1 by an instruction that no GPU before these has. Of the cache dtype `nvfp4_ds_mla` V3.2's entries are
352 bytes, which xmla writes behind vLLM's fused kernel. V4.1's are 528 bytes in the window, and 288 of compressed
entries, whose rounding alone is xmla's.

Keys of the indexer in MXFP4 are 68 bytes. V4's and V4.1's are vLLM's, but for the rounding. V3.2's layers have none:
the cache's rows are made narrower, and xmla writes them behind the same kernel. Queries stay e4m3, whose products with
such keys xmla computes in bfloat16; rounded to MXFP4 too, as vLLM's are, they would be no faster and less exact.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

from xmla import torch_api as xt
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.lang.numbers import encode_e2m1
from xmla.vllm import without_e4m3
from xmla.vllm.contract import require
from xmla.vllm.refusals import FP4_ENTRIES, KEY_DIMS, has_fp4_keys

KEY_ROW = IndexerLayout(KEY_DIMS, "mxfp4").row


@triton.jit
def pack_pair(low, high):
    """Bytes of two e2m1 values each, of float32: to nearest, ties to even, saturating; NaN is 6, as vLLM's are."""
    low, high = tl.where(low == low, low, 6.0), tl.where(high == high, high, 6.0)
    return (encode_e2m1(low) | (encode_e2m1(high) << 4)).to(tl.uint8)


def write_behind(fused: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's kernel of norms, rotations and cache writes, which leaves these entries to xmla.

    It has the normalised latent and the rotated dims in memory of their own in any case.
    """

    require(fused, {"slot_mapping", "mla_kv_cache", "mla_kv_cache_dtype", "kv_c_out", "k_pe_out"})

    @wraps(fused)
    def fused_norm_rope(
        *args: Any, slot_mapping: Any = None, mla_kv_cache: Any = None, mla_kv_cache_dtype: str = "auto",
        kv_c_out: Any = None, k_pe_out: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        written = {"slot_mapping": slot_mapping, "kv_c_out": kv_c_out, "k_pe_out": k_pe_out}
        if mla_kv_cache is None or mla_kv_cache_dtype != FP4_ENTRIES:
            return fused(*args, mla_kv_cache=mla_kv_cache, mla_kv_cache_dtype=mla_kv_cache_dtype, **written, **kwargs)
        queries = fused(*args, **written, **kwargs)
        count = slot_mapping.numel()  # the rows may be padded
        xt.write_mla_cache(kv_c_out[:count], k_pe_out[:count], slot_mapping, mla_kv_cache, scale_floor="amax")
        return queries

    return fused_norm_rope


def as_asked(_: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether the indexer's keys are MXFP4, on any GPU."""

    def dsa_indexer_uses_fp4(vllm_config: Any) -> bool:
        return has_fp4_keys(vllm_config)

    return dsa_indexer_uses_fp4


def store_packed(cache: type) -> type:
    """The cache of the indexer's keys in V3.2's layers, which ask for rows of e4m3 whatever the user does."""
    make: Any = cache.__init__

    @wraps(make)
    def init(self: Any, head_dim: int, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        make(self, KEY_ROW if has_fp4_keys(get_current_vllm_config()) else head_dim, *args, **kwargs)

    setattr(cache, make.__name__, init)
    return cache


def write_keys_behind(fused: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's fused kernel of V3.2, which leaves keys in MXFP4 to xmla.

    It then gives the normalised and rotated keys, as for ranks that gather them. What serves GPUs without e4m3 writes
    them itself.
    """
    if fused is without_e4m3.fused_norm_rope:
        return fused
    require(fused, {"slot_mapping", "indexer_slot_mapping", "indexer_k_cache", "index_k", "index_k_out"})
    place = [*signature(fused).parameters].index("index_k")

    @wraps(fused)
    def fused_norm_rope(
        *args: Any, slot_mapping: Any = None, indexer_slot_mapping: Any = None, indexer_k_cache: Any = None,
        index_k_out: Any = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        slots = {"slot_mapping": slot_mapping, "indexer_slot_mapping": indexer_slot_mapping}
        if indexer_k_cache is None or indexer_k_cache.shape[2] != KEY_ROW:
            return fused(*args, indexer_k_cache=indexer_k_cache, index_k_out=index_k_out, **slots, **kwargs)
        keys = torch.empty_like(args[place])
        queries = fused(*args, index_k_out=keys, **slots, **kwargs)
        written = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
        count = written.numel()  # the rows may be padded
        xt.write_indexer_cache(keys[:count], written, indexer_k_cache, cache_format="mxfp4")
        return queries

    return fused_norm_rope


def in_e4m3(quantize: Callable[..., Any]) -> Callable[..., Any]:
    """Queries of V4's and V4.1's indexer, of which vLLM makes MXFP4 beside such keys."""
    require(quantize, {"use_fp4"})

    @wraps(quantize)
    def fused_indexer_q_rope_quant(*args: Any, use_fp4: bool = False, **kwargs: Any) -> Any:
        return quantize(*args, **kwargs)

    return fused_indexer_q_rope_quant
