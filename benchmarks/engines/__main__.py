"""Engines on a GPU: xmla's plugin beside an engine's own kernels, over small models with released ones' attention.

python -m benchmarks.engines vllm check --out FOLDER      the same requests to every engine: are answers alike?
python -m benchmarks.engines vllm speed --out FOLDER      prefill and decode, of engines that take turns
python -m benchmarks.engines vllm profile --out FOLDER    the kernels of one prefill and of decode steps, by time
python -m benchmarks.engines vllm parts --out FOLDER      selection and attention alone in decode steps, by kernels
python -m benchmarks.engines vllm trace --out FOLDER      requests of many lengths that come by and by: latencies
python -m benchmarks.engines sglang check --out FOLDER    SGLang's likewise, without `parts` and `trace`

Of vLLM with `--engines xmla,xmla-ranks,xmla-keys` on two GPUs, with `xmla,xmla-ranks-4` on four, with
`xmla,xmla-drafts,xmla-drafts-3` with drafted tokens, with `v4-own,v4-xmla`, `v41-own,v41-xmla` or `glm-own,glm-xmla`
and the like of a model with DeepSeek-V4's, V4.1's or GLM-5.3-Flash's attention, with `own-long,xmla-long` or
`v4-own-long,v4-xmla-long` long prompts, in steps that need most of the reserved memory. With `--at-once 1` and
`xmla,xmla-profiled` or `v4-xmla,v4-xmla-profiled` the cache is what vLLM's memory profile leaves.

Needs the engine and the package's own dependencies; SGLang's `own` engines FlashMLA and DeepGEMM too. All append to
FOLDER/vllm.jsonl or FOLDER/sglang.jsonl, and the logs' ends to FOLDER/logs.txt.
"""

import typer

from benchmarks.engines.commands import commands
from benchmarks.engines.sglang.adapter import Sglang
from benchmarks.engines.vllm.adapter import Vllm
from benchmarks.engines.vllm.latencies import trace
from benchmarks.engines.vllm.parts import parts

app = typer.Typer(add_completion=False)
of_vllm = commands(Vllm())
of_vllm.command()(parts)
of_vllm.command()(trace)
app.add_typer(of_vllm, name="vllm")
app.add_typer(commands(Sglang()), name="sglang")

if __name__ == "__main__":
    app()
