"""Fine-tune a DeepSeek-V3.2 checkpoint of transformers: what is replaced, what is trained, how training resumes.

python examples/finetune_checkpoint.py [FOLDER]
torchrun --nproc-per-node 2 examples/finetune_checkpoint.py [FOLDER]      parameters shared by FSDP2

FOLDER is that of a checkpoint (`config.json`, `*.safetensors`); without it a small model with random weights is made
and saved first. First the indexer learns alone, everything else is frozen; then everything learns.
"""

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import DeepseekV32ForCausalLM

from xmla import torch_api as xt
from xmla.demo.deepseek_v32 import build, index, project, project_back

device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = 4096 if device == "cuda" else 12


class WithLoss(torch.autograd.Function):
    """`out`, behind which a loss's gradient joins the backward: FSDP and checkpointing see only a layer's output."""

    @staticmethod
    def forward(_: Any, out: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyrefly: ignore
        return dout, torch.ones((), device=dout.device)


def attention(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
) -> tuple[torch.Tensor, None]:
    """In place of `DeepseekV32Attention.forward`, for texts [B, T, hidden]; `kl` is the indexer's loss, to be told.

    The projections are the module's own: `project` gives queries [N, H, 576] and rows [N, 576] of N = B · T tokens,
    `index` the indexer's queries, keys and weights, `project_back` the layer's output.
    """
    texts, length = hidden_states.shape[:2]
    place = torch.arange(texts * length, dtype=torch.int32, device=hidden_states.device)
    starts, ends = place // length * length, place + 1  # a token has the keys of its own text, up to itself
    projected = project(module, hidden_states, position_embeddings)
    query, rows = projected.query, torch.cat([projected.latent, projected.k_rope], dim=-1)
    # The indexer learns from its own loss alone, on constants.
    indexer = module.indexer
    index_q, index_k, weights = index(indexer, hidden_states.detach(), projected.q_resid.detach(), position_embeddings)
    weights = weights * indexer.softmax_scale * indexer.n_heads**-0.5
    with torch.no_grad():
        scores = xt.indexer_scores(index_q, index_k, weights, ends, starts)
        chosen = xt.select_topk(scores, ends, starts, k=module.config.index_topk)  # counted from the text's start
    slots = torch.where(chosen >= 0, chosen + starts[:, None], -1)
    out, lse = xt.sparse_mla(query, rows[:, None], slots, softmax_scale=module.scaling)
    kl = xt.indexer_loss(
        index_q, index_k, weights, query.detach(), rows.detach(), lse.detach(), ends, starts, slots,
        softmax_scale=module.scaling,
    )[0]  # fmt: skip
    module.kl = kl.detach().sum()
    return WithLoss.apply(project_back(module, out).view_as(hidden_states), kl.sum()), None


def load(folder: str) -> Any:
    """The checkpoint in float32, its attention replaced, its parameters shared by all ranks, computing in bfloat16."""
    model: Any = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    for layer in model.model.layers:
        layer.self_attn.forward = partial(attention, layer.self_attn)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def start(model: Any, indexer_alone: bool) -> torch.optim.Optimizer:
    """An optimizer of what learns."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name or not indexer_alone)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(learned, lr=1e-3 if indexer_alone else 3e-5)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, float]:
    """One text a rank, drawn by its number; the losses of the language model and, summed, of the indexers."""
    torch.manual_seed(number * dist.get_world_size() + dist.get_rank())
    text = torch.randint(model.config.vocab_size, (1, tokens + 1), device=device)
    logits = model(input_ids=text[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), sum(layer.self_attn.kl.item() for layer in model.model.layers)


def state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved and loaded: a rank's share of it."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def whole(model: Any) -> dict[str, Any]:
    """The parameters on the host, as a checkpoint of transformers has them."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


if "RANK" in os.environ:
    dist.init_process_group()
else:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
with tempfile.TemporaryDirectory() as scratch:
    shared = [scratch]
    dist.broadcast_object_list(shared)  # one folder for all ranks
    folder = sys.argv[1] if len(sys.argv) > 1 else f"{shared[0]}/checkpoint"
    if len(sys.argv) == 1 and dist.get_rank() == 0:
        build("cpu", index_topk=4).save_pretrained(folder)
    dist.barrier()

    model = load(folder)
    optimizer = start(model, indexer_alone=True)
    print("indexer alone: loss {:.3f}, indexers' {:.4f}".format(*step(model, optimizer, 0)))
    # A new model takes over what was learned: FSDP of PyTorch 2.11 settles at first whose gradients it reduces.
    learned, model = get_model_state_dict(model), load(folder)
    set_model_state_dict(model, learned)
    optimizer = start(model, indexer_alone=False)
    began = time.perf_counter()
    print("everything:    loss {:.3f}, indexers' {:.4f}".format(*step(model, optimizer, 1)))
    print(f"{tokens * dist.get_world_size() / (time.perf_counter() - began):.1f} tokens/s, compilation included")

    # Sums over tokens do not depend on an order, so a run that resumes has the bits of the one that went on.
    saved = f"{shared[0]}/step1"
    dcp.save(state(model, optimizer), checkpoint_id=saved)
    step(model, optimizer, 2)
    went_on = whole(model)
    model = load(folder)
    optimizer = start(model, indexer_alone=False)
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=saved)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step(model, optimizer, 2)
    resumed = whole(model)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in went_on.items())
    if dist.get_rank() == 0:
        print(f"resumed: {len(resumed)} parameters have the bits of the run that went on")
        DeepseekV32ForCausalLM.from_pretrained(folder).save_pretrained(f"{scratch}/tuned", state_dict=resumed)
    dist.barrier()
dist.destroy_process_group()
