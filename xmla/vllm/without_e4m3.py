"""What vLLM's kernels quantise to e4m3, by xmla's ops: on sm_80 and sm_86, for which Triton has no e4m3.

Functions of vLLM's that take its arguments; their products, norms and rotations are torch's, in float32.
"""

from typing import Any

import torch
from torch.nn.functional import layer_norm, rms_norm

from xmla import torch_api as xt
from xmla.vllm.refusals import refuse


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Vectors [T, …, D] in float32, their first dims rotated by their positions: neighbours in pairs, or two halves."""
    angles = cos_sin[positions].float().view(len(x), *(1 for _ in x.shape[2:]), -1)
    cos, sin = angles.chunk(2, dim=-1)
    roped, rest = x.float().tensor_split((angles.shape[-1],), dim=-1)
    first, second = roped.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else roped.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    roped = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((roped, rest), dim=-1)


def fused_norm_rope(
    positions: torch.Tensor, q_c: torch.Tensor, q_rms_norm_w: torch.Tensor, q_rms_eps: float, kv_c: torch.Tensor,
    kv_rms_norm_w: torch.Tensor, kv_rms_eps: float, k_pe: torch.Tensor, k_rope_cos_sin_cache: torch.Tensor,
    index_k: torch.Tensor | None, index_k_layer_norm_w: Any, index_k_layer_norm_bias: Any,
    index_k_layer_norm_eps: float, index_k_rope_cos_sin_cache: Any, topk_indices_buffer: torch.Tensor,
    slot_mapping: torch.Tensor | None = None, indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None, indexer_cache_shuffled: bool = False,
    mla_kv_cache: torch.Tensor | None = None, mla_kv_cache_dtype: str = "auto",
    mla_k_scale: torch.Tensor | None = None, has_indexer: bool = True, index_rope_interleave: bool = False,
    q_c_out: torch.Tensor | None = None, kv_c_out: torch.Tensor | None = None, k_pe_out: torch.Tensor | None = None,
    index_k_out: torch.Tensor | None = None, skip_scale: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Normalised query latents; the step's entries and keys of the indexer go to their caches, if they have slots.

    The caches tell their formats, which are those that xmla serves.
    """
    refuse(
        {
            "keys of the indexer in another order": indexer_cache_shuffled,
            "keys and queries of other ranks": q_c_out is not None or index_k_out is not None,
        }
    )
    tokens = len(positions)
    latent = rms_norm(kv_c.float(), kv_c.shape[1:], kv_rms_norm_w.float(), kv_rms_eps)
    rope = rotate(k_pe, positions, k_rope_cos_sin_cache, interleaved=True)
    for out, values in ((kv_c_out, latent), (k_pe_out, rope)):
        if out is not None:
            out.copy_(values)
    if mla_kv_cache is not None and slot_mapping is not None:
        count = min(tokens, slot_mapping.numel())  # either may be padded
        xt.write_mla_cache(latent[:count], rope[:count], slot_mapping[:count], mla_kv_cache)
    if has_indexer and index_k is not None:
        topk_indices_buffer[:tokens] = -1
        slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
        if indexer_k_cache is not None and slots is not None:
            weight, bias = index_k_layer_norm_w.float(), index_k_layer_norm_bias.float()
            keys = layer_norm(index_k.float(), index_k.shape[1:], weight, bias, index_k_layer_norm_eps)
            keys = rotate(keys, positions, index_k_rope_cos_sin_cache, index_rope_interleave)
            count = min(tokens, slots.numel())
            xt.write_indexer_cache(keys[:count], slots[:count], indexer_k_cache)
    return rms_norm(q_c.float(), q_c.shape[1:], q_rms_norm_w.float(), q_rms_eps).to(q_c.dtype)


def fused_q(
    positions: torch.Tensor, q_pe: torch.Tensor, q_pe_cos_sin_cache: torch.Tensor, index_q: torch.Tensor | None,
    index_q_cos_sin_cache: Any, ql_nope: torch.Tensor, q_scale: torch.Tensor, index_weights: Any,
    index_weights_softmax_scale: float, index_weights_head_scale: float, has_indexer: bool = True,
    index_rope_interleave: bool = False, quantize_mqa: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Queries of the indexer in e4m3 and their weights, if the layer has one; the rotated part of attention's."""
    refuse({"queries of attention in e4m3": quantize_mqa})
    rope = rotate(q_pe, positions, q_pe_cos_sin_cache, interleaved=True).to(q_pe.dtype)
    if not has_indexer or index_q is None:
        return None, None, rope
    rotated = rotate(index_q, positions, index_q_cos_sin_cache, index_rope_interleave)
    scale = index_weights_softmax_scale * index_weights_head_scale
    return *xt.quantize_indexer_query(rotated, index_weights.float(), scale=scale), rope


def fused_indexer_q_rope_quant(
    positions: torch.Tensor, q: torch.Tensor, cos_sin_cache: torch.Tensor, weights: torch.Tensor,
    softmax_scale: float, head_scale: float, is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The indexer's queries of models of V3's layers, which are rounded to bfloat16 before."""
    rotated = rotate(q, positions, cos_sin_cache, interleaved=not is_neox).to(q.dtype)
    return xt.quantize_indexer_query(rotated, weights.float(), scale=softmax_scale * head_scale)


def per_token_group_quant_fp8(
    x: torch.Tensor, group_size: int, *, column_major_scales: bool = False, use_ue8m0: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [N, D] of the indexer in e4m3, with a scale each [N, 1], which is a power of two."""
    refuse(
        {
            f"scales of {group_size} in {x.shape[1]} dims": group_size != x.shape[1],
            "scales that are no powers of two": not use_ue8m0 or column_major_scales,
        }
    )
    ones = torch.ones(len(x), 1, device=x.device)
    q8, scales = xt.quantize_indexer_query(x[:, None], ones, scale=1.0)
    return q8[:, 0], scales
