from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xmla.core.checks import Limit
from xmla.core.layout import V32, mla_layout
from xmla.core.op import BYTES, F32, HALVES, INDEX, Op, Problem, Tensor
from xmla.core.ops.sparse_mla.cases import CASES
from xmla.core.ops.sparse_mla.plan import plan
from xmla.core.ops.sparse_mla.reference import reference
from xmla.core.spec import Spec


def sparse_mla(
    q, cache, slots, lengths=None, sink=None, *, softmax_scale: float, empty_lse: str = "-inf",
    batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Multi-head latent attention of each token over its own selected cache entries; decode and prefill.

        S[t]     = { k < lengths[t] : 0 ≤ slots[t,k] < P·R }                      the valid keys; −1 may stand anywhere
        s[h,k]   = softmax_scale · q[t,h] · entry(slots[t,k])                       over all L+E dims
        out[t,h] = Σ_k exp(s[h,k]) · entry(slots[t,k])[:L] / (Σ_k exp(s[h,k]) + exp(sink[h]))        k over S[t]
        lse[t,h] = ln Σ_k exp(s[h,k])                                               without the sink

    Args:
        q: [T, H, L+E] bfloat16 or float16, L = 512, E = 64, H ≤ 128. Absorbed queries, roped part last.
        cache: [P, R, 656] uint8, int8 or float8_e4m3fn (`write_mla_cache`; scales may be any float32), or plain rows
            [P, R, L+E] of q's dtype; any page size, any page stride. kv[:, None] makes pages of one from flat rows.
        slots: [T, K] int32, page · R + offset. A duplicate counts twice. Rows that no valid slot names are never read,
            nor is a slot at or past its row's length.
        lengths: [T] int32, clamped to [0, K], default K.
        sink: [H] float32, a logit in natural units, not scaled; −inf is no sink, +inf gives out = 0.
        softmax_scale: Factor of q · k, natural base.
        empty_lse: "-inf" or "+inf", the lse of a row without valid keys; "+inf" is FlashMLA's.
        batch_invariant: Split keys by K alone, so that a row's bits do not depend on the rows around it.

    Returns:
        out: [T, H, L], dtype of q; 0 for a row without valid keys.
        lse: [T, H] float32, natural log.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong.
        UnsupportedError: H > 128.

    Numerics: scores and sums in float32; entries and probabilities rounded to q's dtype (exact for an fp8 cache with
    power-of-two scales and bfloat16 q).
    """


def check(problem: Problem) -> None:
    cache, q = problem.specs["cache"], problem.specs["q"]
    layout = mla_layout(cache)
    if layout is None:
        problem.refuse("cache", "axis ROW (axis 2)", problem["ROW"], "656 bytes (V3.2) or 576 elements (plain rows)")
    if not layout.packed and cache.dtype != q.dtype:
        problem.refuse("cache", "dtype", cache.dtype, f"{q.dtype}, as q")
    if problem["L+E"] != layout.latent + layout.rope:
        problem.refuse("q", "axis L+E (axis 2)", problem["L+E"], layout.latent + layout.rope)
    if problem["H"] > 128:
        problem.unsupported("q", "axis H (axis 1)", problem["H"], "at most 128 heads")
    problem.require_dense_entries("cache")
    if problem.attrs["empty_lse"] not in ("-inf", "+inf"):
        problem.refuse("empty_lse", "value", repr(problem.attrs["empty_lse"]), "'-inf' or '+inf'")


def limits(problem: Problem, arrays: Mapping[str, np.ndarray]) -> Iterator[Limit]:
    seen = None
    if "lengths" in arrays:
        yield Limit("lengths", 0, problem["K"])
        seen = np.arange(problem["K"]) < arrays["lengths"][:, None]
    yield Limit("slots", -1, problem["P"] * problem["R"] - 1, seen)


OP = Op(
    prototype=sparse_mla,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES)),
        "slots": Tensor("T K", INDEX),
        "lengths": Tensor("T", INDEX),
        "sink": Tensor("H", F32),
    },
    outputs={
        "out": lambda p: Spec((p["T"], p["H"], V32.latent), p.specs["q"].dtype),
        "lse": lambda p: Spec((p["T"], p["H"]), "float32"),
    },
    check=check,
    limits=limits,
    implementations=("triton", "gluon"),
    plan=plan,
    reference=reference,
    cases=CASES,
)
