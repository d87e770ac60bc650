from dataclasses import replace
from typing import Any

import numpy as np

from xmla.core.formats.mla import NOPE, NVFP4, PLAIN, PLAIN_V4, V4, V32, V41, V41_FP4
from xmla.core.op import Case
from xmla.core.ops.attention.sparse_mla.cases import F16, F32, make_case
from xmla.core.ops.attention.sparse_mla.reference import reference
from xmla.core.ops.cases import mla_pool, normal


def duplicates(keys: int) -> Case:
    """Most slots of two tokens name the entry that is the only one of two others."""
    case = make_case(4, 2, keys, 7, PLAIN, with_lengths=True)

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        pages, entries, _ = inputs["cache"].shape
        inputs["q"] = (inputs["q"].astype(np.float32) / 16).astype(inputs["q"].dtype)  # for a closer bound of summands
        inputs["slots"] = rng.integers(0, pages * entries, (4, keys)).astype(np.int32)
        inputs["slots"][:, : keys - 9] = 3
        inputs["lengths"] = np.array([keys, keys, 1, 1], np.int32)
        inputs["cache"] = mla_pool(rng, PLAIN, pages, entries, inputs["slots"][:2], 0, inputs["cache"].dtype)
        return inputs

    return replace(case, name=f"{case.name}-duplicates", make=make)


def with_large_gradients(case: Case) -> Case:
    """Gradients of two tokens are 64 times as large as those of others, and cancel out in half of the dims."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        dout = inputs["dout"]
        dout[2] = 64 * dout[2]
        dout[3] = dout[2]
        dout[3, :, ::2] = -dout[2, :, ::2]
        return inputs

    return replace(case, make=make)


def backward_of(case: Case, with_dlse: bool = False) -> Case:
    """The derivative of a call of attention, at its own results."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        with np.errstate(invalid="ignore"):
            out, lse = reference(**dict[str, Any](inputs), **dict(case.attrs))
        q = inputs["q"]
        tokens, heads, dims = out.shape
        given = {
            "forward_out": out.astype(q.dtype),
            "forward_lse": lse.astype(np.float32),
            "dout": normal(rng, heads, tokens, dims, dtype=q.dtype).transpose(1, 0, 2),
        }
        if with_dlse:
            given["dlse"] = normal(rng, tokens, heads, dtype=F32)
        return inputs | given

    attrs = {name: value for name, value in case.attrs.items() if name not in ("empty_lse", "batch_invariant")}
    any_order = not attrs.get("deterministic", True)
    return replace(case, name=case.name + "-dlse" * with_dlse + "-any-order" * any_order, make=make, attrs=attrs)


# In any order entries have two summands at most, as slots of two tokens or blocks of heads: those have one sum.
CASES = (
    backward_of(make_case(3, 5, 33, 16, PLAIN, with_lengths=True, padding=8)),
    backward_of(make_case(3, 2, 1030, 64, PLAIN, with_lengths=True)),
    backward_of(make_case(2, 40, 40, 1, PLAIN, with_sink=True), with_dlse=True),
    backward_of(make_case(2, 3, 33, 53, PLAIN, F16, with_sink=True, lse_sink=True, lse_base="2"), with_dlse=True),
    backward_of(make_case(3, 17, 40, 5, PLAIN_V4, with_lengths=True, with_sink=True, extra=(PLAIN_V4, 30, 64))),
    backward_of(make_case(2, 70, 20, 9, PLAIN_V4, lse_base="2"), with_dlse=True),
    backward_of(make_case(2, 3, 33, 53, PLAIN, F16, with_sink=True, deterministic=False), with_dlse=True),
    backward_of(
        make_case(3, 17, 40, 5, PLAIN_V4, with_lengths=True, padding=8, extra=(PLAIN_V4, 30, 64), deterministic=False)
    ),
    backward_of(make_case(2, 70, 70, 9, PLAIN, with_lengths=True, deterministic=False)),
    backward_of(make_case(3, 5, 33, 16, V32, with_lengths=True, padding=656, rows=True)),
    backward_of(make_case(2, 40, 40, 2, V4, with_sink=True, padding=64, extra=(V4, 30, 5), rows=True), with_dlse=True),
    backward_of(
        make_case(
            3,
            17,
            40,
            5,
            PLAIN_V4,
            with_lengths=True,
            with_sink=True,
            extra=(V41, 20, 4),
            rows=True,
            extra_cache_format="v41",
        )
    ),
    backward_of(make_case(2, 9, 33, 3, NOPE, F16, with_sink=True, rows=True, cache_format="nope", deterministic=False)),
    backward_of(make_case(2, 70, 40, 64, NVFP4, rows=True, lse_base="2", deterministic=False), with_dlse=True),
    backward_of(make_case(2, 3, 20, 4, V41_FP4, rows=True, cache_format="v41_fp4")),
    with_large_gradients(backward_of(duplicates(140))),
)
