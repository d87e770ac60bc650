"""What vLLM's DeepSeek-V4.1 calls of kernels for CUDA, in torch or by vLLM's own Triton kernels of other places."""

from typing import Any

import interpreted_v4
import torch

from benchmarks.engines.vllm import replaced_v41
from xmla.core.formats.mla import V4, V41

Tensor = torch.Tensor
# As of V4, whose queries it normalises, with what V4.1 asks besides.
FUSED_INSERT = interpreted_v4.FUSED_INSERT.replace(
    ") -> Tensor", ", bool norm, bool mxfp8, bool rotate, bool interleaved) -> Tensor"
)
INSERT = (
    "fused_deepseek_v4_kv_rope_insert(Tensor kv, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor cos_sin, "
    "int page_size, Tensor? scale, bool mxfp8) -> ()"
)


def kernels() -> dict[str, Any]:
    return {FUSED_INSERT: fused_insert, INSERT: insert}


def prepare() -> None:
    """Before the configuration is made: the model is that of text alone, and the caches are Hopper's."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    type(current_platform).get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(9, 0))
    replaced_v41.install()


def install() -> None:
    """Let a worker on a CPU serve the model of GPUs."""
    from vllm import _custom_ops
    from vllm.models.deepseek_v41 import attention

    _custom_ops.fused_indexer_q_rope_quant_cpu = interpreted_v4.quantize_queries
    torch.cuda.is_current_stream_capturing = lambda: False
    attention.DeepseekV4Attention._run_parallel_input_projections = input_projections
    attention.maybe_execute_in_parallel = lambda first, second, *_: (first(), second())


def input_projections(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The projections of a layer's input: on a CPU `torch.mm` has no other dtype for its result."""
    latents = self.compressor and x.float() @ self.compressor.fused_wkv_wgate.weight.float().T
    return self.fused_wqa_wkv(x)[0], latents, self.indexer and self.indexer.weights_proj(x)[0]


def fused_insert(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos_sin: Tensor, heads: int, eps: float,
    page_size: int, norm: bool, mxfp8: bool, rotate: bool, interleaved: bool,
) -> Tensor:  # fmt: skip
    """The kernel that rotates queries, of which it makes `heads` with zeros, and writes the window's cache."""
    assert (norm, rotate, interleaved) == (False, True, False)
    insert(kv, cache, slots, positions, cos_sin, page_size, None, mxfp8)
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    even, odd = q[..., -2 * cos.shape[-1] :].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    whole = torch.cat((q[..., : -rotated.shape[-1]], rotated.to(q.dtype)), dim=-1)
    return torch.nn.functional.pad(whole, (0, 0, 0, heads - q.shape[1]))


def insert(
    kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos_sin: Tensor, page_size: int, scale: Tensor | None,
    mxfp8: bool,
) -> None:  # fmt: skip
    """The kernel that writes the window's cache, by the Triton kernel that writes entries of one token."""
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import rope_quant_insert

    assert scale is None
    row = V41.row if mxfp8 else V4.row
    entries = cache.as_strided((len(cache), page_size, row), (cache.stride(0), row, 1))
    rope_quant_insert(kv.contiguous(), positions, cos_sin, entries, slots, 1)
