"""FlashMLA's sparse attention: `sparse_mla` by the signatures of FlashMLA 1.0, sgl-flash-mla 1.0 and vLLM 0.33.

Heads need no padding; any number of indices, page size and cache format of `sparse_mla` will do; an index outside the
cache is skipped. There is no schedule: what stands for it is never read. Other names are FlashMLA's own, if installed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xmla.compat._published import NotReplacedError, Published, as_int32, check_axes, dense, serve
from xmla.core.errors import ArgumentError
from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.support import supports
from xmla.torch_api._arrays import device_of

_package = Published("flash_mla")
Tensor = torch.Tensor

# `xmla.compat.install` sets it.
computes_max_logits = True
# The arguments of both functions, by `sparse_mla`'s names of them.
NAMES = {
    "slots": "indices", "lengths": "topk_length", "sink": "attn_sink", "extra_slots": "extra_indices_in_kvcache",
    "extra_lengths": "extra_topk_length", "cache_format": "kv_format", "extra_cache_format": "kv_format",
}  # fmt: skip
DECODE_NAMES = NAMES | {"q": "q.flatten(0, 1)", "cache": "k_cache[:, :, 0]", "extra_cache": "extra_k_cache[:, :, 0]"}
PREFILL_NAMES = NAMES | {"cache": "kv", "softmax_scale": "sm_scale"}
# With β = 2**20, ln Σ exp(β s) / β is max s, or more by at most ln K / β.
SHARPNESS = 2.0**20


@dataclass
class _Schedule:
    """What callers of FlashMLA hold and sometimes fill; not read."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


# FlashMLA's own class if it is there, since its dense decode accepts no other.
_interface = getattr(_package.module, "flash_mla_interface", None)
FlashMLASchedMeta: type = getattr(_interface, "FlashMLASchedMeta", _Schedule)


def __getattr__(name: str) -> Any:
    # `import flash_mla.flash_mla_interface as …` reads the attribute, not sys.modules.
    return sys.modules[__name__] if name == "flash_mla_interface" else _package.attribute(name)


