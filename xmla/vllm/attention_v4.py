"""Attention of DeepSeek-V4's layers over the window's cache and the compressed one: `map_slots`, `sparse_mla`.

Metadata, caches and their writers are vLLM's. V4's layers take no backend: each is an instance of a class of vLLM,
which is derived from here.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.deepseek_v4.nvidia import flashmla
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.worker.workspace import current_workspace_manager

from xmla import torch_api as xt
from xmla.core.formats.mla import VALUE_DIMS
from xmla.torch_api._arrays import device_of
from xmla.vllm import memory
from xmla.vllm.gathered import Gathered, rows_are_faster
from xmla.vllm.refusals import refuse

log = init_logger("vllm.xmla")
REPLACED = "indexer logits and top-k, slots, sparse MLA of prefill and decode over both caches"
LEFT = (
    "rotation and quantisation of queries, writers of all caches with the compressors, selection where top-k is all "
    "entries, slots of the window, the output's inverse rotation and projection, mHC"
)
# FlashMLA has a backend of its own for the window in 0.33, and that of other kernels in 0.26.
WindowBackend: Any = getattr(flashmla, "DeepseekSparseSWAFlashMLABackend", sparse_swa.DeepseekSparseSWABackend)
WindowBuilder: Any = WindowBackend.get_builder_cls()


class XmlaWindowBuilder(WindowBuilder):
    """vLLM's metadata of the window, without FlashMLA's schedules, which only its own architectures have.

    A graph holds one split of a step into decodes and prefills, so it must not be replayed for a step with another.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Any]:
        return super().build_tile_scheduler(0)


class XmlaWindowBackend(WindowBackend):
    @staticmethod
    def get_builder_cls() -> type:
        return XmlaWindowBuilder


