from collections.abc import Iterator
from typing import Any

from xmla.core.call import (
    BYTES,
    F32,
    HALVES,
    INDEX,
    Arrays,
    Limit,
    Problem,
    Tensor,
    Work,
    all_but_pools_once,
    check_requests,
    mla_format,
    paged_limits,
)
from xmla.core.op import Op
from xmla.core.ops.attention import sparse_mla
from xmla.core.ops.attention.sparse_mla.sources import ATTENTION_RESULTS, attention_work
from xmla.core.ops.attention.sparse_mla_paged.cases import CASES
from xmla.core.ops.attention.sparse_mla_paged.plan import plan
from xmla.core.ops.attention.sparse_mla_paged.reference import reference
from xmla.core.ops.slots import map_slots
from xmla.core.plan import Implementation


def sparse_mla_paged(
    q, cache, indices, block_table, lengths, request_ids=None, sink=None, *,
    softmax_scale: float, cache_format: str | None = None, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Sparse attention over given positions of each token's request: `dsa_attention` without its indexer.

        slots    = map_slots(indices, block_table, lengths=lengths, page_size=R)
        out, lse = sparse_mla(q, cache, slots, sink=sink, softmax_scale=softmax_scale)

    One call with the same bits as these two. With the indices that `dsa_attention` returned its out and lse are those
    of `dsa_attention`, bit for bit: for layers that share one selection, and to train on the selection of a rollout.

    Args:
        q: [T, H, L+E] bfloat16 or float16, absorbed queries, H ≤ 128.
        cache: [P, R, ROW] in any format of `write_mla_cache`, or plain rows [P, R, L+E] of q's dtype.
        indices: [T, K] int32, positions within each token's request. An index outside [0, lengths[t]) names nothing:
            −1 may stand anywhere in a row. A duplicate counts twice.
        block_table: [B, M] int32, page ids. Only page ids that an index refers to are read.
        lengths: [T] int32, keys visible to each token, itself included; 0 or less marks a padding token.
        request_ids: [T] int32, each token's row of block_table; without it every request has T / B adjacent tokens. A
            token whose id is outside [0, B) has no keys: its out is 0, its lse −inf.
        sink: [H] float32 or None, as in `sparse_mla`.
        softmax_scale: Factor of q · k.
        cache_format: As in `sparse_mla`.
        batch_invariant: As in `sparse_mla`.

    Returns:
        out: [T, H, 512], dtype of q; 0 for a row without valid indices.
        lse: [T, H] float32, natural log, −inf for a row without valid indices.

    Raises:
        ArgumentError, UnsupportedError: As the two ops; ROW is 528, 368 or 288 bytes and no `cache_format` is given.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, cache = xp.zeros((1, 2, 576), dtype=xp.bfloat16), xp.ones((2, 4, 576), dtype=xp.bfloat16)
        >>> indices = xp.asarray([[4, 0, -1]], dtype=xp.int32)
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> out, lse = ops.sparse_mla_paged(q, cache, indices, block_table, lengths, softmax_scale=0.1)
        >>> out[0, 0, :2].tolist(), round(float(lse[0, 0]), 3)  # ln 2: of two keys alike
        ([1.0, 1.0], 0.693)
    """


def check(problem: Problem) -> None:
    check_requests(problem, "q")


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    yield from paged_limits(problem, arrays)
    yield Limit("indices", -1, problem["M"] * problem["R"] - 1)


def work(problem: Problem, keys: float | None) -> Work:
    return attention_work(problem, "cache", problem["K"]) + all_but_pools_once(problem)


OP = Op(
    prototype=sparse_mla_paged,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="cache_format"),
        "indices": Tensor("T K", INDEX),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
        "sink": Tensor("H", F32),
    },
    outputs=ATTENTION_RESULTS,
    check=check,
    limits=limits,
    work=work,
    steps=(map_slots.OP, sparse_mla.OP),
    implementations=(Implementation("steps", plan, asked="steps"),),
    reference=reference,
    cases=CASES,
)
