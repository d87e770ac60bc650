"""`python -m benchmarks.megatron`: a step of Megatron-Core's own `DSAttention`, by Megatron's code and by xmla.

A step is forward and backward of one layer of DeepSeek-V3.2's sizes between its projections, with the indexer and its
loss, in training. Megatron's layer runs with `dsa_kernel_backend` "none", its PyTorch operations, and "xmla"; outputs
and gradients are compared with the first one's. Its fused backends run beside them where their packages are:

    python -m benchmarks.megatron --backend none --backend cudnn --backend tilelang --backend xmla --out FILE

One that fails has its reason in the line, and one that leaves a part to Megatron's code has the names of the hooks that
declined. Each run appends a JSON line. Several GPUs, whose layer is divided by heads or by
tokens:

    torchrun --nproc-per-node 2 -m benchmarks.megatron --tensor-parallel 2 --out FILE

Two of Megatron's parts have no wheel and are PyTorch's here, in both runs: linear layers (Transformer Engine's there)
and the Hadamard transform of the indexer's queries and keys.
"""

import json
import logging
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import xmla.megatron
from benchmarks.layer import difference
from xmla.bench.provenance import provenance
from xmla.bench.run import in_one_line
from xmla.core.versions import installed
from xmla.machine.files import writable

ROUNDS = 3
BACKENDS = ("none", "xmla")
Tensors = dict[str, torch.Tensor]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer, by default DeepSeek-V3.2's."""

    tokens: int = 4096
    document: int | None = None  # tokens of a document if they are packed documents
    heads: int = 128
    hidden: int = 7168
    q_latent: int = 1536
    values: int = 128  # of a head
    index_heads: int = 64
    index_dims: int = 128
    k: int = 2048
    scale: float = 0.1352


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`fast_hadamard_transform`'s function: x · H · scale, H of Sylvester's construction."""
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return ((x.float() @ matrix) * scale).to(x.dtype)


class Linear(torch.nn.Linear):
    """A linear layer, made and called as Megatron does its own."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=config.params_dtype, device=torch.cuda.current_device())

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore
        return super().forward(input), None


class Norm(torch.nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())


@contextmanager
def ranks(tensor_parallel: int, context_parallel: int) -> Iterator[None]:
    """Megatron's process groups, of torchrun's processes or of this one."""
    from megatron.core import parallel_state

    module = ModuleType("fast_hadamard_transform")
    module.hadamard_transform = hadamard_transform  # pyrefly: ignore
    sys.modules.setdefault("fast_hadamard_transform", module)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    parallel_state.initialize_model_parallel(tensor_parallel, context_parallel_size=context_parallel)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass
