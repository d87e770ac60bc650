"""What vLLM's workers note and are asked for.

Workers of several ranks are processes of their own, which import this module by its name.
"""

from collections.abc import Callable
from typing import Any

import torch

import xmla
from benchmarks.engines.calls import CALLS
from benchmarks.engines.passes import Passes

PASSES = Passes()
BEGUN: list[torch.cuda.Event] = []  # of passes that have not ended


def watch(worker: Any) -> None:
    """Note passes of vLLM's runner; its second, of 0.33, runs graphs beside the model and tells where a pass begins."""
    if getattr(worker.vllm_config, "use_v2_model_runner", False):
        from vllm.v1.worker.gpu.async_utils import StepTimingCollector
        from vllm.v1.worker.gpu.kv_connector import KVConnector

        before, after = (StepTimingCollector, "forward_start"), (KVConnector, "finish_forward")
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        before = after = GPUModelRunner, "_model_forward"
    hook(*before, first=lambda: BEGUN.append(PASSES.begin()))
    hook(*after, last=lambda: PASSES.end(BEGUN.pop()))


def hook(of: type, name: str, first: Callable[[], Any] = lambda: None, last: Callable[[], Any] = lambda: None) -> None:
    """Call `first` before each call of a method, and `last` after it."""
    method = getattr(of, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        first()
        result = method(*args, **kwargs)
        last()
        return result

    setattr(of, name, hooked)


def milliseconds(worker: Any, ahead: bool) -> list[float]:
    """Milliseconds of the passes since the last call; whether the GPU waits before those from now on."""
    return [ms for _, ms in PASSES.take(ahead)]


def told(worker: Any) -> dict[str, Any]:
    """Whose attention a worker's layers have, and how often each op was called if that is counted there."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    attention = [getattr(layer, "impl", layer) for layer in layers]  # V4's layers are attention themselves
    kinds = sorted({type(layer).__name__ for layer in attention if hasattr(layer, "forward_mqa")})
    return {"attention": kinds, "calls": dict(CALLS)}


def compiled(worker: Any) -> list[str]:
    """What this worker has compiled of xmla's kernels, or loaded."""
    return [str(made) for made in xmla.compiles()]
