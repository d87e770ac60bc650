"""What the plugin takes from vLLM's code beside the functions of `patches`, compared with a release's at install.

A field that a release renames would else be told in the first step that reads it, minutes later.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from packaging.specifiers import SpecifierSet

from xmla.core.errors import UnsupportedError

EVERY = SpecifierSet(prereleases=True)
SINCE_033 = SpecifierSet(">=0.33")
OTHERWISE = "without xmla in VLLM_PLUGINS vLLM serves with its own kernels"


def require(original: Any, arguments: Set[str]) -> None:
    """Raise UnsupportedError unless a function of vLLM has these arguments."""
    if missing := sorted(arguments - inspect.signature(original).parameters.keys()):
        raise UnsupportedError(
            f"xmla.vllm: vLLM's {original.__name__} has no argument {missing[0]}, which xmla reads; {OTHERWISE}"
        )


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of an op of the indexer, which xmla's takes by name.

    Attributes:
        read: Those that it reads.
        later: Those that it reads in releases that have them.
        unread: Those that change nothing in it: what else is asked, or forms of vLLM's own kernels.
    """

    read: frozenset[str]
    later: frozenset[str]
    unread: frozenset[str]

    def unknown(self, original: Any) -> dict[str, Any]:
        """The defaults of those that only vLLM's op has, of which xmla serves no other values.

        Raises:
            UnsupportedError: The op lacks one that is read, or has one that is unknown and has no default.
        """
        require(original, self.read)
        name, parameters = original.__name__, inspect.signature(original).parameters
        new = parameters.keys() - self.read - self.later - self.unread
        for argument in sorted(new):
            if parameters[argument].default is inspect.Parameter.empty:
                raise UnsupportedError(
                    f"xmla.vllm: vLLM's {name} has an argument {argument} without a default, which xmla does not "
                    f"know; {OTHERWISE}"
                )
        return {argument: parameters[argument].default for argument in parameters if argument in new}


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields that are read of a dataclass of vLLM."""

    module: str
    name: str
    fields: tuple[str, ...]
    releases: SpecifierSet = EVERY


@dataclass(frozen=True, slots=True)
class Method:
    """A method of vLLM that the plugin's classes override, with the first parameters that these have."""

    module: str
    name: str
    parameters: tuple[str, ...]
    releases: SpecifierSet = EVERY


INDEXER = "vllm.v1.attention.backends.mla.indexer"
LAYERS = "vllm.model_executor.layers.attention.sparse_mla_attention"
V4, V41 = "vllm.models.deepseek_v4", "vllm.models.deepseek_v41"
STEPS = "vllm.v1.core.sched.output"
SPLIT = "num_decodes", "num_decode_tokens", "num_prefills"

