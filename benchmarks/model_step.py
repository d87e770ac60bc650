"""A decode step of DeepSeek-V3.2's layers in JAX, beside the same step in PyTorch.

python -m benchmarks.model_step --out FILE [--heads 16 --heads 128] [--batch 1 --batch 8 --batch 64]

The model is the demo's in Flax (xmla/demo/in_jax) and transformers', with the same weights and caches, greedy sampling
included: 8 layers of the released model's attention, MLPs as small as one expert, and an eighth of its vocabulary. Both
call `dsa_step`. JAX's steps are one program of `decode`, and one call a step; PyTorch's are a CUDA graph of one step,
replayed, whose operations around the ops are eager ones, not compiled. Results are JSON lines: the first tells where
they come from. `difference` is of the last hidden states, relative, behind K - 1 keys, which are all selected: behind
more, roundings of random queries exchange keys at the edge of the selection.
"""

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

# JAX takes what a step needs, of all of the GPU's memory, as PyTorch does.
os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, DeepseekV32Config

from xmla import interop
from xmla import torch_api as xt
from xmla.bench.provenance import provenance
from xmla.demo.deepseek_v32 import index, project, project_back
from xmla.demo.in_jax.model import Model, load
from xmla.demo.in_jax.serving import Caches, Requests, decode, run
from xmla.machine.files import writable

LAYERS, CONTEXT, PAGE, K = 8, 32768, 64, 2048
STEPS, ROUNDS = 32, 5
PAGES = CONTEXT // PAGE  # of a request


def build(heads: int) -> Any:
    """Random weights in bfloat16, made on the GPU; RoPE's frequencies stay in float32."""
    settings: dict[str, Any] = {
        "vocab_size": 16160, "hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": LAYERS,
        "num_attention_heads": heads, "num_key_value_heads": heads, "first_k_dense_replace": LAYERS,
        "max_position_embeddings": CONTEXT, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": K,
        "pad_token_id": None, "attn_implementation": "eager", "dtype": torch.bfloat16,
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(DeepseekV32Config(**settings), dtype=torch.bfloat16).eval()


def in_jax(model: Any) -> Model:
    weights = {
        n: v.detach().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16) for n, v in model.state_dict().items()
    }
    return load(model.config.to_dict(), weights)


def filled() -> tuple[torch.Tensor, torch.Tensor]:
    """The caches of one request in one layer, full of random entries."""
    pools = [torch.zeros(PAGES, PAGE, row, dtype=torch.uint8, device="cuda") for row in (656, 132)]
    latent, rope, keys = (torch.randn(CONTEXT, n, device="cuda", dtype=torch.bfloat16) for n in (512, 64, 128))
    slots = torch.arange(CONTEXT, dtype=torch.int32, device="cuda")
    xt.write_mla_cache(latent, rope, slots, pools[0])
    xt.write_indexer_cache(keys, slots, pools[1])
    return pools[0], pools[1]


class TorchStep:
    """A step in PyTorch over caches of its own; a call advances every request by its most likely token."""

    def __init__(
        self, model: Any, pools: tuple[torch.Tensor, torch.Tensor], token: torch.Tensor, position: int
    ) -> None:
        batch = len(token)
        self.model, self.token = model, token.clone()
        self.position = torch.full((batch,), position, dtype=torch.int32, device="cuda")
        self.block_table = torch.arange(batch * PAGES, dtype=torch.int32, device="cuda").view(batch, PAGES)
        mla, indexer = pools
        self.caches = [(mla.repeat(batch, 1, 1), indexer.repeat(batch, 1, 1)) for _ in range(LAYERS)]

    @torch.no_grad()
    def __call__(self) -> None:
        inner, position = self.model.model, self.position
        x = inner.embed_tokens(self.token)[None]
        rope = inner.rotary_emb(x, position[None])
        slots, _ = xt.map_slots(position[:, None], self.block_table, page_size=PAGE)
        for layer, (mla_cache, indexer_cache) in zip(inner.layers, self.caches, strict=True):
            module, h = layer.self_attn, layer.input_layernorm(x)
            projected = project(module, h, rope)
            index_q, index_k, weights = index(module.indexer, h, projected.q_resid, rope)
            out, *_ = xt.dsa_step(
                projected.latent, projected.k_rope, index_k, slots[:, 0], projected.query, index_q, weights, mla_cache,
                indexer_cache, self.block_table, position + 1, k=K, softmax_scale=float(module.scaling),
            )  # fmt: skip
            x = x + project_back(module, out)[None]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.hidden = inner.norm(x)[0]
        self.token.copy_(self.model.lm_head(self.hidden).float().argmax(-1))
        self.position += 1


