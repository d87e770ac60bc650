"""SGLang's own code of a layer's step with xmla as its plugin, on the CPU: `make sglang` installs it and runs this.

SGLang's pool, metadata, indexer and backend are the published ones; they write the caches with their Triton kernels, in
the interpreter. What needs CUDA to be made, the indexer's module and the backend, is made without its `__init__`.
References are in float64, of the bytes in the pool.
"""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "vllm_engine"))  # what does not depend on the engine
import recorded  # noqa: E402

OPS = ("indexer_logits", "indexer_logits_paged", "select_topk", "map_slots", "sparse_mla")
PAGE, HEADS, INDEX_HEADS, LATENT, ENTRY, SCALE = 64, 3, 4, 512, 576, 0.05
HEADS_OF_A_LAYER = {"tp_q_head_num": HEADS, "head_dim": ENTRY, "v_head_dim": LATENT, "scaling": SCALE}
LENGTHS = [70, 3, 11]  # keys of each request, at the end of a step


@dataclass
class SGLang:
    """SGLang's modules, with xmla's hooks."""

    patches: Any
    backend: Any
    indexer: Any
    plugins: Any


@pytest.fixture(scope="module")
def sglang() -> Iterator[SGLang]:
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.install(patch)
        patch.setattr(torch._dynamo.config, "disable", True)
        from sglang.srt import plugins
        from sglang.srt.layers.attention import dsa_backend
        from sglang.srt.layers.attention.dsa import dsa_indexer
        from sglang.srt.runtime_context import get_parallel

        stand_ins.load_plugins(patch, "xmla")
        from xmla.sglang import patches

        for module in (dsa_backend, dsa_indexer):
            patch.setattr(module, "_is_cuda", True)
        patch.setattr(dsa_backend, "is_cuda", lambda: True)
        patch.setattr(dsa_indexer, "can_use_dsa_fused_store", lambda *_: False)  # compiled by nvcc
        patch.setattr(dsa_backend, "seqlens_expand_triton", expanded)
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_cp_size=1):
            yield SGLang(patches, dsa_backend, dsa_indexer, plugins)


def expanded(new: torch.Tensor, lengths: torch.Tensor, total_len: int, max_q_len: int) -> torch.Tensor:
    """`seqlens_expand_triton`, which demands a GPU: the keys of each request's last tokens."""
    each = zip(new.tolist(), lengths.tolist(), strict=True)
    return torch.cat([torch.arange(n - m + 1, n + 1, dtype=torch.int32) for m, n in each])


