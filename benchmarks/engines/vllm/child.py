"""One engine of vLLM on a GPU; `benchmarks.engines vllm` starts it.

python -m benchmarks.engines.vllm.child model FOLDER              make the model; --kind v4, v41 or glm
python -m benchmarks.engines.vllm.child answer ENGINE MODEL OUT   requests that join late: tokens and log-probabilities
python -m benchmarks.engines.vllm.child measure ENGINE PIPE …     what comes through the pipe: rounds of a case, kernels
python -m benchmarks.engines.vllm.child divide ENGINE PIPE …      likewise: what parts of decode steps take
python -m benchmarks.engines.vllm.child serve ENGINE PIPE         likewise: rounds of a trace of requests
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engines import calls, models
from benchmarks.engines.cases import numbers
from benchmarks.engines.processes import locked
from benchmarks.engines.served import (
    CHUNK,
    TOKENS,
    WARM,
    Prompts,
    Rows,
    answer_questions,
    commands,
    compile_cases,
    new_prompts,
    prompt,
)  # fmt: skip
from benchmarks.engines.vllm import arrivals, marks, parts, workers
from benchmarks.engines.vllm.engines import ENGINES, OPS
from benchmarks.engines.vllm.steps import Watch, summary

DIVIDED = 16  # passes that are divided into parts
CACHE_BYTES = {"fp8": 656, "nvfp4_ds_mla": 352, "auto": 1152}  # of a token in a layer
KEY_BYTES = {"auto": 132, "mxfp4": 68}  # of the indexer's key


def load() -> None:
    from vllm import EngineArgs, LLMEngine  # noqa: F401


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
    name: str, model: Path, sizes: tuple[int, ...], gpu_memory_utilization: float = 0.05,
    prepare: Callable[[], None] = lambda: None, **arguments: Any,
) -> Any:  # fmt: skip
    """An engine; `prepare` is called when everything is replaced of which it makes the model."""
    from vllm import EngineArgs, LLMEngine

    kind, new = ENGINES[name].kind, not version("vllm").startswith("0.26")
    if kind != "v32" or new:
        from vllm.plugins import load_general_plugins

        from benchmarks.engines.vllm import replaced_glm, replaced_v4, replaced_v41, without_cutedsl

        load_general_plugins()
        if find_spec("cutlass") is None:
            without_cutedsl.install()
        if kind != "v32":
            {"v4": replaced_v4, "v41": replaced_v41, "glm": replaced_glm}[kind].install()
    if new:
        scatter_without_pynccl()
        arguments["kernel_config"] = {"enable_jit_warmup": False}  # what it compiles at start is partly replaced
    prepare()
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=gpu_memory_utilization,
            attention_config={"sparse_mla_force_mqa": True, "indexer_kv_dtype": ENGINES[name].index},
            disable_log_stats=True,
            **ENGINES[name].arguments(sizes), **arguments,
        )
    )  # fmt: skip


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


def drain(engine: Any, prompts: Prompts, tokens: int) -> Drained:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for number, given in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": given}, parameters)
    torch.cuda.synchronize()
    begun, steps, cached, new = time.perf_counter(), [], 0, [list[int]() for _ in prompts]
    while engine.has_unfinished_requests():
        results = engine.step()
        steps.append((time.perf_counter(), sum(len(result.outputs[0].token_ids) for result in results)))
        cached += sum(result.num_cached_tokens or 0 for result in results if result.finished)
        for result in results:
            new[int(result.request_id)] += result.outputs[0].token_ids
    return Drained(begun, steps, cached, new)


class StartedVllm:
    shown = 16

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        print("attention", engine.collective_rpc(workers.told)[0]["attention"], flush=True)
        engine.collective_rpc(workers.watch)

    def ask(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        return drain(self.engine, prompts, tokens).tokens

    def seconds_of(self, prompts: Prompts, tokens: int) -> float:
        return drain(self.engine, prompts, tokens).seconds

    def step_of(self, prompts: Prompts) -> tuple[float, int] | None:
        """The median of steps that this process makes."""
        done = drain(self.engine, prompts, TOKENS + WARM)
        steps = done.decode_us(len(prompts))
        return (median(steps), done.cached) if steps else None

    def passes(self, ahead: bool = False) -> list[float]:
        """Passes of the first rank."""
        return self.engine.collective_rpc(workers.milliseconds, args=(ahead,))[0]

    def decodes(self, requests: int) -> list[float]:
        return self.passes()[-TOKENS:]

    def warm_profile(self, prompts: Prompts) -> None:
        self.profile(prompts, 1)
        self.profile(prompts, self.shown)

    def profile(self, prompts: Prompts, tokens: int) -> Rows:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as events:
            self.ask(prompts, tokens)
        return kernels(events.key_averages())

    def parts(self, context: int, requests: int, number: int, new: bool) -> dict[str, Any]:
        """What passes of a decode take, of all its requests; behind a prefill if the prompts are new.

        Requests begin in a step or some more, and end so: the first passes and the last have fewer of them.
        """
        prompts = new_prompts(context, requests, number)
        if new:
            self.ask(prompts, 1)
        self.passes(ahead=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            self.ask(prompts, DIVIDED + 2 * WARM)
        self.passes()
        recorded: Any = profiled.profiler
        ran = [
            parts.Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in recorded.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        return parts.figures(parts.passes_of(ran)[WARM:-WARM])


def kernels(events: Iterable[Any], most: int = 30) -> Rows:
    """Name, launches and microseconds of the kernels that take longest together."""
    ran = [event for event in events if event.self_device_time_total > 0]
    ran.sort(key=lambda event: -event.self_device_time_total)
    return [{"kernel": e.key[:120], "launches": e.count, "us": round(e.self_device_time_total, 1)} for e in ran[:most]]


def sizes_of(model: Path) -> dict[str, Any]:
    """The configuration of a saved model; V4.1's has that of text inside."""
    config = json.loads((model / "config.json").read_text())
    return config | config.get("text_config", {})