FIELDS = (
    Fields(
        INDEXER, "DeepseekV32IndexerMetadata",
        (*SPLIT, "num_prefill_tokens", "slot_mapping", "seq_lens", "max_seq_len", "decode", "prefill"),
    ),
    Fields(INDEXER, "DeepSeekV32IndexerDecodeMetadata", ("block_table", "seq_lens", "decode_lens")),
    Fields(
        INDEXER, "DeepSeekV32IndexerDecodeMetadata",
        ("write_max_decode_len", "decode_is_uniform", "per_req_decode_lens"), SINCE_033,
    ),
    Fields(INDEXER, "DeepseekV32IndexerPrefillMetadata", ("chunks",)),
    Fields(
        INDEXER, "DeepseekV32IndexerPrefillChunkMetadata",
        ("block_table", "cu_seqlen_ks", "cu_seqlen_ke", "token_start", "token_end", "skip_kv_gather",
         "local_cu_seq_lens", "max_local_total_seq_lens"),
    ),
    Fields(
        "vllm.v1.attention.backends.mla.flashmla_sparse", "FlashMLASparseMetadata",
        (*SPLIT, "num_actual_tokens", "query_start_loc", "block_table", "block_size", "req_id_per_token",
         "topk_tokens"),
    ),
    Fields("vllm.v1.attention.backend", "CommonAttentionMetadata", ("seq_lens_cpu_upper_bound",)),
    Fields(
        "vllm.v1.attention.backends.mla.sparse_swa", "DeepseekSparseSWAMetadata",
        ("num_decodes", "num_decode_tokens", "num_prefill_tokens", "block_table", "block_size",
         "token_to_req_indices", "decode_swa_indices", "decode_swa_lens", "prefill_swa_indices", "prefill_swa_lens",
         "prefill_seq_lens_cpu", "prefill_query_lens_cpu"),
    ),
    Fields(
        f"{V4}.sparse_mla", "DeepseekV4FlashMLAMetadata",
        ("block_table", "req_id_per_token", "c128a_prefill_topk_indices", "c128a_global_decode_topk_indices",
         "c128a_decode_topk_lens"),
    ),
    Fields(f"{V41}.sparse_mla", "DeepseekV4FlashMLAMetadata", ("block_table", "req_id_per_token"), SINCE_033),
    Fields(
        STEPS, "SchedulerOutput",
        ("finished_req_ids", "preempted_req_ids", "kv_cache_block_copies", "scheduled_new_reqs",
         "scheduled_cached_reqs", "num_scheduled_tokens"), SINCE_033,
    ),
    Fields(STEPS, "NewRequestData", ("req_id", "block_ids", "num_computed_tokens"), SINCE_033),
    Fields(
        STEPS, "CachedRequestData", ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"), SINCE_033
    ),
)  # fmt: skip
METHODS = (
    Method(
        "vllm.v1.attention.backend", "MLAAttentionImpl.forward_mqa",
        ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    ),
    Method(
        "vllm.v1.attention.backend", "MLAAttentionImpl.do_kv_cache_update",
        ("self", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
    ),
    Method(
        LAYERS, "SparseMLACommonMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Method(
        f"{V4}.nvidia.flashmla", "DeepseekV4FlashMLAAttention.forward_mqa", ("self", "q", "kv", "positions", "output")
    ),
    Method(f"{V4}.nvidia.flashmla", "DeepseekV4FlashMLAAttention.get_padded_num_q_heads", ("num_heads",)),
    Method(f"{V4}.nvidia.flashmla", "DeepseekV4FlashMLAAttention._o_proj", ("self", "o", "positions")),
    Method(
        f"{V41}.nvidia.flashmla", "DeepseekV4FlashMLAAttention.forward_mqa", ("self", "q", "kv", "positions", "output"),
        SINCE_033,
    ),
    Method(f"{V41}.nvidia.flashmla", "DeepseekV4FlashMLAAttention.get_padded_num_q_heads", ("num_heads",), SINCE_033),
    Method(
        f"{V41}.nvidia.flashmla", "DeepseekV4FlashMLAAttention._o_proj", ("self", "attn_out", "positions"), SINCE_033
    ),
    Method(
        "vllm.v1.attention.backends.mla.sparse_swa", "DeepseekSparseSWAMetadataBuilder.build_tile_scheduler",
        ("self", "num_decode_tokens"),
    ),
)  # fmt: skip


def check(release: str) -> None:
    """Raise UnsupportedError unless this release has every field and every method, with these parameters."""
    for difference in differences(release):
        raise UnsupportedError(f"xmla.vllm: {difference}; {OTHERWISE}")


def differences(release: str) -> Iterator[str]:
    for read in FIELDS:
        if read.releases.contains(release):
            names = {field.name for field in dataclasses.fields(find(read, release))}
            for field in read.fields:
                if field not in names:
                    yield f"{read.module}.{read.name} of vLLM {release} has no field {field}, which xmla reads"
    for method in METHODS:
        if method.releases.contains(release):
            actual = tuple(inspect.signature(find(method, release)).parameters)
            if actual[: len(method.parameters)] != method.parameters:
                yield differing(f"{method.module}.{method.name}", release, actual, method.parameters)


def find(part: Fields | Method, release: str) -> Any:
    """The class or the method. Raises UnsupportedError if it is not there."""
    try:
        return attrgetter(part.name)(importlib.import_module(part.module))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"xmla.vllm: vLLM {release} has no {part.module}.{part.name}, which xmla reads ({error}); {OTHERWISE}"
        ) from error


def differing(name: str, release: str, actual: tuple[str, ...], expected: tuple[str, ...]) -> str:
    return (
        f"{name} of vLLM {release} has the parameters ({', '.join(actual)}), expected ({', '.join(expected)}) "
        "as the first"
    )


def unserved(name: str, call: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, bool]:
    """Arguments of a call that xmla does not know and that have not their defaults."""
    return {f"the argument {argument} of {name}": is_other(call[argument], defaults[argument]) for argument in defaults}


def is_other(value: Any, default: Any) -> bool:
    """Whether a value is not the default; a tensor never is."""
    return value is not default and (type(value) is not type(default) or bool(value != default))
