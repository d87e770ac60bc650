"""What the ops are measured against: ceilings of this very GPU and the peers that are installed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from xmla.bench.problems import DEVICE, e4m3
from xmla.bench.timing import measure


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A call that does nothing but copy `work` bytes (read + written) or multiply matrices, in `work` flop."""

    unit: str
    work: float
    call: Callable[[int], Any]


def ceilings() -> dict[str, Ceiling]:
    """What bounds this GPU: copies, and bf16 and fp8 matrix products."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    size = 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = e4m3(size, size), e4m3(size, size).t()
    one = torch.ones((), device=DEVICE)
    flops = 2 * size**3
    return {
        # A graph runs copy_ on the slower copy engine.
        "copy": Ceiling("bytes", 2 * source.nbytes, lambda _: torch.neg(source, out=target)),
        "bf16": Ceiling("flop", flops, lambda _: a @ b),
        "fp8": Ceiling("flop", flops, lambda _: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)),
    }


def rates(limits: Mapping[str, Ceiling]) -> dict[str, float]:
    """What the ceilings reach now."""
    times = measure({name: limit.call for name, limit in limits.items()}, sets=1)
    return {f"{name}_{limit.unit}_per_s": limit.work / (times[name].median * 1e-6) for name, limit in limits.items()}


def flash_mla() -> Any:
    """The FlashMLA package, or None where it is not installed."""
    try:
        return import_module("flash_mla")
    except ImportError:
        return None


def cudnn() -> bool:
    """Whether cuDNN's frontend is installed; it imports its compiler when it is called, which can fail."""
    return find_spec("cudnn") is not None


def peers() -> dict[str, str | None]:
    """The distribution and version of each peer, None where it is not installed.

    sgl-flash-mla 1.0.0 has upstream's last kernels for Hopper.
    """
    packages = {"flash_mla": flash_mla() is not None, "cudnn": cudnn()}
    return {name: _distribution(name) if installed else None for name, installed in packages.items()}


def _distribution(package: str) -> str:
    name = metadata.packages_distributions()[package][0]
    return f"{name} {metadata.version(name)}"


def flash_mla_decode(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, requests: int, scale: float,
    sink: torch.Tensor | None = None, extra_cache: torch.Tensor | None = None, extra_slots: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """FlashMLA's sparse decode on the same arguments; heads are padded to the 64 or 128 that it takes.

    A sink needs that many heads, and a request's tokens share their length in `extra_lengths` [T].
    """
    package = flash_mla()
    tokens, heads, width = q.shape
    padded = torch.zeros(
        requests, tokens // requests, 64 if heads <= 64 else 128, width, device=q.device, dtype=q.dtype
    )
    padded[:, :, :heads] = q.view(requests, -1, heads, width)
    schedule, _ = package.get_mla_metadata()
    cache, slots = cache.unsqueeze(2), slots.view(requests, -1, slots.shape[1])
    extra = {}
    if extra_cache is not None and extra_slots is not None:
        extra["extra_k_cache"] = extra_cache.unsqueeze(2)
        extra["extra_indices_in_kvcache"] = extra_slots.view(requests, -1, extra_slots.shape[1])
    if extra_lengths is not None:
        extra["extra_topk_length"] = extra_lengths.view(requests, -1)[:, 0].contiguous()

    def call() -> torch.Tensor:
        out, _ = package.flash_mla_with_kvcache(
            padded, cache, None, None, 512, schedule, softmax_scale=scale, is_fp8_kvcache=True, indices=slots,
            attn_sink=sink, use_legacy=True, **extra,
        )  # fmt: skip
        return out[:, :, :heads].reshape(tokens, heads, 512)

    return call


def flash_mla_prefill(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float) -> Callable[[], Any]:
    """FlashMLA's sparse prefill over plain rows [N, 576] or [N, 512]."""
    package = flash_mla()
    return lambda: package.flash_mla_sparse_fwd(q, rows.unsqueeze(1), slots.unsqueeze(1), scale, use_legacy=True)[0]


def cudnn_backward(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    scale: float,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """cuDNN's derivative of attention over rows [N, 1, L+E], by float32 atomics: dq and the rows' gradient."""
    no_sink = torch.full((q.shape[1],), float("-inf"), device=q.device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        backward = import_module("cudnn").DSA.sparse_attention_backward_wrapper
        gradients = backward(q, rows[:, 0], out, dout, lse, no_sink, slots, softmax_scale=scale)
        return gradients["dq"], gradients["dkv"].unsqueeze(1)

    return call
