"""Small DeepSeek-V3.2, V4, V4.1, GLM-5.3-Flash and Hy4 models with random weights, and layers that draft.

The first two are saved by transformers' classes, which has none of V4.1.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

TINY = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 4, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "qk_nope_head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3,
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64, "max_position_embeddings": 512, "eos_token_id": 1,
    "bos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
# A layer of each kind: the window alone, with every 4 and with every 128 tokens compressed to an entry.
TINY_V4 = {
    "vocab_size": 256, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "num_attention_heads": 4, "q_lora_rank": 64, "o_groups": 2,
    "o_lora_rank": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "index_n_heads": 4,
    "index_topk": 16, "max_position_embeddings": 1024, "num_nextn_predict_layers": 0,
}  # fmt: skip
# A layer of each kind: the window alone; entries of two tokens, selected among all; of one, whose blocks it selects;
# those with its selection; those selected in its blocks.
TINY_V41 = {
    "vocab_size": 256, "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 4],
    "candidate_source_layer_id": 2, "candidate_topk_blocks": 12, "candidate_block_size": 4, "num_attention_heads": 4,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "sliding_window": 8, "index_n_heads": 4, "index_head_dim": 128,
    "index_topk": 8, "max_position_embeddings": 1024, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "swiglu_limit": 10.0, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
# Layers of both kinds: linear attention, and attention to selected pools of tokens and the tail. No experts.
TINY_GLM = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "mlp_layer_types": ["dense"] * 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128,
    "qk_rope_head_dim": 0, "v_head_dim": 64, "qk_nope_head_dim": 64, "index_n_heads": 4, "index_head_dim": 128,
    "index_topk": 64, "index_kpool": 4, "index_kpool_always_select_tail": True, "linear_num_heads": 2,
    "linear_head_dim": 64, "linear_conv_kernel_dim": 4, "hc_mult": 4, "max_position_embeddings": 1024,
    "pad_token_id": 0, "eos_token_id": 1, "mla_use_nope": True, "mhc": True, "indexer_rope_interleave": True,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "swiglu_limit": 10.0,
}  # fmt: skip
# Attention of each head has a sink. The third layer has the selection of the second. No experts.
TINY_HY = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "layer_types": ["indexed_attention"] * 3, "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense"] * 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
    "q_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 64, "qk_nope_head_dim": 64, "index_n_heads": 4,
    "index_head_dim": 128, "index_topk": 64, "hc_mult": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
# Attention as in the real model; width, depth, experts and vocabulary are less. vLLM asks for the last two by name.
LARGE = TINY | {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 8,
    "q_lora_rank": 1536, "v_head_dim": 128, "qk_nope_head_dim": 128, "first_k_dense_replace": 1, "index_n_heads": 64,
    "index_topk": 2048, "max_position_embeddings": 65536, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
LARGE_V4 = TINY_V4 | {
    "vocab_size": 4096, "hidden_size": 2048, "moe_intermediate_size": 512, "num_hidden_layers": 4,
    "layer_types": [*TINY_V4["layer_types"], "compressed_sparse_attention"],
    "mlp_layer_types": [*TINY_V4["mlp_layer_types"], "moe"], "num_attention_heads": 64, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64, "index_topk": 512,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip

LARGE_V41 = TINY_V41 | {
    "vocab_size": 4096, "hidden_size": 2048, "moe_intermediate_size": 512, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "num_attention_heads": 64, "q_lora_rank": 1280, "o_groups": 8, "o_lora_rank": 1024,
    "sliding_window": 128, "index_n_heads": 32, "index_topk": 512, "max_position_embeddings": 1 << 20,
}  # fmt: skip

LARGE_GLM = TINY_GLM | {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2, "mlp_layer_types": ["dense"] * 4,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "v_head_dim": 256,
    "qk_nope_head_dim": 256, "index_n_heads": 32, "index_topk": 2048, "linear_num_heads": 16, "linear_head_dim": 128,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip

# Standard deviations of weights; unit gain where there is none.
# Tokens weigh more than what attention adds to them: near ties of the indexer then change probabilities, but no token.
SCALES = {"embed_tokens": 1.0, "lm_head": 0.2}
SCALES_V4 = {"embed_tokens": 1.0, "lm_head": 0.2, "o_b_proj": 0.3 * 128**-0.5}
SCALES_GLM = {"embed_tokens": 1.0, "lm_head": 0.2, "o_proj": 0.3 * 256**-0.5}
SCALES_HY = {"embed_tokens": 1.0, "lm_head": 0.2, "o_proj": 0.3 * 256**-0.5}
SCALES_V41 = {"embed": 1.0, "head": 0.2, "wo_b": 0.3 * 128**-0.5}
LARGE_SCALES_V41 = {"embed": 1.0, "wo_b": 8192**-0.5}
LARGE_SCALES_GLM = {"embed_tokens": 1.0}
LARGE_SCALES_V4 = {"embed_tokens": 1.0, "o_b_proj": 8192**-0.5}
# Attention looks at tens of keys, not at all alike, and adds as much as a token's embedding; experts, whose choice has
# ties, add a third of it.
LARGE_SCALES = {"embed_tokens": 1.0, "q_b_proj": 1.5 * 1536**-0.5, "o_proj": 2 * 16384**-0.5, "down_proj": 0.011}
# A token's successor stands out by this much of the embedding's norm, eight deviations of the other logits: rounding
# that changes the most likely token of every eighth position without it changes that of every eightieth.
LIKELY = 11.0
# Weights in float32, besides those of mHC.
SINGLE = {"attn_sink", "learnable_sink_param", "index_kpool_compress_ape", "A_log", "dt_bias"}
Shapes = dict[str, tuple[int, ...]]  # by name


def save(
    folder: Path, sizes: Mapping[str, Any] = TINY, scales: Mapping[str, float] = SCALES, likely: float = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Save a model; `likely` makes one token the likely successor of each."""
    save_drawn(folder, lambda: DeepseekV32ForCausalLM(DeepseekV32Config(**sizes)), scales, likely, device)


