# Made by tools/front_ends.py from the declarations of the ops: change these and run it.

"""The public ops for JAX, a function of each."""

from typing import Literal, overload

import jax
import numpy as np

from xmla.core.registry import registry
from xmla.jax_api._ops import public

_ops = registry()

_compress_kv = public(_ops["compress_kv"])
_compress_rows = public(_ops["compress_rows"])
_convert_mla_cache = public(_ops["convert_mla_cache"])
_dsa_attention = public(_ops["dsa_attention"])
_dsa_step = public(_ops["dsa_step"])
_expand_blocks = public(_ops["expand_blocks"])
_indexer_block_topk = public(_ops["indexer_block_topk"])
_indexer_block_topk_paged = public(_ops["indexer_block_topk_paged"])
_indexer_blocks = public(_ops["indexer_blocks"])
_indexer_blocks_paged = public(_ops["indexer_blocks_paged"])
_indexer_logits = public(_ops["indexer_logits"])
_indexer_logits_paged = public(_ops["indexer_logits_paged"])
_indexer_loss = public(_ops["indexer_loss"])
_indexer_scores = public(_ops["indexer_scores"])
_indexer_target = public(_ops["indexer_target"])
_indexer_topk = public(_ops["indexer_topk"])
_indexer_topk_paged = public(_ops["indexer_topk_paged"])
_map_slots = public(_ops["map_slots"])
_merge_attention = public(_ops["merge_attention"])
_merge_topk = public(_ops["merge_topk"])
_pool_keys = public(_ops["pool_keys"])
_quantize_indexer_query = public(_ops["quantize_indexer_query"])
_read_indexer_cache = public(_ops["read_indexer_cache"])
_read_mla_cache = public(_ops["read_mla_cache"])
_resolve_slots = public(_ops["resolve_slots"])
_select_topk = public(_ops["select_topk"])
_sparse_mla = public(_ops["sparse_mla"])
_sparse_mla_paged = public(_ops["sparse_mla_paged"])
_split_batch = public(_ops["split_batch"])
_window_slots = public(_ops["window_slots"])
_write_indexer_cache = public(_ops["write_indexer_cache"])
_write_mla_cache = public(_ops["write_mla_cache"])


