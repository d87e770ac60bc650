"""vLLM's attention backend for DeepSeek sparse attention: `write_mla_cache`, `map_slots`, `sparse_mla`.

Metadata and its builders are vLLM's. Tokens of prefill and decode, of any number per request, are one call, unless the
prefills' entries are gathered first. Under decode context parallelism each rank attends to those of the selected keys
that it has, with the heads of all ranks, and vLLM merges.
"""

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import batched
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from vllm import _custom_ops
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseMetadata
from vllm.v1.worker.workspace import current_workspace_manager

from xmla import torch_api as xt
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V32, VALUE_DIMS, MlaLayout
from xmla.core.models import memory
from xmla.core.values import KNOWN_DEVICES, MIN_E4M3_ARCH
from xmla.torch_api._arrays import device_of
from xmla.vllm.contract import SINCE_033
from xmla.vllm.gathered import Gathered, Pages, once_with_prefills, rows_are_faster
from xmla.vllm.refusals import FP4_ENTRIES, has_e4m3, is_batch_invariant, pool_size, refuse
from xmla.vllm.shards import Shards

log = init_logger("vllm.xmla")
# By vLLM's names of cache dtypes.
PACKED = {"fp8_ds_mla": V32, FP4_ENTRIES: NVFP4}
REPLACED = "cache writes, indexer logits and top-k, slots, sparse MLA of prefill and decode"
LEFT = (
    "rotation of queries; where the GPU has e4m3 their quantisation, cache writes in fused kernels of the model and "
    "dense attention of prefills no longer than top-k (sparse_mla_force_mqa turns it off)"
)


class XmlaSparseBackend(FlashMLASparseBackend):
    """FlashMLA's backend with other kernels: the same caches, by the same name.

    vLLM compares the name to turn "fp8" into its packed format.
    """

    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", *PACKED, "fp8"]

    @staticmethod
    def get_builder_cls() -> type:
        return XmlaSparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type:
        return XmlaSparseImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [PLAIN.dims, PLAIN_V4.dims]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Known GPUs and sm_86; without e4m3 since 0.33, for whose models `without_e4m3` has the functions."""
        arch, known = capability.to_int(), {device.arch for device in KNOWN_DEVICES}
        if arch < MIN_E4M3_ARCH:
            return arch in known | {86} and SINCE_033.contains(version("vllm"))
        return arch in known

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether VLLM_BATCH_INVARIANT=1 is served: it is, and `refusals` says what else it needs."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether each head may have a sink, as Hy4's have: a logit beside those of its keys, without a value."""
        return True

    @classmethod
    def supports_combination(cls, head_size: int, *_: Any, **__: Any) -> str | None:
        config = get_current_vllm_config()
        text = config.model_config.hf_text_config
        if (text.kv_lora_rank, text.qk_rope_head_dim) not in ((PLAIN.latent, PLAIN.rope), (PLAIN_V4.dims, 0)):
            dims = f"{text.kv_lora_rank} latent and {text.qk_rope_head_dim} roped dims"
            return f"xmla attends to entries of 512 latent dims, with 64 roped ones or none, not of {dims}"
        # The second would have a workspace of its own, which nothing reserves.
        return "xmla does not serve two micro-batches at once" if config.parallel_config.use_ubatching else None


@dataclass
class XmlaSparseMetadata(FlashMLASparseMetadata):
    """vLLM's, and what a step gathers."""

    gathered: Gathered | None = None


class XmlaSparseMetadataBuilder(SparseMLACommonMetadataBuilder[XmlaSparseMetadata]):
    """The split into decodes and prefills tells which tokens may take dense attention, and which entries to gather."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = XmlaSparseMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        heads = self.model_config.get_num_attention_heads(self.vllm_config.parallel_config)
        packed = self.kv_cache_spec.dtype == torch.uint8  # kv_cache_dtype_skip_layers leaves other layers plain
        self.gathers = packed and rows_are_faster(heads) and self.dcp_world_size == 1 and not is_batch_invariant()
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1  # read since 0.33

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> XmlaSparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.gathers and metadata.num_prefills:
            metadata.gathered = gather(metadata, common_attn_metadata.seq_lens_cpu_upper_bound)
        return metadata

    def update_draft_decode_metadata(self, metadata: XmlaSparseMetadata) -> None:
        """Update the tokens' requests for the next drafted token, in place: all else is a view of what vLLM updates."""
        from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

        if tokens := metadata.num_decode_tokens:
            compute_token_to_req_indices(metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)


