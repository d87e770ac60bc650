"""Attention over cached latents, as transformers calls it."""

from typing import Any

import torch
from torch import nn

from xmla import torch_api as xt
from xmla.core.errors import UnsupportedError
from xmla.transformers.learning import IndexerLoss
from xmla.transformers.replay import Selections

# Queries multiplied with up-projections at once, where no gradient is recorded: of 128 heads they and their results are
# 0.4 MB each.
ABSORBED = 2048


def latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> torch.Tensor:
    """Rows [B, 1, N, L+E] of latents [B, 1, N, L] and rotated keys [B, 1, N, E].

    Nothing is copied if both are one array's; entries in fp8 are rows already.
    """
    if kv_nope.dtype == torch.uint8 or not k_rot.shape[-1]:
        return kv_nope
    if torch.compiler.is_compiling():  # which knows no addresses
        return torch.cat([kv_nope, k_rot], -1)
    width = kv_nope.shape[-1] + k_rot.shape[-1]
    follows = k_rot.data_ptr() == kv_nope.data_ptr() + kv_nope.shape[-1] * kv_nope.element_size()
    if follows and kv_nope.stride() == k_rot.stride() and kv_nope.stride(2) >= width and not kv_nope.requires_grad:
        return kv_nope.as_strided((*kv_nope.shape[:-1], width), kv_nope.stride())
    return torch.cat([kv_nope, k_rot], -1)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float, dropout: float = 0.0, indices: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
    indexer_loss: IndexerLoss | None = None, selections: Selections | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Multi-head latent attention of queries [B, H, S, ·] to the keys `indices` [B, S, K]: out [B, S, H, V].

    `key` has the rows that `latents` made, which are values, too; the up-projections of both are multiplied with
    queries and results. `s_aux` [H] are attention sinks.

    Raises:
        UnsupportedError: The layer selects no keys, there is dropout, or another dtype than bfloat16 and float16, of
            autocast where it is on.
    """
    if indices is None:
        raise UnsupportedError(
            f"xmla.transformers: {type(module).__name__} selects no keys; a model of several parts names xmla for its "
            'text alone: attn_implementation={"text_config": "xmla"}'
        )
    if dropout:
        raise UnsupportedError(f"xmla.transformers: attention_dropout is {dropout}, supported: 0")
    query, key = of_16_bits(query), autocast(key)
    batch, heads, queries, _ = query.shape
    up = _up(module, query.dtype, query.device).unflatten(0, (heads, -1))
    up_key, up_value = up.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    rows, apart = flat(key[:, 0])
    sink = None if s_aux is None else s_aux.float()
    scale, invariant = float(scaling), selections is not None and selections.batch_invariant

    def attended(query: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results of some queries, and what `sparse_mla` took and gave."""
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        q = torch.cat([torch.einsum("bhsn,hnl->bshl", nope, up_key), rope.transpose(1, 2)], -1).flatten(0, 1)
        slots = slots_of(indices, apart)
        latent, lse = xt.sparse_mla(q, rows, slots, sink=sink, softmax_scale=scale, batch_invariant=invariant)
        latent = latent.unflatten(0, (batch, query.shape[2])).to(up_value.dtype)
        return torch.einsum("bshl,hvl->bshv", latent, up_value), q, slots, lse

    learns = indexer_loss is not None and module.indexer is not None
    some = max(1, ABSORBED // max(1, batch))
    if not (learns or queries <= some or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        out = query.new_empty((batch, queries, heads, module.v_head_dim), dtype=up_value.dtype)
        for first in range(0, queries, some):
            part = slice(first, first + some)
            out[:, part] = attended(query[:, :, part], indices[:, part])[0]
        return out, None
    out, q, slots, lse = attended(query, indices)
    if not learns:
        return out, None
    if sink is not None:
        lse = torch.logaddexp(lse, sink)  # a head's probabilities are its share of the sum over heads
    return indexer_loss.joined(module, out, q, rows, slots, lse, scale), None


def of_16_bits(projected: torch.Tensor) -> torch.Tensor:
    """What a layer projects, in the dtype that kernels multiply: the model's, or that of autocast.

    Raises:
        UnsupportedError: It is another than bfloat16 and float16.
    """
    projected = autocast(projected)
    if projected.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"xmla.transformers: the model is {projected.dtype}, supported are bfloat16 and float16, also by autocast"
        )
    return projected


def autocast(x: torch.Tensor) -> torch.Tensor:
    """An array in the dtype that autocast asks for; entries in fp8 are bytes."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _up(module: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The weight [·, L] of a layer's `kv_b_proj`: of a plain `Linear` its own, else what becomes of the identity.

    An adapter, a quantised weight and one that hooks bring from elsewhere thus count as in a call.

    Raises:
        UnsupportedError: There is dropout in it, which is of tokens.
    """
    linear = module.kv_b_proj
    if type(linear) is nn.Linear and not hooked(linear):
        return linear.weight
    for each in linear.modules():
        if isinstance(each, nn.Dropout) and each.training and each.p:
            raise UnsupportedError(f"xmla.transformers: kv_b_proj has an adapter's dropout of {each.p}, supported: 0")
    return linear(torch.eye(module.kv_lora_rank, dtype=dtype, device=device)).T


def hooked(module: nn.Module) -> bool:
    """Whether a call of a module is more than its class's forward, which may change its weight or bring it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def slots_of(indices: torch.Tensor, apart: int) -> torch.Tensor:
    """Slots [B·S, K] of rows [B, S, K] of each sequence, in a pool that has sequences so many rows apart."""
    if len(indices) > 1:
        first = torch.arange(len(indices), dtype=torch.int32, device=indices.device)[:, None, None] * apart
        indices = torch.where(indices < 0, -1, indices + first)
    return indices.flatten(0, 1)


def flat(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows [B, N, ROW] of several sequences as one pool [·, 1, ROW], and how many rows there sequences are apart."""
    batch, length, row = rows.shape
    between, step, dense = rows.stride()
    if batch > 1 and (dense != 1 or between % step):
        rows = rows.contiguous()
        between, step = length * row, row
    if batch == 1:
        return rows[0, :, None], 0
    if between == length * step:
        return rows.flatten(0, 1)[:, None], length
    count = (batch - 1) * (between // step) + length
    return rows.as_strided((count, 1, row), (step, step, 1)), between // step
