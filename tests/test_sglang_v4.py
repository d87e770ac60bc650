"""What stands in SGLang's place for DeepSeek-V4, called as SGLang calls it, without SGLang."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from listed import PLANNED, any_size, unlisted

from xmla import torch_api as xt
from xmla.compat import deep_gemm
from xmla.core.formats.mla import PLAIN_V4
from xmla.core.models import memory
from xmla.core.models.calls import Call, specializations
from xmla.core.values import ATTENTION_OUT, Device, Spec, difference, find_device
from xmla.sglang import attention_v4, indexer_v4, scratch, warmup_v4
from xmla.sglang.warmup import Sizes

PAGE, HEADS, DIM, LATENT, K, SCALE = 64, 3, 128, 512, 8, 512**-0.5


@pytest.fixture(autouse=True)
def gathers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's variable SGLANG_OPT_FLASHMLA_SPARSE_PREFILL."""
    value = SimpleNamespace(on=True)
    environ: Any = ModuleType("sglang.srt.environ")
    environ.envs = SimpleNamespace(SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=SimpleNamespace(get=lambda: value.on))
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), environ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return value


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def best(row: np.ndarray, length: int) -> list[int]:
    """Positions of the K largest of `length` logits, ascending, −1 behind them."""
    kept = np.sort(np.argsort(-row[:length], kind="stable")[:K])
    return [*kept.tolist(), *[-1] * (K - len(kept))]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_top_k(raw: bool, planned: bool, device: str) -> None:
    """To rows of SGLang's own arrays; a row of the page table for each token."""
    logits, lengths, table = normal(4, 128), [100, 5, 0, 128], [[5, 2], [3, 0], [1, 4], [0, 6]]
    slots, positions = (torch.full((6, K), 7, dtype=torch.int32, device=device) for _ in range(2))
    called = logits.to(device), ints(lengths, device), ints(table, device), slots[1:5], PAGE
    if planned:
        plan = indexer_v4.plan_topk_v2(called[1])
        indexer_v4.topk_transform_paged_v2(*called, plan, positions[1:5] if raw else None)
    else:
        indexer_v4.topk_transform_paged(*called, positions[1:5] if raw else None)
    wanted = [best(row, length) for row, length in zip(logits.numpy(), lengths, strict=True)]
    places = [
        [-1 if p < 0 else pages[p // PAGE] * PAGE + p % PAGE for p in row]
        for row, pages in zip(wanted, table, strict=True)
    ]
    assert slots.tolist() == [[7] * K, *places, [7] * K]
    assert positions.tolist() == ([[7] * K, *wanted, [7] * K] if raw else [[7] * K] * 6)


def test_what_stands_for_schedules_has_their_shapes(device: str) -> None:
    lengths = ints([3, 5, 0], device)
    plan = indexer_v4.plan_topk_v2(lengths)
    assert plan.shape == (4, 2) and plan.dtype == torch.int32
    assert indexer_v4.plan_topk_v2(lengths, out=plan) is plan
    schedule = indexer_v4.get_paged_mqa_logits_metadata(lengths, PAGE, 132)
    assert (schedule.shape, schedule.dtype) == ((133, 2), torch.int32)


def test_logits_over_gathered_keys(device: str) -> None:
    """Rows that SGLang selects without their logits have empty ranges."""
    q8, weights = xt.quantize_indexer_query(normal(5, HEADS, DIM).to(device), normal(5, HEADS).to(device))
    keys, scales = normal(300, DIM).to(torch.float8_e4m3fn).to(device), torch.rand(300).to(device)
    ends = [0, 0, 250, 251, 300]
    plan = SimpleNamespace(ks=ints([0] * 5, device), ke=ints(ends, device), max_seqlen_k=320)
    got = indexer_v4.nonpaged_mqa_logits(q_indexer=q8, weights=weights, kv=(keys, scales), plan=plan, rows=slice(1, 4))
    assert got.shape == (3, 300) and got.stride(0) % 4 == 0
    products = np.maximum(np.einsum("thd,nd->thn", q8.cpu().double().numpy(), keys.cpu().double().numpy()), 0)
    wanted = np.einsum("thn,th->tn", products, weights.cpu().double().numpy()) * scales.cpu().double().numpy()
    for row, end in enumerate(ends[1:4]):
        np.testing.assert_allclose(got[row, :end].cpu(), wanted[row + 1, :end], rtol=1e-4, atol=1e-3)


def pool_of(pages: int, page: int, device: str) -> tuple[torch.Tensor, np.ndarray]:
    """A pool [P, R, 1, 584] as SGLang's backend views it, whose pages are padded, and its rows in float64."""
    row = -(-page * 584 // 576) * 576
    buffer = torch.zeros(pages, row, dtype=torch.uint8, device=device)
    cache = buffer[:, : page * 584].view(pages, page, 584)
    ids, values = torch.arange(pages * page, device=device), normal(pages * page, LATENT).bfloat16().to(device)
    xt.write_mla_cache(values[:, :448], values[:, 448:], ids, cache, cache_format="v4")
    rows = xt.read_mla_cache(cache, ids, dtype="float32", implementation="reference")
    viewed = buffer.view(torch.float8_e4m3fn)[:, : page * 584].view(pages, page, 1, 584)
    return viewed, rows.cpu().double().numpy()


def attended(q: torch.Tensor, keys: list[np.ndarray], sink: torch.Tensor) -> np.ndarray:
    out = []
    for heads, rows in zip(q.cpu().double().numpy(), keys, strict=True):
        weights = np.exp(heads @ rows.T * SCALE)
        sums = weights.sum(axis=1, keepdims=True) + np.exp(sink.cpu().double().numpy()[:, None])
        out.append(weights @ rows / sums)
    return np.stack(out)


def test_attention_over_both_pools(device: str) -> None:
    """As `_forward_attention` calls it: pages of 256 and of 2 tokens; a length counts one slot at least, −1 is none."""
    (window, recent), (entries, compressed) = pool_of(2, 256, device), pool_of(40, 2, device)
    q, sink = normal(3, 1, HEADS, LATENT).bfloat16().to(device), normal(HEADS).to(device)
    slots = torch.full((3, 1, 128), -1, dtype=torch.int32)
    more = torch.full((3, 1, 64), -1, dtype=torch.int32)
    slots[:, 0, :3] = torch.tensor([[400, 1, 17], [5, 6, 0], [511, 9, 9]])
    more[0, 0, :2], more[1, 0, :1] = torch.tensor([79, 3]), torch.tensor([11])
    out, _ = attention_v4.flash_mla_with_kvcache(
        q=q, k_cache=window, head_dim_v=LATENT, block_table=None, cache_seqlens=None, tile_scheduler_metadata=None,
        softmax_scale=SCALE, is_fp8_kvcache=True, indices=slots.to(device), topk_length=ints([3, 2, 1], device),
        attn_sink=sink, extra_k_cache=entries, extra_indices_in_kvcache=more.to(device),
        extra_topk_length=ints([2, 1, 1], device), use_legacy=True,
    )  # fmt: skip
    assert out.shape == (3, 1, HEADS, LATENT)
    keys = [
        np.concatenate([recent[own], compressed[of]])
        for own, of in (([400, 1, 17], [79, 3]), ([5, 6], [11]), ([511], []))
    ]
    assert difference(out[:, 0].cpu().double().numpy(), attended(q[:, 0], keys, sink), ATTENTION_OUT) is None


def test_attention_over_gathered_rows(device: str) -> None:
    rows = normal(70, 1, LATENT).bfloat16()
    q, sink = normal(2, HEADS, LATENT).bfloat16().to(device), normal(HEADS).to(device)
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[:, 0, :4] = torch.tensor([[69, -1, 3, 5], [8, 7, 6, 5]])
    out, _, _ = attention_v4.flash_mla_sparse_fwd(
        q=q, kv=rows.to(device), indices=indices.to(device), sm_scale=SCALE, d_v=LATENT, attn_sink=sink,
        topk_length=ints([4, 2], device),
    )  # fmt: skip
    keys = [rows[named, 0].double().numpy() for named in ([69, 3, 5], [8, 7])]
    assert difference(out.cpu().double().numpy(), attended(q, keys, sink), ATTENTION_OUT) is None


def test_heads_are_the_ranks_own() -> None:
    assert attention_v4.kernel_num_heads(SimpleNamespace(n_local_heads=8, n_heads=64), 3) == 8


SIZES = Sizes(tokens=8192 + 512, requests=256, new=2, pages=4096, keys=1 << 21)
SMALL = Sizes(tokens=2048 + 8, requests=8, new=1, pages=257, keys=65536)
INDEX_POOL = Spec((40000, 64, 132), "uint8")
WINDOW = Spec((1000, 256, 584), "float8_e4m3fn", (256 * 584 + 128, 584, 1))
ENTRIES = {
    4: Spec((4000, 64, 584), "float8_e4m3fn", (65 * 576, 584, 1)),
    128: Spec((4000, 2, 584), "float8_e4m3fn", (3 * 576, 584, 1)),
}


@PLANNED
@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["many", "few"])
def test_warmup_of_selections(sizes: Sizes, device: Device) -> None:
    """Calls of any size that a step may have launch kernels of the list; SGLang may divide a step's rows anywhere."""
    rng = np.random.default_rng(0)
    found = {*specializations(warmup_v4.select_calls(INDEX_POOL, 64, 512, sizes, device), device)}

    def part(*shape: int) -> Spec:
        return Spec(shape, "int32", alignment=int(rng.choice([4, 16])))

    def query(tokens: int) -> dict[str, Spec]:
        return {"q8": Spec((tokens, 64, DIM), "float8_e4m3fn"), "weights": Spec((tokens, 64), "float32")}

    def paged() -> Call:
        tokens, width = any_size(rng, sizes.tokens), any_size(rng, sizes.pages)
        table = {"cache": INDEX_POOL, "block_table": part(tokens, width), "lengths": part(tokens)}
        return Call("indexer_logits_paged", query(tokens) | table, {"max_len": deep_gemm.row_stride(width * 64)})

    def gathered() -> Call:
        tokens, keys = any_size(rng, sizes.tokens), deep_gemm.row_stride(any_size(rng, sizes.pages * 64))
        place = int(rng.choice([4, 16]))
        rows = {name: Spec((tokens,), "int32", alignment=place) for name in ("starts", "ends")}
        keyed = {"keys": Spec((keys, DIM), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32")}
        return Call("indexer_logits", query(tokens) | keyed | rows, {})

    def select() -> Call:
        tokens, columns = any_size(rng, sizes.tokens), any_size(rng, sizes.pages * 64)
        logits = Spec((tokens, columns), "float32", (deep_gemm.row_stride(columns), 1))
        return Call("select_topk", {"logits": logits, "ends": part(tokens)}, {"k": 512})

    def mapped() -> Call:
        tokens = any_size(rng, sizes.tokens)
        table = {"indices": Spec((tokens, 512), "int32"), "block_table": part(tokens, any_size(rng, sizes.pages))}
        return Call("map_slots", table, {"page_size": 64})

    for make in (paged, gathered, select, mapped):
        missing = unlisted(device, found, make)
        assert not missing, missing[0]
    assert len(found) < 150


@PLANNED
@pytest.mark.parametrize("gathered", [True, False])
def test_warmup_of_attention(gathered: bool, gathers: SimpleNamespace, device: Device) -> None:
    """Of decodes over both pools, of prefills over rows of any prompt's entries or over the pools too."""
    gathers.on, rng = gathered, np.random.default_rng(1)
    calls = warmup_v4.attend_calls(WINDOW, ENTRIES, 16, SCALE, 512, SIZES, device)
    found = {*specializations(calls, device)}

    def attend() -> Call:
        tokens, ratio = any_size(rng, SIZES.tokens), int(rng.choice([0, 4, 128]))
        q, sink = Spec((tokens, 16, LATENT), "bfloat16"), {"sink": Spec((16,), "float32")}
        pages = any_size(rng, SIZES.pages)
        if gathered and rng.random() < 0.5:
            keys = {0: 0, 4: 512, 128: max(2 * pages - int(rng.integers(2)), 1)}[ratio]
            rows = memory.pool(PLAIN_V4, any_size(rng, SIZES.keys), 1)
            specs = memory.arguments(q, rows, -(-(keys + 128) // 128) * 128)
            return Call("sparse_mla", specs | sink, {"softmax_scale": SCALE})
        width = {0: 0, 4: 512, 128: -(-2 * (SIZES.pages if gathered else pages) // 64) * 64}[ratio]
        specs = memory.arguments(q, WINDOW, 128, ENTRIES.get(ratio), width) | sink
        more = {"extra_lengths": specs["lengths"]} if ratio else {}
        return Call("sparse_mla", specs | more, {"softmax_scale": SCALE, "empty_lse": "+inf"})

    missing = unlisted(device, found, attend)
    assert not missing, missing[0]


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """SGLang's modules that say how it serves, on eight ranks of H100s."""
    device = find_device("H100")
    schedule = SimpleNamespace(chunked_prefill_size=8192, max_prefill_tokens=16384)
    modules = {
        "runtime_context": {
            "get_schedule": lambda: schedule, "get_parallel": lambda: SimpleNamespace(attn_tp_size=8),
            "get_exec": lambda: SimpleNamespace(kernel=None),
        },
        "configs.model_config": {
            "is_deepseek_v4": lambda config: True, "is_deepseek_dsa": None, "get_dsa_index_topk": None
        },
    }  # fmt: skip
    for name, parts in modules.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(warmup_v4, "device_of", lambda _: device)
    monkeypatch.setattr(scratch, "unserved_v4", lambda _: {})
    return device


def test_scratch_memory_is_that_of_any_step(h100: Device) -> None:
    """No call that warm-up lists needs more."""
    config = SimpleNamespace(
        hf_config=None, hf_text_config=SimpleNamespace(index_topk=512), num_attention_heads=128, context_len=1 << 20
    )
    counted = scratch.scratch_of(config, 0)
    calls = warmup_v4.attend_calls(WINDOW, ENTRIES, 16, SCALE, 512, SIZES, h100)
    needed = [call.plan(h100).workspace_bytes for call in calls if call.specs["q"].shape[0] <= 8192]
    assert max(needed) <= counted < 2 * max(needed)
