"""`model_config` of released checkpoints' config.json, and of every configuration in transformers that has an indexer.

The numbers are those of the checkpoints, whose config.json is named, not the defaults of a class.
"""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import EVERYTHING

from xmla import ArgumentError, ModelConfig, UnsupportedError, model_config
from xmla.core.models.base import Model
from xmla.core.models.calls import specializations
from xmla.core.models.glm_flash import ModelConfigGlmFlash
from xmla.core.models.mistral_large4 import ModelConfigMistralLarge4
from xmla.core.models.published import PUBLISHED
from xmla.core.models.v4 import ModelConfigV4
from xmla.core.models.v41 import ModelConfigV41
from xmla.core.values import H200

YARN = {
    "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
}  # fmt: skip
# https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/config.json
V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rope_theta": 10000, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
# https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/config.json
V4_PRO: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "head_dim": 512, "hidden_size": 7168,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 1024, "max_position_embeddings": 1048576,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "rope_scaling": YARN, "rope_theta": 10000, "sliding_window": 128,
    "compress_rope_theta": 160000, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip
# https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash/blob/main/config.json
V4_FLASH = {
    **V4_PRO, "hidden_size": 4096, "index_topk": 512, "num_attention_heads": 64, "num_hidden_layers": 43,
    "q_lora_rank": 1024, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip
# https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash/blob/main/config.json
V41 = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": {
        "model_type": "deepseek_v41_text", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 1048576,
        "rope_theta": 10000, "rope_scaling": YARN, "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0], "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    },
}  # fmt: skip
# https://huggingface.co/zai-org/GLM-5/blob/main/config.json
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144, "head_dim": 64,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}  # fmt: skip
# https://huggingface.co/zai-org/GLM-5.2/blob/main/config.json
GLM52 = {
    **GLM5, "head_dim": 192, "index_skip_topk_offset": 3, "index_topk_freq": 4, "index_topk_pattern": None,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
    "max_position_embeddings": 1048576, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}  # fmt: skip
# https://huggingface.co/zai-org/GLM-5.3-Flash/blob/main/config.json
GLM53_FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": {
        "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "index_topk": 2048, "index_kpool": 4, "index_n_heads": 32, "index_head_dim": 128,
        "max_position_embeddings": 1048576,
    },
}  # fmt: skip
# https://huggingface.co/tencent/Hy4-preview/blob/main/config.json
HY4 = {
    "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "max_position_embeddings": 1048576, "indexer_types": ["full"] + (["full"] + ["shared"] * 3) * 19 + ["full"],
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "num_nextn_predict_layers": 1,
}  # fmt: skip
# https://huggingface.co/mistralai/Mistral-Large-4-1T-A52B/blob/main/config.json
MISTRAL_LARGE4 = {
    "model_type": "mistral_large4", "text_config": {
        "model_type": "mistral_large4_text", "hidden_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64,
        "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 32, "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_type": "yarn", "factor": 2048.0, "attention_factor": 1.0},
    },
}  # fmt: skip
LATENT = {"index_dim": 128, "k": 2048}
MILLION = (1048576,)
# By the name that the command takes: config.json, the class, and its fields.
RELEASED: dict[str, tuple[dict[str, Any], type[Model], dict[str, Any]]] = {
    "deepseek_v32": (V32, ModelConfig, {
        **LATENT, "heads": 128, "index_heads": 64, "max_lens": (163840,), "shared_selection": False, "sink": False,
    }),
    "deepseek_v4": (V4_PRO, ModelConfigV4, {
        "heads": 128, "index_heads": 64, "index_dim": 128, "k": 1024, "window": 128, "softmax_scale": 512**-0.5,
        "max_lens": MILLION,
    }),
    "deepseek_v4_flash": (V4_FLASH, ModelConfigV4, {
        "heads": 64, "index_heads": 64, "index_dim": 128, "k": 512, "window": 128, "softmax_scale": 512**-0.5,
        "max_lens": MILLION,
    }),
    "deepseek_v41": (V41, ModelConfigV41, {
        "heads": 64, "index_heads": 32, "index_dim": 128, "k": 512, "window": 128, "softmax_scale": 512**-0.5,
        "blocks": 2048, "granularity": 8, "ratios": (1, 2), "max_lens": MILLION,
    }),
    "glm5": (GLM5, ModelConfig, {
        **LATENT, "heads": 64, "index_heads": 32, "softmax_scale": 256**-0.5, "shared_selection": False, "sink": False,
        "max_lens": (202752,),
    }),
    "glm_moe_dsa": (GLM52, ModelConfig, {
        **LATENT, "heads": 64, "index_heads": 32, "softmax_scale": 256**-0.5, "shared_selection": True, "sink": False,
        "max_lens": MILLION,
    }),
    "glm5_next": (GLM53_FLASH, ModelConfigGlmFlash, {
        **LATENT, "heads": 64, "index_heads": 32, "pool": 4, "softmax_scale": 256**-0.5, "max_lens": MILLION,
    }),
    "hy_v4": (HY4, ModelConfig, {
        **LATENT, "heads": 64, "index_heads": 32, "softmax_scale": 256**-0.5, "shared_selection": True, "sink": True,
        "max_lens": MILLION,
    }),
    "mistral_large4": (MISTRAL_LARGE4, ModelConfigMistralLarge4, {
        **LATENT, "heads": 64, "index_heads": 32, "softmax_scale": 128**-0.5, "max_lens": MILLION,
    }),
}  # fmt: skip


