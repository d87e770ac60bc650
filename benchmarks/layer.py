"""`python -m benchmarks.layer`: a training step of a V3.2 layer, by xmla and by the dense formulation.

The layer is all between its projections: selection of keys, attention over them, the indexer's loss, and the gradients
of queries, rows and the indexer's arrays. The dense formulation is that of transformers and MaxText, scores of all
pairs of tokens and softmax over a mask, in PyTorch's own operations, and in JAX's where it is installed
(layer_jax.py). It attends to the keys that xmla selected, although it selects too, so that gradients can be compared.
Results are JSON lines: the first tells where they come from.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from xmla import torch_api
from xmla._frameworks import missing
from xmla.bench.provenance import provenance
from xmla.machine.files import writable

ROUNDS = 3
JAX_SECONDS = 180.0
# JAX takes what a step needs, of all of the GPU's memory, as PyTorch does.
JAX_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer, by default DeepSeek-V3.2's."""

    heads: int = 128
    index_heads: int = 64
    k: int = 2048
    scale: float = 0.1352


@dataclass
class Layer:
    """The arrays of a step, and the upstream gradient of attention's output."""

    sizes: Sizes
    q: torch.Tensor  # [T, H, 576]
    rows: torch.Tensor  # [T, 576]
    index_q: torch.Tensor  # [T, I, 128]
    index_k: torch.Tensor  # [T, 128]
    index_weights: torch.Tensor  # [T, I]
    dout: torch.Tensor  # [T, H, 512]

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, device: str) -> "Layer":
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(tokens, *shape, device=device, dtype=torch.bfloat16)

        weights = torch.rand(tokens, sizes.index_heads, device=device) / (sizes.index_heads * 128**0.5)
        layer = cls(
            sizes, normal(sizes.heads, 576), normal(576), normal(sizes.index_heads, 128), normal(128), weights,
            normal(sizes.heads, 512),
        )  # fmt: skip
        for leaf in layer.leaves.values():
            leaf.requires_grad_()
        return layer

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        names = ("q", "rows", "index_q", "index_k", "index_weights")
        return {name: getattr(self, name) for name in names}

    def select(self) -> torch.Tensor:
        """The keys of each token [T, K], by the scores in e4m3, as a served model has them."""
        count = len(self.q)
        ends = torch.arange(1, count + 1, device=self.q.device, dtype=torch.int32)
        q8, weights = torch_api.quantize_indexer_query(self.index_q.detach(), self.index_weights.detach())
        keys = self.index_k.detach().float()
        scales = keys.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max
        keys8 = (keys / scales[:, None]).to(torch.float8_e4m3fn)
        return torch_api.indexer_topk(q8, weights, keys8, scales, torch.zeros_like(ends), ends, k=self.sizes.k)

    def by_xmla(self) -> torch.Tensor:
        """A step: gradients in the leaves; the indexer's loss."""
        slots, scale = self.select(), self.sizes.scale
        ends = torch.arange(1, len(self.q) + 1, device=self.q.device, dtype=torch.int32)
        out, lse = torch_api.sparse_mla(self.q, self.rows[:, None], slots, softmax_scale=scale)
        loss, *_ = torch_api.indexer_loss(
            self.index_q, self.index_k, self.index_weights, self.q.detach(), self.rows.detach(), lse.detach(), ends,
            None, slots, softmax_scale=scale,
        )  # fmt: skip
        torch.autograd.backward([out, loss], [self.dout, torch.ones_like(loss)])
        return loss.detach()

    def dense(self, slots: torch.Tensor) -> torch.Tensor:
        """A step by arrays of all pairs of tokens."""
        count = len(self.q)
        causal = torch.ones(count, count, dtype=torch.bool, device=self.q.device).tril()
        products = torch.einsum("tid,sd->tis", self.index_q, self.index_k).relu()
        scores = torch.einsum("tis,ti->ts", products, self.index_weights.to(products.dtype)).float()
        scores.detach().masked_fill(~causal, -torch.inf).topk(min(self.sizes.k, count))  # its own selection
        allowed = torch.zeros(count, count + 1, dtype=torch.bool, device=self.q.device)
        allowed = allowed.scatter_(1, torch.where(slots < 0, count, slots).long(), True)[:, :count]
        logits = torch.einsum("thd,sd->hts", self.q, self.rows) * self.sizes.scale
        logits = logits.masked_fill(~allowed, -torch.inf)
        p = logits.softmax(-1, dtype=torch.float32).to(self.q.dtype)
        out = torch.einsum("hts,sd->thd", p, self.rows[:, :512])
        logs = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        target = torch.nn.functional.normalize(p.detach().float().sum(0), p=1.0, dim=-1)
        loss = ((torch.special.xlogy(target, target) - target * logs).sum() / count)[None]
        torch.autograd.backward([out, loss], [self.dout, torch.ones_like(loss)])
        return loss.detach()

    def gradients(self, step: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of a step by leaf, with its loss among them."""
        for leaf in self.leaves.values():
            leaf.grad = None
        results = {"loss": step()}
        return results | {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


def difference(results: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative norms of the differences."""
    return {
        name: float((results[name].double() - want.double()).norm() / want.double().norm())
        for name, want in reference.items()
    }


def measure(layer: Layer, step: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Milliseconds of a step, and the most memory that was allocated, the layer's arrays included."""
    try:
        layer.gradients(step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            layer.gradients(step)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"ms": round(statistics.median(times), 2), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def dense_in_jax(tokens: int) -> dict[str, Any]:
    """The line that `python -m benchmarks.layer_jax` prints, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.layer_jax", str(tokens)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | JAX_MEMORY, timeout=JAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result in {JAX_SECONDS:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="File of the JSON lines.", dir_okay=False, callback=writable)],
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
    tokens: Annotated[list[int], typer.Option(min=1, help="Of a step.")] = [2048, 4096, 8192, 32768, 131072],  # noqa: B006
) -> None:
    """Time them, and compare gradients where the dense formulation fits in memory."""
    sizes = Sizes()
    head = provenance(shlex.join(["python", "-m", "benchmarks.layer", *sys.argv[1:]]), commit)
    with out.open("w") as file:
        file.write(json.dumps(head) + "\n")
        for count in tokens:
            torch.manual_seed(0)
            layer = Layer.random(sizes, count, "cuda")
            line: dict[str, Any] = {"tokens": count, "xmla": measure(layer, layer.by_xmla)}
            dense = partial(layer.dense, layer.select())
            line["dense"] = measure(layer, dense)
            if "ms" in line["dense"]:
                apart = difference(layer.gradients(layer.by_xmla), layer.gradients(dense))
                line["difference"] = {name: float(f"{d:.2e}") for name, d in apart.items()}
            del layer, dense
            torch.cuda.empty_cache()
            if not missing("jax"):
                line["dense_in_jax"] = dense_in_jax(count)
            print(line, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    app()
