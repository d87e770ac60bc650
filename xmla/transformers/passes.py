"""Passes of many tokens without gradients, in parts that go through all layers one after another.

transformers' modules make float32 copies of what they norm, and its models keep what they embedded: of a long prompt
these are most of a pass's memory. In parts the last layer's result is all that there is of the whole text, beside the
cache.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import output_capturing

from xmla.core.values import cdiv

AT_ONCE = 8192  # tokens of a part: enough for products to take longer than reading their weights
A_TOKEN = ("input_ids", "inputs_embeds", "position_ids")  # of which a part has its own


def parts(tokens: int) -> Iterator[slice]:
    """The parts of so many tokens: of one size, since DeepSeek-V4 gives a token that comes alone other entries."""
    size = cdiv(tokens, cdiv(tokens, AT_ONCE))
    for first in range(0, tokens, size):
        yield slice(first, min(first + size, tokens))


def divided(own: Callable[..., Any], name: str, cache_of: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward that takes many tokens in parts, where the configuration names this attention.

    Args:
        own: The forward of a model without a head.
        name: Of the attention.
        cache_of: What makes the cache of a pass that keeps none.
    """
    names = tuple(signature(own).parameters)[1:]

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = dict(zip(names, args, strict=False)) | kwargs
        if self.config._attn_implementation != name or not _divisible(self, whole):
            return own(self, *args, **kwargs)
        as_object = whole.pop("return_dict", getattr(self.config, "return_dict", True))
        kept = whole.get("cache") is not None or _caches(self, whole)
        if whole.get("cache") is None:
            whole["cache"] = (DynamicCache if kept else cache_of)(config=self.config)
        tokens, mask = _tokens(whole), whole.get("attention_mask")
        out: Any = None
        result: Any = None
        for part in parts(tokens):
            some = whole | {each: whole[each][:, part] for each in A_TOKEN if whole.get(each) is not None}
            if mask is not None:
                some["attention_mask"] = mask[:, : mask.shape[1] - tokens + part.stop]
            result = own(self, **some, return_dict=True)
            hidden = result.last_hidden_state
            if out is None:
                out = hidden.new_empty((len(hidden), tokens, *hidden.shape[2:]))
            out[:, part] = hidden
        joined = type(result)(last_hidden_state=out, cache=result.cache if kept else None)
        return joined if as_object else joined.to_tuple()

    return forward


def _tokens(whole: dict[str, Any]) -> int:
    """How many tokens of each sequence a pass has; 0 if none are given."""
    inputs = [whole[name] for name in A_TOKEN[:2] if whole.get(name) is not None]
    return inputs[0].shape[1] if inputs else 0


def _caches(model: Any, whole: dict[str, Any]) -> bool:
    use = whole.get("use_cache")
    return bool(model.config.use_cache if use is None else use)


def _divisible(model: Any, whole: dict[str, Any]) -> bool:
    """Whether parts give what the whole pass does, and nobody sees them."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _tokens(whole) <= AT_ONCE:
        return False
    if any(whole.get(option) is not None for option in ("indexer_loss", "selections", "past_key_values")):
        return False
    recorded = (f"output_{kind}" for kind in model._can_record_outputs)
    if any(whole.get(flag, getattr(model.config, flag, False)) for flag in recorded):
        return False
    mask = whole.get("attention_mask")
    if mask is None:  # packed sequences are looked for in positions where there is no cache
        packed = whole.get("position_ids") is not None and whole.get("cache") is None and not _caches(model, whole)
        return not packed and not _watched(model)
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and not _watched(model)


def _watched(model: nn.Module) -> bool:
    """Whether hooks see the passes of a model's modules, or bring their weights, or other ranks wait for them."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks and torch.distributed.get_world_size() > 1:
        return True
    for module in model.modules():
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        others = [each for each in hooks if getattr(each, "__module__", "") != output_capturing.__name__]
        if others or "forward" in vars(module):
            return True
    return False
