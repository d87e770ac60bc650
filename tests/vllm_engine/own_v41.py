"""vLLM's own attention and selection of DeepSeek-V4.1 beside each of xmla's, on the same queries, caches and metadata.

Attention and logits are their formulas in float64 instead of kernels for CUDA. Metadata, chunks of prefills, slots, and
what is masked when are vLLM's own. Its Triton kernels for blocks and gathered entries have definitions too: the
interpreter takes minutes for them, and does not take the one that masks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from xmla import torch_api as xt

Tensor = torch.Tensor
# Before calls are counted.
read_mla_cache, read_indexer_cache = xt.read_mla_cache, xt.read_indexer_cache


@dataclass
class Beside:
    """What was compared: rows of selections and how many of them differ, those of attention and how far it is apart."""

    selected: int = 0
    blocks: int = 0
    different: int = 0
    attended: int = 0
    apart: float = 0

    def selection(self, ours: Tensor, own: Tensor) -> int:
        """Count the rows, in any order and −1 padded, that differ."""
        self.different += int((ours.sort(dim=1).values != own.sort(dim=1).values).any(dim=1).sum())
        return len(ours)

    def attention(self, ours: Tensor, own: Tensor) -> None:
        self.attended += len(ours)
        self.apart = max(self.apart, ((ours.float() - own.float()).abs().max() / own.float().abs().max()).item())


def prepare() -> Any:
    """Before the plugin is loaded: vLLM's op."""
    from vllm.model_executor.layers.sparse_attn_indexer import sparse_attn_indexer as op

    return op


