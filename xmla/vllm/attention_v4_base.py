"""Attention of layers over a window's cache and one of compressed entries, as in DeepSeek-V4 and V4.1.

It is `map_slots` and `sparse_mla`. Metadata, caches and their writers are vLLM's. These layers take no backend: each is
an instance of a class of vLLM, which `attention_v4` and `attention_v41` derive from with `V4AttentionBase` before it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_supported
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.workspace import current_workspace_manager

from xmla import torch_api as xt
from xmla.core.formats.mla import V4, V41, V41_FP4, VALUE_DIMS, MlaLayout
from xmla.core.models import memory
from xmla.core.values import MIN_E4M3_ARCH, Device
from xmla.torch_api._arrays import device_of
from xmla.vllm.contract import SINCE_033
from xmla.vllm.gathered import Gathered, Pages, once_a_step, rows_are_faster
from xmla.vllm.projection import keep_plain, project
from xmla.vllm.refusals import is_batch_invariant, refuse

log = init_logger("vllm.xmla")
REPLACED = "indexer logits and top-k, slots, sparse MLA of prefill and decode over both caches"
LEFT = (
    "rotation and quantisation of queries, writers of all caches with the compressors, selection where top-k is all "
    "entries, slots of the window, mHC, and where DeepGEMM serves the GPU the output's inverse rotation and projection"
)


# By the bytes of an entry: rows of 528 and 288 bytes have other formats too.
FORMATS = {layout.row: layout for layout in (V4, V41, V41_FP4)}


def make_window_backend(backend: Any) -> type:
    """vLLM's backend of the window, whose metadata has no schedules of FlashMLA, which only its own architectures have.

    A graph holds one split of a step into decodes and prefills, so it must not be replayed for a step with another.
    """

    builder: Any = backend.get_builder_cls()

    class XmlaWindowBuilder(builder):
        _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

        def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Any]:
            return super().build_tile_scheduler(0)

        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
            """Most tokens of a request in a graph of decodes, which takes of each as many as the device says."""
            return 1 + vllm_config.num_speculative_tokens

    class XmlaWindowBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return XmlaWindowBuilder

    return XmlaWindowBackend


@cache
def served_in_any_batch(backend: type) -> type:
    """A backend of vLLM's, which says that VLLM_BATCH_INVARIANT=1 is served: by xmla's kernels it is."""
    return type(backend.__name__, (backend,), {"supports_batch_invariance": classmethod(lambda _: True)})


class Workspace(NamedTuple):
    """Memory of a call in vLLM's workspace."""

    scratch: torch.Tensor  # of `sparse_mla`
    lse: torch.Tensor
    slots: torch.Tensor  # of compressed entries
    counts: torch.Tensor  # of each token's slots


def window_slots(vllm_config: Any, window: int) -> int:
    """Slots of the window's cache that a token may have: in a layer of DSpark those of all tokens of its block too."""
    drafts = vllm_config.speculative_config
    if drafts is None or not drafts.use_dspark():
        return window
    from vllm.compilation import backends
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    drafting = backends.model_tag == "dspark_head"  # while vLLM makes the drafter
    return get_dspark_swa_index_width(window, drafts.num_speculative_tokens) if drafting else window


