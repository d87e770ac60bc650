"""xmla.compat.flash_mla and FlashMLA on the same arguments, at FlashMLA's tolerances; both modules in a CUDA graph."""

import math
from typing import Any

import pytest
import torch
from test_flash_mla import (
    DECODE_LSE,
    DECODE_OUT,
    PREFILL_LSE,
    PREFILL_OUT,
    attention,
    check,
    fp8_pool,
    make_sink,
)
from test_flash_mla_v4 import Source, query, random_lengths, source

from xmla.compat import deep_gemm
from xmla.compat import flash_mla as ours

pytestmark = pytest.mark.gpu


def theirs() -> Any:
    return pytest.importorskip("flash_mla", reason="FlashMLA's wheel is not installed")


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("s_q", [1, 3])
def test_decode_v32(s_q: int, heads: int) -> None:
    package = theirs()
    torch.manual_seed(0)
    requests, keys, topk, page = 74, 512, 64, 64
    slots = torch.randint(0, keys, (requests, s_q, topk), device="cuda", dtype=torch.int32)
    slots[:, :, 7] = -1
    slots[0] = -1
    cache, _ = fp8_pool(keys, page, slots[slots >= 0].unique())
    q, sink = torch.randn(requests, s_q, heads, 576, device="cuda").clamp(-1, 1).bfloat16(), make_sink(heads)
    got, want = (
        module.flash_mla_with_kvcache(
            q, cache.unsqueeze(2), None, None, 512, module.get_mla_metadata()[0], softmax_scale=576**-0.55,
            is_fp8_kvcache=True, indices=slots, attn_sink=sink, use_legacy=True, kv_format="V32",
        )
        for module in (ours, package)
    )  # fmt: skip
    assert (got[1][0] == math.inf).all() and got[1].shape == want[1].shape
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("requests", [2, 74])
def test_decode_v4_two_caches(requests: int, heads: int) -> None:
    package = theirs()
    torch.manual_seed(0)
    shapes = [(1024, 128, 256), (1024, 512, 64)]
    sources: list[Source] = [source(shape, requests, 2, random_lengths(requests, shape[1])) for shape in shapes]
    for part in sources:
        part.slots = part.attended().contiguous()
    by_request = lambda tensor: tensor.view(requests, -1, *tensor.shape[1:])
    q, sink = by_request(query(requests * 2, heads).contiguous()), make_sink(heads)
    main, extra = sources
    got, want = (
        module.flash_mla_with_kvcache(
            q, main.cache.unsqueeze(2), None, None, 512, module.get_mla_metadata()[0], softmax_scale=512**-0.55,
            is_fp8_kvcache=True, indices=by_request(main.slots), attn_sink=sink, extra_k_cache=extra.cache.unsqueeze(2),
            extra_indices_in_kvcache=by_request(extra.slots),
            topk_length=by_request(main.lengths)[:, 0].contiguous(),
            extra_topk_length=by_request(extra.lengths)[:, 0].contiguous(), use_legacy=True,
        )
        for module in (ours, package)
    )  # fmt: skip
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("base_2", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_prefill(heads: int, base_2: bool) -> None:
    """Beside FlashMLA and beside float64: max_logits is that of neither kernel."""
    package = theirs()
    torch.manual_seed(0)
    tokens, keys, topk = 62, 592, 128
    kv = (torch.randn(keys, 1, 576, device="cuda") / 10).clamp(-1, 1).bfloat16()
    q = torch.randn(tokens, heads, 576, device="cuda").clamp(-1, 1).bfloat16()
    slots = torch.randint(-1, keys, (tokens, 1, topk), device="cuda", dtype=torch.int32)
    slots[0] = -1
    lengths = torch.randint(0, topk + 1, (tokens,), device="cuda", dtype=torch.int32)
    sink = make_sink(heads)
    got, want = (
        module.flash_mla_sparse_fwd(
            q, kv, slots, 0.5, attn_sink=sink, topk_length=lengths, use_legacy=True, return_log2_lse=base_2 or None
        )
        for module in (ours, package)
    )
    for name, mine, its, bound in zip(
        ("out", "max_logits", "lse"), got, want, (PREFILL_OUT, PREFILL_LSE, PREFILL_LSE), strict=True
    ):
        check(name, mine, its, bound)
    exact = attention(q, kv[:, 0], slots[:, 0], lengths, sink, 0.5)[0]
    check("out beside float64", got[0], exact, PREFILL_OUT)


def test_in_a_graph() -> None:
    """Captured once; the lengths, slots and ranges of the replay are others."""
    torch.manual_seed(0)
    part = source((512, 64, 64), 4, 1, random_lengths(4, 64))
    slots, q = part.attended().view(4, 1, 64), query(4, 16).view(4, 1, 16, 512)
    pool, rows = part.cache.unsqueeze(2), torch.randn(80, 1, 512, device="cuda").bfloat16()
    q8 = torch.randn(4, 1, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    packed = torch.randint(-128, 128, (4, 1, 32, 64), device="cuda", dtype=torch.int8)
    unit = torch.full((4, 1, 32), 0x7F7F7F7F, device="cuda", dtype=torch.int32)
    pages = [torch.zeros(3, 64, 1, row, device="cuda", dtype=torch.uint8) for row in (132, 68)]
    keys, scales = torch.randn(80, 128, device="cuda").to(torch.float8_e4m3fn), torch.rand(80, device="cuda")
    weights, table = torch.randn(4, 32, device="cuda"), torch.arange(3, device="cuda", dtype=torch.int32).repeat(4, 1)
    starts, ends = (torch.full((4,), bound, device="cuda", dtype=torch.int32) for bound in (0, 70))

    def calls() -> list[torch.Tensor]:
        decoded = ours.flash_mla_with_kvcache(
            q, pool, None, None, 512, None, indices=slots, topk_length=part.lengths, softmax_scale=0.1
        )
        filled = ours.flash_mla_sparse_fwd(q[:, 0], rows, slots % 80, 0.1, topk_length=part.lengths)
        ragged = q8[:, 0], keys, scales
        logits = [
            deep_gemm.fp8_mqa_logits(ragged[0], ragged[1:], weights, starts, ends, True, width) for width in (0, 72)
        ]
        for query_of, pool_of in (((q8, None), pages[0]), ((packed, unit), pages[1])):
            logits.append(
                deep_gemm.fp8_fp4_paged_mqa_logits(query_of, pool_of, weights, ends[:, None], table, None, 150, True)
            )
        return [*decoded, *filled, *logits]

    calls()  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = calls()
    part.lengths.copy_(random_lengths(4, 64))
    slots.copy_(slots.flip(0))
    starts.fill_(11)
    ends.fill_(64)
    graph.replay()
    for got, want in zip(replayed, calls(), strict=True):
        assert torch.equal(got, want)