def save_v4(
    folder: Path, sizes: Mapping[str, Any] = TINY_V4, scales: Mapping[str, float] = SCALES_V4, likely: float = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Save a model of V4. Routed experts add nothing, as in the tests' vLLM, which has no kernel for them."""
    make = lambda: DeepseekV4ForCausalLM(DeepseekV4Config(**sizes))
    save_drawn(folder, make, scales, likely, device, without=("experts.down_proj",))
    name_as_published(folder)


def save_drawn(
    folder: Path, make: Callable[[], Any], scales: Mapping[str, float], likely: float, device: str,
    without: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Save a model of transformers with random weights, of which those whose names end so are zero."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = make().to(torch.bfloat16)
        for name, weights in model.named_parameters():
            if name.endswith(without):
                weights.zero_()
            elif name.endswith("sinks"):
                weights.normal_()
            elif weights.dim() >= 2 and "hc" not in name:
                named = [scales[part] for part in name.split(".")[-2:] if part in scales]
                weights.normal_(0, named[0] if named else weights.shape[-1] ** -0.5)
        make_likely(model.get_input_embeddings().weight, model.get_output_embeddings().weight, likely)
    model.save_pretrained(folder)


def make_likely(embeddings: torch.Tensor, out: torch.Tensor, likely: float) -> None:
    """Make one token the likely successor of each."""
    out[torch.randperm(len(out), device=out.device)] += likely / out.shape[1] * embeddings


def save_shapes(
    folder: Path, shapes: Shapes, config: Mapping[str, Any], scales: Mapping[str, float], likely: float,
    device: str,
) -> None:  # fmt: skip
    """Save random weights of these shapes, the first of which are embeddings and the head, by a checkpoint's names."""
    torch.manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        part = name.removesuffix(".weight").split(".")[-1]
        single = part.startswith("hc_") or part in SINGLE
        weight = weights[name] = torch.empty(shape, dtype=torch.float32 if single else torch.bfloat16, device=device)
        if part == "learnable_sink_param":
            weight.normal_(2)  # as much as the largest of a few keys
        elif part.endswith(("_base", "_ape", "bias", "A_log", "_sink")):
            weight.normal_()
        elif part.endswith(("norm", "_scale")):
            weight.fill_(1)
        else:
            weight.normal_(0, scales.get(part, shape[-1] ** -0.5))
    embeddings, head, *_ = weights.values()
    make_likely(embeddings, head, likely)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


def save_v41(
    folder: Path, sizes: Mapping[str, Any] = TINY_V41, scales: Mapping[str, float] = SCALES_V41, likely: float = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Save a model of V4.1 by the names of DeepSeek's checkpoint, without routed experts."""
    rope = {
        "rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": sizes["max_position_embeddings"],
    }  # fmt: skip
    nested = dict(sizes) | {"model_type": "deepseek_v41_text", "rope_scaling": rope}
    config = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": nested}
    save_shapes(folder, shapes_v41(sizes), config, scales, likely, device)


def streams(at: str, hc: int, width: int) -> Shapes:
    """Shapes of what mHC mixes a layer's streams with."""
    mixed = {"fn": ((2 + hc) * hc, hc * width), "base": ((2 + hc) * hc,), "scale": (3,)}
    return {f"{at}hc_{part}_{name}": shape for part in ("attn", "ffn") for name, shape in mixed.items()}


def shapes_v41(sizes: Mapping[str, Any]) -> Shapes:
    """Shapes of all weights that vLLM loads of a DeepSeek-V4.1."""
    width, heads, dim, rank = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
    )
    groups, low, hc, inner = (sizes[name] for name in ("o_groups", "o_lora_rank", "hc_mult", "moe_intermediate_size"))
    index_heads, index_dim = sizes["index_n_heads"], sizes["index_head_dim"]
    found: Shapes = dict.fromkeys(("embed.weight", "head.weight"), (sizes["vocab_size"], width))
    found["norm.weight"] = (width,)
    for layer, ratio in enumerate(sizes["compress_ratios"]):
        at = f"layers.{layer}."
        found |= {f"{at}{norm}.weight": (width,) for norm in ("attn_norm", "ffn_norm")}
        found |= streams(at, hc, width)
        found |= {f"{at}ffn.shared_experts.w{n}.weight": (inner, width) for n in (1, 3)}
        found[f"{at}ffn.shared_experts.w2.weight"] = (width, inner)
        of_attention = {
            "wq_a": (rank, width), "wkv": (dim, width), "wq_b": (heads * dim, rank), "q_norm": (rank,),
            "kv_norm": (dim,), "wo_a": (groups * low, heads * dim // groups), "wo_b": (width, groups * low),
        }  # fmt: skip
        if layer in sizes["kv_source_layer_ids"]:
            projected = ("wkv", "wgate") if ratio > 1 else ("wkv",)
            of_attention |= {f"compressor.{name}": (dim, width) for name in projected}
            of_attention |= {"compressor.norm": (dim,), "indexer.wk": (index_dim, dim), "indexer.k_norm": (index_dim,)}
        if layer in sizes["index_source_layer_ids"]:
            of_attention["indexer.wq_b"] = index_heads * index_dim, rank
            of_attention["indexer.weights_proj"] = index_heads, width
        found |= {f"{at}attn.{name}.weight": shape for name, shape in of_attention.items()}
        found[f"{at}attn.attn_sink"] = (heads,)
    return found


def save_glm(
    folder: Path, sizes: Mapping[str, Any] = TINY_GLM, scales: Mapping[str, float] = SCALES_GLM, likely: float = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Save the text model of a GLM-5.3-Flash by the names of its checkpoint, without experts."""
    config = dict(sizes) | {"model_type": "glm5_next_text", "architectures": ["Glm5NextForCausalLM"]}
    save_shapes(folder, shapes_glm(sizes), config, scales, likely, device)


def shapes_glm(sizes: Mapping[str, Any]) -> Shapes:
    """Shapes of all weights that vLLM loads of a GLM-5.3-Flash."""
    width, heads, inner, rank = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size", "q_lora_rank")
    )
    query, value, latent = (sizes[name] for name in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    index_heads, index_dim, hc = sizes["index_n_heads"], sizes["index_head_dim"], sizes["hc_mult"]
    named = ("model.embed_tokens.weight", "lm_head.weight")
    found: Shapes = dict.fromkeys(named, (sizes["vocab_size"], width))
    found["model.norm.weight"] = (width,)
    for layer, kind in enumerate(sizes["layer_types"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= streams(at, hc, width)
        found |= {f"{at}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (width, inner)
        of_attention = {
            "q_a_proj": (rank, width), "kv_a_proj_with_mqa": (latent, width), "q_a_layernorm": (rank,),
            "kv_a_layernorm": (latent,), "q_b_proj": (heads * query, rank),
            "kv_b_proj": (heads * (query + value), latent), "o_proj": (width, heads * value),
            "indexer.wq_b": (index_heads * index_dim, rank), "indexer.wk": (index_dim, width),
            "indexer.weights_proj": (index_heads, width), "indexer.k_norm": (index_dim,),
        }  # fmt: skip
        linear_heads, linear_dim = sizes["linear_num_heads"], sizes["linear_head_dim"]
        states = linear_heads * linear_dim
        of_linear = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (states, width)), "b_proj": (linear_heads, width),
            **dict.fromkeys(("f_a_proj", "g_a_proj"), (linear_dim, width)),
            **dict.fromkeys(("f_b_proj", "g_b_proj"), (states, linear_dim)),
            **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (states, 1, sizes["linear_conv_kernel_dim"])),
            "o_norm": (linear_dim,), "o_proj": (width, states),
        }  # fmt: skip
        if kind == "linear_attention":
            found |= {f"{at}self_attn.{name}.weight": shape for name, shape in of_linear.items()}
            found |= {f"{at}self_attn.A_log": (linear_heads,), f"{at}self_attn.dt_bias": (states,)}
        if kind == "indexed_attention":
            found |= {f"{at}self_attn.{name}.weight": shape for name, shape in of_attention.items()}
            found[f"{at}self_attn.indexer.k_norm.bias"] = (index_dim,)
            found[f"{at}self_attn.indexer.index_kpool_compress_ape"] = sizes["index_kpool"], index_dim
            found[f"{at}self_attn.indexer.index_kpool_compress_gate"] = index_dim, width
    return found


def save_hy(
    folder: Path, sizes: Mapping[str, Any] = TINY_HY, scales: Mapping[str, float] = SCALES_HY, likely: float = 0,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Save a Hy4 by the names of its checkpoint, without experts."""
    config = dict(sizes) | {"model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"]}
    save_shapes(folder, shapes_hy(sizes), config, scales, likely, device)


def shapes_hy(sizes: Mapping[str, Any]) -> Shapes:
    """Shapes of all weights that vLLM loads of a Hy4."""
    width, heads, inner, rank = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size", "q_lora_rank")
    )
    query, rope, value, latent = (
        sizes[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    index_heads, index_dim, hc = sizes["index_n_heads"], sizes["index_head_dim"], sizes["hc_mult"]
    named = ("model.embed_tokens.weight", "lm_head.weight")
    found: Shapes = dict.fromkeys(named, (sizes["vocab_size"], width))
    head = {"fn": (hc, hc * width), "base": (hc,), "scale": (1,)}
    found |= {f"model.hc_head.hc_head_{part}": shape for part, shape in head.items()}
    found["model.norm.weight"] = (width,)
    for layer, kind in enumerate(sizes["indexer_types"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for part in ("attn", "mlp"):
            mixed = {"fn": (2 * hc, hc * width), "base": (2 * hc,), "scale": (2,)}
            found |= {f"{at}hc_{part}_layer.hc_pre.hc_{name}": shape for name, shape in mixed.items()}
        found |= {f"{at}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (width, inner)
        of_attention = {
            "q_a_proj": (rank, width), "kv_a_proj_with_mqa": (latent + rope, width), "q_a_layernorm": (rank,),
            "kv_a_layernorm": (latent,), "q_b_proj": (heads * (query + rope), rank),
            "kv_b_proj": (heads * (query + value), latent), "o_proj": (width, heads * value),
            "linear_gate": (heads * value, width),
        }  # fmt: skip
        if kind == "full":
            of_attention |= {
                "indexer.wq_b": (index_heads * index_dim, rank), "indexer.wk": (index_dim, width),
                "indexer.weights_proj": (index_heads, width), "indexer.k_norm": (index_dim,),
            }  # fmt: skip
            found[f"{at}self_attn.indexer.k_norm.bias"] = (index_dim,)
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in of_attention.items()}
        found[f"{at}self_attn.learnable_sink_param"] = (heads,)
    return found


def hy_in_transformers(folder: Path) -> Any:
    """A saved Hy4 as transformers' model, in float32; it rotates halves of the roped dims, where vLLM rotates pairs."""
    from transformers import HYV4ForCausalLM

    model = HYV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rope = model.config.qk_rope_head_dim
    halves = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))

    def rotate_halves(rows: torch.Tensor) -> None:
        """Rotate in place the last rows [.., dims, ·]."""
        rows[..., -rope:, :] = rows[..., -rope:, :][..., halves, :]

    with torch.no_grad():
        for layer in model.model.layers:
            attention, heads = layer.self_attn, model.config.num_attention_heads
            rotate_halves(attention.q_b_proj.weight.unflatten(0, (heads, -1)))
            rotate_halves(attention.kv_a_proj_with_mqa.weight)
            if (indexer := attention.indexer) is not None:
                rotate_halves(indexer.wq_b.weight.unflatten(0, (model.config.index_n_heads, -1)))
                for part in (indexer.wk.weight, indexer.k_norm.weight[:, None], indexer.k_norm.bias[:, None]):
                    rotate_halves(part)
    return model.eval()


class GlmInTransformers(torch.nn.Module):
    """A saved GLM-5.3-Flash as transformers' text model, with the head that it has not; in float32."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextModel

        sizes = json.loads((folder / "config.json").read_text())
        for name in ("architectures", "model_type", "dtype"):
            del sizes[name]
        self.config = Glm5NextTextConfig(**sizes)
        self.text = Glm5NextTextModel(self.config).eval()
        weights = {
            name.removeprefix("model."): weight for name, weight in load_file(folder / "model.safetensors").items()
        }
        self.head = weights.pop("lm_head.weight").float()
        for layer in range(self.config.num_hidden_layers):
            at = f"layers.{layer}.self_attn."
            parts: Any = [weights.pop(f"{at}{part}_conv1d.weight", None) for part in "qkv"]
            if parts[0] is not None:
                weights[f"{at}conv1d.weight"] = torch.cat(parts)
        renamed = {re.sub("hc_(attn|ffn)_", r"\1_hc.", name): weight for name, weight in weights.items()}
        gate = "self_attn.(dt_bias|A_log|f_[ab]_proj)", r"self_attn.forget_gate.\1"
        self.text.load_state_dict({re.sub(*gate, name): weight.float() for name, weight in renamed.items()})

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.text(input_ids=tokens).last_hidden_state @ self.head.T)


def name_as_published(folder: Path) -> None:
    """The config of V4 by the names of DeepSeek's checkpoint: vLLM 0.26 knows no others."""
    config = json.loads((folder / "config.json").read_text())
    entries = {"sliding_attention": 0} | config.pop("compress_rates")
    config["compress_ratios"] = [entries[kind] for kind in config.pop("layer_types")]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    # YaRN by a factor of 1 turns nothing otherwise, and vLLM's kernels get cosines in float32, as of a checkpoint.
    config["rope_parameters"] = {
        "rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def add_draft_layer(folder: Path, hidden: float = 1) -> None:
    """A copy of the last layer as a layer of multi-token prediction, over embedding + `hidden` · hidden state."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights, layers, width = load_file(file), config["num_hidden_layers"], config["hidden_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    weights |= {name.replace(last, new): w.clone() for name, w in weights.items() if name.startswith(last)}
    ones, eye = torch.ones(width, dtype=torch.bfloat16), torch.eye(width, dtype=torch.bfloat16)
    weights |= {new + "enorm.weight": ones, new + "hnorm.weight": ones.clone()}
    weights[new + "eh_proj.weight"] = torch.cat([eye, hidden * eye], dim=1)
    weights[new + "shared_head.norm.weight"] = ones.clone()
    weights[new + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[new + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def add_v4_draft_layer(folder: Path, hidden: float = 1, experts: int | None = None) -> None:
    """Add V4's drafting layer by its checkpoint's names, of the layer without compressed entries.

    Its router, which follows no token's number, and routed experts are those of the layer `experts`; else it has none,
    as the tests' vLLM has no kernel for them.
    """
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights, width = load_file(file), config["hidden_size"]
    copied = {"model.layers.0.": "mtp.0.", "model.hc_head.hc_": "mtp.0.hc_head_"}
    copied |= {"head.": "mtp.0.head.", "model.norm.": "mtp.0.norm.", "model.embed_tokens.": "mtp.0.emb.tok_emb."}
    parts = () if experts is None else ("experts", "gate")
    routed = {f"model.layers.{experts}.ffn.{part}.": f"mtp.0.ffn.{part}." for part in parts}
    for name, weight in [*weights.items()]:
        for old, new in (routed if ".experts." in name or ".gate." in name else copied).items():
            if name.startswith(old):
                weights[name.replace(old, new).replace(".attn.norm.", ".attn.kv_norm.")] = weight.clone()
    for part, scale in (("e", 1), ("h", hidden)):
        weights[f"mtp.0.{part}norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
        weights[f"mtp.0.{part}_proj.weight"] = scale * torch.eye(width, dtype=torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def add_dspark(folder: Path, stages: int = 2) -> None:
    """Add DSpark, the drafter of V4 and V4.1, by the checkpoint's names: copies of the layer over the window alone.

    Its Markov head has the model's embeddings and head, so that it drafts the likely successor of the last token.
    """
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights, text = load_file(file), config.get("text_config", config)
    at = "model." if "model.norm.weight" in weights else ""
    embeddings = weights["model.embed_tokens.weight" if at else "embed.weight"]
    width, targets, last = text["hidden_size"], [1, text["num_hidden_layers"] - 1], f"mtp.{stages - 1}."
    of_head = {f"{at}hc_head.hc_": last + "hc_head_", f"{at}norm.": last + "norm."}
    for name, weight in [*weights.items()]:
        copies = [name.replace(old, new) for old, new in of_head.items() if name.startswith(old)]
        if name.startswith(layer := f"{at}layers.0.") and ".experts." not in name and ".gate." not in name:
            renamed = name.replace(".attn.norm.", ".attn.kv_norm.")
            copies += [renamed.replace(layer, f"mtp.{stage}.") for stage in range(stages)]
        weights |= {copy: weight.clone() for copy in copies}
    torch.manual_seed(1)
    wide = len(targets) * width
    weights |= {
        "mtp.0.main_proj.weight": torch.empty(width, wide, dtype=torch.bfloat16).normal_(0, wide**-0.5),
        "mtp.0.main_norm.weight": torch.ones(width, dtype=torch.bfloat16),
        last + "markov_head.markov_w1.weight": embeddings.clone(),
        last + "markov_head.markov_w2.weight": weights["head.weight"].clone(),
        last + "confidence_head.proj.weight": torch.randn(1, 2 * width) * (2 * width) ** -0.5,
    }
    save_file(weights, file, metadata={"format": "pt"})
    text |= {
        "n_mtp_layers": stages, "dspark_target_layer_ids": targets, "dspark_markov_rank": width,
        "dspark_block_size": 5, "dspark_noise_token_id": 3,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


SAVED = {"v32": save, "v4": save_v4, "v41": save_v41, "glm": save_glm, "hy": save_hy}


def save_large(folder: Path, kind: str, device: str = "cuda") -> None:
    """Save a model with the attention of a released one; V3.2's drafts."""
    sizes, scales = {
        "v32": (LARGE, LARGE_SCALES),
        "v4": (LARGE_V4, LARGE_SCALES_V4), "v41": (LARGE_V41, LARGE_SCALES_V41), "glm": (LARGE_GLM, LARGE_SCALES_GLM),
    }[kind]  # fmt: skip
    SAVED[kind](folder, sizes, scales, LIKELY, device)
    if kind == "v32":
        add_draft_layer(folder, hidden=0.25)  # so that it drafts the likely successor of the last token


if __name__ == "__main__":
    out, kind = Path(sys.argv[1]), sys.argv[2]
    saved = kind.removesuffix("-dspark")
    SAVED[saved](out, likely=0 if kind in ("v32", "v4") else 14)
    if kind == "v32":
        add_draft_layer(out)
    elif kind == "v4":
        add_v4_draft_layer(out)
    elif kind != saved:
        add_dspark(out)
