"""The layers of a checkpoint, from what its config.json says; no framework is imported."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from xmla.core.errors import ArgumentError, UnsupportedError, did_you_mean
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.models.base import Model
from xmla.core.models.glm_flash import ModelConfigGlmFlash
from xmla.core.models.mistral_large4 import ModelConfigMistralLarge4
from xmla.core.models.published import PUBLISHED
from xmla.core.models.v4 import RATIOS, ModelConfigV4
from xmla.core.models.v32 import ModelConfig
from xmla.core.models.v41 import ModelConfigV41
from xmla.core.values import Attr

ROPE_DIMS = 64
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)  # keys of a block that is selected whole
Sizes = dict[str, Callable[[], Any]]  # read where no keyword stands for them


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The fields of a config.json that are of the text model."""

    model_type: str
    fields: Mapping[str, Any]

    def refuse(self, name: str, expected: str) -> NoReturn:
        value = self.fields.get(name)
        got = "missing" if value is None else repr(value)
        raise UnsupportedError(f"model_config: {name} of {self.model_type} is {got}, expected {expected}")

    def count(self, name: str, least: int = 1) -> int:
        """A number of things, of which there are at least so many."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, f"a number from {least}")
        return value

    def one_of(self, name: str, served: tuple[int, ...]) -> int:
        """A number of those that ops serve."""
        value = self.count(name)
        if value not in served:
            self.refuse(name, f"{', '.join(map(str, served[:-1]))} or {served[-1]}")
        return value

    def expect(self, name: str, only: int | bool, absent: int | bool | None = None) -> None:
        """Refuse another value than `only`; a field that is not there counts as `absent`."""
        if self.fields.get(name, absent) != only:
            self.refuse(name, str(only))

    def latents(self, rope: int = ROPE_DIMS) -> None:
        """Refuse latents, which all heads share, of other dims than caches have."""
        self.expect("kv_lora_rank", VALUE_DIMS)
        self.expect("qk_rope_head_dim", rope)

    def ratios(self, known: tuple[int, int]) -> tuple[int, int]:
        """The numbers of tokens an entry, `known`. Others are refused, but 0, of layers with a window alone."""
        name = "compress_rates" if self.fields.get("compress_rates") else "compress_ratios"
        rates = self.fields.get(name)
        listed = [*rates.values()] if isinstance(rates, Mapping) else rates
        if not isinstance(listed, list | tuple) or any(rate not in (0, *known) for rate in listed):
            self.refuse(name, f"0, {' or '.join(map(str, known))} tokens an entry in each layer")
        return known

    def softmax_scale(self) -> float:
        """The scale of queries with roped dims and others, times the square of YaRN's factor where rope has one."""
        scale = (self.count("qk_nope_head_dim") + self.count("qk_rope_head_dim", 0)) ** -0.5
        name = "rope_scaling" if self.fields.get("rope_scaling") else "rope_parameters"  # as transformers takes them
        rope = self.fields.get(name) or {}
        if not isinstance(rope, Mapping):
            self.refuse(name, "an object")
        rope = rope.get("indexed_attention", rope)
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            self.refuse(name, "one rope, or that of indexed_attention")
        kind, all_dims = rope.get("rope_type") or rope.get("type") or "default", rope.get("mscale_all_dim")
        if kind == "default" or not all_dims:
            return scale
        longer = rope.get("factor")
        if not isinstance(all_dims, int | float) or not isinstance(longer, int | float):
            self.refuse(name, "numbers as factor and mscale_all_dim")
        yarn = 0.1 * all_dims * math.log(longer) + 1.0 if longer > 1 else 1.0
        return scale * yarn * yarn

    def sizes(self) -> Sizes:
        """The sizes that every model has."""
        return {
            "heads": partial(self.count, "num_attention_heads"), "index_heads": partial(self.count, "index_n_heads"),
            "index_dim": partial(self.one_of, "index_head_dim", INDEXER_DIMS), "k": partial(self.count, "index_topk"),
            "max_lens": lambda: (self.count("max_position_embeddings"),),
        }  # fmt: skip

    def shares_selections(self) -> bool:
        """Whether a layer attends to the selection of an earlier one."""
        for name in ("indexer_types", "index_topk_pattern"):
            if kinds := self.fields.get(name):
                every, shared = ("F", "S") if isinstance(kinds, str) else ("full", "shared")
                if not isinstance(kinds, str | list | tuple) or any(kind not in (every, shared) for kind in kinds):
                    self.refuse(name, f"the kind of each layer, {every} or {shared}")
                return shared in kinds
        return self.fields.get("index_topk_freq") is not None and self.count("index_topk_freq", 0) > 1


