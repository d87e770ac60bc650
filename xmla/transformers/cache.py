"""A cache of latents as the kernels read them, which grows in place."""

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from xmla import torch_api as xt
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import V32
from xmla.transformers.selection import Keys, quantized

LEAST = 256  # tokens of a new array


class _Growing:
    """An array [B, capacity, ·] of which `length` tokens are written."""

    def __init__(self) -> None:
        self.array, self.length = torch.empty(0, 0, 0), 0

    def room(self, batch: int, tokens: int, row: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where so many more tokens are to be written: a view [B, tokens, row].

        Raises:
            ArgumentError: Tokens before were of another number of sequences.
        """
        if self.length and batch != len(self.array):
            raise ArgumentError(f"LatentCache: got {batch} sequences, expected {len(self.array)}, as before")
        first, self.length = self.length, self.length + tokens
        if self.length > self.array.shape[1]:
            capacity = -(-max(LEAST, self.length, self.length * 5 // 4) // LEAST) * LEAST
            larger = torch.zeros((batch, capacity, row), dtype=dtype, device=device)
            if first:
                larger[:, :first] = self.array[:, :first]
            self.array = larger
        return self.array[:, first : self.length]

    def add(self, rows: torch.Tensor) -> None:
        batch, tokens, row = rows.shape
        self.room(batch, tokens, row, rows.dtype, rows.device)[:] = rows

    def written(self) -> torch.Tensor:
        return self.array[:, : self.length]

    def select(self, sequences: torch.Tensor) -> None:
        if self.length:
            self.array = self.array.index_select(0, sequences.to(self.array.device))

    def to(self, device: torch.device | str) -> None:
        self.array = self.array.to(device, non_blocking=True)


class _LatentLayer(DynamicIndexedLayer):
    def __init__(self, entries: str | None, indexer_keys: str | None) -> None:
        super().__init__()
        self.entries, self.format_of_keys, self.latent = entries, indexer_keys, 0
        self._empty()

    def _empty(self) -> None:
        self.rows, self.of_indexer, self.scales = self.arrays = _Growing(), _Growing(), _Growing()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Have `keys` and `values` be what is written."""
        rows = self.rows.written()[:, None]
        keys, values = (rows, rows[..., :0]) if self.entries else rows.tensor_split([self.latent], -1)
        self.keys, self.values, self.indexer_keys = keys, values, self.of_indexer.written()
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise UnsupportedError("LatentCache: a gradient is recorded, which it has none of; pass use_cache=False")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _, tokens, self.latent = key_states.shape
        if self.entries:
            rows = self.rows.room(batch, tokens, V32.row, torch.uint8, key_states.device)
            self._write_entries(key_states, value_states, rows.shape[1])
        else:
            width = self.latent + value_states.shape[-1]
            rows = self.rows.room(batch, tokens, width, key_states.dtype, key_states.device)
            rows[..., : self.latent], rows[..., self.latent :] = key_states[:, 0], value_states[:, 0]
        return self._show()

    def _write_entries(self, latent: torch.Tensor, rope: torch.Tensor, tokens: int) -> None:
        array = self.rows.array
        batch, capacity, row = array.shape
        place = torch.arange(self.rows.length - tokens, self.rows.length, dtype=torch.int32, device=array.device)
        slots = torch.arange(batch, dtype=torch.int32, device=array.device)[:, None] * capacity + place
        pages = array.view(batch * capacity, 1, row)
        xt.write_mla_cache(latent.reshape(-1, V32.latent), rope.reshape(-1, V32.rope), slots.flatten(), pages)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> Any:
        """The keys so far, with scales if they have any."""
        keys = quantized(indexer_key_states) if self.format_of_keys else Keys(indexer_key_states)
        self.of_indexer.add(keys.values)
        if keys.scales is not None:
            self.scales.add(keys.scales[..., None])
        self.is_indexer_initialized = True
        self._show()
        scales = None if keys.scales is None else self.scales.written()[..., 0]
        return Keys(self.of_indexer.written(), scales)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop: tokens_to_remove is {tokens_to_remove}, expected minus the number of tokens")
        for each in self.arrays:
            each.length = max(0, each.length + tokens_to_remove)
        self._show()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for each in self.arrays:
            each.select(indices)
        self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows.length:
            batch = torch.arange(self.rows.array.shape[0], device=self.rows.array.device)
            self.batch_select_indices(batch.repeat_interleave(repeats))

    def offload(self) -> None:
        for each in self.arrays:
            each.to("cpu")
        self._show()

    def prefetch(self) -> None:
        for each in self.arrays:
            each.to(self.device)
        self._show()

    def reset(self) -> None:
        self._empty()
        super().reset()


def of_text(owner: str, config: Any) -> Any:
    """What a model's configuration says of its text.

    Raises:
        ArgumentError: It is no configuration.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ArgumentError(f"{owner}: config is {type(config).__name__}, expected a model's: model.config")
    return config.get_text_config(decoder=True)


class LatentCache(DynamicCache):
    """A cache for `attn_implementation="xmla"`: each layer's latents and rotated keys in one row, read where they lie.

    It grows by a quarter at a time, where transformers' own copies all rows for each new token.

    Args:
        config: The model's.
        entries: None: rows of the model's dtype. "fp8": the 656 bytes of DeepSeek-V3.2's entries, of which the latents
            are fp8 with a scale for each 128 dims, and the rotated keys bfloat16.
        indexer_keys: None: of the model's dtype. "fp8": e4m3 with a scale for each key, as DeepSeek-V3.2's indexer has
            them, 132 bytes instead of 256; queries are quantised, too.

    Raises:
        ArgumentError: `config` is no configuration; `entries` or `indexer_keys` is another word.
        UnsupportedError: The model caches no latents. Or its latents, rotated keys or indexer's keys have other sizes
            than the formats.
    """

    def __init__(self, config: Any, entries: str | None = None, indexer_keys: str | None = None) -> None:
        text = of_text("LatentCache", config)
        super().__init__(config=config)
        for name, word in (("entries", entries), ("indexer_keys", indexer_keys)):
            if word not in (None, "fp8"):
                raise ArgumentError(f"LatentCache: {name} is {word!r}, expected None or 'fp8'")
        windows = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.layers)
        if windows or not hasattr(text, "kv_lora_rank"):
            raise UnsupportedError(
                f"LatentCache: layers of {text.model_type} cache no latents, supported: "
                "DynamicCache(config=model.config)"
            )
        if entries and (text.kv_lora_rank, text.qk_rope_head_dim) != (V32.latent, V32.rope):
            raise UnsupportedError(
                f"LatentCache: the model has latents of {text.kv_lora_rank} and {text.qk_rope_head_dim} dims, entries "
                f"of fp8 have {V32.latent} and {V32.rope}"
            )
        if entries and 0 in (getattr(text, "no_rope_layers", None) or ()):
            raise UnsupportedError("LatentCache: the model has layers without rotated keys, entries of fp8 have them")
        if indexer_keys and text.index_head_dim not in INDEXER_DIMS:
            raise UnsupportedError(
                f"LatentCache: the indexer's keys have {text.index_head_dim} dims, those of fp8 have 32, 64 or 128"
            )
        if indexer_keys and hasattr(text, "index_kpool"):
            raise UnsupportedError("LatentCache: the indexer's keys are pooled by gates, those of fp8 have none")
        layer_of = partial(_LatentLayer, entries, indexer_keys)
        self.layers = [layer_of() if isinstance(layer, DynamicLayer) else layer for layer in self.layers]
