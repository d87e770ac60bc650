"""FlashMLA's and DeepGEMM's functions as their callers call them, against what they publish, restated in float64."""

import ast
import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import as_tuple

from xmla import ArgumentError, UnsupportedError
from xmla.compat import deep_gemm, flash_mla

ROOT = Path(__file__).parent.parent
INF = math.inf
REPLACED = {"flash_mla": flash_mla, "deep_gemm": deep_gemm}

DECODE = (
    "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None, "
    "causal=False, is_fp8_kvcache={}, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, "
    "topk_length=None, extra_topk_length=None"
)
PREFILL = "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None"
RAGGED = "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end"
PAGED = "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len"
SCHEDULE = "context_lens, block_kv, num_sms, indices=None"
BLOCKS = {  # since DeepGEMM 2.8
    "get_sparse_mqa_logits_metadata": "cu_seq_len_k_start, cu_seq_len_k_end, num_kv_tokens, sparse_kv_block_indices, "
    "qk_dtype, sparse_block_kv, use_unaligned_ks=False",
    "get_paged_sparse_mqa_logits_metadata": "context_lens, block_table, indices, page_kv, sparse_kv_block_indices, "
    "qk_dtype, sparse_block_kv",
    "fp8_fp4_sparse_mqa_logits": "q, kv, weights, metadata, num_max_sparse_blocks, sparse_block_kv, "
    "use_unaligned_ks=False",
    "fp8_fp4_paged_sparse_mqa_logits": "q, kv_cache, weights, metadata, num_max_sparse_blocks, sparse_block_kv",
}

# Parameters in the published order. In sgl-deep-gemm's fp8_mqa_logits two have other names; its callers use places.
PUBLISHED = {
    ("flash_mla", "FlashMLA 1.0.0 (9241ae3)"): {
        "get_mla_metadata": "*args, **kwargs",
        "flash_mla_with_kvcache": DECODE.format(False),
        "flash_mla_sparse_fwd": PREFILL,
    },
    ("flash_mla", "sgl-flash-mla 1.0.0"): {
        "get_mla_metadata": "*args, **kwargs",
        "get_mla_decoding_metadata": "seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, "
        "topk=None, use_legacy=False",
        "flash_mla_with_kvcache": DECODE.format(None) + ", enable_batch_invariant=False, use_legacy=False, "
        "kv_format=None, descale_q=None, descale_k=None",
        "flash_mla_sparse_fwd": PREFILL + ", use_legacy=False, return_log2_lse=None",
    },
    ("flash_mla", "vLLM 0.33.0"): {
        "get_mla_metadata": "*args, **kwargs",
        "flash_mla_with_kvcache": DECODE.format(False) + ", out=None, enable_batch_invariant=False",
        "flash_mla_sparse_fwd": PREFILL + ", out=None",
    },
    ("deep_gemm", "DeepGEMM 2.6.1 (54e2261)"): {
        "fp8_mqa_logits": RAGGED + ", clean_logits=True, max_seqlen_k=0",
        "fp8_fp4_mqa_logits": RAGGED + ", clean_logits=True, max_seqlen_k=0, logits_dtype=torch.float32",
        "fp8_paged_mqa_logits": PAGED + ", clean_logits=False, indices=None",
        "fp8_fp4_paged_mqa_logits": PAGED + ", clean_logits=False, logits_dtype=torch.float32, indices=None",
        "get_paged_mqa_logits_metadata": SCHEDULE,
        "get_num_sms": "",
        "set_num_sms": "num_sms",
    },
    ("deep_gemm", "sgl-deep-gemm 0.2.3.post2"): {
        "fp8_mqa_logits": RAGGED + ", clean_logits=False, max_seqlen_k=0",
        "fp8_fp4_mqa_logits": RAGGED
        + ", clean_logits=False, max_seqlen_k=0, logits_dtype=torch.float, schedule_meta=None",
        "fp8_paged_mqa_logits": PAGED + ", clean_logits=False, indices=None",
        "fp8_fp4_paged_mqa_logits": PAGED + ", clean_logits=False, logits_dtype=torch.float, indices=None",
        "get_paged_mqa_logits_metadata": SCHEDULE,
    },
    ("deep_gemm", "sgl-deep-gemm 0.2.5 (DeepGEMM 2.8)"): {
        "fp8_fp4_mqa_logits": RAGGED + ", max_seqlen_k, schedule_meta=None",
        "fp8_fp4_paged_mqa_logits": PAGED + ", indices=None",
        "get_paged_mqa_logits_metadata": SCHEDULE,
        **BLOCKS,
    },
    ("deep_gemm", "vLLM 0.33.0 (DeepGEMM 2.8.1)"): {
        "fp8_fp4_mqa_logits": RAGGED + ", max_seqlen_k, schedule_meta=None",
        "fp8_fp4_paged_mqa_logits": PAGED + ", indices=None",
        "get_paged_mqa_logits_metadata": SCHEDULE,
        **BLOCKS,
    },
}
RELEASES = [(*release, name) for release, functions in PUBLISHED.items() for name in functions]


def published_signature(text: str) -> inspect.Signature:
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def f({text}): pass", scope)
    return inspect.signature(scope["f"])


@pytest.mark.parametrize(("package", "release", "name"), RELEASES)
def test_signature(package: str, release: str, name: str) -> None:
    """Each published parameter has its place and is as optional, or its name alone will do: callers know both."""
    published = published_signature(PUBLISHED[package, release][name]).parameters
    ours = inspect.signature(getattr(REPLACED[package], name)).parameters
    assert set(published) <= set(ours)
    places = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    moved = {p for place, p in enumerate(published) if p in places and places.index(p) != place}
    # DeepGEMM 2.8 has max_seqlen_k where clean_logits was, which its type tells; indices are given by name.
    assert moved <= ({"max_seqlen_k", "indices"} if "2.8" in release else set())
    for parameter in published.values():
        mine = ours[parameter.name]
        assert mine.kind is parameter.kind or mine.kind is mine.KEYWORD_ONLY
        required = parameter.default is parameter.empty and parameter.name != "max_seqlen_k"
        assert (mine.default is mine.empty) == required
        same = mine.default == parameter.default or parameter.name in ("clean_logits", "is_fp8_kvcache")
        assert required or same or parameter.name == "max_seqlen_k"


def test_the_published_signatures_are_those_of_the_wheel() -> None:
    spec = importlib.util.find_spec("flash_mla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sgl-flash-mla is not installed; its signatures are data here")
    source = (Path(spec.submodule_search_locations[0]) / "flash_mla_interface.py").read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name, text in PUBLISHED["flash_mla", "sgl-flash-mla 1.0.0"].items():
        arguments = functions[name].args
        for node in (*arguments.args, *filter(None, (arguments.vararg, arguments.kwarg))):
            node.annotation = None
        assert str(published_signature(ast.unparse(arguments))) == str(published_signature(text)), name


# Pools, byte by byte, and the entries that they hold.


def v32_pool(pages: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, R, 1, 656] bytes, with a page stride of one entry more, and their float64 entries [P·R, 576]."""
    values = torch.randn(pages, entries, 4, 128).mul(20).to(torch.float8_e4m3fn)
    scales = torch.rand(pages, entries, 4) / 200
    rope = torch.randn(pages, entries, 64).bfloat16() / 10
    wide = torch.full((pages, entries + 1, 1, 656), 255, dtype=torch.uint8)
    parts = [part.contiguous().view(torch.uint8).view(pages, entries, -1) for part in (values, scales, rope)]
    wide[:, :entries, 0] = torch.cat(parts, dim=-1)
    latent = (values.double() * scales.double()[..., None]).flatten(-2)
    return wide[:, :entries], torch.cat([latent, rope.double()], dim=-1).flatten(0, 1)


def v4_pool(pages: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, R, 1, 584]: in a page 448 e4m3 and 64 bfloat16 of each entry, then 7 UE8M0 scales and a pad of each."""
    values = torch.randn(pages, entries, 7, 64).mul(20).to(torch.float8_e4m3fn)
    exponents = torch.randint(117, 120, (pages, entries, 8), dtype=torch.uint8)
    rope = torch.randn(pages, entries, 64).bfloat16() / 10
    parts = [part.contiguous().view(torch.uint8).view(pages, entries, -1) for part in (values, rope)]
    page = torch.cat([torch.cat(parts, dim=-1).flatten(1), exponents.flatten(1)], dim=1)
    nope = (values.double() * torch.exp2(exponents[..., :7].double() - 127)[..., None]).flatten(-2)
    return page.view(pages, entries, 1, 584), torch.cat([nope, rope.double()], dim=-1).flatten(0, 1)