def in_place(
    seq_lens: torch.Tensor, req_to_token: torch.Tensor, cache_seqlens: torch.Tensor, page_table_1: None,
    dsa_cache_seqlens: torch.Tensor, real_page_table: torch.Tensor, dsa_index_topk: int, **_: Any,
) -> None:  # fmt: skip
    """What xmla reads of what `fused_dsa_decode_metadata` writes, which demands a GPU; it has no slots of tokens."""
    assert page_table_1 is None
    cache_seqlens.copy_(seq_lens)
    dsa_cache_seqlens.copy_(seq_lens.clamp(max=dsa_index_topk))
    real_page_table.copy_(req_to_token[:, ::PAGE] // PAGE)


class Layer:
    """A layer of SGLang over requests of LENGTHS keys, whose pages are mixed."""

    def __init__(self, sglang: SGLang, fp8: bool, prefill: str, decode: str, drafts: int = 0, keep: int = 8) -> None:
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
        from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        self.sglang, self.fp8, self.keep = sglang, fp8, keep
        self.pool = DSATokenToKVPool(
            size=8 * PAGE, page_size=PAGE, kv_lora_rank=LATENT, qk_rope_head_dim=ENTRY - LATENT, layer_num=1,
            dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device="cpu", index_head_dim=128,
            enable_memory_saver=False, kv_cache_dim=656 if fp8 else ENTRY,
        )  # fmt: skip
        sglang.indexer.get_token_to_kv_pool = lambda: self.pool
        self.random = torch.Generator().manual_seed(0)
        pages = 1 + torch.randperm(8, generator=self.random)[:6].view(3, 2)
        self.slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()  # [request, position]

        self.indexer = sglang.indexer.Indexer.__new__(sglang.indexer.Indexer)
        torch.nn.Module.__init__(self.indexer)
        for name, value in {
            "index_topk": keep, "n_heads": INDEX_HEADS, "head_dim": 128, "block_size": 128, "scale_fmt": "ue8m0",
            "num_init_tokens": 0, "num_local_tokens": 0, "sm_count": 4,  # of which a step has more tokens with drafts
            "logits_with_pp_recv": False, "paged_mqa_logits_backend": DSAPagedMQALogitsBackend.DEEPGEMM,
            "use_dsa_indexer_fusion": False, "use_aiter_fused_fp8_writer": False,
        }.items():  # fmt: skip
            setattr(self.indexer, name, value)
        self.backend = sglang.backend.DeepseekSparseAttnBackend.__new__(sglang.backend.DeepseekSparseAttnBackend)
        for name, value in {
            "device": "cpu", "dsa_kv_cache_store_fp8": fp8, "dsa_index_topk": keep, "dsa_index_kpool": 1,
            "physical_page_size": PAGE, "dcp_size": 1, "kv_cache_dim": self.pool.kv_cache_dim,
            "flashmla_kv_format": "V32", "req_to_token_pool": SimpleNamespace(req_to_token=self.slots),
            "req_to_token": self.slots, "token_to_kv_pool": self.pool, "_kv_shard_pool": None,
            "hisparse_coordinator": None, "supports_mha_one_shot": False, "dsa_prefill_impl": prefill,
            "dsa_decode_impl": decode, "dsa_topk_backend": DSATopKBackend.SGL_KERNEL,
            "enable_auto_select_prefill_impl": prefill == "flashmla_auto",
            "_arange_buf": torch.arange(256, dtype=torch.int32),
            "use_fused_topk": sglang.backend.envs.SGLANG_DSA_FUSE_TOPK.get(), "speculative_num_draft_tokens": drafts,
            "_is_in_breakable_cuda_graph": lambda: False, "_is_in_tc_piecewise_cuda_graph": lambda: False,
            "_get_device_sm": lambda: 90, "_is_blackwell": lambda: False,
            "_memory_saver_adapter": TorchMemorySaverAdapter.create(enable=False),
            "_fused_decode_metadata": in_place, "kv_lora_rank": LATENT,
        }.items():  # fmt: skip
            setattr(self.backend, name, value)
        self.prepare = self.backend.init_forward_metadata
        self.keys = [self.normal(n, 128) for n in LENGTHS]
        self.entries = [self.normal(n, 1, ENTRY) for n in LENGTHS]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).bfloat16()

    def step(self, mode: str, new: list[int], logits: bool = True) -> None:
        """Serve each request's last `new` tokens as SGLang does, and compare what is selected and what comes out."""
        from sglang.kernels.ops.quantization.act_quant_triton import act_quant

        batch = self.batch(mode, new)
        last = lambda rows: torch.cat([row[len(row) - n :] for row, n in zip(rows, new, strict=True)])
        self.prepare(batch)
        metadata = self.backend.get_indexer_metadata(0, batch)
        if not logits:
            self.indexer._get_k_bf16 = lambda x, positions: last(self.keys)
            chosen = self.indexer._forward_cuda_k_only(torch.empty(0), None, batch, 0, act_quant, metadata)
        self.indexer._store_index_k_cache(forward_batch=batch, layer_id=0, key=last(self.keys), act_quant=act_quant)
        q8, scales = act_quant(self.normal(sum(new), INDEX_HEADS, 128), 128, "ue8m0")
        weights = self.normal(sum(new), INDEX_HEADS, 1).float() * scales
        call = batch, 0, q8, weights, metadata
        if logits and mode == "EXTEND":
            chosen = on_cpu(self.sglang.indexer.Indexer._get_topk_ragged)(self.indexer, False, *call)
        elif logits:
            chosen = self.indexer._get_topk_paged(*call)
        q, new_entries = self.normal(sum(new), HEADS, ENTRY), last(self.entries)
        layer = SimpleNamespace(layer_id=0, is_cross_attention=False, **HEADS_OF_A_LAYER)
        attend = self.backend.forward_decode if mode == "DECODE" else self.backend.forward_extend
        latent, rope = new_entries[..., :LATENT], new_entries[..., LATENT:]
        out = attend(q, latent, latent, layer, batch, True, None, rope, chosen)

        positions = self.wanted(q8, weights, new)
        assert chosen.tolist() == self.as_selected(positions, new, metadata)
        rows = [self.stored()[slots[:n].long()] for slots, n in zip(self.slots, LENGTHS, strict=True)]
        if (
            metadata.topk_transform_method.name == "RAGGED" and new == LENGTHS
        ):  # SGLang attends to what it has not read back
            rows = [entries[:, 0].double() for entries in self.entries]
        wanted = attended(q, rows, positions, new)
        np.testing.assert_allclose(out.double().view(wanted.shape), wanted, rtol=0.02, atol=0.02)

    def batch(self, mode: str, new: list[int]) -> SimpleNamespace:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        drafts = self.backend.speculative_num_draft_tokens if mode == "TARGET_VERIFY" else 0  # which SGLang adds
        lengths = torch.tensor(LENGTHS) - drafts
        return SimpleNamespace(
            forward_mode=ForwardMode[mode], batch_size=3, seq_lens=lengths, seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()), req_pool_indices=torch.arange(3), extend_num_tokens=sum(new),
            extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new, spec_info=None, attn_cp_metadata=None,
            extend_prefix_lens_cpu=[n - m for n, m in zip(LENGTHS, new, strict=True)], global_num_tokens_cpu=None,
            out_cache_loc=torch.cat(
                [self.slots[r, n - m : n] for r, (n, m) in enumerate(zip(LENGTHS, new, strict=True))]
            ).long(),
        )  # fmt: skip

    def wanted(self, q8: torch.Tensor, weights: torch.Tensor, new: list[int]) -> list[list[int]]:
        """Positions of the largest logits of each token's keys, ascending."""
        buffer = self.pool.get_index_k_with_scale_buffer(layer_id=0)
        values = buffer[:, : PAGE * 128].view(torch.float8_e4m3fn).double().view(-1, 128)
        keys = (values * buffer[:, PAGE * 128 :].contiguous().view(torch.float32).view(-1, 1)).numpy()
        query, gates = q8.double().numpy(), weights[..., 0].double().numpy()
        found = []
        for t, (r, length) in enumerate(visible(new)):
            seen = keys[self.slots[r, :length].numpy()]
            logits = gates[t] @ np.maximum(query[t] @ seen.T, 0)
            found.append(np.sort(np.argsort(-logits, kind="stable")[: self.keep]).tolist())
        return found

    def as_selected(self, positions: list[list[int]], new: list[int], metadata: Any) -> list[list[int]]:
        """The selection as attention is to read it: positions, rows of gathered entries, or slots; −1 behind them."""
        starts, found = np.cumsum([0, *LENGTHS]), []
        for row, (r, _) in zip(positions, visible(new), strict=True):
            named = self.slots[r, row].tolist()
            if metadata.topk_transform_method.name == "RAGGED":
                named = [int(starts[r]) + p for p in row]
            found.append([*(row if metadata.force_unfused_topk else named), *[-1] * (self.keep - len(row))])
        return found

    def stored(self) -> torch.Tensor:
        """The pool's entries [slot, 576]."""
        pool = self.pool.kv_buffer[0][:, 0]
        if not self.fp8:
            return pool.double()
        values = pool[:, :LATENT].view(torch.float8_e4m3fn).double().view(-1, 4, 128)
        scales = pool[:, LATENT : LATENT + 16].contiguous().view(torch.float32).double()
        rope = pool[:, LATENT + 16 :].contiguous().view(torch.bfloat16).double()
        return torch.cat([(values * scales[..., None]).flatten(1), rope], dim=1)


