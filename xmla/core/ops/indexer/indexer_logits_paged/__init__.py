from typing import Any

from xmla.core.call import BYTES, F32, INDEX, Problem, Tensor, indexer_format, paged_limits
from xmla.core.op import Op
from xmla.core.ops.indexer.indexer_logits_paged import plan as portable
from xmla.core.ops.indexer.indexer_logits_paged.cases import CASES
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm90 import plan as gluon_sm90
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm100 import plan as gluon_sm100
from xmla.core.ops.indexer.indexer_logits_paged.plan import columns
from xmla.core.ops.indexer.indexer_logits_paged.reference import reference
from xmla.core.ops.indexer.shared import QUERY, check_keys, check_logits_dtype, logits_of, logits_work


def indexer_logits_paged(
    q8, weights, cache, block_table, lengths, request_ids=None, *, max_len: int | None = None,
    logits_dtype: str = "float32", cache_format: str | None = None,
) -> Any:  # fmt: skip
    """Lightning-indexer logits of flat query tokens over the paged indexer cache (decode, any number of tokens each).

        logits[t,n] = Σ_i relu(q8[t,i] · key[n]) · weights[t,i]                      for n < lengths[t]
        key[n]: entry n % R of page block_table[request of t, n // R]

    Args:
        q8: [T, I, D] float8_e4m3fn, D = 32, 64 or 128, 1 ≤ I ≤ 128; with MXFP4 keys also bfloat16. Tokens are flat
            rows, those of a request adjacent.
        weights: [T, I] float32, scales of q folded in.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, ROW = D+4 (fp8) or D/2+4 (mxfp4), scales in the page's footer
            (`write_indexer_cache`); any page size, pages start on multiples of 4 bytes.
        block_table: [B, M] int32, page ids. Page ids past a token's length are never read. A key on a page outside
            [0, P) gets −inf, as does every key of a token whose request does not exist.
        lengths: [T] int32, keys visible to each token, clamped to [0, min(max_len, M · R)].
        request_ids: [T] int32, each token's row of block_table, any integer. Without it T is a multiple of B and every
            request has T / B adjacent tokens.
        max_len: Columns of the result, default M · R.
        logits_dtype: "float32", or "bfloat16" for float32 logits that are rounded when they are written: half of the
            memory and of its traffic, and logits that differ by less than 2**-7 of their size may tie.
        cache_format: As in `write_indexer_cache`.

    Returns:
        logits: [T, max_len] in logits_dtype. Columns at or past a token's length are not written: read only columns
            below the length, as `select_topk` does.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B; max_len < 1.
        UnsupportedError: I > 128.

    Numerics as in `indexer_logits`. Time depends on the lengths, not on max_len: a fixed number of programs divides the
    work by the lengths.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # fp8 keys of 32 dims, all 0
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> ops.indexer_logits_paged(q8, weights, cache, block_table, lengths)[:, :5].tolist()
        [[0.0, 0.0, 0.0, 0.0, 0.0]]
    """


def check(problem: Problem) -> None:
    check_keys(problem)
    check_logits_dtype(problem)
    if problem.attrs.max_len is not None:
        problem.require_count("max_len")


OP = Op(
    prototype=indexer_logits_paged,
    tensors={
        "q8": QUERY,
        "weights": Tensor("T I", F32),
        "cache": Tensor("P R ROW", BYTES, format=indexer_format, format_attribute="cache_format"),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={"logits": logits_of("T MAX_LEN", sizes={"MAX_LEN": columns}, partial=True)},
    check=check,
    limits=paged_limits,
    work=logits_work,
    implementations=(gluon_sm90.IMPLEMENTATION, gluon_sm100.IMPLEMENTATION, portable.IMPLEMENTATION),
    reference=reference,
    cases=CASES,
)
