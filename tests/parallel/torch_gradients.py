"""Training steps of a small module under DistributedDataParallel and fully_shard, against one process."""

import hashlib
from collections.abc import Callable
from functools import partial

import kit
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from xmla import torch_api as xt

HIDDEN, HEADS, INDEX_HEADS, DIMS, TOKENS, WINDOW = 32, 2, 2, 32, 6, 4
SCALE = 0.1
# Of float32 sums in another order, in products and in the mean of the ranks; where that rounds an operand in bfloat16
# the other way, by 2**-8 of it, a few of its thousands of elements.
ROUNDING, STEPS = 1e-3, 2


class SparseAttention(nn.Module):
    """Each token attends to the latest keys of its text, and the indexer learns what it attends to."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, HIDDEN, bias=False)
        self.q, self.rows, self.back = linear(HEADS * 576), linear(576), nn.Linear(HEADS * 512, HIDDEN, bias=False)
        self.index_q, self.index_k, self.index_weights = linear(INDEX_HEADS * DIMS), linear(DIMS), linear(INDEX_HEADS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(len(x), dtype=torch.int32, device=x.device)
        starts, ends = place // TOKENS * TOKENS, place + 1
        slots = place[:, None] - torch.arange(WINDOW, dtype=torch.int32, device=x.device)
        slots = slots.where(slots >= starts[:, None], -1)
        q, rows = self.q(x).bfloat16().unflatten(1, (HEADS, -1)), self.rows(x).bfloat16()
        out, lse = xt.sparse_mla(q, rows[:, None], slots, softmax_scale=SCALE)
        seen = x.detach()
        loss, *_ = xt.indexer_loss(
            self.index_q(seen).bfloat16().unflatten(1, (INDEX_HEADS, -1)), self.index_k(seen).bfloat16(),
            self.index_weights(seen), q.detach(), rows.detach(), lse.detach(), ends, starts, slots, softmax_scale=SCALE,
        )  # fmt: skip
        return x + self.back(out.flatten(1).float()), loss[0]


class Model(nn.Module):
    """Two layers, and the mean over tokens of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SparseAttention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x)
            total = total + loss
        return total + x.square().mean()


def sharded(model: Model) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


Gradients = list[dict[str, torch.Tensor]]  # of every parameter, for each step


def gradients(wrap: Callable[[Model], nn.Module], batches: torch.Tensor) -> Gradients:
    """The gradients of each training step; one batch [T, hidden] a step."""
    torch.manual_seed(0)
    model = wrap(Model().to(batches.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: Gradients = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        grads = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
        found.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()})
        optimizer.step()
    return found


def check_gradients(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Each rank has a text of its own; together the gradients are those of one process with all, and the same again."""
    texts = torch.randn(STEPS, ranks, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(mesh.device_type)
    # The first rank compares: the others have the same, which the digests show.
    want = gradients(lambda model: model, texts.flatten(1, 2)) if rank == 0 else []
    digests = {}
    for wrap in (DistributedDataParallel, sharded):
        found, again = (gradients(wrap, texts[:, rank]) for _ in range(2))
        for ours, same in zip(found, again, strict=True):
            for name, gradient in ours.items():
                kit.assert_bits_equal(name, same[name], gradient)
        for step, (ours, whole) in enumerate(zip(found, want, strict=rank == 0)):
            assert ours.keys() == whole.keys()
            for name, gradient in ours.items():
                error = float((gradient - whole[name]).norm() / whole[name].norm())
                assert error < ROUNDING, f"{wrap.__name__}, step {step}, {name}: {error}"
        content = b"".join(gradient.cpu().numpy().tobytes() for step in found for gradient in step.values())
        digests[wrap.__name__] = hashlib.sha256(content).hexdigest()
    return {"gradients": digests}
