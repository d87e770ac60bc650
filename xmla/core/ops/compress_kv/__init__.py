from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xmla.core.checks import Limit
from xmla.core.layout import SCALE_FLOORS
from xmla.core.op import BYTES, F32, FLOATS, HALVES, INDEX, Op, Problem, Tensor
from xmla.core.ops.compress_kv.cases import CASES
from xmla.core.ops.compress_kv.plan import entry_layout, plan
from xmla.core.ops.compress_kv.reference import reference
from xmla.core.ops.indexer_logits_paged import check_requests


def compress_kv(
    kv, score, ape, norm_weight, cos_sin, positions, state, state_table, cache, block_table, request_ids=None, *,
    eps: float = 1e-6, cache_format: str | None = None, scale_floor: str = "amax",
) -> Any:  # fmt: skip
    """DeepSeek-V4's key compressor: keep each token's state, and write the entry that a token completes; in place.

        state[p]  = kv[t] ∥ (score[t] + ape[p mod r])                       p = positions[t], in request_ids[t]'s pages
        for every token with (p + 1) mod r = 0, j = p div r, o = C − 1:
        w[d]      = softmax over rows q of score                            for each dim d by itself
        pooled[d] = Σ_q w[q,d] · kv[q,d]          q = (j − o)·r … (j + 1)·r − 1, from series 0 where q < j·r, else o
        normed    = pooled / sqrt(mean(pooled²) + eps) · norm_weight
        entry j   = normed, the pairs (2i, 2i+1) of its last E dims rotated by cos_sin[j·r], quantised into the cache

    C = 1 pools each group of r tokens by itself (V4: r = 128). C = 2 pools a group with the one before it, each token
    giving one series of D dims to its own group (series 1) and another to the next (series 0; V4: r = 4); the first
    group has none before it. All states of a call are written before any entry is made.

    Args:
        kv, score: [T, C·D] bfloat16, float16 or float32: the token's two projections.
        ape: [r, C·D] float32, what a token's place in its group adds to its score.
        norm_weight: [D] bfloat16, float16 or float32.
        cos_sin: [S, E] bfloat16, float16 or float32, the E / 2 cosines and then as many sines of each position.
        positions: [T] int32; tokens of a request must have distinct ones. Negative: padding, nothing is done.
        state: [STATE_P, STATE_R, 2·C·D] float32, any page stride. Updated in place. A token's state lies by its
            position, so writing a position again replaces it, as after a rejected draft. Only states in a window are
            read.
        state_table: [B, STATE_M] int32, pages of `state`: that of position p is state_table[b, p div STATE_R]. Pages
            may repeat: a ring of n positions serves calls with at most n − C·r + 1 tokens a request. A position on no
            page is not kept, and is left out of every window.
        cache: [P, R, ROW]. D = 512: entries of any format of `write_mla_cache` that has 512 dims, one every r tokens.
            D = 128, 64 or 32: keys of `write_indexer_cache`, fp8 or mxfp4 as ROW says. Updated in place. An entry that
            has no page, or whose position is not in cos_sin, is not written.
        block_table: [B, M] int32, pages of `cache`: that of entry j is block_table[b, j div R].
        request_ids: [T] int32, each token's row of the tables; outside [0, B) nothing is done. Without it T is a
            multiple of B and every request has T / B adjacent tokens.
        eps: Added to the mean square.
        cache_format, scale_floor: As `write_mla_cache`; "amax" is the rule of V4's own writers, and that of indexer
            keys, always.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.

    Numerics: float32; the entry is rounded once, to the format's values. Follows DeepSeek-V4's inference code and
    vLLM's compressor (states addressed by position, norm before rounding).

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


def check(problem: Problem) -> None:
    check_requests(problem, "kv")
    width, dim, rope = problem["C·D"], problem["D"], problem["E"]
    entry_layout(problem)
    if width not in (dim, 2 * dim):
        problem.refuse("kv", "axis C·D (axis 1)", width, f"{dim} or {2 * dim}, once or twice the D of norm_weight")
    if problem["2·C·D"] != 2 * width:
        problem.refuse("state", "axis 2·C·D (axis 2)", problem["2·C·D"], 2 * width)
    if rope % 2 or rope > dim or (dim == 512 and rope != 64):
        problem.refuse("cos_sin", "axis E (axis 1)", rope, "64" if dim == 512 else f"even and at most {dim}")
    if not problem["r"]:
        problem.refuse("ape", "axis r (axis 0)", 0, "at least 1")
    if problem.attrs["scale_floor"] not in SCALE_FLOORS:
        problem.refuse("scale_floor", "value", repr(problem.attrs["scale_floor"]), "'scale' or 'amax'")
    problem.require_dense_entries("state")


def limits(problem: Problem, arrays: Mapping[str, np.ndarray]) -> Iterator[Limit]:
    positions, requests, ratio = arrays["positions"], problem["B"], problem["r"]
    yield Limit("positions", -1, problem["STATE_M"] * problem["STATE_R"] - 1)
    owner = np.arange(len(positions)) // max(len(positions) // max(requests, 1), 1)
    if "request_ids" in arrays:
        yield Limit("request_ids", -1, requests - 1)
        owner = arrays["request_ids"]
    known = (positions >= 0) & (owner >= 0) & (owner < requests)
    completes = known & (positions % ratio == ratio - 1)
    for table, pages, rows, columns in (
        ("state_table", problem["STATE_P"], owner[known], positions[known] // problem["STATE_R"]),
        ("block_table", problem["P"], owner[completes], positions[completes] // ratio // problem["R"]),
    ):
        used = np.zeros(arrays[table].shape, bool)
        inside = columns < used.shape[1]
        used[rows[inside], columns[inside]] = True
        yield Limit(table, 0, pages - 1, used)


OP = Op(
    prototype=compress_kv,
    tensors={
        "kv": Tensor("T C·D", FLOATS),
        "score": Tensor("T C·D", FLOATS),
        "ape": Tensor("r C·D", F32),
        "norm_weight": Tensor("D", FLOATS),
        "cos_sin": Tensor("S E", FLOATS),
        "positions": Tensor("T", INDEX),
        "state": Tensor("STATE_P STATE_R 2·C·D", F32),
        "state_table": Tensor("B STATE_M", INDEX, index_of="STATE_P"),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES)),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={},
    mutates=("state", "cache"),
    check=check,
    limits=limits,
    plan=plan,
    reference=reference,
    cases=CASES,
)
