"""`python parts.py`: steps of the indexer with vLLM's own classes, in the interpreter, without an engine.

Prints whether ranks that share a prefill's rows select what one does, which layers of a group find their selection
mapped, the ops of steps whose selection no layer reads, whether fused writers leave fp4 entries to xmla, how many
values differ that vLLM's own kernels and `without_e4m3` quantise, whether the output's projection of V4 keeps its
weights plain, and the bytes of pages by vLLM's specs and digests.
"""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard
from vllm.models.deepseek_v32.common import kernels
from vllm.v1.worker import workspace

sys.path.extend(str(Path(__file__).parent.parent / folder) for folder in (".", "shared"))
import test_vllm as steps

from xmla import layouts
from xmla import torch_api as xt
from xmla.core.compile import interpreter
from xmla.core.formats.indexer import IndexerLayout
from xmla.vllm import backend, fp4, indexer, projection, without_e4m3
from xmla.vllm.refusals import FP4_ENTRIES


def shared_rows(sizes: list[int]) -> bool:
    """Whether each rank has the same selection, by vLLM's exchange: all ranks' rows in turn, by kernels of the list.

    It has those of bounds that start on 16 bytes.
    """
    step, cache, want = steps.mixed("cpu")
    step.prefill.row_shard_sizes = sizes
    sent: list[torch.Tensor] = []
    listed, topk = [], xt.indexer_topk

    def noted(*args: Any, **kwargs: Any) -> Any:
        listed.extend(bounds.data_ptr() % 16 == 0 for bounds in args[4:6])
        return topk(*args, **kwargs)

    def select(rank: int, gather: Any) -> Any:
        sparse_attn_indexer.get_tensor_model_parallel_rank = lambda: rank
        sparse_attn_indexer.get_tp_group = lambda: SimpleNamespace(all_gatherv=gather)
        share = indexer.row_share(step)
        assert type(share) is PrefillRowShard
        return steps.selected(step, cache, len(want), "cpu", share=share)

    def keep(local: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        sent.append(local.clone())  # it is a view of what the exchange writes
        return local.new_zeros(sum(sizes), local.shape[1])

    xt.indexer_topk = noted
    for rank in range(len(sizes)):
        select(rank, keep)
    every = torch.cat(sent)
    found = [select(rank, lambda local, dim, sizes: every) for rank in range(len(sizes))]
    xt.indexer_topk = topk
    return all(listed) and all((got == want).all() for got in found)


def found_mapped() -> list[bool]:
    """Whether layers find slots of their table: the first of a group, others, and one with another table between."""
    tables = [torch.zeros(3, 4, dtype=torch.int32) for _ in range(2)]
    context = SimpleNamespace()
    backend.get_forward_context = lambda: context
    layers = [(0, 0, 3), (1, 0, 3), (2, 1, 3), (3, 0, 3), (4, 0, 3), (5, 0, 2), (0, 0, 3)]
    return [
        backend.XmlaSparseImpl.is_mapped(
            SimpleNamespace(index_group=tables, index_group_index=layer), SimpleNamespace(block_table=tables[table]), n
        )
        for layer, table, n in layers
    ]


def ops_of(dense: bool, decodes: int, mode: CUDAGraphMode, layer: str) -> list[str]:
    """The ops that the indexer calls in a step, whose main attention is vLLM's dense one or not."""
    step, cache, want = steps.mixed("cpu")
    count, called = len(want), []
    step.slot_mapping = torch.full((count,), -1)
    attention = SimpleNamespace(num_decode_tokens=decodes, prefill=SimpleNamespace(use_dense_mha=dense))
    named = SimpleNamespace(get_name=lambda: "DEEPSEEK_V32_INDEXER")
    found = SimpleNamespace(get_attn_backend=lambda: named, head_dim=cache.shape[2])
    context = SimpleNamespace(
        no_compile_layers={"keys": found}, attn_metadata={"keys": step, "attention": attention},
        cudagraph_runtime_mode=mode,
    )  # fmt: skip
    forward_context.get_forward_context = lambda: context
    q8, weights = steps.query(count, "cpu")
    kept = {name: getattr(xt, name) for name in ("write_indexer_cache", "indexer_topk", "indexer_topk_paged")}
    for name, op in kept.items():
        setattr(xt, name, lambda *args, name=name, op=op, **more: (called.append(name), op(*args, **more))[1])
    indexer.run({
        "k_cache_prefix": "keys", "kv_cache": cache, "q_quant": q8, "weights": weights, "head_dim": q8.shape[2],
        "k": torch.zeros(count, q8.shape[2]), "total_seq_lens": 256, "skip_k_cache_insert": False, "use_pcp": False,
        "topk_indices_buffer": torch.full((count, steps.K), -7, dtype=torch.int32), "q_scale": None,
        "dcp_world_size": 1, "dcp_rank": 0, "cp_kv_cache_interleave_size": 1, "dense_mha_metadata_layer_name": layer,
        "quant_block_size": q8.shape[2], "topk_tokens": steps.K,
    })  # fmt: skip
    for name, op in kept.items():
        setattr(xt, name, op)
    return sorted({*called})


def written_behind() -> bool:
    """Whether V3.2's fused kernel leaves entries of each cache dtype to xmla, and those of its tokens are there."""
    tokens, generator = 5, torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16)

    written, write = [], xt.write_mla_cache
    xt.write_mla_cache = lambda *args, **more: (written.append(args[3].shape[2]), write(*args, **more))[1]
    slots = torch.tensor([7, 0, -1, -1, -1])
    for dtype, row in (("fp8_ds_mla", 656), (FP4_ENTRIES, 352)):
        cache, latent, rope = torch.zeros(2, 4, row, dtype=torch.uint8), draw(tokens, 512), draw(tokens, 64)
        made = torch.empty_like(latent), torch.empty_like(rope)
        fp4.write_behind(kernels.fused_norm_rope)(
            torch.arange(tokens), draw(tokens, 32), draw(32), 1e-6, latent, draw(512), 1e-6, rope, draw(16, 64),
            None, None, None, 1e-6, None, torch.zeros(tokens, 8, dtype=torch.int32), slot_mapping=slots,
            mla_kv_cache=cache, mla_kv_cache_dtype=dtype, has_indexer=False, kv_c_out=made[0], k_pe_out=made[1],
        )  # fmt: skip
        assert cache.flatten(0, 1).any(dim=1).nonzero().flatten().tolist() == [0, 7]
        if written:
            kept, read = torch.cat(made, dim=1)[:2].float(), xt.read_mla_cache(cache, slots[:2].int()).float()
            assert (read - kept).abs().max() < 0.1 * kept.abs().max()
    xt.write_mla_cache = write
    return written == [352]


