"""Small random models of transformers that xmla serves, and what they are given."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    PixtralVisionConfig,
)

from tools.environment import EVERYTHING

LAYERS = 3
TOKENS = 25  # of a text; what each of them takes is most of a test
DOCUMENT = 13  # tokens of the first of two that are packed: either has more than are selected
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 128,
    "index_topk": 8, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
DENSE = {"mlp_layer_types": ["dense"] * LAYERS}
OF_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"q_lora_rank": 32, "first_k_dense_replace": LAYERS},
    "glm_moe_dsa": {"q_lora_rank": 32, "indexer_types": ["full", "shared", "full"]} | DENSE,
    "hy_v4": {"q_lora_rank": 32, "indexer_types": ["full", "full", "shared"]} | DENSE,
    "mistral_large4_text": {"no_rope_layers": [1, 0, 1], "indexer_types": ["full"] * LAYERS} | DENSE,
}
KEYED = tuple(OF_TYPE)  # models whose indexers score keys of tokens
OF_TYPE["deepseek_v4"] = {
    "moe_intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 32, "mlp_layer_types": ["hash_moe"] * LAYERS, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "hc_mult": 2,
    "sliding_window": 8, "index_topk": 4,
}  # fmt: skip
OF_TYPE["glm5_next_text"] = {
    "q_lora_rank": 32, "qk_rope_head_dim": 0, "index_kpool": 4, "index_topk": 16, "linear_num_heads": 2,
    "linear_head_dim": 16,
    "layer_types": ["indexed_attention", "indexed_attention", "linear_attention"], "hc_mult": 2,
    "indexer_types": ["full", "shared", "full"],
} | DENSE  # fmt: skip


def pairs[Way](kinds: Sequence[str], ways: Sequence[Way]) -> list[tuple[str, Way]]:
    """Kinds of models and ways to call them: all pairs of them by XMLA_ALL, elsewhere fewer of kinds that score keys.

    These share the code of masks, caches and parts, and differ in what is read from their modules. So the first of them
    has every way, each of the others one or two, and the models of entries and pools have all.
    """
    return [
        (kind, way)
        for number, kind in enumerate(kinds)
        for place, way in enumerate(ways)
        if EVERYTHING or kind not in KEYED[1:] or (place - number) % min(len(ways), len(KEYED)) == 0
    ]


HOW = ("none", "left", "right", "packed")  # sequences are padded


def build(kind: str, device: str, **changes: Any) -> Any:
    """A small random model in bfloat16."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SIZES | OF_TYPE[kind] | changes)
    if kind == "mistral_large4_text":  # whose class has a part for pictures
        seeing = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = MistralLarge4Config(
            text_config=config.to_dict(), vision_config=PixtralVisionConfig(**seeing).to_dict()
        )
        return attending(
            MistralLarge4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).to(device).eval()
        )
    if kind == "glm5_next_text":  # likewise
        seeing = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        config = Glm5NextConfig(text_config=config.to_dict(), vision_config=seeing)
        model = Glm5NextForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise(model)
    return attending(model.to(device).eval())


def randomise(model: Any) -> None:
    """Draw what is initialised to zeros, so that leaving it out gives another result; experts are those of a token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "compress_ape")):
                parameter.normal_()
            elif name.endswith("compress_gate"):
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(4)


def attending(model: Any, implementation: str = "xmla") -> Any:
    """The model with another attention of its text."""
    parts = {"text_config": implementation}
    model.set_attn_implementation(parts if "text_config" in model.config.sub_configs else implementation)
    return model


def first_layer(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))


def text(device: str, sequences: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (sequences, tokens), device=device)


def padded(tokens: torch.Tensor, how: str) -> dict[str, Any]:
    """A mask, or positions, of sequences of which the first is shorter, or two."""
    mask, length = torch.ones_like(tokens), tokens.shape[1]
    if how == "left":
        mask[0, :9] = 0
    elif how == "right":
        mask[0, -9:] = 0
    elif how == "packed":
        place = torch.arange(length, device=tokens.device)
        return {
            "position_ids": torch.where(place < DOCUMENT, place, place - DOCUMENT).expand_as(tokens),
            "use_cache": False,
        }
    return {"attention_mask": mask} if how != "none" else {}


def distance(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> float:
    return float((a - b)[where].norm() / b[where].norm())


def assert_as_near(model: Any, exact: Any, eager: Any, part: str = "") -> None:
    """Assert that gradients of a model's part are about as near to those in float32 as eager attention's are.

    Both have other roundings, by which a weight's distances differ 1.5 times at random.
    """
    for (name, ours), theirs, others in zip(
        model.named_parameters(), exact.parameters(), eager.parameters(), strict=True
    ):
        if theirs.grad is not None and part in name:
            everything = torch.ones_like(theirs).bool()
            errors = [distance(each.grad.float(), theirs.grad, everything) for each in (ours, others)]
            few = theirs.numel() < 256  # such as a stream's scale, of whose terms little is left
            assert errors[0] < 1.5 * errors[1] + (0.1 if few else 0.02), name
