"""DeepSeek-V3.2 of transformers in training, its attention and indexer on xmla's differentiable ops or as shipped.

As in the model's technical report: first the indexer alone, with every key attended to and everything else frozen; then
everything, over the selected keys. The indexer learns from its own loss alone, on detached inputs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

from xmla import torch_api as xt
from xmla.demo.curves import Curve, Stage
from xmla.demo.deepseek_v32 import Rope, build, index, project, project_back
from xmla.demo.passes import attentions


def build_sharp(device: str, topk: int) -> DeepseekV32ForCausalLM:
    """The demo's model in float32, with queries four times as large.

    Attention of a random model is nearly flat, unlike a trained one's, and would give an indexer nothing to learn.
    """
    model: Any = build(device, topk).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_b_proj.weight.mul_(4)
    return model


@dataclass
class Attention(ABC):
    """The forward of a `DeepseekV32Attention` for texts [B, T, hidden]; N = B · T.

    A call leaves the indexer's loss `kl`, its selection `selected` [N, K] of keys of the token's own text, −1 where
    there is none, and the `overlap` of that with the keys that get most attention, which the shipped one does not tell.
    """

    module: Any
    dense: bool
    kl: torch.Tensor = field(init=False)
    selected: torch.Tensor = field(init=False)
    overlap: float = field(default=math.nan, init=False)

    @abstractmethod
    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Rope, **others: Any
    ) -> tuple[torch.Tensor, Any]: ...

    def index(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Rope
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The indexer's queries [N, I, D], keys [N, D] and weights [N, I], with all factors of its scores in these."""
        indexer = self.module.indexer
        q, k, weights = index(indexer, hidden_states.detach(), q_resid.detach(), position_embeddings)
        return q, k, weights * indexer.softmax_scale * indexer.n_heads**-0.5


class XmlaAttention(Attention):
    """Attention by xmla over plain rows: arguments of the ops in bfloat16, everything else in the model's dtype."""

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Rope, **_: Any) -> tuple[torch.Tensor, None]:
        module, texts, tokens = self.module, *hidden_states.shape[:2]
        scale, place = module.scaling, torch.arange(texts * tokens, dtype=torch.int32, device=hidden_states.device)
        starts, ends = place // tokens * tokens, place + 1  # the keys of a token's own text, up to itself
        projected = project(module, hidden_states, position_embeddings)
        query = projected.query.bfloat16()
        rows = torch.cat([projected.latent, projected.k_rope], dim=-1).bfloat16()
        index_q, index_k, index_weights = self.index(hidden_states, projected.q_resid, position_embeddings)
        index_q, index_k = index_q.bfloat16(), index_k.bfloat16()

        scores = xt.indexer_scores(index_q.detach(), index_k.detach(), index_weights.detach(), ends, starts)
        self.selected = xt.select_topk(scores, ends, starts, k=module.config.index_topk)
        keys = place[:tokens].expand(len(place), -1) if self.dense else self.selected
        slots = keys + starts[:, None]
        slots = slots.where((keys >= 0) & (slots < ends[:, None]), -1)
        out, lse = xt.sparse_mla(query, rows[:, None], slots, softmax_scale=scale)
        constants = query.detach(), rows.detach(), lse.detach()
        loss = xt.indexer_loss(
            index_q, index_k, index_weights, *constants, ends, starts, None if self.dense else slots,
            softmax_scale=scale,
        )  # fmt: skip
        self.kl, self.overlap = loss[0][0], overlap(self.selected, attended(*constants[:2], texts, scale))
        return project_back(module, out).view_as(hidden_states), None


