"""vLLM's attention backend for DeepSeek sparse attention: `write_mla_cache`, `map_slots`, `sparse_mla`.

Metadata and its builders are vLLM's. Tokens of prefill and decode, of any number per request, are one call.
"""

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm import _custom_ops
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseMetadata
from vllm.v1.worker.workspace import current_workspace_manager

from xmla import torch_api as xt
from xmla.core.device import KNOWN_DEVICES

log = init_logger("vllm.xmla")
REPLACED = "cache writes, indexer logits and top-k, slots, sparse MLA of prefill and decode"
LEFT = (
    "dense attention of prefills no longer than top-k (sparse_mla_force_mqa turns it off), rotation and quantisation "
    "of queries, cache writes in fused kernels of the model"
)
LATENT, ENTRY = 512, 576  # dims of a value and of an entry
PAGE = 64  # of the indexer's cache in vLLM, so of this one
# Beyond this many tokens no plan splits a token's keys.
SPLIT_TOKENS = 1024


class XmlaSparseBackend(FlashMLASparseBackend):
    """FlashMLA's backend with other kernels: the same caches, by the same name.

    vLLM compares the name to turn "fp8" into its packed format.
    """

    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "fp8_ds_mla", "fp8"]

    @staticmethod
    def get_builder_cls() -> type:
        return XmlaSparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type:
        return XmlaSparseImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [ENTRY]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Where the ops run with e4m3, in which vLLM's indexer stores its keys: not on sm_80."""
        return capability.to_int() in {device.arch for device in KNOWN_DEVICES}

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        offloads = getattr(get_current_vllm_config().attention_config, "hisparse_config", None) is not None
        return "xmla does not read a cache that HiSparse offloads" if offloads else None


class XmlaSparseMetadataBuilder(SparseMLACommonMetadataBuilder[FlashMLASparseMetadata]):
    """vLLM's metadata. The split into decodes and prefills tells which tokens may take dense attention."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = FlashMLASparseMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class XmlaSparseImpl(SparseMLACommonImpl[FlashMLASparseMetadata]):
    """Attention of one layer. Its memory is vLLM's workspace, which all layers share and which is reserved here."""

    supports_pcp: ClassVar = False
    supports_dcp: ClassVar = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        log.info_once(f"DeepSeek sparse attention runs on xmla: {REPLACED}. vLLM's own remain: {LEFT}")
        tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        keys = self.topk_indices_buffer.shape[1]
        self.reserved = workspace_bytes(self.num_heads, keys, tokens, self.topk_indices_buffer.device)
        self.workspace(tokens)

    def workspace(self, tokens: int) -> list[torch.Tensor]:
        """Queries, out, lse, slots, their counts and scratch memory, for this many tokens."""
        heads, keys = self.num_heads, self.topk_indices_buffer.shape[1]
        return current_workspace_manager().get_simultaneous(
            ((tokens, heads, ENTRY), torch.bfloat16),
            ((tokens, heads, LATENT), torch.bfloat16),
            ((tokens, heads), torch.float32),
            ((tokens, keys), torch.int32),
            ((tokens,), torch.int32),
            ((self.reserved,), torch.uint8),
        )

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *_: Any
    ) -> None:
        if kv_cache.numel() == 0:  # the profile run's
            return
        slots = slot_mapping.flatten()
        latent, rope = kv_c_normed[: slots.numel()], k_pe.squeeze(1)[: slots.numel()]  # they may be padded
        xt.write_mla_cache(latent, rope, slots, kv_cache, scale_floor="amax")

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries, as one tensor or as latent and rope; out [T, H, 512] and lse [T, H]."""
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        queries, out, lse, slots, counts, scratch = self.workspace(tokens)
        q = joined(q[0], q[1], queries) if isinstance(q, tuple) else q
        xt.map_slots(
            self.topk_indices_buffer[:tokens],
            attn_metadata.block_table,
            attn_metadata.req_id_per_token[:tokens],
            page_size=attn_metadata.block_size,
            out=(slots, counts),
        )
        cache = kv_c_and_k_pe_cache
        return xt.sparse_mla(q, cache, slots, counts, softmax_scale=self.scale, out=(out, lse), workspace=scratch)


def joined(latent: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` [T, H, 576] with the queries' two parts.

    The latent part is a transposed product, over which `torch.cat` takes eight times as long as vLLM's own kernel
    (vllm#34917).
    """
    if latent.is_cuda:
        _custom_ops.concat_mla_q(latent, rope, out)
        return out
    return torch.cat((latent, rope), dim=-1, out=out)


@lru_cache
def workspace_bytes(heads: int, keys: int, tokens: int, device: torch.device) -> int:
    """The most scratch memory of `sparse_mla` with up to this many tokens, over pools of any size.

    Memory grows with splits, which few tokens have, and with the entries of a pool small enough to be dequantised
    first: at most one for 32 slots.
    """
    sizes = {(count, 1 << 20) for count in range(1, min(tokens, SPLIT_TOKENS) + 1)}
    sizes |= {(tokens, max(1, tokens * keys // (32 * PAGE)))}
    with FakeTensorMode():
        return max(planned_bytes(count, heads, keys, pages, device) for count, pages in sizes)


def planned_bytes(tokens: int, heads: int, keys: int, pages: int, device: torch.device) -> int:
    q = torch.empty(tokens, heads, ENTRY, dtype=torch.bfloat16, device=device)
    slots, lengths = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((tokens, keys), (tokens,)))
    pools = ((pages, PAGE, 656), torch.uint8), ((pages, PAGE, ENTRY), torch.bfloat16)
    caches = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in pools]
    return max(xt.sparse_mla.plan(q, cache, slots, lengths, softmax_scale=1.0).workspace_bytes for cache in caches)
