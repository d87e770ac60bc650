from functools import partial
from typing import Any

from xmla.core.call import (
    BYTES,
    F32,
    FLOATS,
    HALVES,
    INDEX,
    Problem,
    Result,
    Tensor,
    Work,
    all_but_pools_once,
    check_requests,
    indexer_format,
    mla_format,
    paged_limits,
)
from xmla.core.op import Op
from xmla.core.ops.attention import sparse_mla
from xmla.core.ops.attention.sparse_mla.sources import ATTENTION_RESULTS, attention_work
from xmla.core.ops.indexer import indexer_topk_paged, quantize_indexer_query
from xmla.core.ops.indexer.shared import capacity_of, scoring_work
from xmla.core.ops.layer.dsa_attention.cases import CASES
from xmla.core.ops.layer.dsa_attention.plan import plan
from xmla.core.ops.layer.dsa_attention.reference import reference
from xmla.core.ops.slots import map_slots
from xmla.core.plan import Implementation
from xmla.core.values import Selection


def dsa_attention(
    q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, request_ids=None, sink=None, *,
    k: int, softmax_scale: float, index_scale: float | None = None, mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None, workspace_bytes: int = 1 << 29, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """DeepSeek sparse attention of one layer over its paged caches: indexer, top-k, slots, attention.

        q8, w   = quantize_indexer_query(index_q, index_weights, scale=index_scale, format=format of indexer_cache)
        indices = indexer_topk_paged(q8, w, indexer_cache, block_table, lengths, k=k)
        slots   = map_slots(indices, block_table, page_size=R)
        out     = sparse_mla(q, mla_cache, slots, lengths, sink, softmax_scale=softmax_scale)

    One call with the same bits as these four. The caller writes the token's own keys first, with `write_mla_cache` and
    `write_indexer_cache`. Where no request can have more than k keys, M · R ≤ k, every key is selected: the plan has
    neither the query's quantisation nor logits, and says that it leaves them out. A caller that knows all lengths to be
    at most k may give a view of as many columns of its block table, block_table[:, : k // R] where R divides k.

    Args:
        q: [T, H, L+E] bfloat16 or float16, absorbed queries, H ≤ 128.
        index_q: [T, I, D] bfloat16, float16 or float32, indexer queries, 1 ≤ I ≤ 128. Roped as the indexer's keys are;
            a Hadamard transform has rotated both or neither.
        index_weights: [T, I], any of the same dtypes, unscaled weights of the indexer heads.
        mla_cache: [P, R, ROW] in any format of `write_mla_cache`, or plain rows [P, R, L+E] of q's dtype.
        indexer_cache: [P, R, INDEXER_ROW] bytes, INDEXER_ROW = D+4 (fp8) or D/2+4 (mxfp4). Both caches share page ids
            and page size.
        block_table: [B, M] int32, page ids; page ids past a token's length are never read.
        lengths: [T] int32, keys visible to each token, itself included; 0 or less marks a padding token.
        request_ids: [T] int32, each token's row of block_table; without it every request has T / B adjacent tokens. A
            token whose id is outside [0, B) has no keys: its out is 0, its lse −inf, its indices 0, 1, … below lengths.
        sink: [H] float32 or None.
        k: Keys selected for each token; all visible keys if there are at most k.
        softmax_scale: Factor of q · k.
        index_scale: Factor of the indexer's weights, default D**-0.5 · I**-0.5.
        mla_cache_format: As `cache_format` in `sparse_mla`.
        indexer_cache_format: As `cache_format` in `write_indexer_cache`.
        workspace_bytes: The most memory for the selection, as in `indexer_topk_paged`; attention's key splits need
            more on top.
        batch_invariant: As in `sparse_mla`.

    Returns:
        out: [T, H, 512], dtype of q.
        lse: [T, H] float32, natural log, −inf for a padding row.
        indices: [T, K] int32, the selected positions within each request, ascending, −1 padded.

    Raises:
        ArgumentError, UnsupportedError: As the four ops; ROW is 528, 368 or 288 bytes and no `mla_cache_format` is
            given.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, index_q = xp.zeros((1, 2, 576), dtype=xp.bfloat16), xp.ones((1, 2, 32))
        >>> index_weights = xp.ones((1, 2))
        >>> mla_cache = xp.ones((2, 4, 576), dtype=xp.bfloat16)
        >>> indexer_cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> out, lse, indices = ops.dsa_attention(
        ...     q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, k=2, softmax_scale=0.1
        ... )
        >>> indices.tolist(), out[0, 0, :2].tolist()
        ([[0, 1]], [1.0, 1.0])
    """


def check(problem: Problem) -> None:
    """Check what a fake tensor's shape needs; the steps check the rest when the call is planned."""
    problem.require_count("k")
    check_requests(problem, "q")


def work(problem: Problem, keys: float | None) -> Work:
    """Keys that are scored, unless all are selected, and entries that are attended to; every other array once."""
    work = attention_work(problem, "mla_cache", problem.attrs.k) + all_but_pools_once(problem)
    return work + scoring_work(problem, keys) if capacity_of(problem) > problem.attrs.k else work


OP = Op(
    prototype=dsa_attention,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "index_q": Tensor("T I D", FLOATS),
        "index_weights": Tensor("T I", FLOATS),
        "mla_cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="mla_cache_format"),
        "indexer_cache": Tensor(
            "P R INDEXER_ROW", BYTES, format=indexer_format, format_attribute="indexer_cache_format"
        ),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
        "sink": Tensor("H", F32),
    },
    outputs={
        **ATTENTION_RESULTS,
        "indices": Result("T K", "int32", sizes={"K": lambda p: p.attrs.k}, agreement=Selection()),
    },
    needs={"indices": "index_q index_weights indexer_cache block_table lengths request_ids"},
    check=check,
    limits=partial(paged_limits, cache="indexer_cache"),
    work=work,
    steps=(quantize_indexer_query.OP, indexer_topk_paged.OP, map_slots.OP, sparse_mla.OP),
    implementations=(Implementation("steps", plan, asked="steps"),),
    reference=reference,
    cases=CASES,
)
