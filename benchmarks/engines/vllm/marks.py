"""Marks between the kernels of an engine: empty kernels, by whose names a profile tells the parts of a step apart.

They are launched where the selection of keys and the attention to them begin and end in each layer, and where a pass
ends. Graphs that are captured have them as well, so that their replays do. A pass begins when the GPU has waited for
the host, by a kernel of torch's.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import triton

from benchmarks.engines.vllm import workers
from benchmarks.engines.vllm.engines import Engine

# What selects keys, by model: a module, in it a class and its method, or a function that layers call by its name.
LAYERS = "vllm.model_executor.layers.sparse_attn_indexer", "SparseAttnIndexer", "forward_cuda"
SELECTION = {
    "v32": ("vllm.models.deepseek_v32.attention", "sparse_attn_indexer"),
    "v4": LAYERS,
    "v41": LAYERS,
    "glm": ("vllm.models.glm5next.nvidia.sparse_indexer", "SparseAttnIndexerKpool", "forward_cuda"),
}
# The class of attention by model: vLLM's own, and xmla's.
SPARSE = (
    ("vllm.v1.attention.backends.mla.flashmla_sparse", "FlashMLASparseImpl"),
    ("xmla.vllm.backend", "XmlaSparseImpl"),
)
ATTENTION = {
    "v32": SPARSE,
    "glm": SPARSE,
    "v4": (
        ("vllm.models.deepseek_v4.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
        ("xmla.vllm.attention_v4", "XmlaV4Attention"),
    ),
    "v41": (
        ("vllm.models.deepseek_v41.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
        ("xmla.vllm.attention_v41", "XmlaV41Attention"),
    ),
}


@triton.jit(do_not_specialize=["n"])
def pass_ends(n):
    pass


@triton.jit(do_not_specialize=["n"])
def selection_begins(n):
    pass


@triton.jit(do_not_specialize=["n"])
def selection_ends(n):
    pass


@triton.jit(do_not_specialize=["n"])
def attention_begins(n):
    pass


@triton.jit(do_not_specialize=["n"])
def attention_ends(n):
    pass


def mark(function: Callable[..., Any], begins: Any, ends: Any) -> Callable[..., Any]:
    """The function, with these kernels launched before and behind what it launches."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        begins[(1,)](0)
        result = function(*args, **kwargs)
        ends[(1,)](0)
        return result

    return marked


def install(engine: Engine) -> None:
    """Mark the parts of an engine of one rank, before its model is made."""
    module, *of, name = SELECTION[engine.kind]
    selects: Any = import_module(module)
    for each in of:
        selects = getattr(selects, each)
    setattr(selects, name, mark(getattr(selects, name), selection_begins, selection_ends))
    module, attends = ATTENTION[engine.kind][engine.plugin]
    attention = getattr(import_module(module), attends)
    attention.forward_mqa = mark(attention.forward_mqa, attention_begins, attention_ends)


def mark_ends() -> None:
    """Mark where a pass ends, of those that begin when the GPU has waited (`Passes.ahead`)."""
    from vllm.v1.worker.gpu.kv_connector import KVConnector

    workers.hook(KVConnector, "finish_forward", first=lambda: pass_ends[(1,)](0))