def v41_pool(pages: int, entries: int, footer: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, R, 1, 528]: 512 e4m3 and 16 UE8M0 scales of an entry, these behind its values or in the page's footer."""
    values = torch.randn(pages, entries, 16, 32).mul(20).to(torch.float8_e4m3fn)
    exponents = torch.randint(117, 120, (pages, entries, 16), dtype=torch.uint8)
    codes = values.view(torch.uint8).flatten(-2)
    page = torch.cat([codes.flatten(1), exponents.flatten(1)], 1) if footer else torch.cat([codes, exponents], -1)
    dense = (values.double() * torch.exp2(exponents.double() - 127)[..., None]).flatten(-2)
    return page.reshape(pages, entries, 1, 528), dense.flatten(0, 1)


def v41_fp4_pool(pages: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, R, 1, 288]: 512 e2m1, the even dim in the low nibble, and 32 e4m3 scales of an entry."""
    codes = torch.randint(0, 16, (pages, entries, 512), dtype=torch.uint8)
    scales = torch.rand(pages, entries, 32).to(torch.float8_e4m3fn)
    cache = torch.cat([codes[..., ::2] | codes[..., 1::2] << 4, scales.view(torch.uint8)], -1)
    values = E2M1[(codes & 7).long()].double() * torch.where(codes > 7, -1, 1)
    dense = (values.unflatten(-1, (32, 16)) * scales.double()[..., None]).flatten(-2)
    return cache[:, :, None], dense.flatten(0, 1)


def attention(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, scale: float, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, max_logits, lse of q [T, H, D] over keys [T, K, D], those that are `valid` [T, K], in float64 on the CPU.

    As FlashMLA's tests/ref.py has it: a row without keys has out 0, max_logits −inf and lse +inf; the sink is in out.
    """
    q, keys, valid = (tensor.cpu() for tensor in (q, keys, valid))
    scores = torch.einsum("thd,tkd->thk", q.double(), keys.double()) * scale
    scores.masked_fill_(~valid[:, None], -INF)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.cpu().double())
    weights = torch.where(valid[:, None], (scores - total[..., None]).exp(), 0.0)
    out = torch.einsum("thk,tkv->thv", weights, torch.where(valid[..., None], keys.double(), 0.0)[..., :512])
    return out, scores.amax(-1), lse.masked_fill(lse == -INF, INF)


def gathered(rows: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, K, D] behind slots [T, K], and which of them are keys."""
    valid = (slots >= 0) & (slots < len(rows)) & (torch.arange(slots.shape[1]) < lengths[:, None])
    return rows[torch.where(valid, slots, 0).long()], valid


def close(name: str, got: torch.Tensor, want: torch.Tensor, absolute: float, relative: float) -> None:
    """FlashMLA's comparison: infinities in their places, each other element by absolute or relative error."""
    got, want = got.cpu().double(), want.double()
    assert got.shape == want.shape, name
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities"
    error = (got - want)[finite].abs()
    bad = (error >= absolute) & (error >= relative * want[finite].abs())
    assert not bad.any(), f"{name}: {error[bad].max()}"


OUT, STATISTICS = (2**-8, 2.01 / 128), (5e-6, 8.01 / 65536)  # FlashMLA's, but probabilities of few keys are larger
REQUESTS, TOKENS, HEADS = 2, 2, 3


def decode_problem(device: str, make: Any, dims: int, make_extra: Any = None) -> SimpleNamespace:
    """Two sources, of one format by default; a token without keys; −1, and garbage past the lengths."""
    torch.manual_seed(0)
    (pool, rows), (extra, extra_rows) = make(3, 4), (make_extra or make)(2, 5)
    rows_t = REQUESTS * TOKENS
    slots, extra_slots = (torch.randint(0, len(r), (rows_t, 8), dtype=torch.int32) for r in (rows, extra_rows))
    slots[0, 3] = slots[1, 0] = -1
    lengths, extra_lengths = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    each, extra_each = lengths.repeat_interleave(TOKENS), extra_lengths.repeat_interleave(TOKENS)
    slots[torch.arange(8) >= each[:, None]] = 2**31 - 1
    q = torch.randn(REQUESTS, TOKENS, HEADS, dims).bfloat16() / 4
    sink = torch.tensor([0.5, -INF, INF])
    keys, valid = gathered(rows, slots, each)
    more, more_valid = gathered(extra_rows, extra_slots, extra_each)
    on = lambda t: t.to(device)
    wide = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=device)
    by_request = lambda t: on(t).view(REQUESTS, TOKENS, -1)
    return SimpleNamespace(
        q=on(q), pool=wide.copy_(pool), extra=on(extra), slots=by_request(slots), extra_slots=by_request(extra_slots),
        lengths=on(lengths), extra_lengths=on(extra_lengths), sink=on(sink), keys=torch.cat([keys, more], 1),
        valid=torch.cat([valid, more_valid], 1), one=(keys, valid),
    )  # fmt: skip


def check_decode(p: SimpleNamespace, got: tuple[torch.Tensor, torch.Tensor], scale: float, two: bool) -> None:
    keys, valid = (p.keys, p.valid) if two else p.one
    out, _, lse = attention(p.q.flatten(0, 1), keys, valid, scale, p.sink if two else None)
    assert not valid[-1].any() and valid[0].any()
    close("out", got[0], out.view(REQUESTS, TOKENS, HEADS, 512), *OUT)
    close("lse", got[1], lse.view(REQUESTS, TOKENS, HEADS).transpose(1, 2), *STATISTICS)


def test_decode_as_sglang_calls_it(device: str) -> None:
    """dsa_backend.py through kernels/ops/attention/flash_mla_interface.py; q's scale by default."""
    p = decode_problem(device, v32_pool, 576)
    schedule, splits = flash_mla.get_mla_decoding_metadata(p.lengths, 2 * HEADS, 1, HEADS, True, 8, use_legacy=True)
    assert len(splits) == REQUESTS + 1
    held = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits)
    got = flash_mla.flash_mla_with_kvcache(
        q=p.q, k_cache=p.pool, block_table=p.slots.new_empty((REQUESTS, 0)), cache_seqlens=p.lengths, head_dim_v=512,
        tile_scheduler_metadata=held, softmax_scale=None, causal=False, is_fp8_kvcache=True, indices=p.slots,
        attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=p.lengths,
        extra_topk_length=None, use_legacy=True, kv_format="V32", descale_q=None, descale_k=None,
    )  # fmt: skip
    check_decode(p, got, 576**-0.5, two=False)


@pytest.mark.parametrize("dense_out", [True, False])
def test_v4_decode_as_vllm_calls_it(device: str, dense_out: bool) -> None:
    """models/deepseek_v4/nvidia/flashmla.py."""
    p = decode_problem(device, v4_pool, 512)
    wide = torch.full((REQUESTS, TOKENS, HEADS + 1, 512), 7.0, device=device, dtype=torch.bfloat16)
    out = wide[:, :, :HEADS].contiguous() if dense_out else wide[:, :, :HEADS]
    got = flash_mla.flash_mla_with_kvcache(
        q=p.q, k_cache=p.pool, block_table=None, head_dim_v=512,
        tile_scheduler_metadata=flash_mla.get_mla_metadata()[0], cache_seqlens=None, is_fp8_kvcache=True,
        indices=p.slots, topk_length=p.lengths, softmax_scale=0.05, attn_sink=p.sink, extra_k_cache=p.extra,
        extra_indices_in_kvcache=p.extra_slots, extra_topk_length=p.extra_lengths, out=out,
    )  # fmt: skip
    assert got[0] is out and (dense_out or (wide[:, :, HEADS:] == 7).all())
    check_decode(p, got, 0.05, two=True)


