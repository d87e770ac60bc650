"""What is SGLang's of the commands."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.adapter import Adapter
from benchmarks.engines.answers import Answers, Figures, Pairs, equal_before
from benchmarks.engines.entry_points import PROJECT
from benchmarks.engines.processes import locked
from benchmarks.engines.sglang.engines import ENGINES, LOCK, OPS
from benchmarks.engines.sglang.plugins import CALLED, POINTS

ENVIRONMENT = {
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # else prefills of few keys ask for FlashAttention 3
    # The Rust core of the radix tree fails with another release of torch than the one that it was built for.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # engines of one GPU run beside those of two
}  # fmt: skip
RUNS = "DeepSeek sparse attention runs on xmla"
READY = "kernels are ready"  # as the plugin logs in each process; what xmla logs of a kernel behind it was not listed
COMPILED = " s for sm_"
# SGLang's warnings of weights that a checkpoint or a model has not. It serves on, with whatever memory had there.
NOT_LOADED = "not initialized from checkpoints", "not found in params_dict"


class Sglang(Adapter):
    name, title, packages = "sglang", "SGLang", ("sglang", "sglang-kernel")
    engines, profiled = ENGINES, 8
    checked = "own,own-bf16,own-chunks,xmla,xmla-bf16,xmla-chunks,xmla-graphs,xmla-all-graphs,xmla-drafts"
    # First, how far apart SGLang's own are.
    pairs = (
        ("own-chunks", "own"), ("own", "own-bf16"), ("xmla", "own-bf16"), ("xmla", "own"), ("xmla-bf16", "own-bf16"),
        *((f"own-{name}", "own") for name in ("graphs", "all-graphs", "drafts", "ranks")),
        *((f"xmla-{name}", "xmla") for name in (
            "kv-bf16", "gathered", "chunks", "graphs", "all-graphs", "drafts", "drafts-3", "drafts-graphs", "ranks",
            "ranks-graphs", "ranks-4", "ranks-4-graphs",
        )),
        ("v4-own-torch", "v4-own"), ("v4-xmla", "v4-own"), ("v4-xmla", "v4-own-torch"), ("v4-own-graphs", "v4-own"),
        *((f"v4-xmla-{name}", "v4-xmla") for name in ("graphs", "ranks", "drafts", "drafts-graphs")),
    )  # fmt: skip
    near = "xmla-drafts", "xmla-ranks", "xmla-chunks", "xmla-all-graphs", "xmla-gathered", "v4-"
    kept = "runs", "calls", "seconds", "compiled_late", "not_loaded"
    entry_points: Mapping[str, Mapping[str, str]] = {
        "sglang.srt.plugins": PROJECT["entry-points"]["sglang.srt.plugins"] | POINTS
    }
    compiling: Mapping[str, str] = {"v4": "kernels-v4"}

    def environment(self, log: Path) -> dict[str, str]:
        called = log.with_suffix(".called")
        called.unlink(missing_ok=True)
        return ENVIRONMENT | {CALLED: str(called)}

    def step(self, steps: Iterable[float]) -> float:
        """The median: each is a difference of two times, of which the least has the most noise."""
        return median(steps)

    def alone(self, model: Path) -> AbstractContextManager[None]:
        return locked(model / LOCK)

    def logged(self, log: str) -> dict[str, Any]:
        return {"runs": RUNS in log, "compiled_late": compiled_late(log), "not_loaded": not_loaded(log)}

    def again(self, answers: Answers) -> Figures:
        """How many tokens of a request asked again were cached, and how many new ones are equal, by prompt."""
        return {
            "prompt": [int(length) for length in answers],
            "cached": [answer["cached"] for answer in answers.values()],
            "equal_again": [equal_before(answer["again"], answer["tokens"]) for answer in answers.values()],
            "accepted": [answer["accepted"] for answer in answers.values()],
        }

    def holds(self, name: str, answer: dict[str, Any], release: str) -> dict[str, bool]:
        engine, figures = ENGINES[name], self.again(answer["answers"])
        wanted = {"all weights are the checkpoint's": answer["not_loaded"] == []}
        if engine.plugin:
            called = {*OPS} <= {*answer["calls"]}
            wanted["attention and every op are xmla's"] = answer["runs"] and called
            wanted["no step waits for a kernel"] = answer["compiled_late"] == []
        else:
            wanted["nothing is xmla's"] = not answer["runs"] and not answer["calls"]
        if engine.kind != "v4":  # of which a prefix needs a window, too
            # All pages but the last are cached, whose token is computed; the same tokens come out of them.
            pages = zip(figures["cached"], figures["prompt"], strict=True)
            wanted["prompts asked again are cached"] = all(count >= length - 64 - 1 for count, length in pages)
        if engine.drafts:  # without any a step gives one token
            wanted["drafts are accepted"] = median(each or 0 for each in figures["accepted"]) > 1
        return wanted

    def holds_beside(self, found: Pairs, answers: Answers) -> dict[str, bool]:
        wanted: dict[str, bool] = {}
        for (name, other), figures in found.items():
            if ENGINES[name].drafts:  # more rows of a GEMM round otherwise, which a near tie shows
                _, *equal = sorted(figures["equal_tokens"])
                same = equal == [ENGINES[name].new] * len(equal)
                wanted[f"{name}: tokens are those of {other}, of all prompts but one"] = same
        return wanted


def compiled_late(log: str) -> list[str] | None:
    """What xmla's log tells of kernels that were compiled or loaded behind warm-up, of which it tells too."""
    _, ready, rest = log.rpartition(READY)
    return [line[:200] for line in rest.splitlines() if COMPILED in line] if ready else None


def not_loaded(log: str) -> list[str]:
    """What SGLang's log tells of weights that a checkpoint or the model has not."""
    return [line[:200] for line in log.splitlines() if any(warning in line for warning in NOT_LOADED)]
