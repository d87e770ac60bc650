from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xmla.core.call import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    INDEX,
    Arrays,
    Limit,
    Problem,
    Tensor,
    Work,
    check_requests,
    check_scale_floor,
    id_limits,
    indexer_format,
    mla_format,
    requests_of,
)
from xmla.core.formats import Format, stored_values
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import V41_FP4
from xmla.core.op import Op, Updated
from xmla.core.ops.cache.compress_kv.cases import CASES
from xmla.core.ops.cache.compress_kv.plan import plan
from xmla.core.ops.cache.compress_kv.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import ENTRIES_E2M1, ENTRIES_E4M3, Tolerance


def compress_kv(
    kv, score, ape, norm_weight, cos_sin, positions, state, state_table, cache, block_table, request_ids=None, *,
    eps: float = 1e-6, cache_format: str | None = None, scale_floor: str = "amax",
    hadamard: bool = False,
) -> Any:  # fmt: skip
    """DeepSeek-V4's key compressor: store each token's state and write the entries that tokens complete, in place.

        state[p]  = kv[t] ∥ (score[t] + ape[p mod r])                       p = positions[t], in request_ids[t]'s pages
        for every token with (p + 1) mod r = 0, j = p div r, o = C − 1:
        w[d]      = softmax over rows q of score                            for each dim d separately
        pooled[d] = Σ_q w[q,d] · kv[q,d]          q = (j − o)·r … (j + 1)·r − 1, from series 0 where q < j·r, else o
        normed    = pooled / sqrt(mean(pooled²) + eps) · norm_weight
        roped     = normed, the pairs (2i, 2i+1) of its last E dims rotated by cos_sin[j·r]
        entry j   = roped, or with hadamard Σ_d roped[d] · (−1)^popcount(d & e) / √D for each dim e, quantised into the
                    cache

    C = 1 pools each group of r tokens separately (V4: r = 128). C = 2 pools a group with the one before it (V4: r = 4):
    each token gives one series of D dims to its own group (series 1) and another to the next group (series 0). The
    first group has no group before it. All states of a call are written before any entry is computed.

    Args:
        kv, score: [T, C·D] bfloat16, float16 or float32: the token's two projections.
        ape: [r, C·D] float32, added to a token's score by the token's place in its group.
        norm_weight: [D] bfloat16, float16 or float32.
        cos_sin: [S, E] bfloat16, float16 or float32: for each position E / 2 cosines, then E / 2 sines.
        positions: [T] int32; the tokens of a request must have distinct positions. A negative one marks padding: the
            token is skipped.
        state: [STATE_P, STATE_R, 2·C·D] float32, any page stride. Updated in place. States are addressed by position,
            so writing a position again replaces its state, as after a rejected draft. Only states in a window are read.
        state_table: [B, STATE_M] int32, page ids of `state`: position p is on page state_table[b, p div STATE_R]. Pages
            may repeat: a ring of n positions serves calls with at most n − C·r + 1 tokens per request. A position
            without a page is not stored and is left out of every window.
        cache: [P, R, ROW]. D = 512: entries of any format of `write_mla_cache` that has 512 dims, one every r tokens.
            D = 128, 64 or 32: keys of `write_indexer_cache`, fp8 or mxfp4 according to ROW. Updated in place. An entry
            that has no page, or whose position is not in cos_sin, is not written.
        block_table: [B, M] int32, page ids of `cache`: entry j is on page block_table[b, j div R].
        request_ids: [T] int32, each token's row of the tables; a token with an id outside [0, B) is skipped. Without it
            T is a multiple of B and every request has T / B adjacent tokens.
        eps: Added to the mean square.
        cache_format: As in `write_mla_cache`, or for keys of `write_indexer_cache` as there.
        scale_floor: As in `write_mla_cache`. "amax" is the rule of V4's own writers; indexer keys always follow it.
        hadamard: Transform the indexer's keys, as DeepSeek's reference and SGLang do and vLLM does not. Queries must be
            transformed likewise. No byte of a cache tells, but `xmla.layouts.digest(…, hadamard=True)` does.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.

    DeepSeek-V4.1 has r = 1 and 2 with C = 1 and an ape of 0, at r = 1 also a score of 0. It projects the indexer's keys
    from the normed latent, which is an entry of plain rows whose angles are 0 (cosines 1, sines 0).

    Numerics: float32; the entry is rounded once, to the format's values. Follows DeepSeek-V4's inference code and
    vLLM's compressor (states addressed by position, norm before rounding).

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> kv, score = xp.ones((4, 32)), xp.zeros((4, 32))
        >>> ape, norm_weight = xp.zeros((4, 32)), xp.ones(32)
        >>> positions, table = xp.arange(4, dtype=xp.int32), xp.zeros((1, 1), dtype=xp.int32)
        >>> cos_sin = xp.asarray([[1.0, 0.0]])  # of position 0, where the entry of tokens 0 to 3 stands
        >>> state, cache = xp.zeros((1, 4, 64)), xp.zeros((1, 4, 36), dtype=xp.uint8)
        >>> state, cache = ops.compress_kv(
        ...     kv, score, ape, norm_weight, cos_sin, positions, state, table, cache, table
        ... )
        >>> ops.read_indexer_cache(cache, table[0], cache_format="fp8")[1].tolist()
        [0.00390625]
    """


