"""Prefill and token-by-token decode of a transformers model, with its own attention or with another in its place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def run_cached(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [T, vocab] with the model's own attention and cache."""
    logits, past = [], None
    for part in (tokens[:prompt], *tokens[prompt:].split(1)):
        result = model(input_ids=part[None], past_key_values=past, use_cache=True)
        past = result.past_key_values
        logits.append(result.logits[0])
    return torch.cat(logits)


def run_with(model: Any, forwards: Sequence[Callable[..., Any]], tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [T, vocab] with `forwards`, which keep what they need, as the attention of the layers."""
    modules = [layer.self_attn for layer in model.model.layers]
    originals = [module.forward for module in modules]
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward
    try:
        logits, start = [], 0
        for part in (tokens[:prompt], *tokens[prompt:].split(1)):
            positions = torch.arange(start, start + len(part), device=tokens.device)[None]
            logits.append(model(input_ids=part[None], position_ids=positions, use_cache=False).logits[0])
            start += len(part)
    finally:
        for module, forward in zip(modules, originals, strict=True):
            module.forward = forward
    return torch.cat(logits)
