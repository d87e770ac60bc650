"""What vLLM's GLM-5.3-Flash calls of kernels for CUDA, in torch or by vLLM's own Triton kernels."""

from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch

from benchmarks.engines.vllm import replaced_glm


def prepare() -> None:
    """Before the configuration is made: the model is that of text alone, and the caches are Hopper's."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(9, 0))
    replaced_glm.install()


def kernels() -> dict[str, Any]:
    return {}


def install() -> None:
    """Let a worker on a CPU serve the model of GPUs."""
    from vllm.models.glm5next import sparse_indexer
    from vllm.models.glm5next.common import kda
    from vllm.models.glm5next.nvidia.ops import kpool_compress

    from xmla.vllm import patches

    patches.apply_all(patches.POOL_PATCHES, version("vllm"))
    kda.Glm5NextLinearAttention._forward = linear_attention
    compress = kpool_compress.kpool_compress_and_write_cache
    kpool_compress.kpool_compress_and_write_cache = compress_complete(compress)
    kpool_compress.kpool_decode_update_and_maybe_write_cache_batched = partial(add_to_rings, compress)
    torch.cuda.is_current_stream_capturing = lambda: False
    sparse_indexer.SparseAttnIndexerKpool.forward_cpu = sparse_indexer.SparseAttnIndexerKpool.forward_native


def compress_complete(compress: Any) -> Any:
    """vLLM's function over pools that are written: Triton's interpreter refuses its kernel's mask of the others."""

    def kpool_compress_and_write_cache(
        cache: torch.Tensor, keys: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor, slots: torch.Tensor, *,
        write_mask: torch.Tensor, **sizes: Any,
    ) -> None:  # fmt: skip
        if write_mask.any():
            compress(cache, keys[write_mask], gates[write_mask], ape, slots[write_mask], write_mask=None, **sizes)

    return kpool_compress_and_write_cache


def add_to_rings(
    compress: Any, cache: torch.Tensor, ring: torch.Tensor, places: torch.Tensor, keys: torch.Tensor,
    gates: torch.Tensor, ape: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, pool: int, dim: int,
    round_scale: bool,
) -> None:  # fmt: skip
    """Tokens of decodes: for their kernel's mask too."""
    size = ring.shape[2]
    for request, token in (places >= 0).logical_and(positions >= 0).nonzero().tolist():
        place, position, slot = (int(x[request, token]) for x in (places, positions, slots))
        kept = ring[place // size]
        kept[0, position % size], kept[1, position % size] = keys[request, token], gates[request, token]
        if slot >= 0 and position % pool == pool - 1:
            whole = [kept[half, torch.arange(position - pool + 1, position + 1) % size][None] for half in (0, 1)]
            compress(cache, *whole, ape, torch.tensor([slot]), pool, dim, round_scale=round_scale)


def linear_attention(
    self: Any, qkv_proj_states: torch.Tensor, g1: torch.Tensor, beta: torch.Tensor, core_attn_out: torch.Tensor
) -> None:
    """The kernels of KDA: a convolution over the last tokens, the gated delta rule, and the states of both."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return
    step, (convolved, states) = metadata[self.prefix], self.kv_cache
    kernels = torch.cat([part.weight[:, 0] for part in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
    old, starts = step.has_initial_state, step.non_spec_query_start_loc.tolist()
    for request, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        place, fresh = int(step.non_spec_state_indices_tensor[request]), old is not None and not old[request]
        before = convolved[place] if not self._conv_state_dim_first else convolved[place].T
        before = torch.zeros_like(before) if fresh else before
        inputs = torch.cat((before, qkv_proj_states[first:last].to(before.dtype)))
        size = kernels.shape[1]
        windows = inputs.float().unfold(0, size, 1)  # [tokens, channels, size]
        kept = inputs[1 - size :]
        convolved[place] = kept if not self._conv_state_dim_first else kept.T
        mixed = torch.nn.functional.silu((windows * kernels.float()).sum(-1)).to(qkv_proj_states.dtype).float()
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in mixed.chunk(3, dim=1))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        raw = g1[0, first:last].float() + self.dt_bias.view(-1, self.head_dim)
        decay = (self.kda_lower_bound * torch.sigmoid(self.A_log.exp().view(-1, 1) * raw)).exp()
        weights = beta[0, first:last].float().sigmoid()
        state = torch.zeros_like(states[place]) if fresh else states[place].clone()  # [heads, values, keys]
        for token in range(last - first):
            state = state * decay[token, :, None]
            change = (v[token] - (state * k[token, :, None]).sum(-1)) * weights[token, :, None]
            state = state + change[..., None] * k[token, :, None]
            core_attn_out[0, first + token] = (state * q[token, :, None]).sum(-1) * self.head_dim**-0.5
        states[place] = state
