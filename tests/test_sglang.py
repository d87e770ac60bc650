"""What stands in SGLang's place, called as SGLang calls it, without SGLang; tests/sglang_engine runs its modules."""

import sys
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import kit
import numpy as np
import pytest
import torch
from listed import PLANNED, any_size, unlisted

import xmla.sglang
from xmla import UnsupportedError
from xmla import torch_api as xt
from xmla.compat import deep_gemm
from xmla.core.models import memory
from xmla.core.models.calls import Call, specializations
from xmla.core.values import ATTENTION_OUT, LOGITS, Device, Spec, difference, find_device
from xmla.sglang import attention, indexer, scratch, warmup

PAGE, PAGES, HEADS, DIM, ENTRY, LATENT, K = 64, 6, 3, 128, 576, 512, 8
PAGED, RAGGED = SimpleNamespace(name="PAGED"), SimpleNamespace(name="RAGGED")


def ints(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def switch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's variable SGLANG_DSA_FUSE_TOPK."""
    value = SimpleNamespace(fused=True)
    environ: Any = ModuleType("sglang.srt.environ")
    environ.envs = SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: value.fused))
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), environ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return value


def best(row: np.ndarray, first: int, length: int) -> list[int]:
    """Positions of the K largest of `length` logits, ascending, −1 behind them."""
    seen = row[first : first + length]
    kept = np.sort(np.argsort(-seen, kind="stable")[:K])
    return [*kept.tolist(), *[-1] * (K - len(kept))]


