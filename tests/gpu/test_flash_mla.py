"""FlashMLA's own correctness shapes for V3.2 at its own tolerances, decode and prefill, and FlashMLA beside them.

Shapes, data and tolerances follow FlashMLA's tests (tests/test_flash_mla_sparse_decoding.py, test_flash_mla_prefill.py,
revision 9241ae3): entries no index refers to are NaN, invalid indices are garbage, strides are padded. The reference is
float64 on the stored entries, on the GPU for speed; tests/test_ops.py holds it to the NumPy reference's results
through the kernels on small cases. Where the wheel is installed FlashMLA must pass too: it shows that the comparison
is the one its authors make.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from xmla import torch_api

pytestmark = pytest.mark.gpu

LATENT, ROPE = 512, 64
INVALID = (-(2**31), -123456, -1, 114514000, 2147480000, 2**31 - 1)


@dataclass(frozen=True)
class Tolerance:
    """An element passes by absolute or relative error; the tensor by 1 − 2Σab / Σ(a² + b²)."""

    absolute: float
    relative: float
    cosine: float


DECODE_OUT = Tolerance(1e-3, 2.01 / 128, 5e-6)
DECODE_LSE = Tolerance(1e-6, 8.01 / 65536, 1e-7)
PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536, 1e-7)


def check(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    got, want = got.double(), want.double()
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities or NaN in other places"
    a, b = got[finite], want[finite]
    assert a.isfinite().all(), f"{name}: not finite where the reference is"
    error = (a - b).abs()
    bad = (error >= tolerance.absolute) & (error >= tolerance.relative * b.abs())
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} off, worst {error[bad].max():.3e}"
    if a.any() or b.any():
        cosine = 1 - 2 * float((a * b).sum()) / max(float((a * a + b * b).sum()), 1e-300)
        assert cosine < tolerance.cosine, f"{name}: cosine difference {cosine:.2e}"


def attention(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention over rows [N, 576]; lse is −inf for a row without keys."""
    outs, lses = [], []
    step = max(1, (1 << 26) // (slots.shape[1] * 576))
    place = torch.arange(slots.shape[1], device=q.device)
    for first in range(0, len(q), step):
        chunk = slice(first, first + step)
        slot = slots[chunk].long()
        ok = (slot >= 0) & (slot < len(rows)) & (place < lengths[chunk, None])
        keys = rows[slot.clamp(0, len(rows) - 1)].double()
        keys[~ok] = 0.0
        scores = torch.einsum("thd,tkd->thk", q[chunk].double(), keys) * scale
        scores.masked_fill_(~ok[:, None], -math.inf)
        lse = scores.logsumexp(-1)
        total = torch.logaddexp(lse, sink.double())
        weights = torch.where(total[..., None].isinf(), 0.0, (scores - total[..., None]).exp())
        outs.append(torch.einsum("thk,tkd->thd", weights, keys[..., :LATENT]))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def make_sink(heads: int) -> torch.Tensor:
    sink = torch.randn(heads, device="cuda")
    sink[torch.rand(heads, device="cuda") < 0.1] = math.inf
    sink[torch.rand(heads, device="cuda") < 0.1] = -math.inf
    return sink


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor with a larger stride of the first axis."""
    wide = torch.full(
        (tensor.shape[0], *tensor.shape[1:-1], tensor.shape[-1] + 16), 9, device="cuda", dtype=tensor.dtype
    )
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def fp8_pool(keys: int, page: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A V3.2 cache whose page stride is one entry over dense, NaN but for the slots `used`; its entries as float32."""
    pages = -(-keys // page)
    pool = torch.full((pages, (page + 1) * 656), 255, device="cuda", dtype=torch.uint8)
    cache = pool[:, : page * 656].view(pages, page, 656)
    values = (torch.randn(len(used), LATENT + ROPE, device="cuda") / 10).clamp(-1, 1).bfloat16()
    torch_api.write_mla_cache(values[:, :LATENT].contiguous(), values[:, LATENT:].contiguous(), used, cache)
    every = torch.arange(pages * page, device="cuda", dtype=torch.int32)
    return cache, torch_api.read_mla_cache(cache, every, dtype="float32")


def flash_mla_decode(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, sink: torch.Tensor, scale: float):
    flash_mla = pytest.importorskip("flash_mla", reason="FlashMLA's wheel is not installed")
    schedule, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache.unsqueeze(2), None, None, LATENT, schedule, softmax_scale=scale, is_fp8_kvcache=True, indices=slots,
        attn_sink=sink, use_legacy=True,
    )  # fmt: skip
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


MAIN = [(512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2), (2046, 2048, 64),
        (2046, 2048, 576)]  # fmt: skip


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("requests", [4, 74, 321])
@pytest.mark.parametrize(("s_k", "topk", "page"), MAIN)
def test_decode(s_k: int, topk: int, page: int, requests: int, s_q: int, heads: int, implementation: str) -> None:
    torch.manual_seed(s_k + topk + page + requests + s_q + heads)
    tokens = requests * s_q
    total = -(-requests * s_k // page) * page
    order = torch.randperm(total, device="cuda", dtype=torch.int32)[: requests * s_k].view(requests, s_k)
    picks = torch.rand(tokens, max(s_k, topk), device="cuda").argsort(1)[:, :topk]
    owner = torch.arange(tokens, device="cuda") // s_q
    slots = torch.where(picks < s_k, order[owner[:, None], picks.clamp(max=s_k - 1)], -1).to(torch.int32)
    used = slots[slots >= 0].unique()
    cache, rows = fp8_pool(total, page, used)
    q = padded(torch.randn(tokens, heads, 576, device="cuda").clamp(-1, 1).bfloat16())
    sink, scale = make_sink(heads), 576**-0.55

    got = torch_api.sparse_mla(q, cache, padded(slots), None, sink, softmax_scale=scale, implementation=implementation)
    lengths = torch.full((tokens,), topk, device="cuda")
    want = attention(q, rows, slots, lengths, sink, scale)
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("s_k", "topk", "page"), [(512, 64, 64), (2046, 2048, 64)])
def test_flash_mla_passes_the_same_comparison(s_k: int, topk: int, page: int, heads: int) -> None:
    torch.manual_seed(0)
    requests, s_q = 74, 1
    total = -(-requests * s_k // page) * page
    picks = torch.rand(requests, max(s_k, topk), device="cuda").argsort(1)[:, :topk]
    base = torch.arange(requests, device="cuda")[:, None] * s_k
    slots = torch.where(picks < s_k, base + picks, -1).to(torch.int32)
    cache, rows = fp8_pool(total, page, slots[slots >= 0].unique())
    q = torch.randn(requests, heads, 576, device="cuda").clamp(-1, 1).bfloat16()
    sink, scale = make_sink(heads), 576**-0.55
    theirs = flash_mla_decode(q.view(requests, s_q, heads, 576), cache, slots.view(requests, s_q, topk), sink, scale)
    ours = torch_api.sparse_mla(q, cache, slots, None, sink, softmax_scale=scale, empty_lse="+inf")
    want = attention(q, rows, slots, torch.full((requests,), topk, device="cuda"), sink, scale)
    for name, got in (("FlashMLA", theirs), ("xmla", ours)):
        check(f"{name} out", got[0], want[0], DECODE_OUT)
        check(f"{name} lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(("topk", "page"), [(64, 61), (576, 53)])
@pytest.mark.parametrize("corner", ["all invalid", "zero lengths"])
def test_decode_corners(corner: str, topk: int, page: int, heads: int, with_sink: bool, implementation: str) -> None:
    torch.manual_seed(0)
    requests, s_q, s_k = 74, 3, 650
    tokens = requests * s_q
    slots = torch.rand(tokens, s_k, device="cuda").argsort(1)[:, :topk].to(torch.int32)
    lengths = torch.full((tokens,), topk, device="cuda", dtype=torch.int32)
    if corner == "all invalid":
        slots[:] = -1
    else:
        lengths[torch.rand(requests, device="cuda").repeat_interleave(s_q) < 0.5] = 0
    valid = torch.arange(topk, device="cuda") < lengths[:, None]
    used = slots[valid & (slots >= 0)].unique()
    slots[~valid] = 2**31 - 1
    cache, rows = fp8_pool(s_k, page, used)
    q = torch.randn(tokens, heads, 576, device="cuda").clamp(-1, 1).bfloat16()
    sink = make_sink(heads) if with_sink else None
    got = torch_api.sparse_mla(q, cache, slots, lengths, sink, softmax_scale=0.1, implementation=implementation)
    no_sink = torch.full((heads,), -math.inf, device="cuda")
    want = attention(q, rows, slots, lengths, no_sink if sink is None else sink, 0.1)
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


PREFILL = [(128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256),
           (114, 384), (32, 2048), (64, 8192)]  # fmt: skip


def run_prefill(
    tokens: int, s_kv: int, topk: int, heads: int, with_lengths: bool, packed: bool, implementation: str | None = None
) -> None:
    torch.manual_seed(s_kv + topk + tokens)
    picks = torch.rand(tokens, max(s_kv, topk), device="cuda").argsort(1)[:, :topk].to(torch.int32)
    garbage = torch.tensor([*INVALID, s_kv], device="cuda", dtype=torch.int32)
    bad = (picks >= s_kv) | (torch.rand(tokens, 1, device="cuda") < 0.05)
    slots = torch.where(bad, garbage[torch.randint(0, len(garbage), picks.shape, device="cuda")], picks)
    lengths = torch.full((tokens,), topk, device="cuda", dtype=torch.int32)
    if with_lengths:
        lengths = torch.randint(0, topk + 1, (tokens,), device="cuda", dtype=torch.int32)
    seen = (torch.arange(topk, device="cuda") < lengths[:, None]) & ~bad
    used = slots[seen].unique()
    if packed:
        cache, rows = fp8_pool(s_kv, 64, used)
        slots = torch.where(bad & (slots >= s_kv), 2**31 - 1, slots)
    else:
        plain = torch.full((s_kv, 584), math.nan, device="cuda", dtype=torch.bfloat16)
        plain[used.long(), :576] = (torch.randn(len(used), 576, device="cuda") / 10).clamp(-1, 1).bfloat16()
        cache, rows = plain[:, None, :576], plain[:, :576]
    q = padded(torch.randn(tokens, heads, 576, device="cuda").clamp(-1, 1).bfloat16())
    sink = make_sink(heads)
    got = torch_api.sparse_mla(
        q, cache, slots, lengths if with_lengths else None, sink, softmax_scale=0.5, implementation=implementation
    )
    want = attention(q, rows, slots, lengths, sink, 0.5)
    check("out", got[0], want[0], PREFILL_OUT)
    check("lse", got[1], want[1], PREFILL_LSE)


@pytest.mark.parametrize(("packed", "implementation"), [(False, None), (False, "triton"), (True, None)])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [1, 62, 213])
@pytest.mark.parametrize(("s_kv", "topk"), PREFILL)
def test_prefill(
    s_kv: int, topk: int, tokens: int, heads: int, with_lengths: bool, packed: bool, implementation: str | None
) -> None:
    run_prefill(tokens, s_kv, topk, heads, with_lengths, packed, implementation)


@pytest.mark.parametrize(
    ("tokens", "s_kv", "topk", "heads"), [(1234, 4321, 4096, 128), (4096, 2048, 2048, 128), (70000, 256, 64, 16)]
)
def test_prefill_large(tokens: int, s_kv: int, topk: int, heads: int) -> None:
    run_prefill(tokens, s_kv, topk, heads, with_lengths=False, packed=False)
