"""A layer of DeepSeek-V3.2 in transformers, by xmla and by transformers' own attentions.

python -m benchmarks.transformers_layer --out FILE [--tokens N …] [--train N …]

The model has one layer with the released one's attention and MLPs as small as one expert. A line of `tokens` has a
prefill's milliseconds and peak memory above weights, and milliseconds of a decoded token behind it, called one by one;
one of `trained` has forward and backward. For xmla a prefill also tells the time of the ops alone, by events around
them, and that of all else, where the ops are left out: a layer cannot be faster than both together.
"""

import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, DeepseekV32Config

from xmla.bench.provenance import provenance
from xmla.machine.files import writable
from xmla.transformers import LatentCache, attention, selection

ROUNDS = 5
OPS = {attention: ("sparse_mla",), selection: ("indexer_scores", "select_topk")}
Line = dict[str, Any]


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    config = DeepseekV32Config(vocab_size=256, max_position_embeddings=163840, pad_token_id=None, **sizes)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def milliseconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds + 1):  # the first compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times[1:]), 3)


@contextmanager
def ops_replaced(make: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replace each op of the layer by what `make` makes of it."""
    own = {module: module.xt for module in OPS}
    for module, names in OPS.items():
        vars(module)["xt"] = SimpleNamespace(**{name: make(name, getattr(own[module], name)) for name in names})
    try:
        yield
    finally:
        for module in OPS:
            vars(module)["xt"] = own[module]


def without(name: str, op: Any) -> Any:
    """A function that takes no time on the GPU; the selection that it gives is of no query."""
    made: dict[tuple[int, int], torch.Tensor] = {}
    if name == "sparse_mla":
        return lambda q, *_, **__: (q[..., :512], None)
    if name == "indexer_scores":
        return lambda q, *_: q

    def select(q: torch.Tensor, *_: Any, k: int) -> torch.Tensor:
        size = q.shape[0], k
        return made.setdefault(size, torch.full(size, -1, dtype=torch.int32, device="cuda"))

    return select


def time_of_ops(call: Callable[[], Any]) -> float:
    """Milliseconds of the GPU in the ops."""
    events: list[tuple[Any, Any]] = []

    def timed(name: str, op: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            results = op(*args, **kwargs)
            pair[1].record()
            events.append(pair)
            return results

        return run

    with ops_replaced(timed):
        call()
    torch.cuda.synchronize()
    return round(sum(start.elapsed_time(end) for start, end in events), 3)


def peak_of(call: Callable[[], Any]) -> float:
    """GiB above what is allocated."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


@torch.no_grad()
def served(model: Any, name: str, tokens: int) -> Line:
    """A prefill and a decoded token behind it."""
    text = torch.randint(256, (1, tokens), device="cuda")
    caches: list[Any] = []

    def prefill() -> None:
        caches[:] = [LatentCache(model.config) if name == "xmla" else None]
        caches[:] = [model(text, cache=caches[0], logits_to_keep=1).cache]

    line: Line = {"prefill_ms": milliseconds(prefill, 2), "peak_gib": peak_of(prefill)}
    if name == "xmla":
        line["ops_ms"] = time_of_ops(prefill)
        with ops_replaced(without):
            line["rest_ms"] = milliseconds(prefill, 2)
        prefill()
    decode = lambda: model(text[:, -1:], cache=caches[0])
    line["decode_ms"] = milliseconds(decode, 20)
    if name == "xmla":
        with ops_replaced(without):
            line["decode_rest_ms"] = milliseconds(decode, 20)
    return line


def trained(model: Any, tokens: int) -> Line:
    text = torch.randint(256, (1, tokens), device="cuda")

    def step() -> None:
        model(text, labels=text, use_cache=False).loss.backward()
        model.zero_grad()

    return {"step_ms": milliseconds(step, 2), "peak_gib": peak_of(step)}


def main(
    out: Annotated[Path, typer.Option(help="File of the JSON lines.", dir_okay=False, callback=writable)],
    tokens: Annotated[list[int], typer.Option(min=1, help="Of a prompt.")] = [4096, 16384, 65536, 131072],  # noqa: B006
    train: Annotated[list[int], typer.Option(min=1, help="Of a training step.")] = [4096, 16384, 32768],  # noqa: B006
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
) -> None:
    """Measure each of the attentions; one that runs out of memory has no longer prompts."""
    model = build()
    cases = [("tokens", served, tokens), ("trained", lambda model, name, count: trained(model, count), train)]
    with out.open("w") as file:
        file.write(json.dumps(provenance(shlex.join(["python", *sys.argv]), commit)) + "\n")
        for what, measure, counts in cases:
            failed: set[str] = set()
            for count in counts:
                line: Line = {what: count}
                for name in ("xmla", "eager", "sdpa"):
                    if name in failed:
                        continue
                    model.set_attn_implementation(name)
                    try:
                        line[name] = measure(model, name, count)
                    except torch.OutOfMemoryError:
                        failed.add(name)
                        line[name] = {"out_of_memory": True}
                    gc.collect()
                    torch.cuda.empty_cache()
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