@pytest.mark.parametrize("footer", [True, False])
def test_v41_rows_are_read_as_the_kernels_that_are_asked_for_read_them(device: str, footer: bool) -> None:
    p = decode_problem(device, lambda *size: v41_pool(*size, footer), 512)
    got = flash_mla.flash_mla_with_kvcache(
        p.q, p.pool, None, None, 512, flash_mla.get_mla_metadata()[0], softmax_scale=0.05, indices=p.slots.long(),
        attn_sink=p.sink, extra_k_cache=p.extra, extra_indices_in_kvcache=p.extra_slots, topk_length=p.lengths,
        extra_topk_length=p.extra_lengths, use_legacy=footer, enable_batch_invariant=not footer,
    )  # fmt: skip
    check_decode(p, got, 0.05, two=True)


@pytest.mark.parametrize("kv_format", [None, "V41"])
def test_v41_rows_beside_its_compressed_ones(device: str, kv_format: str | None) -> None:
    """The released pair: a window of MXFP8 and compressed entries of NVFP4, each source with its own format."""
    p = decode_problem(device, lambda *size: v41_pool(*size, False), 512, v41_fp4_pool)
    got = flash_mla.flash_mla_with_kvcache(
        p.q, p.pool, None, None, 512, flash_mla.get_mla_metadata()[0], softmax_scale=0.05, indices=p.slots,
        attn_sink=p.sink, extra_k_cache=p.extra, extra_indices_in_kvcache=p.extra_slots, topk_length=p.lengths,
        extra_topk_length=p.extra_lengths, kv_format=kv_format,
    )  # fmt: skip
    check_decode(p, got, 0.05, two=True)


def prefill_problem(device: str) -> SimpleNamespace:
    torch.manual_seed(0)
    kv, q = torch.randn(20, 1, 576).bfloat16() / 4, torch.randn(4, HEADS, 576).bfloat16() / 4
    slots = torch.randint(0, 20, (4, 8), dtype=torch.int64)
    slots[0, 2:6] = torch.tensor([-1, 20, 2**32 + 5, -(2**40)])
    slots[1], lengths = slots[1, 0], torch.tensor([8, 5, 3, 0])  # the second token has one key, five times
    sink = torch.tensor([0.5, -INF, INF])
    want = attention(q, *gathered(kv[:, 0].double(), slots, lengths), 0.5, sink)
    on = lambda t: t.to(device)
    return SimpleNamespace(q=on(q), kv=on(kv), indices=on(slots)[:, None], sink=on(sink),
                           lengths=on(lengths.to(torch.int32)), want=want)  # fmt: skip


@pytest.mark.parametrize("base_2", [True, False])
def test_prefill_as_sglang_calls_it(device: str, base_2: bool) -> None:
    """dsa_backend.py and deepseek_v4_backend.py through kernels/ops/attention/flash_mla_interface.py."""
    p = prefill_problem(device)
    got = flash_mla.flash_mla_sparse_fwd(
        p.q, p.kv, p.indices, 0.5, 512, p.sink, p.lengths, use_legacy=base_2, return_log2_lse=True if base_2 else None
    )
    out, *statistics = p.want
    close("out", got[0], out, *OUT)
    for name, mine, want in zip(("max_logits", "lse"), got[1:], statistics, strict=True):
        close(name, mine, want / math.log(2) if base_2 else want, 1e-6, 2.01 / 65536)  # FlashMLA's own bounds


def test_prefill_as_vllm_calls_it(device: str) -> None:
    """v1/attention/backends/mla/flashmla_sparse.py, and V4.1's with heads of a wider output."""
    p = prefill_problem(device)
    wide = torch.zeros((4, HEADS + 1, 512), device=device, dtype=torch.bfloat16)
    got = flash_mla.flash_mla_sparse_fwd(
        q=p.q, kv=p.kv, indices=p.indices, sm_scale=0.5, attn_sink=p.sink, topk_length=p.lengths, out=wide[:, :HEADS]
    )
    assert not wide[:, HEADS:].any()
    close("out", wide[:, :HEADS], p.want[0], *OUT)
    close("lse", got[2], p.want[2], *STATISTICS)
    same, none, nothing = flash_mla.flash_mla_sparse_fwd(
        p.q, p.kv, p.indices, 0.5, attn_sink=p.sink, topk_length=p.lengths, return_log2_lse=False
    )
    assert torch.equal(same, got[0]) and none is nothing is None


# The indexer's logits.

LOGITS = 5e-6  # DeepGEMM's bound of 1 − 2Σab / Σ(a² + b²) against quantised operands


def same_logits(got: torch.Tensor, want: torch.Tensor, seen: torch.Tensor, bound: float = LOGITS) -> None:
    a, b = got.cpu().double()[seen], want[seen]
    assert got.shape == want.shape and seen.any() and a.isfinite().all()
    assert 1 - 2 * float((a * b).sum() / (a * a + b * b).sum()) < bound


def logits_of(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ_h relu(q[t,h] · key[t,n]) · weights[t,h] in float64, of q [T, H, D] and keys [N, D] or [T, N, D]."""
    dots = torch.einsum("thd,nd->thn" if keys.dim() == 2 else "thd,tnd->thn", q.double(), keys.double())
    return (dots.relu() * weights.double()[..., None]).sum(1)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random packed e2m1 [..., D/2] int8, UE8M0 of 32 dims each in [...] int32, and their values [..., D] float64."""
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    exponents = torch.randint(124, 130, (*shape[:-1], 4), dtype=torch.uint8)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int8)
    values = E2M1[(codes & 7).long()].double() * torch.where(codes > 7, -1, 1)
    scales = torch.exp2(exponents[..., : shape[-1] // 32].double() - 127)
    return packed, exponents.view(torch.int32)[..., 0], (values.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)


def ragged_problem(device: str, fp4: bool) -> SimpleNamespace:
    torch.manual_seed(0)
    tokens, heads, dims, count = 5, 4, 64, 37
    weights = torch.randn(tokens, heads)
    if fp4:
        q, q_scales, q_values = mxfp4(tokens, heads, dims)
        keys, scales, key_values = mxfp4(count, dims)
    else:
        q, q_scales = torch.randn(tokens, heads, dims).to(torch.float8_e4m3fn), None
        keys, scales = torch.randn(count, dims).to(torch.float8_e4m3fn), torch.rand(count)
        q_values, key_values = q.double(), keys.double() * scales.double()[:, None]
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 9, 37, 30], [20, 1, 37, 37, 31]))
    column = torch.arange(count)
    on = lambda t: None if t is None else t.to(device)
    return SimpleNamespace(
        q=(on(q), on(q_scales)), kv=(on(keys), on(scales)), weights=on(weights), starts=on(starts), ends=on(ends),
        range=(starts, ends), seen=(column >= starts[:, None]) & (column < ends[:, None]),
        want=logits_of(q_values, key_values, weights),
    )  # fmt: skip


