"""A tiny DeepSeek-V3.2 with random weights of unit gain, saved by transformers' own class, and a layer that drafts."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

# Tokens weigh more than what attention adds to them: near ties of the indexer then change probabilities, but no token.
SCALES = {"embed_tokens": 1.0, "lm_head": 0.2}


def save(folder: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=512,
        q_lora_rank=128, qk_rope_head_dim=64, v_head_dim=64, qk_nope_head_dim=64, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=3, index_n_heads=4, index_head_dim=128, index_topk=64,
        max_position_embeddings=512, eos_token_id=1, bos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = DeepseekV32ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() >= 2:
                weights.normal_(0, SCALES.get(name.split(".")[-2], weights.shape[-1] ** -0.5))
    model.save_pretrained(folder)


def add_draft_layer(folder: Path) -> None:
    """A copy of the last layer as a layer of multi-token prediction, over the sum of embedding and hidden state."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights, layers, width = load_file(file), config["num_hidden_layers"], config["hidden_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {name.replace(last, new): w.clone() for name, w in weights.items() if name.startswith(last)}
    ones, eye = torch.ones(width, dtype=torch.bfloat16), torch.eye(width, dtype=torch.bfloat16)
    weights |= {new + "enorm.weight": ones, new + "hnorm.weight": ones.clone()}
    weights |= {new + "eh_proj.weight": torch.cat([eye, eye], dim=1), new + "shared_head.norm.weight": ones.clone()}
    weights[new + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[new + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


if __name__ == "__main__":
    save(Path(sys.argv[1]))
    add_draft_layer(Path(sys.argv[1]))