def gather(metadata: FlashMLASparseMetadata, lengths: torch.Tensor) -> Gathered | None:
    """All entries of the prefills, by the most keys that each request has, on the host; None if they are too many."""
    first, page = metadata.num_decodes, metadata.block_size
    tokens = metadata.num_actual_tokens - metadata.num_decode_tokens
    requests = metadata.req_id_per_token[metadata.num_decode_tokens : metadata.num_actual_tokens] - first
    last = -(-lengths[first : first + metadata.num_prefills].numpy() // page)
    most = memory.most_gathered(tokens, metadata.topk_tokens)
    pages = Pages.of(requests, first, np.zeros_like(last), last, page, most)
    return None if pages is None else Gathered(pages, pages.slots(metadata.block_table, page))


class CallMemory(NamedTuple):
    """Memory of one of a step's calls."""

    lse: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor  # of each token's slots


class Workspace(NamedTuple):
    """Memory of a step's calls in vLLM's workspace."""

    queries: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor  # of `sparse_mla`
    calls: list[CallMemory]


class XmlaSparseImpl(SparseMLACommonImpl[XmlaSparseMetadata]):
    """Attention of one layer. Its memory is vLLM's workspace, which all layers share and which is reserved here."""

    supports_pcp: ClassVar = False
    supports_dcp: ClassVar = True  # 0.33 asks for it on a GPU
    can_return_lse_for_decode: ClassVar = True
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar = True  # each token has its own positions

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> None:
        selected = kwargs.get("topk_indices_buffer")
        if selected is not None and kwargs.get("index_group_builder") is None and (builder := groups_of(selected)):
            kwargs["index_group_builder"] = builder
        super().__init__(*args, **kwargs)
        self.sinks = sinks  # [H] float32, of this rank's heads
        self.q_lora_rank = kwargs.get("q_lora_rank")
        if sinks is not None:
            refuse({"decode context parallelism of a model with sinks": self.dcp_world_size > 1})
            self.supports_dense_mha_prefill = False  # it has none
        if not has_e4m3():
            self.supports_dense_mha_prefill = False  # vLLM's kernels dequantise what it reads
        log.info_once(f"DeepSeek sparse attention runs on xmla: {REPLACED}. vLLM's own remain: {LEFT}")
        config = get_current_vllm_config()
        tokens, self.parallel = config.scheduler_config.max_num_batched_tokens, config.parallel_config
        self.query_heads = self.num_heads * self.dcp_world_size
        keys, device = self.topk_indices_buffer.shape[1], device_of(self.topk_indices_buffer.device)
        # Whether a step gathers depends on all of its requests.
        self.invariant = is_batch_invariant()
        self.gathers = rows_are_faster(self.num_heads) and self.dcp_world_size == 1 and not self.invariant
        # Without roped dims packed entries and their queries have zeros in place of these, as vLLM's own have.
        packed, self.roped = PACKED.get(self.kv_cache_dtype), self.head_size == PLAIN.dims
        self.layouts: tuple[MlaLayout, ...] = (packed or V32, PLAIN) if packed or self.roped else (PLAIN_V4,)
        # Its workspace is as wide as the model's entries, and its copy of cached ones reads no others.
        if packed is NVFP4 or (packed and not self.roped):
            self.supports_dense_mha_prefill = False
        # Of pools those before the tail may be fewer than are selected.
        self.compact = self.dcp_world_size > 1 or pool_size(config) > 1
        self.reserved = memory.scratch_v32(self.query_heads, keys, tokens, device, self.gathers, self.layouts)
        self.at_once = tokens
        if self.invariant:
            of_token = [memory.attention(each, self.query_heads, keys, 1, memory.LARGE_POOL) for each in self.layouts]
            a_token = memory.invariant_scratch(of_token, device)
            self.reserved, self.at_once = memory.divide(self.reserved, a_token, tokens)
        self.workspace(tokens, 1)

    def workspace(self, *tokens: int) -> Workspace:
        """Memory for calls of so many tokens. Each tensor starts on a multiple of 16 bytes, as kernels want it."""
        heads, keys = self.query_heads, self.topk_indices_buffer.shape[1]
        dtypes = torch.float32, torch.int32, torch.int32
        sizes = [size for n in tokens for size in zip(((n, heads), (n, keys), (n,)), dtypes, strict=True)]
        queries, out, scratch, *others = current_workspace_manager().get_simultaneous(
            ((sum(tokens) if PLAIN in self.layouts else 0, heads, PLAIN.dims), torch.bfloat16),
            ((sum(tokens), heads, VALUE_DIMS), torch.bfloat16),
            ((self.reserved,), torch.uint8),
            *sizes,
        )
        return Workspace(queries, out, scratch, [CallMemory(*tensors) for tensors in batched(others, 3)])

    def memory_of_group(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Slots of so many tokens, and the number of each token's, in memory of all layers with this selection.

        None if there are no others, as before 0.33, or for more tokens than decodes have, whose attention takes long.
        """
        group = getattr(self, "index_group", None)
        if group is None or group.num_layers == 1 or tokens > len(group.valid_topk_counts):
            return None
        return group.physical_topk_indices[:tokens], group.valid_topk_counts[:tokens]

    def is_mapped(self, step: Any, tokens: int) -> bool:
        """Whether the group's memory has the slots of so many tokens by this layer's table; else the layer maps them.

        The first layer always does. Layers of a group may have metadata of their own, and, where vLLM divides caches
        into groups, tables of their own.
        """
        values = vars(get_forward_context()).setdefault("made_by_xmla", {})
        name, mapped = id(self.index_group), (step.block_table.data_ptr(), step.block_table.shape, tokens)
        if self.index_group_index and values.get(name) == mapped:
            return True
        values[name] = mapped
        return False

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *_: Any
    ) -> None:
        if kv_cache.numel() == 0:  # the profile run's
            return
        slots = slot_mapping.flatten()
        latent, rope = kv_c_normed[: slots.numel()], k_pe.squeeze(1)[: slots.numel()]  # they may be padded
        if self.layouts == (PLAIN_V4,):
            latent, rope = latent.split((PLAIN_V4.latent, PLAIN_V4.rope), dim=-1)
        elif not self.roped:
            rope = latent.new_zeros(len(latent), V32.rope)
        xt.write_mla_cache(latent, rope, slots, kv_cache, scale_floor="amax")

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed queries, as one tensor or as latent and rope; out [T, H, 512], and lse [T, H] for ranks to merge."""
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        cache, page, gathered = kv_c_and_k_pe_cache, attn_metadata.block_size, attn_metadata.gathered
        prefilled = 0 if gathered is None else len(gathered.pages.requests)
        if prefilled != tokens - attn_metadata.num_decode_tokens:  # vLLM gave the prefills to dense attention
            prefilled = 0
        counts = [count for count in (tokens - prefilled, prefilled) if count]
        space = once_with_prefills(attn_metadata, ("workspace", *counts), lambda: self.workspace(*counts))
        out, scratch = space.out, space.scratch
        q = concat_query(q[0], q[1], space.queries) if isinstance(q, tuple) else q
        pools = [(cache, attn_metadata.block_table, attn_metadata.req_id_per_token[: counts[0]])]
        if prefilled:
            rows, scratch = gathered.read(cache, PLAIN.dims, scratch)
            pools = [*pools, (rows, gathered.pages.table, gathered.pages.requests)][-len(counts) :]
        # Read in each step: for a connector that moves caches vLLM 0.33 changes it after layers are made.
        shards = Shards.of(self.dcp_world_size, self.dcp_rank, self.parallel.cp_kv_cache_interleave_size)
        first, lse = 0, None
        for count, (lse, slots, lengths), (pool, table, requests) in zip(counts, space.calls, pools, strict=True):
            part = slice(first, first + count)
            kept = self.memory_of_group(count) if len(counts) == 1 else None
            if kept is not None:
                slots, lengths = kept
            if kept is None or not self.is_mapped(attn_metadata, count):
                positions = self.topk_indices_buffer[part]
                if shards:
                    positions = shards.own(positions)
                xt.map_slots(positions, table, requests, page_size=page, compact=self.compact, out=(slots, lengths))
            for begin in range(0, count, self.at_once):
                rows = slice(begin, begin + self.at_once)
                xt.sparse_mla(
                    q[part][rows], pool, slots[rows], lengths[rows], self.sinks, softmax_scale=self.scale,
                    batch_invariant=self.invariant, out=(out[part][rows], lse[rows]), workspace=scratch,
                )  # fmt: skip
            first += count
        return out, lse if shards else None


# Of the buffer that a model's indexers write.
GROUPS = WeakTensorKeyDictionary()


def groups_of(selected: torch.Tensor) -> Any:
    """vLLM's division of layers by the indexer whose selection they have, of a model that makes none, such as Hy4.

    None before 0.33. Its memory is for decodes alone; that of a layer by itself would be for all tokens of a step.
    """
    if find_spec("vllm.v1.attention.backends.mla.index_group") is None:
        return None
    from vllm.v1.attention.backends.mla import index_group

    if selected not in GROUPS:
        most = index_group.get_sparse_mla_index_group_max_rows(get_current_vllm_config())
        GROUPS[selected] = index_group.SparseMLAIndexGroupBuilder(selected, most)
    return GROUPS[selected]


def concat_query(latent: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` [T, H, 576] with the queries' two parts.

    The latent part is a transposed product, over which `torch.cat` takes eight times as long as vLLM's own kernel
    (vllm#34917).
    """
    if not rope.shape[-1]:  # then vLLM has not transposed it
        if not out.numel():
            return latent
        out[..., : latent.shape[-1]] = latent
        out[..., latent.shape[-1] :] = 0
        return out
    if latent.is_cuda:
        _custom_ops.concat_mla_q(latent, rope, out)
        return out
    return torch.cat((latent, rope), dim=-1, out=out)
