"""What the ops are measured against: ceilings of this very GPU and the peers that are installed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

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


def tilelang() -> bool:
    """Whether TileLang is installed, and Megatron-Core, which has kernels of sparse attention in it."""
    return find_spec("tilelang") is not None and find_spec("megatron") is not None


def peers() -> dict[str, str | None]:
    """The distribution and version of each peer, None where it is not installed.

    sgl-flash-mla 1.0.0 has upstream's last kernels for Hopper.
    """
    packages = {"flash_mla": flash_mla() is not None, "cudnn": cudnn(), "tilelang": tilelang()}
    packages |= {name: find_spec(name) is not None for name in ("sglang", "vllm", "deep_gemm")}
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


def tilelang_backward(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    scale: float,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Megatron-Core's derivative in TileLang on the same arguments, by float32 atomics: dq and the rows' gradient."""
    name = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_sparse_mla_bwd"
    base_2 = lse * math.log2(math.e)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return import_module(name).sparse_mla_bwd(q, rows, out, dout, slots[:, None], base_2, sm_scale=scale)

    return call


def unwritten(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [T, K] for a peer to write, −1 where it does not: memory of earlier ones may hold right indices."""
    return torch.full((len(logits), k), -1, device=logits.device, dtype=torch.int32)


def sglang_topk(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> Callable[[], torch.Tensor]:
    """SGLang's topk_v2 as its engine calls it: indices [T, K] in any order.

    Rows of decode, up to 512, have a plan, which a step makes once for all its layers; rows of prefill need none.
    """
    next_power_of_2 = triton.next_power_of_2
    try:
        topk = import_module("sglang.kernels.ops.attention.dsv4.topk")
    finally:  # the package puts a function of its own in its place, which kernels cannot call, as vLLM's for blocks do
        triton.next_power_of_2 = next_power_of_2
    indices = unwritten(logits, k)
    if len(logits) > 512:
        offsets = torch.zeros_like(lengths)
        transform, more = topk.topk_transform_ragged_v2, {"out_offsets": offsets, "out_indices": indices}
        arguments: tuple[Any, ...] = logits, lengths
    else:
        transform, more = topk.topk_transform_paged_v2, {}
        arguments = logits, lengths, None, indices, 64, topk.plan_topk_v2(lengths)

    def call() -> torch.Tensor:
        transform(*arguments, **more)
        return indices

    return call


def deep_select(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> Callable[[], torch.Tensor]:
    """DeepSelect as SGLang brings it: indices [T, K] in any order. Rows start on multiples of 128 bytes."""
    topk = import_module("sglang.kernels.ops.attention.deep_select").topk
    indices = unwritten(logits, k)
    return lambda: topk(logits, k, end=lengths, output_idx=indices)[1]


def load_vllm() -> None:
    """vLLM's library alone: the package would also import what the library does not need."""
    package = find_spec("vllm")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'vllm'")
    (library,) = Path(package.submodule_search_locations[0]).glob("_C_stable_libtorch*.so")
    torch.ops.load_library(str(library))


def vllm_topk(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> Callable[[], torch.Tensor]:
    """vLLM's top-k as its engine chooses it, by the number of rows: indices [T, K] in any order."""
    load_vllm()
    topk = torch.ops._C.cooperative_topk if len(logits) <= 64 else torch.ops._C.persistent_topk
    indices = unwritten(logits, k)
    workspace = torch.zeros(1 << 20, device=logits.device, dtype=torch.uint8)

    def call() -> torch.Tensor:
        topk(logits, lengths, indices, workspace, k, logits.shape[1])
        return indices

    return call


def vllm_topk_of_prefill(logits: torch.Tensor, ends: torch.Tensor, k: int) -> Callable[[], torch.Tensor]:
    """vLLM's top-k of a chunk of prefill, whose rows begin with the first key: indices [T, K] in any order."""
    load_vllm()
    starts, strides = torch.zeros_like(ends), logits.stride()
    indices = unwritten(logits, k)

    def call() -> torch.Tensor:
        torch.ops._C.top_k_per_row_prefill(logits, starts, ends, indices, len(logits), *strides, k)
        return indices

    return call


def vllm_blocks(logits: torch.Tensor, lengths: torch.Tensor, k: int, size: int) -> Callable[[], torch.Tensor]:
    """The best blocks of logits by vLLM's kernels, the newest among them: [T, k] in any order, −1 padded."""
    kernels = import_module("vllm.model_executor.kernels.attention.dsa.candidate_blocks")
    selected = torch.empty(len(logits), k, device=logits.device, dtype=torch.int32)

    def call() -> torch.Tensor:
        kernels.select_candidate_blocks(logits, None, lengths, k, size, selected)
        return selected

    return call


def vllm_in_blocks(
    logits: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor, size: int, select: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A selection from logits, of which vLLM's kernels set those outside of the blocks to −∞ before."""
    kernels = import_module("vllm.model_executor.kernels.attention.dsa.candidate_blocks")

    def call() -> torch.Tensor:
        kernels.apply_candidate_mask(logits, None, lengths, blocks, size)
        return select()

    return call


def deep_gemm_logits(
    q8: torch.Tensor, weights: torch.Tensor, k8: torch.Tensor, scales: torch.Tensor, starts: torch.Tensor,
    ends: torch.Tensor,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """DeepGEMM's logits over contiguous keys [T, N]; what lies outside of a row's range is not written."""
    package = import_module("deep_gemm")
    return lambda: package.fp8_fp4_mqa_logits((q8, None), (k8, scales), weights, starts, ends, 0)


def deep_gemm_paged_logits(
    q8: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor,
    max_len: int,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """DeepGEMM's logits over pages of 64 keys [T, N]. Its schedule is made once, as by a step for all its layers."""
    package = import_module("deep_gemm")
    requests = len(block_table)
    lengths = lengths.view(requests, -1)
    sms = torch.cuda.get_device_properties(q8.device).multi_processor_count
    schedule = package.get_paged_mqa_logits_metadata(lengths, 64, sms)
    queries = q8.view(requests, -1, *q8.shape[1:]), None
    return lambda: package.fp8_fp4_paged_mqa_logits(
        queries, cache.unsqueeze(2), weights, lengths, block_table, schedule, max_len
    )