def test_every_name_is_of_a_released_checkpoint() -> None:
    assert PUBLISHED.keys() == RELEASED.keys()


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_checkpoint(name: str, tmp_path: Path) -> None:
    """By its name, as a dict, as a config.json and as the folder that has it."""
    config, model, sizes = RELEASED[name]
    mine = model_config(config)
    assert type(mine) is model
    assert {field: getattr(mine, field) for field in sizes} == sizes
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert model_config(name) == model_config(file) == model_config(str(tmp_path)) == mine


def test_the_softmax_scale_has_yarns_factor() -> None:
    """In the order in which engines multiply; by V3.2's, 0.1 ln 40 + 1, with `mscale_all_dim` alone."""
    mine = model_config(V32)
    assert isinstance(mine, ModelConfig) and mine.softmax_scale == ModelConfig().softmax_scale
    for change, scale in (
        ({"rope_scaling": None}, 192**-0.5),
        ({"rope_scaling": {**V32["rope_scaling"], "mscale_all_dim": 0}}, 192**-0.5),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}}, 192**-0.5),
        ({"rope_scaling": {**V32["rope_scaling"], "factor": 1}}, 192**-0.5),
    ):
        assert model_config(V32 | change).softmax_scale == scale, change


def test_rope_is_that_of_the_layers_that_select_and_of_the_field_that_transformers_takes() -> None:
    """Of both fields transformers takes `rope_scaling`; per kind of layer there is one of those with an indexer."""
    yarn, own = {**V32["rope_scaling"], "rope_type": "yarn"}, {"rope_type": "default", "rope_theta": 10000}
    scale = model_config(V32).softmax_scale
    for change, want in (
        ({"rope_parameters": own}, scale),
        ({"rope_scaling": own, "rope_parameters": yarn}, 192**-0.5),
        ({"rope_scaling": {}, "rope_parameters": yarn}, scale),
        ({"rope_scaling": None, "rope_parameters": {"indexed_attention": yarn, "sliding_attention": own}}, scale),
        ({"rope_scaling": None, "rope_parameters": {"indexed_attention": own, "sliding_attention": yarn}}, 192**-0.5),
    ):
        assert model_config(V32 | change).softmax_scale == want, change


def test_the_text_of_a_model_of_several_parts() -> None:
    """Its own type counts where that of the whole is no known one."""
    assert model_config({"model_type": "seeing_v9", "text_config": V32}) == model_config(V32)


def test_a_rank_has_its_share_of_the_heads_and_all_of_the_indexers() -> None:
    mine = model_config(V4_PRO, tensor_parallel=8, next_n=(1, 4), batches=[64], cache_format="plain_v4")
    assert mine == ModelConfigV4(heads=16, next_n=(1, 4), batches=(64,), cache_format="plain_v4", max_lens=MILLION)


