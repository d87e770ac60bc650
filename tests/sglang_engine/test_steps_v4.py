"""SGLang's own code of DeepSeek-V4's steps with xmla as its plugin, on the CPU, as `test_steps` runs V3.2's.

SGLang's pools, its Triton writers of their bytes, its metadata and `DeepseekV4AttnBackend` are the published ones, and
the backend is made by its `__init__`. Stand-ins are the packages of FlashMLA and DeepGEMM, whose functions are
replaced, the plans of the compressors, which nvcc compiles, and the projections of the indexer. References are in
float64, of the bytes in the pools.
"""

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_ins
import torch

from xmla import UnsupportedError, layouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang: make sglang"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang is imported as on a CPU"),
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore"),
]

sys.path.append(str(Path(__file__).parent.parent / "vllm_engine"))  # what does not depend on the engine
import recorded  # noqa: E402

OPS = ("indexer_logits", "indexer_logits_paged", "select_topk", "map_slots", "sparse_mla")
PAGE, WINDOW, HEADS, INDEX_HEADS, NOPE, ROPE, KEEP = 256, 128, 3, 4, 448, 64, 512
RATIOS = (0, 4, 128)  # of the layers
LENGTHS = [2300, 150, 3]  # keys of each request, at the end of a step: of the first, more entries than are selected
PAGES = [9, 1, 1]
CONTEXT = 10 * PAGE
MODEL = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "index_topk": KEEP,
    "index_n_heads": INDEX_HEADS,
}  # fmt: skip


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    """SGLang's module of the backend, with xmla's hooks."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as served:
        stand_ins.install(patch)
        patch.setattr(torch._dynamo.config, "disable", True)
        stand_ins.install_kernels(patch)
        from sglang.srt.layers.attention import deepseek_v4_backend
        from sglang.srt.layers.attention.dsv4 import indexer
        from sglang.srt.runtime_context import get_context, get_parallel, override_platform

        stand_ins.load_plugins(patch, "xmla")
        served.enter_context(get_context().override_server_args(chunked_prefill_size=64, page_size=PAGE))
        served.enter_context(override_platform(is_cuda=True))
        served.enter_context(get_parallel().override(attn_dcp_size=1, attn_cp_size=1, attn_tp_size=1))
        for module in (deepseek_v4_backend, indexer):
            patch.setattr(module, "is_cuda", lambda: True)
        patch.setattr(deepseek_v4_backend, "create_paged_compressor_data", lambda *_, **__: None)
        yield deepseek_v4_backend


def normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random).bfloat16()


class Engine:
    """A layer of each of these ratios over requests of LENGTHS keys, whose pages are mixed, in both pools by different
    orders.
    """

    def __init__(self, sglang: Any, ratios: tuple[int, ...] = RATIOS) -> None:
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

        self.sglang, self.random, self.ratios = sglang, torch.Generator().manual_seed(0), ratios
        pages = 12
        self.pool = DeepSeekV4TokenToKVPool(
            max_num_reqs=4, swa_size=pages * PAGE, c4_size=pages * PAGE // 4, c128_size=pages * PAGE // 128,
            c4_state_pool_size=64, c128_state_pool_size=64, page_size=PAGE, swa_page_size=PAGE,
            dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32, c128_state_dtype=torch.float32,
            qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, indexer_head_dim=128, layer_num=len(ratios), device="cpu",
            enable_memory_saver=False, compression_ratios=[*ratios],
        )  # fmt: skip
        slot = torch.arange((1 + pages) * PAGE)
        of_window = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(pages, generator=self.random)])
        self.pool.register_mapping(of_window[slot // PAGE] * PAGE + slot % PAGE)
        taken = (1 + torch.randperm(pages, generator=self.random)).split([*PAGES, pages - sum(PAGES)])
        self.slots = torch.zeros(4, CONTEXT, dtype=torch.int32)  # [request, position]
        for row, own in zip(self.slots, taken, strict=False):
            row[: len(own) * PAGE] = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:CONTEXT]
        config = SimpleNamespace(**MODEL)
        self.runner = SimpleNamespace(
            device="cpu", gpu_id=0, page_size=PAGE, token_to_kv_pool=self.pool, hisparse_coordinator=None,
            is_draft_worker=True, spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots, size=4), max_total_num_tokens=pages * PAGE,
            model_config=SimpleNamespace(
                context_len=CONTEXT, head_dim=NOPE + ROPE, v_head_dim=NOPE + ROPE, hf_config=config,
                hf_text_config=config, num_attention_heads=HEADS,
            ),
        )  # fmt: skip
        self.write()
        self.serve()

    def serve(self, drafts: int = 0) -> None:
        """Serve by a new backend, which verifies so many tokens of a request."""
        self.drafts = drafts
        self.backend = self.sglang.DeepseekV4AttnBackend(self.runner)
        self.prepare = self.backend.init_forward_metadata

    def write(self) -> None:
        """All compressed entries of all requests and the last windows, by SGLang's kernels."""
        for slots, length in zip(self.slots, LENGTHS, strict=False):
            own = slots[:length].long()
            of_window = self.pool.full_to_swa_index_mapping[own[-WINDOW - 16 :]]
            for layer, ratio in enumerate(self.ratios):
                self.pool.set_swa_key_buffer(layer, of_window, self.pack(len(of_window)))
                if ratio and length // ratio:
                    of_entries = own[ratio - 1 :: ratio] // ratio
                    self.pool.set_extra_key_buffer(layer, of_entries, self.pack(len(of_entries)))
                if ratio == 4 and length // ratio:
                    keys = normal(self.random, len(of_entries), 128).to(torch.float8_e4m3fn)
                    scales = torch.rand(len(of_entries), 1, generator=self.random) + 0.5
                    self.pool.index_pools[4].set_index_k_scale_buffer(0, of_entries, keys, scales)

    def pack(self, count: int) -> Any:
        from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack

        nope = normal(self.random, count, NOPE).to(torch.float8_e4m3fn)
        scales = torch.randint(125, 129, (count, 7), generator=self.random, dtype=torch.uint8)
        return NopeFp8RopeBf16Pack(nope, normal(self.random, count, ROPE), scales)

    def batch(self, mode: str, new: list[int], requests: list[int]) -> SimpleNamespace:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        ends = [LENGTHS[r] for r in requests]
        drafts = self.drafts if mode == "TARGET_VERIFY" else 0  # which SGLang adds
        lengths = torch.tensor(ends) - drafts
        places = [slice(n - m, n) for n, m in zip(ends, new, strict=True)]
        return SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=len(requests), seq_lens=lengths, seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()), req_pool_indices=torch.tensor(requests), extend_num_tokens=sum(new),
            extend_seq_lens=torch.tensor(new, dtype=torch.int32), extend_seq_lens_cpu=new, spec_info=None,
            extend_start_loc=torch.tensor([0, *new[:-1]]).cumsum(0), attn_cp_metadata=None, encoder_swa_replay=False,
            encoder_swa_row_floor=None, encoder_swa_compress_rows=None, max_seq_len_override=None,
            tbo_parent_token_range=None, _original_forward_mode=None,
            positions=torch.cat([torch.arange(place.start, place.stop) for place in places]),
            out_cache_loc=torch.cat([self.slots[r, place] for r, place in zip(requests, places, strict=True)]).long(),
        )  # fmt: skip

    def step(self, mode: str, new: list[int], requests: list[int] | None = None) -> None:
        """Serve each request's last `new` tokens as SGLang does, and compare what is selected and what comes out.

        A step of drafting has the layer alone that attends to the window.
        """
        requests = [0, 1, 2] if requests is None else requests
        batch, count = self.batch(mode, new, requests), sum(new)
        tokens = [
            (r, LENGTHS[r] - m + 1 + j) for r, m in zip(requests, new, strict=True) for j in range(m)
        ]  # request and keys of each
        self.prepare(batch)
        compressed = self.backend.forward_metadata.indexer_metadata is not None
        selected = self.select(batch, tokens) if compressed else [[]] * count
        for layer, ratio in enumerate(self.ratios if compressed else self.ratios[:1]):
            q, sink = normal(self.random, count, HEADS, NOPE + ROPE), torch.randn(HEADS, generator=self.random)
            attention = SimpleNamespace(layer_id=layer, v_head_dim=NOPE + ROPE, tp_q_head_num=HEADS)
            out = self.backend.forward(
                q, q, q, attention, batch, compress_ratio=ratio, save_kv_cache=False, attn_sink=sink
            )
            window = stored(self.pool.swa_kv_pool, layer)
            entries = stored(self.pool.kv_pools[ratio], 0) if ratio else np.zeros((0, NOPE + ROPE))
            keys = []
            for (r, length), row in zip(tokens, selected, strict=True):
                recent = self.pool.full_to_swa_index_mapping[self.slots[r, max(0, length - WINDOW) : length].long()]
                own = row if ratio == 4 else [*range(length // ratio if ratio else 0)]
                attended_to = self.of_entries(r, ratio)[own] if ratio else own
                keys.append(np.concatenate([window[recent.numpy()], entries[attended_to]]))
            wanted = attended(q, keys, sink, self.backend.softmax_scale)
            np.testing.assert_allclose(out.double().view(wanted.shape), wanted, rtol=0.02, atol=0.02)

    def select(self, batch: SimpleNamespace, tokens: list[tuple[int, int]]) -> list[list[int]]:
        """SGLang's selection for each token, a request and its number of keys, is the reference's: its entries."""
        q8 = normal(self.random, len(tokens), INDEX_HEADS, 128).to(torch.float8_e4m3fn)
        weights = torch.randn(len(tokens), INDEX_HEADS, generator=self.random)
        projections = SimpleNamespace(
            layer_id=RATIOS.index(4), use_fp4_indexer=False, index_topk=KEEP, compute_weights=lambda *_, **__: None,
            compute_q=lambda *_: (q8, weights[..., None]),
        )  # fmt: skip
        x = torch.empty(len(tokens), 1)
        self.backend.forward_c4_indexer(x, x, projections, batch, skip_compressor=True)
        selected = self.selected(q8, weights, tokens)
        core = self.backend.forward_metadata.core_metadata
        missing = [[-1] * (KEEP - len(row)) for row in selected]
        places = [self.of_entries(r, 4)[row].tolist() for (r, _), row in zip(tokens, selected, strict=True)]
        assert core.c4_sparse_page_indices.tolist() == [[*a, *b] for a, b in zip(places, missing, strict=True)]
        if core.c4_sparse_raw_indices is not None:
            assert core.c4_sparse_raw_indices.tolist() == [[*a, *b] for a, b in zip(selected, missing, strict=True)]
        return selected

    def of_entries(self, request: int, ratio: int) -> np.ndarray:
        """Slots of a request's entries."""
        return self.slots[request, ratio - 1 :: ratio].numpy() // ratio

    def selected(self, q8: torch.Tensor, weights: torch.Tensor, tokens: list[tuple[int, int]]) -> list[list[int]]:
        """Entries of the largest logits of each token's keys, ascending."""
        buffer = self.pool.index_pools[4].get_index_k_with_scale_buffer(0)
        values = buffer[:, : 64 * 128].view(torch.float8_e4m3fn).double().reshape(-1, 128)
        keys = (values * buffer[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1, 1)).numpy()
        found = []
        for query, gates, (r, length) in zip(q8.double().numpy(), weights.double().numpy(), tokens, strict=True):
            seen = keys[self.of_entries(r, 4)[: length // 4]]
            logits = gates @ np.maximum(query @ seen.T, 0)
            found.append(np.sort(np.argsort(-logits, kind="stable")[:KEEP]).tolist())
        return found


def stored(pool: Any, layer: int) -> np.ndarray:
    """A pool's entries [slot, 512]."""
    pages, page = pool.kv_buffer[layer].numpy(), pool.page_size
    data = np.ascontiguousarray(pages[:, : page * 576]).reshape(-1, 576)
    scales = np.ascontiguousarray(pages[:, page * 576 : page * 584]).reshape(-1, 8)[:, :7]
    bits = torch.from_numpy(data)
    nope = bits[:, :NOPE].contiguous().view(torch.float8_e4m3fn).double().numpy().reshape(-1, 7, 64)
    rope = bits[:, NOPE:].contiguous().view(torch.bfloat16).double().numpy()
    return np.concatenate([(nope * 2.0 ** (scales[..., None] - 127.0)).reshape(-1, NOPE), rope], axis=1)


def attended(q: torch.Tensor, keys: list[np.ndarray], sink: torch.Tensor, scale: float) -> np.ndarray:
    out = []
    for heads, rows in zip(q.double().numpy(), keys, strict=True):
        scores = heads @ rows.T * scale
        most = np.maximum(scores.max(axis=1), sink.double().numpy())[:, None]
        weights = np.exp(scores - most)
        out.append(
            weights @ rows / (weights.sum(axis=1, keepdims=True) + np.exp(sink.double().numpy()[:, None] - most))
        )
    return np.stack(out)


@pytest.fixture(scope="module")
def written(sglang: Any) -> Engine:
    return Engine(sglang)


@pytest.fixture
def listed(written: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls launch, on any known GPU, nothing but kernels that the plugin's warm-up compiles for the model."""
    from xmla.sglang import warmup_v4

    made = recorded.record(monkeypatch, OPS)
    yield
    missing = recorded.unlisted(made, partial(warmup_v4.calls, written.backend, written.runner))
    assert made and not missing, missing[:1]


@pytest.fixture
def engine(written: Engine, listed: None) -> Engine:
    written.serve()
    return written


@pytest.fixture(scope="module")
def drafting(sglang: Any) -> Engine:
    """The runner that drafts: its pool is of one layer, which attends to its window alone."""
    return Engine(sglang, (0,))


def test_a_prefill_then_a_decode(engine: Engine) -> None:
    engine.step("EXTEND", [3, 5, 3])
    engine.step("EXTEND", [1, 4], [1, 0])
    engine.step("DECODE", [1, 1, 1])


def test_a_prefill_over_the_pools(engine: Engine) -> None:
    """SGLang gathers no rows."""
    from sglang.srt.environ import envs

    with envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.override(False):
        engine.step("EXTEND", [3, 5, 3])


@pytest.mark.parametrize("rows", [None, 2])
def test_a_prefill_whose_keys_are_gathered(
    engine: Engine, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """SGLang gathers those of one long prefill, and bounds the memory of logits: here to two rows of them."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    if rows is not None:
        budget = lambda *_, **__: rows * 4 * 768
        monkeypatch.setattr(PagedIndexerMetadata, "_mqa_logits_budget", budget)
    with envs.SGLANG_OPT_DSV4_NONPAGED_INDEXER_MIN_QUERY_TOKENS.override(1):
        engine.step("EXTEND", [5], [0])
    assert engine.backend.forward_metadata.indexer_metadata.nonpaged_plan.rows_per_chunk == rows


def test_a_prefill_in_chunks_of_its_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.dsv4 import metadata

    monkeypatch.setattr(metadata, "plan_indexer_row_chunks", lambda **_: 3)
    engine.step("EXTEND", [3, 5, 3])


def test_top_k_without_a_plan(engine: Engine) -> None:
    from sglang.srt.environ import envs

    with envs.SGLANG_OPT_USE_TOPK_V2.override(False):
        engine.step("DECODE", [1, 1, 1])


def test_drafted_tokens(engine: Engine) -> None:
    """Their verification, and the drafting layer's step behind it."""
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(speculative_num_draft_tokens=2, speculative_eagle_topk=1):
        engine.serve(drafts=2)
        engine.step("TARGET_VERIFY", [2, 2, 2])
        engine.step("DRAFT_EXTEND_V2", [2, 2, 2])


@pytest.mark.parametrize("steps", [2, 3])
def test_the_steps_of_drafting(drafting: Engine, listed: None, steps: int) -> None:
    """The drafting layer behind a prefill, in each step of several by its own backend, and behind what was verified.

    All steps attend to the same keys: SGLang counts none of the drafted ones.
    """
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(speculative_num_draft_tokens=steps + 1, speculative_eagle_topk=1):
        drafting.serve(drafts=steps + 1)
        drafting.step("EXTEND", [3, 5, 3])
        several = drafting.sglang.DeepseekV4MultiStepBackend(drafting.runner, 1, steps)

        def prepare(batch: SimpleNamespace) -> None:
            batch.out_cache_loc = batch.out_cache_loc.repeat_interleave(steps)
            several.init_forward_metadata(batch)

        for drafting.backend in several.attn_backends[:-1]:  # the last draft needs no step
            drafting.prepare = prepare
            drafting.step("DECODE", [1, 1, 1])
        drafting.serve(drafts=steps + 1)
        drafting.step("DRAFT_EXTEND_V2", [steps + 1] * 2, [1, 0])


def test_a_decode_with_the_metadata_of_a_cuda_graph(engine: Engine) -> None:
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    captured = engine.batch("DECODE", [1, 1, 1], [2, 2, 2])

    def prepare(batch: SimpleNamespace, **how: Any) -> None:
        backend.init_forward_metadata_out_graph(batch, **how)
        backend.init_forward_metadata_in_graph(batch)

    prepare(captured, in_capture=True)
    backend.on_after_cuda_graph_warmup()
    engine.prepare = prepare
    engine.step("DECODE", [1, 1, 1])


def test_a_prefill_with_the_metadata_of_a_cuda_graph(engine: Engine) -> None:
    backend = engine.backend
    captured = backend.init_forward_metadata_for_breakable_cuda_graph_capture(
        engine.batch("EXTEND", [5, 3, 3], [0, 1, 2])
    )
    engine.prepare = partial(backend.prepare_forward_metadata_for_breakable_cuda_graph_replay, captured)
    engine.step("EXTEND", [3, 5, 3])
    assert backend.forward_metadata is captured


def test_every_change_is_made_everywhere(written: Engine) -> None:
    """Also in modules that had imported a function by its name before the plugin."""
    from sglang.srt.layers.attention.dsv4 import indexer
    from sglang.srt.plugins.hook_registry import HookRegistry

    from xmla.sglang import patches

    assert {patch.target for patch in patches.V4_PATCHES} <= HookRegistry._patched
    for name in ("topk_transform_paged", "topk_transform_paged_v2", "plan_topk_v2"):
        assert hasattr(getattr(indexer, name), "__wrapped__")


def test_digests_are_of_the_pools_pages(written: Engine) -> None:
    pool = written.pool
    pages = {"window": (pool.swa_kv_pool, PAGE), "entries": (pool.kv_pools[4], PAGE // 4)}
    for each, page in pages.values():
        assert f";stride={each.get_key_buffer(0).stride(0)};" in layouts.digest("v4", page)
    keys = pool.index_pools[4].get_index_k_with_scale_buffer(0)
    assert f";stride={keys.stride(0)};" in layouts.digest("indexer_fp8_d128", PAGE // 4)


def test_heads_of_a_rank_are_not_padded(written: Engine) -> None:
    from sglang.srt.models.deepseek_v4 import MqaAttentionBase

    attention = SimpleNamespace(n_local_heads=8, n_heads=64, attn_tp_size=8)
    assert MqaAttentionBase._kernel_num_heads(attention, 3) == 8


def test_every_call_has_arguments_that_the_replacement_takes(written: Engine) -> None:
    """Of each replaced function, in SGLang's sources of DeepSeek-V4."""
    from xmla.sglang import patches

    takes = {patch.name.split(".")[-1]: inspect.signature(patch.function) for patch in patches.V4_PATCHES}
    srt = Path(written.sglang.__file__).parent.parent.parent
    files = [*(srt / "layers/attention").glob("deepseek_v4_backend.py"), *(srt / "layers/attention/dsv4").glob("*.py")]
    bound = set()
    for file in [*files, srt / "models/deepseek_v4.py"]:
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            name = "fp8_paged_mqa_logits" if (file.name, name) == ("indexer.py", "fn") else name
            if name in takes and file.name != "low_ratio_backend_hip.py":
                receiver = [None] * ("self" in takes[name].parameters)
                takes[name].bind(*receiver, *call.args, **{word.arg: None for word in call.keywords})
                bound.add(name)
    assert bound == takes.keys()


def test_what_is_not_served_is_refused_at_start(written: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang counts memory, and where it makes the backend."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel, get_spec, override_platform

    configurator = SimpleNamespace(model_config=written.runner.model_config, gpu_id=0)
    kernel = get_exec().kernel
    cases = {
        "DeepSeek-V4 on other GPUs than Nvidia's": override_platform(is_cuda=False),
        "DeepSeek-V4 on sm_120": override_platform(is_sm120=True),
        "--dsv4-attn-backend trtllm": kernel.override(dsv4_attn_backend="trtllm"),
        "--dsv4-prefill-backend flashmla_sparse_q8": kernel.override(dsv4_prefill_backend="flashmla_sparse_q8"),
        "--dsa-topk-backend torch of DeepSeek-V4": kernel.override(dsa_topk_backend="torch"),
        "--enable-deepseek-v4-fp4-indexer": kernel.override(enable_deepseek_v4_fp4_indexer=True),
        "DSpark": get_spec().override(speculative_algorithm="DSPARK"),
        "HiSparse of DeepSeek-V4": get_memory().override(enable_hisparse=True),
        "context parallelism of DeepSeek-V4": get_parallel().override(dcp_size=2),
        "SGLANG_DSV4_KV_LAYOUT=v41_new": envs.SGLANG_DSV4_KV_LAYOUT.override("v41_new"),
    }
    cases |= {
        f"{name}=1": getattr(envs, name).override(True)
        for name in (
            "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER",
            "SGLANG_OPT_USE_ONLINE_COMPRESS",
        )
    }  # fmt: skip
    ending = "; without xmla in SGLANG_PLUGINS SGLang serves with its own kernels"
    ranks = "context parallelism of DeepSeek-V4", get_parallel().override(tp_size=2, moe_tp_size=2, attn_cp_size=2)
    for reason, option in (*cases.items(), ranks):
        with option:
            for refused in (
                partial(KVCacheConfigurator._profile_available_bytes, configurator, 1),
                partial(written.sglang.DeepseekV4AttnBackend, written.runner),
            ):
                with pytest.raises(UnsupportedError) as raised:
                    refused()
                assert str(raised.value) == f"xmla.sglang: not served: {reason}{ending}"
    for field, value, reason in (
        ("index_head_dim", 64, "keys of the indexer of 64 dims"),
        ("model_type", "deepseek_v41", r"DeepSeek-V4\.1"),
    ):
        with monkeypatch.context() as changed, pytest.raises(UnsupportedError, match=f"not served: {reason}; "):
            changed.setattr(written.runner.model_config.hf_config, field, value, raising=False)
            written.sglang.DeepseekV4AttnBackend(written.runner)


def test_without_deep_gemm_the_process_ends(written: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own V4 needs it, too; no change is made."""
    from xmla.sglang import patches

    registered: list[str] = []
    monkeypatch.setattr(patches.HookRegistry, "register", lambda target, *_: registered.append(target))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(UnsupportedError) as raised:
        patches.install_v4.__wrapped__()
    assert str(raised.value) == (
        f"xmla.sglang: SGLang {version('sglang')} has no deep_gemm.fp8_paged_mqa_logits, which xmla replaces "
        "(ModuleNotFoundError: import of deep_gemm halted; None in sys.modules); without xmla in SGLANG_PLUGINS SGLang "
        "serves with its own kernels"
    )
    assert not registered


def test_what_another_plugin_has_changed_ends_the_process(written: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang hooks a function once, and passes over later hooks without a word: here of two that are hooked already."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from xmla.sglang import patches

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(patches, "V4_PATCHES", patches.V4_PATCHES[-2:])
    with pytest.raises(UnsupportedError) as raised:
        patches.install_v4.__wrapped__()
    assert str(raised.value) == (
        f"xmla.sglang: SGLang {version('sglang')} did not replace "
        "sglang.kernels.ops.attention.flash_mla_interface.flash_mla_sparse_fwd, "
        "sglang.srt.models.deepseek_v4.MqaAttentionBase._kernel_num_heads, which another plugin has changed; "
        "expected xmla alone in SGLANG_PLUGINS"
    )


def test_the_log_tells_that_attention_is_xmlas(written: Engine, caplog: pytest.LogCaptureFixture) -> None:
    from xmla.sglang import attention_v4

    attention_v4.tell.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            attention_v4.tell()
    assert [record.getMessage() for record in caplog.records] == [
        "DeepSeek sparse attention runs on xmla: indexer logits, top-k and slots of DeepSeek-V4, attention in prefill "
        "and decode"
    ]