def keys_written_behind() -> list[bool]:
    """V3.2's fused kernel, which leaves keys in MXFP4 to xmla, beside the same that writes them in e4m3.

    Whether queries are the same, its tokens' keys alone are written, and those are the keys in e4m3 but for rounding.
    """
    tokens, slots = 5, torch.tensor([7, 0, -1])  # of rows that are padded
    generator = torch.Generator().manual_seed(2)
    q_c, kv_c, k_pe, index_k = (
        torch.randn(tokens, dims, generator=generator).bfloat16() for dims in (96, 512, 64, 128)
    )
    norms = torch.randn(128, generator=generator), torch.randn(128, generator=generator)
    found = []
    for row in (132, 68):
        cache, selected = torch.zeros(2, 4, row, dtype=torch.uint8), torch.zeros(tokens, 8, dtype=torch.int32)
        queries = fp4.write_keys_behind(kernels.fused_norm_rope)(
            torch.arange(tokens), q_c, q_c[0], 1e-6, kv_c, kv_c[0], 1e-6, k_pe, torch.ones(16, 64), index_k, *norms,
            1e-6, torch.ones(16, 64), selected, slot_mapping=torch.cat((slots, slots[2:], slots[2:])),
            indexer_slot_mapping=slots if row == 68 else None, indexer_k_cache=cache, has_indexer=True,
        )  # fmt: skip
        found.append((queries, cache))
    (queries, plain), (same, packed) = found
    written = packed.flatten(1)[:, : 4 * 64].reshape(8, 64).any(dim=1).nonzero().flatten().tolist()
    values, scales = xt.read_indexer_cache(plain, slots[:2].int())
    kept = values.float() * scales[:, None]
    stored = (part.numpy() for part in xt.read_indexer_cache(packed, slots[:2].int(), cache_format="mxfp4"))
    read = torch.from_numpy(IndexerLayout(128, "mxfp4").operands(*stored)[0])
    off = (read - kept).view(2, 4, 32).abs().amax(dim=2) / kept.view(2, 4, 32).abs().amax(dim=2)
    return [torch.equal(queries, same), written == [0, 7], bool((off < 0.4).all())]