def slots(positions: list[int], pages: np.ndarray) -> list[int]:
    return [-1 if p < 0 else int(pages[p // PAGE]) * PAGE + p % PAGE for p in positions]


def step(table: torch.Tensor, requests: torch.Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(real_page_table=table, page_size=PAGE, token_to_batch_idx=requests)


def table_of(device: str) -> torch.Tensor:
    """Pages of three requests, a view of a wider table, as in CUDA graphs."""
    return torch.tensor([[5, 2, 0, 9], [3, 0, 0, 9], [1, 4, 0, 9]], dtype=torch.int32, device=device)[:, :3]


def test_decodes_get_slots(device: str) -> None:
    logits, lengths = normal(3, 128), [100, 5, 0]
    got = indexer.topk_transform(
        None, logits=logits.to(device), lengths=ints(*lengths, device=device), topk=K, topk_transform_method=PAGED,
        attn_metadata=step(table_of(device)), cu_seqlens_q_topk=ints(0, 1, 2, 3, device=device),
        topk_indices_offset=None, row_starts=None, batch_idx_list=None, force_unfused_topk=False,
    )  # fmt: skip
    rows = zip(logits.numpy(), lengths, table_of("cpu").numpy(), strict=True)
    assert got.tolist() == [slots(best(row, 0, length), pages) for row, length, pages in rows]


@pytest.mark.parametrize("chunked", [False, True])
def test_prefills_get_slots(chunked: bool, device: str) -> None:
    """Keys of both requests one behind the other; a chunk of rows brings its own requests."""
    lengths, requests, starts = [70, 71, 20], [0, 0, 2], [0, 0, 71]
    logits, of = normal(3, 91), ints(*requests, device=device)
    got = indexer.topk_transform(
        None, logits=logits.to(device), lengths=ints(*lengths, device=device), topk=K, topk_transform_method=PAGED,
        attn_metadata=step(table_of(device), None if chunked else of), row_starts=ints(*starts, device=device),
        batch_idx_list=of if chunked else None,
    )  # fmt: skip
    table = table_of("cpu").numpy()
    rows = zip(logits.numpy(), starts, lengths, requests, strict=True)
    assert got.tolist() == [slots(best(row, s, length), table[r]) for row, s, length, r in rows]


def test_ragged_prefills_get_rows_of_the_gathered_entries(device: str) -> None:
    logits, lengths, starts = normal(2, 91), [71, 4], [0, 71]
    got = indexer.topk_transform(
        None, logits=logits.to(device), lengths=ints(*lengths, device=device), topk=K, topk_transform_method=RAGGED,
        attn_metadata=None, topk_indices_offset=ints(*starts, device=device), row_starts=ints(*starts, device=device),
    )  # fmt: skip
    rows = zip(logits.numpy(), starts, lengths, strict=True)
    assert got.tolist() == [[-1 if p < 0 else p + s for p in best(row, s, n)] for row, s, n in rows]


@pytest.mark.parametrize("forced", [False, True])
def test_unfused_are_positions(forced: bool, device: str, switch: SimpleNamespace) -> None:
    switch.fused = forced
    logits, lengths, starts = normal(2, 91), [71, 4], [0, 71]
    got = indexer.topk_transform(
        None, logits=logits.to(device), lengths=ints(*lengths, device=device), topk=K, topk_transform_method=PAGED,
        attn_metadata=None, row_starts=ints(*starts, device=device), force_unfused_topk=forced,
    )  # fmt: skip
    rows = zip(logits.numpy(), starts, lengths, strict=True)
    assert got.tolist() == [best(row, s, n) for row, s, n in rows]


def test_short_contexts_select_all_whatever_the_logits(device: str) -> None:
    """SGLang gives zeros for logits of as many columns as are selected."""
    lengths = [0, 1, K]
    got = indexer.topk_transform(
        None, logits=torch.zeros(3, K, device=device), lengths=ints(*lengths, device=device), topk=K,
        topk_transform_method=PAGED, attn_metadata=step(table_of(device)),
    )  # fmt: skip
    wanted = [[*range(n), *[-1] * (K - n)] for n in lengths]
    assert got.tolist() == [slots(row, pages) for row, pages in zip(wanted, table_of("cpu").numpy(), strict=True)]


def test_logits_of_decodes(device: str) -> None:
    """As `deepgemm_paged_mqa_logits_split` calls them: a row for each token, lengths [T, 1], the pool's bytes."""
    cache = torch.zeros(PAGES, PAGE, DIM + 4, dtype=torch.uint8, device=device)
    table, lengths = table_of(device), [100, 5, 0]
    xt.write_indexer_cache(normal(PAGES * PAGE, DIM).to(device), torch.arange(PAGES * PAGE, device=device), cache)
    q8, weights = xt.quantize_indexer_query(normal(3, HEADS, DIM).to(device), normal(3, HEADS).to(device))
    context_lens = ints(*lengths, device=device).view(-1, 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context_lens, PAGE, 132)
    pool = cache.view(PAGES, -1).view(PAGES, PAGE, 1, DIM + 4)
    got = deep_gemm.fp8_paged_mqa_logits(
        q8.unsqueeze(1), pool, weights, context_lens, table, schedule, 3 * PAGE, clean_logits=False
    )
    assert got.shape == (3, 3 * PAGE) and got.stride(0) % 4 == 0
    wanted = xt.indexer_logits_paged(q8, weights, cache, table, context_lens[:, 0], implementation="reference")
    for row, (n, want) in enumerate(zip(lengths, wanted, strict=True)):
        kit.assert_close("logits", got[row, :n], want[:n], LOGITS)


def test_another_kernel_of_the_logits_is_refused() -> None:
    indexer.resolve("auto")
    with pytest.raises(UnsupportedError) as raised:
        indexer.resolve("cutedsl")
    assert str(raised.value) == (
        "xmla.sglang: not served: --dsa-paged-mqa-logits-backend cutedsl; without xmla in SGLANG_PLUGINS SGLang serves "
        "with its own kernels"
    )


def entries(cache_format: str, device: str) -> tuple[torch.Tensor, np.ndarray]:
    """A pool [N, 1, ROW] as SGLang has it, and its rows in float64."""
    dims = LATENT if cache_format == "nope" else ENTRY
    if cache_format == "bfloat16":
        pool = normal(PAGES * PAGE, 1, ENTRY).bfloat16()
        return pool.to(device), pool[:, 0].double().numpy()
    cache = torch.zeros(PAGES, PAGE, {"v32": 656, "nope": 528}[cache_format], dtype=torch.uint8, device=device)
    rows, ids = normal(PAGES * PAGE, ENTRY).bfloat16().to(device), torch.arange(PAGES * PAGE, device=device)
    xt.write_mla_cache(rows[:, :LATENT], rows[:, LATENT:dims], ids, cache, cache_format=cache_format)
    read = xt.read_mla_cache(cache, ids, cache_format=cache_format, dtype="float32", implementation="reference")
    return cache.view(-1, 1, cache.shape[2]).view(torch.float8_e4m3fn), read.cpu().double().numpy()


def attended(q: torch.Tensor, rows: np.ndarray, chosen: torch.Tensor) -> np.ndarray:
    out = np.zeros((*q.shape[:2], LATENT))
    for t, (heads, row) in enumerate(zip(q.cpu().double().numpy(), chosen.tolist(), strict=True)):
        keys = rows[[slot for slot in row if slot >= 0]]
        if len(keys):
            scores = np.exp(heads @ keys.T * 0.05)
            out[t] = scores / scores.sum(axis=1, keepdims=True) @ keys[:, :LATENT]
    return out


def chosen_slots(device: str) -> torch.Tensor:
    return torch.tensor([[1, 300, 7, 64], [383, 0, -1, -1], [-1] * 4], dtype=torch.int32, device=device)


@pytest.mark.parametrize("lengths", [None, (4, 2, 0), (4, 2)])
@pytest.mark.parametrize("cache_format", ["bfloat16", "v32"])
def test_flashmla_sparse(cache_format: str, lengths: tuple[int, ...] | None, device: str) -> None:
    """Lengths of fewer tokens than there are do not count."""
    pool, rows = entries(cache_format, device)
    q, chosen = normal(3, HEADS, ENTRY).bfloat16().to(device), chosen_slots(device)
    got = attention.forward_flashmla_sparse(
        None, q_all=q, kv_cache=pool, page_table_1=chosen, sm_scale=0.05, v_head_dim=LATENT,
        topk_length=None if lengths is None else ints(*lengths, device=device), attn_sink=None,
    )  # fmt: skip
    assert difference(got.cpu().double().numpy(), attended(q, rows, chosen), ATTENTION_OUT) is None


def test_flashmla_sparse_with_a_sink(device: str) -> None:
    pool, rows = entries("bfloat16", device)
    q, chosen = normal(3, HEADS, ENTRY).bfloat16().to(device), chosen_slots(device)
    got = attention.forward_flashmla_sparse(
        None, q_all=q, kv_cache=pool, page_table_1=chosen, sm_scale=0.05, v_head_dim=LATENT, topk_length=None,
        attn_sink=torch.full((HEADS,), 100.0, device=device),
    )  # fmt: skip
    assert np.abs(attended(q, rows, chosen)).max() > 0.1 and got.abs().max() < 1e-6


@pytest.mark.parametrize("lengths", [(4, 2, 0), (4, 2)])
@pytest.mark.parametrize("cache_format", ["bfloat16", "v32", "nope"])
def test_flashmla_kv(cache_format: str, lengths: tuple[int, ...], device: str) -> None:
    """What is behind a length is not attended to; lengths of fewer tokens than there are do not count."""
    pool, rows = entries(cache_format, device)
    dims = rows.shape[1]
    q, chosen = normal(3, HEADS, ENTRY)[..., :dims].bfloat16().to(device), chosen_slots(device)
    slots = chosen if len(lengths) < 3 else torch.where(chosen < 0, 5, chosen)
    backend = SimpleNamespace(
        physical_page_size=PAGE, kv_cache_dim=pool.shape[2], dsa_kv_cache_store_fp8=cache_format != "bfloat16",
        flashmla_kv_format="V32_NO_ROPE" if cache_format == "nope" else "V32",
    )  # fmt: skip
    got = attention.forward_flashmla_kv(
        backend, q_all=q, kv_cache=pool, sm_scale=0.05, v_head_dim=LATENT, page_table_1=slots,
        metadata=SimpleNamespace(dsa_cache_seqlens_int32=ints(*lengths, device=device)),
        layer=SimpleNamespace(tp_q_head_num=HEADS, head_dim=dims),
    )  # fmt: skip
    assert got.shape == (3, 1, HEADS, LATENT)
    assert difference(got[:, 0].cpu().double().numpy(), attended(q, rows, chosen), ATTENTION_OUT) is None


def test_the_log_says_whose_backends_run(caplog: pytest.LogCaptureFixture) -> None:
    attention.tell_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            attention.tell(None, SimpleNamespace(dsa_prefill_impl="flashmla_sparse", dsa_decode_impl="fa3"), skip=True)
    assert [record.getMessage() for record in caplog.records] == [
        "DeepSeek sparse attention runs on xmla: indexer logits, top-k and slots; "
        "in prefill flashmla_sparse is xmla's, in decode fa3 is SGLang's"
    ]


SIZES = warmup.Sizes(tokens=8192 + 512, requests=512, new=3, pages=2560, keys=1 << 21)
SMALL = warmup.Sizes(tokens=2048 + 8, requests=8, new=1, pages=1025, keys=65536)
INDEX_POOL = Spec((40000, 64, 132), "uint8")


@PLANNED
@pytest.mark.parametrize(("sizes", "heads"), [(SIZES, 64), (SMALL, 16)], ids=["many", "few"])
def test_warmup_of_selections(sizes: warmup.Sizes, heads: int, device: Device) -> None:
    """Calls of any size that a step may have launch kernels of the list; a step's rows may begin anywhere in others."""
    rng = np.random.default_rng(0)
    found = {*specializations(warmup.select_calls(INDEX_POOL, heads, 2048, sizes, device), device)}

    def per_token(tokens: int, *names: str) -> dict[str, Spec]:
        return {name: Spec((tokens,), "int32", alignment=int(rng.choice([4, 8, 16]))) for name in names}

    def query(tokens: int, heads: int = heads) -> dict[str, Spec]:
        return {"q8": Spec((tokens, heads, 128), "float8_e4m3fn"), "weights": Spec((tokens, heads), "float32")}

    def prefill() -> Call:
        tokens, keys = any_size(rng, sizes.tokens), deep_gemm.row_stride(any_size(rng, sizes.keys))
        gathered = {"keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32")}
        rows = {"starts": Spec((tokens,), "int32"), "ends": Spec((tokens,), "int32")}
        place = int(rng.choice([4, 16]))
        rows = {name: replace(spec, alignment=place) for name, spec in rows.items()}
        return Call("indexer_logits", query(tokens, max(heads, 32)) | gathered | rows, {})  # as SGLang pads it

    def decode() -> Call:
        requests, new = any_size(rng, sizes.requests), int(rng.choice([1, sizes.new]))
        if rng.random() < 0.5:  # drafted tokens as requests
            requests, new = requests * new, 1
        pages = any_size(rng, sizes.pages)
        table = {"cache": INDEX_POOL, "block_table": Spec((requests, pages), "int32")}
        rows = {"lengths": Spec((requests * new,), "int32")}
        return Call(
            "indexer_logits_paged", query(requests * new) | table | rows, {"max_len": deep_gemm.row_stride(64 * pages)}
        )

    def select() -> Call:
        tokens, columns, ragged = any_size(rng, sizes.tokens), any_size(rng, sizes.keys), rng.random() < 0.5
        if not ragged:
            tokens, columns = any_size(rng, sizes.new * sizes.requests), 64 * any_size(rng, sizes.pages)
        logits = {"logits": Spec((tokens, columns), "float32", (deep_gemm.row_stride(columns), 1))}
        rows = {"ends": Spec((tokens,), "int32")} | (per_token(tokens, "starts") if ragged else {})
        return Call("select_topk", logits | rows, {"k": 2048})

    def select_all() -> Call:  # of prompts that are no longer than what is selected
        tokens = any_size(rng, sizes.tokens)
        return Call(
            "select_topk", {"logits": Spec((tokens, 2048), "float32"), "ends": Spec((tokens,), "int32")}, {"k": 2048}
        )

    for make in (prefill, decode, select, select_all):
        missing = unlisted(device, found, make)
        assert not missing, missing[0]
    assert len(found) < 160


@PLANNED
@pytest.mark.parametrize(("packed", "sinks"), [(True, False), (False, False), (True, True)])
def test_warmup_of_attention(packed: bool, sinks: bool, device: Device) -> None:
    rng = np.random.default_rng(1)
    row, dtype = (656, "float8_e4m3fn") if packed else (576, "bfloat16")
    pool = Spec((64 * 4096, 1, row), dtype)
    backend = SimpleNamespace(
        dsa_kv_cache_store_fp8=packed, dsa_index_topk=2048, dsa_prefill_impl="flashmla_sparse",
        dsa_decode_impl="flashmla_kv", physical_page_size=64, flashmla_kv_format="V32",
    )  # fmt: skip
    layer = SimpleNamespace(tp_q_head_num=16, head_dim=576, scaling=0.1)
    found = {*specializations(warmup.attend_calls(backend, layer, pool, SIZES, device, sinks), device)}
    kinds = [(Spec((4096, 64, row), dtype), "v32" if packed else None), (pool, None)]

    def attend() -> Call:
        q = Spec((any_size(rng, SIZES.tokens), 16, 576), "bfloat16")
        gathered = Spec((any_size(rng, SIZES.keys), 1, 576), "bfloat16"), None
        cache, cache_format = (kinds + [gathered] * packed)[int(rng.integers(2 + packed))]
        specs = memory.arguments(q, cache, 2048) | ({"sink": Spec((16,), "float32")} if sinks else {})
        if rng.random() < 0.5:
            del specs["lengths"]
        return Call("sparse_mla", specs, {"softmax_scale": 0.1, "cache_format": cache_format})

    missing = unlisted(device, found, attend)
    assert not missing, missing[0]


def runtime(monkeypatch: pytest.MonkeyPatch, chunk: int | None = 8192, attention: str = "flashmla_kv") -> None:
    """SGLang's modules that say how it serves."""
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    kernel = SimpleNamespace(dsa_prefill_backend=attention, dsa_decode_backend=attention)
    modules = {
        "runtime_context": {
            "get_schedule": lambda: schedule, "get_exec": lambda: SimpleNamespace(kernel=kernel),
            "get_parallel": lambda: SimpleNamespace(attn_tp_size=8),
            "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=None),
        },
        "configs.model_config": {
            "is_deepseek_dsa": lambda config: config is not None, "is_deepseek_v4": lambda config: config == "v4",
            "get_dsa_index_topk": lambda config: 2048,
        },
    }  # fmt: skip
    for name, parts in modules.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_sizes_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(shape=(9, 4100))
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=8, req_to_token=table), max_total_num_tokens=65536
    )  # fmt: skip
    runtime(monkeypatch)
    sizes = warmup.Sizes.of(runner, 64)
    assert sizes == warmup.Sizes(tokens=8192 + 8, requests=8, new=1, pages=65, keys=65536)
    runtime(monkeypatch, chunk=-1)
    assert warmup.Sizes.of(runner, 64).tokens == 16384 + 8


@pytest.mark.parametrize(("sparse", "attention"), [(True, "flashmla_kv"), (False, "flashmla_kv"), (True, "tilelang")])
def test_scratch_memory_is_not_free_for_keys(
    sparse: bool, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    runtime(monkeypatch, attention=attention)
    held: list[Any] = []

    def empty(size: int, dtype: Any, device: Any) -> Any:
        tensor = np.empty(0)
        held.append((size, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(scratch, "torch", SimpleNamespace(empty=empty, device=lambda *_: None, uint8=None))
    monkeypatch.setattr(scratch, "device_of", lambda _: find_device("H100"))
    config = SimpleNamespace(hf_config=object() if sparse else None, num_attention_heads=128, context_len=163840)

    def count(configurator: Any, before: int) -> int:
        return before - sum(size for size, tensor in held if tensor() is not None)

    free = scratch.beside_scratch(count, SimpleNamespace(model_config=config, gpu_id=0), 1 << 40)
    needed = memory.scratch_v32(16, 2048, 8192, find_device("H100"), gathers=False) if sparse else 0
    assert (1 << 40) - free == (needed if attention == "flashmla_kv" else 0)
    assert all(tensor() is None for _, tensor in held)


def test_a_runner_that_drafts_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = SimpleNamespace(specializations=(1, 2), seconds=3.21)
    asked: list[Any] = []
    monkeypatch.setattr(warmup, "device_of", lambda _: "a device")
    monkeypatch.setattr(warmup, "calls", lambda *words: words)
    monkeypatch.setattr(warmup, "make_engine_ready", lambda *words: asked.append(words) or made)
    with caplog.at_level("INFO"):
        for drafts in (False, True):
            warmup.warm(None, "a backend", SimpleNamespace(is_draft_worker=drafts, gpu_id=3), skip=True)
    assert [(words[0][0], words[1:]) for words in asked] == [("a backend", ("a device", 3))]
    assert [record.getMessage() for record in caplog.records] == ["xmla: 2 kernels are ready, after 3.2 s"]


@pytest.mark.parametrize("value", [None, "", "another", "xmla2,another"])
def test_unnamed_nothing_changes(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even SGLang's version is asked for, which is not installed here."""
    monkeypatch.setitem(sys.modules, "xmla.sglang.patches", None)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", value)
    xmla.sglang.register()


def test_any_other_release_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    patches: Any = ModuleType("xmla.sglang.patches")
    installed: list[str] = []
    patches.install = installed.append
    monkeypatch.setitem(sys.modules, "xmla.sglang.patches", patches)
    monkeypatch.setattr(xmla.sglang, "patches", patches, raising=False)
    monkeypatch.setenv("SGLANG_PLUGINS", "another, xmla")
    for release in ("0.5.23.post1", "0.6.0"):
        monkeypatch.setattr(xmla.sglang, "version", lambda _, release=release: release)
        xmla.sglang.register()
    assert installed == ["0.5.23.post1", "0.6.0"]
    assert [record.getMessage() for record in caplog.records] == ["SGLang 0.6.0: xmla is tested with 0.5.23"]


def test_required_it_ends_a_process_that_cannot_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang catches every Exception of a plugin, logs it and serves on."""

    def refuse(_: str) -> None:
        raise UnsupportedError("xmla.sglang: something is missing")

    monkeypatch.setitem(sys.modules, "xmla.sglang.patches", SimpleNamespace(install=refuse))
    monkeypatch.setattr(xmla.sglang, "patches", SimpleNamespace(install=refuse), raising=False)
    monkeypatch.setattr(xmla.sglang, "version", lambda _: "0.5.23")
    monkeypatch.setenv("SGLANG_PLUGINS", "xmla")
    for value in (None, "", "0"):
        monkeypatch.delenv("XMLA_SGLANG_REQUIRED", raising=False)
        if value is not None:
            monkeypatch.setenv("XMLA_SGLANG_REQUIRED", value)
        with pytest.raises(UnsupportedError):
            xmla.sglang.register()
    monkeypatch.setenv("XMLA_SGLANG_REQUIRED", "1")
    with pytest.raises(SystemExit) as raised:
        xmla.sglang.register()
    assert str(raised.value) == ("XMLA_SGLANG_REQUIRED is set and xmla cannot serve: xmla.sglang: something is missing")
    monkeypatch.setitem(sys.modules, "xmla.sglang.patches", None)  # as where SGLang cannot be imported
    monkeypatch.delattr(xmla.sglang, "patches")
    with pytest.raises(SystemExit, match="XMLA_SGLANG_REQUIRED is set and xmla cannot serve: "):
        xmla.sglang.register()
