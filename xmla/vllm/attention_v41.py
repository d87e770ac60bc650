"""Attention of DeepSeek-V4.1's layers: as in `attention_v4_base`, with entries of one token or two.

Layers share them: those that are no source attend to the cache, and with the metadata, of the source before them.
"""

from typing import Any, ClassVar

import torch
from vllm.models.deepseek_v41.nvidia import flashmla

from xmla.vllm.attention_v4_base import V4AttentionBase, make_window_backend


class XmlaV41Attention(V4AttentionBase, flashmla.DeepseekV4FlashMLAAttention):
    window_backend: ClassVar = make_window_backend(flashmla.DeepseekSparseSWAFlashMLABackend)

    def entry_widths(self) -> tuple[int, ...]:
        return (self.topk_indices_buffer.shape[1] if self.compress_ratio else 0,)

    def entry_metadata(self, metadata: dict[str, Any]) -> Any:
        return None if self.compressed_cache_prefix is None else metadata[self.compressed_cache_prefix]

    def entry_cache(self) -> torch.Tensor:
        return self._compressed_kv_cache()
