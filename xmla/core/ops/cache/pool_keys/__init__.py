from collections.abc import Mapping
from typing import Any

import numpy as np

from xmla.core.call import BYTES, F32, FLOATS, INDEX, Arrays, Problem, Tensor, Work, check_requests, indexer_format
from xmla.core.formats import stored_values
from xmla.core.op import Op, Updated
from xmla.core.ops.cache import compress_kv
from xmla.core.ops.cache.pool_keys.cases import CASES
from xmla.core.ops.cache.pool_keys.plan import plan
from xmla.core.ops.cache.pool_keys.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import ENTRIES_E2M1, ENTRIES_E4M3, Tolerance


def pool_keys(
    keys, gates, ape, positions, state, state_table, cache, block_table, request_ids=None, *,
    cache_format: str | None = None,
) -> Any:  # fmt: skip
    """GLM-5.3-Flash's pooled indexer keys: store each token's state and write the keys that tokens complete, in place.

        state[p] = keys[t] ∥ (gates[t] + ape[p mod r])                      p = positions[t], in request_ids[t]'s pages
        for every token with (p + 1) mod r = 0, j = p div r:
        w[d]     = softmax over positions q of gates + ape                q = j·r … (j + 1)·r − 1, each dim d separately
        key j    = Σ_q w[q,d] · keys[q,d], quantised into the cache

    As `compress_kv` with one series of dims, but neither normed nor roped. All states of a call are written before any
    key is pooled. A pool is a block of r tokens: `indexer_topk_paged` selects pools, by lengths of complete ones, and
    `expand_blocks` gives their tokens.

    Args:
        keys, gates: [T, D] bfloat16, float16 or float32, D = 32, 64 or 128: the token's key, normed by the model, and
            its gate.
        ape: [r, D] float32, added to a token's gate by the token's place in its pool; r is the model's index_kpool.
        positions: [T] int32; the tokens of a request must have distinct positions. A negative one marks padding: the
            token is skipped.
        state: [STATE_P, STATE_R, 2·D] float32, any page stride. Updated in place. States are addressed by position, so
            writing a position again replaces its state, as after a rejected draft.
        state_table: [B, STATE_M] int32, page ids of `state`: position p is on page state_table[b, p div STATE_R]. Pages
            may repeat: a ring of n positions serves calls with at most n − r + 1 tokens per request. A position without
            a page is not stored and is left out of its pool.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, ROW = D+4 (fp8) or D/2+4 (mxfp4), one key every r tokens.
            Updated in place. A key that has no page is not written.
        block_table: [B, M] int32, page ids of `cache`: key j is on page block_table[b, j div R].
        request_ids: [T] int32, each token's row of the tables; a token with an id outside [0, B) is skipped. Without it
            T is a multiple of B and every request has T / B adjacent tokens.
        cache_format: As in `write_indexer_cache`.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B.

    Numerics: float32; the key is rounded once, to the format's values, by the rules of `write_indexer_cache`. The
    formula is that of transformers' glm5_next.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> keys, gates, ape = xp.ones((2, 32)), xp.zeros((2, 32)), xp.zeros((2, 32))
        >>> positions, table = xp.arange(2, dtype=xp.int32), xp.zeros((1, 1), dtype=xp.int32)
        >>> state, cache = xp.zeros((1, 2, 64)), xp.zeros((1, 4, 36), dtype=xp.uint8)
        >>> state, cache = ops.pool_keys(keys, gates, ape, positions, state, table, cache, table)
        >>> ops.read_indexer_cache(cache, table[0], cache_format="fp8")[1].tolist()
        [0.00390625]
    """


def check(problem: Problem) -> None:
    check_requests(problem, "keys")
    if problem["2·D"] != 2 * problem["D"]:
        problem.refuse("state", "axis 2·D (axis 2)", problem["2·D"], 2 * problem["D"])
    if not problem["r"]:
        problem.refuse("ape", "axis r (axis 0)", 0, "at least 1")
    problem.require_dense_entries("state")


def stored_keys(cache: np.ndarray, arrays: Arrays, attrs: Mapping[str, Any]) -> np.ndarray:
    return stored_values(cache, arrays["keys"].shape[1], attrs.get("cache_format"))


def key_agreement(cache: np.ndarray, arrays: Arrays, attrs: Mapping[str, Any]) -> Tolerance:
    return ENTRIES_E2M1 if cache.shape[2] == arrays["keys"].shape[1] // 2 + 4 else ENTRIES_E4M3


def work(problem: Problem, keys: float | None) -> Work:
    """Write each token's state, and one key every r tokens, of pools that may all be of this call's tokens."""
    once = sum(problem.specs[name].nbytes for name in ("keys", "gates", "ape", "positions"))
    state = problem["T"] * problem["2·D"] * 4
    return Work(once + state + problem["T"] // problem["r"] * problem["ROW"])


OP = Op(
    prototype=pool_keys,
    tensors={
        "keys": Tensor("T D", FLOATS),
        "gates": Tensor("T D", FLOATS),
        "ape": Tensor("r D", F32),
        "positions": Tensor("T", INDEX),
        "state": Tensor("STATE_P STATE_R 2·D", F32),
        "state_table": Tensor("B STATE_M", INDEX, index_of="STATE_P"),
        "cache": Tensor("P R ROW", BYTES, format=indexer_format, format_attribute="cache_format"),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={},
    updates={"state": None, "cache": Updated(stored_keys, key_agreement)},
    check=check,
    limits=compress_kv.limits,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