def test_layers_that_share_selections() -> None:
    """By whichever field says it."""
    for change, shared in (
        ({}, False), ({"index_topk_freq": 1}, False), ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, True),
        ({"index_topk_pattern": "FSSF"}, True), ({"index_topk_pattern": "FFF"}, False),
        ({"index_topk_pattern": ["full", "shared"]}, True), ({"index_topk_freq": None}, False),
        ({"indexer_types": ["full", "shared"]}, True), ({"indexer_types": ["full"] * 2, "index_topk_freq": 4}, False),
    ):  # fmt: skip
        assert model_config(GLM5 | change).shared_selection is shared, change


# Of vLLM's graphs and of recipes: tokens of MTP's and DSpark's drafts and one more, and contexts.
REQUESTS, NEXT_N, CONTEXTS = (1, 24, 272, 496, 512), (1, 3, 4, 6, 8), (65536, 250_000, 1048576)
SERVED = RELEASED if EVERYTHING else ("deepseek_v32", "glm5_next")


@pytest.mark.parametrize("name", SERVED)
def test_warm_up_of_a_name_has_what_engines_launch(name: str) -> None:
    model = model_config(name)
    listed = set(model.specializations(H200))
    for requests, next_n, context in product(REQUESTS, NEXT_N, CONTEXTS):
        calls = model.decode(requests, next_n, min(context, max(model.max_lens)))
        missing = set(specializations(calls, H200)) - listed
        assert not missing, (requests, next_n, context, missing.pop())


KNOWN = (
    "axk2, deepseek_v32, deepseek_v4, deepseek_v41, dots3_note, glm5_next, glm_moe_dsa, hy_v4, hy_v4_vl, mistral_large4"
)
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (V32, {"kv_lora_rank": 128}, UnsupportedError, "kv_lora_rank of deepseek_v32 is 128, expected 512"),
    (V32, {"qk_rope_head_dim": 32}, UnsupportedError, "qk_rope_head_dim of deepseek_v32 is 32, expected 64"),
    (V32, {"index_topk": None}, UnsupportedError, "index_topk of deepseek_v32 is missing, expected a number from 1"),
    (V32, {"index_topk": 0}, UnsupportedError, "index_topk of deepseek_v32 is 0, expected a number from 1"),
    (V32, {"index_n_heads": True}, UnsupportedError, "index_n_heads of deepseek_v32 is True, expected a number from 1"),
    (V32, {"index_head_dim": 96}, UnsupportedError, "index_head_dim of deepseek_v32 is 96, expected 32, 64 or 128"),
    (V4_PRO, {"index_head_dim": 256}, UnsupportedError, "index_head_dim of deepseek_v4 is 256, expected 32, 64 or 128"),
    (V4_PRO, {"head_dim": 256}, UnsupportedError, "head_dim of deepseek_v4 is 256, expected 512"),
    (V4_PRO, {"compress_ratios": [0, 4, 64]}, UnsupportedError,
     "compress_ratios of deepseek_v4 is [0, 4, 64], expected 0, 4 or 128 tokens an entry in each layer"),
    (V4_PRO, {"compress_ratios": None}, UnsupportedError,
     "compress_ratios of deepseek_v4 is missing, expected 0, 4 or 128 tokens an entry in each layer"),
    (V4_PRO, {"compress_rates": {"compressed_sparse_attention": 8}}, UnsupportedError,
     "compress_rates of deepseek_v4 is {'compressed_sparse_attention': 8}, expected 0, 4 or 128 tokens an entry"),
    (V4_PRO, {"compress_ratios": 4}, UnsupportedError,
     "compress_ratios of deepseek_v4 is 4, expected 0, 4 or 128 tokens an entry in each layer"),
    (V4_PRO, {"compress_ratios": [[4]]}, UnsupportedError,
     "compress_ratios of deepseek_v4 is [[4]], expected 0, 4 or 128 tokens an entry in each layer"),
    (V32, {"rope_scaling": "yarn"}, UnsupportedError, "rope_scaling of deepseek_v32 is 'yarn', expected an object"),
    (V32, {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, UnsupportedError,
     "rope_parameters of deepseek_v32 is {'rope_type': 'yarn', 'mscale_all_dim': 1.0}, expected numbers as factor "),
    (V32, {"rope_scaling": {"full_attention": {"rope_type": "yarn"}}}, UnsupportedError,
     "rope_scaling of deepseek_v32 is {'full_attention': {'rope_type': 'yarn'}}, expected one rope, or that of "
     "indexed_attention"),
    (GLM5, {"index_topk_pattern": 4}, UnsupportedError,
     "index_topk_pattern of glm_moe_dsa is 4, expected the kind of each layer"),
    (GLM5, {"indexer_types": {"0": "full"}}, UnsupportedError,
     "indexer_types of glm_moe_dsa is {'0': 'full'}, expected the kind of each layer"),
    (GLM5, {"indexer_types": ["full", "reused"]}, UnsupportedError,
     "indexer_types of glm_moe_dsa is ['full', 'reused'], expected the kind of each layer, full or shared"),
    (GLM5, {"index_topk_pattern": "FFR"}, UnsupportedError,
     "index_topk_pattern of glm_moe_dsa is 'FFR', expected the kind of each layer, F or S"),
    (GLM5, {"index_topk_freq": "4"}, UnsupportedError,
     "index_topk_freq of glm_moe_dsa is '4', expected a number from 0"),
    (V41["text_config"], {"candidate_block_size": None}, UnsupportedError,
     "candidate_block_size of deepseek_v41_text is missing, expected a number from 1"),
    (V41["text_config"], {"candidate_block_size": 12}, UnsupportedError,
     "candidate_block_size of deepseek_v41_text is 12, expected 1, 2, 4, 8, 16, 32, 64 or 128"),
    (GLM53_FLASH["text_config"], {"index_kpool": 3}, UnsupportedError,
     "index_kpool of glm5_next_text is 3, expected 1, 2, 4, 8, 16, 32, 64 or 128"),
    (GLM53_FLASH["text_config"], {"qk_rope_head_dim": 64}, UnsupportedError,
     "qk_rope_head_dim of glm5_next_text is 64, expected 0"),
    (GLM53_FLASH["text_config"], {"index_kpool_always_select_tail": False}, UnsupportedError,
     "index_kpool_always_select_tail of glm5_next_text is False, expected True"),
    ({"model_type": "minimax_m3_vl", "text_config": {"num_key_value_heads": 4}}, {}, UnsupportedError,
     "num_key_value_heads of minimax_m3_vl is 4, expected a latent that all heads share (kv_lora_rank)"),
    (V32, {"model_type": "deepseek_v3"}, ArgumentError,
     f"model_type is 'deepseek_v3', expected one of {KNOWN}; did you mean deepseek_v32 or "),
    (V32, {"model_type": None}, ArgumentError,
     "config has no model_type, expected what a checkpoint's config.json holds"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "error", "message"), REFUSALS, ids=lambda part: str(part)[:40])