def compressed(p: SimpleNamespace, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's logits from its own first key on, and which columns are keys."""
    starts, ends = p.range
    column = torch.arange(width)
    place = (starts[:, None] + column).clamp(max=p.want.shape[1] - 1).long()
    return p.want.gather(1, place), column < (ends - starts)[:, None]


@pytest.mark.parametrize("fp4", [False, True])
def test_ragged_logits_as_deep_gemm_is_called(device: str, fp4: bool) -> None:
    p = ragged_problem(device, fp4)
    call = deep_gemm.fp8_fp4_mqa_logits if fp4 else deep_gemm.fp8_mqa_logits
    got = call(p.q if fp4 else p.q[0], p.kv, p.weights, p.starts, p.ends, clean_logits=True)
    assert torch.equal(got.cpu() == -INF, ~p.seen) and got.stride(0) % 256 == 0
    same_logits(got, p.want, p.seen)
    raw = call(p.q if fp4 else p.q[0], p.kv, p.weights, p.starts, p.ends, clean_logits=False)  # as SGLang calls it
    same_logits(raw, p.want, p.seen)


@pytest.mark.parametrize("fp4", [False, True])
def test_compressed_logits(device: str, fp4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's utils/deep_gemm.py gives the width in the sixth place, SGLang's index_logits.py False and then it."""
    monkeypatch.setattr(deep_gemm, "DENSE_BYTES", 2 * 4 * 37)  # two tokens at a time
    p = ragged_problem(device, fp4)
    want, seen = compressed(p, 28)
    vllm = deep_gemm.fp8_fp4_mqa_logits(p.q, p.kv, p.weights, p.starts, p.ends, 28)
    sglang = deep_gemm.fp8_fp4_mqa_logits(p.q, p.kv, p.weights, p.starts, p.ends, False, 28, logits_dtype=torch.float32)
    for got in (vllm, sglang):
        assert got.stride(0) == 256
        same_logits(got, want, seen)
    wide, wide_seen = compressed(p, 64)  # more columns than keys
    cleaned = deep_gemm.fp8_fp4_mqa_logits(
        q=p.q, kv=p.kv, weights=p.weights.bfloat16(), cu_seq_len_k_start=p.starts, cu_seq_len_k_end=p.ends,
        clean_logits=True, max_seqlen_k=64, logits_dtype=torch.bfloat16,
    )  # fmt: skip
    assert cleaned.dtype == torch.bfloat16 and torch.equal(cleaned.cpu() == -INF, ~wide_seen)
    same_logits(cleaned, wide, wide_seen, bound=3e-5)


def test_no_keys(device: str) -> None:
    """A range that ends behind the keys ends with them."""
    p = ragged_problem(device, False)
    keys, scales = p.kv
    for count, seen in ((0, 0), (20, 20)):
        got = deep_gemm.fp8_mqa_logits(
            p.q[0], (keys[:count], scales[:count]), p.weights, p.starts * 0, p.starts * 0 + 99, True, 24
        )
        assert ((got > -INF).sum(1) == seen).all()


def paged_problem(device: str, fp4: bool, next_n: int) -> SimpleNamespace:
    """Three requests over pages of 4 in another order; the last one has no key."""
    torch.manual_seed(0)
    requests, heads, dims, pages, page, width = 3, 4, 64, 7, 4, 16
    weights = torch.randn(requests * next_n, heads)
    if fp4:
        q, q_scales, q_values = mxfp4(requests, next_n, heads, dims)
        keys, scales, key_values = mxfp4(pages, page, dims)
    else:
        q, q_scales = torch.randn(requests, next_n, heads, dims).to(torch.float8_e4m3fn), None
        keys, scales = torch.randn(pages, page, dims).to(torch.float8_e4m3fn), torch.rand(pages, page)
        q_values, key_values = q.double(), keys.double() * scales.double()[..., None]
    parts = [part.contiguous().view(torch.uint8).flatten(1) for part in (keys, scales)]
    row = dims // 2 + 4 if fp4 else dims + 4
    block_table = torch.tensor([[5, 0, 3, 2], [1, 6, 4, 4], [0, 0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([[15], [6], [0]]) - torch.arange(next_n).flip(0)
    lengths = lengths.clamp(min=0).to(torch.int32)
    owner = torch.arange(requests).repeat_interleave(next_n)
    each = key_values[block_table.long()].flatten(1, 2)[owner]
    on = lambda t: None if t is None else t.to(device)
    return SimpleNamespace(
        q=(on(q), on(q_scales)), cache=on(torch.cat(parts, 1).view(pages, page, 1, row)), weights=on(weights),
        block_table=on(block_table), lengths=on(lengths), width=width,
        seen=torch.arange(width) < lengths.flatten()[:, None], want=logits_of(q_values.flatten(0, 1), each, weights),
    )  # fmt: skip


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("fp4", [False, True])
def test_paged_logits_as_the_engines_call_them(device: str, fp4: bool, next_n: int) -> None:
    """vLLM's utils/deep_gemm.py; SGLang's dsa_indexer.py and index_logits.py."""
    p = paged_problem(device, fp4, next_n)
    ids = torch.arange(len(p.lengths), device=device, dtype=torch.int32)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(p.lengths, 4, deep_gemm.get_num_sms(), indices=ids)
    assert schedule.shape == (deep_gemm.get_num_sms() + 1, 2) and schedule.dtype == torch.int32
    arguments = (p.cache, p.weights, p.lengths, p.block_table, schedule, p.width)
    calls = [
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits(p.q, *arguments, indices=ids),
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits(p.q, *arguments, False, logits_dtype=torch.float32),
    ]
    if not fp4:
        calls.append(lambda: deep_gemm.fp8_paged_mqa_logits(p.q[0], *arguments, clean_logits=False))
    for call in calls:
        got = call()
        assert got.stride(0) == 256
        same_logits(got, p.want, p.seen)
    cleaned = deep_gemm.fp8_fp4_paged_mqa_logits(p.q, *arguments, clean_logits=True, logits_dtype=torch.bfloat16)
    assert torch.equal(cleaned.cpu() == -INF, ~p.seen)
    same_logits(cleaned, p.want, p.seen, bound=3e-5)


def test_one_length_a_request(device: str) -> None:
    """The lengths [B] of earlier DeepGEMMs are of the last token."""
    p = paged_problem(device, False, 3)
    last = p.lengths[:, -1].contiguous()
    got = deep_gemm.fp8_paged_mqa_logits(p.q[0], p.cache, p.weights, last, p.block_table, None, p.width, True)
    assert torch.equal(got.cpu() == -INF, ~p.seen)


def test_lengths_past_the_block_table_end_with_it(device: str) -> None:
    """Columns that no page holds are −inf if they are cleaned, though the length counts them."""
    p = paged_problem(device, False, 1)
    for lengths in (p.lengths.clone(), p.lengths[:, 0].clone()):
        lengths[0] = p.width + 7
        got = deep_gemm.fp8_paged_mqa_logits(
            p.q[0], p.cache, p.weights, lengths, p.block_table, None, p.width + 9, True
        )  # fmt: skip
        seen = p.seen.clone()
        seen[0] = True
        assert torch.equal(got.cpu()[:, : p.width] == -INF, ~seen)
        assert (got[:, p.width :] == -INF).all()


# The indexer's logits of keys in selected blocks.


def some_blocks(starts: torch.Tensor, ends: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """[T, count] blocks as DeepGEMM's callers have them: ascending, the newest among them, the last one repeated."""
    rows = torch.zeros(len(starts), count, dtype=torch.int32)
    for row, start, end in zip(rows, starts.tolist(), ends.tolist(), strict=True):
        there = -(-(end - start) // size)
        picked = torch.cat([torch.randperm(max(there - 1, 0))[: count - 1], torch.arange(there)[-1:]]).sort().values
        if there:
            row[:] = start // size + torch.nn.functional.pad(picked, (0, count - len(picked)), value=there - 1)
    return rows


def of_blocks(
    want: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, blocks: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the blocks' keys by DeepGEMM's numbering, which columns are keys, and which keys are in no block."""
    position = blocks.repeat_interleave(size, 1) * size + torch.arange(size).repeat(blocks.shape[1])
    position = position + (starts % size)[:, None]
    blocks_there = -((starts - ends) // size)
    seen = torch.arange(position.shape[1]) < (blocks_there * size)[:, None]
    seen &= (position >= starts[:, None]) & (position < ends[:, None])
    position = torch.where(seen, position, 0).long()
    unread = torch.ones_like(want, dtype=torch.bool)
    unread[torch.arange(len(seen))[:, None].expand_as(seen)[seen], position[seen]] = False
    return want.gather(1, position), seen, unread


NAN_SCALES = -1  # four bytes of 255


@pytest.mark.parametrize(("size", "count"), [(8, 3), (2, 5), (16, 4)])
def test_logits_of_blocks(device: str, size: int, count: int) -> None:
    """vLLM's sparse_mqa_logits.py. The keys are those of one request for each row's range; others are NaN."""
    p = ragged_problem(device, True)
    starts, ends = p.range
    blocks = some_blocks(starts, ends, count, size)
    want, seen, unread = of_blocks(p.want, starts, ends, blocks, size)
    keys, scales = p.kv
    scales = scales.masked_fill(unread.all(0).to(device), NAN_SCALES)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(
        cu_seq_len_k_start=p.starts, cu_seq_len_k_end=p.ends, num_kv_tokens=len(keys),
        sparse_kv_block_indices=blocks.to(device), qk_dtype=torch.int8, sparse_block_kv=size, use_unaligned_ks=True,
    )  # fmt: skip
    assert metadata.dtype == torch.uint8 and metadata.dim() == 1
    got = deep_gemm.fp8_fp4_sparse_mqa_logits(
        q=p.q, kv=(keys, scales), weights=p.weights, metadata=metadata, num_max_sparse_blocks=count,
        sparse_block_kv=size, use_unaligned_ks=True,
    )  # fmt: skip
    assert got.dtype == torch.bfloat16 and got.stride() == (512, 1)
    assert torch.equal(got.cpu() == -INF, ~seen)
    same_logits(got, want, seen, bound=3e-5)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize(("size", "count"), [(4, 3), (2, 5), (1, 200)])
def test_paged_logits_of_blocks(device: str, size: int, count: int, column: bool) -> None:
    """SGLang's index_logits.py, and vLLM's sparse_mqa_logits.py: each row is a request of one token."""
    p = paged_problem(device, True, 3)
    lengths = p.lengths.flatten()
    rows, (pages, page), row = len(lengths), p.cache.shape[:2], p.cache.shape[-1]
    blocks = some_blocks(torch.zeros_like(lengths), lengths.cpu(), count, size)
    want, seen, unread = of_blocks(p.want, torch.zeros_like(lengths.cpu()), lengths.cpu(), blocks, size)
    slots = (p.block_table.cpu() * page)[:, :, None] + torch.arange(page)
    used = slots.flatten(1).repeat_interleave(3, 0)[~unread]
    free = torch.ones(pages * page, dtype=torch.bool)
    free[used] = False
    scales = p.cache.view(pages, -1)[:, page * (row - 4) :].view(torch.int32)
    scales.masked_fill_(free.view(pages, page).to(device), NAN_SCALES)
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        lengths[:, None] if column else lengths, p.block_table.repeat_interleave(3, 0),
        torch.arange(rows, device=device, dtype=torch.int32) // 3, page, blocks.to(device), torch.int8, size,
    )  # fmt: skip
    assert metadata.dtype == torch.uint8 and metadata.dim() == 1
    q, q_scales = p.q
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(
        (q.flatten(0, 1)[:, None], q_scales.flatten(0, 1)[:, None]),
        p.cache,
        p.weights.bfloat16(),
        metadata,
        count,
        size,
    )
    assert got.dtype == torch.bfloat16 and got.stride() == (512, 1)
    assert torch.equal(got.cpu() == -INF, ~seen)
    same_logits(got, want, seen, bound=3e-5)


def test_blocks_of_ranges_beyond_the_keys(device: str) -> None:
    """A range starts with the first key and ends with the last: so do its blocks, and their numbering."""
    p = ragged_problem(device, True)
    blocks = torch.arange(3, dtype=torch.int32, device=device).expand(5, 3)
    for first, given, inside in ((0, (-3, 21), (0, 21)), (3, (24, 99), (24, 37))):
        both = []
        for start, end in (given, inside):
            starts, ends = torch.full_like(p.starts, start), torch.full_like(p.ends, end)
            metadata = deep_gemm.get_sparse_mqa_logits_metadata(starts, ends, 37, blocks + first, torch.int8, 8)
            both.append(deep_gemm.fp8_fp4_sparse_mqa_logits(p.q, p.kv, p.weights, metadata, 3, 8))
        assert torch.equal(*both) and (both[0] > -INF).sum() == 5 * (inside[1] - inside[0])


def test_blocks_that_a_row_cannot_have(device: str) -> None:
    """Behind as many as a row's keys fill, and outside of its range, a number is no block: no key is read for it."""
    p = ragged_problem(device, True)
    keys, scales = p.kv
    wrong = torch.tensor([[2**31 - 1, -1, 99, -(2**31)]] * 5, dtype=torch.int32, device=device)
    metadata = deep_gemm.get_sparse_mqa_logits_metadata(p.starts, p.ends, len(keys), wrong, torch.int8, 8)
    nan = (keys, torch.full_like(scales, NAN_SCALES))
    assert (deep_gemm.fp8_fp4_sparse_mqa_logits(p.q, nan, p.weights, metadata, 4, 8) == -INF).all()
    p = paged_problem(device, True, 1)
    rows = torch.arange(3, device=device, dtype=torch.int32)
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        p.lengths, p.block_table, rows, 4, wrong[:3], torch.int8, 4
    )  # fmt: skip
    assert (deep_gemm.fp8_fp4_paged_sparse_mqa_logits(p.q, p.cache, p.weights, metadata, 4, 4) == -INF).all()
    behind = torch.tensor([[3, 0]] * 3, dtype=torch.int32, device=device)  # in the table, past lengths of 6 and 0
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(p.lengths, p.block_table, rows, 4, behind, torch.int8, 4)
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(p.q, p.cache, p.weights, metadata, 2, 4)
    assert (got[0] > -INF).any() and (got[1:, :4] == -INF).all()


def test_more_keys_than_int32_counts_are_left_to_deep_gemm(device: str) -> None:
    """A length of all of them is one more than int32 holds."""
    q, scales = (torch.zeros(1, 1, 64, size, dtype=torch.int8, device=device) for size in (32, 4))
    cache = torch.zeros(1, 1, 1, 36, dtype=torch.uint8, device=device).expand(2**25, 64, 1, 36)
    metadata = torch.zeros(12, dtype=torch.uint8, device=device)
    with pytest.raises(UnsupportedError, match=rf"^fp8_fp4_paged_sparse_mqa_logits: kv_cache has {2**31} keys, suppo"):
        deep_gemm.fp8_fp4_paged_sparse_mqa_logits(
            (q, scales.view(torch.int32)[..., 0]), cache, torch.ones(1, 64, device=device), metadata, 2, 64
        )


# How arguments lie in memory.


def published_calls(device: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A call of each function that takes tensors, or several where these go different ways: its name and arguments."""
    p, r = decode_problem(device, v4_pool, 512), prefill_problem(device)
    d, x = ragged_problem(device, False), ragged_problem(device, True)
    blocks = torch.zeros(5, 2, dtype=torch.int32, device=device)
    ragged = lambda of: {
        "q": of.q if of is x else of.q[0], "kv": of.kv, "weights": of.weights, "cu_seq_len_k_start": of.starts,
        "cu_seq_len_k_end": of.ends,
    }  # fmt: skip
    paged = lambda of: {
        "kv_cache": of.cache, "weights": of.weights, "context_lens": of.lengths, "block_table": of.block_table,
        "schedule_meta": None, "max_context_len": of.width, "clean_logits": True,
    }  # fmt: skip
    one, two, mx = paged_problem(device, False, 1), paged_problem(device, False, 2), paged_problem(device, True, 1)
    ranges = {
        "cu_seq_len_k_start": x.starts, "cu_seq_len_k_end": x.ends, "num_kv_tokens": 37,
        "sparse_kv_block_indices": blocks, "qk_dtype": torch.int8, "sparse_block_kv": 8,
    }  # fmt: skip
    pages = {
        "context_lens": mx.lengths, "block_table": mx.block_table, "indices": blocks[:3, 0].contiguous(), "page_kv": 4,
        "sparse_kv_block_indices": blocks[:3], "qk_dtype": torch.int8, "sparse_block_kv": 4,
    }  # fmt: skip
    of_blocks = {"num_max_sparse_blocks": 2}
    return {
        "decode": ("flash_mla_with_kvcache", {
            "q": p.q, "k_cache": p.pool, "block_table": p.slots[0], "cache_seqlens": p.lengths, "head_dim_v": 512,
            "tile_scheduler_metadata": None, "indices": p.slots, "attn_sink": p.sink, "extra_k_cache": p.extra,
            "extra_indices_in_kvcache": p.extra_slots, "topk_length": p.lengths, "extra_topk_length": p.extra_lengths,
            "out": torch.zeros_like(p.q),
        }),
        "schedule": ("get_mla_decoding_metadata", {
            "seqlens_k": p.lengths, "num_q_tokens_per_head_k": 1, "h_k": 1, "topk": 8}),
        "prefill": ("flash_mla_sparse_fwd", {
            "q": r.q, "kv": r.kv, "indices": r.indices, "sm_scale": 0.5, "attn_sink": r.sink, "topk_length": r.lengths,
            "out": torch.zeros_like(r.q[..., :512]),
        }),
        "prefill, int32": ("flash_mla_sparse_fwd", {
            "q": r.q, "kv": r.kv, "indices": r.indices.clamp(-1, 99).int(), "sm_scale": 0.5}),
        "fp8": ("fp8_mqa_logits", ragged(d)),
        "MXFP4": ("fp8_fp4_mqa_logits", ragged(x)),
        "compressed": ("fp8_fp4_mqa_logits", ragged(x) | {"max_seqlen_k": 28}),
        "one token": ("fp8_paged_mqa_logits", {"q": one.q[0]} | paged(one)),
        "two tokens": ("fp8_paged_mqa_logits", {"q": two.q[0]} | paged(two)),
        "bfloat16": ("fp8_paged_mqa_logits", {"q": two.q[0]} | paged(two) | {"weights": two.weights.bfloat16()}),
        "last lengths": ("fp8_paged_mqa_logits",
            {"q": two.q[0]} | paged(two) | {"context_lens": two.lengths[:, -1].contiguous()}),
        "MXFP4 pages": ("fp8_fp4_paged_mqa_logits", {"q": mx.q} | paged(mx)),
        "paged schedule": ("get_paged_mqa_logits_metadata", {"context_lens": two.lengths, "block_kv": 4, "num_sms": 2}),
        "ranges": ("get_sparse_mqa_logits_metadata", ranges),
        "pages": ("get_paged_sparse_mqa_logits_metadata", pages),
        "blocks": ("fp8_fp4_sparse_mqa_logits", {"q": x.q, "kv": x.kv, "weights": x.weights, "sparse_block_kv": 8,
            "metadata": deep_gemm.get_sparse_mqa_logits_metadata(**ranges)} | of_blocks),
        "paged blocks": ("fp8_fp4_paged_sparse_mqa_logits", {"q": mx.q, "kv_cache": mx.cache, "weights": mx.weights,
            "metadata": deep_gemm.get_paged_sparse_mqa_logits_metadata(**pages), "sparse_block_kv": 4} | of_blocks),
    }  # fmt: skip


def in_a_wider_buffer(tensor: torch.Tensor, axis: int, step: int, before: int, behind: int) -> torch.Tensor:
    """A copy with elements of `axis` `step` apart, between others that are all ones in bits."""
    shape = list(tensor.shape)
    shape[axis] = before + step * shape[axis] + behind
    raw = torch.full((math.prod(shape) * tensor.element_size(),), 255, dtype=torch.uint8, device=tensor.device)
    wide = raw.view(tensor.dtype).view(shape).narrow(axis, before, step * tensor.shape[axis])
    return wide[(slice(None),) * axis + (slice(None, None, step),)].copy_(tensor)


# Layouts of an argument along one of its axes; those are copied which are no dense last axis.
LAID_OUT = {
    "every other element": lambda tensor, axis: in_a_wider_buffer(tensor, axis, 2, 0, 0),
    "the first of more": lambda tensor, axis: in_a_wider_buffer(tensor, axis, 1, 0, 3),
    "behind another": lambda tensor, axis: in_a_wider_buffer(tensor, axis, 1, 1, 0),
    "one repeated": lambda tensor, axis: tensor.narrow(axis, 0, 1).expand(tensor.shape),
    "the first axis of memory": lambda tensor, axis: tensor.movedim(axis, 0).contiguous().movedim(0, axis),
    "the last axis of memory": lambda tensor, axis: tensor.movedim(axis, -1).contiguous().movedim(-1, axis),
}
POOLS = ("k_cache", "extra_k_cache", "kv_cache")  # larger than what a call may copy


def tensors_of(arguments: dict[str, Any]) -> list[tuple[str, torch.Tensor, Callable[[torch.Tensor], dict[str, Any]]]]:
    """Each tensor, also one of a pair, with its argument, and the arguments with another tensor in its place."""
    every = []
    for argument, value in arguments.items():
        for place, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, torch.Tensor):

                def replaced(other: Any, argument: str = argument, value: Any = value, place: int = place) -> Any:
                    parts = (*value[:place], other, *value[place + 1 :]) if isinstance(value, tuple) else other
                    return arguments | {argument: parts}

                every.append((argument, part, replaced))
    return every


def bits_of(results: Any) -> list[torch.Tensor]:
    return [each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in as_tuple(results)]


@pytest.mark.parametrize("layout", LAID_OUT)
def test_every_layout_of_every_argument(device: str, layout: str) -> None:
    """It has the bits of a dense argument, or is refused by its own name: a pool's, or an out that is no memory.

    On a GPU another kernel may serve a pool whose pages begin on no multiple of 16 bytes.
    """
    calls = published_calls(device)
    functions = {name for name, _ in calls.values()}
    assert functions == {name for *_, name in RELEASES} - {"get_mla_metadata", "get_num_sms", "set_num_sms"}
    for title, (name, arguments) in calls.items():
        function = getattr(flash_mla if hasattr(flash_mla, name) else deep_gemm, name)
        for argument, tensor, replaced in tensors_of(arguments):
            for axis in range(tensor.dim()):
                laid_out = LAID_OUT[layout](tensor, axis)
                if argument == "out" and layout == "one repeated":
                    with pytest.raises(ArgumentError, match=f"^{name}: out stride of axis {axis} is 0, expected"):
                        function(**replaced(laid_out))
                    continue
                want = as_tuple(function(**replaced(laid_out.clone(memory_format=torch.contiguous_format))))
                try:
                    got = as_tuple(function(**replaced(laid_out)))
                except ArgumentError as error:
                    refused = rf"{name}: {argument}\[:, :, 0\] stride of axis (R|ROW|EXTRA_ROW) \(.*\) is \d+, "
                    assert argument in POOLS and re.match(refused, str(error)), (title, axis, error)
                else:
                    if device == "cuda" and argument in POOLS:
                        pairs = zip(got, want, strict=True)
                        assert all(torch.allclose(a, b, 2**-6, 2**-7) for a, b in pairs), (title, argument, axis)
                    else:
                        assert all(map(torch.equal, bits_of(got), bits_of(want))), (title, argument, axis)


# Compiled code, errors, and what is left to the packages.


@pytest.mark.floors
def test_compiles_whole(device: str) -> None:
    """fullgraph: no graph break, so no value is read; the same results."""
    decode, prefill, ragged, paged = (decode_problem(device, v4_pool, 512), prefill_problem(device),
                                      ragged_problem(device, True), paged_problem(device, True, 1))  # fmt: skip

    def calls() -> tuple[torch.Tensor, ...]:
        out = torch.empty_like(decode.q)
        _, lse = flash_mla.flash_mla_with_kvcache(
            decode.q, decode.pool, None, None, 512, None, softmax_scale=0.1, indices=decode.slots,
            topk_length=decode.lengths, attn_sink=decode.sink, out=out,
        )  # fmt: skip
        rows = flash_mla.flash_mla_sparse_fwd(prefill.q, prefill.kv, prefill.indices, 0.5, topk_length=prefill.lengths)
        dense = deep_gemm.fp8_fp4_mqa_logits(ragged.q, ragged.kv, ragged.weights, ragged.starts, ragged.ends)
        packed = deep_gemm.fp8_fp4_mqa_logits(
            ragged.q, ragged.kv, ragged.weights, ragged.starts, ragged.ends, True, 28
        )  # fmt: skip
        pages = deep_gemm.fp8_fp4_paged_mqa_logits(
            paged.q, paged.cache, paged.weights, paged.lengths, paged.block_table, None, paged.width, True
        )  # fmt: skip
        blocks = torch.zeros_like(ragged.starts)[:, None]
        metadata = deep_gemm.get_sparse_mqa_logits_metadata(ragged.starts, ragged.ends, 37, blocks, torch.int8, 8)
        of_rows = deep_gemm.fp8_fp4_sparse_mqa_logits(ragged.q, ragged.kv, ragged.weights, metadata, 1, 8)
        blocks = torch.zeros_like(paged.lengths)
        metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
            paged.lengths, paged.block_table, blocks[:, 0], 4, blocks, torch.int8, 4
        )
        of_pages = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(paged.q, paged.cache, paged.weights, metadata, 1, 4)
        return out, lse, *rows, dense, packed, pages, of_rows, of_pages

    torch._dynamo.reset()
    for got, want in zip(torch.compile(calls, fullgraph=True, backend="aot_eager")(), calls(), strict=True):
        assert torch.equal(got, want)


def test_errors_name_the_argument(device: str) -> None:
    p, r = decode_problem(device, v41_pool_released, 512), prefill_problem(device)
    call = lambda head_dim_v=512, **more: flash_mla.flash_mla_with_kvcache(
        p.q, p.pool, None, None, head_dim_v, None, indices=p.slots, **more
    )
    here = "flash_mla_with_kvcache"
    for wrong, message in (
        ({"head_dim_v": 576}, f"{here}: head_dim_v is 576, expected 512"),
        ({"causal": True}, f"{here}: causal is True, expected False"),
        ({"descale_q": p.sink}, f"{here}: descale_q beside indices is given, expected None"),
        ({"kv_format": "V5"},
         f"{here}: kv_format is 'V5', expected None or one of V32, V32_NO_ROPE, V4, V41, V41_FP4"),
        ({"out": p.q[:1]}, f"{here}: out axis B (axis 0) is 1, expected 2, as q"),
        ({"out": p.q[..., :511]}, f"{here}: out axis 3 is 511, expected 512"),
        ({"extra_k_cache": p.pool.expand(-1, -1, 2, -1)}, f"{here}: extra_k_cache axis 2 is 2, expected 1"),
        ({"topk_length": p.lengths[:, None]}, f"{here}: topk_length rank is 2, expected 1 (B)"),
        ({"topk_length": p.lengths > 0}, f"{here}: topk_length dtype is bool, expected int32 or int64"),
        ({"extra_indices_in_kvcache": p.slots.float()},
         f"{here}: extra_indices_in_kvcache dtype is float32, expected int32 or int64"),
        ({"attn_sink": p.sink.double()}, f"{here}: attn_sink dtype is float64, expected float32"),
        ({"extra_k_cache": p.pool.short(), "extra_indices_in_kvcache": p.slots},
         f"{here}: extra_k_cache[:, :, 0] dtype is int16, expected "
         "uint8 or int8 or float8_e4m3fn or bfloat16 or float16"),
        ({"out": torch.empty(*p.q.shape[:2], 512, p.q.shape[2], device=device).transpose(2, 3)},
         f"{here}: out is torch.float32 on {p.q.device}, expected {p.q.dtype} on {p.q.device}, as q"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as raised:
            call(**wrong)
        assert str(raised.value) == message
    with pytest.raises(ArgumentError, match="flash_mla_sparse_fwd: kv axis 1 is 2, expected 1"):
        flash_mla.flash_mla_sparse_fwd(r.q, r.kv.expand(-1, 2, -1), r.indices, 0.5)


def test_errors_of_ranks_and_axes_name_the_function_and_the_argument_that_was_called(device: str) -> None:
    p, r = decode_problem(device, v32_pool, 576), prefill_problem(device)
    d, g = ragged_problem(device, False), paged_problem(device, False, 2)
    keys, scales = d.kv
    decode = lambda q=p.q, pool=p.pool, slots=p.slots: flash_mla.flash_mla_with_kvcache(
        q, pool, None, None, 512, None, indices=slots
    )
    ragged = lambda q=d.q[0], kv=d.kv, weights=d.weights, starts=d.starts: deep_gemm.fp8_mqa_logits(
        q, kv, weights, starts, d.ends
    )
    paged = lambda q=g.q[0], cache=g.cache, weights=g.weights, lengths=g.lengths, table=g.block_table: (
        deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, g.width)
    )
    mx = paged_problem(device, True, 2)
    blocks = d.starts[:, None]
    of_ranges = lambda blocks=blocks, dtype=torch.int8, size=8: deep_gemm.get_sparse_mqa_logits_metadata(
        d.starts, d.ends, len(keys), blocks, dtype, size
    )
    of_pages = lambda table=g.block_table, size=4: deep_gemm.get_paged_sparse_mqa_logits_metadata(
        g.lengths[:, 0], table, g.lengths[:, 0], 4, blocks[:3], torch.int8, size
    )
    sparse = lambda metadata=None, kv=d.kv: deep_gemm.fp8_fp4_sparse_mqa_logits(
        ragged_problem(device, True).q, kv, d.weights, metadata, 1, 8
    )
    for call, message in (
        (lambda: decode(q=p.q[:, 0]), "flash_mla_with_kvcache: q rank is 3, expected 4 (B, S, H, D)"),
        (lambda: decode(pool=p.pool[:, :, 0]), "flash_mla_with_kvcache: k_cache rank is 3, expected 4 (P, R, 1, ROW)"),
        (lambda: decode(slots=p.slots.transpose(0, 1)[:1]),
         "flash_mla_with_kvcache: indices axis B (axis 0) is 1, expected 2, as q"),
        (lambda: flash_mla.flash_mla_sparse_fwd(r.q, r.kv, r.indices[:, 0], 0.5),
         "flash_mla_sparse_fwd: indices rank is 2, expected 3 (T, 1, K)"),
        (lambda: flash_mla.flash_mla_sparse_fwd(r.q, r.kv, r.indices.tolist(), 0.5),
         "flash_mla_sparse_fwd: indices is list, expected torch.Tensor"),
        (lambda: ragged(kv=keys), "fp8_mqa_logits: kv is Tensor, expected a pair: keys [N, D], scales [N]"),
        (lambda: ragged(kv=(keys, scales[:, None])), "fp8_mqa_logits: kv[1] rank is 2, expected 1 (N)"),
        (lambda: ragged(kv=(keys, scales.double())),
         "fp8_mqa_logits: kv[1] dtype is float64, expected float32 or int32"),
        (lambda: ragged(weights=d.weights.to_sparse()),
         "fp8_mqa_logits: weights has no strides, expected a strided tensor"),
        (lambda: ragged(weights=d.weights[..., None]), "fp8_mqa_logits: weights rank is 3, expected 2 (M, H)"),
        (lambda: ragged(starts=d.starts[:2]),
         "fp8_mqa_logits: cu_seq_len_k_start axis M (axis 0) is 2, expected 5, as q"),
        (lambda: ragged(starts=d.starts.float()),
         "fp8_mqa_logits: cu_seq_len_k_start dtype is float32, expected int32 or int64"),
        (lambda: deep_gemm.fp8_mqa_logits(d.q[0], d.kv, d.weights, d.starts, d.ends, True, -1),
         "fp8_mqa_logits: max_seqlen_k is -1, expected at least 0"),
        (lambda: deep_gemm.fp8_fp4_mqa_logits(d.q, d.kv, d.weights, d.starts, d.ends, True, 4, torch.float16),
         "fp8_fp4_mqa_logits: logits_dtype is torch.float16, expected torch.float32 or torch.bfloat16"),
        (lambda: paged(lengths=g.lengths > 0),
         "fp8_paged_mqa_logits: context_lens dtype is bool, expected int32 or int64"),
        (lambda: deep_gemm.fp8_fp4_mqa_logits(d.q, (keys[None], scales), d.weights, d.starts, d.ends),
         "fp8_fp4_mqa_logits: kv[0] rank is 3, expected 2 (N, ROW)"),
        (lambda: paged(q=g.q[0][:, 0]), "fp8_paged_mqa_logits: q rank is 3, expected 4 (B, next_n, H, D)"),
        (lambda: paged(cache=g.cache[:, :, 0]), "fp8_paged_mqa_logits: kv_cache rank is 3, expected 4 (P, R, 1, ROW)"),
        (lambda: paged(lengths=g.lengths[:, :1]),
         "fp8_paged_mqa_logits: context_lens axis next_n (axis 1) is 1, expected 2, as q"),
        (lambda: paged(table=g.block_table[:1]),
         "fp8_paged_mqa_logits: block_table axis B (axis 0) is 1, expected 3, as q"),
        (lambda: of_ranges(blocks=d.starts), "get_sparse_mqa_logits_metadata: sparse_kv_block_indices rank is 1, "
         "expected 2 (M, S)"),
        (lambda: of_ranges(dtype=torch.bfloat16), "get_sparse_mqa_logits_metadata: qk_dtype is torch.bfloat16, "
         "expected torch.int8 or torch.float8_e4m3fn"),
        (lambda: of_ranges(size=24),
         "get_sparse_mqa_logits_metadata: sparse_block_kv is 24, expected a power of two, at most 128"),
        (lambda: of_pages(size=8),
         "get_paged_sparse_mqa_logits_metadata: page_kv is 4, expected a multiple of sparse_block_kv = 8"),
        (lambda: of_pages(table=g.block_table[:1]),
         "get_paged_sparse_mqa_logits_metadata: block_table axis T (axis 0) is 1, expected 3, as "
         "sparse_kv_block_indices"),
        (lambda: sparse(metadata=of_ranges()[:-4]),
         "fp8_fp4_sparse_mqa_logits: metadata is torch.uint8 [56], expected torch.uint8 [60] of "
         "get_sparse_mqa_logits_metadata for 5 queries and 1 blocks"),
        (lambda: sparse(metadata=of_pages()),
         "fp8_fp4_sparse_mqa_logits: metadata is torch.uint8 [24], expected torch.uint8 [60] of "
         "get_sparse_mqa_logits_metadata for 5 queries and 1 blocks"),
        (lambda: sparse(metadata=of_ranges().view(torch.int32)),
         "fp8_fp4_sparse_mqa_logits: metadata is torch.int32 [15], expected torch.uint8 [60] of "
         "get_sparse_mqa_logits_metadata for 5 queries and 1 blocks"),
        (lambda: sparse(kv=keys), "fp8_fp4_sparse_mqa_logits: kv is Tensor, expected a pair: keys [N, D], scales [N]"),
        (lambda: deep_gemm.fp8_fp4_paged_sparse_mqa_logits(mx.q, g.cache, g.weights, of_pages(), 1, 4),
         "fp8_fp4_paged_sparse_mqa_logits: q axis 1 is 2, expected 1"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as raised:
            call()
        assert str(raised.value) == message


def v41_pool_released(pages: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    return v41_pool(pages, entries, footer=False)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_mla") is not None or importlib.util.find_spec("deep_gemm") is not None,
    reason="a package that is installed serves these calls",
)
def test_what_is_not_replaced_without_the_packages(device: str) -> None:
    p, r = decode_problem(device, v32_pool, 576), ragged_problem(device, False)
    absent = "and {0} cannot be imported (ModuleNotFoundError: No module named '{0}')"
    for call, message in (
        (lambda: flash_mla.flash_mla_with_kvcache(p.q, p.pool, p.slots[0], p.lengths, 512, None),
         "flash_mla_with_kvcache: indices is None, supported: sparse attention, " + absent.format("flash_mla")),
        (lambda: flash_mla.get_mla_decoding_metadata(p.lengths, 6, 1),
         "get_mla_decoding_metadata: topk is None, supported: sparse attention, " + absent.format("flash_mla")),
        (lambda: deep_gemm.fp8_fp4_mqa_logits((r.q[0], r.starts), r.kv, r.weights, r.starts, r.ends),
         "fp8_fp4_mqa_logits: q is MXFP8 (e4m3 with scales), supported: e4m3 without scales, and MXFP4, "
         + absent.format("deep_gemm")),
        (lambda: deep_gemm.get_sparse_mqa_logits_metadata(
            r.starts, r.ends, 37, r.starts[:, None], torch.float8_e4m3fn, 8),
         "get_sparse_mqa_logits_metadata: qk_dtype is torch.float8_e4m3fn, supported: torch.int8 (MXFP4), "
         + absent.format("deep_gemm")),
        (lambda: deep_gemm.get_paged_sparse_mqa_logits_metadata(
            r.starts, r.starts[:, None], r.starts, 8, r.starts[:, None], torch.float8_e4m3fn, 8),
         "get_paged_sparse_mqa_logits_metadata: qk_dtype is torch.float8_e4m3fn, supported: torch.int8 (MXFP4), "
         + absent.format("deep_gemm")),
        (lambda: deep_gemm.fp8_fp4_sparse_mqa_logits(r.q, r.kv, r.weights, r.starts, 1, 8),
         "fp8_fp4_sparse_mqa_logits: q is torch.float8_e4m3fn without scales, supported: torch.int8 with scales "
         "(MXFP4), " + absent.format("deep_gemm")),
        (lambda: deep_gemm.fp8_fp4_paged_sparse_mqa_logits((r.q[0], r.starts), r.kv[0], r.weights, r.starts, 1, 8),
         "fp8_fp4_paged_sparse_mqa_logits: q is torch.float8_e4m3fn with scales, supported: torch.int8 with scales "
         "(MXFP4), " + absent.format("deep_gemm")),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError) as raised:
            call()
        assert str(raised.value) == message
    assert not hasattr(deep_gemm, "fp8_gemm_nt")
    with pytest.raises(AttributeError, match="has no attribute 'fp8_gemm_nt', and deep_gemm cannot"):
        deep_gemm.fp8_gemm_nt  # noqa: B018


FLASH_MLA = """
from dataclasses import dataclass

@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: object = None

def flash_mla_with_kvcache(q, *rest, **more):
    assert isinstance(rest[4], FlashMLASchedMeta)
    return "dense", more
"""
DEEP_GEMM = """
def fp8_gemm_nt(): return "a GEMM"
def get_num_sms(): return 77
def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None): return "its schedule", num_sms
def fp8_fp4_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, *rest, **more):
    return schedule_meta, rest, more
"""
ENGINE = """
import sys
from importlib.util import find_spec
import torch
import xmla.compat
xmla.compat.install(max_logits=False)
assert find_spec("flash_mla") and find_spec("deep_gemm")
import deep_gemm, flash_mla, flash_mla.mega
from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache
from flash_mla import mega
assert flash_mla is xmla.compat.flash_mla and deep_gemm is sys.modules["deep_gemm"] is xmla.compat.deep_gemm
assert flash_mla_with_kvcache is xmla.compat.flash_mla.flash_mla_with_kvcache
assert flash_mla.mega.NAME == mega.NAME == "mega" and deep_gemm.fp8_gemm_nt() == "a GEMM"
assert not hasattr(deep_gemm, "nothing") and deep_gemm.get_num_sms() == 77
held, _ = flash_mla.get_mla_metadata()
assert type(held) is FlashMLASchedMeta
assert flash_mla_with_kvcache(None, None, None, None, 512, held, causal=True) == ("dense", {"causal": True})
q = torch.zeros(2, 1, 4, 32, dtype=torch.float8_e4m3fn)
lengths = torch.zeros(2, 1, dtype=torch.int32)
schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 5)
cache = torch.zeros(1, 4, 1, 36, dtype=torch.uint8)
made, rest, more = deep_gemm.fp8_fp4_paged_mqa_logits(
    (q, lengths), cache, None, lengths, None, schedule_meta=schedule, max_context_len=9
)
assert (made, rest, more) == (("its schedule", 5), (), {"max_context_len": 9})
kv = torch.zeros(3, 1, 576, dtype=torch.bfloat16)
out, none, lse = flash_mla.flash_mla_sparse_fwd(kv, kv, torch.zeros(3, 1, 2, dtype=torch.int32), 1.0)
assert none is None and lse.shape == (3, 1)
xmla.compat.uninstall()
import deep_gemm
assert deep_gemm is not xmla.compat.deep_gemm and deep_gemm.get_num_sms() == 77
"""


def make_packages(folder: Path) -> None:
    """Packages of the published names and a few of their functions."""
    (folder / "flash_mla").mkdir()
    (folder / "flash_mla/__init__.py").write_text("from flash_mla.flash_mla_interface import *")
    (folder / "flash_mla/flash_mla_interface.py").write_text(FLASH_MLA)
    (folder / "flash_mla/mega.py").write_text("import flash_mla.flash_mla_interface\nNAME = 'mega'")
    (folder / "deep_gemm.py").write_text(DEEP_GEMM)


def run_beside(folder: Path, code: str) -> None:
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("device")
def test_the_packages_serve_what_is_not_replaced(tmp_path: Path) -> None:
    """In a process that imports them as engines do."""
    make_packages(tmp_path)
    run_beside(tmp_path, ENGINE)


INTERFACE = """
import xmla.compat
xmla.compat.install()
import flash_mla.flash_mla_interface as module
from flash_mla import flash_mla_interface
import flash_mla
from flash_mla.flash_mla_interface import flash_mla_sparse_fwd
assert module is flash_mla_interface is flash_mla.flash_mla_interface is flash_mla is xmla.compat.flash_mla
assert flash_mla_sparse_fwd is flash_mla.flash_mla_sparse_fwd
"""


@pytest.mark.parametrize("there", [False, True])
def test_the_interface_is_replaced_however_it_is_imported(there: bool, tmp_path: Path) -> None:
    if there:
        make_packages(tmp_path)
    run_beside(tmp_path, INTERFACE)


def test_is_supported(device: str) -> None:
    assert flash_mla.is_flashmla_sparse_supported() == (True, None)
