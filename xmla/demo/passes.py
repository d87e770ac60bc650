"""Prefill and token-by-token decode of a transformers model, with its own attention or with xmla in its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from xmla.demo.paged import PagedAttention


@dataclass
class Run:
    """A pass over the text: `prompt` tokens at once, the others one by one."""

    prompt: int
    logits: torch.Tensor  # [T, vocab]
    attention: list[torch.Tensor]  # the output of each layer's attention [T, hidden]
    indices: list[torch.Tensor | None]  # the selection of each layer [T, K], None where there is no indexer
    layers: Sequence[PagedAttention] = field(default_factory=list)  # none where the model is as shipped


def _steps(tokens: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    yield tokens[:prompt]
    yield from tokens[prompt:].split(1)


def attentions(model: Any) -> list[Any]:
    """The attention modules of the layers that have a cache of entries."""
    layers = model.get_decoder().layers
    return [layer.self_attn for layer in layers if getattr(layer, "block_type", None) != "linear_attention"]


def _empty_cache(model: Any) -> dict[str, DynamicCache]:
    """An empty cache as the model makes it if given none, under the name that the installed transformers takes."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


@torch.no_grad()
def run_as_shipped(model: Any, tokens: torch.Tensor, prompt: int) -> Run:
    """A pass with the model's own attention, indexer and cache, watched by hooks."""
    modules = attentions(model)
    attention: list[list[torch.Tensor]] = [[] for _ in modules]
    indices: list[list[torch.Tensor]] = [[] for _ in modules]
    width = model.config.get_text_config().index_topk
    hooks = []
    for module, outputs, picked in zip(modules, attention, indices, strict=True):
        hooks.append(module.register_forward_hook(lambda _m, _a, got, outputs=outputs: outputs.append(got[0][0])))
        keep = lambda _m, _a, got, picked=picked: picked.append(
            nn.functional.pad(got[0], (0, max(width - got.shape[2], 0)), value=-1)
        )
        indexers = [part for name, part in module.named_modules() if name.split(".")[-1] == "indexer"]
        hooks += [indexer.register_forward_hook(keep) for indexer in indexers]
    cache = _empty_cache(model)
    logits = [model(input_ids=part[None], use_cache=True, **cache).logits[0] for part in _steps(tokens, prompt)]
    for hook in hooks:
        hook.remove()
    selected = [torch.cat(picked).to(torch.int32) if picked else None for picked in indices]
    return Run(prompt, torch.cat(logits), [torch.cat(outputs) for outputs in attention], selected)


@torch.no_grad()
def run_with(model: Any, layers: Sequence[PagedAttention], tokens: torch.Tensor, prompt: int) -> Run:
    """A pass with `layers` in place of the forwards of the model's attention modules."""
    originals = [layer.module.forward for layer in layers]
    for layer in layers:
        layer.module.forward = layer
    try:
        logits, start = [], 0
        cache = _empty_cache(model)  # of layers that are not replaced
        for part in _steps(tokens, prompt):
            positions = torch.arange(start, start + len(part), device=tokens.device)[None]
            logits.append(model(input_ids=part[None], position_ids=positions, use_cache=True, **cache).logits[0])
            start += len(part)
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.module.forward = original
    return Run(
        prompt,
        torch.cat(logits),
        [torch.cat(layer.projected) for layer in layers],
        [torch.cat(layer.indices) if layer.indices else None for layer in layers],
        layers,
    )
