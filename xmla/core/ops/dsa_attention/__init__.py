from functools import partial
from typing import Any

from xmla.core.checks import paged_limits
from xmla.core.layout import VALUE_DIMS, mla_layout
from xmla.core.op import BYTES, F32, FLOATS, HALVES, INDEX, Op, Problem, Tensor
from xmla.core.ops.dsa_attention.cases import CASES
from xmla.core.ops.dsa_attention.plan import plan
from xmla.core.ops.dsa_attention.reference import reference
from xmla.core.ops.indexer_logits_paged import check_requests
from xmla.core.ops.write_indexer_cache import check_dim, check_indexer_row
from xmla.core.spec import Spec


def dsa_attention(
    q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, request_ids=None, sink=None, *,
    k: int, softmax_scale: float, index_scale: float | None = None, mla_cache_format: str | None = None,
    workspace_bytes: int = 1 << 29, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """One layer's DeepSeek sparse attention over its paged caches: indexer, top-k, slots, attention.

        q8, w   = quantize_indexer_query(index_q, index_weights, scale=index_scale, format=format of indexer_cache)
        indices = indexer_topk_paged(q8, w, indexer_cache, block_table, lengths, k=k)
        slots   = map_slots(indices, block_table, page_size=R)
        out     = sparse_mla(q, mla_cache, slots, sink=sink, softmax_scale=softmax_scale)

    bit for bit, as one call. The token's own keys are written first, with `write_mla_cache` and `write_indexer_cache`.

    Args:
        q: [T, H, L+E] bfloat16 or float16, absorbed queries, H ≤ 128.
        index_q: [T, I, D] bfloat16, float16 or float32, roped indexer queries, I ≤ 128.
        index_weights: [T, I], unscaled weights of the indexer heads.
        mla_cache: [P, R, ROW] in any format of `write_mla_cache`, or plain rows [P, R, L+E] of q's dtype.
        indexer_cache: [P, R, ROW] bytes, ROW of D+4 (fp8) or D/2+4 (mxfp4). Both caches share page ids and page size.
        block_table: [B, M] int32, page ids; entries past a token's length are never read.
        lengths: [T] int32, keys visible to each token, itself included; 0 or less is padding.
        request_ids: [T] int32, rows of block_table; without it every request has T / B adjacent tokens.
        sink: [H] float32 or None.
        k: Keys selected for a token; with at most k visible keys all of them are.
        softmax_scale: Factor of q · k.
        index_scale: Factor of the indexer's weights, default D**-0.5 · I**-0.5.
        mla_cache_format: As `cache_format` in `sparse_mla`.
        workspace_bytes: The most memory for the selection, as `indexer_topk_paged`; attention's splits come on top.
        batch_invariant: As in `sparse_mla`.

    Returns:
        out: [T, H, 512], dtype of q.
        lse: [T, H] float32, natural log, −inf for a padding row.
        indices: [T, K] int32, the selected positions within each request, ascending, −1 padded.

    Raises:
        ArgumentError, UnsupportedError: As the four ops; rows of 528 or 288 bytes and no `mla_cache_format`.

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


def check(problem: Problem) -> None:
    """The parts check themselves when the call is planned; here what a fake tensor's shape needs."""
    if problem.attrs["k"] < 1:
        problem.refuse("k", "value", problem.attrs["k"], "at least 1")
    mla_layout(problem, "mla_cache")
    check_dim(problem, "index_q", "axis D (axis 2)")
    check_indexer_row(problem, "indexer_cache", "INDEXER_ROW")
    check_requests(problem, "q")


OP = Op(
    prototype=dsa_attention,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "index_q": Tensor("T I D", FLOATS),
        "index_weights": Tensor("T I", FLOATS),
        "mla_cache": Tensor("P R ROW", (*BYTES, *HALVES)),
        "indexer_cache": Tensor("P R INDEXER_ROW", BYTES),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
        "sink": Tensor("H", F32),
    },
    outputs={
        "out": lambda p: Spec((p["T"], p["H"], VALUE_DIMS), p.specs["q"].dtype),
        "lse": lambda p: Spec((p["T"], p["H"]), "float32"),
        "indices": lambda p: Spec((p["T"], p.attrs["k"]), "int32"),
    },
    check=check,
    limits=partial(paged_limits, cache="indexer_cache"),
    implementations=("triton", "gluon"),
    plan=plan,
    reference=reference,
    cases=CASES,
)