@overload
def compress_kv(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray,
    cos_sin: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def compress_kv(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray,
    cos_sin: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray,
    state_table: jax.Array | np.ndarray,
    cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def compress_kv(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray,
    cos_sin: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def compress_kv(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray,
    cos_sin: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> None: ...
def compress_kv(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray,
    cos_sin: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray | jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array] | jax.Array | None:
    """DeepSeek-V4's key compressor: store each token's state and write the entries that tokens complete.

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
        state: [STATE_P, STATE_R, 2·C·D] float32, any page stride. Updated. States are addressed by position,
            so writing a position again replaces its state, as after a rejected draft. Only states in a window are read.
        state_table: [B, STATE_M] int32, page ids of `state`: position p is on page state_table[b, p div STATE_R]. Pages
            may repeat: a ring of n positions serves calls with at most n − C·r + 1 tokens per request. A position
            without a page is not stored and is left out of every window.
        cache: [P, R, ROW]. D = 512: entries of any format of `write_mla_cache` that has 512 dims, one every r tokens.
            D = 128, 64 or 32: keys of `write_indexer_cache`, fp8 or mxfp4 according to ROW. Updated. An entry
            that has no page, or whose position is not in cos_sin, is not written.
        block_table: [B, M] int32, page ids of `cache`: entry j is on page block_table[b, j div R].
        request_ids: [T] int32, each token's row of the tables; a token with an id outside [0, B) is skipped. Without it
            T is a multiple of B and every request has T / B adjacent tokens.
        eps: Added to the mean square.
        cache_format: As in `write_mla_cache`, or for keys of `write_indexer_cache` as there.
        scale_floor: As in `write_mla_cache`. "amax" is the rule of V4's own writers; indexer keys always follow it.
        hadamard: Transform the indexer's keys, as DeepSeek's reference and SGLang do and vLLM does not. Queries must be
            transformed likewise. No byte of a cache tells, but `xmla.layouts.digest(…, hadamard=True)` does.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        state: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.
        cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.

    DeepSeek-V4.1 has r = 1 and 2 with C = 1 and an ape of 0, at r = 1 also a score of 0. It projects the indexer's keys
    from the normed latent, which is an entry of plain rows whose angles are 0 (cosines 1, sines 0).

    Numerics: float32; the entry is rounded once, to the format's values. Follows DeepSeek-V4's inference code and
    vLLM's compressor (states addressed by position, norm before rounding).

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> kv, score = jnp.ones((4, 32)), jnp.zeros((4, 32))
        >>> ape, norm_weight = jnp.zeros((4, 32)), jnp.ones(32)
        >>> positions, table = jnp.arange(4, dtype=jnp.int32), jnp.zeros((1, 1), dtype=jnp.int32)
        >>> cos_sin = jnp.asarray([[1.0, 0.0]])  # of position 0, where the entry of tokens 0 to 3 stands
        >>> state, cache = jnp.zeros((1, 4, 64)), jnp.zeros((1, 4, 36), dtype=jnp.uint8)
        >>> state, cache = xj.compress_kv(
        ...     kv, score, ape, norm_weight, cos_sin, positions, state, table, cache, table
        ... )
        >>> xj.read_indexer_cache(cache, table[0], cache_format="fp8")[1].tolist()
        [0.00390625]

    Implementations, best first:
        triton: every call.
    """
    return _compress_kv(
        [kv, score, ape, norm_weight, cos_sin, positions, state, state_table, cache, block_table, request_ids],
        (eps, cache_format, scale_floor, hadamard),
        implementation,
    )


def compress_rows(
    kv: jax.Array | np.ndarray,
    score: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    norm_weight: jax.Array | np.ndarray | None = None,
    cos_sin: jax.Array | np.ndarray | None = None,
    *,
    eps: float = 1e-06,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Compressed entries of whole documents as rows, as in training: what `compress_kv` and `pool_keys` quantise.

        for every token with (p + 1) mod r = 0, j = p div r, o = C − 1:              p = positions[n]
        w[d]      = softmax over rows q of score + ape[q mod r]                      for each dim d separately
        pooled[d] = Σ_q w[q,d] · kv[q,d]          q = (j − o)·r … (j + 1)·r − 1, from series 0 where q < j·r, else o
        normed    = pooled / sqrt(mean(pooled²) + eps) · norm_weight
        rows[n]   = normed, the pairs (2i, 2i+1) of its last E dims rotated by cos_sin[j·r]

    The tokens of a document are adjacent, and their positions rise by one; several documents may follow each other. Row
    q of a window is the token n − (p − q). One that has another position, or is not there, is left out.

    Args:
        kv, score: [N, C·D] bfloat16, float16 or float32: a token's two projections, C = 1 or 2. D = 32, 64, 128 or 512.
        ape: [r, C·D] float32, added to a token's score by the token's place in its group.
        positions: [N] int32, each token's position in its document. A negative one marks padding.
        norm_weight: [D] bfloat16, float16 or float32. Without it C = 1 and normed = pooled, as in `pool_keys`.
        cos_sin: [S, E] bfloat16, float16 or float32: for each position E / 2 cosines, then E / 2 sines. An entry whose
            position is not in it has a row of zeros. Without it nothing is rotated.
        eps: Added to the mean square.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        rows: [N, D] float32: an entry where the token that completes it stands, else 0.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    `sparse_mla` attends to the rows, in q's dtype, as pages of one entry: a slot is then the place of the token that
    completes the entry. Beside entries that `compress_kv` quantised they are its `rows`, or `extra_rows`.

    Numerics: float32; `compress_kv` computes the same before it rounds, up to the order of a window's sum. Gradients
    are sums of float32 in one order, so that the same arguments give the same bits.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> kv, score, ape = jnp.ones((4, 32)), jnp.zeros((4, 32)), jnp.zeros((2, 32))
        >>> rows = xj.compress_rows(kv, score, ape, jnp.arange(4, dtype=jnp.int32), jnp.ones(32), eps=0.0)
        >>> rows[:, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]

    Implementations, best first:
        triton: every call.

    Derivative: compress_rows_backward, of kv, score, ape, norm_weight.
    """
    return _compress_rows([kv, score, ape, positions, norm_weight, cos_sin], (eps,), implementation)


@overload
def convert_mla_cache(
    source: jax.Array | np.ndarray | jax.Ref,
    source_slots: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    *,
    source_format: str | None = None,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def convert_mla_cache(
    source: jax.Array | np.ndarray | jax.Ref,
    source_slots: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Ref,
    *,
    source_format: str | None = None,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> None: ...
def convert_mla_cache(
    source: jax.Array | np.ndarray | jax.Ref,
    source_slots: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    *,
    source_format: str | None = None,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array | None:
    """Copy entries from one paged latent cache to another of any format with the same dims.

        cache[slots[t]] = what write_mla_cache stores of the float32 entry that source[source_slots[t]] stands for,
                          the bytes of that entry between caches of one format and dtype

    Args:
        source: [SOURCE_P, SOURCE_R, SOURCE_ROW] in any format of `write_mla_cache`; any page size, any page stride.
        source_slots: [T] int32 or int64, slots of `source`: page · SOURCE_R + offset. Entries that no slot names are
            never read.
        slots: [T] int32 or int64, slots of `cache`: page · R + offset. A token is skipped if either of its slots is
            out of range. Valid slots must be distinct.
        cache: [P, R, ROW], updated, in other memory than `source`; only the entries named by `slots` are
            touched.
        source_format, cache_format, scale_floor: As in `write_mla_cache`.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; the formats hold different dims; a row is 528,
            368 or 288 bytes and its format is not named.

    Numerics: an entry is read exactly and rounded once, as in `write_mla_cache`.

    Example:
        >>> source, slots = jnp.ones((2, 4, 576), dtype=jnp.bfloat16), jnp.asarray([0, 5], dtype=jnp.int32)
        >>> cache = jnp.zeros((2, 4, 656), dtype=jnp.uint8)
        >>> cache = xj.convert_mla_cache(source, slots, slots, cache)
        >>> xj.read_mla_cache(cache, slots)[:, 0].tolist()
        [1.0, 1.0]

    Implementations, best first:
        triton: every call.
    """
    return _convert_mla_cache(
        [source, source_slots, slots, cache], (source_format, cache_format, scale_floor), implementation
    )


def dsa_attention(
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Array | np.ndarray | jax.Ref,
    indexer_cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        out: [T, H, 512], dtype of q.
        lse: [T, H] float32, natural log, −inf for a padding row.
        indices: [T, K] int32, the selected positions within each request, ascending, −1 padded.

    Raises:
        ArgumentError, UnsupportedError: As the four ops; ROW is 528, 368 or 288 bytes and no `mla_cache_format` is
            given.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, index_q = jnp.zeros((1, 2, 576), dtype=jnp.bfloat16), jnp.ones((1, 2, 32))
        >>> index_weights = jnp.ones((1, 2))
        >>> mla_cache = jnp.ones((2, 4, 576), dtype=jnp.bfloat16)
        >>> indexer_cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> out, lse, indices = xj.dsa_attention(
        ...     q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, k=2, softmax_scale=0.1
        ... )
        >>> indices.tolist(), out[0, 0, :2].tolist()
        ([[0, 1]], [1.0, 1.0])

    Implementations, best first:
        those of indexer_topk_paged, sparse_mla.
    """
    return _dsa_attention(
        [q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, request_ids, sink],
        (k, softmax_scale, index_scale, mla_cache_format, indexer_cache_format, workspace_bytes, batch_invariant),
        implementation,
    )


@overload
def dsa_step(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    entry_slots: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Array | np.ndarray,
    indexer_cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def dsa_step(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    entry_slots: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Array | np.ndarray,
    indexer_cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def dsa_step(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    entry_slots: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Ref,
    indexer_cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def dsa_step(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    entry_slots: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Ref,
    indexer_cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
def dsa_step(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    entry_slots: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray,
    index_q: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    mla_cache: jax.Array | np.ndarray | jax.Ref,
    indexer_cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 536870912,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> (
    tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array]
):
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
        mla_cache: [P, R, ROW] in any format of `write_mla_cache` whose entries have L latent and E roped dims. Updated.
        indexer_cache: [P, R, INDEXER_ROW] bytes, INDEXER_ROW = D+4 (fp8) or D/2+4 (mxfp4). Updated. Both
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
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        out: [T, H, 512], dtype of q.
        lse: [T, H] float32, natural log, −inf for a padding row.
        indices: [T, K] int32, the selected positions within each request, ascending, −1 padded.
        mla_cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref`
            is updated in place and not returned.
        indexer_cache: The new array; the one given does not change, and without the result nothing is written. A
            `jax.Ref` is updated in place and not returned.

    Raises:
        ArgumentError, UnsupportedError: As the three ops.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> new = jnp.ones((1, 512)), jnp.zeros((1, 64)), jnp.ones((1, 32)), jnp.asarray([4], dtype=jnp.int32)
        >>> query = jnp.zeros((1, 2, 576), dtype=jnp.bfloat16), jnp.ones((1, 2, 32)), jnp.ones((1, 2))
        >>> mla_cache = jnp.zeros((2, 4, 656), dtype=jnp.uint8)
        >>> indexer_cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([1], dtype=jnp.int32)
        >>> out, lse, indices, mla_cache, indexer_cache = xj.dsa_step(
        ...     *new, *query, mla_cache, indexer_cache, block_table, lengths, k=2, softmax_scale=0.1
        ... )
        >>> indices.tolist(), out[0, 0, :2].tolist()
        ([[0, -1]], [1.0, 1.0])

    Implementations, best first:
        those of indexer_topk_paged, sparse_mla.
    """
    return _dsa_step(
        [
            latent,
            rope,
            index_k,
            entry_slots,
            q,
            index_q,
            index_weights,
            mla_cache,
            indexer_cache,
            block_table,
            lengths,
            request_ids,
            sink,
        ],
        (
            k,
            softmax_scale,
            index_scale,
            mla_cache_format,
            indexer_cache_format,
            scale_floor,
            workspace_bytes,
            batch_invariant,
        ),
        implementation,
    )


def expand_blocks(
    blocks: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    *,
    granularity: int,
    tail: bool = True,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """The positions of all tokens of selected blocks, then those of the incomplete block at the end.

        indices[t,c]             = blocks[t, c div g] · g + c mod g     c < BLOCKS · g, g = granularity
        indices[t, BLOCKS·g + i] = lengths[t] div g · g + i             i < g − 1, with tail
        indices                  = −1                                   where there is no such block, or no such token

    Args:
        blocks: [T, BLOCKS] int32, blocks of g tokens (`indexer_topk_paged` over the keys of `pool_keys`; without tail
            also `indexer_blocks_paged`). −1 may stand anywhere. With tail a block that is not complete
            names none: its tokens are in the tail.
        lengths: [T] int32, tokens visible to each token; a negative length counts as 0.
        granularity: Tokens of a block, a power of two up to 128.
        tail: Whether the tokens after the last complete block follow, at most g − 1.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, BLOCKS · g + (g − 1 with tail)] int32, positions within the request. `map_slots` maps them to
            slots, and with `compact` lists the valid ones first.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; granularity is out of range.

    GLM-5.3-Flash attends to the tokens of 2048 / index_kpool pools and to the tail: 2051 columns with pools of 4.

    Example:
        >>> blocks, lengths = jnp.asarray([[1, -1]], dtype=jnp.int32), jnp.asarray([9], dtype=jnp.int32)
        >>> xj.expand_blocks(blocks, lengths, granularity=4).tolist()
        [[4, 5, 6, 7, -1, -1, -1, -1, 8, -1, -1]]

    Implementations, best first:
        triton: every call.
    """
    return _expand_blocks([blocks, lengths], (granularity, tail), implementation)


def indexer_block_topk(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    keys: jax.Array | np.ndarray | jax.Ref,
    key_scales: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray,
    blocks: jax.Array | np.ndarray,
    *,
    k: int,
    granularity: int,
    workspace_bytes: int = 536870912,
    implementation: Literal["gluon", "triton", "reference"] | None = None,
) -> jax.Array:
    """The k keys of each token with the largest logits among the keys of its selected blocks (prefill).

        logits[t,c] = logit of t and key starts[t] + n as in `indexer_logits`,  n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                          where there is no such block or starts[t] + n ≥ ends[t]
        columns     = select_topk(logits, k=k)                                                          g = granularity
        indices     = blocks[t, columns div g] · g + columns mod g,          columns without a key left out

    Everything else is as in `indexer_block_topk_paged`, whose blocks are a request's; here they count from the token's
    start. With few more keys N than the blocks have, neighbouring tokens read every key of their ranges once, and store
    the logits of their blocks' keys alone; with more each token reads its blocks' keys. Keys in no block do not
    influence the result.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        blocks: [T, BLOCKS] int32, blocks of g keys, counted from the token's start, as `indexer_blocks` gives them. A
            block outside [0, ⌈(ends[t] − starts[t]) / g⌉) names no key: −1 may stand anywhere. A block may stand twice.
        k, granularity: As in `indexer_block_topk_paged`.
        workspace_bytes: The most device memory to use besides the result: tokens are computed in parts that fit.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, key − start in the order of their columns, so ascending if the blocks are, −1 padded at
            the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    On 9.0 over fp8 keys N may be twice the keys of a token's blocks, elsewhere as many as these. Either way a row
    has the same bits, whatever else is in the call. Bits may differ between arrays whose first addresses differ modulo
    16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 3, 32)), jnp.ones((1, 3)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # three keys of ones
        >>> starts, ends = jnp.asarray([0], dtype=jnp.int32), jnp.asarray([3], dtype=jnp.int32)
        >>> blocks = jnp.asarray([[1, -1]], dtype=jnp.int32)  # key 2
        >>> xj.indexer_block_topk(
        ...     q8, weights, keys, key_scales, starts, ends, blocks, k=2, granularity=2
        ... ).tolist()
        [[2, -1]]

    Implementations, best first:
        gluon: compute capability 9.0; fp8 keys; float32 scales; rows on multiples of 16 bytes; at most 2 times as many
            keys as a token's blocks have.
        gluon: compute capability 9.0; fp8 keys; float32 scales; rows on multiples of 16 bytes; blocks of a multiple of
            8 keys; pages of a multiple of 8 keys.
        triton: every call.
    """
    return _indexer_block_topk(
        [q8, weights, keys, key_scales, starts, ends, blocks], (k, granularity, workspace_bytes), implementation
    )


def indexer_block_topk_paged(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    blocks: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    granularity: int,
    workspace_bytes: int = 536870912,
    cache_format: str | None = None,
    implementation: Literal["gluon", "triton", "reference"] | None = None,
) -> jax.Array:
    """The k keys of each token with the largest logits among the keys of its selected blocks, over the paged cache.

        logits[t,c] = logit of t and key n as in `indexer_logits_paged`,      n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                                               where there is no such block or n ≥ lengths[t]
        columns     = select_topk(logits, k=k)                                                          g = granularity
        indices     = blocks[t, columns div g] · g + columns mod g,          columns without a key left out

    With blocks in ascending order the result is exactly the first k of the blocks' keys in `select_topk`'s total order;
    in another order of blocks the keys have the order of their columns. In blocks that `indexer_blocks_paged` selected
    for the same query, at least k + newest of them, the selection is that of `indexer_topk_paged` over all keys.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`. Only page ids that a
            block's keys below the length refer to are read.
        blocks: [T, BLOCKS] int32, blocks of g keys within the request, as `indexer_blocks_paged` gives them. A block
            outside [0, ⌈lengths[t] / g⌉) names no key: −1 may stand anywhere. A block may stand twice.
        k: K ≥ 1, as in `select_topk`.
        granularity: Keys of a block, a power of two up to 128.
        workspace_bytes: The most device memory to use besides the result: tokens are computed in parts that fit.
        cache_format: As in `write_indexer_cache`.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, positions within the request in the order of their columns, so ascending if the blocks
            are, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    DeepSeek-V4.1's index layers after the source select 512 keys of 2048 blocks of 8, whatever the context.
    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)))
        >>> cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> blocks = jnp.asarray([[1, 2]], dtype=jnp.int32)  # keys 2 and 3, and key 4
        >>> xj.indexer_block_topk_paged(
        ...     q8, weights, cache, block_table, lengths, blocks, k=2, granularity=2
        ... ).tolist()
        [[2, 3]]

    Implementations, best first:
        gluon: compute capability 9.0; fp8 keys; float32 scales; rows on multiples of 16 bytes; blocks of a multiple of
            8 keys; pages of a multiple of 8 keys.
        triton: every call.
    """
    return _indexer_block_topk_paged(
        [q8, weights, cache, block_table, lengths, blocks, request_ids],
        (k, granularity, workspace_bytes, cache_format),
        implementation,
    )


def indexer_blocks(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    keys: jax.Array | np.ndarray | jax.Ref,
    key_scales: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray,
    *,
    k: int,
    granularity: int,
    newest: int = 1,
    workspace_bytes: int = 536870912,
    implementation: Literal["gluon", "triton", "reference"] | None = None,
) -> jax.Array:
    """The k blocks of each token's keys with the largest indexer logits, in bounded memory (prefill).

        logits  = indexer_logits(q8, weights, keys, key_scales, starts, ends)
        block b = keys start + b · granularity … start + (b+1) · granularity − 1, as far as they are in the range
        indices = the first k blocks in the order of `indexer_blocks_paged`

    The result is exactly this. The plan stores the logits of as many tokens at a time as fit the workspace, on 9.0 over
    fp8 keys the largest one of each block alone.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        k, granularity, newest: As in `indexer_blocks_paged`.
        workspace_bytes: The most device memory to use besides the result.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, blocks counted from the token's start, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong.
        UnsupportedError: I > 128; workspace_bytes is too small for the tokens of one program, or for 1024 parts.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 3, 32)), jnp.ones((1, 3)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # three equal keys: the first block wins, and the newest
        >>> starts, ends = jnp.asarray([0], dtype=jnp.int32), jnp.asarray([3], dtype=jnp.int32)
        >>> xj.indexer_blocks(
        ...     q8, weights, keys, key_scales, starts, ends, k=2, granularity=1
        ... ).tolist()
        [[0, 2]]

    Implementations, best first:
        those of indexer_logits.
    """
    return _indexer_blocks(
        [q8, weights, keys, key_scales, starts, ends], (k, granularity, newest, workspace_bytes), implementation
    )


def indexer_blocks_paged(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    granularity: int,
    newest: int = 1,
    workspace_bytes: int = 536870912,
    cache_format: str | None = None,
    implementation: Literal["gluon", "gluon_sm100", "triton", "reference"] | None = None,
) -> jax.Array:
    """The k blocks of each token's keys with the largest logits over the paged cache, in bounded memory (decode).

        logits   = indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids)
        block b  = keys b · granularity … (b+1) · granularity − 1, as far as there are
        value[b] = its largest logit; of the last `newest` blocks: above all others
        indices  = the first k blocks in the order value descending, then block ascending

    The result is exactly this. The logits are stored of all tokens if they fit the workspace, otherwise of as many
    tokens at a time as do.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`.
        k: K ≥ 1, any size.
        granularity: Keys of a block, a power of two up to 128. The last block may be incomplete.
        newest: Blocks at the end of a token's keys that are always selected, at most k.
        workspace_bytes: The most device memory to use besides the result.
        cache_format: As in `write_indexer_cache`.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, blocks within the request, ascending, −1 padded at the end. Of a token whose request id
            is outside [0, B), and so has logits of −inf, the blocks that are taken of equal ones.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    NaN is never a block's largest logit unless all its logits are NaN; such a block comes after all others. With
    newest > 0 an infinite logit counts as the largest finite one. A token's n largest logits lie in its n blocks with
    the largest logits. So n keys selected within at least n + newest blocks are those selected of all keys.

    Granularity as NVIDIA's cuDNN front-end names it. DeepSeek-V4.1's source layer keeps 2048 blocks of 8. It and the
    layers after it then select keys in them by `indexer_block_topk_paged`, which for the source layer is the selection
    over all keys.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)))
        >>> cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)  # equal keys: the first block wins, and the newest
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> xj.indexer_blocks_paged(q8, weights, cache, block_table, lengths, k=2, granularity=2).tolist()
        [[0, 2]]

    Implementations, best first:
        those of indexer_logits_paged.
    """
    return _indexer_blocks_paged(
        [q8, weights, cache, block_table, lengths, request_ids],
        (k, granularity, newest, workspace_bytes, cache_format),
        implementation,
    )


def indexer_logits(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    keys: jax.Array | np.ndarray | jax.Ref,
    key_scales: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray,
    *,
    logits_dtype: str = "float32",
    implementation: Literal["gluon", "triton", "reference"] | None = None,
) -> jax.Array:
    """Lightning-indexer logits of ragged queries over contiguous keys (prefill).

        logits[t,n] = Σ_i relu(q8[t,i] · key[n]) · weights[t,i]                      for starts[t] ≤ n < ends[t]
        logits[t,n] = −inf                                                           elsewhere

    Args:
        q8: [T, I, D] float8_e4m3fn, D = 32, 64 or 128, 1 ≤ I ≤ 128 (`quantize_indexer_query`); with MXFP4 keys also
            bfloat16.
        weights: [T, I] float32, scales of q folded in. May be negative.
        keys: The keys of all requests, one request after another (`read_indexer_cache`). fp8: [N, D] float8_e4m3fn.
            MXFP4: [N, D/2] uint8 or int8, two e2m1 per byte, the even dim in the low nibble.
        key_scales: fp8: [N] float32, any values, which multiply the logit; or with D = 128 [N] int32, a UE8M0 byte four
            times ("fp8_ue8m0" of `read_indexer_cache`). MXFP4: [N] int32, one UE8M0 byte per block of 32 dims, the
            first block in the lowest byte.
        starts, ends: [T] int32, clamped to [0, N]; ends ≤ starts is an empty row. Keys outside every row's range do
            not influence the result.
        logits_dtype: "float32", or "bfloat16" for float32 logits that are rounded when they are written: half of the
            memory and of its traffic, and logits that differ by less than 2**-7 of their size may tie.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        logits: [T, N] in logits_dtype, every element written.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong.
        UnsupportedError: I > 128.

    Numerics: products accumulated in the tensor cores, then float32. fp8 keys use fp8 products. MXFP4 keys use bfloat16
    products: keys, scales and queries are exact, except that keys of 2**128 and more, which e2m1 · 2**127 can hold,
    are infinite. The formula is that of DeepSeek-V3.2-Exp's indexer, of DeepGEMM's fp8_mqa_logits with clean_logits
    and of its fp4 variant.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # two keys of ones
        >>> starts, ends = jnp.asarray([0], dtype=jnp.int32), jnp.asarray([1], dtype=jnp.int32)
        >>> xj.indexer_logits(q8, weights, keys, key_scales, starts, ends).tolist()
        [[64.0, -inf]]

    Implementations, best first:
        gluon: compute capability 9.0; fp8 keys; float32 scales; rows on multiples of 16 bytes.
        triton: every call.
    """
    return _indexer_logits([q8, weights, keys, key_scales, starts, ends], (logits_dtype,), implementation)


def indexer_logits_paged(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    max_len: int | None = None,
    logits_dtype: str = "float32",
    cache_format: str | None = None,
    implementation: Literal["gluon", "gluon_sm100", "triton", "reference"] | None = None,
) -> jax.Array:
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
        implementation: As in every op, see `help(xmla.jax_api)`.

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
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)))
        >>> cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)  # fp8 keys of 32 dims, all 0
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> xj.indexer_logits_paged(q8, weights, cache, block_table, lengths)[:, :5].tolist()
        [[0.0, 0.0, 0.0, 0.0, 0.0]]

    Implementations, best first:
        gluon: compute capability 9.0; fp8 keys; float32 scales; rows on multiples of 16 bytes; pages of a multiple of
            64 keys.
        gluon_sm100, by its name alone: compute capability 10.0 or 10.3; fp8 keys; float32 scales; rows on multiples of
            16 bytes; pages of a multiple of 64 keys.
        triton: every call.
    """
    return _indexer_logits_paged(
        [q8, weights, cache, block_table, lengths, request_ids], (max_len, logits_dtype, cache_format), implementation
    )


def indexer_loss(
    index_q: jax.Array | np.ndarray,
    index_k: jax.Array | np.ndarray,
    index_weights: jax.Array | np.ndarray,
    q: jax.Array | np.ndarray | None = None,
    rows: jax.Array | np.ndarray | None = None,
    lse: jax.Array | np.ndarray | None = None,
    ends: jax.Array | np.ndarray | None = None,
    starts: jax.Array | np.ndarray | None = None,
    indices: jax.Array | np.ndarray | None = None,
    target: jax.Array | np.ndarray | None = None,
    *,
    softmax_scale: float | None = None,
    coeff: float = 1.0,
    workspace_bytes: int = 536870912,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The loss that trains a lightning indexer, KL(attention's probabilities ‖ the indexer's), and its gradients.

        n(t,c)   = indices[t,c], without indices c                                   the key of a column
        S[t]     = { c : starts[t] ≤ n(t,c) < ends[t] }                              the valid columns
        I[t,c]   = Σ_i index_weights[t,i] · relu(index_q[t,i] · index_k[n(t,c)])
        p[t,c]   = exp(I[t,c]) / Σ exp(I[t,c'])                                      the prediction; sums over S[t]
        g[t,c]   = target[t,c], without target Σ_h exp(softmax_scale · q[t,h] · rows[n(t,c)] − lse[t,h])
        ĝ[t,c]   = g[t,c] / Σ g[t,c']
        loss     = coeff / T · Σ_t Σ_c ĝ[t,c] · (ln max(ĝ[t,c], 1e-10) − ln p[t,c])
        dI[t,c]  = coeff / T · (p[t,c] − ĝ[t,c])         whose gradients of index_q, index_k and index_weights are those
                                                                                              of `indexer_scores`

    Without indices all keys of a range count: the indexer's warm-up. With them the selected keys alone. A token whose g
    sums up to 0, as one without keys, adds nothing to the loss and has gradients of 0. ln p[t,c] is computed as
    I[t,c] − ln Σ exp(I[t,c']), so that it is finite where p[t,c] rounds to 0. A column whose ĝ is 0 adds 0.

    Args:
        index_q: [T, I, D] bfloat16 or float16, D = 32, 64 or 128, 1 ≤ I ≤ 64.
        index_k: [N, D], dtype of index_q. What keys of no valid column hold does not matter; their rows are never read.
        index_weights: [T, I] float32.
        q: [T, H, L+E] bfloat16 or float16, H ≤ 128, L+E a multiple of 64: attention's queries.
        rows: [N, L+E], dtype of q: attention's plain rows, flat, at the same places as the indexer's keys.
        lse: [T, H] float32: attention's own, over the same keys, natural, without a sink. A head whose lse is infinite
            has no keys and adds 0.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row. In a batch of packed
            documents the range of a token's own document.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere. An
            index that stands twice is two columns.
        target: [T, K] float32, not negative, instead of q, rows and lse: `indexer_target`, summed over the ranks that
            share attention's heads. Read only in valid columns.
        softmax_scale: Factor of q · row; given if and only if q is.
        coeff: Factor of the loss.
        workspace_bytes: The most device memory to use besides the results: as many tokens at a time as fit. The bits of
            the results do not depend on it.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        loss: [1] float32, divided by all T tokens.
        dindex_q: [T, I, D], dtype of index_q.
        dindex_k: [N, D], dtype of index_k; 0 for a key of no valid column.
        dindex_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; target is given beside q, rows, lse or softmax_scale, or
            without indices; one of these four is missing without target.
        UnsupportedError: I > 64 or H > 128; workspace_bytes is too small; another argument than index_q, index_k and
            index_weights is differentiated.

    A token is multiplied with its own columns; on Hopper, in bfloat16 and for I ≥ 17, with all keys of its range. With
    indices that is from its least key to its greatest, where 2 · N − min(T, N) ≤ 6 · K. By columns the workspace is
    12 · T bytes, and (8 · D + 5) · N bytes for the sums of dindex_k. Without target there are 4 · K bytes more, without
    indices 4 · N, for each of at most T tokens and at least a 4096-th of them. By ranges it is 17 · T bytes, N / 64,
    and at most 4 · D · max(N, 65536) for the sums. For each of at most T tokens, and at least 64 or an 8192-th, there
    are 4 · N bytes more, with indices 4 · K, and as much again for the target as by columns.
    By columns the sums are exact to the last bit of a unit that the key's greatest summand sets, so that the order of
    tokens does not matter. By ranges they are of float32, in the order of tokens. The same arguments give the same
    bits.

    The formula is that of DeepSeek-V3.2's technical report. Attention's q, rows and lse are constants, the gradients
    are the loss's own: its derivative multiplies them by the gradient of the loss.

    Numerics: scores, probabilities and sums in float32; gradients as of `indexer_scores`. In float16 a
    gradient below 2**-24, of which coeff / T is a factor, is 0; bfloat16 has no such limit. A target or prediction that
    is not finite makes its token's gradients, its keys' and the loss NaN.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, k = jnp.zeros((1, 2, 32), dtype=jnp.bfloat16), jnp.ones((3, 32), dtype=jnp.bfloat16)
        >>> indices, target = jnp.asarray([[0, 2]], dtype=jnp.int32), jnp.asarray([[1.0, 0.0]])
        >>> loss, *gradients = xj.indexer_loss(q, k, jnp.ones((1, 2)), indices=indices, target=target)
        >>> round(float(loss[0]), 3)  # ln 2: of two keys alike one is the target
        0.693

    Implementations, best first:
        triton: every call.

    Derivative: indexer_loss_backward, of index_q, index_k, index_weights.
    """
    return _indexer_loss(
        [index_q, index_k, index_weights, q, rows, lse, ends, starts, indices, target],
        (softmax_scale, coeff, workspace_bytes),
        implementation,
    )


def indexer_scores(
    q: jax.Array | np.ndarray,
    k: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray | None = None,
    starts: jax.Array | np.ndarray | None = None,
    indices: jax.Array | np.ndarray | None = None,
    *,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Scores of a lightning indexer over 16-bit keys, as in training: over a range of keys, or at selected ones.

        n(t,c)      = indices[t,c], without indices c                                the key of a column
        S[t]        = { c : starts[t] ≤ n(t,c) < ends[t] }                           the valid columns
        scores[t,c] = Σ_i weights[t,i] · relu(q[t,i] · k[n(t,c)])                    for c in S[t], else −inf

    Args:
        q: [T, I, D] bfloat16 or float16, D = 32, 64 or 128, 1 ≤ I ≤ 64.
        k: [N, D], dtype of q. Keys of no valid column are never read.
        weights: [T, I] float32. May be negative.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row. In a batch of packed
            documents the range of a token's own document.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere,
            and an index twice.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        scores: [T, COLUMNS] float32, COLUMNS = K with indices, else N; every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 64.

    Numerics: products summed in float32. The formula is that of DeepSeek-V3.2's technical report, with all factors in
    the weights. The derivative of relu at 0 is 0. Gradients are products of operands in q's dtype (float16: TF32),
    summed in float32. The sums of k's over tokens are exact to the last bit of a unit that the key's greatest summand
    sets, so that the same arguments give the same bits. A key's whole gradient is NaN if a query, weight or gradient of
    one of its summands is not finite.

    Example:
        >>> q, k = jnp.ones((1, 2, 32), dtype=jnp.bfloat16), jnp.ones((3, 32), dtype=jnp.bfloat16)
        >>> xj.indexer_scores(q, k, jnp.ones((1, 2)), jnp.asarray([2], dtype=jnp.int32)).tolist()
        [[64.0, 64.0, -inf]]

    Implementations, best first:
        triton: every call.

    Derivative: indexer_scores_backward, of q, k, weights.
    """
    return _indexer_scores([q, k, weights, ends, starts, indices], (), implementation)


def indexer_target(
    q: jax.Array | np.ndarray,
    rows: jax.Array | np.ndarray,
    lse: jax.Array | np.ndarray,
    indices: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray | None = None,
    starts: jax.Array | np.ndarray | None = None,
    *,
    softmax_scale: float,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Attention's probabilities at selected keys, summed over heads: what an indexer learns, not yet normalised.

        S[t]        = { c : starts[t] ≤ indices[t,c] < ends[t] }                     the valid columns
        target[t,c] = Σ_h exp(softmax_scale · q[t,h] · rows[indices[t,c]] − lse[t,h])              for c in S[t], else 0

    Ranks that share the heads add their targets up and give the sum to `indexer_loss`, which normalises it.

    Args:
        q: [T, H, L+E] bfloat16 or float16, H ≤ 128, L+E a multiple of 64, such as 576 or 512: attention's queries.
        rows: [N, L+E], dtype of q: attention's plain rows, flat. Rows of no valid column are never read.
        lse: [T, H] float32: attention's own, over the same keys, natural, without a sink. A head whose lse is infinite
            has no keys and adds 0.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere,
            and an index twice.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row.
        softmax_scale: Factor of q · row, natural base.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        target: [T, K] float32, every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: H > 128, or an argument is differentiated: the target is a constant (DeepSeek-V3.2's
            technical report).

    Numerics: scores, probabilities and sums in float32.

    Example:
        >>> q, rows = jnp.zeros((1, 2, 64), dtype=jnp.bfloat16), jnp.ones((3, 64), dtype=jnp.bfloat16)
        >>> lse, indices = jnp.zeros((1, 2)), jnp.asarray([[0, -1]], dtype=jnp.int32)
        >>> xj.indexer_target(q, rows, lse, indices, softmax_scale=0.1).tolist()
        [[2.0, 0.0]]

    Implementations, best first:
        triton: every call.
    """
    return _indexer_target([q, rows, lse, indices, ends, starts], (softmax_scale,), implementation)


def indexer_topk(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    keys: jax.Array | np.ndarray | jax.Ref,
    key_scales: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray,
    *,
    k: int,
    workspace_bytes: int = 536870912,
    implementation: Literal["gluon", "triton", "gluon_sm90_cluster", "gluon_sm90", "reference"] | None = None,
) -> jax.Array:
    """The k keys of each token with the largest indexer logits, in bounded memory (prefill).

        indices = select_topk(indexer_logits(q8, weights, keys, key_scales, starts, ends), ends, starts, k=k)

    The result is exactly this, total order included. The plan stores the logits of as many tokens at a time as fit the
    workspace: at least 64 tokens or 2²¹ logits. If those do not fit, or there would be more than 1024 parts, no logits
    are stored. Each program then keeps the candidates of its tokens, at most 2 · k, and memory does not grow with T or
    N. If N ≤ k, every key is selected and there are no logits.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        k: K ≥ 1, as in `select_topk`; at most 8192 if no logits are stored.
        workspace_bytes: The most device memory to use besides the result.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, key − start, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one program; k > 8192 and the logits do not fit.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)))
        >>> keys, key_scales = q8[0], weights[0]  # two equal keys
        >>> starts, ends = jnp.asarray([0], dtype=jnp.int32), jnp.asarray([2], dtype=jnp.int32)
        >>> xj.indexer_topk(q8, weights, keys, key_scales, starts, ends, k=1).tolist()
        [[0]]

    Implementations, best first:
        those of indexer_logits, select_topk.
    """
    return _indexer_topk([q8, weights, keys, key_scales, starts, ends], (k, workspace_bytes), implementation)


def indexer_topk_paged(
    q8: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    workspace_bytes: int = 536870912,
    cache_format: str | None = None,
    implementation: Literal["gluon", "gluon_sm100", "triton", "gluon_sm90_cluster", "gluon_sm90", "reference"]
    | None = None,
) -> jax.Array:
    """The k keys of each token with the largest logits over the paged indexer cache, in bounded memory (decode).

        indices = select_topk(indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids), lengths, k=k)

    The result is exactly this, total order included. The logits are stored only if [T, M · R] of them fit the
    workspace; if M · R ≤ k, every key is selected and there are none.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`.
        k: K ≥ 1, as in `select_topk`; at most 8192 if the logits do not fit.
        workspace_bytes: The most device memory to use besides the result.
        cache_format: As in `write_indexer_cache`.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, positions within the request, ascending, −1 padded at the end. Of a token whose request
            id is outside [0, B), and so has logits of −inf, positions 0, 1, … below its length: `map_slots` gives −1.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one program per group of tokens; k > 8192 and the
            logits do not fit.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)))
        >>> cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> xj.indexer_topk_paged(q8, weights, cache, block_table, lengths, k=2).tolist()
        [[0, 1]]

    Implementations, best first:
        those of indexer_logits_paged, select_topk.
    """
    return _indexer_topk_paged(
        [q8, weights, cache, block_table, lengths, request_ids], (k, workspace_bytes, cache_format), implementation
    )


def map_slots(
    indices: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    lengths: jax.Array | np.ndarray | None = None,
    *,
    page_size: int,
    compact: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Map key indices within a request to slots of the paged cache.

        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,     i = indices[t,k]
        slots[t,k] = −1                                                    where i or its page id is not valid

    Args:
        indices: [T, K] int32. An index outside [0, M · page_size) gives −1 in its place: −1 may stand anywhere in a
            row.
        block_table: [B, M] int32, page ids. The slots on a page are −1 if its id is negative or its slots pass 2**31.
            Only page ids that an index refers to are read.
        request_ids: [T] int32, each token's row of block_table; an id outside [0, B) makes the row −1. Without it T is
            a multiple of B and every request has T / B adjacent tokens.
        lengths: [T] int32, keys visible to each token. An index at or past its token's length gives −1; without it
            every page of the table counts.
        page_size: R, entries per page.
        compact: List the valid slots of a row first, in their order.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        slots: [T, K] int32.
        counts: [T] int32, valid slots per row. `sparse_mla` takes them as lengths if the valid slots come first: with
            `compact`, or if they come first in `indices`.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; page_size < 1; T is not a multiple of B.

    Example:
        >>> block_table = jnp.asarray([[7, 3]], dtype=jnp.int32)
        >>> indices = jnp.asarray([[0, 5, -1]], dtype=jnp.int32)
        >>> slots, counts = xj.map_slots(indices, block_table, page_size=4)
        >>> slots.tolist(), counts.tolist()
        ([[28, 13, -1]], [2])

    Implementations, best first:
        triton: every call.
    """
    return _map_slots([indices, block_table, request_ids, lengths], (page_size, compact), implementation)


def merge_attention(
    outs: jax.Array | np.ndarray,
    lses: jax.Array | np.ndarray,
    sink: jax.Array | np.ndarray | None = None,
    *,
    empty_lse: str = "-inf",
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over a set of keys, merged from attention over disjoint parts of it, such as the keys of each rank.

        lse[t,h] = ln Σ_w exp(lses[w,t,h])
        out[t,h] = Σ_w exp(lses[w,t,h]) · outs[w,t,h] / (exp(lse[t,h]) + exp(sink[h]))

    Args:
        outs: [W, T, H, L] bfloat16, float16 or float32, out of `sparse_mla` for each part, computed without a sink.
        lses: [W, T, H] float32, natural log. −inf, or +inf as in FlashMLA, marks a part without keys: its out is not
            read.
        sink: [H] float32, as in `sparse_mla`.
        empty_lse: "-inf" or "+inf", the lse of a row that has no keys in any part.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        out: [T, H, L], dtype of outs; 0 for a row that has no keys in any part.
        lse: [T, H] float32, natural log, without the sink.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; W is 0.

    Numerics: sums in float32, in the order of the parts. A single part without a sink is returned unchanged. The rule
    is FlashAttention's for split keys.

    Example:
        >>> outs, lses = jnp.asarray([[[[1.0, 5.0]]], [[[3.0, 7.0]]]]), jnp.zeros((2, 1, 1))
        >>> out, lse = xj.merge_attention(outs, lses)
        >>> out.tolist(), round(float(lse[0, 0]), 3)
        ([[[2.0, 6.0]]], 0.693)

    Implementations, best first:
        triton: every call.
    """
    return _merge_attention([outs, lses, sink], (empty_lse,), implementation)


def merge_topk(
    values: jax.Array | np.ndarray,
    indices: jax.Array | np.ndarray,
    *,
    k: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The top-k of a row from the candidates of several parts: exact if every part gives its own top-k.

    Selection: the first k in the order of `select_topk`, value descending, then index ascending; −0 equals +0, NaN
    comes after −inf. Order of the result: ascending index.

    Args:
        values: [W, T, N] float32, N candidates from each of W parts.
        indices: [W, T, N] int32, the candidates' indices in the whole row. A negative index is padding wherever it
            stands; its value may be anything. An index that occurs twice is two candidates.
        k: K ≥ 1, any size.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        top_values: [T, K] float32, −inf where there is no index.
        top_indices: [T, K] int32, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.

    Example:
        >>> values = jnp.asarray([[[5.0, 1.0]], [[4.0, 3.0]]])
        >>> indices = jnp.asarray([[[10, 2]], [[7, 30]]], dtype=jnp.int32)
        >>> top_values, top_indices = xj.merge_topk(values, indices, k=2)
        >>> top_values.tolist(), top_indices.tolist()
        ([[4.0, 5.0]], [[7, 10]])

    Implementations, best first:
        triton: every call.
    """
    return _merge_topk([values, indices], (k,), implementation)


@overload
def pool_keys(
    keys: jax.Array | np.ndarray,
    gates: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def pool_keys(
    keys: jax.Array | np.ndarray,
    gates: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray,
    state_table: jax.Array | np.ndarray,
    cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def pool_keys(
    keys: jax.Array | np.ndarray,
    gates: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def pool_keys(
    keys: jax.Array | np.ndarray,
    gates: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> None: ...
def pool_keys(
    keys: jax.Array | np.ndarray,
    gates: jax.Array | np.ndarray,
    ape: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    state: jax.Array | np.ndarray | jax.Ref,
    state_table: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    block_table: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array] | jax.Array | None:
    """GLM-5.3-Flash's pooled indexer keys: store each token's state and write the keys that tokens complete.

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
        state: [STATE_P, STATE_R, 2·D] float32, any page stride. Updated. States are addressed by position, so
            writing a position again replaces its state, as after a rejected draft.
        state_table: [B, STATE_M] int32, page ids of `state`: position p is on page state_table[b, p div STATE_R]. Pages
            may repeat: a ring of n positions serves calls with at most n − r + 1 tokens per request. A position without
            a page is not stored and is left out of its pool.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, ROW = D+4 (fp8) or D/2+4 (mxfp4), one key every r tokens.
            Updated. A key that has no page is not written.
        block_table: [B, M] int32, page ids of `cache`: key j is on page block_table[b, j div R].
        request_ids: [T] int32, each token's row of the tables; a token with an id outside [0, B) is skipped. Without it
            T is a multiple of B and every request has T / B adjacent tokens.
        cache_format: As in `write_indexer_cache`.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        state: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.
        cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B.

    Numerics: float32; the key is rounded once, to the format's values, by the rules of `write_indexer_cache`. The
    formula is that of transformers' glm5_next.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> keys, gates, ape = jnp.ones((2, 32)), jnp.zeros((2, 32)), jnp.zeros((2, 32))
        >>> positions, table = jnp.arange(2, dtype=jnp.int32), jnp.zeros((1, 1), dtype=jnp.int32)
        >>> state, cache = jnp.zeros((1, 2, 64)), jnp.zeros((1, 4, 36), dtype=jnp.uint8)
        >>> state, cache = xj.pool_keys(keys, gates, ape, positions, state, table, cache, table)
        >>> xj.read_indexer_cache(cache, table[0], cache_format="fp8")[1].tolist()
        [0.00390625]

    Implementations, best first:
        triton: every call.
    """
    return _pool_keys(
        [keys, gates, ape, positions, state, state_table, cache, block_table, request_ids],
        (cache_format,),
        implementation,
    )


def quantize_indexer_query(
    q: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray,
    *,
    scale: float | None = None,
    format: str = "fp8",
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantise indexer queries to fp8, with one scale per head folded into the head's weight, or to MXFP4.

        s[t,i] = 2 ** max(ceil(log2(max|q[t,i]| / 448)), -22)
        q8[t,i] = e4m3(q[t,i] / s[t,i]);      folded[t,i] = weights[t,i] · s[t,i] · scale                       (fp8)
        q8[t,i] = mxfp4(q[t,i]);              folded[t,i] = weights[t,i] · scale                              (mxfp4)

    The indexer's logit is Σ_i relu(q_i · k) · w_i and s > 0, so relu(s x) = s relu(x): folding only rounds the weight.
    MXFP4 has one scale per 32 dims, which cannot be factored out of the dot product. The op then returns the rounded
    values themselves, in bfloat16, which holds them exactly.

    Args:
        q: [T, I, D] bfloat16, float16 or float32, D = 32, 64 or 128, 1 ≤ I ≤ 128. Roped and rotated as the keys are: by
            a Hadamard transform, as in DeepSeek's reference and SGLang, or by none, as in vLLM.
        weights: [T, I], any of the same dtypes: weights_proj(x), unscaled.
        scale: Further factor of the weights, default D**-0.5 · I**-0.5 as in DeepSeek-V3.2.
        format: "fp8", or "mxfp4" (rounded as in `write_indexer_cache`) for keys in MXFP4. DeepSeek-V4's indexer was
            trained with mxfp4, and DeepGEMM and vLLM compute it. Keys in MXFP4 take fp8 queries as well.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        q8: [T, I, D] float8_e4m3fn, or bfloat16 (mxfp4).
        folded_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or format is wrong.
        UnsupportedError: I > 128.

    Example:
        >>> q8, folded_weights = xj.quantize_indexer_query(jnp.ones((1, 2, 32)), jnp.ones((1, 2)), scale=1.0)
        >>> float(q8[0, 0, 0]), folded_weights.tolist()
        (256.0, [[0.00390625, 0.00390625]])

    Implementations, best first:
        triton: every call.
    """
    return _quantize_indexer_query([q, weights], (scale, format), implementation)


def read_indexer_cache(
    cache: jax.Array | np.ndarray | jax.Ref,
    slots: jax.Array | np.ndarray,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gather indexer keys from the paged cache, still quantised, as `indexer_logits` takes them.

        fp8:    key = keys · key_scales, or · 2 ** (each byte of key_scales − 127) (fp8_ue8m0)
        mxfp4:  key = e2m1(keys) · 2 ** (byte d/32 of key_scales − 127) for dim d

    Args:
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, scales in the page's footer (`write_indexer_cache`). ROW is D+4
            (fp8) or D/2+4 (mxfp4), D = 32, 64 or 128. Any page size, pages start on multiples of 4 bytes.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) gives a key and scales of zero bytes.
            Entries that no slot names are never read.
        cache_format: "fp8" or "mxfp4", needed if ROW is 36 or 68, which both formats have; or "fp8_ue8m0".
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        keys: [T, D] float8_e4m3fn, or [T, D/2] uint8, two dims per byte, the even one in the low nibble.
        key_scales: [T] float32, or [T] int32, one UE8M0 byte per block of 32 dims, the first block in the lowest byte:
            one word per row, as DeepGEMM takes them. fp8_ue8m0: [T] int32, the scale's UE8M0 byte four times.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; both formats have rows of ROW bytes and none is given.

    Example:
        >>> cache, slots = jnp.zeros((2, 4, 132), dtype=jnp.uint8), jnp.asarray([5, 0], dtype=jnp.int32)
        >>> keys, key_scales = xj.read_indexer_cache(cache, slots)
        >>> tuple(keys.shape), key_scales.tolist()
        ((2, 128), [0.0, 0.0])

    Implementations, best first:
        triton: every call.
    """
    return _read_indexer_cache([cache, slots], (cache_format,), implementation)


def read_mla_cache(
    cache: jax.Array | np.ndarray | jax.Ref,
    slots: jax.Array | np.ndarray,
    *,
    cache_format: str | None = None,
    dtype: str = "bfloat16",
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array:
    """Gather entries of the paged latent cache and dequantise them.

        rows[t] = (values · scale of their tile) ∥ rope,     of the entry at slots[t]

    Args:
        cache: [P, R, ROW] in any format of `write_mla_cache`; any page size, any page stride. Scales may be any that
            the format can hold, not only powers of two.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) gives a row of zeros. Entries that no slot
            names are never read. `map_slots` computes slots from a block table.
        cache_format: As in `write_mla_cache`. Default: inferred from ROW and dtype.
        dtype: Of the result: "bfloat16" or "float32".
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        rows: [T, L+E] in `dtype`: 576 or 512 dims.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; ROW is 528, 368 or 288 bytes and no
            `cache_format` is given.

    Numerics: the float32 product is rounded once to `dtype`; with power-of-two or e4m3 scales bfloat16 is exact too.

    Example:
        >>> cache, slots = jnp.ones((2, 4, 576), dtype=jnp.bfloat16), jnp.asarray([3, -1], dtype=jnp.int32)
        >>> xj.read_mla_cache(cache, slots)[:, 0].tolist()
        [1.0, 0.0]

    Implementations, best first:
        triton: every call.
    """
    return _read_mla_cache([cache, slots], (cache_format, dtype), implementation)


@overload
def resolve_slots(
    indices: jax.Array | np.ndarray,
    held: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    *,
    num_entries: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def resolve_slots(
    indices: jax.Array | np.ndarray,
    held: jax.Array | np.ndarray,
    slots: jax.Ref,
    *,
    num_entries: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def resolve_slots(
    indices: jax.Array | np.ndarray,
    held: jax.Ref,
    slots: jax.Array | np.ndarray,
    *,
    num_entries: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def resolve_slots(
    indices: jax.Array | np.ndarray,
    held: jax.Ref,
    slots: jax.Ref,
    *,
    num_entries: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
def resolve_slots(
    indices: jax.Array | np.ndarray,
    held: jax.Array | np.ndarray | jax.Ref,
    slots: jax.Array | np.ndarray | jax.Ref,
    *,
    num_entries: int,
    implementation: Literal["triton", "reference"] | None = None,
) -> (
    tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array, jax.Array]
):
    """Find selected entries in a pool that holds a part of a cache, and give those that it lacks a place in it.

    Of a cache that lies elsewhere, as in the host's memory, each request has PLACES entries in a pool of the device.
    Its places stand in a list, the one named least recently first: place j holds entry held[b, j] in slot slots[b, j].
    Of one call, for each request:

        named     the entries of its columns that lie in [0, num_entries), each once, by their first columns
        missing   the named ones that no place holds
        free      the places whose entry is not named; the first of them get the missing entries, in order
        selected  the slot of each column's entry, −1 of a column that names none
        the list  the free places that are left, those just given, those that held a named entry; each part in its order

    So what is given up was named least recently, and nothing that this call names is. A place that is given holds its
    entry once the caller has copied it, before anything reads the slot: for each i < counts[b] entry missing[b, i] into
    slot destinations[b, i]. An entry that this step makes is named, too, in a column of its own, and written to the
    slot that it gets.

    Args:
        indices: [T, K] int32, selected entries of each token's request; −1 may stand anywhere. T is a multiple of B
            and every request has T / B adjacent tokens, which share its places. An entry may stand for a block of a
            cache, if a slot holds one.
        held: [B, PLACES] int32, the entry in each place, −1 of an empty one. PLACES is at least T / B · K, so that
            there is always room. Of several places that hold an entry the last counts. Updated.
        slots: [B, PLACES] int32, the slot of each place, in the same order: any numbers. Updated. A request
            begins with its slots in any order, and with held = −1.
        num_entries: Entries that a request can name.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        selected: [T, K] int32, slots, as `sparse_mla` takes them.
        missing: [B, T / B · K] int32, the entries to copy, −1 after them. `map_slots` maps them to slots of the cache.
        destinations: [B, T / B · K] int32, the slots to copy them to, −1 after them.
        counts: [B] int32, entries to copy.
        held: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.
        slots: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; PLACES is less than T / B · K;
            num_entries < 1; held and slots share memory that is updated.

    The call's workspace has num_entries words for each request and three for each place. One program serves a request:
    calls of many columns take their time. Nothing is read by the host, so that the calls of a CUDA graph replay, each
    from the list that the last one left.

    Example:
        >>> indices = jnp.asarray([[4, 2]], dtype=jnp.int32)
        >>> held = jnp.asarray([[-1, 2, 3]], dtype=jnp.int32)
        >>> slots = jnp.asarray([[10, 11, 12]], dtype=jnp.int32)
        >>> selected, missing, to, counts, held, slots = xj.resolve_slots(indices, held, slots, num_entries=8)
        >>> selected.tolist(), missing.tolist(), to.tolist(), counts.tolist()
        ([[10, 11]], [[4, -1]], [[10, -1]], [1])
        >>> held.tolist(), slots.tolist()
        ([[3, 4, 2]], [[12, 10, 11]])

    Implementations, best first:
        triton: every call.
    """
    return _resolve_slots([indices, held, slots], (num_entries,), implementation)


def select_topk(
    logits: jax.Array | np.ndarray,
    ends: jax.Array | np.ndarray,
    starts: jax.Array | np.ndarray | None = None,
    *,
    k: int,
    implementation: Literal["triton", "gluon_sm90_cluster", "gluon_sm90", "reference"] | None = None,
) -> jax.Array:
    """The k largest logits of each row's range, exactly and deterministically.

    Selection: the first k in the total order value descending, then column ascending; −0 equals +0, NaN comes after
    −inf. Order of the result: ascending column, so a range of at most k columns gives 0, 1, …, then −1.

    Args:
        logits: [T, N] float32 or bfloat16, of which more elements tie. Elements outside a row's range are never read
            and may hold anything.
        ends: [T] int32, the end of each row's range, clamped to [0, N].
        starts: [T] int32, the start of each row's range, clamped to [0, N], default 0; ends ≤ starts is an empty row.
        k: K ≥ 1, any size.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        indices: [T, K] int32, column − start, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.

    Rows with a range of at most k columns are not read at all, nor is any row if N ≤ k. Indices are relative to the
    start, as in vLLM's top_k_per_row. xmla guarantees the order among the k; its peers leave it open.

    Example:
        >>> logits, ends = jnp.asarray([[0.5, 3.0, 1.0, 2.0]]), jnp.asarray([4], dtype=jnp.int32)
        >>> xj.select_topk(logits, ends, k=2).tolist()
        [[1, 3]]

    Implementations, best first:
        triton: rows of at most k columns.
        gluon_sm90_cluster: compute capability 9.0; Triton 3.9 or newer; a k of at most 2048; at most 131072 columns; of
            more than 8192 columns at most 64 rows of 32768, 32 rows of 65536, 8 rows of 131072.
        gluon_sm90: compute capability 9.0; Triton 3.9 or newer; at most 131072 columns; a k of at most 2048; more rows
            than SMs, or more than 64 of at most 32768 columns.
        triton: every call.
    """
    return _select_topk([logits, ends, starts], (k,), implementation)


def sparse_mla(
    q: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    slots: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    extra_cache: jax.Array | np.ndarray | jax.Ref | None = None,
    extra_slots: jax.Array | np.ndarray | None = None,
    extra_lengths: jax.Array | np.ndarray | None = None,
    cos_sin: jax.Array | np.ndarray | None = None,
    positions: jax.Array | np.ndarray | None = None,
    rows: jax.Array | np.ndarray | jax.Ref | None = None,
    extra_rows: jax.Array | np.ndarray | jax.Ref | None = None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    empty_lse: str = "-inf",
    lse_base: str = "e",
    lse_sink: bool = False,
    batch_invariant: bool = False,
    deterministic: bool = True,
    implementation: Literal["gluon", "gluon_sm100", "triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of each token over its own selected cache entries, for decode and prefill.

        S[t]     = { k < lengths[t] : 0 ≤ slots[t,k] < P·R }
                   ∪ the same of extra_slots, extra_lengths and extra_cache
        s[h,k]   = softmax_scale · q[t,h] · entry(slots[t,k])
        out[t,h] = Σ_k exp(s[h,k]) · value(slots[t,k]) / (Σ_k exp(s[h,k]) + exp(sink[h]))
        lse[t,h] = ln Σ_k exp(s[h,k])

    S[t] has the valid keys of both caches, for one softmax over all of them; −1 may stand anywhere among slots. k runs
    over S[t], scores are of all L+E dims, and the lse is without the sink. A value is the entry's first 512 dims: the
    latent in V3.2's formats, all of it in V4's. A row whose scores are all −inf counts as one without valid keys.

    Args:
        q: [T, H, L+E] bfloat16 or float16, H ≤ 128, as many dims as an entry: 576, or 512 (V4's, V4.1's,
            "nope", "plain_v4"). Absorbed queries, roped dims last.
        cache: [P, R, ROW] in any format of `write_mla_cache` (with any scales that the format can hold), or plain rows
            of q's dtype; any page size, any page stride. kv[:, None] turns flat rows into pages of one entry.
        slots: [T, K] int32, page · R + offset: places in the pool, not positions in a request, which `map_slots` turns
            into slots. A duplicate counts twice. Entries that no valid slot names are never read, nor are slots at or
            past their row's length.
        lengths: [T] int32, clamped to [0, K], default K.
        sink: [H] float32, a logit in natural units, not scaled; −inf means no sink, +inf gives out = 0.
        extra_cache: [EXTRA_P, EXTRA_R, EXTRA_ROW], a second cache with its own format, page size and slots: V4's
            compressed entries beside its sliding window. Latent and roped dims as in `cache`.
        extra_slots: [T, EXTRA_K] int32, as slots; given if and only if extra_cache is.
        extra_lengths: [T] int32, as lengths.
        cos_sin: [S, E] bfloat16, float16 or float32, for formats whose values hold the roped dims: for each position
            E / 2 cosines, then E / 2 sines. Requests V4's inverse rope: the last E dims of out are rotated back by the
            angles of the token's position, (a, b) → (a·cos + b·sin, b·cos − a·sin) for each pair of neighbouring dims.
        positions: [T] int32, rows of cos_sin, given if and only if cos_sin is. A position outside [0, S) leaves its
            token's dims unrotated.
        rows: [P, R, L+E], dtype of q, beside packed entries, to differentiate the call: what each of them was quantised
            from. Never read: results are those of the stored bits. The gradient of an entry is that of its row, as if
            the one were the other (a straight-through estimator). Plain rows have a gradient themselves.
        extra_rows: [EXTRA_P, EXTRA_R, L+E], as rows, of extra_cache.
        softmax_scale: Factor of q · k, natural base.
        cache_format, extra_cache_format: As in `write_mla_cache`. Default: inferred from ROW and dtype.
        empty_lse: "-inf" or "+inf", the lse of a row without valid keys; "+inf" is FlashMLA's.
        lse_base: "e", or "2" for base-2 logarithms.
        lse_sink: Whether the lse's sum includes exp(sink[h]), as in FlashInfer's sparse kernels on SM12x. The lse of a
            row without valid keys is then the sink.
        batch_invariant: Give each row the same bits whatever other rows are in the call and whatever heads are computed
            beside it, for instance when ranks share the heads; slower. A row's keys are then split by K and EXTRA_K
            alone, over the tile of 128 heads: given lengths change no bits, beside slots of −1 behind them.
        deterministic: Whether a derivative of this call has the same bits in every run; the results have in any case.
            False adds an entry's n summands to a float32 as they come, which is faster. The gradients of caches then
            differ from run to run and between the front-ends; those of q and sink do not.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        out: [T, H, 512], dtype of q; 0 for a row without valid keys.
        lse: [T, H] float32.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; one of extra_cache and extra_slots, or of
            cos_sin and positions, is given without the other. Or ROW is 528, 368 or 288 bytes and no format is named,
            or rows or extra_rows stand beside no packed entries.
        UnsupportedError: H > 128.

    Plans of compute capability 9.0 and 12.0 dequantise V3.2, V4 and "nvfp4" entries first if they are referenced 32
    times or more on average, T · min(K, P·R) ≥ 32 · P·R. They become rows of q's dtype, in at most 37 bytes of
    workspace per slot. That is not done when extra_cache or batch_invariant is given, nor over V3.2 entries for 16
    heads or fewer on 9.0, or for more on 12.0.

    Numerics: scores and sums are in float32, entries and probabilities are rounded to q's dtype. That is exact for
    quantised entries with power-of-two or e4m3 scales and bfloat16 q. Hopper's Gluon kernel differs in three ways. It
    holds packed entries in float16, relative to the entry's largest scale, for V4 also to 2**-8 of the largest roped
    dim; "nvfp4" ones exactly. With 16 heads or fewer over V3.2's the weights that multiply the entries are held that
    way, not the entries. Either way values 2**-20 smaller than that lose bits. Results over parts of a row's keys are
    rounded to float16 too, relative to the largest of 256 dims, before they are added. Scores and sinks beyond
    ±2.3e38 count as infinite. SM12x's holds the weights of V3.2's, V4's and "nope" entries that way, but for V4's roped
    dims, and results over parts of a row's keys relative to the largest of 128 dims.

    Gradients are products of operands in q's dtype, summed in float32. An entry's is exact to the last bit of a unit
    that a bound of its summands sets. Without `deterministic` it is a sum of n summands x, one for each slot and block
    of 64 heads, within n · (2**−23 · Σ|x| + 2**−126) of the exact one. Either is then rounded to q's dtype.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, cache = jnp.zeros((1, 2, 576), dtype=jnp.bfloat16), jnp.ones((2, 4, 576), dtype=jnp.bfloat16)
        >>> slots = jnp.asarray([[5, -1, 2]], dtype=jnp.int32)
        >>> out, lse = xj.sparse_mla(q, cache, slots, softmax_scale=0.1)
        >>> tuple(out.shape), out[0, 0, :2].tolist()
        ((1, 2, 512), [1.0, 1.0])

    Implementations, best first:
        gluon: compute capability 9.0 or 12.0; one source of 'v32', 'nvfp4' or 'v4' entries, no batch_invariant, of
            'v32' more than 16 heads on 9.0, at most 16 on 12.0; entries that slots name 32 times on average; queries on
            multiples of 16 bytes.
        gluon: compute capability 12.0 or 12.1; 'v32' or 'v4' or 'nope' or 'plain' or 'plain_v4' entries; bfloat16
            queries over packed entries; one source, or two of one format; rows on multiples of 16 bytes.
        gluon: compute capability 9.0; 'v32' or 'v4' or 'nvfp4' or 'plain' or 'plain_v4' entries; bfloat16 queries over
            packed entries; one source, or two of one format but 'v32' or 'nvfp4'; rows on multiples of 16 bytes, or 4
            for queries over packed entries.
        gluon_sm100, by its name alone: compute capability 10.0 or 10.3; 'v32' or 'v4' or 'plain' or 'plain_v4' entries;
            bfloat16 queries over packed entries; one source, or two of one format; rows on multiples of 16 bytes.
        triton: every call.

    Derivative: sparse_mla_backward, of q, cache, sink, extra_cache, rows, extra_rows.
    """
    return _sparse_mla(
        [q, cache, slots, lengths, sink, extra_cache, extra_slots, extra_lengths, cos_sin, positions, rows, extra_rows],
        (
            softmax_scale,
            cache_format,
            extra_cache_format,
            empty_lse,
            lse_base,
            lse_sink,
            batch_invariant,
            deterministic,
        ),
        implementation,
    )


def sparse_mla_paged(
    q: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    indices: jax.Array | np.ndarray,
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    sink: jax.Array | np.ndarray | None = None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "gluon_sm100", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
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
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        out: [T, H, 512], dtype of q; 0 for a row without valid indices.
        lse: [T, H] float32, natural log, −inf for a row without valid indices.

    Raises:
        ArgumentError, UnsupportedError: As the two ops; ROW is 528, 368 or 288 bytes and no `cache_format` is given.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, cache = jnp.zeros((1, 2, 576), dtype=jnp.bfloat16), jnp.ones((2, 4, 576), dtype=jnp.bfloat16)
        >>> indices = jnp.asarray([[4, 0, -1]], dtype=jnp.int32)
        >>> block_table, lengths = jnp.asarray([[1, 0]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> out, lse = xj.sparse_mla_paged(q, cache, indices, block_table, lengths, softmax_scale=0.1)
        >>> out[0, 0, :2].tolist(), round(float(lse[0, 0]), 3)  # ln 2: of two keys alike
        ([1.0, 1.0], 0.693)

    Implementations, best first:
        those of sparse_mla.
    """
    return _sparse_mla_paged(
        [q, cache, indices, block_table, lengths, request_ids, sink],
        (softmax_scale, cache_format, batch_invariant),
        implementation,
    )


def split_batch(
    query_starts: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    has_context: jax.Array | np.ndarray | None = None,
    *,
    num_tokens: int,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a batch into decodes and prefills, and find each token's request and visible keys, on the device.

        n[b]     = query_starts[b+1] − query_starts[b]                              new tokens of request b
        prefill  = n[b] > decode_threshold                                   the default: a short prefill is a decode
                   n[b] ≠ n[0]             if require_uniform, unless every n[b] is n[0] or 0: then all decode
                   or has_context[b] = 0   if given: a new request with a short prompt is a prefill
        split    = first b that is a prefill (0 if n[0] > decode_threshold); all after it are prefills

    Args:
        query_starts: [B+1] int32, the first token of each request and the end of the last, ascending from 0.
        lengths: [B] int32, keys of each request, its new tokens included; 0 for padding requests.
        has_context: [B] int32, 0 if the request has no keys besides those of its new tokens.
        num_tokens: T, all flat tokens, padding included.
        decode_threshold: The most new tokens that a decode has: 1 + speculative tokens.
        require_uniform: All decodes have the same number of new tokens; padding requests may have none.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        counts: [4] int32, the numbers of decodes, prefills, decode tokens, prefill tokens. Padding at the
            end counts as prefill tokens, or as decode tokens if there is no prefill.
        request_ids: [T] int32, the request of each token; −1 after the last request's tokens.
        token_lengths: [T] int32, max(0, lengths[b] − n[b] + 1 + j) for the j-th new token of b; 0 after the last
            request's tokens.

    Raises:
        ArgumentError: A dtype, rank or axis is wrong; num_tokens < 0; decode_threshold < 1.

    The policies are those of vLLM's split_decodes_and_prefills: treat_short_extends_as_decodes is on without
    has_context and off with it. With `request_ids` and `token_lengths` the paged ops serve requests with any numbers
    of new tokens in one call.

    Example:
        >>> query_starts = jnp.asarray([0, 1, 4], dtype=jnp.int32)
        >>> lengths = jnp.asarray([9, 3], dtype=jnp.int32)
        >>> counts, request_ids, token_lengths = xj.split_batch(query_starts, lengths, num_tokens=4)
        >>> counts.tolist(), request_ids.tolist(), token_lengths.tolist()
        ([1, 1, 1, 3], [0, 1, 1, 1], [9, 1, 2, 3])

    Implementations, best first:
        triton: every call.
    """
    return _split_batch(
        [query_starts, lengths, has_context], (num_tokens, decode_threshold, require_uniform), implementation
    )


def window_slots(
    block_table: jax.Array | np.ndarray,
    lengths: jax.Array | np.ndarray,
    request_ids: jax.Array | np.ndarray | None = None,
    *,
    window: int,
    page_size: int,
    ratio: int = 1,
    implementation: Literal["triton", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The slots of the last `window` entries visible to each token, ascending by position.

        n[t]       = min(max(lengths[t], 0) // ratio, M · page_size)                entries visible to token t
        counts[t]  = min(n[t], window)
        slots[t,k] = block_table[request of t, i // page_size] · page_size + i % page_size,  i = n[t] − counts[t] + k
        slots[t,k] = −1                                              for k ≥ counts[t], or where the page id is invalid

    DeepSeek-V4's sliding window is ratio=1, window=128. Its ratio-128 layers attend to all visible entries: ratio=128
    and a window of at least the most entries. The entries that its indexer selects are mapped by `map_slots`.

    Args:
        block_table: [B, M] int32, page ids of a cache with one entry every `ratio` tokens. The slots on a page are −1
            if its id is negative or its slots pass 2**31. Page ids before and after a token's window are never read.
        lengths: [T] int32, tokens visible to each token, itself included, clamped to the table's capacity; a negative
            length counts as 0.
        request_ids: [T] int32, each token's row of block_table; with an id outside [0, B) the token sees nothing.
            Without it T is a multiple of B and every request has T / B adjacent tokens.
        window: The most entries that a token attends to.
        page_size: R, entries per page.
        ratio: Tokens that an entry stands for; an entry that is not complete at the token is not visible.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        slots: [T, window] int32.
        counts: [T] int32, the length of the used prefix of each row: `sparse_mla` takes it as lengths.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; an attribute is < 1; T is not a multiple of B.

    Example:
        >>> block_table, lengths = jnp.asarray([[7, 3]], dtype=jnp.int32), jnp.asarray([5], dtype=jnp.int32)
        >>> slots, counts = xj.window_slots(block_table, lengths, window=2, page_size=4)
        >>> slots.tolist(), counts.tolist()
        ([[31, 12]], [2])

    Implementations, best first:
        triton: every call.
    """
    return _window_slots([block_table, lengths, request_ids], (window, page_size, ratio), implementation)


@overload
def write_indexer_cache(
    keys: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def write_indexer_cache(
    keys: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Ref,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> None: ...
def write_indexer_cache(
    keys: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    *,
    cache_format: str | None = None,
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array | None:
    """Quantise indexer keys and insert them into the paged indexer cache.

        fp8, fp8_ue8m0:  scale = 2 ** max(ceil(log2(max|key| / 448)), -22);     values = e4m3(key / scale)
        mxfp4:           scale = 2 ** max(ceil(log2(max|block| / 6)), -126);    values = e2m1(block / scale)

    Args:
        keys: [T, D] bfloat16, float16 or float32, D = 32, 64 or 128. Normalised, roped, and rotated by a
            Hadamard transform where the queries are.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped. Valid slots must be distinct.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn; ROW is D+4 (fp8) or D/2+4 (mxfp4). Any page size, pages start
            on multiples of 4 bytes. A page holds the values of all R entries and then 4 bytes of scales per entry:
            ROW is the number of bytes per entry, not a stride. fp8: a float32. mxfp4: two dims per byte, the even one
            in the low nibble. One UE8M0 scale byte per block of 32 dims, and 127 in the bytes that D leaves unused.
        cache_format: Default: "fp8" or "mxfp4", which D and ROW imply. "fp8_ue8m0", with D = 128: the scale is four
            equal UE8M0 bytes in the place of the float32, as vLLM has them on Blackwell; where they differ a reader
            takes the key for NaN.
        implementation: As in every op, see `help(xmla.jax_api)`.

    Returns:
        cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    The formats are those of DeepGEMM, vLLM and SGLang. Scale rules: fp8 as DeepSeek-V3.2-Exp's act_quant (amax floored
    at 1e-4, scale rounded up to a power of two); mxfp4 as vLLM's fp4 writer (amax floored at 6 · 2**-126). Rounding: to
    nearest, ties to even, saturating; −0 keeps its sign. NaN stays NaN. mxfp4 has no NaN: a block that contains one
    gets the scale byte 255, which makes the whole block NaN.

    Example:
        >>> keys, slots = jnp.ones((1, 32)), jnp.asarray([5], dtype=jnp.int32)
        >>> cache = jnp.zeros((2, 4, 36), dtype=jnp.uint8)
        >>> cache = xj.write_indexer_cache(keys, slots, cache)
        >>> xj.read_indexer_cache(cache, slots, cache_format="fp8")[1].tolist()
        [0.00390625]

    Implementations, best first:
        triton: every call.
    """
    return _write_indexer_cache([keys, slots, cache], (cache_format,), implementation)


@overload
def write_mla_cache(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray,
    *,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array: ...
@overload
def write_mla_cache(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Ref,
    *,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> None: ...
def write_mla_cache(
    latent: jax.Array | np.ndarray,
    rope: jax.Array | np.ndarray,
    slots: jax.Array | np.ndarray,
    cache: jax.Array | np.ndarray | jax.Ref,
    *,
    cache_format: str | None = None,
    scale_floor: str = "scale",
    implementation: Literal["triton", "reference"] | None = None,
) -> jax.Array | None:
    """Quantise entries and insert them into a paged latent cache.

        scale[g]    = 2 ** max(ceil(log2(max|x[g]| / greatest)), floor)         g: each tile of dims that shares a scale
        cache[slot] = values(x / scale) with scales and roped dims where the format has them

    Args:
        latent: [T, L] bfloat16, float16 or float32: the dims before the roped ones. 512 (V3.2: the latent after its
            RMSNorm), 448 in V4's formats.
        rope: [T, E], any of the same dtypes: the roped dims, 64; 0 in "nope" and "nvfp4_nope".
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped: its token is not written.
            Valid slots must be distinct.
        cache: [P, R, ROW], any page size R, any address and page stride that keep elements aligned. Updated;
            only the entries named by `slots` are touched.
        cache_format: The byte layout of entries (`xmla.core.formats.mla`). Default: inferred from ROW and dtype.
            Packed formats (uint8, int8 or float8_e4m3fn); the greatest value is 448 in e4m3 and 6 in e2m1:
            "v32" 656 B: e4m3, one float32 scale per 128 dims, bfloat16 rope.   "nope" 528 B: the same without rope.
            "v4" 584 B: e4m3, one UE8M0 scale per 64 dims, bfloat16 rope; scales in the page's footer.
            "v41" 528 B: 512 e4m3, roped dims included, then the entry's 16 UE8M0 scales, one per 32 dims.
            "v41_fp4" 288 B: 512 e2m1, roped dims included, then the entry's 32 e4m3 scales, one per 16 dims: V4.1's
            compressed cache.
            "v41_footer", "v41_fp4_footer": the same two before V4.1's release, with scales in the page's footer.
            "nvfp4" 352 B: e2m1, one e4m3 scale per 16 dims, e4m3 rope.   "nvfp4_bf16" 432 B: the same, bfloat16 rope.
            "nvfp4_fp8" 368 B: the same, e4m3 rope with a float32 scale, max|rope| / 448.
            "nvfp4_scaled" 368 B: the same, latent dims are first divided by a float32, max|latent| / 2688.
            "nvfp4_nope" 304 B: as "nvfp4_scaled", without rope.
            "v4_nvfp4" 384 B: V4's dims, e2m1, one e4m3 scale per 16 dims in the page's footer, bfloat16 rope.
            "v4_mxfp4" 368 B: V4's dims, e2m1, one UE8M0 scale per 32 dims behind them, bfloat16 rope.
            Plain rows of bfloat16 or float16: "plain" 576, "plain_v4" 512 elements.
        scale_floor: "scale": no scale is below 2**-13 (FlashMLA's writer). "amax": no scale is below the scale of a
            tile whose largest magnitude is 1e-4 (vLLM's writer). e4m3 scales have one floor, 2**-9.
        implementation: As in every op, see `help(xmla.jax_api)`.

    e4m3 scales are max|x[g]| / 6, at most 448, rounded to e4m3: up in "nvfp4", so that no
    value is larger than 6 scales, elsewhere to nearest (FlashMLA, vLLM, FlashInfer).

    Returns:
        cache: The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is
            updated in place and not returned.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; ROW is 528, 368 or 288 bytes and no
            `cache_format` is given.

    Rounding: to nearest even, saturating. NaN stays NaN; e2m1 has no NaN, so there it makes its tile's scale NaN.
    "v32", "v4", "v41" and "v41_fp4" have the bytes that FlashMLA's writers store (README of FlashMLA, KV cache format;
    tests/quant.py; V4.1 as of 2026-09-30), except in a tile that holds a NaN or an infinity.

    Example:
        >>> latent, rope, slots = jnp.ones((1, 512)), jnp.zeros((1, 64)), jnp.asarray([5], dtype=jnp.int32)
        >>> cache = jnp.zeros((2, 4, 656), dtype=jnp.uint8)
        >>> cache = xj.write_mla_cache(latent, rope, slots, cache)
        >>> xj.read_mla_cache(cache, slots)[0, :2].tolist()
        [1.0, 1.0]

    Implementations, best first:
        triton: every call.
    """
    return _write_mla_cache([latent, rope, slots, cache], (cache_format, scale_floor), implementation)


__all__ = [
    "compress_kv",
    "compress_rows",
    "convert_mla_cache",
    "dsa_attention",
    "dsa_step",
    "expand_blocks",
    "indexer_block_topk",
    "indexer_block_topk_paged",
    "indexer_blocks",
    "indexer_blocks_paged",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_loss",
    "indexer_scores",
    "indexer_target",
    "indexer_topk",
    "indexer_topk_paged",
    "map_slots",
    "merge_attention",
    "merge_topk",
    "pool_keys",
    "quantize_indexer_query",
    "read_indexer_cache",
    "read_mla_cache",
    "resolve_slots",
    "select_topk",
    "sparse_mla",
    "sparse_mla_paged",
    "split_batch",
    "window_slots",
    "write_indexer_cache",
    "write_mla_cache",
]
