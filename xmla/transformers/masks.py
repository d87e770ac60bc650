"""The mask of a forward pass as ranges of keys: what transformers hands to each layer in place of one of T by N.

A query's keys are a range of the sequence's keys that are no padding, in their order. `visible` packs the ranges, and
that order where there is padding, into one int32 tensor [B, 1, 1, 2S] or [B, 1, 1, 2S + N], which layers pass on as a
mask; `Visible.of` reads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from xmla.core.errors import ArgumentError, UnsupportedError

CHUNK = 1 << 28  # elements of a mask that is looked at


class Seen(NamedTuple):
    """What the tokens of a pass without a cache see.

    Attributes:
        counts: [B, S] int32, keys that a token's indexer may select.
        real: [B, S] bool, which tokens are no padding.
        follows: [B, S] bool, behind which a token of the same document stands.
    """

    counts: torch.Tensor
    real: torch.Tensor
    follows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Visible:
    """The keys that each query may see.

    Attributes:
        starts, ends: [B, S] int32, a range of the keys in `order`.
        order: [B, N] int32, the keys that are no padding first; None: there is no padding.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    order: torch.Tensor | None

    @classmethod
    def of(cls, mask: torch.Tensor, queries: int, keys: int) -> "Visible":
        """The keys of so many queries, from what `visible` packed, [B, 1, ·], which may know of keys that come later.

        Raises:
            UnsupportedError: It is another mask.
        """
        ordered = mask.shape[2] - 2 * queries
        if mask.dtype != torch.int32 or mask.shape[1] != 1 or (ordered and ordered < keys):
            raise UnsupportedError(
                f"xmla.transformers: attention_mask is {mask.dtype} of shape {tuple(mask.shape)}, supported are masks "
                "of [batch, keys] and none"
            )
        starts, ends, order = mask[:, 0].split([queries, queries, ordered], 1)
        return cls(starts, ends, order[:, :keys].clamp(max=keys - 1) if ordered else None)

    def real(self) -> torch.Tensor:
        """Which tokens [B, S] see themselves, of a pass whose keys are its own: all that are no padding."""
        last = self.ends - 1
        if self.order is not None:
            last = self.order.gather(1, last.clamp(min=0).long())
        return (last == torch.arange(last.shape[1], device=last.device)) & (self.ends > self.starts)

    def places(self, counted: torch.Tensor) -> torch.Tensor:
        """Keys [B, S, K] of the sequences, from those counted from the first key that each query sees; −1 stays."""
        chosen = torch.where(counted < 0, -1, counted + self.starts[..., None])
        if self.order is None:
            return chosen
        place = self.order.gather(1, chosen.clamp(min=0).flatten(1).long()).view(chosen.shape)
        return torch.where(chosen < 0, -1, place)


def seen(layer: Any, whole: dict[str, Any]) -> Seen:
    """Keys of tokens that an indexer may select, of a pass without a cache."""
    queries = whole["hidden_states"].shape[1]
    each = Visible.of(whole["attention_mask"][:, 0], queries, queries)
    follows = each.starts[:, 1:] == each.starts[:, :-1]
    return Seen(each.ends - each.starts, each.real(), torch.nn.functional.pad(follows, (0, 1)))


def part(mask: torch.Tensor, queries: int, first: int, last: int) -> torch.Tensor:
    """The mask of the queries from `first` to before `last`, from what `visible` packed of so many `queries`."""
    return torch.cat([mask[..., first:last], mask[..., queries + first : queries + last], mask[..., 2 * queries :]], -1)


def visible(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: torch.Tensor | None = None,
    device: Any = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """What transformers asks for in place of a mask, once for all layers of a forward pass.

    Raises:
        UnsupportedError: A query's keys are no range.
    """
    if mask_function is causal_mask_function:
        place = torch.arange(q_length, device=device) + (q_offset + 1 - kv_offset)
        starts, ends = torch.zeros_like(place), place.clamp(0, kv_length)
        parts = [each.expand(batch_size, -1) for each in (starts, ends)]
        if attention_mask is not None:
            parts = without_padding(parts[1], attention_mask, kv_length, kv_offset)
    else:
        rows = partial(
            sdpa_mask, batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, device=device, use_vmap=options.get("use_vmap", False),
            allow_is_causal_skip=False,
        )  # fmt: skip
        at_once = max(1, CHUNK // max(1, batch_size * kv_length))
        parts = [torch.cat(each, 1) for each in zip(*ranges(rows, q_length, q_offset, at_once), strict=True)]
    return torch.cat([part.to(torch.int32) for part in parts], 1)[:, None, None]


def without_padding(ends: torch.Tensor, mask: torch.Tensor, keys: int, offset: int) -> list[torch.Tensor]:
    """Ranges, and the order, of the keys that a mask [B, ≥ N] of zeros and ones has; `ends` [B, S] counts all keys."""
    if mask.dim() != 2:
        raise ArgumentError(f"xmla.transformers: attention_mask has {mask.dim()} axes, expected [batch, keys]")
    real = mask[:, offset : offset + keys].bool()
    real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))  # keys that no token has written yet
    order = real.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    counts = torch.nn.functional.pad(real.cumsum(1), (1, 0))
    ends = counts.gather(1, ends.long())
    return [torch.zeros_like(ends), ends, order]


def ranges(
    rows: Callable[..., Any], queries: int, first: Any, at_once: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Starts and ends [B, ·] of the keys of some queries after others, by `rows` of a mask for so many at once."""
    for place in range(0, queries, at_once):
        yield bounds(rows(q_length=min(at_once, queries - place), q_offset=first + place)[:, 0])


def bounds(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends [B, S] of the keys that a mask [B, S, N] has.

    Raises:
        UnsupportedError: A query's keys are no range, or the pass is exported, in which nobody can look at values.
    """
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "xmla.transformers: torch.export of a mask whose values are looked at, supported: attention_mask of "
            "[batch, keys] and use_cache=False, in models without windows"
        )
    count, starts = mask.sum(-1), mask.to(torch.int8).argmax(-1)
    ends = mask.shape[-1] - mask.flip(-1).to(torch.int8).argmax(-1)
    if bool(((count > 0) & (ends - starts != count)).any()):
        raise UnsupportedError(
            "xmla.transformers: a query's keys are not one after another, supported are causal masks with padding "
            "and packed sequences"
        )
    return starts, starts + count
