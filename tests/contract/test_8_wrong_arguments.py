"""Wrong arguments raise before any launch, name argument, axis, got and expected, alike in both front-ends."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from torch._subclasses.fake_tensor import FakeTensorMode

from xmla import ArgumentError, UnsupportedError, jax_api, torch_api
from xmla.core.call import INDEX, LARGEST_SIZE
from xmla.core.compile import interpreter
from xmla.core.formats.mla import NOPE, NVFP4, PLAIN, PLAIN_V4, V4, V32, V41, V41_FOOTER, V41_FP4, V41_FP4_FOOTER
from xmla.core.op import Op
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import B200, GB10, H200, RTX_PRO_6000, Device, assume_device
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Mistake:
    """A change of an op's first case (or of case `case`) that must be refused with `message`."""

    op: str
    message: str
    change: Callable[[Arrays], Mapping[str, np.ndarray]] = lambda arrays: {}
    attrs: Mapping[str, object] = None
    error: type[Exception] = ArgumentError
    case: int = 0


def heads(count: int) -> Callable[[Arrays], Arrays]:
    return lambda a: {"q": np.zeros((len(a["slots"]), count, 576), ml_dtypes.bfloat16)}


def wide_query(count: int, tokens: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((tokens, count, 128), np.float32), np.ones((tokens, count), np.float32)


ROWS = ("656 bytes (v32) or 584 bytes (v4) or 528 bytes (v41) or 288 bytes (v41_fp4) or 528 bytes (v41_footer) or 288 "
        "bytes (v41_fp4_footer) or 528 bytes (nope) or 352 bytes (nvfp4) or 432 bytes (nvfp4_bf16) or 368 bytes "
        "(nvfp4_fp8) or 368 bytes (nvfp4_scaled) or 304 bytes (nvfp4_nope) or 384 bytes (v4_nvfp4) or 368 bytes "
        "(v4_mxfp4) or 576 elements (plain) or 512 elements (plain_v4)")  # fmt: skip
FORMATS = ("v32, v4, v41, v41_fp4, v41_footer, v41_fp4_footer, nope, nvfp4, nvfp4_bf16, nvfp4_fp8, nvfp4_scaled, "
           "nvfp4_nope, v4_nvfp4, v4_mxfp4, plain, plain_v4")  # fmt: skip

# Rows that several formats have, by every argument that may hold them and the attribute that names its format.
SEVERAL = {
    528: "'v41' or 'v41_footer' or 'nope'", 288: "'v41_fp4' or 'v41_fp4_footer'",
    368: "'nvfp4_fp8' or 'nvfp4_scaled' or 'v4_mxfp4'",
}  # fmt: skip


def ambiguous(op: str, argument: str, row: int, case: int) -> Mistake:
    """`argument` with rows of so many bytes and no format named."""
    attribute = registry()[op].tensors[argument].format_attribute
    message = f"{op}: {attribute} value is None, expected {SEVERAL[row]}"

    def change(arrays: Arrays) -> Arrays:
        return {argument: np.zeros((*arrays[argument].shape[:2], row), np.uint8)}

    return Mistake(op, message, change, {attribute: None}, case=case)


TO_INT32 = "(.int() in torch, .astype('int32') in JAX)"

MISTAKES = [
    *(ambiguous(op, argument, row, case) for row in SEVERAL for op, argument, case in (
        ("write_mla_cache", "cache", 0), ("read_mla_cache", "cache", 0), ("compress_kv", "cache", 0),
        ("convert_mla_cache", "source", 0), ("convert_mla_cache", "cache", 0), ("sparse_mla", "cache", 0),
        ("sparse_mla", "extra_cache", 8), ("dsa_attention", "mla_cache", 0),
    )),
    # dtype, rank, axes
    Mistake("sparse_mla", "sparse_mla: q dtype is float32, expected bfloat16 or float16",
            lambda a: {"q": a["q"].astype(np.float32)}),
    Mistake("sparse_mla", "sparse_mla: slots rank is 1, expected 2 (T, K)", lambda a: {"slots": a["slots"][0]}),
    Mistake("sparse_mla", "sparse_mla: q axis L+E (axis 2) is 512, expected 576 for 'v32' entries",
            lambda a: {"q": a["q"][..., :512]}),
    Mistake("sparse_mla", "sparse_mla: slots axis T (axis 0) is 2, expected 1, as q",
            lambda a: {"slots": np.repeat(a["slots"], 2, axis=0)}),
    Mistake("sparse_mla", f"sparse_mla: cache axis ROW (axis 2) of uint8 is 640, expected {ROWS}",
            lambda a: {"cache": np.zeros((3, 64, 640), np.uint8)}),
    Mistake("sparse_mla", "sparse_mla: cache axis ROW (axis 2) of uint8 is 656, expected 584 bytes (v4)",
            attrs={"cache_format": "v4"}),
    Mistake("sparse_mla", f"sparse_mla: cache_format value is 'v5', expected one of {FORMATS}",
            attrs={"cache_format": "v5"}),
    Mistake("sparse_mla", "sparse_mla: extra_slots argument is missing, expected an array beside extra_cache",
            lambda a: {"extra_cache": a["cache"]}),
    Mistake("sparse_mla", "sparse_mla: extra_cache argument is missing, expected an array beside extra_slots",
            lambda a: {"extra_slots": a["slots"]}),
    Mistake("sparse_mla", "sparse_mla: extra_lengths argument is given, expected none without extra_cache",
            lambda a: {"extra_lengths": np.zeros(1, np.int32)}),
    Mistake("sparse_mla", "sparse_mla: extra_cache format is 'v4', expected one with the dims of 'v32'",
            lambda a: {"extra_cache": np.zeros((3, 64, 584), np.uint8), "extra_slots": a["slots"]}),
    Mistake("sparse_mla", "sparse_mla: extra_cache dtype is float16, expected bfloat16, as q",
            lambda a: {"extra_cache": np.zeros((3, 64, 576), np.float16), "extra_slots": a["slots"]}),
    Mistake("sparse_mla", "sparse_mla: positions argument is missing, expected an array beside cos_sin",
            lambda a: {"cos_sin": np.zeros((9, 64), np.float32)}),
    Mistake("sparse_mla", "sparse_mla: cos_sin argument is given, expected none: values of 'v32' hold no roped dims",
            lambda a: {"cos_sin": np.zeros((9, 64), np.float32), "positions": np.zeros(1, np.int32)}),
    Mistake("sparse_mla", "sparse_mla: cos_sin axis E (axis 1) is 32, expected 64",
            lambda a: {"cos_sin": np.zeros((9, 32), np.float32), "positions": np.zeros(4, np.int32)}, case=8),
    Mistake("sparse_mla", "sparse_mla: lse_base value is '10', expected 'e' or '2'", attrs={"lse_base": "10"}),
    Mistake("write_mla_cache", "write_mla_cache: scale_floor value is 'none', expected 'scale' or 'amax'",
            attrs={"scale_floor": "none"}),
    Mistake("write_mla_cache", "write_mla_cache: latent axis L (axis 1) is 512, expected 448 in 'v4'",
            lambda a: {"cache": np.zeros((3, 64, 584), np.uint8)}),
    Mistake("convert_mla_cache", "convert_mla_cache: cache format is 'v4', expected one with the dims of 'v32'",
            lambda a: {"cache": np.zeros((3, 64, 584), np.uint8)}),
    Mistake("convert_mla_cache", "convert_mla_cache: scale_floor value is 'none', expected 'scale' or 'amax'",
            attrs={"scale_floor": "none"}),
    Mistake("convert_indexer_cache", "convert_indexer_cache: source_format value is None, expected 'fp8' (D 64) or "
            "'mxfp4' (D 128): rows of 68 and 68 bytes are those of both", case=7, attrs={"source_format": None}),
    Mistake("convert_indexer_cache", "convert_indexer_cache: cache axis ROW (axis 2) is 36, expected that of a format "
            "with the dims of source, whose rows have 132 bytes", lambda a: {"cache": np.zeros((3, 64, 36), np.uint8)}),
    Mistake("convert_indexer_cache", "convert_indexer_cache: cache_format value is 'fp4', expected 'fp8' or 'mxfp4' "
            "or 'fp8_ue8m0'",
            attrs={"cache_format": "fp4"}),
    Mistake("sparse_mla", "sparse_mla: cache dtype is float16, expected bfloat16, as q",
            lambda a: {"cache": np.zeros((3, 64, 576), np.float16)}),
    Mistake("sparse_mla", "sparse_mla: q axis H (axis 1) is 129, supported: at most 128 heads", heads(129),
            error=UnsupportedError),
    Mistake("sparse_mla", "sparse_mla: sink axis H (axis 0) is 7, expected 128, as q",
            lambda a: {"sink": np.zeros(7, np.float32)}),
    Mistake("sparse_mla", "sparse_mla: lengths dtype is float32, expected int32",
            lambda a: {"lengths": np.zeros(1, np.float32)}),
    Mistake("sparse_mla", "sparse_mla: empty_lse value is '0', expected '-inf' or '+inf'", attrs={"empty_lse": "0"}),
    Mistake("sparse_mla", "sparse_mla: softmax_scale type is str, expected float", attrs={"softmax_scale": "1"}),
    Mistake("sparse_mla", "sparse_mla: batch_invariant type is int, expected bool", attrs={"batch_invariant": 1}),
    Mistake("sparse_mla", "sparse_mla: deterministic type is int, expected bool", attrs={"deterministic": 0}),
    Mistake("write_mla_cache", f"write_mla_cache: cache axis ROW (axis 2) of uint8 is 655, expected {ROWS}",
            lambda a: {"cache": np.zeros((3, 64, 655), np.uint8)}),
    Mistake("write_mla_cache", "write_mla_cache: latent axis L (axis 1) is 511, expected 512 in 'v32'",
            lambda a: {"latent": a["latent"][:, :511].copy()}),
    Mistake("write_mla_cache", "write_mla_cache: rope axis E (axis 1) is 63, expected 64 in 'v32'",
            lambda a: {"rope": a["rope"][:, :63].copy()}),
    Mistake("write_mla_cache", "write_mla_cache: slots dtype is float32, expected int32 or int64",
            lambda a: {"slots": a["slots"].astype(np.float32)}),
    Mistake("read_mla_cache", "read_mla_cache: dtype value is 'float64', expected 'bfloat16' or 'float32'",
            attrs={"dtype": "float64"}),
    Mistake("read_mla_cache", f"read_mla_cache: cache axis ROW (axis 2) of uint8 is 132, expected {ROWS}",
            lambda a: {"cache": np.zeros((3, 64, 132), np.uint8)}),
    Mistake("write_indexer_cache", "write_indexer_cache: cache axis ROW (axis 2) is 131, expected 132 (fp8: D + 4) "
            "or 68 (mxfp4: D/2 + 4)",
            lambda a: {"cache": np.zeros((3, 64, 131), np.uint8)}),
    Mistake("write_indexer_cache", "write_indexer_cache: keys axis D (axis 1) is 96, expected 32, 64 or 128",
            lambda a: {"keys": a["keys"][:, :96].copy()}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache axis ROW (axis 2) is 100, expected 36, 68 or 132 (fp8: D "
            "+ 4) or 20, 36 or 68 (mxfp4: D/2 + 4)", lambda a: {"cache": np.zeros((3, 64, 100), np.uint8)}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache axis ROW (axis 2) is 132, expected 20, 36 or 68 (mxfp4: "
            "D/2 + 4)", attrs={"cache_format": "mxfp4"}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache axis ROW (axis 2) is 20, expected 36, 68 or 132 (fp8: D + "
            "4)", lambda a: {"cache": np.zeros((3, 64, 20), np.uint8)}, {"cache_format": "fp8"}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache_format value is None, expected 'fp8' (D 64) or 'mxfp4' (D "
            "128): rows of 68 bytes are those of both", lambda a: {"cache": np.zeros((3, 64, 68), np.uint8)}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache_format value is None, expected 'fp8' (D 32) or 'mxfp4' (D "
            "64): rows of 36 bytes are those of both", lambda a: {"cache": np.zeros((3, 64, 36), np.uint8)}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache_format value is 'fp4', expected 'fp8' or 'mxfp4' or "
            "'fp8_ue8m0'", attrs={"cache_format": "fp4"}),
    Mistake("read_indexer_cache", "read_indexer_cache: cache axis ROW (axis 2) is 68, expected 132 (fp8_ue8m0: D + 4)",
            lambda a: {"cache": np.zeros((3, 64, 68), np.uint8)}, {"cache_format": "fp8_ue8m0"}),
    Mistake("write_indexer_cache", "write_indexer_cache: cache_format value is 'fp8_ue8m0', expected 'fp8' or 'mxfp4' "
            "with D = 64", attrs={"cache_format": "fp8_ue8m0"}, case=2),
    Mistake("indexer_topk_paged", "indexer_topk_paged: cache_format value is 'ue8m0', expected 'fp8' or 'mxfp4' or "
            "'fp8_ue8m0'", attrs={"cache_format": "ue8m0"}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: cache axis ROW (axis 2) is 68, expected 132 (fp8_ue8m0: D "
            "+ 4)", lambda a: {"cache": a["cache"][..., :68].copy()}, {"cache_format": "fp8_ue8m0"}),
    Mistake("dsa_attention", "dsa_attention: indexer_cache_format value is 'v32', expected 'fp8' or 'mxfp4' or "
            "'fp8_ue8m0'", attrs={"indexer_cache_format": "v32"}),
    Mistake("quantize_indexer_query", "quantize_indexer_query: format value is 'fp8_ue8m0', expected 'fp8' or 'mxfp4'",
            attrs={"format": "fp8_ue8m0"}),
    Mistake("quantize_indexer_query", "quantize_indexer_query: format value is 'e2m1', expected 'fp8' or 'mxfp4'",
            attrs={"format": "e2m1"}),
    Mistake("quantize_indexer_query", "quantize_indexer_query: q axis D (axis 2) is 100, expected 32, 64 or 128",
            lambda a: {"q": a["q"][..., :100]}),
    Mistake("quantize_indexer_query", "quantize_indexer_query: q axis I (axis 1) is 130, supported: at most 128 "
            "indexer heads", lambda a: dict(zip(("q", "weights"), wide_query(130), strict=True)),
            error=UnsupportedError),
    Mistake("indexer_logits", "indexer_logits: keys axis ROW (axis 1) is 64, expected 128 (D) of float8_e4m3fn",
            lambda a: {"keys": a["keys"][:, :64].copy()}),
    Mistake("indexer_logits", "indexer_logits: weights dtype is float16, expected float32",
            lambda a: {"weights": a["weights"].astype(np.float16)}),
    Mistake("indexer_logits", "indexer_logits: q8 axis D (axis 2) is 16, expected 32, 64 or 128",
            lambda a: {"q8": a["q8"][..., :16].copy(), "keys": a["keys"][:, :16].copy()}),
    Mistake("indexer_logits", "indexer_logits: keys axis ROW (axis 1) is 128, expected 64 (D/2) of uint8",
            lambda a: {"keys": a["keys"].view(np.uint8)}),
    Mistake("indexer_logits", "indexer_logits: key_scales dtype is int32, expected float32 beside keys of "
            "float8_e4m3fn", lambda a: {"key_scales": a["key_scales"].view(np.int32)}, case=2),
    Mistake("compress_rows", "compress_rows: kv axis C·D (axis 1) is 512, expected 128 or 256, once or twice the D of "
            "norm_weight", lambda a: {"kv": np.zeros((1, 512), np.float32), "score": np.zeros((1, 512), np.float32),
                                      "ape": np.zeros((4, 512), np.float32), "positions": a["positions"][:1],
                                      "norm_weight": np.ones(128, np.float32)}),
    Mistake("compress_rows", "compress_rows: norm_weight axis D (axis 0) is 256, expected 32, 64, 128 or 512",
            lambda a: {"norm_weight": np.ones(256, np.float32)}),
    Mistake("compress_rows", "compress_rows: kv axis C·D (axis 1) is 16, expected 32, 64, 128 or 512",
            lambda a: {name: a[name][:, :16].copy() for name in ("kv", "score", "ape")}, case=5),
    Mistake("compress_rows", "compress_rows: ape axis r (axis 0) is 0, expected at least 1",
            lambda a: {"ape": a["ape"][:0]}),
    Mistake("compress_rows", "compress_rows: cos_sin axis E (axis 1) is 63, expected even and at most 512",
            lambda a: {"cos_sin": a["cos_sin"][:, :63].copy()}),
    Mistake("compress_rows_backward", "compress_rows_backward: drows axis D (axis 1) is 16, expected 32",
            lambda a: {"drows": a["drows"][:, :16].copy()}, case=5),
    Mistake("indexer_scores", "indexer_scores: k dtype is float16, expected bfloat16, as q",
            lambda a: {"k": a["k"].astype(np.float16)}),
    Mistake("indexer_scores", "indexer_scores: q axis I (axis 1) is 65, supported: at most 64 indexer heads",
            lambda a: {"q": np.zeros((1, 65, 128), ml_dtypes.bfloat16), "weights": np.zeros((1, 65), np.float32)},
            error=UnsupportedError),
    Mistake("indexer_scores_backward", "indexer_scores_backward: dscores axis COLUMNS (axis 1) is 69, expected 70, "
            "as k", lambda a: {"dscores": a["dscores"][:, :69].copy()}),
    Mistake("indexer_scores_backward", "indexer_scores_backward: dscores axis COLUMNS (axis 1) is 69, expected 70, "
            "as indices", lambda a: {"dscores": a["dscores"][:, :69].copy()}, case=2),
    Mistake("indexer_target", "indexer_target: rows dtype is float16, expected bfloat16, as q",
            lambda a: {"rows": a["rows"].astype(np.float16)}),
    Mistake("indexer_target", "indexer_target: q axis L+E (axis 2) is 96, expected a multiple of 64, as 576 or 512",
            lambda a: {"q": a["q"][..., :96].copy(), "rows": a["rows"][:, :96].copy()}),
    Mistake("indexer_target", "indexer_target: q axis H (axis 1) is 129, supported: at most 128 heads",
            lambda a: {"q": np.zeros((1, 129, 576), ml_dtypes.bfloat16), "lse": np.zeros((1, 129), np.float32)},
            error=UnsupportedError),
    Mistake("indexer_loss", "indexer_loss: target argument is given, expected none without indices",
            lambda a: {"target": np.zeros((1, 70), np.float32)}),
    Mistake("indexer_loss", "indexer_loss: q argument is given, expected none beside target",
            lambda a: {"q": np.zeros((4, 3, 64), ml_dtypes.bfloat16)}, case=4),
    Mistake("indexer_loss", "indexer_loss: softmax_scale value is 1.0, expected None beside target",
            attrs={"softmax_scale": 1.0}, case=4),
    Mistake("indexer_loss", "indexer_loss: softmax_scale value is None, expected a float beside q",
            attrs={"softmax_scale": None}),
    Mistake("indexer_loss_backward", "indexer_loss_backward: forward_dindex_k dtype is float16, expected bfloat16, as "
            "forward_dindex_q", lambda a: {"forward_dindex_k": a["forward_dindex_k"].astype(np.float16)}),
    Mistake("indexer_loss_backward", "indexer_loss_backward: dloss axis LOSS (axis 0) is 2, expected 1",
            lambda a: {"dloss": np.zeros(2, np.float32)}),
    Mistake("indexer_topk", "indexer_topk: key_scales dtype is float32, expected int32 beside keys of uint8",
            lambda a: {"keys": a["keys"].view(np.uint8)[:, :16].copy()}),
    Mistake("indexer_logits", "indexer_logits: q8 dtype is bfloat16, expected float8_e4m3fn for fp8 keys",
            lambda a: {"q8": a["q8"].astype(ml_dtypes.bfloat16)}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: q8 dtype is bfloat16, expected float8_e4m3fn for fp8 keys",
            lambda a: {"q8": a["q8"].astype(ml_dtypes.bfloat16)}),
    Mistake("dsa_attention", "dsa_attention: indexer_cache axis INDEXER_ROW (axis 2) is 36, expected 132 (fp8: D + 4) "
            "or 68 (mxfp4: D/2 + 4)", lambda a: {"indexer_cache": a["indexer_cache"][..., :36].copy()}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: cache axis ROW (axis 2) is 128, expected 132 (fp8: D + 4) "
            "or 68 (mxfp4: D/2 + 4)",
            lambda a: {"cache": a["cache"][..., :128].copy()}),
    *(
        Mistake(op, f"{op}: logits_dtype value is 'float16', expected 'float32' or 'bfloat16'",
                attrs={"logits_dtype": "float16"})
        for op in ("indexer_logits", "indexer_logits_paged", "indexer_block_logits", "indexer_block_logits_paged")
    ),
    Mistake("indexer_logits_paged", "indexer_logits_paged: max_len value is 0, expected at least 1",
            attrs={"max_len": 0}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: max_len type is float, expected int",
            attrs={"max_len": 1.5}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: q8 axis T (axis 0) is 1, expected a multiple of B = 2 "
            "(or pass request_ids)", lambda a: {"block_table": np.repeat(a["block_table"], 2, axis=0)}),
    Mistake("indexer_logits_paged", "indexer_logits_paged: block_table dtype is float32, expected int32",
            lambda a: {"block_table": a["block_table"].astype(np.float32)}),
    Mistake("map_slots", "map_slots: page_size value is 0, expected at least 1", attrs={"page_size": 0}),
    Mistake("map_slots", "map_slots: indices axis T (axis 0) is 1, expected a multiple of B = 2 (or pass request_ids)",
            lambda a: {"block_table": np.repeat(a["block_table"], 2, axis=0)}),
    Mistake("compress_kv", "compress_kv: kv axis C·D (axis 1) is 1536, expected 512 or 1024, once or twice the D of "
            "norm_weight", lambda a: {n: np.zeros((len(a[n]), 1536), np.float32) for n in ("kv", "score", "ape")}),
    Mistake("compress_kv", "compress_kv: state axis 2·C·D (axis 2) is 1024, expected 2048",
            lambda a: {"state": np.zeros((3, 4, 1024), np.float32)}),
    Mistake("compress_kv", "compress_kv: cos_sin axis E (axis 1) is 32, expected 64",
            lambda a: {"cos_sin": a["cos_sin"][:, :32].copy()}),
    Mistake("compress_kv", "compress_kv: cos_sin axis E (axis 1) is 192, expected even and at most 128",
            lambda a: {"cos_sin": np.zeros((9, 192), np.float32)}, case=3),
    Mistake("compress_kv", "compress_kv: ape axis r (axis 0) is 0, expected at least 1",
            lambda a: {"ape": a["ape"][:0]}),
    Mistake("compress_kv", "compress_kv: norm_weight axis D (axis 0) is 256, expected 512, 128, 64 or 32",
            lambda a: {"norm_weight": np.zeros(256, np.float32)}),
    Mistake("compress_kv", "compress_kv: cache axis ROW (axis 2) is 584, expected 132 (fp8: D + 4) or 68 "
            "(mxfp4: D/2 + 4)",
            lambda a: {"cache": np.zeros((2, 3, 584), np.uint8)}, case=3),
    Mistake("compress_kv", "compress_kv: cache dims an entry is 576 ('v32'), expected 512, as norm_weight",
            lambda a: {"cache": np.zeros((2, 3, 656), np.uint8)}),
    Mistake("compress_kv", "compress_kv: cache_format value is 'v4', expected 'fp8' or 'mxfp4' or 'fp8_ue8m0'",
            attrs={"cache_format": "v4"}, case=3),
    Mistake("compress_kv", "compress_kv: scale_floor value is '1', expected 'scale' or 'amax'",
            attrs={"scale_floor": "1"}),
    Mistake("compress_kv", "compress_kv: hadamard value is True, expected False for entries of 512 dims, which no "
            "indexer has", attrs={"hadamard": True}),
    Mistake("compress_kv", "compress_kv: kv axis T (axis 0) is 9, expected a multiple of B = 2 (or pass request_ids)",
            lambda a: {n: np.repeat(a[n], 2, axis=0) for n in ("state_table", "block_table")}),
    Mistake("resolve_slots", "resolve_slots: held axis PLACES (axis 1) is 16, expected at least 24: T / B · K, all "
            "that a call may name of a request", lambda a: {"indices": np.repeat(a["indices"], 3, axis=0)}),
    Mistake("resolve_slots", "resolve_slots: indices axis T (axis 0) is 7, expected a multiple of B = 3",
            lambda a: {"indices": np.concatenate([a["indices"], a["indices"][:1]])}, case=1),
    Mistake("resolve_slots", "resolve_slots: slots axis PLACES (axis 1) is 15, expected 16, as held",
            lambda a: {"slots": a["slots"][:, 1:].copy()}),
    Mistake("resolve_slots", "resolve_slots: num_entries value is 0, expected at least 1", attrs={"num_entries": 0}),
    Mistake("window_slots", "window_slots: window value is 0, expected at least 1", attrs={"window": 0}),
    Mistake("window_slots", "window_slots: ratio value is -4, expected at least 1", attrs={"ratio": -4}),
    Mistake("window_slots", "window_slots: lengths axis T (axis 0) is 1, expected a multiple of B = 2 (or pass "
            "request_ids)", lambda a: {"block_table": np.repeat(a["block_table"], 2, axis=0)}),
    Mistake("select_blocks", "select_blocks: k value is 0, expected at least 1", attrs={"k": 0}),
    Mistake("select_blocks", "select_blocks: granularity value is 12, expected a power of two, at most 128",
            attrs={"granularity": 12}),
    Mistake("select_blocks", "select_blocks: newest value is 2, expected at least 0 and at most k = 1",
            attrs={"newest": 2}),
    Mistake("indexer_blocks", "indexer_blocks: newest value is -1, expected at least 0 and at most k = 7",
            attrs={"newest": -1}),
    Mistake("indexer_blocks_paged", "indexer_blocks_paged: granularity value is 256, expected a power of two, at most "
            "128", attrs={"granularity": 256}),
    Mistake("indexer_block_logits", "indexer_block_logits: granularity value is 0, expected a power of two, at most "
            "128", attrs={"granularity": 0}),
    Mistake("indexer_block_logits_paged", "indexer_block_logits_paged: blocks axis T (axis 0) is 2, expected 1, as q8",
            lambda a: {"blocks": np.zeros((2, 7), np.int32)}),
    Mistake("indexer_block_topk", "indexer_block_topk: k value is 0, expected at least 1", attrs={"k": 0}),
    Mistake("indexer_block_topk_paged", "indexer_block_topk_paged: workspace_bytes value is -1, expected at least 0",
            attrs={"workspace_bytes": -1}),
    Mistake("expand_blocks", "expand_blocks: granularity value is 3, expected a power of two, at most 128",
            attrs={"granularity": 3}),
    Mistake("pool_keys", "pool_keys: state axis 2·D (axis 2) is 128, expected 256",
            lambda a: {"state": np.zeros((3, 4, 128), np.float32)}),
    Mistake("pool_keys", "pool_keys: ape axis r (axis 0) is 0, expected at least 1",
            lambda a: {"ape": a["ape"][:0]}),
    Mistake("select_topk", "select_topk: k value is 0, expected at least 1", attrs={"k": 0}),
    Mistake("select_topk", "select_topk: k type is bool, expected int", attrs={"k": True}),
    Mistake("select_topk", "select_topk: ends axis T (axis 0) is 2, expected 1, as logits",
            lambda a: {"ends": np.zeros(2, np.int32)}),
    Mistake("dsa_attention", "dsa_attention: k value is -3, expected at least 1", attrs={"k": -3}),
    Mistake("dsa_attention", "dsa_attention: indexer_cache axis R (axis 1) is 32, expected 64, as mla_cache",
            lambda a: {"indexer_cache": np.zeros((a["mla_cache"].shape[0], 32, 132), np.uint8)}),
    Mistake("dsa_attention", f"dsa_attention: mla_cache axis ROW (axis 2) of uint8 is 640, expected {ROWS}",
            lambda a: {"mla_cache": a["mla_cache"][..., :640].copy()}),
    Mistake("dsa_attention", f"dsa_attention: mla_cache_format value is 'v5', expected one of {FORMATS}",
            attrs={"mla_cache_format": "v5"}),
    Mistake("dsa_attention", "dsa_attention: index_q axis I (axis 1) is 130, supported: at most 128 indexer heads",
            lambda a: dict(zip(("index_q", "index_weights"), wide_query(130, len(a["q"])), strict=True)),
            error=UnsupportedError),
    Mistake("dsa_attention", "dsa_attention: q axis H (axis 1) is 129, supported: at most 128 heads",
            lambda a: {"q": np.zeros((len(a["q"]), 129, 576), ml_dtypes.bfloat16)}, error=UnsupportedError),
    Mistake("dsa_attention", "dsa_attention: workspace_bytes value is -1, expected at least 0",
            attrs={"workspace_bytes": -1}),
    Mistake("dsa_attention", "dsa_attention: q axis T (axis 0) is 2, expected a multiple of B = 4 "
            "(or pass request_ids)",
            lambda a: {"block_table": np.repeat(a["block_table"], 4 // len(a["block_table"]), axis=0)}),
    Mistake("dsa_attention", "dsa_attention: q axis T (axis 0) is 2, expected a multiple of B = 0 "
            "(or pass request_ids)",
            lambda a: {"block_table": a["block_table"][:0]}),
    Mistake("dsa_step", "dsa_step: k value is 0, expected at least 1", attrs={"k": 0}),
    Mistake("dsa_step", "dsa_step: q axis T (axis 0) is 2, expected a multiple of B = 0 (or pass request_ids)",
            lambda a: {"block_table": a["block_table"][:0]}),
    Mistake("dsa_step", "dsa_step: scale_floor value is 'half', expected 'scale' or 'amax'",
            attrs={"scale_floor": "half"}),
    # a dtype is that of the array as it was given: JAX would make 32 bits of NumPy's 64
    Mistake("sparse_mla", f"sparse_mla: slots dtype is int64, expected int32 {TO_INT32}",
            lambda a: {"slots": a["slots"].astype(np.int64)}),
    Mistake("select_topk", f"select_topk: ends dtype is int64, expected int32 {TO_INT32}",
            lambda a: {"ends": a["ends"].astype(np.int64)}),
    Mistake("sparse_mla", "sparse_mla: sink dtype is float64, expected float32",
            lambda a: {"sink": np.zeros(128, np.float64)}),
    # attributes
    Mistake("select_topk", "select_topk: k type is float32, expected int", attrs={"k": np.float32(3)}),
    Mistake("select_topk", "select_topk: k type is bool, expected int", attrs={"k": np.True_}),
    Mistake("select_topk", "select_topk: k type is list, expected int", attrs={"k": [3]}),
    Mistake("select_topk", "select_topk: k type is ndarray, expected int", attrs={"k": np.array([3])}),
    Mistake("select_topk", "select_topk: k type is NoneType, expected int", attrs={"k": None}),
    Mistake("sparse_mla", "sparse_mla: softmax_scale type is bool, expected float", attrs={"softmax_scale": True}),
    Mistake("sparse_mla", "sparse_mla: softmax_scale value is nan, expected a finite number",
            attrs={"softmax_scale": float("nan")}),
    Mistake("sparse_mla", "sparse_mla: softmax_scale value is inf, expected a finite number",
            attrs={"softmax_scale": np.float32("inf")}),
    Mistake("quantize_indexer_query", "quantize_indexer_query: scale value is -inf, expected a finite number",
            attrs={"scale": -np.inf}),
    Mistake("compress_kv", "compress_kv: eps value is nan, expected a finite number", attrs={"eps": np.nan}),
    *(
        Mistake(op, f"{op}: {name} value is {got}, expected a number from -8.50706e+37 to 8.50706e+37",
                attrs={name: value})
        for op, name in (("sparse_mla", "softmax_scale"), ("quantize_indexer_query", "scale"), ("compress_kv", "eps"))
        for got, value in (("1e+39", 1e39), ("-1e+300", -1e300), ("2**1328 or more", 10**400))
    ),
    *(
        Mistake(op, f"{op}: {name} value is {2**31}, supported: at most {LARGEST_SIZE}", attrs={name: 2**31},
                error=UnsupportedError)
        for op, name in (
            ("map_slots", "page_size"), ("window_slots", "page_size"), ("window_slots", "ratio"),
            ("window_slots", "window"), ("split_batch", "decode_threshold"), ("split_batch", "num_tokens"),
            ("select_topk", "k"), ("merge_topk", "k"), ("dsa_attention", "k"), ("indexer_topk", "k"),
            ("indexer_topk_paged", "k"), ("indexer_logits_paged", "max_len"), ("resolve_slots", "num_entries"),
        )
    ),
    # the argument that is another's size, not the first that differs from it
    Mistake("dsa_attention", "dsa_attention: q axis T (axis 0) is 8, expected 2, as index_q",
            lambda a: {"q": np.zeros((8, 2, 576), ml_dtypes.bfloat16)}),
]  # fmt: skip


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(interpreter, "run", refuse)
    for name in ("_launch", "_interpret"):
        monkeypatch.setattr(torch_api._run, name, refuse)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.op}-{m.message.split(': ')[1][:28]}")
def test_message(mistake: Mistake, device: str, no_launch: None) -> None:
    op = registry()[mistake.op]
    case = op.cases[mistake.case]
    inputs = kit.make(case)
    inputs |= mistake.change(inputs)
    attrs = {**case.attrs, **(mistake.attrs or {})}
    with pytest.raises(mistake.error) as by_torch:
        getattr(TORCH_OPS, op.name)(*kit.torch_inputs(op, inputs, device), **attrs)
    with pytest.raises(mistake.error) as by_jax:
        getattr(JAX_OPS, op.name)(*(inputs.get(name) for name in op.tensors), **attrs)
    assert str(by_torch.value) == mistake.message
    assert str(by_jax.value) == mistake.message
    name, rest = mistake.message.split(": ", 1)
    assert name == op.name and rest.split()[0] in {*op.tensors, *op.defaults}, "the caller's own names"


# Rules of a composed op's steps come with its plan, which takes no symbolic sizes.
OF_STEPS = tuple(f"dsa_attention: {rule}" for rule in ("index_q axis I", "q axis H", "workspace_bytes value"))
AT_ONCE = [mistake for mistake in MISTAKES if not mistake.message.startswith(OF_STEPS)]


@pytest.mark.parametrize("mistake", AT_ONCE, ids=lambda m: f"{m.op}-{m.message.split(': ')[1][:28]}")
def test_message_under_fake_tensors(mistake: Mistake, device: str, no_launch: None) -> None:
    """As torch.compile traces a call: not when the compiled one runs."""
    op = registry()[mistake.op]
    case = op.cases[mistake.case]
    inputs = kit.make(case)
    inputs |= mistake.change(inputs)
    with FakeTensorMode() as mode:
        tensors = [t if t is None else mode.from_tensor(t) for t in kit.torch_inputs(op, inputs, device)]
        with pytest.raises(mistake.error) as refused:
            getattr(TORCH_OPS, op.name)(*tensors, **{**case.attrs, **(mistake.attrs or {})})
    assert str(refused.value) == mistake.message


def test_strides(device: str, no_launch: None) -> None:
    """Only torch has strides: the last axis and a page's entries are dense, indexer pages on whole floats."""
    q, slots = torch.zeros(2, 16, 576, device=device).bfloat16(), torch.zeros(2, 8, device=device, dtype=torch.int32)
    cache = torch.zeros(3, 64, 656, device=device, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"q stride of axis L\+E \(the last\) is 2, expected 1 \(dense\)"):
        torch_api.sparse_mla(
            torch.zeros(2, 16, 1152, device=device).bfloat16()[..., ::2], cache, slots, softmax_scale=1.0
        )
    with pytest.raises(
        ArgumentError, match=r"cache stride of axis R \(axis 1\) is 700, expected 656 \(dense entries\)"
    ):
        wide = torch.zeros(3, 64, 700, device=device, dtype=torch.uint8)[..., :656]
        torch_api.sparse_mla(q, wide, slots, softmax_scale=1.0)
    with pytest.raises(
        ArgumentError, match=r"cache stride of axis P \(axis 0\) is 8449, expected a multiple of 4 bytes"
    ):
        pool = torch.zeros(3 * 8449, device=device, dtype=torch.uint8).as_strided((3, 64, 132), (8449, 132, 1))
        torch_api.read_indexer_cache(pool, slots[0])


def beside(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """A dense copy of bytes that starts `first` bytes past a multiple of 16."""
    memory = torch.zeros(first + tensor.numel(), dtype=torch.uint8, device=tensor.device)[first:]
    return memory.view(tensor.shape).copy_(tensor)


def test_addresses(device: str, no_launch: None) -> None:
    """Only torch has pools of bytes that start anywhere: what is wider in them is aligned."""
    slots = torch.zeros(8, device=device, dtype=torch.int32)
    pools = {row: torch.zeros(2, 64, row, device=device, dtype=torch.uint8) for row in (656, 584, 352, 132)}
    for op, row, first, got, expected in (
        ("read_mla_cache", 656, 1, 1, 4),
        ("read_mla_cache", 656, 6, 2, 4),
        ("read_mla_cache", 584, 3, 1, 2),
        ("read_indexer_cache", 132, 2, 2, 4),
    ):
        with pytest.raises(ArgumentError) as refused:
            getattr(TORCH_OPS, op)(beside(pools[row], first), slots)
        assert str(refused.value) == (
            f"{op}: cache alignment of the first byte is {got}, expected a multiple of {expected} bytes"
        )
    for op, row, first in (("read_mla_cache", 656, 4), ("read_mla_cache", 584, 2), ("read_mla_cache", 352, 1),
                           ("read_indexer_cache", 132, 12)):  # fmt: skip
        getattr(TORCH_OPS, op).plan(beside(pools[row], first), slots)


POOLS = [(op, name) for op in registry().values() for name in op.pools
         if any(name in inputs and inputs[name].itemsize == 1 for inputs in map(kit.make, op.cases))
         and len(op.tensors[name].names) == 3]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), POOLS, ids=kit.case_id)
def test_the_address_of_every_pool(op: Op, name: str, device: str, no_launch: None) -> None:
    made = ((case, kit.make(case)) for case in op.cases)
    case, inputs = next((case, inputs) for case, inputs in made if name in inputs and inputs[name].itemsize == 1)
    arguments = dict(zip(op.tensors, kit.torch_inputs(op, inputs, device), strict=True))
    arguments[name] = beside(arguments[name], 1)
    with pytest.raises(ArgumentError, match=r"alignment of the first byte is 1, expected a multiple of [24] bytes"):
        getattr(TORCH_OPS, op.name)(**arguments, **case.attrs)


def test_calls_of_the_same_shapes_differ_by_address(device: str) -> None:
    pool = torch.randint(0, 120, (2, 64, 132), device=device).to(torch.uint8)
    slots = torch.arange(128, device=device)
    want, got = (torch_api.read_indexer_cache(given, slots) for given in (pool, beside(pool, 4)))
    kit.assert_bits_equal("keys", got[0], want[0])
    kit.assert_bits_equal("key_scales", got[1], want[1])
    with pytest.raises(ArgumentError, match="cache alignment of the first byte is 2"):
        torch_api.read_indexer_cache(beside(pool, 2), slots)


def test_devices_of_a_call_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two devices."""
    devices = iter(("cuda:0", "cuda:1"))
    monkeypatch.setattr(jax_api._ops, "_devices", lambda _: next(devices))
    with pytest.raises(ArgumentError) as refused:
        jax_api.select_topk(jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32), k=1)
    assert str(refused.value) == "select_topk: ends device is cuda:1, expected cuda:0, as logits"


def test_devices_of_a_call_in_torch() -> None:
    """As on a machine with a GPU: the query is there and the cache is not."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 16, 576, dtype=torch.bfloat16, device="cuda")
        cache, slots = torch.empty(3, 64, 656, dtype=torch.uint8), torch.empty(2, 8, dtype=torch.int32, device="cuda")
        with pytest.raises(ArgumentError) as refused:
            torch.ops.xmla.sparse_mla(q, cache, slots, softmax_scale=1.0)
    assert str(refused.value) == "sparse_mla: cache device is cpu, expected cuda:0, as q"


INDICES = [(op, name) for op in registry().values() for name, tensor in op.tensors.items() if tensor.dtypes == INDEX]


@pytest.mark.parametrize(("op", "name"), INDICES, ids=lambda value: getattr(value, "name", value))
def test_indices_of_64_bits(op: Op, name: str, device: str, no_launch: None) -> None:
    """Every integer argument that takes 32 bits alone says what makes them."""
    made = ((case, kit.make(case)) for case in op.cases)
    case, inputs = next(((case, inputs) for case, inputs in made if name in inputs), (op.cases[0], None))
    inputs = kit.make(case) if inputs is None else inputs
    inputs[name] = inputs[name].astype(np.int64) if name in inputs else np.zeros(inputs["q8"].shape[0], np.int64)
    given = [inputs.get(argument) for argument in op.tensors]
    for ops, arrays in ((TORCH_OPS, kit.torch_inputs(op, inputs, device)), (JAX_OPS, given)):
        with pytest.raises(ArgumentError) as refused:
            getattr(ops, op.name)(*arrays, **case.attrs)
        assert str(refused.value) == f"{op.name}: {name} dtype is int64, expected int32 {TO_INT32}"


@pytest.mark.parametrize("fake", [False, True])
def test_out(fake: bool, device: str, no_launch: None) -> None:
    with FakeTensorMode() if fake else nullcontext():
        refuses_out(device)


def refuses_out(device: str) -> None:
    logits, ends = torch.zeros(2, 8, device=device), torch.zeros(2, device=device, dtype=torch.int32)

    def out(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    for wrong, message in (
        (out(2, 5), r"select_topk: out indices shape is \(2, 5\), expected \(2, 4\)"),
        (out(2, 4, dtype=torch.int64), "select_topk: out indices dtype is int64, expected int32"),
        (out(4, 2).T, r"select_topk: out indices strides is \(1, 2\), expected \(4, 1\)"),
        ((out(2, 4), out(2, 4)), r"select_topk: out has 2 tensors, expected 1: \['indices'\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            torch_api.select_topk(logits, ends, k=4, out=wrong)
    keys, cache = torch.zeros(2, 128, device=device), torch.zeros(2, 64, 132, device=device, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="out is given, expected none: the op updates cache in place"):
        torch_api.write_indexer_cache(keys, ends, cache, out=cache)


def takes_gluon(op: str, plan: Callable[..., Plan], device: Device, refusal: str | None) -> None:
    """The default is the Gluon kernel, or where that is refused the portable one; "triton" is the portable one."""
    portable, hopper = f"{op}_kernel", f"{op}_sm90_kernel"
    with assume_device(device):
        assert plan().launches[0].name == (portable if refusal else hopper)
        assert plan(implementation="triton").launches[0].name == portable
        if refusal is None:
            assert plan(implementation="gluon").launches[0].name == hopper
        else:
            with pytest.raises(UnsupportedError) as refused:
                plan(implementation="gluon")
            assert str(refused.value) == f"{op}: implementation value is 'gluon' {refusal}"


def test_gluon_refuses_what_it_does_not_support() -> None:
    op = registry()["sparse_mla"]
    known = "'v32' or 'v4' or 'nvfp4' or 'plain' or 'plain_v4' entries"
    for case, device, given, supported in (
        (make_case(2, 5, 40, 64), B200, "on NVIDIA B200", "compute capability 9.0"),
        *(
            (
                make_case(2, 5, 40, 64, other, cache_format=other.name),
                H200,
                f"over {other.name!r} entries",
                known,
            )
            for other in (NOPE, V41, V41_FP4, V41_FOOTER, V41_FP4_FOOTER)
        ),
    ):
        arguments = kit.torch_inputs(op, kit.make(case), "cpu")
        with assume_device(device), pytest.raises(UnsupportedError) as refused:
            torch_api.sparse_mla.plan(*arguments, **case.attrs, implementation="gluon")
        assert str(refused.value) == f"sparse_mla: implementation value is 'gluon' {given}, supported: {supported}"
    for case, message in (
        (
            make_case(2, 5, 40, 61, V4, padding=2),
            "over rows of cache between multiples of 16 bytes, supported: rows on",
        ),
        (make_case(2, 5, 40, 64, V4, extra=(V4, 20, 61)), "over rows of extra_cache between multiples of 16 bytes, "),
        (
            make_case(2, 5, 40, 64, V4, extra=(V41_FP4, 20, 64), extra_cache_format="v41_fp4"),
            "with 'v41_fp4' entries beside 'v4' ones, supported: ",
        ),
        (make_case(2, 5, 40, 64, extra=(V32, 20, 64)), "with 'v32' entries beside 'v32' ones, supported: one source"),
        (
            make_case(2, 5, 40, 64, NVFP4, extra=(NVFP4, 20, 64)),
            "with 'nvfp4' entries beside 'nvfp4' ones, supported: ",
        ),
        (
            make_case(2, 5, 40, 64, NVFP4, padding=8),
            "over rows of cache between multiples of 16 bytes, supported: rows",
        ),
    ):
        arguments = kit.torch_inputs(op, kit.make(case), "cpu")
        with assume_device(H200), pytest.raises(UnsupportedError, match=f"implementation value is 'gluon' {message}"):
            torch_api.sparse_mla.plan(*arguments, **case.attrs, implementation="gluon")
        with assume_device(H200):
            plan = torch_api.sparse_mla.plan(*arguments, **case.attrs)
        assert plan.launches[0].name == "sparse_mla_kernel", "None takes the portable kernel"
    half = next(c for c in op.cases if kit.make(c)["q"].dtype == np.float16 and kit.make(c)["cache"].dtype == np.uint8)
    arguments = kit.torch_inputs(op, kit.make(half), "cpu")
    with assume_device(H200), pytest.raises(UnsupportedError, match="'gluon' for float16 queries, supported: bfloat16"):
        torch_api.sparse_mla.plan(*arguments, **half.attrs, implementation="gluon")


@pytest.mark.parametrize(("device", "implementation"), [(GB10, "gluon"), (B200, "gluon_sm100")])
def test_gluon_for_blackwell_refuses_what_it_does_not_support(device: Device, implementation: str) -> None:
    op = registry()["sparse_mla"]
    for case, message in (
        (
            make_case(2, 5, 40, 64, V41_FP4, cache_format="v41_fp4"),
            "over 'v41_fp4' entries, supported: 'v32' or 'v4' or",
        ),
        (
            make_case(2, 5, 40, 61, V4, padding=2),
            "over rows of cache between multiples of 16 bytes, supported: rows on",
        ),
        (
            make_case(2, 5, 40, 64, V4, extra=(V41_FP4, 20, 64), extra_cache_format="v41_fp4"),
            "with 'v41_fp4' entries beside 'v4' ones, supported: one source, or two of one format",
        ),
    ):
        arguments = kit.torch_inputs(op, kit.make(case), "cpu")
        refused = f"implementation value is '{implementation}' {message}"
        with assume_device(device), pytest.raises(UnsupportedError, match=refused):
            torch_api.sparse_mla.plan(*arguments, **case.attrs, implementation=implementation)
        with assume_device(device):
            assert torch_api.sparse_mla.plan(*arguments, **case.attrs).launches[0].name == "sparse_mla_kernel"
    half = next(c for c in op.cases if kit.make(c)["q"].dtype == np.float16 and kit.make(c)["cache"].dtype == np.uint8)
    arguments = kit.torch_inputs(op, kit.make(half), "cpu")
    refused = f"'{implementation}' for float16 queries, supported: bfloat16"
    with assume_device(device), pytest.raises(UnsupportedError, match=refused):
        torch_api.sparse_mla.plan(*arguments, **half.attrs, implementation=implementation)


def test_gluon_refuses_addresses_between_what_it_reads_at_once() -> None:
    slots = torch.zeros(2, 40, dtype=torch.int32)
    numbers = torch.zeros(1 << 13, dtype=torch.bfloat16)

    def query(dims: int = 512, first: int = 0, more_t: int = 0, more_h: int = 0) -> torch.Tensor:
        return numbers[first:].as_strided((2, 5, dims), (5 * (dims + more_h) + more_t, dims + more_h, 1))

    def rows(first: int = 0, more_p: int = 0) -> torch.Tensor:
        return numbers[first:].as_strided((2, 7, 512), (7 * 512 + more_p, 512, 1))

    def pool(row: int = 584, first: int = 0) -> torch.Tensor:
        return beside(torch.zeros(2, 64, row, dtype=torch.uint8), first)

    between = (
        "over rows of {0} between multiples of {1} bytes, "
        "supported: rows on multiples of 16 bytes, or 4 for queries over packed entries"
    )
    for q, cache, extra, message in (
        (query(), pool(first=8), None, between.format("cache", 16)),
        (query(), pool(), pool(first=2), between.format("extra_cache", 16)),
        (query(first=1), pool(), None, between.format("q", 4)),
        (query(more_t=1), pool(), None, between.format("q", 4)),
        (query(576, more_h=1), pool(656), None, between.format("q", 4)),
        (query(first=2), rows(), None, between.format("q", 16)),
        (query(more_h=4), rows(), None, between.format("q", 16)),
        (query(), rows(first=4), None, between.format("cache", 16)),
        (query(), rows(more_p=4), None, between.format("cache", 16)),
        (query(), rows(), rows(first=1), between.format("extra_cache", 16)),
        (query(more_t=8), rows(first=8), rows(more_p=8), None),
        (query(first=2, more_t=4, more_h=2), pool(first=16), pool(first=32), None),
        (query(576, first=6, more_t=2), pool(656, first=4), None, None),
    ):
        plan = partial(
            torch_api.sparse_mla.plan, q, cache, slots, None, None, extra, slots if extra is not None else None,
            softmax_scale=0.1,
        )  # fmt: skip
        takes_gluon("sparse_mla", plan, H200, message)


def test_gluon_for_sm100_refuses_queries_between_multiples_of_16_bytes() -> None:
    case = make_case(2, 5, 40, 64)
    arguments = kit.torch_inputs(registry()["sparse_mla"], kit.make(case), "cpu")
    arguments[0] = beside(arguments[0].view(torch.uint8), 4).view(torch.bfloat16)
    with assume_device(B200), pytest.raises(UnsupportedError, match="over rows of q between multiples of 16 bytes"):
        torch_api.sparse_mla.plan(*arguments, **case.attrs, implementation="gluon_sm100")


def test_gluon_is_the_default_where_it_is_written_for() -> None:
    op = registry()["sparse_mla"]
    for case in (
        make_case(2, 5, 40, 64),
        make_case(2, 5, 40, 64, V4),
        make_case(2, 5, 40, 64, V4, extra=(V4, 20, 2), rotate=True),
        make_case(2, 5, 40, 64, PLAIN, dtype=np.dtype(np.float16)),
        make_case(2, 5, 40, 64, PLAIN_V4, extra=(PLAIN_V4, 20, 2), rotate=True),
    ):
        arguments = kit.torch_inputs(op, kit.make(case), "cpu")
        for device, implementation, kernel in (
            (B200, "gluon_sm100", "sparse_mla_sm100_kernel"),
            (H200, "gluon", "sparse_mla_sm90_kernel"),
            (H200, None, "sparse_mla_sm90_kernel"),
            (H200, "triton", "sparse_mla_kernel"),
            (RTX_PRO_6000, "gluon", "sparse_mla_sm120_kernel"),
            (GB10, None, "sparse_mla_sm120_kernel"),
            (GB10, "triton", "sparse_mla_kernel"),
            (B200, None, "sparse_mla_kernel"),
        ):
            with assume_device(device):
                plan = torch_api.sparse_mla.plan(*arguments, **case.attrs, implementation=implementation)
            assert plan.launches[0].name == kernel


def test_gluon_differentiates_what_it_supports() -> None:
    numbers = torch.zeros(1 << 14, dtype=torch.bfloat16)

    def rows(*shape: int, first: int = 0, more: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Each row of the last axis `more` elements further from the one before than it takes."""
        steps = (shape[1] * (shape[2] + more), shape[2] + more, 1)
        return numbers.to(dtype)[first:].as_strided(shape, steps)

    def pool(pages: int = 2, first: int = 0, more: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return numbers.to(dtype)[first:].as_strided((pages, 7, 512), (7 * 512 + more, 512, 1))

    slots, half = torch.zeros(2, 40, dtype=torch.int32), torch.float16
    q, dout, lse, second = (
        rows(2, 5, 512),
        rows(2, 5, 512),
        torch.zeros(2, 5),
        {"extra_cache": pool(), "extra_slots": slots},
    )
    between = "over rows of {} between multiples of 16 bytes, supported: rows on multiples of 16 bytes"
    elsewhere = "on NVIDIA B200, supported: compute capability 9.0"
    for device, query, cache, upstream, given, message in (
        (H200, q, pool(), dout, {}, None),
        (H200, q, pool(), dout, {"dlse": lse, "sink": torch.zeros(5), "lengths": slots[0, :2]}, None),
        (H200, rows(2, 5, 512, first=8, more=8), pool(first=16, more=8), rows(2, 5, 512, first=8, more=16), {}, None),
        (B200, q, pool(), dout, {}, elsewhere),
        (H200, q.to(half), pool(dtype=half), dout.to(half), {}, "in float16, supported: bfloat16"),
        (H200, q, pool(), dout, {"deterministic": False}, None),
        (H200, q, pool(), dout, second, "with extra_cache, supported: one source"),
        (H200, q, pool(0), dout, {}, "over a cache without entries, supported: a cache with entries"),
        (H200, rows(2, 5, 512, first=4), pool(), dout, {}, between.format("q")),
        (H200, rows(2, 5, 512, more=4), pool(), dout, {}, between.format("q")),
        (H200, q, pool(), rows(2, 5, 512, first=4), {}, between.format("dout")),
        (H200, q, pool(), rows(2, 5, 512, more=4), {}, between.format("dout")),
        (H200, q, pool(first=4), dout, {}, between.format("cache")),
        (H200, q, pool(more=4), dout, {}, between.format("cache")),
    ):
        plan = partial(
            TORCH_OPS.sparse_mla_backward.plan,
            query,
            cache,
            slots,
            dout.to(query.dtype),
            lse,
            upstream,
            **given,
            softmax_scale=0.1,
        )
        with assume_device(device):
            names, portable = ({launch.name for launch in plan(implementation=i).launches} for i in (None, "triton"))
            order = "_any_order" if "deterministic" in given else ""
            assert (f"sparse_mla_backward{order}_sm90_kernel" in names) == (message is None)
            assert {"sparse_mla_dq_kernel", f"sparse_mla_dcache{order}_kernel"} <= (names if message else portable)
            if message is None:
                assert plan(implementation="gluon") == plan()
            else:
                with pytest.raises(UnsupportedError) as refused:
                    plan(implementation="gluon")
                assert str(refused.value) == f"sparse_mla_backward: implementation value is 'gluon' {message}"


def test_derivative_refuses_more_slots_than_it_can_count() -> None:
    with FakeTensorMode(), assume_device(H200):
        tokens = 2**20
        q, out = (torch.empty(tokens, 1, 512, dtype=torch.bfloat16) for _ in range(2))
        cache, lse = torch.empty(2, 64, 512, dtype=torch.bfloat16), torch.empty(tokens, 1)
        most, more = (torch.empty(tokens, k, dtype=torch.int32) for k in (1024, 1025))
        plan = TORCH_OPS.sparse_mla_backward.plan
        assert plan(q, cache, most, out, lse, out, softmax_scale=0.1).launches
        pair = {"extra_cache": cache, "extra_slots": more}
        for name, slots, given in (("slots", more, {}), ("extra_slots", most, pair)):
            with pytest.raises(UnsupportedError, match=rf"{name} shape is \(1048576, 1025\), .* 1073741824 slots"):
                plan(q, cache, slots, out, lse, out, **given, softmax_scale=0.1)


def test_derivative_by_gluon_refuses_more_keys_than_its_order_can_count() -> None:
    with FakeTensorMode(), assume_device(H200):
        q, cache = torch.empty(2, 1, 512, dtype=torch.bfloat16), torch.empty(2, 64, 512, dtype=torch.bfloat16)
        most, more = (torch.empty(2, k, dtype=torch.int32) for k in (2**21 - 1, 2**21))
        plan = partial(TORCH_OPS.sparse_mla_backward.plan, softmax_scale=0.1)
        assert plan(q, cache, most, q, torch.empty(2, 1), q) == plan(
            q, cache, most, q, torch.empty(2, 1), q, implementation="gluon"
        )
        message = "sparse_mla_backward: implementation value is 'gluon' with K = 2097152, supported: K ≤ 2097151"
        with pytest.raises(UnsupportedError, match=message):
            plan(q, cache, more, q, torch.empty(2, 1), q, implementation="gluon")


def test_gluon_logits_serve_what_they_support() -> None:
    numbers = torch.zeros(1 << 16, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def rows(*shape: int, first: int = 0, more: int = 0) -> torch.Tensor:
        """Each row of the last axis `more` bytes further from the one before than it takes."""
        steps = [shape[-1] + more, 1] if len(shape) == 2 else [shape[1] * (shape[2] + more), shape[2] + more, 1]
        return numbers[first:].as_strided(shape, steps)

    q8, keys, weights, scales = rows(2, 5, 128), rows(40, 128), torch.zeros(2, 5), torch.zeros(40)
    bounds = torch.zeros(2, dtype=torch.int32)
    packed = torch.zeros(40, 64, dtype=torch.uint8), torch.zeros(40, dtype=torch.int32)
    elsewhere, mxfp4 = "on NVIDIA B200, supported: compute capability 9.0", "over MXFP4 keys, supported: fp8 keys"
    between = "over rows of {} between multiples of 16 bytes, supported: rows on multiples of 16 bytes"
    for device, q, k, s, message in (
        (H200, q8, keys, scales, None),
        (H200, rows(2, 5, 128, first=16, more=16), rows(40, 128, first=32, more=48), scales, None),
        (B200, q8, keys, scales, elsewhere),
        (H200, q8, *packed, mxfp4),
        (H200, q8, keys, scales.int(), "over keys with UE8M0 scales, supported: float32 scales"),
        (H200, rows(2, 5, 128, first=8), keys, scales, between.format("q8")),
        (H200, rows(2, 5, 128, more=8), keys, scales, between.format("q8")),
        (H200, q8, rows(40, 128, first=4), scales, between.format("keys")),
        (H200, q8, rows(40, 128, more=4), scales, between.format("keys")),
    ):
        plan = partial(torch_api.indexer_logits.plan, q, weights, k, s, bounds, bounds)
        takes_gluon("indexer_logits", plan, device, message)


def test_gluon_paged_logits_serve_what_they_support() -> None:
    def pages(entries: int, row: int, first: int = 0) -> torch.Tensor:
        return beside(torch.zeros(3, entries, row, dtype=torch.uint8), first)

    q8, weights = torch.zeros(2, 5, 128).to(torch.float8_e4m3fn), torch.zeros(2, 5)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    elsewhere, mxfp4 = "on NVIDIA B200, supported: compute capability 9.0", "over MXFP4 keys, supported: fp8 keys"
    between = "over rows of cache between multiples of 16 bytes, supported: rows on multiples of 16 bytes"
    for device, cache, message in (
        (H200, pages(64, 132), None),
        (H200, pages(192, 132, first=16), None),
        (B200, pages(64, 132), elsewhere),
        (H200, pages(64, 68), mxfp4),
        (H200, pages(32, 132), "over pages of 32 keys, supported: pages of a multiple of 64 keys"),
        (H200, pages(64, 132, first=4), between),
    ):
        plan = partial(torch_api.indexer_logits_paged.plan, q8, weights, cache, table, lengths)
        takes_gluon("indexer_logits_paged", plan, device, message)
        if message is None:
            ue8m0 = "over keys with UE8M0 scales, supported: float32 scales"
            takes_gluon("indexer_logits_paged", partial(plan, cache_format="fp8_ue8m0"), device, ue8m0)
        if message == elsewhere:
            continue
        with assume_device(B200):  # by its name alone
            assert plan().launches[0].name == "indexer_logits_paged_kernel"
            if message is None:
                assert plan(implementation="gluon_sm100").launches[0].name == "indexer_logits_paged_sm100_kernel"
            else:
                with pytest.raises(UnsupportedError, match=f"implementation value is 'gluon_sm100' {message}"):
                    plan(implementation="gluon_sm100")
    with assume_device(H200), pytest.raises(UnsupportedError, match=r"on NVIDIA H200, .* capability 10\.0 or 10\.3$"):
        plan(implementation="gluon_sm100")


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_selection_over_stored_logits_takes_the_implementation_asked_for(implementation: str | None) -> None:
    q8, keys = torch.zeros(300, 64, 128).to(torch.float8_e4m3fn), torch.zeros(5000, 128).to(torch.float8_e4m3fn)
    bounds = torch.zeros(300, dtype=torch.int32)
    kernel = "indexer_logits_kernel" if implementation else "indexer_logits_sm90_kernel"
    for workspace_bytes in (1 << 29, 1 << 22):  # whole, and some tokens at a time
        with assume_device(H200):
            plan = torch_api.indexer_topk.plan(
                q8, torch.zeros(300, 64), keys, torch.zeros(5000), bounds, bounds, k=512,
                workspace_bytes=workspace_bytes, implementation=implementation,
            )  # fmt: skip
        assert {launch.name for launch in plan.launches if launch.name.startswith("indexer")} == {kernel}


@pytest.mark.parametrize("api", [torch_api, jax_api], ids=["torch", "jax"])
def test_kind_of_argument_and_implementation(api: object, device: str, no_launch: None) -> None:
    array = torch.zeros(2, 8, device=device) if api is torch_api else jnp.zeros((2, 8))
    with pytest.raises(ArgumentError, match="select_topk: logits is list, expected"):
        api.select_topk([[0.0]], array, k=1)
    with pytest.raises(ArgumentError, match="select_topk: ends is NoneType, expected"):
        api.select_topk(array, None, k=1)
    with pytest.raises(
        UnsupportedError, match=r"implementation is 'gluon', supported: None, 'triton', 'gluon_sm90_cluster', "
    ):
        api.select_topk(array, array, k=1, implementation="gluon")
    with pytest.raises(TypeError, match="unexpected keyword argument 'page'"):
        api.select_topk(array, array, k=1, page=3)


@pytest.mark.usefixtures("device")
def test_cpu_arrays_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "InterpretedFunction", type("Never", (), {}))
    monkeypatch.setattr(interpreter, "run", lambda *_: pytest.fail("it ran"))
    logits, ends = np.arange(4, dtype=np.float32)[None], np.full(1, 4, np.int32)
    by_jax = partial(jax_api.select_topk, k=1)
    with jax.default_device(jax.devices("cpu")[0]):
        for call in (partial(torch_api.select_topk, k=1), by_jax, jax.jit(by_jax)):
            array = torch.from_numpy if call is not by_jax and not hasattr(call, "lower") else jnp.asarray
            with pytest.raises(UnsupportedError) as refused:
                call(array(logits), array(ends))
            assert str(refused.value) == (
                "select_topk: arrays on the CPU need Triton's interpreter: start Python by `TRITON_INTERPRET=1 python "
                "…`, or pass implementation='reference'"
            )
            assert np.asarray(jax_api.select_topk(logits, ends, k=1, implementation="reference")).tolist() == [[3]]


def usual_mistakes() -> list[Callable[[], object]]:
    """A call for each row of docs/troubleshooting.md that has an error of xmla's."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    half, byte, one = torch.bfloat16, torch.uint8, torch.float32
    q, cache, slots = zeros(2, 4, 576, dtype=half), zeros(4, 4, 656, dtype=byte), zeros(2, 8)
    keys, logits, ends = zeros(4, 4, 132, dtype=byte), jnp.zeros((1, 8)), jnp.full(1, 8, jnp.int32)
    pools = jnp.zeros((2, 4, 4, 656), jnp.uint8)

    def attend(q: torch.Tensor = q, cache: torch.Tensor = cache, slots: torch.Tensor = slots) -> Callable[[], object]:
        return lambda: torch_api.sparse_mla(q, cache, slots, softmax_scale=0.1)

    def step(tokens: int = 2, lengths: int = 2, pages: int = 4, mla: torch.Tensor = cache) -> Callable[[], object]:
        queries = zeros(tokens, 4, 576, dtype=half), zeros(tokens, 4, 128, dtype=one), zeros(tokens, 4, dtype=one)
        caches = mla, zeros(pages, 4, 132, dtype=byte), zeros(2, 2)
        return lambda: torch_api.dsa_attention(*queries, *caches, zeros(lengths), k=4, softmax_scale=0.1)

    return [
        attend(q.float()), attend(slots=slots.long()), attend(q[None]), attend(zeros(8, 2, 576, dtype=half)),
        attend(zeros(2, 576, 8, dtype=half).transpose(1, 2)), step(tokens=3, lengths=3), step(4, 2), step(pages=8),
        attend(cache=zeros(4, 8, 656, dtype=byte)[:, ::2]), step(mla=keys), attend(cache=zeros(4, 4, 528, dtype=byte)),
        attend(zeros(2, 129, 576, dtype=half)),
        lambda: jax.jit(lambda k: jax_api.select_topk(logits, ends, k=k))(2),
        lambda: jax_api.select_topk(torch.zeros(1, 8), ends, k=2), lambda: jax_api.read_mla_cache(None, ends),
        lambda: jax.eval_shape(lambda pools: jax_api.read_mla_cache(jax.new_ref(pools).at[0], ends), pools),
        lambda: jax_api.read_mla_cache(nnx.Cache(pools[0]), ends),
    ]  # fmt: skip


@pytest.mark.usefixtures("no_launch")
def test_the_messages_that_troubleshooting_explains() -> None:
    """A reader looks for what is on the screen: the words of the table are those of the errors."""
    page = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
    _, table = page.split("## A call is refused\n")
    cells = [row.split(" | ")[0] for row in table.split("\nDerivatives:")[0].splitlines() if row.startswith("| ")][1:]
    others = ("`jax.shard_map`", "`jax.export`", "JAX: ", "Flax: ", "`operation failed")  # errors of the frameworks
    others += ("`q is DTensor",)  # needs a group of processes: tests/test_memory.py
    phrases = [cell.split("`")[1] for cell in cells if not cell.removeprefix("| ").startswith(others)]
    messages = []
    for call in usual_mistakes():
        with pytest.raises((ArgumentError, UnsupportedError)) as refused:
            call()
        messages.append(str(refused.value))
    for phrase in phrases:
        words = ".*".join(map(re.escape, phrase.split("…")))
        assert any(re.search(words, message) for message in messages), phrase
    assert len(phrases) == len(messages)


@pytest.mark.parametrize("op", [op for op in registry().values() if op.steps], ids=lambda op: op.name)
def test_a_composed_op_refuses_what_its_steps_do(op: Op, device: str) -> None:
    """An axis without elements, by kernels and reference, eager and traced: with the same words, or not at all."""
    case = kit.smallest(op)
    inputs, refusals = kit.make(case), set()

    def refusal(function: Callable[..., object], arguments: list[object], implementation: str | None) -> str:
        try:
            function(*arguments, **case.attrs, implementation=implementation)
        except (ArgumentError, UnsupportedError) as error:
            return str(error)
        return "served"

    by_torch, by_jax = getattr(TORCH_OPS, op.name), getattr(JAX_OPS, op.name)
    for axis in kit.axes(op, inputs):
        cut = kit.with_axis(op, inputs, axis, 0)
        arrays = {name: jnp.asarray(array) for name, array in cut.items()}

        def traced(*_: object, arrays: dict[str, jax.Array] = arrays, **attrs: object) -> object:
            return jax.eval_shape(lambda given: by_jax(*map(given.get, op.tensors), **attrs), arrays)

        answers = {refusal(by_torch, kit.torch_inputs(op, kit.copies(cut), device), i) for i in (None, "reference")}
        answers |= {refusal(by_jax, kit.jax_inputs(op, cut), i) for i in (None, "reference")}
        answers |= {refusal(traced, [], "reference")}
        assert len(answers) == 1, (axis, answers)
        refusals |= answers
    assert len(refusals) > 1


ROWS_OF_REQUESTS = [op for op in registry().values() if any("B" in t.names for t in op.tensors.values())]


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("op", ROWS_OF_REQUESTS, ids=lambda op: op.name)
def test_an_idle_rank(op: Op, ids: bool, device: str) -> None:
    """No token of no request: results without rows, and caches as they were, by kernels and by the reference."""
    case = op.cases[0]
    inputs = kit.make(case)
    if "request_ids" in op.tensors:
        inputs.pop("request_ids", None)
        if ids:
            inputs["request_ids"] = np.zeros(0, np.int32)
    for name, array in inputs.items():
        empty = tuple(slice(0, 0) if axis in ("T", "B") else slice(None) for axis in op.tensors[name].names)
        inputs[name] = np.ascontiguousarray(array[empty])
    if op.name == "split_batch":
        inputs["query_starts"] = np.zeros(1, np.int32)
    want = kit.as_tuple(op.reference(**kit.copies(inputs), **kit.attributes(op, case)))
    for implementation in (None, "reference"):
        arguments = kit.torch_inputs(op, kit.copies(inputs), device)
        found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs, implementation=implementation))
        caches = dict(zip(op.tensors, arguments, strict=True))
        found += tuple(caches[name] for name in op.mutates)
        by_jax = getattr(JAX_OPS, op.name)(*kit.jax_inputs(op, inputs), **case.attrs, implementation=implementation)
        for name, got, other in zip([*op.outputs, *op.mutates], found, kit.as_tuple(by_jax), strict=True):
            kit.assert_bits_equal(name, got, other)
            if name in op.mutates:
                kit.assert_bits_equal(name, got, inputs[name])
        for name, got, wanted in zip(op.outputs, found, want, strict=False):
            kit.assert_close(name, got, wanted, None)


@pytest.mark.parametrize("api", [torch_api, jax_api], ids=["torch", "jax"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_numbers_of_numpy_are_attributes(api: object, implementation: str | None, device: str) -> None:
    op, case = registry()["sparse_mla"], registry()["sparse_mla"].cases[1]
    inputs = kit.make(case)
    arguments = kit.torch_inputs(op, inputs, device) if api is torch_api else kit.jax_inputs(op, inputs)
    want = api.sparse_mla(*arguments, **case.attrs | {"softmax_scale": 0.5}, implementation=implementation)
    for scale in (np.float32(0.5), np.float64(0.5), np.float16(0.5), np.array(0.5), np.array(0.5, np.float32)):
        found = api.sparse_mla(*arguments, **case.attrs | {"softmax_scale": scale}, implementation=implementation)
        for name, got, wanted in zip(op.outputs, found, want, strict=True):
            kit.assert_bits_equal(name, got, wanted)
    array = (lambda values: torch.tensor(values, device=device)) if api is torch_api else jnp.asarray
    logits, ends = array(np.arange(4.0, dtype=np.float32)[None]), array(np.full(1, 4, np.int32))
    for k in (np.int32(2), np.int64(2), np.uint8(2), np.array(2)):
        assert api.select_topk(logits, ends, k=k, implementation=implementation).tolist() == [[2, 3]]


def test_numbers_of_numpy_in_the_other_calls(device: str) -> None:
    logits, ends = torch.arange(4.0, device=device)[None], torch.full((1,), 4, device=device, dtype=torch.int32)
    k = np.int32(2)
    assert torch_api.select_topk.plan(logits, ends, k=k).launches
    assert torch_api.select_topk(torch.nn.Parameter(logits, False), ends, k=k).tolist() == [[2, 3]]
    out = torch.empty(1, 2, device=device, dtype=torch.int32)
    assert torch_api.select_topk(logits, ends, k=np.array(2), out=out).tolist() == [[2, 3]]
    whole = torch.compile(lambda x: torch_api.select_topk(x, ends, k=2), fullgraph=True, backend="aot_eager")
    assert whole(logits).tolist() == [[2, 3]]


def test_slots_of_64_bits_in_jax(device: str) -> None:
    """Where the declaration has them a slot beyond 32 bits names nothing, as in torch, and no other slot."""
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 120, (2, 4, 656), np.uint8)
    slots = np.array([3, 2**32 + 3, -(2**32) + 2, 2**31, -1, 7])
    got = jax_api.read_mla_cache(cache, slots)
    want = torch_api.read_mla_cache(*(torch.from_numpy(array).to(device) for array in (cache, slots)))
    kit.assert_bits_equal("rows", got, want)
    assert [bool(np.asarray(row).any()) for row in got] == [True, False, False, False, False, True]


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_meta_tensors(implementation: str | None) -> None:
    """They have no values; torch's own op tells the shapes, the function refuses."""
    logits, ends = torch.empty(2, 8, device="meta"), torch.empty(2, device="meta", dtype=torch.int32)
    for arguments, name in (((logits, ends), "logits"), ((torch.zeros(2, 8), ends), "ends")):
        with pytest.raises(UnsupportedError) as refused:
            torch_api.select_topk(*arguments, k=3, implementation=implementation)
        assert str(refused.value) == f"select_topk: {name} device is meta, supported: cpu and cuda"
    assert torch.ops.xmla.select_topk(logits, ends, k=3).shape == (2, 3)
