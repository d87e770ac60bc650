"""Selections of a rollout in the place of those of a model's indexers: `model(…, selections=Selections(config, …))`."""

from collections.abc import Mapping
from typing import Any

import torch

from xmla._selections import check_arrays, check_form, check_layers, check_rows
from xmla.core.errors import UnsupportedError
from xmla.transformers.cache import of_text
from xmla.transformers.masks import Seen

INDEXED = ("indexed_attention", "compressed_sparse_attention")  # kinds of layers


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
            DeepSeek-V4's keys are entries; GLM-5.3-Flash's are pools, [B, S, index_topk // index_kpool].
        batch_invariant: Attend as `sparse_mla` with `batch_invariant`, like an engine with VLLM_BATCH_INVARIANT=1.

    Raises:
        ArgumentError: `config` is no configuration. Other layers than those that select, another dtype, shape or number
            of keys.
    """

    # No dataclass: FSDP copies those that it finds among a module's arguments.
    def __init__(self, config: Any, layers: Mapping[int, torch.Tensor], batch_invariant: bool = False) -> None:
        text = of_text("Selections", config)
        kinds = getattr(text, "indexer_types", None) or ["full"] * text.num_hidden_layers
        pairs = zip(kinds, text.layer_types, strict=True)
        selecting = [layer for layer, (kind, of) in enumerate(pairs) if kind == "full" and of in INDEXED]
        check_layers(layers, selecting)
        self.topk = text.index_topk // getattr(text, "index_kpool", 1)
        self.batch_invariant, self.layers = batch_invariant, dict(layers)
        check_arrays(self.layers, torch.Tensor)
        for layer, rows in self.layers.items():
            check_form(layer, rows, self.topk, tuple(self.layers[selecting[0]].shape[:2]))

    def of(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Rows of a layer's tokens from `first` to before `last`."""
        return self.layers[layer][:, first:last]

    @torch.compiler.disable  # it looks at values
    def check(self, layer: int, seen: Seen, cache: Any) -> None:
        """Check all layers' rows, before any of them attends.

        Args:
            layer: The number of the first of them.
            seen: What the pass's tokens see.
            cache: That of the pass, or None.

        Raises:
            ArgumentError: Other tokens than the pass has; a token's keys are not those of a selection.
            UnsupportedError: There are keys before those of the pass's tokens.
        """
        if cache is not None and (before := int(cache.get_seq_length(layer))):
            raise UnsupportedError(f"selections: {before} tokens are cached, supported: none; pass use_cache=False")
        needed = seen.real & seen.follows
        for number, rows in self.layers.items():
            check_form(number, rows, self.topk, tuple(seen.counts.shape))
            check_rows(number, rows, seen.counts.to(rows.device), needed.to(rows.device))
