"""`python -m benchmarks.maxtext compare`: a training step of MaxText's own `MLA` layer, by MaxText's code and by xmla.

A step is forward and backward of one attention layer of DeepSeek-V3.2's sizes, projections included, with the indexer
and its loss; the layer is made from MaxText's configuration `deepseek3.2-671b` with `use_mla_absorbed_mqa`. Output,
loss and gradients of both are compared. A run appends a JSON line. JAX keeps the memory that it has taken, so each of
the two has a process of its own.

Of MaxText's requirements only those in tests/maxtext_layer/requirements.txt are needed.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import linen, nnx
from jax.sharding import Mesh

import xmla.maxtext
from benchmarks.layer import JAX_MEMORY
from xmla.bench.provenance import provenance
from xmla.core.versions import installed
from xmla.machine.files import writable

ROUNDS = 3
WAYS = ("maxtext", "xmla")
Results = dict[str, jax.Array]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer, by default DeepSeek-V3.2's."""

    tokens: int = 4096
    batch: int = 1
    heads: int = 128
    hidden: int = 7168
    q_latent: int = 1536
    keys: int = 128  # dims of a head's keys that are not rotated
    values: int = 128  # of a head
    positions: int = 163840
    index_heads: int = 64
    index_dims: int = 128
    k: int = 2048


def maxtext() -> ModuleType:
    """`maxtext.layers.attention_mla`; its profiler of TPUs, which no step calls, is left out where it is missing."""
    if "xprof" not in sys.modules and find_spec("xprof") is None:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            module = ModuleType(name)
            module.get_kernel_stats_tool = None  # pyrefly: ignore
            sys.modules[name] = module
    from maxtext.layers import attention_mla

    return attention_mla


def configure(sizes: Sizes, **options: Any) -> Any:
    """MaxText's configuration of a model of DeepSeek-V3.2 of such sizes, with `options`."""
    maxtext()
    from maxtext.configs import pyconfig

    base = Path(pyconfig.__file__).parent / "base.yml"
    return pyconfig.initialize(["", str(base)], **{
        "model_name": "deepseek3.2-671b", "override_model_config": True, "run_name": "xmla", "attention": "dot_product",
        "base_output_directory": tempfile.gettempdir(), "enable_checkpointing": False, "log_config": False,
        "skip_jax_distributed_system": True, "use_mla_absorbed_mqa": True, "mla_naive_kvcache": False,
        "base_emb_dim": sizes.hidden, "base_num_query_heads": sizes.heads, "base_num_kv_heads": sizes.heads,
        "q_lora_rank": sizes.q_latent, "qk_nope_head_dim": sizes.keys, "v_head_dim": sizes.values,
        "max_position_embeddings": sizes.positions, "max_target_length": sizes.tokens,
        "max_prefill_predict_length": sizes.tokens, "per_device_batch_size": sizes.batch / jax.device_count(),
        "indexer_n_heads": sizes.index_heads, "indexer_head_dim": sizes.index_dims, "indexer_topk": sizes.k,
        "indexer_sparse_training": True, "indexer_loss_scaling_factor": 1.0,
    } | options)  # fmt: skip


@contextmanager
def over(config: Any, devices: int = 1) -> Iterator[Mesh]:
    """MaxText's mesh and its rules of axes; several devices share the sequences."""
    shape = [devices if axis == "fsdp" else 1 for axis in config.mesh_axes]
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(shape), config.mesh_axes)
    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        yield mesh


def build(config: Any, mesh: Mesh) -> Any:
    """A layer with parameters of seed 0."""
    names = (
        "num_query_heads", "num_kv_heads", "head_dim", "max_target_length", "dtype", "weight_dtype", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings",
        "original_max_position_embeddings", "mscale", "rope_factor", "float32_logits", "float32_qk_product",
        "attn_logits_soft_cap",
    )  # fmt: skip
    shape = config.global_batch_size_to_load, config.max_target_length, config.emb_dim

    @nnx.jit
    def build() -> Any:
        return maxtext().MLA(
            config=config, mesh=mesh, attention_kernel=config.attention, inputs_q_shape=shape, inputs_kv_shape=shape,
            rngs=nnx.Rngs(0), **{name: getattr(config, name) for name in names},
        )  # fmt: skip

    return build()