def attended(q: torch.Tensor, rows: list[torch.Tensor], positions: list[list[int]], new: list[int]) -> np.ndarray:
    """Attention of each token over those rows of its request."""
    out = []
    for heads, row, (r, _) in zip(q.double(), positions, visible(new), strict=True):
        keys = rows[r][row]
        out.append(torch.softmax(heads @ keys.T * SCALE, dim=1) @ keys[:, :LATENT])
    return torch.stack(out).numpy()


def visible(new: list[int]) -> list[tuple[int, int]]:
    """Request and visible keys of each token of a step."""
    return [(r, n - m + 1 + j) for r, (n, m) in enumerate(zip(LENGTHS, new, strict=True)) for j in range(m)]


def on_cpu(method: Any) -> Any:
    """The method without its demand for a device that has a number."""
    source = textwrap.dedent(inspect.getsource(method))
    demand = "assert device_index is not None"
    assert source.count(demand) == 1
    made: dict[str, Any] = {}
    exec(source.replace(demand, "assert True"), method.__globals__, made)
    return made[method.__name__]


Unlisted = Callable[[Layer], list[str]]


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> Unlisted:
    """Kernels that this layer's steps launch on known GPUs and that the plugin's warm-up does not compile.

    A call counts by its sizes, for layers and heads as they are here.
    """
    made = recorded.record(monkeypatch, OPS)

    def of(layer: Layer) -> list[str]:
        from sglang.srt import runtime_context
        from sglang.srt.layers.radix_attention import RadixAttention

        from xmla.sglang import warmup

        assert made
        schedule = SimpleNamespace(chunked_prefill_size=sum(LENGTHS), max_prefill_tokens=0)
        drafts = SimpleNamespace(speculative_num_draft_tokens=layer.backend.speculative_num_draft_tokens)
        monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
        monkeypatch.setattr(runtime_context, "get_spec", lambda: drafts)
        attention = RadixAttention.__new__(RadixAttention)
        vars(attention).update(HEADS_OF_A_LAYER)
        runner = SimpleNamespace(
            model=SimpleNamespace(modules=lambda: [attention]), token_to_kv_pool=layer.pool,
            max_total_num_tokens=8 * PAGE,
            req_to_token_pool=SimpleNamespace(size=4, req_to_token=layer.slots),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(index_n_heads=INDEX_HEADS)),
        )  # fmt: skip
        return recorded.unlisted(made, partial(warmup.calls, layer.backend, runner))

    return of


