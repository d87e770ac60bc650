"""What the config.json of released checkpoints says of their sparse attention, by the names that `--model` takes.

Nothing is imported here: the `xmla` command lists the names in its help.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A released model: its name, where its config.json is, and the fields of it that `model_config` reads."""

    title: str
    repository: str  # on huggingface.co
    fields: dict[str, Any]


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048}
YARN_40 = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
V4 = {
    "model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "index_n_heads": 64, "index_head_dim": 128,
    "sliding_window": 128, "compress_ratios": [0, 4, 128], "max_position_embeddings": 1 << 20,
}  # fmt: skip
GLM = {
    **LATENT, "model_type": "glm_moe_dsa", "num_attention_heads": 64, "index_n_heads": 32, "qk_nope_head_dim": 192,
}  # fmt: skip

PUBLISHED = {
    "deepseek_v32": Published("DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2", {
        **LATENT, "model_type": "deepseek_v32", "num_attention_heads": 128, "index_n_heads": 64,
        "qk_nope_head_dim": 128, "rope_scaling": YARN_40, "max_position_embeddings": 163840,
    }),
    "deepseek_v4": Published("DeepSeek-V4-Pro", "deepseek-ai/DeepSeek-V4-Pro", {
        **V4, "num_attention_heads": 128, "index_topk": 1024,
    }),
    "deepseek_v4_flash": Published("DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash", {
        **V4, "num_attention_heads": 64, "index_topk": 512,
    }),
    "deepseek_v41": Published("DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4.1-Flash", {
        **V4, "model_type": "deepseek_v41", "num_attention_heads": 64, "index_n_heads": 32, "index_topk": 512,
        "compress_ratios": [0, 2, 1], "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    }),
    "glm5": Published("GLM-5", "zai-org/GLM-5", {**GLM, "max_position_embeddings": 202752}),
    "glm_moe_dsa": Published("GLM-5.2", "zai-org/GLM-5.2", {
        **GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1 << 20,
    }),
    "glm5_next": Published("GLM-5.3-Flash", "zai-org/GLM-5.3-Flash", {
        **LATENT, "model_type": "glm5_next", "num_attention_heads": 64, "index_n_heads": 32, "index_kpool": 4,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "max_position_embeddings": 1 << 20,
    }),
    "hy_v4": Published("Hy4-preview", "tencent/Hy4-preview", {
        **LATENT, "model_type": "hy_v4", "num_attention_heads": 64, "index_n_heads": 32, "qk_nope_head_dim": 192,
        "max_position_embeddings": 1 << 20,
    }),
    "mistral_large4": Published("Mistral-Large-4", "mistralai/Mistral-Large-4-1T-A52B", {
        **LATENT, "model_type": "mistral_large4", "num_attention_heads": 64, "index_n_heads": 32,
        "qk_nope_head_dim": 64, "max_position_embeddings": 1 << 20,
    }),
}  # fmt: skip