class Step:
    """Forward and backward of a layer, compiled for the way that is installed at the first call.

    `remat` computes the forward again in the backward, as MaxText's decoder layers do by default.
    """

    def __init__(self, layer: Any, segments: jax.Array | None = None, remat: bool = False) -> None:
        graph, self.parameters, rest = nnx.split(layer, nnx.Param, ...)
        config = layer.config
        shape = config.global_batch_size_to_load, config.max_target_length
        self.x = jax.random.normal(jax.random.key(1), (*shape, config.emb_dim), config.dtype)
        positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)

        def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, Results]:
            layer = nnx.merge(graph, parameters, rest)
            out, _ = layer(x, x, positions, segments, model_mode="train", deterministic=True)
            indexer = layer.indexer_loss[...]
            return jnp.square(out.astype(jnp.float32)).sum() + indexer, {"out": out, "loss": indexer}

        self.step = jax.jit(jax.value_and_grad(jax.checkpoint(loss) if remat else loss, (0, 1), has_aux=True))

    def __call__(self) -> Results:
        """The output, the indexer's loss, and the gradient of the input and of every parameter."""
        (_, outputs), (dparameters, dx) = self.step(self.parameters, self.x)
        gradients = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(dparameters)}
        return jax.block_until_ready(outputs | {"x": dx} | gradients)


def difference(results: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Relative norms of the differences."""
    apart = {}
    for name, want in reference.items():
        want = np.asarray(want, np.float64)
        apart[name] = float(np.linalg.norm(np.asarray(results[name], np.float64) - want) / np.linalg.norm(want))
    return apart


def measure(step: Step) -> tuple[dict[str, Any], dict[str, Any]]:
    """Milliseconds of a step and the most memory that JAX took, parameters included; its results on the host."""
    try:
        results = {name: np.asarray(value, np.float32) for name, value in step().items()}
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"out_of_memory": True}, {}
        raise
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return {"ms": round(statistics.median(times), 1), "peak_gib": round(peak / 2**30, 2)}, results


@app.command()
def alone(
    way: Annotated[str, typer.Argument(help="maxtext or xmla.")],
    results: Annotated[Path, typer.Argument(help="Where its arrays go, as NumPy stores them.")],
    tokens: Annotated[int, typer.Option(min=1, help="Of a step, of one sequence.")] = 4096,
    sparse_loss: Annotated[bool, typer.Option(help="The indexer's loss over selected keys alone.")] = True,
    remat: Annotated[bool, typer.Option(help="Compute the forward again in the backward.")] = False,
) -> None:
    """Time a step one way, and print a JSON line."""
    if way not in WAYS:
        raise typer.BadParameter(f"way is {way!r}, expected one of {', '.join(WAYS)}")
    config = configure(Sizes(tokens), indexer_sparse_training=sparse_loss)
    if way == "xmla":
        xmla.maxtext.install()
    with over(config) as mesh:
        line, arrays = measure(Step(build(config, mesh), remat=remat))
    np.savez(results, **arrays)
    print(json.dumps(line))


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Append to this file.", dir_okay=False, callback=writable)],
    commit: Annotated[str | None, typer.Option(help="Where the tree is not a git checkout.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a step, of one sequence.")] = 4096,
    sparse_loss: Annotated[bool, typer.Option(help="The indexer's loss over selected keys alone.")] = True,
    remat: Annotated[bool, typer.Option(help="Compute the forward again in the backward.")] = False,
) -> None:
    """Time a step both ways, and compare their results."""
    line: dict[str, Any] = {
        "tokens": tokens, "sparse_loss": sparse_loss, "remat": remat, "maxtext_version": installed("maxtext"),
    }  # fmt: skip
    flags = {"sparse-loss": sparse_loss, "remat": remat}
    options = [f"--tokens={tokens}", *(f"--{name}" if on else f"--no-{name}" for name, on in flags.items())]
    with tempfile.TemporaryDirectory() as folder:
        files = {way: Path(folder) / f"{way}.npz" for way in WAYS}
        for way, file in files.items():
            command = [sys.executable, "-m", "benchmarks.maxtext", "alone", way, str(file), *options]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | JAX_MEMORY, check=True)
            line[way] = json.loads(done.stdout.splitlines()[-1])
        theirs, ours = (np.load(file) for file in files.values())
        if theirs.files and ours.files:
            apart = difference(dict(ours), dict(theirs))
            line["difference"] = {name: float(f"{d:.2e}") for name, d in apart.items()}
    print(line, flush=True)
    head = provenance(shlex.join(["python", "-m", "benchmarks.maxtext", *sys.argv[1:]]), commit)
    with out.open("a") as file:
        file.write(json.dumps(head | line) + "\n")


if __name__ == "__main__":
    app()