@pytest.mark.parametrize("named", ["another,xmla", "another", ""])
def test_a_process_that_loads_plugins_first(named: str, sglang: SGLang) -> None:
    """Modules are imported in the plugin's order, with SGLang's imports for CUDA; unnamed, nothing changes."""
    path = os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "start.py"), named]
    started = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr[-3000:]
    expected = {patch.target for patch in sglang.patches.PATCHES} if "xmla" in named else ()
    assert started.stdout.split() == sorted(expected), started.stderr[-3000:]


def test_every_change_is_made_everywhere(sglang: SGLang) -> None:
    """Also in modules that had imported a function by its name before the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert {patch.target for patch in sglang.patches.PATCHES} <= HookRegistry._patched
    functions = {patch.name for patch in sglang.patches.PATCHES if "." not in patch.name}
    for module in (sglang.backend, sglang.indexer):
        imported = functions & set(vars(module))
        assert imported and all(hasattr(getattr(module, name), "__wrapped__") for name in imported)


def test_every_change_is_told_with_what_would_remove_it(sglang: SGLang) -> None:
    names = {patch.name for patch in sglang.patches.PATCHES + sglang.patches.V4_PATCHES}
    page = (FOLDER.parent.parent / "docs/for_maintainers.md").read_text()
    _, _, table = page.partition("## What SGLang would need")
    assert len(names) > 20 and sorted(name for name in names if f"`{name}`" not in table) == []


def test_every_call_has_arguments_that_the_replacement_takes(sglang: SGLang) -> None:
    """Of each replaced function, and of each function that a replaced one returns, in all of SGLang's sources."""
    replaced = [patch for patch in sglang.patches.PATCHES if patch.hook.name == "REPLACE"]
    takes = {patch.name.split(".")[-1]: inspect.signature(patch.function) for patch in replaced}
    gives = {patch.name: inspect.signature(patch.function()) for patch in replaced if patch.name.endswith("_fn")}
    gives = {f"{name}()": signature for name, signature in gives.items()}
    bound = set()
    for file in (Path(sglang.plugins.__file__).parent.parent / "layers").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            name = named(call.func)
            # The indexer's metadata has a method of the same name.
            if name not in takes | gives or (name == "topk_transform" and named(call.func.value) != "topk_backend"):
                continue
            signature = (takes | gives)[name]
            receiver = [None] * ("self" in signature.parameters)
            signature.bind(*receiver, *call.args, **{word.arg: None for word in call.keywords})
            bound.add(name)
    assert bound == takes.keys() | gives.keys()


