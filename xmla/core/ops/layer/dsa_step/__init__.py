from collections.abc import Iterator
from typing import Any

from xmla.core.call import FLOATS, Arrays, Limit, Problem, Tensor, check_scale_floor, paged_limits
from xmla.core.op import Op
from xmla.core.ops.cache import write_indexer_cache, write_mla_cache
from xmla.core.ops.layer import dsa_attention as attention
from xmla.core.ops.layer.dsa_step.cases import CASES
from xmla.core.ops.layer.dsa_step.plan import plan
from xmla.core.ops.layer.dsa_step.reference import reference
from xmla.core.plan import Implementation


def dsa_step(
    latent, rope, index_k, entry_slots, q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths,
    request_ids=None, sink=None, *, k: int, softmax_scale: float, index_scale: float | None = None,
    mla_cache_format: str | None = None, indexer_cache_format: str | None = None, scale_floor: str = "scale",
    workspace_bytes: int = 1 << 29, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """A step of DeepSeek sparse attention in one layer: the tokens' entries and keys into both caches, then attention.

        write_mla_cache(latent, rope, entry_slots, mla_cache, scale_floor=scale_floor)
        write_indexer_cache(index_k, entry_slots, indexer_cache)
        out, lse, indices = dsa_attention(q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, …)

    One call with the same bits as these three. One launch writes both caches and quantises the indexer's queries, so
    that a layer takes two launches less.

    Args:
        latent: [T, L] bfloat16, float16 or float32, as in `write_mla_cache`.
        rope: [T, E], any of the same dtypes.
        index_k: [T, D] bfloat16, float16 or float32, normalised and roped keys of the indexer.
        entry_slots: [T] int32 or int64, page · R + offset of each token's entry and key, in both caches. A slot outside
            [0, P·R) is skipped: its token is not written. Valid slots must be distinct.
        q: [T, H, L+E] bfloat16 or float16, absorbed queries, H ≤ 128.
        index_q: [T, I, D] bfloat16, float16 or float32, indexer queries, 1 ≤ I ≤ 128. Roped as the indexer's keys are;
            a Hadamard transform has rotated both or neither.
        index_weights: [T, I], any of the same dtypes, unscaled weights of the indexer heads.
        mla_cache: [P, R, ROW] in any format of `write_mla_cache` whose entries have L latent and E roped dims. Updated
            in place.
        indexer_cache: [P, R, INDEXER_ROW] bytes, INDEXER_ROW = D+4 (fp8) or D/2+4 (mxfp4). Updated in place. Both
            caches share page ids and page size.
        block_table: [B, M] int32, page ids; page ids past a token's length are never read.
        lengths: [T] int32, keys visible to each token, itself included; 0 or less marks a padding token.
        request_ids: [T] int32, each token's row of block_table; without it every request has T / B adjacent tokens. A
            token whose id is outside [0, B) has no keys: its out is 0, its lse −inf, its indices 0, 1, … below lengths.
        sink: [H] float32 or None.
        k: Keys selected for each token; all visible keys if there are at most k.
        softmax_scale: Factor of q · k.
        index_scale: Factor of the indexer's weights, default D**-0.5 · I**-0.5.
        mla_cache_format: As `cache_format` in `write_mla_cache`.
        indexer_cache_format: As `cache_format` in `write_indexer_cache`.
        scale_floor: As in `write_mla_cache`.
        workspace_bytes: As in `dsa_attention`.
        batch_invariant: As in `sparse_mla`.

    Returns:
        out: [T, H, 512], dtype of q.
        lse: [T, H] float32, natural log, −inf for a padding row.
        indices: [T, K] int32, the selected positions within each request, ascending, −1 padded.

    Raises:
        ArgumentError, UnsupportedError: As the three ops.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> new = xp.ones((1, 512)), xp.zeros((1, 64)), xp.ones((1, 32)), xp.asarray([4], dtype=xp.int32)
        >>> query = xp.zeros((1, 2, 576), dtype=xp.bfloat16), xp.ones((1, 2, 32)), xp.ones((1, 2))
        >>> mla_cache = xp.zeros((2, 4, 656), dtype=xp.uint8)
        >>> indexer_cache = xp.zeros((2, 4, 36), dtype=xp.uint8)
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([1], dtype=xp.int32)
        >>> out, lse, indices, mla_cache, indexer_cache = ops.dsa_step(
        ...     *new, *query, mla_cache, indexer_cache, block_table, lengths, k=2, softmax_scale=0.1
        ... )
        >>> indices.tolist(), out[0, 0, :2].tolist()
        ([[0, -1]], [1.0, 1.0])
    """


def check(problem: Problem) -> None:
    attention.check(problem)
    check_scale_floor(problem)


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    yield Limit("entry_slots", -1, problem["P"] * problem["R"] - 1)
    yield from paged_limits(problem, arrays, "indexer_cache")


OP = Op(
    prototype=dsa_step,
    tensors={
        "latent": Tensor("T L", FLOATS),
        "rope": Tensor("T E", FLOATS),
        "index_k": Tensor("T D", FLOATS),
        "entry_slots": Tensor("T", ("int32", "int64"), index_of="P R", distinct=True),
        **attention.OP.tensors,
    },
    outputs=attention.OP.outputs,
    updates=dict.fromkeys(("mla_cache", "indexer_cache")),
    needs={
        "indices": f"index_k entry_slots {attention.OP.needs['indices']}",
        "mla_cache": "latent rope entry_slots mla_cache",
        "indexer_cache": "index_k entry_slots indexer_cache",
    },
    check=check,
    limits=limits,
    work=attention.work,
    steps=(write_mla_cache.OP, write_indexer_cache.OP, *attention.OP.steps),
    implementations=(Implementation("steps", plan, asked="steps"),),
    reference=reference,
    cases=CASES,
)
