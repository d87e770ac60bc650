"""The op `vllm::sparse_attn_indexer`: write the step's keys, then each token's selected positions.

vLLM's metadata of a step has the decodes first, flat or as [requests, tokens], and then the prefills in chunks whose
keys fit a buffer. Decodes select over pages. A chunk of prefill gathers the keys of its requests once: its many tokens
share them. In DeepSeek-V4 a key stands for 4 tokens, in V4.1 for one or two, and their model has written it. Under
decode context parallelism the metadata counts this rank's keys.
"""

from dataclasses import dataclass
from typing import Any

import torch

from xmla import torch_api as xt
from xmla.core.formats.indexer import IndexerLayout
from xmla.vllm.contract import Arguments
from xmla.vllm.gathered import once_a_step, once_with_prefills
from xmla.vllm.refusals import key_format, refuse
from xmla.vllm.rows import write
from xmla.vllm.shards import Shards

# `topk_tokens` are as many as the buffer's columns, `quant_block_size` as the dims of a key.
ARGUMENTS = Arguments(
    read=frozenset((
        "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights", "quant_block_size", "topk_tokens",
        "head_dim", "total_seq_lens", "topk_indices_buffer", "skip_k_cache_insert", "use_pcp", "dcp_rank",
        "dcp_world_size", "cp_kv_cache_interleave_size",
    )),
    later=frozenset((
        "dense_mha_metadata_layer_name", "candidate_blocks", "candidate_block_size", "candidate_write",
    )),
    unread=frozenset((
        "hidden_states", "scale_fmt", "max_model_len", "pcp_shard_decode_requests", "skip_topk_buffer_clear",
        "topk_backend", "use_fp4_cache",
    )),
)  # fmt: skip
SERVED = ("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of keys that DeepSeek-V4.1's source layer selects, and within which it and layers after it select keys.

    In blocks of more keys than it selects the source finds the keys that it would find in all.
    """

    selected: torch.Tensor  # [T, blocks] int32, of the step
    size: int  # keys of a block
    source: bool

    @classmethod
    def of(cls, call: dict[str, Any]) -> "Blocks | None":
        """Blocks of the op's arguments, which 0.26 has not, or of the layer's attributes of the same names."""
        if call.get("candidate_blocks") is None:
            return None
        return cls(call["candidate_blocks"], call["candidate_block_size"], call["candidate_write"])

    @property
    def keys(self) -> int:
        """Keys in a token's blocks."""
        return self.selected.shape[1] * self.size

    def scratch(self, logits: int) -> int:
        """Bytes for selections whose logits take so many: the source keeps the largest of each block beside them."""
        return logits + 2 * logits // self.size


def run(call: dict[str, Any]) -> torch.Tensor:
    """The op, with its arguments by name; the selected positions, in `topk_indices_buffer`.

    The memory is reserved in the profile run, whose steps have no metadata.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    name = _resolve_layer_name(call["k_cache_prefix"])
    layer = context.no_compile_layers[name]
    blocks, form = Blocks.of(call), stored_format(layer.head_dim, call["head_dim"])
    refuse(unserved(call, layer.get_attn_backend().get_name(), blocks))

    def make_buffers() -> tuple[torch.Tensor, ...]:
        return reserve(call["total_seq_lens"], IndexerLayout(call["head_dim"], form), blocks)

    if not isinstance(context.attn_metadata, dict):
        make_buffers()
        reserve_exchange(call["topk_indices_buffer"])
    else:
        step = context.attn_metadata[name]
        if not call["skip_k_cache_insert"]:
            tokens = step.slot_mapping.shape[0]  # the keys may be padded
            xt.write_indexer_cache(call["k"][:tokens], step.slot_mapping, call["kv_cache"], cache_format=form)
        rows = getattr(layer, "xmla_selections", None)
        if rows is None and attends_to_all(context, call):
            return call["topk_indices_buffer"]
        query = call["q_quant"], call["weights"].float()
        ratio = getattr(layer, "compress_ratio", 1)
        shards = Shards.of(call["dcp_world_size"], call["dcp_rank"], call["cp_kv_cache_interleave_size"])
        share = row_share(step) if blocks is None else None  # vLLM exchanges no blocks
        buffers = once_with_prefills(step, ("buffers", blocks is None), make_buffers)
        select(step, *query, call["kv_cache"], call["topk_indices_buffer"], buffers, ratio, shards, share, blocks)
        if rows is not None:
            write(rows, step.slot_mapping, call["topk_indices_buffer"])
    return call["topk_indices_buffer"]


def attends_to_all(context: Any, call: dict[str, Any]) -> bool:
    """Whether no token of the step reads what it selects: all are of prefills that vLLM's dense attention takes.

    The metadata of a layer that has such attention tells; 0.26 names none. A graph is replayed for other steps too.
    """
    from vllm.config import CUDAGraphMode
    from vllm.utils.torch_utils import _resolve_layer_name

    layer = _resolve_layer_name(call.get("dense_mha_metadata_layer_name", ""))
    if not layer or context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
        return False
    attention = context.attn_metadata.get(layer)
    if not getattr(getattr(attention, "prefill", None), "use_dense_mha", False) or attention.num_decode_tokens:
        return False
    return not (call["topk_indices_buffer"].is_cuda and torch.cuda.is_current_stream_capturing())


def row_share(step: Any) -> Any:
    """The rows of the step's prefills that this rank scores, if ranks of tensor parallelism share them (from 0.32 on).

    vLLM's `PrefillRowShard`: it narrows chunks to them, and exchanges what all ranks select.
    """
    if getattr(step.prefill, "row_shard_sizes", None) is None:
        return None
    from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard

    return PrefillRowShard.from_metadata(step.prefill, step.num_decode_tokens)


def reserve_exchange(selected: torch.Tensor) -> None:
    """What that exchange allocates, in the profile run, by vLLM's own function."""
    from vllm.model_executor.layers import sparse_attn_indexer

    allocate = getattr(sparse_attn_indexer, "_reserve_row_shard_exchange_transient", None)
    if allocate is not None:
        allocate(selected, selected.device)


def unserved(call: dict[str, Any], backend: str, blocks: Blocks | None = None) -> dict[str, bool]:
    k, count = (0, 4) if blocks is None else (call["topk_indices_buffer"].shape[1], blocks.selected.shape[1])
    return {
        f"the indexer of {backend}": backend not in SERVED,
        f"a selection of {k} keys in {count} blocks": count <= k,
        f"blocks of a number that is no multiple of 4: {count}": count % 4 != 0,
        "queries of the indexer in MXFP4": call["q_scale"] is not None,
        "prefill context parallelism": call["use_pcp"],
        f"keys with a scale for every {call['quant_block_size']} of {call['head_dim']} dims": call["quant_block_size"]
        != call["head_dim"],
        f"{call['topk_tokens']} keys in a buffer for {call['topk_indices_buffer'].shape[1]}": call["topk_tokens"]
        != call["topk_indices_buffer"].shape[1],
    }


def reserve(keys: int, layout: IndexerLayout, blocks: Blocks | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gathered keys and their scales, and scratch memory as large as vLLM allows for logits: views of its workspace."""
    from vllm.v1.worker.workspace import current_workspace_manager

    return tuple(current_workspace_manager().get_simultaneous(*sizes(keys, layout, blocks)))


def stored_format(row: int, dim: int) -> str:
    """The format of keys in rows of a cache: MXFP4, or that in which vLLM stores e4m3 on this GPU."""
    return "mxfp4" if row == IndexerLayout(dim, "mxfp4").row else key_format()


def named(keys: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    """The format, as an attribute of ops, of a cache whose keys are gathered as such values and scales."""
    if keys.dtype == torch.uint8:
        return {"cache_format": "mxfp4"}
    return {"cache_format": "fp8" if scales.dtype == torch.float32 else "fp8_ue8m0"}


def sizes(
    keys: int, layout: IndexerLayout, blocks: Blocks | None = None
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of these."""
    from vllm import envs

    scratch = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20
    scratch = scratch if blocks is None else blocks.scratch(scratch)
    values, scales = (getattr(torch, name) for name in layout.dtypes)
    return ((keys, layout.value_bytes), values), ((keys,), scales), ((scratch,), torch.uint8)


def select(
    step: Any, q8: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, selected: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ratio: int = 1, shards: Shards | None = None,
    share: Any = None, blocks: Blocks | None = None,
) -> None:  # fmt: skip
    """Write the positions that each token of the step selects to its row of `selected` [T, K].

    A key stands for `ratio` tokens. Lengths of the metadata count keys, but for `step.seq_lens`. With a `share` of the
    prefills' rows the others' are other ranks'. With `blocks` keys are selected within these.
    """
    keys, key_scales, scratch = buffers
    memory, form = (
        {"k": selected.shape[1], "workspace_bytes": scratch.numel(), "workspace": scratch},
        named(keys, key_scales),
    )
    if step.num_decodes:
        rows = slice(step.num_decode_tokens)
        lengths, requests = decode_lengths(step, ratio, shards)
        paged = q8[rows], weights[rows], cache, step.decode.block_table, lengths
        if shards:
            select_paged(shards, *paged, requests, scratch, selected[rows], form)
        elif blocks:
            ops = xt.indexer_blocks_paged, xt.indexer_block_topk_paged
            select_in_blocks(blocks, ops, rows, paged, (requests,), memory | form, selected[rows])
        else:
            xt.indexer_topk_paged(*paged, requests, out=selected[rows], **memory, **form)
    if step.num_prefills and ratio > 1:  # no chunk has requests of less than `ratio` tokens
        selected[step.num_decode_tokens :][: step.num_prefill_tokens] = -1
    for chunk in step.prefill.chunks if step.num_prefills else ():
        if not chunk.skip_kv_gather:  # else the buffers hold them: more tokens of the same requests
            gather(chunk, cache, keys, key_scales)
        part = (chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
        if share is not None:
            part = share.narrow(chunk)
        if part is None:
            continue
        first, last, starts, ends = part
        if share is not None:  # views at any place, which would have kernels of their own
            starts, ends = starts.clone(), ends.clone()
        rows = slice(first, last)
        total = chunk.max_local_total_seq_lens
        if shards:  # rows of logits start on whole vectors; no token sees what is beyond
            total = min(-(-total // 64) * 64, len(keys))
        ragged = q8[rows], weights[rows], keys[:total], key_scales[:total], starts, ends
        if shards:
            select_ragged(shards, *ragged, scratch, selected[rows])
        elif blocks is None or step.max_seq_len // ratio <= blocks.keys:  # all keys are in blocks, which nobody reads
            xt.indexer_topk(*ragged, out=selected[rows], **memory)
        else:
            ops = xt.indexer_blocks, xt.indexer_block_topk
            select_in_blocks(blocks, ops, rows, ragged, (), memory, selected[rows])
    if share is not None:
        share.exchange_topk(selected, selected.shape[1])


def select_in_blocks(
    blocks: Blocks, ops: tuple[Any, Any], rows: slice, called: tuple[torch.Tensor, ...],
    requests: tuple[torch.Tensor | None, ...], memory: dict[str, Any], selected: torch.Tensor,
) -> None:  # fmt: skip
    """The blocks of these tokens, if their source is this layer, and keys in them, by the two `ops`."""
    find_blocks, find_keys = ops
    within, of_blocks = blocks.selected[rows], memory | {"granularity": blocks.size}
    if blocks.source:
        find_blocks(*called, *requests, out=within, **of_blocks | {"k": within.shape[1]})
    find_keys(*called, within, *requests, out=selected, **of_blocks)


def select_paged(
    shards: Shards, q8: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, requests: torch.Tensor | None, scratch: torch.Tensor, selected: torch.Tensor,
    form: dict[str, Any],
) -> None:  # fmt: skip
    """`indexer_topk_paged` over the keys of all ranks."""
    tokens = len(lengths)
    if requests is None:  # parts of the tokens have to name their requests
        requests = torch.arange(tokens, dtype=torch.int32, device=table.device) // (tokens // len(table))

    def logits(rows: slice, out: torch.Tensor) -> None:
        xt.indexer_logits_paged(q8[rows], weights[rows], cache, table, lengths[rows], requests[rows], out=out, **form)

    shards.select(logits, table.shape[1] * cache.shape[1], lengths, None, scratch, selected)


def select_ragged(
    shards: Shards, q8: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scales: torch.Tensor,
    starts: torch.Tensor, ends: torch.Tensor, scratch: torch.Tensor, selected: torch.Tensor,
) -> None:  # fmt: skip
    """`indexer_topk` over the keys of all ranks."""

    def logits(rows: slice, out: torch.Tensor) -> None:
        xt.indexer_logits(q8[rows], weights[rows], keys, key_scales, starts[rows], ends[rows], out=out)

    shards.select(logits, len(keys), ends, starts, scratch, selected)


def decode_lengths(step: Any, ratio: int, shards: Shards | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Visible keys of each token, and its request unless all have equally many: neighbours then share keys' tiles.

    `decode.seq_lens` is [requests, n], for the n tokens of a request or for the most that one has. Or vLLM made a
    request of each token.
    """
    decode, tokens = step.decode, step.num_decode_tokens
    if decode.seq_lens.numel() == tokens:
        return decode.seq_lens.reshape(-1), None
    starts = torch.nn.functional.pad(decode.decode_lens.cumsum(0, dtype=torch.int32), (1, 0))
    _, requests, lengths = xt.split_batch(starts, step.seq_lens[: step.num_decodes], num_tokens=tokens)
    lengths = lengths // ratio
    return shards.ownership.count(lengths, shards.rank).int() if shards else lengths, requests


def gather(chunk: Any, cache: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantised keys of the chunk's requests, one request behind the other, into the buffers `keys` and `scales`.

    The host's total, of the rank with most keys, may exceed the device's: what is behind the last request has no slot.
    """
    total = chunk.max_local_total_seq_lens
    slots = once_a_step(chunk, "slots", lambda: slots_of(chunk, total, cache.shape[1]))  # of all layers over such pages
    xt.read_indexer_cache(cache, slots, out=(keys[:total], scales[:total]), **named(keys, scales))


def slots_of(chunk: Any, total: int, page: int) -> torch.Tensor:
    """Slots of the keys of the chunk's requests [total]: each key is a token of a new request."""
    starts = chunk.local_cu_seq_lens
    _, requests, ends = xt.split_batch(starts, starts.diff(), num_tokens=total)
    return xt.map_slots((ends - 1)[:, None], chunk.block_table, requests, page_size=page)[0][:, 0]
