"""One engine of SGLang on a GPU; `benchmarks.engines sglang` starts it.

python -m benchmarks.engines.sglang.child model FOLDER              make the model, whose last layer drafts; --kind v4
python -m benchmarks.engines.sglang.child kernels-v4                what SGLang compiles for V4 by nvcc, all at once
python -m benchmarks.engines.sglang.child answer ENGINE MODEL OUT   requests of several lengths: tokens and
                                                                    log-probabilities, then again
python -m benchmarks.engines.sglang.child measure ENGINE PIPE …     what comes through the pipe: rounds of a case,
                                                                    kernels of one
"""

import fcntl
import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.engines.processes import locked
from benchmarks.engines.served import CHUNK, TOKENS, WARM, Prompts, Rows, commands, prompt
from benchmarks.engines.sglang.engines import ENGINES, LOCK
from benchmarks.engines.sglang.plugins import CALLED

LENGTHS = (6000, 3000, 2500, 700, 40)  # tokens of the prompts that are asked


def load() -> None:
    from sglang.srt.entrypoints.engine import Engine as Started  # noqa: F401


def for_sglang(folder: Path, kind: str) -> None:
    """Names of DeepSeek's checkpoint that transformers does not save, and what its configuration has not."""
    from benchmarks.engines import models

    file, config = folder / "model.safetensors", folder / "config.json"
    more: dict[str, Any] = {"moe_layer_freq": 1}
    if kind == "v4":
        models.add_v4_draft_layer(folder, hidden=0.25, experts=1)
        renamed = {"model.hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
        weights = {}
        for name, weight in load_file(file).items():
            for old, new in renamed.items():
                name = name.replace(old, new)
            weights[name] = weight
        save_file(weights, file, metadata={"format": "pt"})
        more |= {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))


@contextmanager
def started(name: str, model: Path, **more: Any) -> Iterator[Any]:
    from sglang.srt.entrypoints.engine import Engine as Started

    arguments = ENGINES[name].arguments() | {
        "max_running_requests": 8, "cuda_graph_max_bs_decode": 8, "max_total_tokens": 1 << 16,
        "mem_fraction_static": 0.85,  # engines that start at once count each other's memory
        "sampling_backend": "pytorch", "skip_tokenizer_init": True, "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,  # which several ranks ask for
        "watchdog_timeout": 3600, "log_level": "info",
    } | more  # fmt: skip
    engine = Started(model_path=str(model), **arguments)
    yield engine
    engine.shutdown()


def generate(engine: Any, prompts: Prompts, tokens: int, **more: Any) -> list[dict[str, Any]]:
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=greedy, **more)


class StartedSglang:
    shown = WARM + TOKENS

    def __init__(self, engine: Any, folder: Path) -> None:
        """`folder` has what the engine's processes write."""
        self.engine, self.folder = engine, folder

    def ask(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        return [result["output_ids"] for result in generate(self.engine, prompts, tokens)]

    def seconds_of(self, prompts: Prompts, tokens: int) -> float:
        begun = time.perf_counter()
        generate(self.engine, prompts, tokens)
        return time.perf_counter() - begun

    def step_of(self, prompts: Prompts) -> tuple[float, int]:
        """A step that the longer of two requests has more, with the scheduler's part."""
        cached = [result["meta_info"]["cached_tokens"] for result in generate(self.engine, prompts, 1)]
        few, more = (self.seconds_of(prompts, tokens) for tokens in (WARM, WARM + TOKENS))
        return 1e6 * (more - few) / TOKENS, min(cached)

    def told(self, ahead: bool = False) -> list[tuple[str, int, float]]:
        """Kind, requests and milliseconds of each pass since the last call."""
        file = self.folder / "passes.json"
        self.engine.collective_rpc("tell_passes", out=str(file), ahead=ahead)
        return json.loads(file.read_text())

    def passes(self, ahead: bool = False) -> list[float]:
        return [ms for *_, ms in self.told(ahead)]

    def decodes(self, requests: int) -> list[float]:
        found = [ms for kind, count, ms in self.told() if (kind, count) == ("DECODE", requests)][-TOKENS:]
        return found if len(found) == TOKENS else []

    def warm_profile(self, prompts: Prompts) -> None:
        self.ask(prompts, WARM)

    def profile(self, prompts: Prompts, tokens: int) -> Rows:
        traces = Path(mkdtemp(dir=self.folder))
        self.engine.start_profile(output_dir=str(traces), activities=["GPU"])
        self.ask(prompts, tokens)
        self.engine.stop_profile()
        (trace,) = wait_for(traces)
        return kernels(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])


