"""What is vLLM's of the commands."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engines.adapter import Adapter
from benchmarks.engines.answers import Answers, Pairs
from benchmarks.engines.vllm.engines import ENGINES

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_nonrelocated_elf_images",
}  # fmt: skip
# What every engine on xmla calls; 0.33's model of V3.2 writes both caches itself, and V4's do in both releases.
CALLED = {"split_batch", "map_slots", "read_indexer_cache", "indexer_topk", "indexer_topk_paged", "sparse_mla"}
WRITERS = {"write_mla_cache", "write_indexer_cache"}
IN_BLOCKS = {"indexer_blocks", "indexer_blocks_paged", "indexer_block_topk", "indexer_block_topk_paged"}
# The class of attention, and those ops, by model.
OF_MODEL = {
    "v32": ("XmlaSparseImpl", CALLED), "v4": ("XmlaV4Attention", CALLED),
    "v41": ("XmlaV41Attention", CALLED | IN_BLOCKS), "glm": ("XmlaSparseImpl", CALLED | {"expand_blocks"}),
}  # fmt: skip


class Vllm(Adapter):
    name, title, packages = "vllm", "vLLM", ("vllm",)
    engines, profiled = ENGINES, 1
    checked = "own,xmla,own-bf16,own-chunks,xmla-graphs,xmla-padded,xmla-bf16"
    # First, how far apart vLLM's own are.
    pairs = (
        ("own-chunks", "own"), ("own", "own-bf16"), ("xmla", "own-bf16"), ("xmla", "own"), ("xmla-bf16", "own-bf16"),
        ("xmla-graphs", "xmla"), ("xmla-padded", "xmla"), ("xmla-compiled", "xmla"), ("xmla-profiled", "xmla"),
        ("own-graphs", "own"), ("own-compiled", "own"),
        *((f"xmla-{name}", "xmla") for name in ("ranks", "ranks-4", "keys", "drafts", "drafts-3")),
        *((f"xmla-{name}-graphs", f"xmla-{name}") for name in ("ranks", "ranks-4", "keys", "drafts")),
        ("xmla-invariant", "xmla"), *((f"xmla-invariant-{name}", "xmla-invariant") for name in ("alone", "drafts")),
        ("v4-own-chunks", "v4-own"), ("v4-xmla-chunks", "v4-xmla"), ("v4-xmla", "v4-own"), ("v4-own-graphs", "v4-own"),
        ("v4-xmla-graphs", "v4-xmla"), ("v4-xmla-profiled", "v4-xmla"),
        *((f"{kind}-xmla-dspark", f"{kind}-xmla") for kind in ("v4", "v41")),
        *(
            (f"{kind}-xmla-dspark-{name}", f"{kind}-xmla-dspark")
            for kind in ("v4", "v41") for name in ("graphs", "adaptive")
        ),
        ("xmla-fp4", "own-bf16"), ("xmla-fp4", "xmla"), ("xmla-fp4-graphs", "xmla-fp4"),
        ("v41-fp4-xmla", "v41-xmla"), ("v41-fp4-xmla-graphs", "v41-fp4-xmla"),
        ("xmla-mxfp4", "own-bf16"), ("xmla-4bit", "own-bf16"), ("xmla-4bit", "xmla-fp4"),
        *(
            (f"{kind}xmla-mxfp4{more}", f"{kind}xmla{other}")
            for kind in ("", "v4-", "v41-") for more, other in (("", ""), ("-graphs", "-mxfp4"))
        ),
        *((f"xmla-4bit-{name}", "xmla-4bit") for name in ("graphs", "profiled")),
        ("own-long-chunks", "own-long"), ("xmla-long", "own-long"),
        ("v4-own-long-chunks", "v4-own-long"), ("v4-xmla-long", "v4-own-long"),
        ("v41-own-chunks", "v41-own"), ("v41-xmla", "v41-own"), ("v41-own-graphs", "v41-own"),
        ("v41-xmla-graphs", "v41-xmla"), ("v41-xmla-profiled", "v41-xmla"),
        ("glm-own-chunks", "glm-own"), ("glm-own-graphs", "glm-own"), ("glm-own-fp8", "glm-own"),
        ("glm-xmla", "glm-own"), ("glm-xmla-fp8", "glm-own-fp8"), ("glm-xmla-graphs", "glm-xmla"),
    )  # fmt: skip
    near = "xmla-ranks", "xmla-keys", "xmla-drafts", "xmla-long", "xmla-profiled", "v4-xmla", "v41-xmla", "glm-xmla"
    kept = "attention", "calls", "seconds", "steps", "kernels", "compiled_late", "cache_tokens"
    measuring: Mapping[str, str] = {"TRITON_CACHE_AUTOTUNING": "1"}  # see `tune_in_turn` of the child

    def environment(self, log: Path) -> dict[str, str]:
        # Of a kernel that fails: `cuda-gdb -batch -ex "target cudacore FILE"` names it.
        return ENVIRONMENT | {"CUDA_COREDUMP_FILE": str(log.with_suffix(".%p.cudacore"))}

    def step(self, steps: Iterable[float]) -> float:
        """The fastest: the host takes up to twice as long in other rounds, of any engine."""
        return min(steps)

    def holds(self, name: str, answer: dict[str, Any], release: str) -> dict[str, bool]:
        engine = ENGINES[name]
        if not engine.plugin:
            return {}
        attention, ops = OF_MODEL[engine.kind]
        ops = ops | WRITERS if engine.kind == "v32" and release.startswith("0.26") else ops
        counted = ops <= answer["calls"].keys() or engine.ranks > 1  # other processes may not count
        return {
            "attention and every op are xmla's": answer["attention"] == [attention] and counted,
            "no step waits for a kernel": not answer["compiled_late"],
        }

    def holds_beside(self, found: Pairs, answers: Answers) -> dict[str, bool]:
        same = {
            f"{name} has the bits of {other}": answers[name]["answers"] == answers[other]["answers"]
            for name, other in found
            if other == "xmla-invariant"
        }
        # Drafts that are never accepted would leave as many steps.
        accepted = {
            f"{name} has fewer steps than {other}": answers[name]["steps"] < answers[other]["steps"]
            for name, other in found
            if ENGINES[name].drafts and not ENGINES[other].drafts
        }
        return same | accepted