def torch_steps(step: TorchStep, first: torch.Tensor, position: int) -> float:
    """Milliseconds of a replayed step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(ROUNDS):
        step.token.copy_(first)
        step.position.fill_(position)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    return statistics.median(times)


def jax_steps(model: Model, caches: Caches, requests: Requests, each: int) -> float:
    """Milliseconds of a step in calls of so `each` steps; the caches are donated."""
    keys = jax.random.split(jax.random.key(0), STEPS)
    times = []
    for _ in range(ROUNDS + 1):  # the first compiles
        jax.block_until_ready(caches)
        begun, after = time.perf_counter(), requests
        for place in range(0, STEPS, each):
            _, after, caches = decode(model, after, caches, keys[place : place + each])
        jax.block_until_ready(after)
        times.append((time.perf_counter() - begun) * 1e3 / STEPS)
    return statistics.median(times[1:])


def measure(model: Any, flax_model: Model, batch: int) -> dict[str, Any]:
    position = CONTEXT - STEPS - 1
    torch.manual_seed(batch)
    pools, token = filled(), torch.randint(16160, (batch,), device="cuda")
    step = TorchStep(model, pools, token, position)
    step.position.fill_(K - 2)
    step()
    expected = step.hidden.double().cpu().numpy()
    torch_ms = torch_steps(step, token, position)
    del step
    torch.cuda.empty_cache()

    def caches() -> Caches:
        mla, indexer = (jnp.tile(interop.to_jax(pool), (LAYERS * batch, 1, 1)) for pool in pools)
        return Caches(mla, indexer, jnp.arange(batch * PAGES, dtype=jnp.int32).reshape(batch, PAGES))

    full = lambda value, dtype: jnp.full(batch, value, dtype)
    jax_token = jnp.array(interop.to_jax(token.int()))
    at = lambda place: Requests(jax_token, full(place, jnp.int32), full(CONTEXT, jnp.int32), full(0, jnp.float32))
    jax_ms = jax_steps(flax_model, caches(), at(position), STEPS)
    each_ms = jax_steps(flax_model, caches(), at(position), 1)
    hidden, _ = jax.jit(run)(flax_model, jax_token[:, None], full(K - 2, jnp.int32)[:, None], caches())
    difference = np.linalg.norm(np.asarray(hidden[:, 0], np.float64) - expected) / np.linalg.norm(expected)
    times = {"jax_ms": jax_ms, "jax_call_a_step_ms": each_ms, "torch_graph_ms": torch_ms}
    return {name: round(ms, 3) for name, ms in times.items()} | {"difference": round(float(difference), 4)}


def main(
    out: Annotated[Path, typer.Option(help="File of the JSON lines.", dir_okay=False, callback=writable)],
    heads: Annotated[list[int], typer.Option(min=1, help="Query heads.")] = [16, 128],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Requests.")] = [1, 8, 64],  # noqa: B006
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
) -> None:
    """Time a step of each number of heads and requests, in both."""
    with out.open("w") as file:

        def write(line: dict[str, Any], tell: Callable[..., None] = print) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            tell(line, flush=True)

        write(provenance(shlex.join(["python", "-m", "benchmarks.model_step", *sys.argv[1:]]), commit))
        for count in heads:
            model = build(count)
            flax_model = in_jax(model)
            for requests in batch:
                write(
                    {"heads": count, "requests": requests, "keys": CONTEXT, "layers": LAYERS}
                    | measure(model, flax_model, requests)
                )


if __name__ == "__main__":
    typer.run(main)
