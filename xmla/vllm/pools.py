"""The op of GLM-5.3-Flash's indexer, whose keys are pools of tokens: select pools, then their tokens and the tail.

vLLM's kernels write the pooled keys, as the last, incomplete pool of a request is theirs: a ring of bfloat16 keys and
gates on a page of its own. Metadata count pools, but for `step.seq_lens`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from xmla import torch_api as xt
from xmla.core.formats.indexer import IndexerLayout
from xmla.vllm import indexer
from xmla.vllm.contract import Arguments
from xmla.vllm.gathered import once_a_step, once_with_prefills
from xmla.vllm.refusals import KEY_DIMS, key_format, refuse

ARGUMENTS = Arguments(
    read=frozenset((
        "k_cache_prefix", "kv_cache", "q_quant", "k", "weights", "topk_tokens", "total_seq_lens",
        "topk_indices_buffer", "use_fp4_cache", "gate_score", "compress_ape", "index_kpool", "positions",
        "tail_kv_cache", "tail_prefix", "dcp_world_size",
    )),
    later=frozenset(),
    unread=frozenset((
        "hidden_states", "q_scale", "quant_block_size", "scale_fmt", "head_dim", "max_pool_len",
        "skip_k_cache_insert", "topk_backend", "dcp_rank", "cp_kv_cache_interleave_size",
    )),
)  # fmt: skip
LEAST_HEADS = 32  # of the indexer: vLLM adds heads of zeros, which DeepGEMM asks for


def run(call: dict[str, Any]) -> torch.Tensor:
    """The op, with its arguments by name; the selected positions, in `topk_indices_buffer`, −1 padded.

    The memory is reserved in the profile run, whose steps have no metadata.
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context, selected, pool = get_forward_context(), call["topk_indices_buffer"], call["index_kpool"]
    refuse(unserved(call))

    def make_buffers() -> tuple[torch.Tensor, ...]:
        return reserve(call["total_seq_lens"], len(selected), call["topk_tokens"] // pool, pool)

    if not isinstance(context.attn_metadata, dict):
        make_buffers()
        indexer.reserve_exchange(selected)
        return selected
    step = context.attn_metadata[_resolve_layer_name(call["k_cache_prefix"])]
    keys, scales, scratch, pools, positions = once_with_prefills(step, "buffers", make_buffers)
    write(call, step, context.attn_metadata[_resolve_layer_name(call["tail_prefix"])])
    share = indexer.row_share(step)
    query = call["q_quant"], call["weights"].float()
    indexer.select(step, *query, call["kv_cache"], pools, (keys, scales, scratch), pool, share=share)
    rows, width = slice(step.num_decode_tokens + step.num_prefill_tokens), positions.shape[1]
    xt.expand_blocks(pools[rows], call["positions"][rows].int() + 1, granularity=pool, out=positions[rows])
    selected[rows, :width], selected[rows, width:] = positions[rows], -1
    return selected


def unserved(call: dict[str, Any]) -> dict[str, bool]:
    return {
        "MXFP4 keys of pools": call["use_fp4_cache"],
        "decode context parallelism of pooled keys": call["dcp_world_size"] > 1,
    }


def reserve(keys: int, tokens: int, pools: int, pool: int) -> tuple[torch.Tensor, ...]:
    """What `indexer.reserve` has, and of each token the selected pools and the positions in them and in the tail."""
    from vllm.v1.worker.workspace import current_workspace_manager

    selections = (((tokens, width), torch.int32) for width in (pools, pools * pool + pool - 1))
    sizes = *indexer.sizes(keys, IndexerLayout(KEY_DIMS, key_format())), *selections
    return tuple(current_workspace_manager().get_simultaneous(*sizes))


def write(call: dict[str, Any], step: Any, tail: Any) -> None:
    """The keys of pools that end in this step, and what the next steps pool, by vLLM's kernels.

    `tail` is the metadata of the rings, with the tokens' slots in those of their requests.
    """
    from vllm.models.glm5next.nvidia import sparse_indexer as own

    cache, ring, first = call["kv_cache"], call["tail_kv_cache"], step.num_decode_tokens
    pool, tokens, rings = call["index_kpool"], step.slot_mapping.shape[0], tail.slot_mapping
    k, gates, positions, ape = (call[name] for name in ("k", "gate_score", "positions", "compress_ape"))
    if tokens > first:
        new = slice(first, tokens)
        k_new, gates_new, rings_new = k[new], gates[new], rings[new]
        pools = once_a_step(tail, "pools", lambda: Pools.of(positions[new], rings_new, ring.shape[2], pool))
        slots = step.slot_mapping[new].long()
        own.kpool_ops.kpool_compress_and_write_cache(
            cache, pools.values(k_new, ring, 0), pools.values(gates_new, ring, 1), ape, slots, pool_size=pool,
            head_dim=KEY_DIMS, write_mask=slots >= 0, round_scale=True,
        )  # fmt: skip
        own.kpool_ops.kpool_seed_tail_cache(ring, k_new, gates_new, rings_new, pool, KEY_DIMS)
    if first:
        decode, count = step.decode, step.num_decodes
        most = decode.write_max_decode_len  # tokens of a request
        values = [x[:first] for x in (rings, k, gates, step.slot_mapping, positions.int())]
        if decode.decode_is_uniform and first == count * most:
            grouped = [x.unflatten(0, (count, most)) for x in values]
        else:  # a slot or position of −1 is nobody's
            places = own._build_decode_scatter_indices(decode.per_req_decode_lens, count, first)
            grouped = [own._scatter_decode_tokens_by_request(x, -1, count, most, places) for x in values]
        rings, k, gates, slots, positions = grouped
        own.kpool_ops.kpool_decode_update_and_maybe_write_cache_batched(
            cache, ring, rings, k, gates, ape, slots, positions, pool, KEY_DIMS, round_scale=True
        )


@dataclass(frozen=True, slots=True)
class Pools:
    """Where the tokens of pools are, which end with each token of a step's prefills; the same in all layers.

    Those of earlier steps are in the request's ring. vLLM itself takes what is before in the batch, and leaves pools
    unwritten where nothing is: its scheduler divides prompts at any token.
    """

    tokens: torch.Tensor  # [n, pool] of the prefills
    inside: torch.Tensor  # [n, pool, 1]: whether they are among these
    rings: torch.Tensor  # [n, 1]
    places: torch.Tensor  # [n, pool] in the ring

    @classmethod
    def of(cls, positions: torch.Tensor, rings: torch.Tensor, size: int, pool: int) -> "Pools":
        """Pools that end at tokens with these positions and slots in rings of so many places."""
        before = torch.arange(1 - pool, 1, device=positions.device)
        tokens, request = torch.arange(len(positions), device=positions.device)[:, None] + before, rings // size
        within = tokens.clamp(min=0)
        inside = (tokens >= 0) & (request[within] == request[:, None])
        places = (positions[:, None] + before) % size
        return cls(within, inside[..., None], request.clamp(min=0)[:, None], places)

    def values(self, values: torch.Tensor, ring: torch.Tensor, half: int) -> torch.Tensor:
        """Values of each pool [n, pool, KEY_DIMS], from those of the prefills' tokens and from a `half` of the ring."""
        return torch.where(self.inside, values[self.tokens], ring[self.rings, half, self.places])