def wait_for(folder: Path, seconds: float = 60) -> list[Path]:
    """The traces in a folder, which SGLang writes behind its answer."""
    deadline = time.monotonic() + seconds
    while not (found := [*folder.glob("*.trace.json.gz")]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def kernels(events: list[dict[str, Any]], most: int = 25) -> Rows:
    """Name, launches and microseconds: from the first kernel to the end of the last, of all, of the longest each."""
    ran = [event for event in events if event.get("cat") == "kernel"]
    times: dict[str, float] = {}
    for event in ran:
        times[event["name"]] = times.get(event["name"], 0) + event["dur"]
    launches = Counter(event["name"] for event in ran)
    begun, ended = min(event["ts"] for event in ran), max(event["ts"] + event["dur"] for event in ran)
    rows = [("from the first to the last", ended - begun, len(ran)), ("all", sum(times.values()), len(ran))]
    longest = sorted(times.items(), key=lambda each: -each[1])[:most]
    rows += [(kernel, us, launches[kernel]) for kernel, us in longest]
    return [{"kernel": kernel[:120], "launches": count, "us": round(us, 1)} for kernel, us, count in rows]


@contextmanager
def measured(name: str, model: Path, contexts: list[int], counts: list[int]) -> Iterator[StartedSglang]:
    together = max(counts)
    sizes = {"max_running_requests": together, "cuda_graph_max_bs_decode": together, "chunked_prefill_size": CHUNK}
    if ENGINES[name].kind == "v4":  # else entries of the window are a tenth, which a chunk may not find room in
        sizes["swa_full_tokens_ratio"] = 1
    most = together * (max(contexts) + WARM + TOKENS + 2 * 256)  # in pages of V4, the larger ones
    with started(name, model, max_total_tokens=most, **sizes) as engine, TemporaryDirectory(dir=model.parent) as folder:
        yield StartedSglang(engine, Path(folder))


app = commands(load, measured, for_sglang)


@app.command()
def answer(name: str, model: Path, out: Path) -> None:
    """The tokens of each request; of its prompt the log-probabilities and each position's most likely token.

    Asked again, after all others, the prompts are in the cache of prefixes.
    """
    begun, new = time.monotonic(), ENGINES[name].new
    with locked(model / LOCK, fcntl.LOCK_SH), started(name, model) as engine:
        ready = time.monotonic()
        prompts = [prompt(length, length) for length in LENGTHS]
        first = generate(engine, prompts, new, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
        again = generate(engine, prompts, new)
        seconds = {"start": round(ready - begun, 1), "requests": round(time.monotonic() - ready, 1)}
        answers = {
            str(length): {
                "tokens": result["output_ids"],
                "logprobs": [given[0] for given in result["meta_info"]["input_token_logprobs"][1:]],
                "likely": [best[0][1] for best in result["meta_info"]["input_top_logprobs"][1:]],
                "again": repeated["output_ids"],
                "cached": repeated["meta_info"]["cached_tokens"],
                "accepted": repeated["meta_info"].get("spec_accept_length"),
            }
            for length, result, repeated in zip(LENGTHS, first, again, strict=True)
        }
        called = Path(os.environ[CALLED])
        calls = sorted({*called.read_text().split()}) if called.exists() else []
        out.write_text(json.dumps({"answers": answers, "seconds": seconds, "calls": calls}))


@app.command("kernels-v4")
def build_kernels_v4() -> None:
    """What each engine of V4 would compile at its first steps, one after the other; they take it from SGLang's cache.

    SGLang is imported where it is needed: its modules ask for a GPU.
    """
    import torch
    from sglang.kernels.jit.utils.compile import parallel_compile
    from sglang.kernels.ops.activation import silu_and_mul_clamp
    from sglang.kernels.ops.attention.dsv4 import compress, norm_rope, topk
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.kernels.ops.moe import dsv4
    from sglang.kernels.ops.speculative import tree

    half, single, layout = torch.bfloat16, torch.float32, KVLayout.V4
    parallel_compile([
        norm_rope._jit_fused_rope_module,
        partial(norm_rope._jit_main_q_norm_rope_module, half, 512, 64, True),
        partial(norm_rope._jit_main_k_norm_rope_flashmla_module, half, 512, 64, 256, layout),
        partial(norm_rope._jit_main_q_indexer_rope_hadamard_quant_module, half),
        compress._jit_compress_plan_module,
        *(
            partial(compress._jit_compress_module, dim, single, single, single, ratio)
            for dim, ratio in ((512, 4), (128, 4), (512, 128))
        ),
        *(
            partial(compress._jit_compress_norm_rope_module, single, dim, 64, page, False, layout)
            for dim, page in ((512, 64), (512, 2), (128, 64))
        ),
        dsv4._jit_hash_topk_module,
        partial(silu_and_mul_clamp._jit_silu_and_mul_clamp_module, half),
        tree._jit_tree_module,  # of engines that draft
        topk._jit_topk_v2_module,  # of SGLang's own engines alone
    ])  # fmt: skip


if __name__ == "__main__":
    app()
