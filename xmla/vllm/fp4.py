"""vLLM's cache dtype `nvfp4_ds_mla`, whose entries vLLM's own kernels write on sm_100 and later alone.

They round to e2m1 by an instruction that no GPU before these has. V3.2's entries are 352 bytes, which xmla writes
behind vLLM's fused kernel. V4.1's are 528 bytes in the window, and 288 of compressed entries, whose rounding alone is
xmla's.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from xmla import torch_api as xt
from xmla.core.lang.numbers import encode_e2m1
from xmla.vllm.contract import require
from xmla.vllm.refusals import FP4_ENTRIES


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