class Step:
    """A rank's share of a layer, and its inputs: leaves q, k and up, and what the indexer reads."""

    layer: Any
    q: torch.Tensor  # [S, 1, H, 576]
    k: torch.Tensor  # [S, 1, 1, 576]
    hidden: torch.Tensor  # [S, 1, HIDDEN]
    q_latent: torch.Tensor  # [S, 1, 1536]
    up: torch.Tensor  # [H, VALUES, 512]
    packed: Any  # Megatron's `PackedSeqParams` of documents

    @classmethod
    def random(cls, sizes: Sizes, backend: Any, sparse_loss: bool) -> "Step":
        """A step with parameters and inputs of seed 0, the same for every backend."""
        from megatron.core import parallel_state as state
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.experimental_attention_variant import dsa
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        tp, cp = state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size()
        config = MLATransformerConfig(
            num_layers=1, hidden_size=sizes.hidden, num_attention_heads=sizes.heads, q_lora_rank=sizes.q_latent,
            kv_lora_rank=512, qk_head_dim=64, qk_pos_emb_head_dim=64, v_head_dim=sizes.values, rope_type="rope",
            experimental_attention_variant="dsa", dsa_indexer_n_heads=sizes.index_heads,
            dsa_indexer_head_dim=sizes.index_dims, dsa_indexer_topk=sizes.k, dsa_indexer_loss_coeff=1.0,
            dsa_indexer_use_sparse_loss=sparse_loss, dsa_kernel_backend=backend, tensor_model_parallel_size=tp,
            context_parallel_size=cp, cp_comm_type="allgather", bf16=True, params_dtype=torch.bfloat16,
            add_bias_linear=False, apply_rope_fusion=False,
        )  # fmt: skip
        indexer = dsa.DSAIndexerSubmodules(
            linear_wq_b=Linear, linear_wk=Linear, k_norm=Norm, linear_weights_proj=Linear
        )
        submodules = dsa.DSAttentionSubmodules(ModuleSpec(module=dsa.DSAIndexer, submodules=indexer))
        torch.manual_seed(0)
        layer = dsa.DSAttention(
            config, submodules, 1, AttnMaskType.causal, "self", softmax_scale=sizes.scale, cp_comm_type="allgather"
        ).train()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=torch.cuda.current_device())

        tokens = normal(sizes.tokens, 1, sizes.heads * 576 + 576 + sizes.hidden + sizes.q_latent)
        up = normal(sizes.heads, sizes.values, 512) * 512**-0.5
        document = sizes.document or sizes.tokens
        if cp > 1:  # Megatron's order: a rank has one part from either end of each document
            parts, rank = tokens.unflatten(0, (-1, 2 * cp, document // (2 * cp))), state.get_context_parallel_rank()
            tokens = torch.stack([parts[:, rank], parts[:, -1 - rank]], 1).flatten(0, 2)
        packed = None
        if sizes.document is not None:
            ends = torch.arange(0, sizes.tokens + 1, document, dtype=torch.int32, device=torch.cuda.current_device())
            packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=document, max_seqlen_kv=document)
        q, k, hidden, q_latent = tokens.split([sizes.heads * 576, 576, sizes.hidden, sizes.q_latent], -1)
        rank = state.get_tensor_model_parallel_rank()
        q, up = q.unflatten(-1, (sizes.heads, 576)).chunk(tp, 2)[rank], up.chunk(tp)[rank]
        q, k, hidden, q_latent, up = (x.contiguous() for x in (q, k.unsqueeze(2), hidden, q_latent, up))
        step = cls(layer, q, k, hidden, q_latent, up, packed)
        for leaf in (step.q, step.k, step.up):
            leaf.requires_grad_()
        return step

    def run(self) -> Tensors:
        """Forward and backward: the output, and every gradient."""
        from megatron.core.transformer.enums import AttnMaskType

        leaves = {"q": self.q, "k": self.k, "up": self.up, **dict(self.layer.named_parameters())}
        for leaf in leaves.values():
            leaf.grad = None
        out = self.layer(
            self.q, self.k, None, None, self.hidden, self.q_latent, attn_mask_type=AttnMaskType.causal,
            up_v_weight=self.up, packed_seq_params=self.packed,
        )  # fmt: skip
        out.float().square().sum().backward()
        return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def measure(self) -> dict[str, Any]:
        """Milliseconds of a step and the most memory that was allocated."""
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.run()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {"ms": round(statistics.median(times), 1), "peak_gib": round(peak, 2)}


@contextmanager
def declined() -> Iterator[set[str]]:
    """The hooks that a backend leaves to Megatron's own code meanwhile, which Megatron logs."""
    found: set[str] = set()

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "declined" in record.msg and isinstance(record.args, tuple):
                found.add(str(record.args[1]))

    logger = logging.getLogger("megatron.core.transformer.experimental_attention_variant.dsa_kernels")
    handler, level, passes = Noted(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = passes


def measure(sizes: Sizes, backend: str, sparse_loss: bool, keep: bool) -> tuple[dict[str, Any], Tensors]:
    """Time and memory of a random step; its results too if they are to be kept, in the host's memory."""
    try:
        step = Step.random(sizes, backend, sparse_loss)
        torch.cuda.empty_cache()  # of all ranks' tokens, each of which took its own
        with declined() as hooks:
            results = step.run()
        kept = {name: tensor.cpu() for name, tensor in results.items()} if keep else {}
        del results
        return step.measure() | ({"declined": sorted(hooks)} if hooks else {}), kept
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}, {}
    except Exception as failure:  # a peer's own
        if backend == "xmla":
            raise
        return {"failed": in_one_line(failure)}, {}


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Append to this file.", dir_okay=False, callback=writable)],
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a step.")] = 4096,
    document: Annotated[int | None, typer.Option(min=1, help="Tokens of a document, if not one sequence.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share the heads.")] = 1,
    context_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share the tokens.")] = 1,
    sparse_loss: Annotated[bool, typer.Option(help="The indexer's loss over selected keys alone.")] = True,
    backend: Annotated[list[str], typer.Option(help="Of Megatron's dsa_kernel_backend.")] = list(BACKENDS),  # noqa: B006
) -> None:
    """Time a step by each backend, and compare their results."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    xmla.megatron.install()
    line: dict[str, Any] = {
        "tokens": tokens, "tensor_parallel": tensor_parallel, "context_parallel": context_parallel,
        "sparse_loss": sparse_loss, "megatron_core": installed("megatron-core"), "document": document,
    }  # fmt: skip
    results = {}
    with ranks(tensor_parallel, context_parallel):
        for name in backend:
            line[name], results[name] = measure(Sizes(tokens, document), name, sparse_loss, len(backend) > 1)
            torch.cuda.empty_cache()
        first = results[backend[0]]
        for name in backend[1:] if first else []:
            if theirs := results[name]:
                apart = [difference({n: theirs[n].cuda()}, {n: tensor.cuda()}) for n, tensor in first.items()]
                each = {n: float(f"{d:.2e}") for part in apart for n, d in part.items()}
                line |= {"difference": each} if name == "xmla" else {}
                line[name]["difference"] = max(each.values())
        if dist.get_rank() == 0:
            print(line, flush=True)
            head = provenance(shlex.join(["python", "-m", "benchmarks.megatron", *sys.argv[1:]]), commit)
            with out.open("a") as file:
                file.write(json.dumps(head | line) + "\n")


if __name__ == "__main__":
    app()