def own(function: Any) -> Any:
    """A function of vLLM, whose kernels round as on a GPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with interpreter.corrections():
            return function(*args, **kwargs)

    return run


def differing(*pair: Any) -> int:
    """Elements of two tuples of tensors that differ; of float32 by more than the order of two products."""
    return sum(
        int((~torch.isclose(a, b, rtol=2**-22, atol=0) if a.dtype == torch.float32 else a.float() != b.float()).sum())
        for a, b in zip(*pair, strict=True)
    )


def quantized(interleaved: bool, cache: torch.dtype) -> list[int]:
    """Elements that differ from vLLM's own, of its functions that `without_e4m3` has."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.models.deepseek_v32.common import kernels

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    generator = torch.manual_seed(0)
    tokens, heads = 7, 8
    positions = torch.randint(20, (tokens,), generator=generator)
    cos_sin = [torch.rand(20, 64) * 2 - 1 for _ in range(2)]
    slots = torch.tensor([5, -1, 70, 3, 9, 100, 64])
    name = "fp8_ds_mla" if cache == torch.uint8 else "auto"
    arguments = (
        positions, some(tokens, 96), some(96), 1e-6, some(tokens, 512), some(512), 1e-6, some(tokens, 64), cos_sin[0],
        some(tokens, 128), torch.randn(128), torch.randn(128), 1e-6, cos_sin[1],
    )  # fmt: skip
    written = []
    for function in (own(kernels.fused_norm_rope), without_e4m3.fused_norm_rope):
        entries = torch.zeros(2, 64, 656 if name == "fp8_ds_mla" else 576, dtype=cache)
        keys, selected = torch.zeros(2, 64, 132, dtype=torch.uint8), torch.zeros(9, 16, dtype=torch.int32)
        latent, rope = some(tokens, 512), some(tokens, 64)
        queries = function(
            *arguments, selected, slot_mapping=slots, indexer_slot_mapping=None, indexer_k_cache=keys,
            indexer_cache_shuffled=False, mla_kv_cache=entries, mla_kv_cache_dtype=name, mla_k_scale=torch.ones(1),
            skip_scale=True, has_indexer=True, index_rope_interleave=interleaved, kv_c_out=latent, k_pe_out=rope,
            index_k_out=None,
        )  # fmt: skip
        written.append((queries, entries, keys, selected, latent, rope))
    scales = 128**-0.5, heads**-0.5
    weights, index_q = some(tokens, 128 + heads)[:, 128:], some(tokens, heads, 128)
    of_layer = (
        positions, some(tokens, 4, 64), cos_sin[0], index_q, cos_sin[1], some(tokens, 4, 512), torch.ones(1), weights,
        *scales,
    )  # fmt: skip
    told = {"has_indexer": True, "index_rope_interleave": interleaved, "quantize_mqa": False}
    queries = [function(*of_layer, **told) for function in (own(kernels.fused_q), without_e4m3.fused_q)]
    sparse_attn_indexer.current_platform = SimpleNamespace(is_cuda=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn)
    alike = "fused_indexer_q_rope_quant"
    of_v3 = [
        function(positions, index_q, cos_sin[0], weights, *scales, not interleaved)
        for function in (own(getattr(sparse_attn_indexer, alike)), getattr(without_e4m3, alike))
    ]
    rows = some(24, 128)
    groups = [
        function(rows, 128, column_major_scales=False, use_ue8m0=True)
        for function in (own(fp8_utils.per_token_group_quant_fp8), without_e4m3.per_token_group_quant_fp8)
    ]
    return [differing(*pair) for pair in (written, queries, of_v3, groups)]


