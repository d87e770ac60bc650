"""Selections of a rollout in the place of those of a model's indexers: `model(…, selections=Selections(config, …))`."""

from collections.abc import Mapping
from typing import Any

import torch

from xmla._selections import check_form, check_layers, check_rows
from xmla.core.errors import UnsupportedError
from xmla.transformers.cache import of_text
from xmla.transformers.masks import Visible


class Selections:
    """The keys that a rollout selected, to which a forward pass attends instead of selecting keys itself.

        out = model(tokens, use_cache=False, selections=Selections(model.config, layers))

    A row [K] of a token has its keys in ascending order, counted from the first key that the token sees, and −1 behind
    the last: what `indexer_topk` gives, and engines record of a request. Padding and packed documents thus change no
    row. It has as many keys as the indexer would select; that of padding, or of the last token of a document, which no
    other token depends on, may have none, and the token then attends to nothing.

    Args:
        config: The model's.
        layers: [B, S, index_topk] int32 of each layer that selects keys, by its number. Layers that share a selection
            have that of the layer before them, as in the model. Those on the host are copied when their layer runs.
        batch_invariant: Attend as `sparse_mla` with `batch_invariant`, like an engine with VLLM_BATCH_INVARIANT=1.

    Raises:
        ArgumentError: `config` is no configuration. Other layers than those that select, another dtype, shape or number
            of keys.
    """

    # No dataclass: FSDP copies those that it finds among a module's arguments.
    def __init__(self, config: Any, layers: Mapping[int, torch.Tensor], batch_invariant: bool = False) -> None:
        text = of_text("Selections", config)
        kinds = getattr(text, "indexer_types", None) or ["full"] * text.num_hidden_layers
        selecting = [layer for layer, kind in enumerate(kinds) if kind == "full"]
        check_layers(layers, selecting)
        self.topk, self.batch_invariant, self.layers = text.index_topk, batch_invariant, dict(layers)
        for layer, rows in self.layers.items():
            check_form(layer, rows, self.topk, tuple(self.layers[selecting[0]].shape[:2]))

    def of(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Rows of a layer's tokens from `first` to before `last`."""
        return self.layers[layer][:, first:last]

    @torch.compiler.disable  # it looks at values
    def check(self, layer: int, mask: torch.Tensor, queries: int, cache: Any) -> None:
        """Check all layers' rows in the first of them, before any of them attends.

        Args:
            layer: The number of the layer that asks.
            mask: [B, 1, ·], what `masks.visible` packed for the pass.
            queries: S.
            cache: That of the pass, or None.

        Raises:
            ArgumentError: Other tokens than the pass has; a token's keys are not those of a selection.
            UnsupportedError: There are keys before those of the pass's tokens.
        """
        if layer != min(self.layers):
            return
        if cache is not None and (before := int(cache.get_seq_length(layer))):
            raise UnsupportedError(f"selections: {before} tokens are cached, supported: none; pass use_cache=False")
        seen = Visible.of(mask, queries, queries)
        counts = seen.ends - seen.starts
        needed = seen.real()
        follows = needed[:, 1:] & (seen.starts[:, 1:] == seen.starts[:, :-1])
        needed = needed & torch.nn.functional.pad(follows, (0, 1))
        for number, rows in self.layers.items():
            check_form(number, rows, self.topk, tuple(counts.shape))
            check_rows(number, rows, counts.to(rows.device), needed.to(rows.device))
