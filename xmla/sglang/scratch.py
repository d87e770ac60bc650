"""The memory that attention needs beside SGLang's pools, which SGLang would give to keys."""

from collections.abc import Callable
from typing import Any

import torch

from xmla.core.models import memory
from xmla.sglang import warmup_v4
from xmla.sglang.attention import SERVED
from xmla.sglang.refusals import refuse, unserved_v4
from xmla.sglang.warmup import most_tokens
from xmla.torch_api._arrays import device_of


def beside_scratch(count: Callable[[Any, int], int], self: Any, pre_model_load_memory: int) -> int:
    """Around `KVCacheConfigurator._profile_available_bytes`: what attention needs in a step is not free for keys.

    SGLang runs no step before it takes the memory. Torch keeps this, and the pool is as much smaller.
    """
    size = scratch_of(self.model_config, self.gpu_id)
    held = torch.empty(size, dtype=torch.uint8, device=torch.device(f"cuda:{self.gpu_id}")) if size else None
    free = count(self, pre_model_load_memory)
    del held
    return free


def scratch_of(config: Any, gpu: int) -> int:
    """Bytes that attention of a model, by SGLang's `ModelConfig`, needs in a step; 0 if it is not xmla's.

    Raises:
        UnsupportedError: The model is of DeepSeek-V4's architecture and is not served, or not with these options.
    """
    from sglang.srt.configs.model_config import get_dsa_index_topk, is_deepseek_dsa, is_deepseek_v4
    from sglang.srt.runtime_context import get_exec, get_parallel

    kernel = get_exec().kernel
    if is_deepseek_v4(config.hf_config):
        refuse(unserved_v4(config))
        return warmup_v4.scratch_of(config, gpu)
    if not is_deepseek_dsa(config.hf_config) or not {kernel.dsa_prefill_backend, kernel.dsa_decode_backend} & {*SERVED}:
        return 0
    heads, k = config.num_attention_heads // get_parallel().attn_tp_size, get_dsa_index_topk(config.hf_config)
    device = device_of(torch.device(f"cuda:{gpu}"))
    return memory.scratch_v32(heads, k, most_tokens(config.context_len), device, gathers=False)