def plain_weights() -> dict[str, bool]:
    """Whether an output's projection has its weights in bfloat16 once they are loaded, by the kind of its scales."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod as Online

    weight = torch.randn(64, 96).to(torch.float8_e4m3fn)
    powers, rows = torch.randint(120, 132, (64, 3), dtype=torch.uint8), torch.rand(64)
    scales = {
        "blocks": torch.rand(2, 3), "powers of two": powers, "rows": rows[:, None], "rows in one dim": rows,
        "one": torch.rand(1), "a number": torch.rand(()),
    }  # fmt: skip
    found = {}
    for name, scale in scales.items():
        layer = linear(weight, Online.__new__(Online))
        layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))
        factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
        rows, columns = factors.shape if factors.ndim == 2 else (factors.numel(), 1)
        whole = factors.reshape(rows, columns).repeat_interleave(64 // rows, 0).repeat_interleave(96 // columns, 1)
        projection.keep_plain(layer)
        layer.quant_method.process_weights_after_loading(layer)
        found[name] = torch.equal(layer.weight, (weight.float() * whole).bfloat16())
    layer = linear(weight.bfloat16(), Online.__new__(Online))  # --quantization fp8
    projection.keep_plain(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return found | {"quantised once loaded": torch.equal(layer.weight, weight.bfloat16())}


def linear(weight: torch.Tensor, method: Any) -> Any:
    """A layer with the weights of a checkpoint, by a method of vLLM's for quantised ones."""
    layer: Any = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    method.requantization_source, layer.quant_method = None, method
    return layer


def page_bytes() -> dict[str, list[int]]:
    """Bytes of a page by the specs of vLLM's layers, without and with padding, by the digest of such pages."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention as DeepseekV41Attention
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    def packed(dtype: str, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(
            kv_cache_dtype=dtype, compress_ratio=4, head_dim=512, is_kv_source=True, indexer=None, sliding_window=None,
            topk_buffer_width=8, non_causal_multi_token_decode=False, **more,
        )  # fmt: skip

    def keys(ratio: int, row: int = 132) -> SimpleNamespace:
        return SimpleNamespace(head_dim=row, dtype=torch.uint8, compress_ratio=ratio, cache_config=cache_config)

    cache_config = SimpleNamespace(block_size=256, cache_dtype="fp8_ds_mla")
    config: Any = SimpleNamespace(cache_config=cache_config, model_config=None)
    v41 = {"compressed_bytes_per_token": 288, "kv_page_alignment": 512}
    window = SimpleNamespace(
        bounded_replay=False, block_size=64, head_dim=512, dtype=torch.uint8, window_size=128,
        cache_config=cache_config, packed_bytes_per_token=584, packed_page_alignment=576,
        packed_block_stride_alignment=None,
    )  # fmt: skip
    made: list[tuple[str, Any, Any]] = [
        ("v32", MLAAttention, packed("fp8_ds_mla", head_size=576)),
        ("nvfp4", MLAAttention, packed("nvfp4_ds_mla", head_size=576)),
        ("v4", DeepseekV4Attention, packed("fp8_ds_mla")),
        ("v4", DeepseekV4SWACache, window),
        ("v41_fp4", DeepseekV41Attention, packed("nvfp4_ds_mla", **v41)),
        ("indexer_fp8_d128", DeepseekV32IndexerCache, keys(1)),
        ("indexer_fp8_d128", DeepseekV4IndexerCache, keys(4)),
        ("indexer_mxfp4_d128", DeepseekV32IndexerCache, keys(1, 68)),
        ("indexer_mxfp4_d128", DeepseekV4IndexerCache, keys(4, 68)),
    ]
    found = {}
    for name, layer, told in made:
        spec = layer.get_kv_cache_spec(told, config)
        entries, stride = spec.num_states, spec.page_size_bytes
        digest = layouts.digest(name, entries, page_stride=stride)
        usual = {"stride": (str(stride), layouts.digest(name, entries).split("stride=")[1].split(";")[0])}
        assert layouts.differences(digest, layouts.digest(name, entries)) in ({}, usual)
        found[digest] = [spec.real_page_size_bytes, stride]
    return found


if __name__ == "__main__":
    workspace.init_workspace_manager(torch.device("cpu"))
    NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
    print(
        json.dumps({
            "rows": [shared_rows(sizes) for sizes in ([13], [4, 9], [1, 11, 1])],
            "mapped": found_mapped(),
            "written": written_behind(),
            "keys": keys_written_behind(),
            "quantized": [
                quantized(interleaved, cache)
                for interleaved, cache in product((False, True), (torch.uint8, torch.bfloat16))
            ],
            "pages": page_bytes(),
            "plain": plain_weights(),
            "dense": ops_of(True, 0, NONE, "attention"),
            "sparse": [
                ops_of(False, 0, NONE, "attention"), ops_of(True, 1, NONE, "attention"), ops_of(True, 0, NONE, ""),
                ops_of(True, 0, FULL, "attention"), ops_of(True, 0, NONE, "another"),
            ],
        })
    )  # fmt: skip
