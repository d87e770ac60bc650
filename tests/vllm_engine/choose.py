"""`python choose.py`: install the plugin as on a GPU; where vLLM takes its attention, by compute capability.

vLLM's platform for CUDA is imported without its library, which needs a driver. Nothing of it runs.
"""

import json
import sys
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import torch

sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402

from xmla.vllm import seam  # noqa: E402

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


def refused(capability: tuple[int, int], cache: str, use_sparse: bool) -> list[str]:
    """Why vLLM goes on from the first backend of its list; nothing, if it takes it."""
    first, *_ = cuda._get_backend_priorities(True, DeviceCapability(*capability), 16, cache)
    asked = AttentionSelectorConfig(576, torch.bfloat16, cache, None, use_mla=True, use_sparse=use_sparse)
    backend = first.get_class()
    assert backend.__name__ == "XmlaSparseBackend"
    return backend.validate_configuration(device_capability=DeviceCapability(*capability), **asked._asdict())


def choose() -> None:
    seam.current_platform = SimpleNamespace(is_cuda=lambda: True, dispatch_key="CUDA")
    for _ in range(2):  # vLLM may load a plugin several times
        seam.install(version("vllm"))
    cases = {"fp8": ("fp8", True), "bf16": ("auto", True), "dense": ("auto", False)}
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        found = {
            name: {f"sm_{major}{minor}": refused((major, minor), *case) for major, minor in CAPABILITIES}
            for name, case in cases.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    choose()
