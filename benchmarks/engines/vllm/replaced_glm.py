"""What vLLM's GLM-5.3-Flash calls of packages that tests do without, in torch; of the model the text's part alone."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import rms_norm

# What the classes for images are made of, which need torchvision.
OF_IMAGES = {
    "vllm.model_executor.models.glm4_1v": ("Glm4vDummyInputsBuilder", "Glm4vForConditionalGeneration"),
    "vllm.models.glm5next.common.multimodal": (
        "Glm5NextMultiModalProcessor", "Glm5NextProcessingInfo", "Glm5NextVisionTransformer",
    ),
}  # fmt: skip


def install() -> None:
    """Replace what needs a GPU in this process, before the configuration is made."""
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    type(current_platform).simple_compile_backend = "eager"
    for name, classes in OF_IMAGES.items():
        sys.modules[name] = module = ModuleType(name)
        for each in classes:
            setattr(module, each, type(each, (torch.nn.Module,), {}))
    for op in (mhc.MHCPreOp, mhc.MHCPostOp, mhc.MHCFusedPostPreOp):
        op.forward_cpu = op.forward_cuda = normalised(op.forward_native)
    from vllm.models.glm5next.common import model

    ModelRegistry.register_model("Glm5NextForCausalLM", model.Glm5NextForCausalLM)


def normalised(mix: Callable[..., Any]) -> Callable[..., Any]:
    """A function of mHC in torch, with the norm of the layer's input that kernels fuse and vLLM's torch leaves out."""

    def mix_and_normalise(*args: Any, norm_weight: Any = None, norm_eps: float = 0.0, **kwargs: Any) -> Any:
        if norm_weight is None:
            return mix(*args, **kwargs)
        *mixed, x = mix(*args, **kwargs)
        return *mixed, rms_norm(x, norm_weight.shape, norm_weight, norm_eps)

    return mix_and_normalise
