"""`python measured.py MODEL OUT`: what an engine on a GPU is asked, of vLLM in the interpreter with a tiny model.

Writes a round of a case, a round of a trace, and answers, as benchmarks/engines makes them, with passes timed on
the host.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engines import passes, served
from benchmarks.engines.vllm import arrivals, child
from benchmarks.engines.vllm.engines import Engine
from benchmarks.engines.vllm.steps import Watch

NAME = "xmla"
# What the interpreter's platform takes instead of what a GPU does.
ON_CPU = {
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 64,
    "compilation_config": {"custom_ops": ["none"]}, "kernel_config": {"enable_jit_warmup": False},
}  # fmt: skip


def start(name: str, model: Path, sizes: tuple[int, ...], enable_prefix_caching: bool, **_: Any) -> Any:
    from vllm import EngineArgs, LLMEngine

    arguments = child.ENGINES[name].arguments(()) | ON_CPU | {"enable_prefix_caching": enable_prefix_caching}
    return LLMEngine.from_engine_args(
        EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="bfloat16", disable_log_stats=True, **arguments)
    )


def recorded() -> Any:
    now = time.perf_counter()
    return SimpleNamespace(now=now, elapsed_time=lambda last: 1e3 * (last.now - now))


def measure(model: Path, out: Path) -> None:
    passes.recorded, torch.cuda.synchronize, torch.cuda._sleep = recorded, lambda: None, lambda cycles: None
    served.VOCABULARY, child.start = 256, start
    for module in (served, child):
        module.TOKENS, module.WARM = 4, 2
    child.ENGINES[NAME] = Engine(plugin=True, joins={"70": 0, "9": 2}, new=4)
    arrivals.trace_of = lambda requests, rate: [arrivals.Request(0.01 * each, 20, 3) for each in range(requests)]
    with child.measured(NAME, model, [70], [1, 2]) as engine:
        served.compile_cases(engine, [70], [2])
        told = {"round": served.timed_round(engine, {}, 70, 2, 0, True)}
        watch = Watch(engine.engine)
        told["trace"] = arrivals.play(engine, watch, 3, 8.0, 1, 1)
        watch.end()
    child.answer(NAME, model, out)
    out.write_text(json.dumps(told | {"answer": json.loads(out.read_text())}))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), Path(sys.argv[2]))