def start_for(
    name: str, model: Path, contexts: list[int], counts: list[int], tokens: int = TOKENS,
    prepare: Callable[[], None] = lambda: None,
) -> Any:  # fmt: skip
    """An engine whose cache holds every number of requests at every context, with `tokens` new ones for each."""
    layers = sizes_of(model)["num_hidden_layers"]
    most = max(counts) * (max(contexts) + tokens + 128)
    # Windows and compressors have caches of their own, in pages as large. States of linear attention are few.
    most *= 3 if ENGINES[name].kind in ("v4", "v41") else 1
    entry = CACHE_BYTES[ENGINES[name].cache] + KEY_BYTES[ENGINES[name].index]
    return start(
        name, model, tuple(sorted(set(counts))), prepare=prepare, max_model_len=max(contexts) + tokens + WARM + 64,
        max_num_seqs=max(counts), max_num_batched_tokens=CHUNK, enable_prefix_caching=True,
        kv_cache_memory_bytes=(1 << 30) + int(1.25 * most * layers * entry),
    )  # fmt: skip


def tune_in_turn(lock: Path) -> None:
    """Let one of the engines that share a cache tune a kernel of Triton's, and those that wait read its choice.

    So none is tuned beside another one's work of that kind, or chooses otherwise. Needs TRITON_CACHE_AUTOTUNING=1.
    """
    from triton.runtime import autotuner

    tuner: Any = autotuner.Autotuner
    look_up = tuner.check_disk_cache

    def look_up_alone(*args: Any) -> Any:
        with locked(lock):
            return look_up(*args)

    tuner.check_disk_cache = look_up_alone


@contextmanager
def measured(name: str, model: Path, contexts: list[int], counts: list[int]) -> Iterator[StartedVllm]:
    tune_in_turn(model.parent / "tuning.lock")
    yield StartedVllm(start_for(name, model, contexts, counts))


def add_drafter(folder: Path, kind: str) -> None:
    """Add the drafter that V4's and V4.1's checkpoints have."""
    if kind in ("v4", "v41"):
        models.add_dspark(folder)


app = commands(load, measured, add_drafter)


@app.command()
def answer(name: str, model: Path, out: Path) -> None:
    """The tokens of each request; of its prompt the log-probabilities and each position's most likely token."""
    if ENGINES[name].plugin:
        calls.count(OPS)
    from vllm import SamplingParams

    begun, asked = time.monotonic(), ENGINES[name]
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.2}
    if asked.cache_gib:
        memory = {"kv_cache_memory_bytes": asked.cache_gib << 30}
    engine = start(
        name, model, asked.sizes, max_model_len=asked.max_len, max_num_seqs=asked.requests,
        max_num_batched_tokens=asked.chunk, **memory, enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    ready, before = time.monotonic(), engine.collective_rpc(workers.compiled)
    parameters = SamplingParams(
        temperature=0, max_tokens=asked.new, prompt_logprobs=1, detokenize=False, ignore_eos=True
    )
    answers: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests() or step <= max(asked.joins.values()):
        for length, joins in asked.joins.items():
            if joins == step:
                given = {"prompt_token_ids": prompt(int(length), int(length))}
                engine.add_request(length, given, parameters)
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
    first, *others = engine.collective_rpc(workers.told)
    assert all(other == first for other in others), [first, *others]
    after = engine.collective_rpc(workers.compiled)
    late = [made for old, new in zip(before, after, strict=True) for made in new[len(old) :]]
    cache = engine.vllm_config.cache_config
    counts = {"steps": step, "kernels": len(before[0]), "compiled_late": late}
    counts["cache_tokens"] = cache.num_gpu_blocks * cache.block_size
    out.write_text(json.dumps({"answers": answers, "seconds": seconds} | counts | first))


@app.command()
def divide(name: str, pipe: int, contexts: str, requests: str) -> None:
    """Once ready, answer each ("parts", context, requests, number of the prompts, are they new?) from the pipe."""
    asked, lengths, counts = Connection(pipe), numbers(contexts), numbers(requests)
    load()  # while the model is written
    model = Path(asked.recv())
    tune_in_turn(model.parent / "tuning.lock")
    engine = StartedVllm(start_for(name, model, lengths, counts, prepare=partial(marks.install, ENGINES[name])))
    marks.mark_ends()
    compile_cases(engine, lengths, counts)
    answer_questions(asked, parts=engine.parts)


@app.command()
def serve(name: str, pipe: int, cores: str = "") -> None:
    """Once ready, answer each ("play", requests, rate, number, pace) from the pipe; on these cores, if named."""
    if cores:
        os.sched_setaffinity(0, numbers(cores))
    counts = [2**power for power in range(arrivals.AT_ONCE.bit_length())]
    asked = Connection(pipe)
    load()  # while the model is written
    model = Path(asked.recv())
    engine = StartedVllm(start_for(name, model, [arrivals.LONGEST], counts, arrivals.MOST))
    watch = Watch(engine.engine)
    for tokens in arrivals.BEFORE:
        engine.ask([prompt(tokens, tokens)], 1)
    print("before a trace", summary(watch, watch.now(), [])["events"], flush=True)
    answer_questions(asked, play=partial(arrivals.play, engine, watch))
    watch.end()


if __name__ == "__main__":
    try:
        sys.exit(app())
    except torch.AcceleratorError:
        time.sleep(30)  # the driver is writing the core file of the kernel that failed
        raise
