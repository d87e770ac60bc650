"""One engine of SGLang on a GPU, in processes of its own because a plugin changes SGLang for good; `run_on_gpu.py`
starts it.

python engine.py model FOLDER                 make the model of V3.2, whose last layer drafts
python engine.py model-v4 FOLDER              that of V4, likewise
python engine.py kernels-v4                   what SGLang compiles for V4 by nvcc, all at once
python engine.py answer ENGINE MODEL OUT      requests of several lengths: tokens and log-probabilities, then again
python engine.py measure ENGINE PIPE          what it is asked for through the pipe: rounds of a case, kernels of one
"""

import fcntl
import gzip
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32  # the generator takes 32 bits of a seed

import typer
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent.parent / "vllm_engine"))  # what does not depend on the engine
from harness import Answered, cases_of, few_of, numbers, same_tokens

LAYERS = 4
LENGTHS = (6000, 3000, 2500, 700, 40)  # tokens of the prompts that are asked
NEW_TOKENS = 32  # of a request
VOCABULARY = 4096
TOKENS = 64  # by which the longer of two requests is longer whose times are subtracted
FEW = 8  # tokens of the shorter
SHOWN = 1000  # the number of the prompts whose kernels are shown, behind all rounds
AHEAD = 1 << 22  # cycles, some 2 ms
# Ops that xmla has in SGLang's place, in prefills and in decodes.
OPS = ("indexer_logits", "indexer_logits_paged", "select_topk", "map_slots", "sparse_mla")
CALLED = "XMLA_TEST_CALLED"  # names a file; each op's name is appended to it at the op's first call in a process

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """`graphs`: decodes are captured as CUDA graphs; `prefill_graphs`: prefills too. `drafts`: tokens that the model's
    last layer drafts; `ranks`: GPUs that share the heads. `v4`: DeepSeek-V4, with one cache and attention;
    `torch_logits`: its indexer's logits by SGLang's function in torch."""

    plugin: bool
    cache: str = "fp8_e4m3"
    attention: str = "flashmla_kv"
    chunk: int = 2048
    graphs: bool = False
    prefill_graphs: bool = False
    drafts: int = 0
    ranks: int = 1
    v4: bool = False
    torch_logits: bool = False

    def environment(self) -> dict[str, str]:
        plugins = (["xmla", "called"] if self.plugin else []) + ["passes"] + ["streams"] * self.v4
        named = {"SGLANG_PLUGINS": ",".join(plugins), "XMLA_SGLANG_REQUIRED": "1"}
        logits = {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"} if self.torch_logits else {}
        return named | (V4_ENVIRONMENT if self.v4 else {}) | logits

    def arguments(self) -> dict[str, Any]:
        drafts = {
            "speculative_algorithm": "EAGLE" if self.v4 else "NEXTN",  # of the same layer; V4 has no other name
            "speculative_num_steps": self.drafts, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.drafts + 1,
        }  # fmt: skip
        kind = {"dsa_prefill_backend": self.attention, "dsa_decode_backend": self.attention}
        return {
            "kv_cache_dtype": self.cache, "chunked_prefill_size": self.chunk, "tp_size": self.ranks,
            "disable_prefill_cuda_graph": not self.prefill_graphs, "disable_decode_cuda_graph": not self.graphs,
        } | ({"context_length": 1 << 16} if self.v4 else kind) | (drafts if self.drafts else {})  # fmt: skip


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
ENGINES = {
    "own": Engine(plugin=False),
    "own-bf16": Engine(plugin=False, **BFLOAT16),
    "own-chunks": Engine(plugin=False, chunk=768),
    "own-graphs": Engine(plugin=False, graphs=True),
    "own-all-graphs": Engine(plugin=False, graphs=True, prefill_graphs=True),
    "own-drafts": Engine(plugin=False, drafts=3),
    "own-ranks": Engine(plugin=False, ranks=2),
    "own-ranks-graphs": Engine(plugin=False, ranks=2, graphs=True),
    "own-ranks-4-graphs": Engine(plugin=False, ranks=4, graphs=True),
    "xmla": Engine(plugin=True),
    "xmla-bf16": Engine(plugin=True, **BFLOAT16),
    "xmla-kv-bf16": Engine(plugin=True, cache="bfloat16"),
    "xmla-gathered": Engine(plugin=True, attention="flashmla_sparse"),  # prefills over rows that SGLang gathers
    "xmla-chunks": Engine(plugin=True, chunk=768),
    "xmla-graphs": Engine(plugin=True, graphs=True),
    "xmla-all-graphs": Engine(plugin=True, graphs=True, prefill_graphs=True),
    "xmla-drafts": Engine(plugin=True, drafts=1),
    "xmla-drafts-3": Engine(plugin=True, drafts=3),
    "xmla-drafts-graphs": Engine(plugin=True, drafts=1, graphs=True),
    "xmla-ranks": Engine(plugin=True, ranks=2),
    "xmla-ranks-graphs": Engine(plugin=True, ranks=2, graphs=True),
    "xmla-ranks-4": Engine(plugin=True, ranks=4),
    "xmla-ranks-4-graphs": Engine(plugin=True, ranks=4, graphs=True),
    "v4-own": Engine(plugin=False, v4=True),
    "v4-own-torch": Engine(plugin=False, v4=True, torch_logits=True),
    "v4-own-graphs": Engine(plugin=False, v4=True, graphs=True),
    "v4-xmla": Engine(plugin=True, v4=True),
    "v4-xmla-graphs": Engine(plugin=True, v4=True, graphs=True),
    "v4-xmla-ranks": Engine(plugin=True, v4=True, ranks=2),
    "v4-xmla-drafts": Engine(plugin=True, v4=True, drafts=3),
    "v4-xmla-drafts-graphs": Engine(plugin=True, v4=True, drafts=3, graphs=True),
}


@app.command("model")
def make_model(folder: Path, layers: int = LAYERS, heads: int = 128, device: str = "cuda") -> None:
    from benchmarks.engines import models as made

    sizes = made.LARGE | {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    scales = made.LARGE_SCALES | {"o_proj": 2 * (heads * 128) ** -0.5}
    made.save(folder, sizes, scales, likely=made.LIKELY, device=device)
    made.add_draft_layer(folder, hidden=0.25)  # so that it drafts the likely successor of the last token
    config = json.loads((folder / "config.json").read_text())
    # Published configurations have it, transformers' class has not.
    (folder / "config.json").write_text(json.dumps(config | {"moe_layer_freq": 1}))


@app.command("model-v4")
def make_model_v4(folder: Path, device: str = "cuda") -> None:
    from benchmarks.engines import models as made

    made.save_v4(folder, made.LARGE_V4, made.LARGE_SCALES_V4, likely=made.LIKELY, device=device)
    made.add_v4_draft_layer(folder, hidden=0.25, experts=1)
    name_for_sglang(folder)


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


def name_for_sglang(folder: Path) -> None:
    """Names of DeepSeek's checkpoint that transformers does not save, and what its configuration has not."""
    file, config = folder / "model.safetensors", folder / "config.json"
    renamed = {"model.hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
    weights = {}
    for name, weight in load_file(file).items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        weights[name] = weight
    save_file(weights, file, metadata={"format": "pt"})
    more = {"topk_method": "noaux_tc", "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))


def without_tilelang() -> None:
    """A plugin of SGLang: mHC's kernel in TileLang is replaced by SGLang's own in Triton, which is for an AMD GPU."""
    from sglang.kernels.ops.layernorm import mhc

    mhc.is_gfx1250_supported = lambda: True


def count_calls() -> None:
    """A plugin of SGLang, behind xmla's: which ops are called in this process is appended to the file."""
    from xmla import torch_api as xt

    for name in OPS:
        setattr(xt, name, noted(getattr(xt, name), name))


def noted(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    calls: Counter[str] = Counter()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not calls[name]:
            with Path(os.environ[CALLED]).open("a") as file:
                file.write(f"{name}\n")
        calls[name] += 1
        return op(*args, **kwargs)

    return call


@dataclass(slots=True)
class Passes:
    """GPU time of the model's forward passes, between events around each, in the process of SGLang's scheduler.

    It includes what the GPU waits for the host between these, but not if `ahead`: then the GPU first waits so long that
    the host has launched all of a decode before it begins.
    """

    events: list[tuple[str, int, list[Any]]] = field(default_factory=list)
    ahead: bool = False

    def watch(self, forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `ModelRunner.forward`."""
        import torch

        if self.ahead:
            torch.cuda._sleep(AHEAD)
        around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        around[0].record()
        result = forward(runner, batch, *args, **kwargs)
        around[1].record()
        self.events.append((batch.forward_mode.name, batch.batch_size, around))
        return result

    def tell(self, scheduler: Any, out: str, ahead: bool) -> None:
        """Write kind, requests and milliseconds of each pass since the last time; a method of SGLang's scheduler."""
        import torch

        torch.cuda.synchronize()
        passes = [(kind, requests, first.elapsed_time(last)) for kind, requests, (first, last) in self.events]
        self.events.clear()
        self.ahead = ahead
        if torch.distributed.get_rank() == 0:
            Path(out).write_text(json.dumps(passes))


def watch_passes() -> None:
    """A plugin of SGLang, with which its scheduler can be asked for the passes."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    passes = Passes()
    Scheduler.tell_passes = lambda scheduler, **asked: passes.tell(scheduler, **asked)
    forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(forward, passes.watch, HookType.AROUND)


@contextmanager
def locked(model: Path, how: int) -> Iterator[None]:
    """LOCK_SH: beside others that start and answer; LOCK_EX: while none does."""
    with (model / "engines.lock").open("w") as lock:
        fcntl.flock(lock, how)
        yield


@contextmanager
def started(name: str, model: Path, **more: Any) -> Iterator[Any]:
    from sglang.srt.entrypoints.engine import Engine as Served

    arguments = ENGINES[name].arguments() | {
        "max_running_requests": 8, "cuda_graph_max_bs_decode": 8, "max_total_tokens": 1 << 16,
        "mem_fraction_static": 0.85,  # engines that start at once count each other's memory
        "sampling_backend": "pytorch", "skip_tokenizer_init": True, "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,  # which several ranks ask for
        "watchdog_timeout": 3600, "log_level": "info",
    } | more  # fmt: skip
    engine = Served(model_path=str(model), **arguments)
    yield engine
    engine.shutdown()


def prompt(length: int, seed: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def ask(engine: Any, prompts: list[list[int]], tokens: int, **more: Any) -> list[dict[str, Any]]:
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=greedy, **more)


@app.command()
def answer(
    name: str, model: Path, out: Path, lengths: str = ",".join(map(str, LENGTHS)), new: int = NEW_TOKENS
) -> None:
    """The tokens of each request; of its prompt the log-probabilities and each position's most likely token.

    Asked again, after all others, the prompts are in the cache of prefixes.
    """
    begun = time.monotonic()
    with locked(model, fcntl.LOCK_SH), started(name, model) as engine:
        ready = time.monotonic()
        prompts = {length: prompt(int(length), int(length)) for length in lengths.split(",")}
        first = ask(engine, [*prompts.values()], new, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
        again = ask(engine, [*prompts.values()], new)
        seconds = {"start": round(ready - begun, 1), "requests": round(time.monotonic() - ready, 1)}
        answers = {
            length: {
                "tokens": result["output_ids"],
                "logprobs": [given[0] for given in result["meta_info"]["input_token_logprobs"][1:]],
                "likely": [best[0][1] for best in result["meta_info"]["input_top_logprobs"][1:]],
                "again": repeated["output_ids"],
                "cached": repeated["meta_info"]["cached_tokens"],
                "accepted": repeated["meta_info"].get("spec_accept_length"),
            }
            for length, result, repeated in zip(prompts, first, again, strict=True)
        }
        called = Path(os.environ[CALLED])
        calls = sorted({*called.read_text().split()}) if called.exists() else []
        out.write_text(json.dumps({"answers": answers, "seconds": seconds, "calls": calls}))


def seconds_of(engine: Any, prompts: list[list[int]], tokens: int) -> float:
    begun = time.perf_counter()
    ask(engine, prompts, tokens)
    return time.perf_counter() - begun


def passes_of(engine: Any, file: Path, ahead: bool = False) -> list[tuple[str, int, float]]:
    """Kind, requests and milliseconds of each pass since the last call; `ahead`: now the GPU waits before each."""
    engine.collective_rpc("tell_passes", out=str(file), ahead=ahead)
    return json.loads(file.read_text())


def new_prompts(context: int, requests: int, number: int) -> list[list[int]]:
    """Prompts of a case's round, which begin like no other prompts of any round."""
    return [prompt(context, crc32(f"{context} {requests} {number} {each}".encode())) for each in range(requests)]


def compile_cases(engine: Any, contexts: list[int], counts: list[int]) -> None:
    """Run each case once with few prompts, so that no round compiles kernels."""
    for context, count in cases_of(contexts, counts):
        few = new_prompts(context, few_of(context, count), -1)
        ask(engine, few, 1)
        ask(engine, [*islice(cycle(few), count)], FEW)


def timed_round(
    engine: Any, passes: Path, answered: Answered, context: int, requests: int, number: int, new: bool
) -> dict[str, Any]:  # fmt: skip
    """A prefill of prompts if they are new and, behind their cached keys, what a step of all takes.

    Keys of older prompts make room by themselves: to flush the cache gives torch's memory back to the driver too, and
    the prefill would wait for it.
    A step on the host, with the scheduler's part, is one of those that the longer of two requests has more; its pass on
    the GPU is the median of a third's, which does not wait for the host.
    """
    prompts, figures = new_prompts(context, requests, number), dict[str, Any]()
    passes_of(engine, passes)
    if new:
        figures["prefill_tokens_per_s"] = round(context * requests / seconds_of(engine, prompts, 1))
        figures["prefill_forward_ms"] = round(sum(ms for *_, ms in passes_of(engine, passes)), 2)
    cached = [result["meta_info"]["cached_tokens"] for result in ask(engine, prompts, 1)]
    few, more = (seconds_of(engine, prompts, tokens) for tokens in (FEW, FEW + TOKENS))
    passes_of(engine, passes, ahead=True)
    tokens = [result["output_ids"] for result in ask(engine, prompts, FEW + TOKENS)]
    decodes = [ms for kind, count, ms in passes_of(engine, passes) if (kind, count) == ("DECODE", requests)][-TOKENS:]
    if len(decodes) < TOKENS:
        return {"refused": f"the cache does not hold {requests} requests at once"}
    return {
        "step_us": round(1e6 * (more - few) / TOKENS, 1),
        "forward_us": round(1e3 * median(decodes), 1),
        "cached_tokens": min(cached),
        "same_tokens": same_tokens(answered, (context, requests, number), tokens),
    } | figures


def kernels_of(engine: Any, folder: Path, context: int, requests: int) -> list[dict[str, Any]]:
    """Kernels of a prefill of new prompts and of decode steps, by time."""
    rows = []
    ask(engine, new_prompts(context, requests, SHOWN), FEW)  # what it compiles is not shown
    prompts = new_prompts(context, requests, SHOWN + 1)
    for phase, new in (("prefill", 1), ("decode", FEW + TOKENS)):
        traces = folder / f"{phase}-{context}-{requests}"
        engine.start_profile(output_dir=str(traces), activities=["GPU"])
        ask(engine, prompts, new)
        engine.stop_profile()
        (trace,) = wait_for(traces)
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        rows += [{"phase": phase} | kernel for kernel in kernels(events)]
    return rows


@app.command()
def measure(
    name: str, pipe: int, folder: Path, contexts: str = "4096", requests: str = "1,8", chunk: int = 8192
) -> None:  # fmt: skip
    """Once ready for such cases, answer each (what, *arguments) that comes through the pipe."""
    asked, lengths, counts = Connection(pipe), numbers(contexts), numbers(requests)
    together = max(counts)
    sizes = {"max_running_requests": together, "cuda_graph_max_bs_decode": together, "chunked_prefill_size": chunk}
    if ENGINES[name].v4:  # else entries of the window are a tenth, which a chunk may not find room in
        sizes["swa_full_tokens_ratio"] = 1
    most = together * (max(lengths) + FEW + TOKENS + 2 * 256)  # in pages of V4, the larger ones
    answered = Answered()
    with started(name, model_from(asked), max_total_tokens=most, **sizes) as engine:
        compile_cases(engine, lengths, counts)
        asked.send(os.getpid())
        while (question := asked.recv()) is not None:
            what, *case = question
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            asked.send(
                timed_round(engine, place / "passes.json", answered, *case) if what == "round" else
                kernels_of(engine, place, *case)
            )  # fmt: skip


def model_from(pipe: Connection) -> Path:
    """The folder that comes once the model is written; until then SGLang is imported."""
    from sglang.srt.entrypoints.engine import Engine as Served  # noqa: F401

    return Path(pipe.recv())


def wait_for(folder: Path, seconds: float = 60) -> list[Path]:
    """The traces in a folder, which SGLang writes behind its answer."""
    deadline = time.monotonic() + seconds
    while not (found := [*folder.glob("*.trace.json.gz")]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def kernels(events: list[dict[str, Any]], most: int = 25) -> list[dict[str, Any]]:
    """Name, launches and microseconds: from the first kernel to the end of the last, of all, of the longest each."""
    ran = [event for event in events if event.get("cat") == "kernel"]
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in ran:
        times[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    begun, ended = min(event["ts"] for event in ran), max(event["ts"] + event["dur"] for event in ran)
    rows = [("from the first to the last", ended - begun, len(ran)), ("all", times.total(), len(ran))]
    rows += [(kernel, us, launches[kernel]) for kernel, us in times.most_common(most)]
    return [{"kernel": kernel[:120], "launches": count, "us": round(us, 1)} for kernel, us, count in rows]


if __name__ == "__main__":
    app()