class V4AttentionBase:
    """FlashMLA's layer with another kernel. Its memory is vLLM's workspace, which is reserved here."""

    window_backend: ClassVar[type]
    # What vLLM's class has.
    padded_heads: int
    window_size: int
    max_num_batched_tokens: int
    compress_ratio: int
    scale: float
    attn_sink: torch.Tensor  # [H] float32
    n_local_groups: int  # of the output's projection
    wo_a: Any  # its first part, a product for each group
    wo_b: Any
    rotary_emb: Any
    topk_indices_buffer: torch.Tensor  # [tokens, K] int32
    swa_cache_layer: Any
    swa_bytes_per_token: int  # V4.1's; V4 has neither
    compressed_bytes_per_token: int

    @property
    def formats(self) -> tuple[MlaLayout, MlaLayout]:
        """Formats of the window's entries and of the compressed ones."""
        rows = getattr(self, "swa_bytes_per_token", V4.row), getattr(self, "compressed_bytes_per_token", V4.row)
        return FORMATS[rows[0]], FORMATS[rows[1]]

    @abstractmethod
    def entry_widths(self) -> tuple[int, ...]:
        """Slots of compressed entries that a token may have in a step."""

    @abstractmethod
    def entry_metadata(self, metadata: dict[str, Any]) -> Any:
        """The step's metadata of the compressed entries that the layer attends to; None if it has none."""

    @abstractmethod
    def entry_cache(self) -> torch.Tensor:
        """The cache of these entries [P, R, bytes]."""

    def entry_positions(self, compressed: Any, part: slice) -> torch.Tensor:
        """The entries [n, K] that each token of `part` attends to, as positions in its request, −1 padded."""
        return self.topk_indices_buffer[part]

    @classmethod
    def unserved(cls, vllm_config: Any) -> dict[str, bool]:
        drafts, parallel = vllm_config.speculative_config, vllm_config.parallel_config
        capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
        arch, old = 90 if capability is None else capability.to_int(), not SINCE_033.contains(version("vllm"))
        return {
            f"DeepSeek-V4 on sm_{arch}": arch < (90 if old else MIN_E4M3_ARCH),  # 0.33 has its mHC without DeepGEMM
            "DSpark before vLLM 0.33": old and drafts is not None and drafts.use_dspark(),
            "two micro-batches at once": parallel.use_ubatching,
            "decode context parallelism of DeepSeek-V4": parallel.decode_context_parallel_size > 1,
            # For the compressors' product, of float32 from bfloat16, vLLM has no kernel of this mode there.
            f"VLLM_BATCH_INVARIANT=1 of DeepSeek-V4 on sm_{arch}": is_batch_invariant() and arch < 90,
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(self.unserved(args[0]))  # vLLM's configuration
        super().__init__(*args, **kwargs)
        window = self.window_backend if not is_batch_invariant() else served_in_any_batch(self.window_backend)
        self.swa_cache_layer.get_attn_backend = lambda: window
        if not is_deep_gemm_supported():
            keep_plain(self.wo_a)
        log.info_once(f"DeepSeek sparse attention runs on xmla: {REPLACED}. vLLM's own remain: {LEFT}")
        tokens, widths = self.max_num_batched_tokens, self.entry_widths()
        self.max_entry_slots = max(widths)
        # Whether a step gathers depends on all of its requests.
        self.invariant, device = is_batch_invariant(), device_of(self.attn_sink.device)
        self.gathers = rows_are_faster(self.padded_heads) and not self.invariant
        self.window_slots = window_slots(args[0], self.window_size)
        self.reserved = memory.scratch_v4(
            self.padded_heads, self.window_slots, widths, tokens, device, self.most_rows(tokens) if self.gathers else 0,
            self.formats,
        )  # fmt: skip
        self.at_once = tokens
        if self.invariant:
            self.reserved, self.at_once = memory.divide(self.reserved, self.a_token(device), tokens)
        self.workspace(tokens)

    def a_token(self, device: Device) -> int:
        """Bytes that a token's splits take with the same bits in any batch."""
        (first, second), heads, pages = self.formats, self.padded_heads, memory.LARGE_POOL
        widths = self.entry_widths()
        calls = [memory.attention(first, heads, self.window_slots, 1, pages, width, second) for width in widths]
        return memory.invariant_scratch(calls, device)

    def get_attn_backend(self) -> type:
        """The backend of the compressed entries, whose metadata are vLLM's."""
        own: Any = super()
        backend: type = own.get_attn_backend()
        return served_in_any_batch(backend) if is_batch_invariant() else backend

    def most_rows(self, tokens: int) -> int:
        """Entries that prefills of so many tokens gather, at most."""
        return memory.most_gathered(tokens, self.window_size + min(self.entry_widths()))

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The output's inverse rotation and projection: by DeepGEMM, as without xmla, where it serves the GPU."""
        if is_deep_gemm_supported():
            own: Any = super()
            return own._o_proj(o, positions)
        weight = self.wo_a.weight.unflatten(0, (self.n_local_groups, -1))
        grouped = project(o, positions, self.rotary_emb.cos_sin_cache, weight)
        return getattr(self, "_wo_b_proj", self.wo_b)(grouped)  # V4.1's, which may reduce and scatter too

    def workspace(self, tokens: int) -> Workspace:
        tensors = current_workspace_manager().get_simultaneous(
            ((self.reserved,), torch.uint8),
            ((tokens, self.padded_heads), torch.float32),
            ((tokens, self.max_entry_slots), torch.int32),
            ((tokens,), torch.int32),
        )
        return Workspace(*tensors)

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of q [T, H, 512] to `output`. The window's cache has `kv` already."""
        context = get_forward_context()
        metadata = context.attn_metadata
        if metadata is None:  # the profile run's
            output.zero_()
            return
        step, compressed = metadata[self.swa_cache_layer.prefix], self.entry_metadata(metadata)
        first, prefilled = step.num_decode_tokens, step.num_prefill_tokens
        if first:
            slots = step.decode_swa_indices.squeeze(1), step.decode_swa_lens
            self.attend(q, output, slice(first), slots, compressed, decodes=True)
        if prefilled:
            part = slice(first, first + prefilled)
            rows = self.rows(context, step, compressed, positions, part) if self.gathers else None
            if rows is None:
                slots = step.prefill_swa_indices.squeeze(1), step.prefill_swa_lens
                self.attend(q, output, part, slots, compressed, decodes=False)
            else:
                self.attend_to_rows(q, output, part, step, compressed, rows)

    def attend(
        self, q: torch.Tensor, output: torch.Tensor, part: slice, window: tuple[torch.Tensor, torch.Tensor],
        compressed: Any, decodes: bool,
    ) -> None:  # fmt: skip
        """The tokens of `part`, with their slots in the window's cache [n, K] and the number of them [n]."""
        slots, counts = window
        space = self.workspace(len(counts))
        extra: tuple[torch.Tensor | None, ...] = None, None, None
        window_format, entry_format = self.formats
        if compressed is None:
            entry_format = None
        else:
            extra = self.entry_cache(), *self.map_entries(compressed, part, decodes, space.slots, space.counts)
        named = memory.format_names(window_format, entry_format)
        for begin in range(0, len(counts), self.at_once):
            rows = slice(begin, begin + self.at_once)
            of_rows = (None if each is None else each[rows] for each in extra[1:])
            xt.sparse_mla(
                q[part][rows], self.swa_cache_layer.kv_cache, slots[rows], counts[rows], self.attn_sink, extra[0],
                *of_rows, softmax_scale=self.scale, batch_invariant=self.invariant,
                out=(output[part][rows], space.lse[rows]), workspace=space.scratch, **named,
            )  # fmt: skip

    def map_entries(
        self, compressed: Any, part: slice, decodes: bool, slots: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [n, K] of the compressed entries of each token and the number of them, in the memory for them."""
        positions = self.entry_positions(compressed, part)
        table, requests = compressed.block_table, compressed.req_id_per_token[part]
        slots = slots.flatten()[: positions.numel()].view_as(positions)
        xt.map_slots(positions, table, requests, page_size=self.entry_cache().shape[1], out=(slots, counts))
        return slots, counts

    def attend_to_rows(
        self, q: torch.Tensor, output: torch.Tensor, part: slice, step: Any, compressed: Any, rows: "Rows"
    ) -> None:
        """`attend` of prefills, over rows of the entries in both caches."""
        window = once_a_step(step, "slots of rows", lambda: rows.pages.slots(step.block_table, step.block_size))
        window_format, entry_format = (layout.name for layout in self.formats)
        xt.read_mla_cache(self.swa_cache_layer.kv_cache, window, cache_format=window_format, out=rows.window)
        extra: tuple[torch.Tensor | None, ...] = None, None, None
        if rows.entries is not None:
            entries = rows.entries
            xt.read_mla_cache(self.entry_cache(), entries.slots, cache_format=entry_format, out=entries.rows)
            selected, pages = self.entry_positions(compressed, part), entries.pages
            xt.map_slots(
                selected, pages.table, pages.requests, page_size=pages.page, out=(entries.selected, entries.counts)
            )
            extra = entries.pool, entries.selected, entries.counts
        whole = part == slice(0, len(q))
        xt.sparse_mla(
            q if whole else q[part], rows.pool, rows.slots, step.prefill_swa_lens, self.attn_sink, *extra,
            softmax_scale=self.scale, out=(output if whole else output[part], rows.lse), workspace=rows.scratch,
        )  # fmt: skip

    def rows(self, context: Any, step: Any, compressed: Any, positions: torch.Tensor, part: slice) -> "Rows | None":
        """What prefills gather in a step, and the memory for it: kept for all layers of a kind.

        Layers whose windows are in pages of their own have the same rows, which they read from other slots.
        """
        holder = context if compressed is None else compressed
        return once_a_step(holder, "rows", lambda: self.gather_rows(context, step, compressed, positions, part))

    def gather_rows(
        self, context: Any, step: Any, compressed: Any, positions: torch.Tensor, part: slice
    ) -> "Rows | None":  # fmt: skip
        """Rows of the windows and of compressed entries; None if either are too many.

        Entries come first: of the few tokens that V4.1 replays they mostly are, and then no window is made.
        """
        requests = once_a_step(context, "requests", lambda: step.token_to_req_indices[part] - step.num_decodes)
        gathered = None if compressed is None else self.entry_rows(step, compressed, requests)
        if compressed is not None and gathered is None:
            return None
        window = once_a_step(context, "window", lambda: self.window(step, positions, part, requests))
        if window is None:
            return None
        pages, slots = window
        space = self.workspace(len(slots))
        recent, scratch = pages.memory(VALUE_DIMS, space.scratch)
        entries = None
        if gathered is not None:
            rows, scratch = gathered.pages.memory(VALUE_DIMS, scratch)
            shape = self.entry_positions(compressed, part).shape
            selected = space.slots.flatten()[: shape.numel()].view(shape)
            pool = as_pool(rows, gathered.pages)
            entries = Entries(gathered.pages, gathered.slots, rows, pool, selected, space.counts)
        return Rows(pages, slots, recent, as_pool(recent, pages), entries, space.lse, scratch)

    def window(
        self, step: Any, positions: torch.Tensor, part: slice, requests: torch.Tensor
    ) -> tuple[Pages, torch.Tensor] | None:
        """Entries that windows of prefills may reach, in pages of any size; the tokens' slots in them, newest first."""
        lengths, new = step.prefill_seq_lens_cpu.numpy(), step.prefill_query_lens_cpu.numpy()
        size, page = self.window_size, memory.PAGE
        # Lengths on the host may be too large, by drafted tokens: windows may begin a page before.
        first = ((lengths - new - size + 1) // page - 1).clip(0)
        most = memory.most_gathered(part.stop - part.start, size)
        pages = Pages.of(requests, step.num_decodes, first, -(-lengths // page), page, most)
        return None if pages is None else (pages, pages.windows(positions[part].int(), size))

    def entry_rows(self, step: Any, compressed: Any, requests: torch.Tensor) -> Gathered | None:
        """All entries of the prefills, whose tokens are of `requests`."""
        page, decodes = self.entry_cache().shape[1], step.num_decodes
        last = -(-step.prefill_seq_lens_cpu.numpy() // (self.compress_ratio * page))
        most = memory.most_gathered(len(requests), min(self.entry_widths()))
        pages = Pages.of(requests, decodes, np.zeros_like(last), last, page, most)
        return None if pages is None else Gathered(pages, pages.slots(compressed.block_table, page))


def as_pool(rows: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Rows as a pool of pages [P, R, 512]."""
    return rows.view(-1, pages.page, VALUE_DIMS)


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries as rows, and what a layer's selection makes of them; in scratch memory but for `slots`."""

    pages: Pages
    slots: torch.Tensor  # [P·R] of the rows in the cache
    rows: torch.Tensor  # [P·R, 512]
    pool: torch.Tensor  # the same, as pages
    selected: torch.Tensor  # [n, K] slots of the pool
    counts: torch.Tensor  # [n] of these


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a layer's prefills attend to: of the window and of compressed entries; in scratch memory, as `lse`."""

    pages: Pages
    slots: torch.Tensor  # [n, window] of the pool
    window: torch.Tensor  # [P·R, 512]
    pool: torch.Tensor  # the same, as pages
    entries: Entries | None
    lse: torch.Tensor
    scratch: torch.Tensor
