"""Engines of SGLang by name."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.engines.table import AnyEngine

LOCK = "engines.lock"  # beside a model: engines that answer share it, those that are measured have it alone
# Ops that xmla has in SGLang's place, in prefills and in decodes.
OPS = ("indexer_logits", "indexer_logits_paged", "select_topk", "map_slots", "sparse_mla")


@dataclass(frozen=True, slots=True)
class Engine(AnyEngine):
    """`graphs`: decodes are captured as CUDA graphs; `prefill_graphs`: prefills too. `torch_logits`: V4's indexer's
    logits are by SGLang's function in torch.
    """

    cache: str = "fp8_e4m3"
    attention: str = "flashmla_kv"  # V3.2's
    graphs: bool = False
    prefill_graphs: bool = False
    torch_logits: bool = False

    def environment(self) -> dict[str, str]:
        v4 = self.kind == "v4"
        plugins = (["xmla", "called"] if self.plugin else []) + ["passes"] + ["streams"] * v4
        named = {"SGLANG_PLUGINS": ",".join(plugins), "XMLA_SGLANG_REQUIRED": "1"}
        logits = {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"} if self.torch_logits else {}
        return named | (V4_ENVIRONMENT if v4 else {}) | logits

    def arguments(self) -> dict[str, Any]:
        v4 = self.kind == "v4"
        drafts = {
            "speculative_algorithm": "EAGLE" if v4 else "NEXTN",  # of the same layer; V4 has no other name
            "speculative_num_steps": self.drafts, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.drafts + 1,
        }  # fmt: skip
        backends = {"dsa_prefill_backend": self.attention, "dsa_decode_backend": self.attention}
        return {
            "kv_cache_dtype": self.cache, "chunked_prefill_size": self.chunk, "tp_size": self.ranks,
            "disable_prefill_cuda_graph": not self.prefill_graphs, "disable_decode_cuda_graph": not self.graphs,
        } | ({"context_length": 1 << 16} if v4 else backends) | (drafts if self.drafts else {})  # fmt: skip


V4_ENVIRONMENT = {
    # Without TileLang, in all engines: what it has for mHC is left to torch, but for one kernel (`without_tilelang`).
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_FUSE_MHC_POST_PRE": "0", "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    # Captured, each of mHC's functions in torch would be compiled for every layer and batch.
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_OPT_USE_JIT_INDEXER_METADATA": "0",  # the schedule of the release of DeepGEMM that reads it
    "SGLANG_DSV4_FP4_EXPERTS": "0",  # the checkpoint's are bfloat16
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER_MIN_QUERY_TOKENS": "1024",  # so that the chunks here have it too
}  # fmt: skip
BFLOAT16 = {"cache": "bfloat16", "attention": "flashmla_sparse"}
own, xmla = partial(Engine, plugin=False), partial(Engine, plugin=True)
ENGINES = {
    "own": own(), "own-bf16": own(**BFLOAT16), "own-chunks": own(chunk=768), "own-graphs": own(graphs=True),
    "own-all-graphs": own(graphs=True, prefill_graphs=True), "own-drafts": own(drafts=3), "own-ranks": own(ranks=2),
    "own-ranks-graphs": own(ranks=2, graphs=True), "own-ranks-4-graphs": own(ranks=4, graphs=True), "xmla": xmla(),
    "xmla-bf16": xmla(**BFLOAT16), "xmla-kv-bf16": xmla(cache="bfloat16"),
    "xmla-gathered": xmla(attention="flashmla_sparse"),  # prefills over rows that SGLang gathers
    "xmla-chunks": xmla(chunk=768), "xmla-graphs": xmla(graphs=True),
    "xmla-all-graphs": xmla(graphs=True, prefill_graphs=True), "xmla-drafts": xmla(drafts=1),
    "xmla-drafts-3": xmla(drafts=3), "xmla-drafts-graphs": xmla(drafts=1, graphs=True), "xmla-ranks": xmla(ranks=2),
    "xmla-ranks-graphs": xmla(ranks=2, graphs=True), "xmla-ranks-4": xmla(ranks=4),
    "xmla-ranks-4-graphs": xmla(ranks=4, graphs=True),
    "v4-own": own(kind="v4"), "v4-own-torch": own(kind="v4", torch_logits=True),
    "v4-own-graphs": own(kind="v4", graphs=True), "v4-xmla": xmla(kind="v4"),
    "v4-xmla-graphs": xmla(kind="v4", graphs=True), "v4-xmla-ranks": xmla(kind="v4", ranks=2),
    "v4-xmla-drafts": xmla(kind="v4", drafts=3), "v4-xmla-drafts-graphs": xmla(kind="v4", drafts=3, graphs=True),
}  # fmt: skip