def entry_format(problem: Problem, cache: str) -> Format:
    """The format of the entries: determined by D, then by ROW and `cache_format`."""
    if problem["D"] == 512:
        layout = mla_format(problem, cache)
        if layout.dims != 512:
            problem.refuse(cache, "dims an entry", f"{layout.dims} ({layout.name!r})", "512, as norm_weight")
        return layout
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse("norm_weight", "axis D (axis 0)", problem["D"], "512, 128, 64 or 32")
    if problem.specs[cache].dtype not in BYTES:
        problem.refuse(cache, "dtype", problem.specs[cache].dtype, " or ".join(BYTES))
    return indexer_format(problem, cache)


def check(problem: Problem) -> None:
    check_requests(problem, "kv")
    width, dim, rope = problem["C·D"], problem["D"], problem["E"]
    if width not in (dim, 2 * dim):
        problem.refuse("kv", "axis C·D (axis 1)", width, f"{dim} or {2 * dim}, once or twice the D of norm_weight")
    if problem["2·C·D"] != 2 * width:
        problem.refuse("state", "axis 2·C·D (axis 2)", problem["2·C·D"], 2 * width)
    if rope % 2 or rope > dim or (dim == 512 and rope != 64):
        problem.refuse("cos_sin", "axis E (axis 1)", rope, "64" if dim == 512 else f"even and at most {dim}")
    if not problem["r"]:
        problem.refuse("ape", "axis r (axis 0)", 0, "at least 1")
    if dim == 512 and problem.attrs.hadamard:
        problem.refuse("hadamard", "value", True, "False for entries of 512 dims, which no indexer has")
    check_scale_floor(problem)
    problem.require_dense_entries("state")


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    positions, requests, ratio = arrays["positions"], problem["B"], problem["r"]
    yield Limit("positions", -1, problem["STATE_M"] * problem["STATE_R"] - 1)
    yield from id_limits(problem, arrays)
    owner = requests_of(arrays, len(positions), requests)
    known = (positions >= 0) & (owner >= 0) & (owner < requests)
    completes = known & (positions % ratio == ratio - 1)
    for table, pages, size, rows, places in (
        ("state_table", problem["STATE_P"], problem["STATE_R"], owner[known], positions[known]),
        ("block_table", problem["P"], problem["R"], owner[completes], positions[completes] // ratio),
    ):
        used = np.zeros(arrays[table].shape, bool)
        inside = places < used.shape[1] * size
        used[rows[inside], places[inside] // max(size, 1)] = True
        yield Limit(table, 0, pages - 1, used)


def entries(cache: np.ndarray, arrays: Arrays, attrs: Mapping[str, Any]) -> np.ndarray:
    return stored_values(cache, len(arrays["norm_weight"]), attrs.get("cache_format"))


def entry_agreement(cache: np.ndarray, arrays: Arrays, attrs: Mapping[str, Any]) -> Tolerance:
    e2m1 = cache.shape[2] in (V41_FP4.row, len(arrays["norm_weight"]) // 2 + 4)
    return ENTRIES_E2M1 if e2m1 else ENTRIES_E4M3


def work(problem: Problem, keys: float | None) -> Work:
    """Write each token's state, and one entry every r tokens, of windows that may all be of this call's tokens."""
    once = sum(problem.specs[name].nbytes for name in ("kv", "score", "ape", "norm_weight", "positions"))
    state = problem["T"] * problem["2·C·D"] * 4
    return Work(once + state + problem["T"] // problem["r"] * problem["ROW"])


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
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=entry_format, format_attribute="cache_format"),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={},
    updates={"state": None, "cache": Updated(entries, entry_agreement)},
    check=check,
    limits=limits,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
