"""Adapters (LoRA) of weights that a layer of attention reads itself, instead of calling their module.

vLLM adds an adapter's part where the module is called. Of these weights it is left out without a word: `kv_b_proj` is
folded into queries and values, the output's first projection of DeepSeek-V4 is a product in groups, and its
compressors' products are of float32.
"""

import re
from typing import Any

from xmla.core.errors import UnsupportedError

# By the names of weights in an adapter, apart or as vLLM joins them.
READ = re.compile(r"\.(kv_b_proj|wo_a|compressor\.(?:wkv|wgate|fused_wkv_wgate))$")


def refuse_unread(manager: Any) -> Any:
    """vLLM's manager of a worker's adapters, which refuses those of such weights when it loads them."""
    load = manager._load_adapter

    def _load_adapter(self: Any, lora_request: Any) -> Any:
        adapter = load(self, lora_request)
        if read := sorted({match[1] for name in adapter.loras if (match := READ.search(name))}):
            raise UnsupportedError(
                f"xmla.vllm: not served: an adapter (LoRA) of {', '.join(read)}, whose modules vLLM's layers do not "
                "call; without xmla vLLM leaves it out"
            )
        return adapter

    manager._load_adapter = _load_adapter
    return manager
