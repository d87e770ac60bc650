"""One engine of SGLang on a GPU, in processes of its own because a plugin changes SGLang for good; `run_on_gpu.py`
starts it.

python engine.py model FOLDER                 make the model, whose last layer drafts
python engine.py answer ENGINE MODEL OUT      requests of several lengths: tokens and log-probabilities, then again
python engine.py measure ENGINE MODEL OUT     times of prefill and decode by context and number of requests
python engine.py profile ENGINE MODEL OUT     the GPU's kernels of decode steps
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import typer

LAYERS = 4
LENGTHS = (6000, 3000, 2500, 700, 40)  # tokens of the prompts that are asked
NEW_TOKENS = 32  # of a request
VOCABULARY = 4096
ROUNDS = 8  # of each case's decode that count
PREFILLS = 5  # of a case
FEW = 8  # tokens of the shorter of two requests whose times are subtracted
# Ops that xmla has in SGLang's place, in prefills and in decodes.
OPS = ("indexer_logits", "indexer_logits_paged", "select_topk", "map_slots", "sparse_mla")
CALLED = "XMLA_TEST_CALLED"  # names a file; each op's name is appended to it at the op's first call in a process

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """`graphs`: decodes are captured as CUDA graphs; `prefill_graphs`: prefills too. `drafts`: tokens that the model's
    last layer drafts; `ranks`: GPUs that share the heads."""

    plugin: bool
    cache: str = "fp8_e4m3"
    attention: str = "flashmla_kv"
    chunk: int = 2048
    graphs: bool = False
    prefill_graphs: bool = False
    drafts: int = 0
    ranks: int = 1

    def environment(self) -> dict[str, str]:
        return {"SGLANG_PLUGINS": "xmla,called" if self.plugin else "none", "XMLA_SGLANG_REQUIRED": "1"}

    def arguments(self) -> dict[str, Any]:
        drafts = {
            "speculative_algorithm": "NEXTN", "speculative_num_steps": self.drafts, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.drafts + 1,
        }  # fmt: skip
        return {
            "kv_cache_dtype": self.cache, "dsa_prefill_backend": self.attention, "dsa_decode_backend": self.attention,
            "chunked_prefill_size": self.chunk, "tp_size": self.ranks, "disable_prefill_cuda_graph":
            not self.prefill_graphs, "disable_decode_cuda_graph": not self.graphs,
        } | (drafts if self.drafts else {})  # fmt: skip


BFLOAT16 = {"cache": "bfloat16", "attention": "flashmla_sparse"}
ENGINES = {
    "own": Engine(plugin=False),
    "own-bf16": Engine(plugin=False, **BFLOAT16),
    "own-chunks": Engine(plugin=False, chunk=768),
    "own-graphs": Engine(plugin=False, graphs=True),
    "own-all-graphs": Engine(plugin=False, graphs=True, prefill_graphs=True),
    "own-drafts": Engine(plugin=False, drafts=3),
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
}


@app.command("model")
def make_model(folder: Path, layers: int = LAYERS, heads: int = 128, device: str = "cuda") -> None:
    sys.path.append(str(Path(__file__).parent.parent / "vllm_engine"))
    import model as made

    sizes = made.LARGE | {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    scales = made.LARGE_SCALES | {"o_proj": 2 * (heads * 128) ** -0.5}
    made.save(folder, sizes, scales, likely=made.LIKELY, device=device)
    made.add_draft_layer(folder, hidden=0.25)  # so that it drafts the likely successor of the last token
    config = json.loads((folder / "config.json").read_text())
    # Published configurations have it, transformers' class has not.
    (folder / "config.json").write_text(json.dumps(config | {"moe_layer_freq": 1}))


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


@contextmanager
def started(name: str, model: Path, *, alone: bool = False, **more: Any) -> Iterator[Any]:
    """An engine, which starts beside others; `alone`: it waits until no other of this model starts or answers."""
    from sglang.srt.entrypoints.engine import Engine as Served

    arguments = ENGINES[name].arguments() | {
        "max_running_requests": 8, "cuda_graph_max_bs_decode": 8, "max_total_tokens": 1 << 16,
        "mem_fraction_static": 0.85,  # engines that start at once count each other's memory
        "sampling_backend": "pytorch", "skip_tokenizer_init": True, "disable_custom_all_reduce": True,
        "watchdog_timeout": 3600, "log_level": "info",
    } | more  # fmt: skip
    with (model / "engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        engine = Served(model_path=str(model), **arguments)
        if alone:
            fcntl.flock(lock, fcntl.LOCK_EX)
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
    with started(name, model) as engine:
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


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def seconds_of(engine: Any, prompts: list[list[int]], tokens: int) -> float:
    begun = time.perf_counter()
    ask(engine, prompts, tokens)
    return time.perf_counter() - begun


def step_times(seconds: Callable[[int], float], tokens: int) -> list[float]:
    """By round, µs of one of the `tokens` steps by which the longer of two requests is longer.

    `seconds` are those of requests of so many new tokens. The first requests of either length do not count: what they
    compile, such as a prefill behind cached keys, may be in the shorter alone.
    """
    rounds = [(seconds(FEW), seconds(FEW + tokens)) for _ in range(ROUNDS + 1)]
    return [round(1e6 * (longer - shorter) / tokens, 1) for shorter, longer in rounds[1:]]


@app.command()
def measure(
    name: str, model: Path, out: Path, contexts: str = "4096,32768", requests: str = "1,8,64", tokens: int = 64,
    seconds: float = 120, chunk: int = 8192,
) -> None:  # fmt: skip
    """A line for each case, smallest first, until the seconds after the engine's start are over.

    A step's time is that of `tokens` more steps of requests whose prompts are cached, the median of several rounds. A
    case has none, and the exit status is 1, if a longer request took no longer in some round.
    """
    counts = numbers(requests)
    cases = sorted((context * count, context, count) for context in numbers(contexts) for count in counts)
    most = max(counts) * (max(numbers(contexts)) + tokens + FEW + 128)
    sizes = {"max_running_requests": max(counts), "cuda_graph_max_bs_decode": max(counts), "max_total_tokens": most}
    with started(name, model, alone=True, chunked_prefill_size=chunk, **sizes) as engine:
        deadline, rate = time.monotonic() + seconds, float("inf")  # tokens/s of the slowest prefill
        refused = False
        for seed, (total, context, count) in enumerate(cases):
            case: dict[str, Any] = {"engine": name, "context": context, "requests": count}
            if time.monotonic() + (PREFILLS + 1) * total / rate > deadline:
                write(out, case | {"skipped": "no time left"})
                continue
            speeds, prompts = [], []
            for number in range(PREFILLS + 1):  # what the first compiles does not count
                engine.flush_cache()
                prompts = [prompt(context, seed << 20 | number << 10 | each) for each in range(count)]
                speeds.append(total / seconds_of(engine, prompts, 1))
            rate = min(rate, *speeds[1:])
            steps = step_times(partial(seconds_of, engine, prompts), tokens)
            wrong = min(steps) <= 0
            refused |= wrong
            cached = [result["meta_info"]["cached_tokens"] for result in ask(engine, prompts, 1)]
            case |= {"refused": "more steps took no longer"} if wrong else {"step_us": round(median(steps), 1)}
            case |= {
                "step_us_by_round": steps,
                "prefill_tokens_per_s": round(max(speeds[1:])),
                "prefill_tokens_per_s_by_round": [round(speed) for speed in speeds[1:]],
                "cached_tokens": min(cached),
            }
            write(out, case)
    raise typer.Exit(code=int(refused))


@app.command()
def profile(
    name: str, model: Path, out: Path, context: int = 4096, requests: int = 8, tokens: int = 32, chunk: int = 8192,
) -> None:  # fmt: skip
    """A line for each kernel of a prefill of new prompts, and of `tokens` decode steps, by time."""
    sizes = {"max_running_requests": requests, "cuda_graph_max_bs_decode": requests}
    sizes |= {"chunked_prefill_size": chunk, "max_total_tokens": 4 * requests * (context + tokens + 128)}
    with started(name, model, alone=True, **sizes) as engine:
        prompts = [prompt(context, number) for number in range(requests)]
        ask(engine, prompts, tokens)  # what it compiles is not shown
        engine.flush_cache()
        for phase, new in (("prefill", 1), ("decode", tokens)):
            folder = out.parent / f"{name}-{phase}-traces"
            engine.start_profile(output_dir=str(folder), activities=["GPU"])
            ask(engine, prompts, new)
            engine.stop_profile()
            (trace,) = wait_for(folder)
            for kernel in kernels(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]):
                write(out, {"engine": name, "context": context, "requests": requests, "phase": phase} | kernel)


def wait_for(folder: Path, seconds: float = 60) -> list[Path]:
    """The traces in a folder, which SGLang writes behind its answer."""
    deadline = time.monotonic() + seconds
    while not (found := [*folder.glob("*.trace.json.gz")]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def kernels(events: list[dict[str, Any]], most: int = 25) -> list[dict[str, Any]]:
    """Of all kernels together, and of those that take longest: name, launches and microseconds."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            times[event["name"]] += event["dur"]
            launches[event["name"]] += 1
    rows = [("all", times.total(), launches.total())]
    rows += [(kernel, us, launches[kernel]) for kernel, us in times.most_common(most)]
    return [{"kernel": kernel[:120], "launches": count, "us": round(us, 1)} for kernel, us, count in rows]


def write(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    app()