def test_refusals_name_the_field(
    config: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^model_config: {re.escape(message)}"):
        model_config(config | change)


# What a keyword says in place of a field, where the class has one.
KEYWORDS = {
    "num_attention_heads": "heads", "index_n_heads": "index_heads", "index_head_dim": "index_dim", "index_topk": "k",
    "max_position_embeddings": "max_lens", "qk_nope_head_dim": "softmax_scale", "sliding_window": "window",
    "index_kpool": "pool", "candidate_topk_blocks": "blocks", "candidate_block_size": "granularity",
    "index_topk_freq": "shared_selection", "compress_ratios": "ratios",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_keyword_stands_for_a_field(name: str) -> None:
    """That is missing or that nobody can read."""
    config, model = PUBLISHED[name].fields, model_config(name)
    replaced = {field: KEYWORDS[field] for field in config if hasattr(model, KEYWORDS.get(field, ""))}
    assert len(replaced) >= 6
    for unread in ({}, dict.fromkeys(replaced, "1M")):
        rest = {field: value for field, value in config.items() if field not in replaced}
        given = {keyword: getattr(model, keyword) for keyword in replaced.values()}
        assert model_config(rest | unread, **given) == model
    for field, keyword in replaced.items():
        rest = {other: value for other, value in config.items() if other != field}
        assert model_config(rest, **{keyword: getattr(model, keyword)}) == model, field


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "none.json").write_text("{")
    files = f"expected a config.json, the folder that has one, or one of {', '.join(PUBLISHED)}"
    for config, options, message in (
        (V32, {"tensor_parallel": 3}, "tensor_parallel value is 3, expected a divisor of 128 heads"),
        (V32, {"tensor_parallel": 0}, "tensor_parallel value is 0, expected a divisor of 128 heads"),
        (V32, {"tensor_parallel": 2.0}, "tensor_parallel type is float, expected int"),
        (V32, {"tensor_parallel": 2, "heads": 8}, "got tensor_parallel and heads, expected one of them"),
        (V32, {"softmax_scal": 1.0}, "got softmax_scal, expected a field of ModelConfig: next_n, mixed, "),
        (V4_PRO, {"ranks": 2}, "got ranks, expected a field of ModelConfigV4: next_n, mixed, "),
        ("deepseek_v5", {}, f"config is 'deepseek_v5', {files}; did you mean deepseek_v"),
        (tmp_path, {}, f"config is '{tmp_path}', {files}"),
        (tmp_path / "list.json", {}, f"{tmp_path}/list.json holds list, expected an object"),
        (tmp_path / "none.json", {}, f"{tmp_path}/none.json is no JSON: "),
        (7, {}, "config is int, expected a config.json, the folder of a checkpoint, a dict, a config of "),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"^model_config: {re.escape(message)}"):
            model_config(config, **options)


def configurations() -> Iterator[tuple[str, Any]]:
    """Every configuration of transformers that has fields of an indexer, itself or in its text model's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def has_indexer(config: Any) -> bool:
        return any(field.startswith(("index_", "indexer_")) for field in getattr(config, "__dataclass_fields__", ()))

    for model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_type]
        text = (getattr(config, "sub_configs_defaults", None) or {}).get("text_config")
        if has_indexer(config) or has_indexer(text):
            yield model_type, config


OTHER_INDICES = {"rag"}  # of documents
GROUPED = "num_key_value_heads of {} is .*, expected a latent that all heads share"
# The class of a configuration with its own defaults, or the refusal.
OF_TRANSFORMERS: dict[str, type[Model] | str] = {
    "axk2": "kv_lora_rank of axk2 is 128, expected 512",  # A.X-K2-Light's
    "deepseek_v32": ModelConfig,
    "deepseek_v4": ModelConfigV4,
    "dots3_note": ModelConfig,
    "glm5_next": ModelConfigGlmFlash,
    "glm_moe_dsa": ModelConfig,
    "hy_v4": ModelConfig,
    "hy_v4_vl": ModelConfig,
    "minimax_m3_vl": GROUPED,
    "mistral_large4": ModelConfigMistralLarge4,
    "qwen4_exp": GROUPED,
}


def test_every_configuration_of_transformers_with_an_indexer_is_known() -> None:
    """A model of a new release is added to `FAMILIES`, which serves it or refuses it by a field, and here."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    seen = set()
    for model_type, configuration in configurations():
        if model_type in OTHER_INDICES:
            continue
        family = model_type.removesuffix("_text")
        assert family in OF_TRANSFORMERS, f"transformers' {model_type} has an indexer: {configuration.__name__}"
        seen.add(family)
        config, want = configuration(), OF_TRANSFORMERS[family]
        if isinstance(want, str):
            with pytest.raises(UnsupportedError, match=want.format(model_type)):
                model_config(config)
            continue
        mine, text = model_config(config), getattr(config, "text_config", config).to_dict()
        assert type(mine) is want and mine == model_config(config.to_dict()), model_type
        assert (mine.heads, mine.index_heads, mine.index_dim, mine.k, mine.max_lens) == (
            text["num_attention_heads"], text["index_n_heads"], text["index_head_dim"], text["index_topk"],
            (text["max_position_embeddings"],),
        ), model_type  # fmt: skip
        shared = "shared" in (text.get("indexer_types") or ())
        assert getattr(mine, "shared_selection", shared) is shared, model_type
    assert {"deepseek_v32", "deepseek_v4", "glm_moe_dsa"} <= seen


WITHOUT_FRAMEWORKS = """
import sys
for name in ("torch", "jax", "jaxlib", "jax_triton", "transformers"):
    sys.modules[name] = None
import xmla
print(xmla.model_config(sys.argv[1], tensor_parallel=2).heads)
"""


def test_a_config_needs_no_framework(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V41))
    words = [sys.executable, "-c", WITHOUT_FRAMEWORKS, str(tmp_path)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.stdout == "32\n", done.stderr


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    (tmp_path / "config.json").write_text(json.dumps(V41), encoding="utf-8-sig")
    assert model_config(tmp_path) == model_config(V41)