@dataclass
class EagerAttention(Attention):
    """Attention as shipped; the indexer, which does not learn there, has its loss in PyTorch's own operations.

    While it is not dense it attends to the next of `selections` [N, K], which xmla selected: nearly equal scores
    would otherwise make the two models select different keys.
    """

    selections: Iterator[np.ndarray] = field(kw_only=True)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Rope, **others: Any
    ) -> tuple[torch.Tensor, Any]:
        module, indexer, texts, tokens = self.module, self.module.indexer, *hidden_states.shape[:2]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden_states.device).tril()
        if self.dense:
            allowed = causal.expand(texts, -1, -1)
        else:
            keys = torch.tensor(next(self.selections), device=hidden_states.device)
            allowed = mask_of(keys, tokens).unflatten(0, (texts, tokens))
        inputs: list[torch.Tensor] = []

        def select(hidden_states: torch.Tensor, q_resid: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            inputs.append(q_resid)
            self.selected = type(indexer).forward(indexer, hidden_states, q_resid, *rest, **named).flatten(0, 1)
            return allowed.int().topk(tokens if self.dense else self.selected.shape[1]).indices

        indexer.forward = select
        results: Any = DeepseekV32Attention.forward(module, hidden_states, position_embeddings, **others)
        del indexer.forward
        arrays = self.index(hidden_states, inputs[0], position_embeddings)
        index_q, index_k, index_weights = (array.unflatten(0, (texts, tokens)) for array in arrays)
        products = torch.einsum("btid,bsd->btis", index_q, index_k).relu()
        scores = torch.einsum("btis,bti->bts", products, index_weights).float()
        logs = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        target = nn.functional.normalize(results[1].detach().float().sum(1), p=1.0, dim=-1)
        self.kl = (torch.special.xlogy(target, target) - target * logs).sum() / (texts * tokens)
        return results


def mask_of(selected: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which keys of its text each token selected: [N, T]."""
    mask = torch.zeros(len(selected), tokens + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, selected.long() % (tokens + 1), True)[:, :tokens]  # −1 is behind the last


def attended(query: torch.Tensor, rows: torch.Tensor, texts: int, scale: float) -> torch.Tensor:
    """What all heads of a token together give to each key of its text if every key is attended to: [N, T]."""
    q, k = (array.float().unflatten(0, (texts, -1)) for array in (query, rows))
    logits = torch.einsum("bthd,bsd->bhts", q, k) * scale
    later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1).sum(1).flatten(0, 1)


def overlap(selected: torch.Tensor, weights: torch.Tensor) -> float:
    """The share of the K keys that are given most which were selected, over the tokens that have more than K."""
    k, tokens = selected.shape[1], weights.shape[1]
    late = torch.arange(len(selected), device=selected.device) % tokens >= k
    best = mask_of(weights.topk(k).indices, tokens)
    return float((mask_of(selected, tokens) & best)[late].sum() / (k * late.sum()))


def train(
    model: Any, stage: Stage, steps: int, *, batch: torch.Tensor, over: Curve | None = None, half: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Curve:  # fmt: skip
    """Train the model on texts [B, T+1] of tokens: by xmla, or as shipped `over` the keys that xmla selected.

    `half` is autocast to bfloat16, as the shipped model would be trained.
    """
    modules = attentions(model)
    layers: list[Attention] = [XmlaAttention(module, stage.dense) for module in modules]
    if over is not None:
        selections = zip(*over.selected, strict=True)  # of each layer
        layers = [EagerAttention(m, stage.dense, selections=iter(s)) for m, s in zip(modules, selections, strict=True)]
    learned = {name: p for name, p in model.named_parameters() if ".indexer." in name or not stage.dense}
    model.requires_grad_(False)
    for parameter in learned.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(learned.values(), stage.rate)
    curve = Curve()
    for module, layer in zip(modules, layers, strict=True):
        module.forward = layer
    for step in range(steps):
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=half):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        kl = torch.stack([layer.kl for layer in layers]).mean()
        optimizer.zero_grad()
        (loss + kl).backward()
        if step == 0:
            curve.gradients = {n: p.grad.cpu().numpy().copy() for n, p in learned.items() if p.grad is not None}
        optimizer.step()
        curve.loss.append(loss.item())
        curve.kl.append(kl.item())
        curve.overlap.append(sum(layer.overlap for layer in layers) / len(layers))
        curve.selected.append([layer.selected.cpu().numpy() for layer in layers])
        advance()
    for module in modules:
        del module.forward
    return curve
