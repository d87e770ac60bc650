"""Attention of DeepSeek-V4's layers: as in `attention_v4_base`, with entries of 4 tokens, selected, or all of 128."""

from typing import Any, ClassVar

import torch
from vllm.models.deepseek_v4.nvidia import flashmla
from vllm.v1.attention.backends.mla import sparse_swa

from xmla.vllm.attention_v4_base import V4AttentionBase, make_window_backend
from xmla.vllm.refusals import is_batch_invariant

# FlashMLA has a backend of its own for the window in 0.33, and that of other kernels in 0.26.
WindowBackend: Any = getattr(flashmla, "DeepseekSparseSWAFlashMLABackend", sparse_swa.DeepseekSparseSWABackend)


class XmlaV4Attention(V4AttentionBase, flashmla.DeepseekV4FlashMLAAttention):
    window_backend: ClassVar = make_window_backend(WindowBackend)

    @classmethod
    def unserved(cls, vllm_config: Any) -> dict[str, bool]:
        images = getattr(vllm_config.model_config.hf_config, "vision_n_layers", 0) > 0
        return super().unserved(vllm_config) | {"images of DeepSeek-V4": images}

    @property
    def attends_to_all(self) -> bool:
        return self.compress_ratio > 4

    def entry_widths(self) -> tuple[int, ...]:
        """Slots of compressed entries for a token: for all of a request's a power of two from 128 on."""
        if self.compress_ratio <= 1:
            return (0,)
        if not self.attends_to_all:
            return (self.topk_indices_buffer.shape[1],)
        most = -(-self.max_model_len // (self.compress_ratio * 128)) * 128
        if is_batch_invariant():  # `patches` has vLLM take the widest: splits follow the width
            return (most,)
        return (*(128 << i for i in range(most.bit_length()) if 128 << i < most), most)

    def entry_metadata(self, metadata: dict[str, Any]) -> Any:
        return metadata.get(self.prefix)

    def entry_cache(self) -> torch.Tensor:
        return self.kv_cache

    def entry_positions(self, compressed: Any, part: slice) -> torch.Tensor:
        if self.attends_to_all:
            return compressed.c128a_prefill_topk_indices
        return super().entry_positions(compressed, part)

    def map_entries(
        self, compressed: Any, part: slice, decodes: bool, slots: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the compressed entries, which the metadata have for decodes that attend to all entries."""
        if self.attends_to_all and decodes:
            return compressed.c128a_global_decode_topk_indices.squeeze(1), compressed.c128a_decode_topk_lens
        return super().map_entries(compressed, part, decodes, slots, counts)
