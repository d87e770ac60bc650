"""vLLM's offloading connector without a GPU: its own scheduler and worker, with streams that run at once.

Its copies are between the caches of the engine and memory of its own, both by addresses and bytes.
"""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

MOVED = {"bytes": 0}


class OnGpu(torch.Tensor):
    """A cache for which vLLM asks whether it is on a GPU."""

    is_cuda = True


class Now:
    """Streams and events of work that is done when it is asked for."""

    def __init__(self, **_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
        MOVED["bytes"] += size


class InterpretedOffloadingSpec(CPUOffloadingSpec):
    """The connector's `spec_name`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        gpu_worker.current_platform = SimpleNamespace(
            is_xpu=lambda: False, is_rocm=lambda: False, Stream=Now, current_stream=Now, stream=lambda _: nullcontext()
        )
        torch.Event = Now
        _custom_ops.swap_blocks_batch = copy
        on_gpu = [replace(cache, tensor=cache.tensor.as_subclass(OnGpu)) for cache in kv_caches.tensors]
        return self.create_worker(CanonicalKVCaches(on_gpu, kv_caches.group_data_refs))


def connector(size: int) -> dict[str, Any]:
    """vLLM's configuration of it, with so many bytes."""
    extra = {"spec_name": InterpretedOffloadingSpec.__name__, "spec_module_path": __name__, "cpu_bytes_to_use": size}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
