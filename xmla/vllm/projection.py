"""DeepSeek-V4's output, rotated back and projected in groups, in torch: where vLLM's DeepGEMM does not serve the GPU.

A product in bfloat16 for each group, by weights that are kept in bfloat16.
"""

from typing import Any

import torch

from xmla.vllm.refusals import refuse

FLOATS = torch.bfloat16, torch.float16, torch.float32


def keep_plain(layer: Any) -> None:
    """Let weights be bfloat16 once they are loaded, instead of what vLLM makes of them.

    A checkpoint has them so or in e4m3. vLLM would quantise the former too where `--quantization` asks for it.

    Raises:
        UnsupportedError: They are of another dtype.
    """
    weight, config = getattr(layer, "weight", None), getattr(layer, "quant_config", None)
    dtype = "fewer bits" if weight is None else weight.dtype  # such formats have no weights by this name
    by = "" if config is None else f" by {config.get_name()}"
    refuse(
        {
            f"DeepSeek-V4's output projection with weights of {dtype}{by} where there is no DeepGEMM": dtype
            not in (*FLOATS, torch.float8_e4m3fn)
        }
    )
    if dtype == torch.float8_e4m3fn:
        layer.quant_method.process_weights_after_loading = make_plain
    elif hasattr(layer, "quant_method"):
        layer.quant_method.process_weights_after_loading = lambda _: None


def make_plain(layer: Any) -> None:
    """The layer's loaded weights, times their scales."""
    from vllm.model_executor.utils import replace_parameter

    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    scales = getattr(layer, name)
    replace_parameter(layer, "weight", dequantize(layer.weight.data, scales.data))
    replace_parameter(layer, name, scales.data.new_empty(0))


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights [N, K] e4m3 times a scale for each block of a grid [n, k], for each row or for all, as bfloat16."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    rows, columns = scales.shape if scales.ndim == 2 else (scales.numel(), 1)
    blocks = weight.float().unflatten(0, (rows, -1)).unflatten(2, (columns, -1))  # [n, N/n, k, K/k]
    return (blocks * scales.float().view(rows, 1, columns, 1)).flatten(2).flatten(0, 1).bfloat16()


def project(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, D], rotated back in place, times the weights [G, R, H/G · D] of their groups: [T, G · R].

    `cos_sin` has cosines and sines of a position in halves; the last dims of a head are rotated in pairs.
    """
    roped = o[..., -cos_sin.shape[-1] :]
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    even, odd = roped.float().unflatten(-1, (-1, 2)).unbind(-1)
    roped.copy_(torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2))
    grouped = o.reshape(len(o), len(weight), -1).transpose(0, 1)
    return (grouped @ weight.transpose(1, 2)).transpose(0, 1).flatten(1)
