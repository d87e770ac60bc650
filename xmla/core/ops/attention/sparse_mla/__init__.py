from collections.abc import Iterator
from typing import Any

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
    all_but_pools_once,
    mla_format,
)
from xmla.core.op import Op
from xmla.core.ops.attention.sparse_mla import backward, unpack
from xmla.core.ops.attention.sparse_mla import plan as portable
from xmla.core.ops.attention.sparse_mla.cases import CASES
from xmla.core.ops.attention.sparse_mla.gluon_sm90 import plan as gluon_sm90
from xmla.core.ops.attention.sparse_mla.gluon_sm100 import plan as gluon_sm100
from xmla.core.ops.attention.sparse_mla.gluon_sm120 import plan as gluon_sm120
from xmla.core.ops.attention.sparse_mla.reference import reference
from xmla.core.ops.attention.sparse_mla.sources import (
    ATTENTION_RESULTS,
    ROWS_OF_SOURCES,
    attention_work,
    check_sources,
    require_both,
    source_limits,
)


def sparse_mla(
    q, cache, slots, lengths=None, sink=None, extra_cache=None, extra_slots=None, extra_lengths=None, cos_sin=None,
    positions=None, rows=None, extra_rows=None, *, softmax_scale: float, cache_format: str | None = None,
    extra_cache_format: str | None = None, empty_lse: str = "-inf", lse_base: str = "e", lse_sink: bool = False,
    batch_invariant: bool = False, deterministic: bool = True,
) -> Any:  # fmt: skip
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
        >>> q, cache = xp.zeros((1, 2, 576), dtype=xp.bfloat16), xp.ones((2, 4, 576), dtype=xp.bfloat16)
        >>> slots = xp.asarray([[5, -1, 2]], dtype=xp.int32)
        >>> out, lse = ops.sparse_mla(q, cache, slots, softmax_scale=0.1)
        >>> tuple(out.shape), out[0, 0, :2].tolist()
        ((1, 2, 512), [1.0, 1.0])
    """


def check(problem: Problem) -> None:
    layout = check_sources(problem)
    require_both(problem, "cos_sin", "positions")
    if problem.has("cos_sin"):
        if not layout.rope_in_value:
            problem.refuse("cos_sin", "argument", "given", f"none: values of {layout.name!r} hold no roped dims")
        if problem["E"] != layout.rope:
            problem.refuse("cos_sin", "axis E (axis 1)", problem["E"], layout.rope)
    if problem.attrs.empty_lse not in ("-inf", "+inf"):
        problem.refuse("empty_lse", "value", repr(problem.attrs.empty_lse), "'-inf' or '+inf'")


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    yield from source_limits(problem, arrays)
    if "positions" in arrays:
        yield Limit("positions", 0, problem["S"] - 1)


def work(problem: Problem, keys: float | None) -> Work:
    work = attention_work(problem, "cache", problem["K"]) + all_but_pools_once(problem)
    return work + attention_work(problem, "extra_cache", problem["EXTRA_K"]) if problem.has("extra_cache") else work


OP = Op(
    prototype=sparse_mla,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="cache_format"),
        "slots": Tensor("T K", INDEX, index_of="P R"),
        "lengths": Tensor("T", INDEX),
        "sink": Tensor("H", F32),
        "extra_cache": Tensor(
            "EXTRA_P EXTRA_R EXTRA_ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="extra_cache_format"
        ),
        "extra_slots": Tensor("T EXTRA_K", INDEX, index_of="EXTRA_P EXTRA_R"),
        "extra_lengths": Tensor("T", INDEX),
        "cos_sin": Tensor("S E", FLOATS),
        "positions": Tensor("T", INDEX, index_of="S"),
        **ROWS_OF_SOURCES,
    },
    outputs=ATTENTION_RESULTS,
    check=check,
    limits=limits,
    work=work,
    implementations=(
        unpack.IMPLEMENTATION,
        gluon_sm120.IMPLEMENTATION,
        gluon_sm90.IMPLEMENTATION,
        gluon_sm100.IMPLEMENTATION,
        portable.IMPLEMENTATION,
    ),
    reference=reference,
    cases=CASES,
    derivative=backward.OP,
)
