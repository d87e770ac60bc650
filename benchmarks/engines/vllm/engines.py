"""Engines of vLLM by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.table import AnyEngine

# Every op that one of them may call.
OPS = (
    "write_mla_cache", "write_indexer_cache", "indexer_topk_paged", "indexer_topk", "map_slots", "read_indexer_cache",
    "split_batch", "sparse_mla", "read_mla_cache", "indexer_logits_paged", "indexer_logits", "select_topk",
    "merge_topk", "indexer_blocks", "indexer_blocks_paged", "indexer_block_topk", "indexer_block_topk_paged",
    "expand_blocks",
)  # fmt: skip
JOINS = {"6000": 0, "3000": 0, "2500": 0, "700": 0, "40": 12}  # tokens of a prompt: the step before which it comes
# In chunks of 1024 tokens beside three decodes: steps that need most of the memory reserved for V3.2's rows and splits.
LONG = {"700": 0, "2500": 0, "40": 0, "64000": 0}
# In chunks of 2048 tokens, the last of which has 1249 with both prompts, to more than 4096 entries of 128 tokens: of
# V4's steps with splits of the keys the largest.
LONG_V4 = {"525497": 0, "40": 12}
# Of V4.1 one with more entries than the blocks of the source layer have.
V41 = JOINS | {"24000": 0}


@dataclass(frozen=True, slots=True)
class Engine(AnyEngine):
    """`sizes`: the batches that are captured as CUDA graphs; none: eager. `compiled`: as vLLM does without options.

    `keys`: ranks share the keys too. It is asked `joins`. If `cache_gib` is 0, vLLM's memory profile, which captures
    graphs too, says how large the cache is: it needs the GPU alone. `invariant`: vLLM is asked for the same bits in any
    batch, of at most `requests`.
    """

    cache: str = "fp8"
    sizes: tuple[int, ...] = ()
    compiled: bool = False
    keys: bool = False
    joins: Mapping[str, int] = field(default_factory=lambda: JOINS)
    max_len: int = 8192
    cache_gib: int = 1
    invariant: bool = False
    requests: int = 8

    def environment(self) -> dict[str, str]:
        # Piecewise graphs without torch.compile.
        breakable = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if self.sizes and not self.compiled else {}
        invariant = {"VLLM_BATCH_INVARIANT": "1"} if self.invariant else {}
        return {"VLLM_PLUGINS": "xmla" if self.plugin else ""} | breakable | invariant

    def arguments(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        # Without a name vLLM takes other kernels for bfloat16 than for fp8.
        given: dict[str, Any] = {} if self.plugin else {"attention_backend": "FLASHMLA_SPARSE"}
        given |= {"kv_cache_dtype": self.cache}
        if self.ranks > 1:
            given |= {"tensor_parallel_size": self.ranks, "disable_custom_all_reduce": True}
            given |= {"decode_context_parallel_size": self.ranks if self.keys else 1}
        if self.drafts:
            given["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.drafts}
        if self.kind == "v4":
            given["block_size"] = 256
        if self.kind == "glm":  # the other is a kernel of a package that tests do without
            given["additional_config"] = {"kda_prefill_backend": "triton"}
        if not sizes:
            return given | {"enforce_eager": True}
        graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [*sizes]}
        return given | {"compilation_config": graphs if self.compiled else graphs | {"mode": 0}}


# Steps of JOINS have 1 to 5 tokens, or 44 when the last joins: `graphs` pads none of them, so that all its products
# have the shapes of an eager step; `padded` pads most.
EXACT, PADDED = (1, 2, 3, 4, 5, 44), (8, 64)
ENGINES = {
    "own": Engine(plugin=False),
    "own-bf16": Engine(plugin=False, cache="auto"),
    "own-chunks": Engine(plugin=False, chunk=768),
    "own-graphs": Engine(plugin=False, sizes=EXACT),
    "own-compiled": Engine(plugin=False, sizes=EXACT, compiled=True),
    "xmla": Engine(plugin=True),
    "xmla-bf16": Engine(plugin=True, cache="auto"),
    "xmla-graphs": Engine(plugin=True, sizes=EXACT),
    "xmla-padded": Engine(plugin=True, sizes=PADDED),
    "xmla-compiled": Engine(plugin=True, sizes=EXACT, compiled=True),
    "xmla-profiled": Engine(plugin=True, sizes=EXACT, cache_gib=0),
    "own-ranks-graphs": Engine(plugin=False, sizes=EXACT, ranks=2),
    "own-ranks-4-graphs": Engine(plugin=False, sizes=EXACT, ranks=4),
    "xmla-ranks": Engine(plugin=True, ranks=2),
    "xmla-ranks-graphs": Engine(plugin=True, sizes=EXACT, ranks=2),
    "xmla-ranks-4": Engine(plugin=True, ranks=4),
    "xmla-ranks-4-graphs": Engine(plugin=True, sizes=EXACT, ranks=4),
    "xmla-keys": Engine(plugin=True, ranks=2, keys=True),
    "xmla-keys-graphs": Engine(plugin=True, sizes=EXACT, ranks=2, keys=True),
    "xmla-drafts": Engine(plugin=True, drafts=1),
    "xmla-drafts-3": Engine(plugin=True, drafts=3),  # vLLM then makes a request of each token, on sm_90
    "xmla-drafts-graphs": Engine(plugin=True, sizes=(2, 4, 6, 8, 10), drafts=1),
    "xmla-invariant": Engine(plugin=True, invariant=True),
    "xmla-invariant-alone": Engine(plugin=True, invariant=True, requests=1),
    "xmla-invariant-drafts": Engine(plugin=True, invariant=True, drafts=1),
    "own-long": Engine(plugin=False, chunk=1024, joins=LONG, new=96, max_len=1 << 16),
    "own-long-chunks": Engine(plugin=False, chunk=768, joins=LONG, new=96, max_len=1 << 16),
    "xmla-long": Engine(plugin=True, chunk=1024, joins=LONG, new=96, max_len=1 << 16),
    "v4-own": Engine(plugin=False, kind="v4"),
    "v4-own-chunks": Engine(plugin=False, chunk=768, kind="v4"),
    "v4-own-graphs": Engine(plugin=False, sizes=EXACT, kind="v4"),
    "v4-xmla": Engine(plugin=True, kind="v4"),
    "v4-xmla-chunks": Engine(plugin=True, chunk=768, kind="v4"),
    "v4-xmla-graphs": Engine(plugin=True, sizes=EXACT, kind="v4"),
    "v4-xmla-profiled": Engine(plugin=True, sizes=EXACT, kind="v4", cache_gib=0),
    "v4-own-long": Engine(plugin=False, kind="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v4-own-long-chunks": Engine(plugin=False, chunk=1024, kind="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v4-xmla-long": Engine(plugin=True, kind="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v41-own": Engine(plugin=False, kind="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-own-chunks": Engine(plugin=False, chunk=768, kind="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-own-graphs": Engine(plugin=False, sizes=EXACT, kind="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla": Engine(plugin=True, kind="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla-graphs": Engine(plugin=True, sizes=EXACT, kind="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla-profiled": Engine(plugin=True, sizes=EXACT, kind="v41", joins=V41, max_len=32768, cache_gib=0),
    "glm-own": Engine(plugin=False, cache="auto", kind="glm", cache_gib=2),
    "glm-own-chunks": Engine(plugin=False, cache="auto", chunk=768, kind="glm", cache_gib=2),
    "glm-own-graphs": Engine(plugin=False, cache="auto", sizes=EXACT, kind="glm", cache_gib=2),
    "glm-own-fp8": Engine(plugin=False, kind="glm", cache_gib=2),
    "glm-xmla": Engine(plugin=True, cache="auto", kind="glm", cache_gib=2),
    "glm-xmla-graphs": Engine(plugin=True, cache="auto", sizes=EXACT, kind="glm", cache_gib=2),
    "glm-xmla-fp8": Engine(plugin=True, kind="glm", cache_gib=2),
}