class XmlaV4Attention(flashmla.DeepseekV4FlashMLAAttention):
    """FlashMLA's layer with another kernel. Its memory is vLLM's workspace, which is reserved here."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(unserved(vllm_config))
        super().__init__(vllm_config, *args, **kwargs)
        self.swa_cache_layer.get_attn_backend = lambda: XmlaWindowBackend
        log.info_once(f"DeepSeek sparse attention runs on xmla: {REPLACED}. vLLM's own remain: {LEFT}")
        tokens, widths = self.max_num_batched_tokens, self.entry_widths()
        self.entry_slots = max(widths)
        self.gathers, device = rows_are_faster(self.padded_heads), device_of(self.attn_sink.device)
        self.reserved = memory.scratch_v4(
            self.padded_heads, self.window_size, widths, tokens, device, self.most_rows(tokens) if self.gathers else 0
        )  # fmt: skip
        self.workspace(tokens)

    def entry_widths(self) -> tuple[int, ...]:
        """Slots of compressed entries that a token may have in a step: of all entries a power of two from 128 on."""
        if self.compress_ratio <= 1:
            return (0,)
        if self.compress_ratio == 4:
            return (self.topk_indices_buffer.shape[1],)
        most = -(-self.max_model_len // (self.compress_ratio * 128)) * 128
        return (*(128 << i for i in range(most.bit_length()) if 128 << i < most), most)

    def most_rows(self, tokens: int) -> int:
        """Entries that prefills of so many tokens gather, at most."""
        return memory.most_gathered(tokens, self.window_size + min(self.entry_widths()))

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def workspace(self, tokens: int) -> list[torch.Tensor]:
        """Of a call: scratch memory, lse, slots of compressed entries and their counts."""
        return current_workspace_manager().get_simultaneous(
            ((self.reserved,), torch.uint8),
            ((tokens, self.padded_heads), torch.float32),
            ((tokens, self.entry_slots), torch.int32),
            ((tokens,), torch.int32),
        )

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of q [T, H, 512] to `output`. The window's cache has `kv` already."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # the profile run's
            output.zero_()
            return
        step, compressed = metadata[self.swa_cache_layer.prefix], metadata.get(self.prefix)
        first, prefilled = step.num_decode_tokens, step.num_prefill_tokens
        if first:
            slots = step.decode_swa_indices, step.decode_swa_lens
            self.attend(q, output, slice(first), slots, compressed, decodes=True)
        if prefilled:
            slots, part = (step.prefill_swa_indices, step.prefill_swa_lens), slice(first, first + prefilled)
            rows = self.rows(step, compressed, part)
            self.attend(q, output, part, slots, compressed, decodes=False, rows=rows)

    def rows(self, step: Any, compressed: Any, part: slice) -> "Rows | None":
        """What this kind of layers gathers in a step: found by the first of them, its windows by the first layer."""
        if not self.gathers:
            return None
        rows_by_ratio: dict[int, Rows | None] = vars(step).setdefault("rows", {})
        if 1 not in rows_by_ratio:
            rows_by_ratio[1] = self.window_rows(step, part)
        window, ratio = rows_by_ratio[1], self.compress_ratio
        if window is not None and ratio not in rows_by_ratio:
            page = self.kv_cache.shape[1]
            last = -(-step.prefill_seq_lens_cpu.long() // (ratio * page))
            most = memory.most_gathered(part.stop - part.start, min(self.entry_widths()))
            table, requests = compressed.block_table[step.num_decodes :], window.window.requests
            entries = Gathered.of(table, requests, torch.zeros_like(last), last, page, most)
            rows_by_ratio[ratio] = None if entries is None else replace(window, entries=entries)
        return None if window is None else rows_by_ratio[ratio]

    def window_rows(self, step: Any, part: slice) -> "Rows | None":
        """The pages that windows of prefills may reach, and the tokens' slots in them."""
        lengths, new, page = step.prefill_seq_lens_cpu.long(), step.prefill_query_lens_cpu.long(), step.block_size
        # Lengths on the host may be too large, by drafted tokens: windows may begin a page before.
        first = ((lengths - new - self.window_size + 1) // page - 1).clamp(min=0)
        most = memory.most_gathered(part.stop - part.start, self.window_size)
        table, requests = step.block_table[step.num_decodes :], step.token_to_req_indices[part] - step.num_decodes
        window = Gathered.of(table, requests, first, -(-lengths // page), page, most)
        if window is None:
            return None
        return Rows(window, window.places(step.prefill_swa_indices, self.swa_cache_layer.kv_cache.shape[0]))

    def attend(
        self, q: torch.Tensor, output: torch.Tensor, part: slice, window: tuple[torch.Tensor, torch.Tensor],
        compressed: Any, decodes: bool, rows: "Rows | None" = None,
    ) -> None:  # fmt: skip
        """The tokens of `part`, with their slots in the window's cache [n, 1, K] and the number of them [n]."""
        slots, counts = window
        scratch, lse, *entries = self.workspace(len(counts))
        extra: tuple[torch.Tensor | None, ...] = None, None, None
        cache, second, results = self.swa_cache_layer.kv_cache, self.kv_cache, (output[part], lse)
        gathered = None if rows is None else rows.entries
        if rows is not None:
            cache, scratch = rows.window.read(cache, VALUE_DIMS, scratch)
            slots = rows.slots
        if gathered is not None:
            second, scratch = gathered.read(second, VALUE_DIMS, scratch)
        if compressed is not None:
            extra = second, *self.entries(compressed, part, decodes, gathered, *entries)
        xt.sparse_mla(
            q[part], cache, slots.squeeze(1), counts, self.attn_sink, *extra, softmax_scale=self.scale, out=results,
            workspace=scratch,
        )  # fmt: skip

    def entries(
        self, compressed: Any, part: slice, decodes: bool, gathered: Gathered | None, slots: torch.Tensor,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Slots [n, K] of the compressed entries of each token and the number of them: the metadata's or the memory."""
        every = self.compress_ratio > 4
        if every and decodes:
            return compressed.c128a_global_decode_topk_indices.squeeze(1), compressed.c128a_decode_topk_lens
        positions = compressed.c128a_prefill_topk_indices if every else self.topk_indices_buffer[part]
        table, requests = compressed.block_table, compressed.req_id_per_token[part]
        if gathered is not None:
            table, requests = gathered.table, gathered.requests
        slots = slots.flatten()[: positions.numel()].view_as(positions)
        xt.map_slots(positions, table, requests, page_size=self.kv_cache.shape[1], out=(slots, counts))
        return slots, counts


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a layer's prefills attend to: of the window, with the tokens' slots, and of compressed entries."""

    window: Gathered
    slots: torch.Tensor  # [prefill tokens, 1, window]
    entries: Gathered | None = None


def unserved(vllm_config: Any) -> dict[str, bool]:
    drafts, config = vllm_config.speculative_config, vllm_config.model_config.hf_config
    return {
        "DSpark": drafts is not None and drafts.use_dspark(),
        "images of DeepSeek-V4": getattr(config, "vision_n_layers", 0) > 0,
        "two micro-batches at once": vllm_config.parallel_config.use_ubatching,
        "decode context parallelism of DeepSeek-V4": vllm_config.parallel_config.decode_context_parallel_size > 1,
    }