def named(function: ast.expr) -> str:
    """The last word of what is called; with () if that gave the function."""
    if isinstance(function, ast.Call):
        return f"{named(function.func)}()"
    return getattr(function, "attr", getattr(function, "id", ""))


def test_what_is_not_there_is_told(sglang: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, rest = sglang.patches, "SGLang serves with its own kernels"
    with pytest.raises(UnsupportedError) as raised:
        patches.check(patches.Patch(patches.KERNELS, "gone", lambda: None), "0.6.0")
    assert str(raised.value) == (
        f"xmla.sglang: SGLang 0.6.0 has no {patches.KERNELS}.gone, which xmla replaces (AttributeError: module "
        f"'{patches.KERNELS}' has no attribute 'gone'); {rest}"
    )
    with pytest.raises(UnsupportedError) as raised:
        patches.check(patches.Patch(patches.KERNELS, "resolve_num_sms", lambda device: None), "0.6.0")
    assert str(raised.value) == (
        f"xmla.sglang: {patches.KERNELS}.resolve_num_sms of SGLang 0.6.0 has the parameters (), expected (device); "
        f"{rest}"
    )

    with pytest.raises(UnsupportedError, match=r"has no builtins\.max, .* \(ValueError: no signature found for"):
        patches.check(patches.Patch("builtins", "max", lambda: None), "0.6.0")  # as a package's compiled function is

    def taken(name: str) -> None:  # as a module raises beside a newer transformers
        raise ValueError("'qwen3_asr' is already used by a Transformers config")

    monkeypatch.setattr(patches.importlib, "import_module", taken)
    with pytest.raises(UnsupportedError) as raised:
        patches.check(patches.Patch(patches.KERNELS, "resolve_num_sms", lambda: None), "0.6.0")
    assert str(raised.value) == (
        f"xmla.sglang: SGLang 0.6.0 has no {patches.KERNELS}.resolve_num_sms, which xmla replaces (ValueError: "
        f"'qwen3_asr' is already used by a Transformers config); {rest}"
    )


def test_digests_are_of_the_pools_pages(sglang: SGLang) -> None:
    """What a connector sends of a page: as many bytes as the digest says, of entries and of the indexer's keys."""
    pool = Layer(sglang, True, "flashmla_kv", "flashmla_kv").pool
    entries, keys = pool.get_key_buffer(0), pool.get_index_k_with_scale_buffer(0)
    assert f";stride={PAGE * entries.stride(0)};" in layouts.digest("v32", PAGE)
    assert f";stride={keys.stride(0)};" in layouts.digest("indexer_fp8_d128", PAGE)


def test_the_refusal_is_where_the_indexer_is_made(sglang: SGLang) -> None:
    from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend

    assert DSAPagedMQALogitsBackend.resolve("auto").is_deepgemm()
    with pytest.raises(UnsupportedError, match="not served"):
        DSAPagedMQALogitsBackend.resolve("cutedsl")


# Architectures that SGLang gives the backend "dsa" if their configuration has an indexer: whether xmla serves them.
SELECTING = {
    "DeepseekV3ForCausalLM": True, "DeepseekV32ForCausalLM": True, "DeepseekV3ForCausalLMNextN": True,
    "MistralLarge3ForCausalLM": True, "PixtralForConditionalGeneration": True, "GlmMoeDsaForCausalLM": True,
    "GlmMoeDsaForCausalLMNextN": True, "LongcatFlashForCausalLM": True, "LongcatFlashForCausalLMNextN": True,
    "HYV4ForCausalLM": True, "HYV4ForCausalLMNextN": True,
    "Glm5NextForConditionalGeneration": False, "Glm5NextForConditionalGenerationNextN": False,  # pooled keys
    "Dots3NoteForCausalLM": False, "Dots3NoteForCausalLMNextN": False,  # rows of other dims
}  # fmt: skip


@pytest.fixture
def make(sglang: SGLang, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`make(architecture, **config)`: SGLang's backend "dsa" of a model with an indexer, with options by `settings`."""
    from sglang.srt import runtime_context

    def made(architecture: str, settings: dict[str, Any] | None = None, **config: Any) -> None:
        usual = {"enable_hisparse": False, "attn_cp_size": 1, "dcp_size": 1, "enable_return_indexer_topk": False}
        options = SimpleNamespace(**usual | (settings or {}))
        options.features = options
        for name in ("get_exec", "get_memory", "get_parallel"):
            monkeypatch.setattr(runtime_context, name, lambda: options)
        found = SimpleNamespace(architectures=[architecture], index_topk=2048, **config)
        dims = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ENTRY - LATENT} | config
        model = SimpleNamespace(hf_config=found, **dims)
        sglang.backend.DeepseekSparseAttnBackend(SimpleNamespace(model_config=model))

    return made


def test_every_architecture_with_an_indexer_is_served_or_refused(make: Callable[..., None]) -> None:
    """Where SGLang makes its backend; one that a later release adds is refused, and has to be told here."""
    from sglang.srt.configs import model_config

    (known,) = (
        node.comparators[0]
        for node in ast.walk(ast.parse(inspect.getsource(model_config.is_deepseek_dsa)))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
    )
    assert sorted(ast.literal_eval(known)) == sorted(SELECTING)
    for architecture in (*SELECTING, "Later"):
        if SELECTING.get(architecture):
            with pytest.raises(AttributeError, match="device"):  # where SGLang goes on
                make(architecture)
        else:
            with pytest.raises(UnsupportedError) as raised:
                make(architecture)
            assert str(raised.value).startswith(f"xmla.sglang: not served: the architecture {architecture}; ")


@pytest.mark.parametrize(
    ("reason", "settings", "config"),
    [
        ("HiSparse", {"enable_hisparse": True}, {}),
        ("context parallelism", {"dcp_size": 2}, {}),
        ("context parallelism", {"attn_cp_size": 2}, {}),
        ("pooled keys of the indexer (index_kpool)", {}, {"index_kpool": 4}),
        ("entries of 448 latent and 128 roped dims", {}, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}),
        ("entries of 256 latent and 64 roped dims", {}, {"kv_lora_rank": 256}),
        ("keys of the indexer of 256 dims", {}, {"index_head_dim": 256}),
    ],
)
def test_what_is_not_served_of_its_layers_is_refused(
    reason: str, settings: dict[str, Any], config: dict[str, int], make: Callable[..., None]
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        make("DeepseekV32ForCausalLM", settings, **config)
    ending = "without xmla in SGLANG_PLUGINS SGLang serves with its own kernels"
    assert str(raised.value) == f"xmla.sglang: not served: {reason}; {ending}"


def test_recorded_selections_are_positions_of_all_tokens(
    sglang: SGLang, make: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused, SGLang would record slots; of prefills of its dense attention, nothing."""
    envs, settings = sglang.backend.envs, {"enable_return_indexer_topk": True}
    fused, threshold = envs.SGLANG_DSA_FUSE_TOPK, envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD
    told = r"not served: --enable-return-indexer-topk without SGLANG_DSA_{}=0; "
    with threshold.override(0), pytest.raises(UnsupportedError, match=told.format("FUSE_TOPK")):
        make("DeepseekV32ForCausalLM", settings)
    with fused.override(False):
        with pytest.raises(UnsupportedError, match=told.format("PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD")):
            make("DeepseekV32ForCausalLM", settings)
        with threshold.override(0), pytest.raises(AttributeError, match="device"):  # where SGLang goes on
            make("DeepseekV32ForCausalLM", settings)


def test_nothing_changes_if_one_change_cannot_be_made(sglang: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(sglang.patches.HookRegistry, "register", lambda target, *_: registered.append(target))
    gone = sglang.patches.Patch(sglang.patches.KERNELS, "gone", lambda: None)
    monkeypatch.setattr(sglang.patches, "PATCHES", (*sglang.patches.PATCHES, gone))
    with pytest.raises(UnsupportedError):
        sglang.patches.install("0.6.0")
    assert not registered


@pytest.mark.parametrize(
    ("fp8", "prefill", "decode", "fused"),
    [
        (True, "flashmla_kv", "flashmla_kv", True),
        (True, "flashmla_kv", "flashmla_kv", False),
        (True, "flashmla_auto", "flashmla_sparse", True),
        (True, "flashmla_sparse", "flashmla_kv", True),  # SGLang gathers the entries of prefills
        (True, "flashmla_sparse", "flashmla_kv", False),
        (False, "flashmla_sparse", "flashmla_sparse", True),
        (False, "flashmla_kv", "flashmla_kv", True),
    ],
)
def test_a_prefill_then_parts_of_it_again_then_a_decode(
    sglang: SGLang, fp8: bool, prefill: str, decode: str, fused: bool, unlisted: Unlisted
) -> None:
    with sglang.backend.envs.SGLANG_DSA_FUSE_TOPK.override(fused):
        layer = Layer(sglang, fp8, prefill, decode)
        layer.step("EXTEND", LENGTHS)
        layer.step("EXTEND", [3, 1, 4])
        layer.step("DECODE", [1, 1, 1])
    missing = unlisted(layer)
    assert not missing, missing[0]


def test_a_prefix_that_requests_share(
    sglang: SGLang, unlisted: Unlisted, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A page of the radix tree, which the second request's table has too, with 2 new tokens behind it."""
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", [70, PAGE + 2, 11])
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv")
    layer.slots[1, :PAGE] = layer.slots[0, :PAGE]
    layer.step("EXTEND", [70, 2, 11])
    layer.step("DECODE", [1, 1, 1])
    missing = unlisted(layer)
    assert not missing, missing[0]


def test_lengths_of_the_host_that_are_bounds(sglang: SGLang, unlisted: Unlisted) -> None:
    """With the overlap schedule the host prepares a decode before it knows how many drafts were accepted."""
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv")
    layer.step("EXTEND", LENGTHS)
    prepare = layer.prepare

    def ahead(batch: SimpleNamespace) -> None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 5
        batch.seq_lens_sum += 15
        prepare(batch)

    layer.prepare = ahead
    layer.step("DECODE", [1, 1, 1])
    missing = unlisted(layer)
    assert not missing, missing[0]


def test_a_rank_without_requests(sglang: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DP attention it has tokens that pad the step alone: nothing is selected, and no op of xmla's is called."""
    made = recorded.record(monkeypatch, OPS)
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv")
    batch, q = layer.batch("IDLE", [0, 0, 0]), layer.normal(2, HEADS, ENTRY)
    monkeypatch.setattr(sglang.indexer, "_is_cuda", True)
    monkeypatch.setattr(sglang.indexer, "get_is_capture_mode", lambda: False)
    monkeypatch.setattr(sglang.indexer, "_broadcast_indexer_topk_from_rank0", lambda chosen: chosen)
    monkeypatch.setattr(sglang.indexer, "maybe_capture_indexer_topk", lambda layer_id, chosen: chosen)
    chosen = layer.indexer.forward_cuda(layer.normal(2, 8), None, None, batch, 0)
    assert chosen.shape == (2, layer.keep) and (chosen == -1).all()
    attention = SimpleNamespace(layer_id=0, is_cross_attention=False, **HEADS_OF_A_LAYER)
    assert layer.backend.forward(q, None, None, attention, batch).shape == (2, HEADS * LATENT)
    assert not made


@pytest.mark.parametrize("together", [False, True])
def test_drafted_tokens(
    sglang: SGLang, together: bool, unlisted: Unlisted, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As requests of their own, or a request's in one call, which is for sm_100."""
    monkeypatch.setattr(sglang.backend, "get_platform", lambda: SimpleNamespace(is_sm100=together))
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv", drafts=2)
    layer.step("TARGET_VERIFY", [2, 2, 2])
    missing = unlisted(layer)
    assert not missing, missing[0]


def test_the_drafting_layer_after_a_verification(sglang: SGLang, unlisted: Unlisted) -> None:
    """It computes the keys of all verified tokens of each request, whether accepted or not."""
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv", drafts=2)
    layer.step("DRAFT_EXTEND_V2", [2, 2, 2])
    missing = unlisted(layer)
    assert not missing, missing[0]


def test_a_prefill_in_chunks_of_its_logits(sglang: SGLang, unlisted: Unlisted, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang bounds the memory of logits: here to two rows of them."""
    rows = lambda num_rows, num_cols, **_: (True, 2 * num_cols * 4)
    monkeypatch.setattr(sglang.indexer, "mqa_logits_should_chunk", rows)
    for prefill in ("flashmla_kv", "flashmla_sparse"):
        layer = Layer(sglang, True, prefill, "flashmla_kv")
        layer.step("EXTEND", [3, 2, 4])
        missing = unlisted(layer)
        assert not missing, missing[0]


def test_short_contexts_have_no_logits(sglang: SGLang, unlisted: Unlisted) -> None:
    for prefill in ("flashmla_kv", "flashmla_sparse"):
        layer = Layer(sglang, True, prefill, "flashmla_kv", keep=128)
        layer.step("EXTEND", [3, 2, 4], logits=False)
        missing = unlisted(layer)
        assert not missing, missing[0]


def test_a_decode_with_the_metadata_of_a_cuda_graph(sglang: SGLang, unlisted: Unlisted) -> None:
    layer = Layer(sglang, True, "flashmla_kv", "flashmla_kv")
    layer.step("EXTEND", LENGTHS)
    layer.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    layer.backend.init_forward_metadata_out_graph(layer.batch("DECODE", [1, 1, 1]), in_capture=True)
    layer.prepare = layer.backend.init_forward_metadata_out_graph
    layer.step("DECODE", [1, 1, 1])
    missing = unlisted(layer)
    assert not missing, missing[0]
