"""Engines of vLLM by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.engines.table import AnyEngine

# Every op that one of them may call.
OPS = (
    "write_mla_cache", "write_indexer_cache", "indexer_topk_paged", "indexer_topk", "map_slots", "read_indexer_cache",
    "split_batch", "sparse_mla", "read_mla_cache", "indexer_logits_paged", "indexer_logits", "select_topk",
    "merge_topk", "indexer_blocks", "indexer_blocks_paged", "indexer_block_topk", "indexer_block_topk_paged",
    "expand_blocks", "quantize_indexer_query",
)  # fmt: skip
JOINS = {"6000": 0, "3000": 0, "2500": 0, "700": 0, "40": 12}  # tokens of a prompt: the step before which it comes
# In chunks of 1024 tokens beside three decodes: steps that need most of the memory reserved for V3.2's rows and splits.
LONG: dict[str, Any] = {"joins": {"700": 0, "2500": 0, "40": 0, "64000": 0}, "new": 96, "max_len": 1 << 16}
# In chunks of 2048 tokens, the last of which has 1249 with both prompts, to more than 4096 entries of 128 tokens: of
# V4's steps with splits of the keys the largest.
LONG_V4: dict[str, Any] = {"kind": "v4", "joins": {"525497": 0, "40": 12}, "max_len": 1 << 20, "cache_gib": 8}
# Of V4.1 one with more entries than the blocks of the source layer have.
V41: dict[str, Any] = {"kind": "v41", "joins": JOINS | {"24000": 0}, "max_len": 32768, "cache_gib": 2}
FP4: dict[str, Any] = {"cache": "nvfp4_ds_mla"}  # on Hopper vLLM's own kernels have none
MXFP4: dict[str, Any] = {"index": "mxfp4"}  # nor these
DSPARK: dict[str, Any] = {"drafter": "dspark", "drafts": 3}
GLM: dict[str, Any] = {"kind": "glm", "cache": "auto", "cache_gib": 2}


@dataclass(frozen=True, slots=True)
class Engine(AnyEngine):
    """`sizes`: the batches that are captured as CUDA graphs; none: eager. `compiled`: as vLLM does without options.

    `keys`: ranks share the keys too. It is asked `joins`. If `cache_gib` is 0, vLLM's memory profile, which captures
    graphs too, says how large the cache is: it needs the GPU alone. `invariant`: vLLM is asked for the same bits in any
    batch, of at most `requests`. `adaptive`: the device decides how many of the drafts are verified, in graphs alone.
    `index`: the dtype of the indexer's keys.
    """

    cache: str = "fp8"
    index: str = "auto"
    sizes: tuple[int, ...] = ()
    compiled: bool = False
    keys: bool = False
    drafter: str = "mtp"
    adaptive: bool = False
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
            given["speculative_config"] = {"method": self.drafter, "num_speculative_tokens": self.drafts}
            if self.adaptive:
                given["speculative_config"] |= {"enable_adaptive_verification": True}
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
VERIFIED = 4, 8, 12, 16, 20  # tokens of 1 to 5 requests with three drafts each
own, xmla = partial(Engine, plugin=False), partial(Engine, plugin=True)
ENGINES = {
    "own": own(), "own-bf16": own(cache="auto"), "own-chunks": own(chunk=768), "own-graphs": own(sizes=EXACT),
    "own-compiled": own(sizes=EXACT, compiled=True), "xmla": xmla(), "xmla-bf16": xmla(cache="auto"),
    "xmla-graphs": xmla(sizes=EXACT), "xmla-padded": xmla(sizes=PADDED),
    "xmla-compiled": xmla(sizes=EXACT, compiled=True), "xmla-profiled": xmla(sizes=EXACT, cache_gib=0),
    "own-ranks-graphs": own(sizes=EXACT, ranks=2), "own-ranks-4-graphs": own(sizes=EXACT, ranks=4),
    "xmla-ranks": xmla(ranks=2), "xmla-ranks-graphs": xmla(sizes=EXACT, ranks=2), "xmla-ranks-4": xmla(ranks=4),
    "xmla-ranks-4-graphs": xmla(sizes=EXACT, ranks=4), "xmla-keys": xmla(ranks=2, keys=True),
    "xmla-keys-graphs": xmla(sizes=EXACT, ranks=2, keys=True), "xmla-drafts": xmla(drafts=1),
    "xmla-drafts-3": xmla(drafts=3),  # vLLM then makes a request of each token, on sm_90
    "xmla-drafts-graphs": xmla(sizes=(2, 4, 6, 8, 10), drafts=1), "xmla-invariant": xmla(invariant=True),
    "xmla-invariant-alone": xmla(invariant=True, requests=1), "xmla-invariant-drafts": xmla(invariant=True, drafts=1),
    "own-long": own(chunk=1024, **LONG), "own-long-chunks": own(chunk=768, **LONG),
    "xmla-long": xmla(chunk=1024, **LONG),
    "v4-own": own(kind="v4"), "v4-own-chunks": own(chunk=768, kind="v4"), "v4-own-graphs": own(sizes=EXACT, kind="v4"),
    "v4-xmla": xmla(kind="v4"), "v4-xmla-chunks": xmla(chunk=768, kind="v4"),
    "v4-xmla-graphs": xmla(sizes=EXACT, kind="v4"), "v4-xmla-profiled": xmla(sizes=EXACT, kind="v4", cache_gib=0),
    "v4-own-long": own(**LONG_V4), "v4-own-long-chunks": own(chunk=1024, **LONG_V4), "v4-xmla-long": xmla(**LONG_V4),
    "v41-own": own(**V41), "v41-own-chunks": own(chunk=768, **V41), "v41-own-graphs": own(sizes=EXACT, **V41),
    "v41-xmla": xmla(**V41), "v41-xmla-graphs": xmla(sizes=EXACT, **V41),
    "v41-xmla-profiled": xmla(sizes=EXACT, **V41 | {"cache_gib": 0}),
    "v4-xmla-dspark": xmla(kind="v4", **DSPARK), "v4-xmla-dspark-graphs": xmla(kind="v4", **DSPARK, sizes=VERIFIED),
    "v4-xmla-dspark-adaptive": xmla(kind="v4", **DSPARK, sizes=VERIFIED, adaptive=True),
    "v41-xmla-dspark": xmla(**V41, **DSPARK), "v41-xmla-dspark-graphs": xmla(**V41, **DSPARK, sizes=VERIFIED),
    "v41-xmla-dspark-adaptive": xmla(**V41, **DSPARK, sizes=VERIFIED, adaptive=True),
    "xmla-fp4": xmla(**FP4), "xmla-fp4-graphs": xmla(sizes=EXACT, **FP4), "v41-fp4-xmla": xmla(**V41, **FP4),
    "v41-fp4-xmla-graphs": xmla(sizes=EXACT, **V41, **FP4),
    "xmla-mxfp4": xmla(**MXFP4), "xmla-mxfp4-graphs": xmla(sizes=EXACT, **MXFP4), "xmla-4bit": xmla(**FP4, **MXFP4),
    "xmla-4bit-graphs": xmla(sizes=EXACT, **FP4, **MXFP4),
    "xmla-4bit-profiled": xmla(sizes=EXACT, **FP4, **MXFP4, cache_gib=0),
    "v4-xmla-mxfp4": xmla(kind="v4", **MXFP4), "v4-xmla-mxfp4-graphs": xmla(kind="v4", sizes=EXACT, **MXFP4),
    "v41-xmla-mxfp4": xmla(**V41, **MXFP4), "v41-xmla-mxfp4-graphs": xmla(sizes=EXACT, **V41, **MXFP4),
    "glm-own": own(**GLM), "glm-own-chunks": own(**GLM, chunk=768), "glm-own-graphs": own(**GLM, sizes=EXACT),
    "glm-own-fp8": own(**GLM | {"cache": "fp8"}), "glm-xmla": xmla(**GLM), "glm-xmla-graphs": xmla(**GLM, sizes=EXACT),
    "glm-xmla-fp8": xmla(**GLM | {"cache": "fp8"}),
}  # fmt: skip