def install(op: Any) -> Beside:
    """Let every call be vLLM's own too."""
    from vllm import _custom_ops
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers import sparse_attn_indexer as module
    from vllm.models.deepseek_v41.nvidia import flashmla
    from vllm.utils.torch_utils import _resolve_layer_name

    from xmla.vllm import indexer
    from xmla.vllm.attention_v41 import XmlaV41Attention

    flashmla.flash_mla_with_kvcache, flashmla.flash_mla_sparse_fwd = attend_paged, attend_rows
    flashmla.dequantize_and_gather_k_cache = gather_entries
    module.fp8_fp4_mqa_logits, module.fp8_fp4_paged_mqa_logits = ragged_logits, paged_logits
    module._select_candidate_blocks, module._apply_candidate_mask = select_blocks, mask
    module.get_indexer_topk = lambda _: select_decodes
    _custom_ops.cp_gather_indexer_k_quant_cache, _custom_ops.top_k_per_row_prefill = gather, select
    found, run, forward = Beside(), indexer.run, XmlaV41Attention.forward_mqa

    def both(call: dict[str, Any]) -> Tensor:
        ours, blocks = run(call), call["candidate_blocks"]
        own = call | {"topk_indices_buffer": torch.empty_like(ours)}
        if call["candidate_write"]:
            own["candidate_blocks"] = torch.empty_like(blocks)
        op(**own)
        metadata = get_forward_context().attn_metadata
        if metadata is not None:
            step = metadata[_resolve_layer_name(call["k_cache_prefix"])]
            rows = slice(step.num_decode_tokens + step.num_prefill_tokens)
            found.selected += found.selection(ours[rows], own["topk_indices_buffer"][rows])
            if call["candidate_write"]:
                found.blocks += found.selection(blocks[rows], own["candidate_blocks"][rows])
        return ours

    def forward_both(self: Any, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        forward(self, q, kv, positions, output)
        own, metadata = torch.empty_like(output), get_forward_context().attn_metadata
        if metadata is not None:
            step = metadata[self.swa_cache_layer.prefix]
            step.tile_sched_swaonly = step.tile_sched_c1a = step.tile_sched_c2a = "a schedule"
        flashmla.DeepseekV4FlashMLAAttention.forward_mqa(self, q, kv, positions, own)
        if metadata is not None:
            rows = slice(step.num_decode_tokens + step.num_prefill_tokens)
            found.attention(output[rows], own[rows])

    indexer.run, XmlaV41Attention.forward_mqa = both, forward_both
    return found


def attend(q: Tensor, entries: Tensor, seen: Tensor, sink: Tensor, scale: float, out: Tensor) -> None:
    """Attention of q [T, H, 512] to `entries` [T, K, 512], where `seen`."""
    scores = torch.einsum("thd,tkd->thk", q.double(), entries.double()) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sinks = sink.double()[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    out.copy_(torch.einsum("thk,tkd->thd", weights, entries.double()))


def entries_of(cache: Tensor, slots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Entries at `slots` [T, 1, K], of which each token has the first `lengths`, and which these are."""
    slots = slots.squeeze(1)
    seen = (torch.arange(slots.shape[1]) < lengths[:, None]) & (slots >= 0)
    found = read_mla_cache(cache.squeeze(2), torch.where(seen, slots, -1).flatten(), implementation="reference")
    return found.view(*slots.shape, -1), seen


def attend_paged(
    *, q: Tensor, k_cache: Tensor, indices: Tensor, topk_length: Tensor, softmax_scale: float, attn_sink: Tensor,
    extra_k_cache: Tensor | None, extra_indices_in_kvcache: Tensor | None, extra_topk_length: Tensor | None,
    out: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    entries, seen = entries_of(k_cache, indices, topk_length)
    if extra_k_cache is not None:
        more = entries_of(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        entries, seen = torch.cat((entries, more[0]), dim=1), torch.cat((seen, more[1]), dim=1)
    attend(q.squeeze(1), entries, seen, attn_sink, softmax_scale, out.squeeze(1))
    return out, None


def attend_rows(
    *, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, attn_sink: Tensor, topk_length: Tensor, out: Tensor,
) -> None:  # fmt: skip
    slots = indices.squeeze(1)
    seen = (torch.arange(slots.shape[1]) < topk_length[:, None]) & (slots >= 0)
    entries = torch.where(seen[..., None], kv[slots.clamp(0, len(kv) - 1).long(), 0], 0)
    attend(q, entries, seen, attn_sink, sm_scale, out)


def gather_entries(
    out: Tensor, cache: Tensor, *, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor, block_size: int,
    offset: int,
) -> None:  # fmt: skip
    """The last entries of each request, from a place in its rows on."""
    counts = seq_lens if gather_lens is None else gather_lens
    for rows, table, length, count in zip(out, block_table, seq_lens.tolist(), counts.tolist(), strict=False):
        found = read_mla_cache(cache, slots_of(table, length - count, length, block_size), implementation="reference")
        rows[offset : offset + count] = found


def slots_of(table: Tensor, first: int, last: int, size: int) -> Tensor:
    """Slots of a request's positions."""
    positions = torch.arange(first, last)
    return (table[positions // size] * size + positions % size).int()


def logits(q8: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    """[T, N] of q8 [T, I, D] and keys [N, D]."""
    products = torch.einsum("tid,nd->tni", q8.double(), keys.double()).clamp(min=0)
    return (torch.einsum("tni,ti->tn", products, weights.double()) * scales.double()).float()


def ragged_logits(
    q: tuple[Tensor, None], kv: tuple[Tensor, Tensor], weights: Tensor, starts: Tensor, ends: Tensor, most: int
) -> Tensor:
    """Each row from its start on; what is behind its end is not to be read."""
    every, found = logits(q[0], *kv, weights), torch.full((len(starts), most), torch.nan)
    for row, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        found[row, : last - first] = every[row, first:last]
    return found


def paged_logits(
    q: tuple[Tensor, None], cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, _: Any, *,
    max_model_len: int, indices: None,
) -> Tensor:  # fmt: skip
    pages, size = cache.squeeze(2), cache.shape[1]
    found = torch.full((lengths.numel(), max_model_len), torch.nan)
    for row, length in enumerate(lengths.flatten().tolist()):
        request, token = divmod(row, lengths.shape[1])
        slots = slots_of(table[request], 0, length, size)
        keys, scales = read_indexer_cache(pages, slots, implementation="reference")
        found[row, :length] = logits(q[0][request, token : token + 1], keys, scales, weights[row : row + 1])[0]
    return found


def gather(cache: Tensor, keys: Tensor, scales: Tensor, table: Tensor, starts: Tensor) -> None:
    """The requests' keys, one request behind the other."""
    size = cache.shape[1]
    for request, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        slots = slots_of(table[request], 0, last - first, size)
        found, their = read_indexer_cache(cache, slots, implementation="reference")
        keys[first:last] = found
        scales[first:last] = their[:, None].view(torch.uint8)


def select_blocks(
    scores: Tensor, starts: None, ends: Tensor, most: int, size: int, selected: Tensor, repeat: int = 1
) -> None:
    """The blocks with the largest logits of each row, the newest among them, −1 padded."""
    selected.fill_(-1)
    for row, own in enumerate(scores):
        length = int(ends[row // repeat])
        largest = torch.tensor([part.max() for part in own[:length].split(size)])
        largest[-1:] = torch.inf
        best = largest.sort(descending=True, stable=True).indices[:most]
        selected[row, : len(best)] = best.int()


def mask(scores: Tensor, starts: None, ends: Tensor, blocks: Tensor, size: int, repeat: int = 1) -> None:
    """Let each row keep its logits of keys in its blocks."""
    columns = torch.arange(scores.shape[1], dtype=torch.int32)
    for row, (own, within) in enumerate(zip(scores, blocks, strict=True)):
        kept = torch.isin(columns // size, within[within >= 0]) & (columns < ends[row // repeat])
        own[~kept] = -torch.inf


def select(
    scores: Tensor, starts: Tensor, ends: Tensor, selected: Tensor, rows: int, stride: int, step: int, k: int
) -> None:  # fmt: skip
    """The k largest of each row, none of −inf; of equal ones the first, as logits of 0 are."""
    for row in range(rows):
        best = scores[row, starts[row] : ends[row]].sort(descending=True, stable=True)
        kept = best.indices[best.values > -torch.inf][:k]
        selected[row] = -1
        selected[row, : len(kept)] = kept.int()


def select_decodes(scores: Tensor, lengths: Tensor, tokens: int, selected: Tensor, k: int, most: int) -> None:
    ends = lengths.flatten()
    select(scores, torch.zeros_like(ends), ends, selected, len(scores), 0, 0, k)