def is_flashmla_sparse_supported() -> tuple[bool, str | None]:
    """Whether the current device runs sparse attention, and if not why. vLLM has it under this name."""
    answer = supports("sparse_mla", device_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    return answer.ok, answer.reason or None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[object, None]:
    """An empty schedule, and None. The arguments are not read, as in FlashMLA."""
    return FlashMLASchedMeta(), None


@_package.otherwise()
def get_mla_decoding_metadata(
    seqlens_k: Tensor, num_q_tokens_per_head_k: int, h_k: int, h_q: int | None = None, is_fp8_kvcache: bool = False,
    topk: int | None = None, use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A schedule of one part, [1, 8] and [B + 1] int32, all 0; without `topk`, of dense decode, FlashMLA's."""
    if topk is None:
        raise NotReplacedError("get_mla_decoding_metadata: topk is None, supported: sparse attention")
    zeros = seqlens_k.new_zeros(8 + len(seqlens_k) + 1, dtype=torch.int32)
    return zeros[:8].view(1, 8), zeros[8:]


@_package.otherwise()
def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: object, num_splits: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool | None = None, indices: Tensor | None = None,
    attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None, *, enable_batch_invariant: bool = False, use_legacy: bool = False,
    kv_format: str | None = None, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sparse attention over a paged cache, for decode; without `indices`, which is dense, FlashMLA's.

    Args:
        q: [B, S, H, D] bfloat16 or float16, S query tokens of each request.
        k_cache: [P, R, 1, ROW], as `sparse_mla`'s cache.
        head_dim_v: 512.
        softmax_scale: Default D**-0.5.
        causal: False.
        indices: [B, S, K] int32 or int64, slots of k_cache; −1 and every other number outside the cache is no key.
        attn_sink: [H] float32.
        extra_k_cache, extra_indices_in_kvcache: [P', R', 1, ROW'] and [B, S, K'], further keys.
        topk_length, extra_topk_length: [B] int32, valid indices of each of a request's tokens, the leftmost.
        enable_batch_invariant: `sparse_mla`'s batch_invariant.
        use_legacy: For rows of 528 and 288 bytes, V4.1's: whether a page's scales are in its footer, as they were
            before 2026-09-30, instead of behind each entry.
        kv_format: None, V32, V32_NO_ROPE, V4, V41 or V41_FP4: the format of k_cache's rows. Needed for V32_NO_ROPE,
            whose rows have 528 bytes too.
        out: [B, S, H, 512], written and returned.
        block_table, cache_seqlens, tile_scheduler_metadata, num_splits, is_fp8_kvcache: Not read.
        descale_q, descale_k: None: they belong to dense decode.

    Returns:
        The output [B, S, H, 512], dtype of q, 0 for a token without keys; and the lse [B, H, S] float32, natural
        logarithm, without the sink, +inf for a token without keys.
    """
    here = "flash_mla_with_kvcache"
    if indices is None:
        raise NotReplacedError(f"{here}: indices is None, supported: sparse attention")
    _require(here, "head_dim_v", head_dim_v, VALUE_DIMS)
    _require(here, "causal", causal, False)
    for name, scale in (("descale_q", descale_q), ("descale_k", descale_k)):
        _require(here, f"{name} beside indices", None if scale is None else "given", None)
    check_axes(
        here, {"q": (q, "B S H D"), "k_cache": (k_cache, "P R 1 ROW"), "indices": (indices, "B S K")},
        {
            "attn_sink": (attn_sink, "H"), "extra_k_cache": (extra_k_cache, "P' R' 1 ROW'"),
            "extra_indices_in_kvcache": (extra_indices_in_kvcache, "B S K'"), "topk_length": (topk_length, "B"),
            "extra_topk_length": (extra_topk_length, "B"), "out": (out, f"B S H {VALUE_DIMS}"),
        },
    )  # fmt: skip
    requests, tokens, heads, dims = q.shape
    extra_slots = extra_indices_in_kvcache
    cache_format, extra_format = _formats(here, kv_format, use_legacy, k_cache, extra_k_cache)
    result, lse = _attend(
        here, DECODE_NAMES, out, q, k_cache[:, :, 0], _slots(here, "indices", indices),
        _each_token(here, "topk_length", topk_length, q), attn_sink,
        None if extra_k_cache is None else extra_k_cache[:, :, 0],
        None if extra_slots is None else _slots(here, "extra_indices_in_kvcache", extra_slots),
        _each_token(here, "extra_topk_length", extra_topk_length, q),
        softmax_scale=dims**-0.5 if softmax_scale is None else softmax_scale, cache_format=cache_format,
        extra_cache_format=extra_format, batch_invariant=enable_batch_invariant,
    )  # fmt: skip
    return result, lse.view(requests, tokens, heads).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, *, use_legacy: bool = False, return_log2_lse: bool | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Sparse attention over rows, for prefill.

    Args:
        q: [T, H, D] bfloat16 or float16.
        kv: [N, 1, D], dtype of q.
        indices: [T, 1, K] int32 or int64, rows of kv; every number outside [0, N) is no key.
        sm_scale: Factor of q · k.
        d_v: 512.
        attn_sink: [H] float32.
        topk_length: [T] int32, valid indices of each token, the leftmost.
        use_legacy: Not read.
        return_log2_lse: None, statistics in natural logarithms; True, in base 2; False, None in their places.
        out: [T, H, 512], written and returned.

    Returns:
        The output [T, H, 512], dtype of q, 0 for a token without keys; max_logits [T, H] float32, the largest
        sm_scale · q · k, times log2(e) for base 2, −inf for a token without keys; and the lse [T, H] float32, without
        the sink, +inf for a token without keys. max_logits takes another pass over the keys, and is larger than the
        maximum by at most 2**-20 ln K; after `xmla.compat.install(max_logits=False)` it is None.
    """
    here = "flash_mla_sparse_fwd"
    _require(here, "d_v", d_v, VALUE_DIMS)
    check_axes(
        here, {"q": (q, "T H D"), "kv": (kv, "N 1 D"), "indices": (indices, "T 1 K")},
        {"attn_sink": (attn_sink, "H"), "topk_length": (topk_length, "T"), "out": (out, f"T H {VALUE_DIMS}")},
    )  # fmt: skip
    slots = _slots(here, "indices", indices)
    lengths = None if topk_length is None else as_int32(here, "topk_length", topk_length)
    lse_base = "2" if return_log2_lse else "e"
    q, kv = dense(q), dense(kv)
    result, lse = _attend(
        here, PREFILL_NAMES, out, q, kv, slots, lengths, attn_sink, softmax_scale=sm_scale, lse_base=lse_base
    )
    if return_log2_lse is False:
        return result, None, None
    if not computes_max_logits:
        return result, None, lse
    sharp_scale = sm_scale * SHARPNESS
    _, sharp = serve(
        here, "sparse_mla", PREFILL_NAMES, q, kv, slots, lengths, softmax_scale=sharp_scale, lse_base=lse_base
    )
    return result, sharp / SHARPNESS, lse


def _attend(
    here: str, names: Mapping[str, str], out: Tensor | None, q: Tensor, cache: Tensor, slots: Tensor,
    lengths: Tensor | None, sink: Tensor | None, *extra: Tensor | None, **attrs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sparse_mla` with FlashMLA's lse of empty rows: [..., H, V] of q [..., H, D], in `out` if given; lse [T, H]."""
    shape, rows = (*q.shape[:-1], VALUE_DIMS), dense(q.flatten(0, -3))
    tensors = rows, cache, slots, lengths, None if sink is None else dense(sink), *extra
    attrs |= {"empty_lse": "+inf"}
    if out is None:
        result, lse = serve(here, "sparse_mla", names, *tensors, **attrs)
        return result.view(shape), lse
    if (out.dtype, out.device) != (q.dtype, q.device):
        got, expected = f"{out.dtype} on {out.device}", f"{q.dtype} on {q.device}"
        raise ArgumentError(f"{here}: out is {got}, expected {expected}, as q")
    for axis, (size, stride) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ArgumentError(f"{here}: out stride of axis {axis} is 0, expected elements of their own")
    if out.is_contiguous():
        lse = q.new_empty(rows.shape[:-1], dtype=torch.float32)
        serve(here, "sparse_mla", names, *tensors, out=(out.flatten(0, -3), lse), **attrs)
        return out, lse
    result, lse = serve(here, "sparse_mla", names, *tensors, **attrs)
    return out.copy_(result.view(shape)), lse


def _slots(here: str, name: str, indices: Tensor) -> Tensor:
    """[T, K] of [B, S, K] or [T, 1, K]."""
    return as_int32(here, name, indices.flatten(0, 1))


def _each_token(here: str, name: str, lengths: Tensor | None, q: Tensor) -> Tensor | None:
    """The length of each of a request's tokens, of the requests' lengths [B]; q [B, S, H, D]."""
    if lengths is None:
        return None
    return as_int32(here, name, lengths)[:, None].expand(-1, q.shape[1]).reshape(-1)


def _formats(
    here: str, kv_format: str | None, use_legacy: bool, k_cache: Tensor, extra_k_cache: Tensor | None
) -> tuple[str | None, str | None]:
    """`sparse_mla`'s names of the formats; None where rows alone tell them. Both caches have one, or V4.1's two."""
    v41, v41_fp4 = ("v41_footer", "v41_fp4_footer") if use_legacy else ("v41", "v41_fp4")
    names = {"V32": "v32", "V32_NO_ROPE": "nope", "V4": "v4", "V41": v41, "V41_FP4": v41_fp4}
    if kv_format not in (None, *names):
        raise ArgumentError(f"{here}: kv_format is {kv_format!r}, expected None or one of {', '.join(names)}")
    by_row = {528: v41, 288: v41_fp4}
    main = names[kv_format] if kv_format is not None else by_row.get(k_cache.shape[-1])
    if extra_k_cache is None:
        return main, None
    alike = extra_k_cache.shape[-1] == k_cache.shape[-1]
    return main, main if alike else by_row.get(extra_k_cache.shape[-1])


def _require(here: str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ArgumentError(f"{here}: {what} is {got}, expected {expected}")
