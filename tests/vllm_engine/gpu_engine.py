"""One engine of vLLM on a GPU, in a process of its own because a plugin changes vLLM for good; `on_gpu.py` starts it.

python gpu_engine.py model FOLDER                 make the model; --kind v4, v41 or glm: with their attention
python gpu_engine.py answer ENGINE MODEL OUT      requests that join late: tokens and log-probabilities
python gpu_engine.py measure ENGINE PIPE          what comes through the pipe: rounds of a case, kernels of one
python gpu_engine.py serve ENGINE PIPE            the same: rounds of a trace of requests
"""

import fcntl
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32  # the generator takes 32 bits of a seed with all their differences

import torch
import typer
from forwards import Forwards
from harness import Answered, cases_of, few_of, numbers, same_tokens

import xmla
from benchmarks.engines.vllm.steps import Watch, summary

LAYERS = 4
JOINS = {"6000": 0, "3000": 0, "2500": 0, "700": 0, "40": 12}  # tokens of a prompt: the step before which it comes
# In chunks of 1024 tokens beside three decodes: steps that need most of the memory reserved for V3.2's rows and splits.
LONG = {"700": 0, "2500": 0, "40": 0, "64000": 0}
# In chunks of 2048 tokens, the last of which has 1249 with both prompts, to more than 4096 entries of 128 tokens: of
# V4's steps with splits of the keys the largest.
LONG_V4 = {"525497": 0, "40": 12}
# Of V4.1 one with more entries than the blocks of the source layer have.
V41 = JOINS | {"24000": 0}
NEW_TOKENS = 32  # of a request
VOCABULARY = 4096
WARM = 8  # tokens of each request before decode is timed
TOKENS = 64  # of each request that are timed
SHOWN = 16  # decode steps whose kernels are shown
TYPICAL, SPREAD, SHORTEST, LONGEST = 2048, 1.2, 64, 32768  # tokens of a trace's prompts: median, of the logarithm
FEWEST, MOST = 16, 256  # new tokens of its requests
AT_ONCE = 64  # of its requests
# Prompts before a trace. Triton compiles vLLM's kernel for experts apart for numbers of tokens that are divisible by 8,
# by 4 alone and by neither, in each of its five ranges above those that graphs hold; a request would wait for each.
BEFORE = (80, 76, 73, 112, 116, 113, 144, 148, 145, 528, 532, 529, 2048, 2052, 2049)
CACHE_BYTES = {"fp8": 656 + 132, "auto": 1152 + 132}  # of a token in a layer, with the indexer's key

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """`sizes`: the batches that are captured as CUDA graphs; none: eager. `compiled`: as vLLM does without options.

    `ranks`: GPUs that share the heads, and with `keys` the keys too; `drafts`: tokens that a layer of the model drafts;
    `version`: the model has this DeepSeek's attention. It is asked `joins`, with `new` tokens for each. If `cache_gib`
    is 0, vLLM's memory profile, which captures graphs too, says how large the cache is: it needs the GPU alone.
    `invariant`: vLLM is asked for the same bits in any batch, of at most `requests`.
    """

    plugin: bool
    cache: str = "fp8"
    chunk: int = 2048
    sizes: tuple[int, ...] = ()
    compiled: bool = False
    ranks: int = 1
    keys: bool = False
    drafts: int = 0
    version: str = "v32"
    joins: Mapping[str, int] = field(default_factory=lambda: JOINS)
    new: int = NEW_TOKENS
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
        given = {} if self.plugin else {"attention_backend": "FLASHMLA_SPARSE"}
        given |= {"kv_cache_dtype": self.cache}
        if self.ranks > 1:
            given |= {"tensor_parallel_size": self.ranks, "disable_custom_all_reduce": True}
            given |= {"decode_context_parallel_size": self.ranks if self.keys else 1}
        if self.drafts:
            given["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.drafts}
        if self.version == "v4":
            given["block_size"] = 256
        if self.version == "glm":  # the other is a kernel of a package that tests do without
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
    "v4-own": Engine(plugin=False, version="v4"),
    "v4-own-chunks": Engine(plugin=False, chunk=768, version="v4"),
    "v4-own-graphs": Engine(plugin=False, sizes=EXACT, version="v4"),
    "v4-xmla": Engine(plugin=True, version="v4"),
    "v4-xmla-chunks": Engine(plugin=True, chunk=768, version="v4"),
    "v4-xmla-graphs": Engine(plugin=True, sizes=EXACT, version="v4"),
    "v4-xmla-profiled": Engine(plugin=True, sizes=EXACT, version="v4", cache_gib=0),
    "v4-own-long": Engine(plugin=False, version="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v4-own-long-chunks": Engine(plugin=False, chunk=1024, version="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v4-xmla-long": Engine(plugin=True, version="v4", joins=LONG_V4, max_len=1 << 20, cache_gib=8),
    "v41-own": Engine(plugin=False, version="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-own-chunks": Engine(plugin=False, chunk=768, version="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-own-graphs": Engine(plugin=False, sizes=EXACT, version="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla": Engine(plugin=True, version="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla-graphs": Engine(plugin=True, sizes=EXACT, version="v41", joins=V41, max_len=32768, cache_gib=2),
    "v41-xmla-profiled": Engine(plugin=True, sizes=EXACT, version="v41", joins=V41, max_len=32768, cache_gib=0),
    "glm-own": Engine(plugin=False, cache="auto", version="glm", cache_gib=2),
    "glm-own-chunks": Engine(plugin=False, cache="auto", chunk=768, version="glm", cache_gib=2),
    "glm-own-graphs": Engine(plugin=False, cache="auto", sizes=EXACT, version="glm", cache_gib=2),
    "glm-own-fp8": Engine(plugin=False, version="glm", cache_gib=2),
    "glm-xmla": Engine(plugin=True, cache="auto", version="glm", cache_gib=2),
    "glm-xmla-graphs": Engine(plugin=True, cache="auto", sizes=EXACT, version="glm", cache_gib=2),
    "glm-xmla-fp8": Engine(plugin=True, version="glm", cache_gib=2),
}


@app.command("model")
def make_model(folder: Path, kind: str = "v32", layers: int = LAYERS, heads: int = 128) -> None:
    from benchmarks.engines import models as made

    if kind == "v4":
        made.save_v4(folder, made.LARGE_V4, made.LARGE_SCALES_V4, likely=made.LIKELY, device="cuda")
        return
    if kind == "v41":
        made.save_v41(folder, made.LARGE_V41, made.LARGE_SCALES_V41, likely=made.LIKELY, device="cuda")
        return
    if kind == "glm":
        made.save_glm(folder, made.LARGE_GLM, made.LARGE_SCALES_GLM, likely=made.LIKELY, device="cuda")
        return
    sizes = made.LARGE | {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    scales = made.LARGE_SCALES | {"o_proj": 2 * (heads * 128) ** -0.5}
    made.save(folder, sizes, scales, likely=made.LIKELY, device="cuda")
    made.add_draft_layer(folder, hidden=0.25)  # so that it drafts the likely successor of the last token


def scatter_without_pynccl() -> None:
    """torch's reduce_scatter where vLLM's does nothing: if it finds an NCCL that lacks functions of later ones."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    by_pynccl = CudaCommunicator.reduce_scatter

    def reduce_scatter(self: Any, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
        by = DeviceCommunicatorBase.reduce_scatter if self.pynccl_comm.disabled else by_pynccl
        return by(self, given, dim)

    CudaCommunicator.reduce_scatter = reduce_scatter


def start(
    name: str, model: Path, sizes: tuple[int, ...], gpu_memory_utilization: float = 0.05, **arguments: Any
) -> Any:  # fmt: skip
    from vllm import EngineArgs, LLMEngine

    model_version, new = ENGINES[name].version, not version("vllm").startswith("0.26")
    if model_version != "v32" or new:
        from vllm.plugins import load_general_plugins

        from benchmarks.engines.vllm import replaced_glm, replaced_v4, replaced_v41, without_cutedsl

        load_general_plugins()
        if find_spec("cutlass") is None:
            without_cutedsl.install()
        if model_version != "v32":
            {"v4": replaced_v4, "v41": replaced_v41, "glm": replaced_glm}[model_version].install()
    if new:
        scatter_without_pynccl()
        arguments["kernel_config"] = {"enable_jit_warmup": False}  # what it compiles at start is partly replaced
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=gpu_memory_utilization,
            attention_config={"sparse_mla_force_mqa": True}, disable_log_stats=True,
            **ENGINES[name].arguments(sizes), **arguments,
        )
    )  # fmt: skip


def told(worker: Any) -> dict[str, Any]:
    """Whose attention a worker's layers have, and how often each op was called if that is counted there."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    attention = [getattr(layer, "impl", layer) for layer in layers]  # V4's layers are attention themselves
    kinds = sorted({type(layer).__name__ for layer in attention if hasattr(layer, "forward_mqa")})
    return {"attention": kinds, "calls": dict(getattr(sys.modules.get("serve"), "CALLS", {}))}


def compiled(worker: Any) -> list[str]:
    """What this worker has compiled of xmla's kernels, or loaded."""
    return [str(made) for made in xmla.compiles()]


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {"prompt_token_ids": torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()}


@app.command()
def answer(name: str, model: Path, out: Path) -> None:
    """The tokens of each request; of its prompt the log-probabilities and each position's most likely token."""
    if ENGINES[name].plugin:
        import serve

        for op in serve.OPS:
            setattr(serve.xt, op, serve.counted(op, None))
    from vllm import SamplingParams

    begun, asked = time.monotonic(), ENGINES[name]
    memory = {"kv_cache_memory_bytes": asked.cache_gib << 30} if asked.cache_gib else {"gpu_memory_utilization": 0.2}
    engine = start(
        name, model, asked.sizes, max_model_len=asked.max_len, max_num_seqs=asked.requests,
        max_num_batched_tokens=asked.chunk, **memory, enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    ready, before = time.monotonic(), engine.collective_rpc(compiled)
    parameters = SamplingParams(
        temperature=0, max_tokens=asked.new, prompt_logprobs=1, detokenize=False, ignore_eos=True
    )
    answers: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests() or step <= max(asked.joins.values()):
        for length, joins in asked.joins.items():
            if joins == step:
                engine.add_request(length, prompt(int(length), int(length)), parameters)
        step += 1
        for result in engine.step():
            if result.finished:
                given = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
                found = [(known[token].logprob, min(known, key=lambda t: known[t].rank)) for token, known in given]
                answers[result.request_id] = {
                    "tokens": [*result.outputs[0].token_ids],
                    "logprobs": [logprob for logprob, _ in found],
                    "likely": [token for _, token in found],
                }
    seconds = {"start": round(ready - begun, 1), "requests": round(time.monotonic() - ready, 1)}
    first, *others = engine.collective_rpc(told)
    assert all(other == first for other in others), [first, *others]
    after = engine.collective_rpc(compiled)
    late = [made for old, new in zip(before, after, strict=True) for made in new[len(old) :]]
    counts = {"steps": step, "kernels": len(before[0]), "compiled_late": late}
    out.write_text(json.dumps({"answers": answers, "seconds": seconds} | counts | first))


@dataclass(frozen=True, slots=True)
class Drained:
    """Steps until all requests are done: when each ended, with how many new tokens; the prompts' tokens that were
    cached, and the new ones of each request.
    """

    begun: float
    steps: list[tuple[float, int]]
    cached: int
    tokens: list[list[int]]

    @property
    def seconds(self) -> float:
        return self.steps[-1][0] - self.begun

    def decode_us(self, requests: int) -> list[float]:
        """Times of steps in which every request had a new token, after the first ones."""
        done = [step for step in self.steps if step[1]]  # a scheduler that runs ahead hands out nothing at first
        return [(b[0] - a[0]) * 1e6 for a, b in pairwise(done) if b[1] == requests][WARM - 1 :]


def drain(engine: Any, prompts: list[Any], tokens: int) -> Drained:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for number, given in enumerate(prompts):
        engine.add_request(str(number), given, parameters)
    torch.cuda.synchronize()
    begun, steps, cached, new = time.perf_counter(), [], 0, [list[int]() for _ in prompts]
    while engine.has_unfinished_requests():
        results = engine.step()
        steps.append((time.perf_counter(), sum(len(result.outputs[0].token_ids) for result in results)))
        cached += sum(result.num_cached_tokens or 0 for result in results if result.finished)
        for result in results:
            new[int(result.request_id)] += result.outputs[0].token_ids
    return Drained(begun, steps, cached, new)


def sizes_of(model: Path) -> dict[str, Any]:
    """The configuration of a saved model; V4.1's has that of text inside."""
    config = json.loads((model / "config.json").read_text())
    return config | config.get("text_config", {})


def start_for(name: str, model: Path, contexts: list[int], counts: list[int], tokens: int, chunk: int) -> Any:
    """An engine whose cache holds every number of requests at every context, with `tokens` new ones for each."""
    layers = sizes_of(model)["num_hidden_layers"]
    most = max(counts) * (max(contexts) + tokens + 128)
    # Windows and compressors have caches of their own, in pages as large. States of linear attention are few.
    most *= 3 if ENGINES[name].version in ("v4", "v41") else 1
    return start(
        name, model, tuple(sorted(set(counts))), max_model_len=max(contexts) + tokens + WARM + 64,
        max_num_seqs=max(counts), max_num_batched_tokens=chunk, enable_prefix_caching=True,
        kv_cache_memory_bytes=(1 << 30) + int(1.25 * most * layers * CACHE_BYTES[ENGINES[name].cache]),
    )  # fmt: skip


def new_prompts(context: int, requests: int, number: int) -> list[Any]:
    """Prompts of a case's round, which begin like no other prompts of any round."""
    return [prompt(context, crc32(f"{context} {requests} {number} {each}".encode())) for each in range(requests)]


def compile_cases(engine: Any, contexts: list[int], counts: list[int]) -> None:
    """Run each case once with few prompts, so that no round compiles or tunes kernels."""
    for context, count in cases_of(contexts, counts):
        few = new_prompts(context, few_of(context, count), -1)
        drain(engine, few, 1)
        drain(engine, [*islice(cycle(few), count)], WARM)


def timed_round(
    engine: Any, forwards: Forwards, answered: Answered, context: int, requests: int, number: int, new: bool
) -> dict[str, Any]:  # fmt: skip
    """A prefill of prompts if they are new; behind their cached keys, where all start at once, steps and their passes.

    A step is timed on the host. Passes are those of further steps, in which the GPU does not wait for the host.
    """
    prompts, figures = new_prompts(context, requests, number), dict[str, Any]()
    forwards.milliseconds()
    if new:
        filled = drain(engine, prompts, 1)
        figures["prefill_tokens_per_s"] = round(context * requests / filled.seconds)
        figures["prefill_forward_ms"] = round(sum(forwards.milliseconds()), 2)
    done = drain(engine, prompts, TOKENS + WARM)
    steps = done.decode_us(requests)
    if not steps:
        return {"refused": f"the cache does not hold {requests} requests at once"}
    forwards.milliseconds()
    forwards.let_ahead(True)
    ahead = drain(engine, prompts, TOKENS + WARM)
    forwards.let_ahead(False)
    passes = forwards.milliseconds()[-TOKENS:]
    return {
        "step_us": round(statistics.median(steps), 1), "forward_us": round(1e3 * statistics.median(passes), 1),
        "cached_tokens": done.cached,
        "same_tokens": same_tokens(answered, (context, requests, number), ahead.tokens),
    } | figures  # fmt: skip


def tune_in_turn(lock: Path) -> None:
    """Let one of the engines that share a cache tune a kernel of Triton's, and those that wait read its choice.

    So none is tuned beside another one's work of that kind, or chooses otherwise. Needs TRITON_CACHE_AUTOTUNING=1.
    """
    from triton.runtime.autotuner import Autotuner

    look_up = Autotuner.check_disk_cache

    def locked(*args: Any) -> Any:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return look_up(*args)

    Autotuner.check_disk_cache = locked


def model_from(pipe: Connection) -> Path:
    """The folder that comes once the model is written; until then vLLM is imported."""
    from vllm import EngineArgs, LLMEngine  # noqa: F401

    return Path(pipe.recv())


@app.command()
def measure(name: str, pipe: int, contexts: str = "4096,32768", requests: str = "1,8,64", chunk: int = 8192) -> None:
    """Once ready for such cases, answer each (what, *arguments) that comes through the pipe."""
    asked, lengths, counts = Connection(pipe), numbers(contexts), numbers(requests)
    model = model_from(asked)
    tune_in_turn(model.parent / "tuning.lock")
    engine = start_for(name, model, lengths, counts, TOKENS, chunk)
    print("attention", engine.collective_rpc(told)[0]["attention"], flush=True)
    forwards, answered = Forwards(engine), Answered()
    compile_cases(engine, lengths, counts)
    asked.send(os.getpid())
    while (question := asked.recv()) is not None:
        what, *case = question
        asked.send(timed_round(engine, forwards, answered, *case) if what == "round" else kernels_of(engine, *case))


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace: the seconds after which it comes, the tokens of its prompt, and its new ones."""

    comes: float
    tokens: int
    new: int


def trace_of(requests: int, rate: float) -> list[Request]:
    """Always the same: `rate` requests a second, at random times, of random lengths."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.empty(requests).exponential_(rate, generator=generator)
    lengths = torch.empty(requests).log_normal_(math.log(TYPICAL), SPREAD, generator=generator)
    new = torch.randint(FEWEST, MOST + 1, (requests,), generator=generator)
    whole = lengths.clamp(SHORTEST, LONGEST).long().tolist()
    return [Request(*each) for each in zip(gaps.cumsum(0).tolist(), whole, new.tolist(), strict=True)]


def play(
    engine: Any, trace: list[Request], number: int, pace: float, watch: Watch, forwards: Forwards
) -> dict[str, Any]:
    """A round of the trace with new prompts, `pace` times as fast: of each request the time from when it comes until
    its first token, and from there the time of a token; seconds until the last, and what steps took.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = [prompt(request.tokens, number << 20 | place) for place, request in enumerate(trace)]
    coming = deque(enumerate(trace))
    first, last = dict[int, float](), dict[int, float]()
    forwards.milliseconds()
    watch.begin()
    begun = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - begun
        while coming and coming[0][1].comes / pace <= now:
            place, request = coming.popleft()
            parameters = SamplingParams(
                temperature=0, max_tokens=request.new, detokenize=False, ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(f"{number}-{place}", prompts[place], parameters)
        if not engine.has_unfinished_requests():
            time.sleep(coming[0][1].comes / pace - now)
            continue
        results = watch.step()
        now = time.perf_counter() - begun
        for result in results:
            if result.outputs[0].token_ids:
                place = int(result.request_id.partition("-")[2])
                first.setdefault(place, now)
                last[place] = now
    watch.passes(forwards.milliseconds())
    waited = [(request.tokens, request.comes / pace, first[place]) for place, request in enumerate(trace)]
    return {
        "ttft_ms": [1e3 * (first[place] - request.comes / pace) for place, request in enumerate(trace)],
        "tpot_ms": [1e3 * (last[place] - first[place]) / (request.new - 1) for place, request in enumerate(trace)],
        "seconds": max(last.values()),
    } | summary(watch, max(last.values()), waited)


@app.command()
def serve(name: str, pipe: int, chunk: int = 8192, cores: str = "") -> None:
    """Once ready, answer each (requests, rate, number, pace) that comes through the pipe; on these cores, if named."""
    if cores:
        os.sched_setaffinity(0, numbers(cores))
    counts = [2**power for power in range(AT_ONCE.bit_length())]
    asked = Connection(pipe)
    engine = start_for(name, model_from(asked), [LONGEST], counts, MOST, chunk)
    print("attention", engine.collective_rpc(told)[0]["attention"], flush=True)
    watch, forwards = Watch(engine), Forwards(engine)
    for tokens in BEFORE:
        drain(engine, [prompt(tokens, tokens)], 1)
    print("before a trace", summary(watch, watch.now(), [])["events"], flush=True)
    asked.send(os.getpid())
    while (question := asked.recv()) is not None:
        requests, rate, number, pace = question
        asked.send(play(engine, trace_of(requests, rate), number, pace, watch, forwards))
    watch.end()


def kernels_of(engine: Any, context: int, requests: int) -> list[dict[str, Any]]:
    """Kernels of a prefill of new prompts and of decode steps behind them, by time."""
    rows = []
    for number in -2, -3:  # what the first compiles is not shown
        prompts = new_prompts(context, requests, number)
        for phase, tokens in (("prefill", 1), ("decode", SHOWN)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as events:
                drain(engine, prompts, tokens)
            rows += [{"phase": phase} | kernel for kernel in kernels(events.key_averages()) if number == -3]
    return rows


def kernels(events: Iterable[Any], most: int = 30) -> list[dict[str, Any]]:
    """Name, launches and microseconds of the kernels that take longest together."""
    ran = [event for event in events if event.self_device_time_total > 0]
    ran.sort(key=lambda event: -event.self_device_time_total)
    return [{"kernel": e.key[:120], "launches": e.count, "us": round(e.self_device_time_total, 1)} for e in ran[:most]]


if __name__ == "__main__":
    try:
        sys.exit(app())
    except torch.AcceleratorError:
        time.sleep(30)  # the driver is writing the core file of the kernel that failed
        raise
