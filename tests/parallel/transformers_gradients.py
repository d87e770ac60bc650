"""A training step of a model of transformers under fully_shard, with the indexers' loss, against one process."""

import hashlib
import re
from typing import Any

import torch
import torch.distributed as dist
from small_transformers import build, text
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xmla.transformers import IndexerLoss
from xmla.transformers.models import ENTRIES, POOLS

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradients(model: Any, tokens: torch.Tensor, warm_up: bool) -> dict[str, torch.Tensor]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name or not warm_up)
    losses = IndexerLoss(dense=warm_up)
    out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
    losses.added_to(out.loss).backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert all(grad is not None for grad in grads.values())
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def sharded(device: str, units: str) -> Any:
    """The model in float32, which computes in bfloat16."""
    model = build("deepseek_v32", device, num_hidden_layers=2, index_topk=16).float().train()
    for layer in model.model.layers:
        if units == "up-projections":
            fully_shard(layer.self_attn.kv_b_proj, mp_policy=POLICY)
        if units != "model":
            fully_shard(layer, mp_policy=POLICY)
    return fully_shard(model, mp_policy=POLICY)


Digests = dict[str, str]
Errors = dict[str, float]


def digest(grads: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(grad.cpu().float().numpy().tobytes() for grad in grads.values())).hexdigest()


def errors(ours: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Errors:
    assert ours.keys() == want.keys()
    return {name: float((ours[name] - want[name]).norm() / want[name].norm()) for name in want}


def keyed(device: str, rank: int, ranks: int) -> tuple[Errors, Digests]:
    """DeepSeek-V3.2 with the indexers' loss; whichever modules are gathered by themselves."""
    found, digests = Errors(), Digests()
    torch.manual_seed(0)  # the same texts on all ranks
    texts, wanted = text(device, ranks, 18), {}
    if rank == 0:
        whole = build("deepseek_v32", device, num_hidden_layers=2, index_topk=16).train()
        for warm_up in (False, True):
            whole.zero_grad()
            wanted[warm_up] = gradients(whole, texts, warm_up)
    for units, warm_up in (("layers", False), ("up-projections", False), ("model", True)):
        ours = gradients(sharded(device, units), texts[rank : rank + 1], warm_up)
        digests[units] = digest(ours)
        if rank == 0:
            found[units] = max(errors(ours, wanted[warm_up]).values())
    return found, digests


def gathered(kind: str, device: str, tokens: torch.Tensor, shards: bool) -> dict[str, torch.Tensor]:
    """Gradients of a model whose indexers have no loss, of one process or of layers that are gathered one by one."""
    model = build(kind, device, index_topk=64).train()
    if shards:
        model = model.float()
        for name, module in list(model.named_modules()):
            if re.search(r"(^|\.)model\.(language_model\.)?layers\.\d+$", name):
                fully_shard(module, mp_policy=POLICY)
        fully_shard(model, mp_policy=POLICY)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def entries_and_pools(device: str, rank: int, ranks: int) -> tuple[Errors, Digests]:
    """DeepSeek-V4 and GLM-5.3-Flash likewise, by the parameters of their attention."""
    found, digests = Errors(), Digests()
    for kind in (ENTRIES, POOLS):
        torch.manual_seed(0)
        texts = text(device, ranks, 18)
        want = gathered(kind, device, texts, False) if rank == 0 else {}
        ours = gathered(kind, device, texts[rank : rank + 1], True)
        digests[kind] = digest(ours)
        if rank == 0:
            found[kind] = max(error for name, error in errors(ours, want).items() if ".self_attn." in name)
    return found, digests


def check(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Each rank has a text of its own. The first compares: the others have the same, which the digests show."""
    device = mesh.device_type
    found, digests = keyed(device, rank, ranks)
    others, more = entries_and_pools(device, rank, ranks)
    return {"transformers": found, "entries_and_pools": others, "digests": digests | more}