def one_by_one(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    """Keys are selected one by one: V3.2, A.X-K2, the layers of dots3 that select."""
    checkpoint.latents()
    return ModelConfig, {**checkpoint.sizes(), "softmax_scale": checkpoint.softmax_scale}


def glm(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    model, sizes = one_by_one(checkpoint)
    return model, {**sizes, "shared_selection": checkpoint.shares_selections}


def hy4(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    """Hy4's layers share selections also where `indexer_types` is left out, and each head has a sink."""
    model, sizes = one_by_one(checkpoint)
    return model, {**sizes, "shared_selection": lambda: True, "sink": lambda: True}


def mistral_large4(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    _, sizes = one_by_one(checkpoint)
    return ModelConfigMistralLarge4, sizes


def glm_flash(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    checkpoint.latents(rope=0)
    checkpoint.expect("index_kpool_always_select_tail", True, absent=True)
    sizes = {**checkpoint.sizes(), "pool": partial(checkpoint.one_of, "index_kpool", BLOCKS)}
    return ModelConfigGlmFlash, {**sizes, "softmax_scale": checkpoint.softmax_scale}


def v4(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    sizes = two_sources(checkpoint)
    checkpoint.ratios(RATIOS)
    return ModelConfigV4, sizes


def v41(checkpoint: Checkpoint) -> tuple[type[Model], Sizes]:
    return ModelConfigV41, two_sources(checkpoint) | {
        "ratios": partial(checkpoint.ratios, (1, 2)), "blocks": partial(checkpoint.count, "candidate_topk_blocks"),
        "granularity": partial(checkpoint.one_of, "candidate_block_size", BLOCKS),
    }  # fmt: skip


def two_sources(checkpoint: Checkpoint) -> Sizes:
    checkpoint.expect("head_dim", VALUE_DIMS)
    checkpoint.expect("qk_rope_head_dim", ROPE_DIMS)
    return {
        **checkpoint.sizes(), "window": partial(checkpoint.count, "sliding_window"),
        "softmax_scale": lambda: VALUE_DIMS**-0.5,
    }  # fmt: skip


def grouped_queries(checkpoint: Checkpoint) -> NoReturn:
    """Keys and values of heads, where attention here is to one latent that all heads share."""
    checkpoint.refuse("num_key_value_heads", "a latent that all heads share (kv_lora_rank)")


# By the model_type of a config.json; that of its text_config ends in _text.
FAMILIES: dict[str, Callable[[Checkpoint], tuple[type[Model], Sizes]]] = {
    "axk2": one_by_one,
    "deepseek_v32": one_by_one,
    "deepseek_v4": v4,
    "deepseek_v41": v41,
    "dots3_note": one_by_one,
    "glm5_next": glm_flash,
    "glm_moe_dsa": glm,
    "hy_v4": hy4,
    "hy_v4_vl": hy4,
    "minimax_m3_vl": grouped_queries,
    "mistral_large4": mistral_large4,
    "qwen4_exp": grouped_queries,
}


def model_config(config: Any, *, tensor_parallel: int = 1, **sizes: Any) -> Model:
    """The layers of a checkpoint as one rank serves them, for `warmup` and the command.

        xmla.warmup(xmla.model_config("DeepSeek-V4-Flash/config.json", tensor_parallel=8, next_n=(1, 4)))

    Args:
        config: A config.json or the folder that has it, what it holds as a dict, a config of transformers, or the name
            of a released model, as `xmla plan --model` takes it. No framework is imported.
        tensor_parallel: Ranks that divide the query heads; each has all heads of the indexer.
        sizes: Fields of the class instead of what the checkpoint says, or of the class's own: `batches`, `max_lens`,
            `next_n`, `cache_format`, …. What they stand for is not read, and may be missing.

    Returns:
        A `ModelConfig`, `ModelConfigV4`, `ModelConfigV41`, `ModelConfigGlmFlash` or `ModelConfigMistralLarge4`; what
            the checkpoint does not say is by the class's default. The longest of `max_lens` is the model's.

    Raises:
        ArgumentError: There is no such file or model; the file is no config.json; heads cannot be divided so; the class
            has no field of a name in `sizes`.
        UnsupportedError: Ops do not serve the model; the message names the field.
    """
    checkpoint = read(config)
    family = checkpoint.model_type.removesuffix("_text")
    if family not in FAMILIES:
        served = [name for name, described in FAMILIES.items() if described is not grouped_queries]
        message = f"model_config: model_type is {checkpoint.model_type!r}, expected one of {', '.join(served)}"
        raise ArgumentError(message + did_you_mean(family, served))
    model, read_sizes = FAMILIES[family](checkpoint)
    names = [field.name for field in fields(model)]
    for name in sizes:
        if name not in names:
            expected = f"a field of {model.__name__}: {', '.join(names)}"
            raise ArgumentError(f"model_config: got {name}, expected {expected}{did_you_mean(name, names)}")
    said = {name: read_size() for name, read_size in read_sizes.items() if name not in sizes}
    ranks = Attr("tensor_parallel", int, False, None).plain("model_config", tensor_parallel)
    if "heads" in said:
        heads = said["heads"]
        if ranks < 1 or heads % ranks:
            raise ArgumentError(f"model_config: tensor_parallel value is {ranks}, expected a divisor of {heads} heads")
        said["heads"] = heads // ranks
    elif ranks != 1:
        raise ArgumentError("model_config: got tensor_parallel and heads, expected one of them")
    return model(**said, **sizes)


def read(config: Any) -> Checkpoint:
    """What a config says of its text model.

    Raises:
        ArgumentError: There is no such file or model; the file is no config.json.
    """
    values = contents(config)
    text = values.get("text_config") or {}
    text = text if isinstance(text, Mapping) else contents(text)
    types = [each for each in (values.get("model_type"), text.get("model_type")) if each]
    known = (each for each in types if isinstance(each, str) and each.removesuffix("_text") in FAMILIES)
    model_type = next(known, types[0] if types else None)
    if not isinstance(model_type, str):
        raise ArgumentError("model_config: config has no model_type, expected what a checkpoint's config.json holds")
    return Checkpoint(model_type, text or values)


def contents(config: Any) -> Mapping[str, Any]:
    """The fields of a config, of any of the kinds that `model_config` takes."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        if not callable(getattr(config, "to_dict", None)):
            expected = "a config.json, the folder of a checkpoint, a dict, a config of transformers or a model's name"
            raise ArgumentError(f"model_config: config is {type(config).__name__}, expected {expected}")
        return config.to_dict()
    if config in PUBLISHED:
        return PUBLISHED[config].fields
    file = Path(config)
    if file.is_dir():
        file /= "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError:
        expected = f"a config.json, the folder that has one, or one of {', '.join(PUBLISHED)}"
        message = f"model_config: config is {os.fspath(config)!r}, expected {expected}"
        raise ArgumentError(message + did_you_mean(str(config), PUBLISHED)) from None
    except ValueError as error:
        raise ArgumentError(f"model_config: {file} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"model_config: {file} holds {type(values).__name__}, expected an object")
    return values
