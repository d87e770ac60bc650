"""The derivative of attention over plain rows, in Triton: what every plan launches, and products for any architecture.

In a call's order (stages.py); those of entries once for each source:

    count_references_kernel     a token: how many slots name each entry
    start_sums_kernel           some entries: their norms; sums and bounds start at 0
    bound_values_kernel         a token: the largest norm among its entries
    prepare_kernel              some heads of a token: the softmax's denominator, dout · out, bounds of summands
    bound_sums_kernel           a token: of each of its entries the greatest bound of a summand
    ── all tokens have ended: the unit of each entry's sums is known ──
    sparse_mla_dq_kernel        a tile of heads of a token: dq                     (on Hopper, in gluon_sm90, over slots
    sparse_mla_dcache_kernel    a tile of a token's entries: their summands         in order: one kernel, or for few
                                                                                    heads two)
    ── all summands are added ──
    round_sums_kernel           some entries: the sums, rounded to dcache
    sum_sinks_kernel            a head: dsink

In any order nothing is counted or bounded: `clear_sums_kernel`, `prepare_kernel`, the products with
`sparse_mla_dcache_any_order_kernel`, then `store_sums_kernel`.

Before all that, packed entries that slots name become rows in the workspace: `count_references_kernel`, then
`unpack_references_kernel`.
"""

import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, entry_offsets, load_entries, store_entries
from xmla.core.lang.numbers import LOG2E, power_of_two
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import keys_of, load_slots
from xmla.core.lang.sums import SUM_WORDS, SUMMAND_BITS, as_sums, exponent_within, low_bits, parts_of
from xmla.core.ops.attention.sparse_mla.kernels import unpack_entries

NOT_A_NUMBER = tl.constexpr(-1)  # in place of the references of an entry whose gradient is NaN
MOST_PROBABLE = tl.constexpr(1.5)  # what exceeds it is the probability of another call
WORDS = tl.constexpr(SUM_WORDS)


@triton.jit
def count_references_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    num_slots,
    num_keys,  # K
    slot_stride,
    references_ptr,  # [P, R] i32, of slots that name the entry; 0 before
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
    for first in tl.range(0, num_keys, BLOCK):
        slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
        tl.atomic_add(references_ptr + slot, tl.full([BLOCK], 1, tl.int32), mask=ok, sem="relaxed")


@triton.jit
def unpack_references_kernel(
    references_ptr,  # [P, R] i32
    cache_ptr,  # [P, R, ROW]
    num_slots,
    entries_ptr,  # [P, R, L+E], where a slot names the entry
    C: tl.constexpr,  # PackedEntries
):
    slot = offset_of(tl.program_id(0), C.BLOCK) + tl.arange(0, C.BLOCK)
    named = tl.load(references_ptr + slot, mask=slot < num_slots, other=0) != 0
    unpack_entries(cache_ptr, slot, named, entries_ptr, C)


@triton.jit
def norm(x):
    """Euclidean norms of rows [N, D]; squares do not overflow."""
    greatest = tl.max(tl.abs(x), 1)
    unit = tl.where((greatest > 0.0) & (greatest < float("inf")), greatest, 1.0)
    scaled = x / unit[:, None]
    return tl.sqrt(tl.sum(scaled * scaled, 1)) * unit


@triton.jit
def start_sums_kernel(
    cache_ptr,  # [P, R, ROW]
    references_ptr,  # [P, R] i32
    num_slots,
    num_touched,  # entries whose sums are started without references, too
    bounds_ptr,  # [P, R] i32, the bits of a bound of summands, of entries with references
    sums_ptr,  # [P, R, WORDS·ROW] i32: low parts, then high parts; of those and of touched ones
    norms_ptr,  # [P, R] f32, of their values
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    ok = slot < num_slots
    touched = ok & (slot < num_touched)
    ok &= tl.load(references_ptr + slot, mask=ok, other=0) != 0
    mask = (ok | touched)[:, None]
    data, scales = entry_offsets(slot, LAYOUT, PAGE_STRIDE, PAGE_SIZE)
    value, _ = load_entries(cache_ptr, data, scales, ok, tl.float32, LAYOUT)
    tl.store(norms_ptr + slot, norm(tl.where(tl.abs(value) < float("inf"), value, 0.0)), mask=ok)
    tl.store(bounds_ptr + slot, tl.zeros([BLOCK], tl.int32), mask=ok)
    row = sums_ptr + offset_of(slot[:, None], WORDS * LAYOUT.dims)
    for part in tl.static_range(WORDS):
        words = row + part * LAYOUT.dims
        tl.store(words + tl.arange(0, LANES)[None, :], tl.zeros([BLOCK, LANES], tl.int32), mask=mask)
        if LAYOUT.tail:
            offs_e = LANES + tl.arange(0, TAIL_LANES)[None, :]
            tl.store(words + offs_e, tl.zeros([BLOCK, TAIL_LANES], tl.int32), mask=mask)


@triton.jit
def bound_values_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    norms_ptr,  # [P, R] f32
    num_slots,
    num_keys,  # K
    slot_stride,
    reach_ptr,  # [T] f32, the greatest norm of a token's values
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
    greatest = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, num_keys, BLOCK):
        slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
        greatest = tl.maximum(greatest, tl.load(norms_ptr + slot, mask=ok, other=0.0))
    tl.store(reach_ptr + token, tl.max(greatest, 0))


@triton.jit
def bound_sums_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    bound_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    slot_stride,
    references_ptr,  # [P, R] i32
    bounds_ptr,  # [P, R] i32
    HEADS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    of_heads = tl.load(bound_ptr + offset_of(token, HEADS) + offs_h, mask=offs_h < HEADS, other=0.0)
    bound = tl.sum(of_heads, 0)  # those up to MOST_PROBABLE, and roundings, fit in 1.75 times SUMMAND_BITS
    finite = bound < float("inf")
    bits = tl.where(finite, bound, 0.0).to(tl.int32, bitcast=True)
    end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
    for first in tl.range(0, num_keys, BLOCK):
        slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
        if not finite:
            tl.store(references_ptr + slot, tl.full([BLOCK], NOT_A_NUMBER, tl.int32), mask=ok)
        ok &= tl.load(bounds_ptr + slot, mask=ok, other=0) < bits  # it only grows
        tl.atomic_max(bounds_ptr + slot, tl.zeros([BLOCK], tl.int32) + bits, mask=ok, sem="relaxed")


@triton.jit
def prepare_kernel(
    q_ptr,  # [T, H, L+E]
    out_ptr,  # [T, H, LANES]
    lse_ptr,  # [T, H] f32
    dout_ptr,  # [T, H, LANES]
    dlse_ptr,  # [T, H] f32 if HAS_DLSE
    sink_ptr,  # [H] f32 if HAS_SINK
    reach_ptr,  # [T] f32 if DETERMINISTIC
    extra_reach_ptr,  # [T] f32 if DETERMINISTIC
    total_ptr,  # [T, H] f32: log2 of the softmax's denominator, NaN for a head that gives its entries NaN
    delta_ptr,  # [T, H] f32: what is subtracted from dout · value
    slope_ptr,  # [T, H] f32 if DETERMINISTIC: a bound of |ds|
    bound_ptr,  # [T, H] f32 if DETERMINISTIC: a bound of a head's summand of a gradient; 0 for a head that gives NaN
    dsinks_ptr,  # [T, H] f32 if HAS_SINK: each token's part of dsink
    C: tl.constexpr,  # Preparation
):
    HEADS: tl.constexpr = C.HEADS
    BLOCK_H: tl.constexpr = C.BLOCK_H
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    offs_h = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = offs_h < HEADS
    mask = head_ok[:, None]
    offs_l = tl.arange(0, LANES)[None, :]
    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T) + offset_of(offs_h[:, None], C.Q_STRIDE_H, HEADS)
    q = tl.abs(tl.load(q_row + offs_l, mask=mask, other=0.0).to(tl.float32))
    greatest_q = tl.max(q, 1)
    finite = tl.sum(q * 0.0, 1) == 0.0  # the greatest of NaN and a number is the number
    if C.TAIL:
        tail = tl.load(q_row + LANES + tl.arange(0, TAIL_LANES)[None, :], mask=mask, other=0.0).to(tl.float32)
        greatest_q = tl.maximum(greatest_q, tl.max(tl.abs(tail), 1))
        finite &= tl.sum(tail * 0.0, 1) == 0.0
    out_row = out_ptr + offset_of(token, C.OUT_STRIDE_T) + offset_of(offs_h[:, None], C.OUT_STRIDE_H, HEADS)
    dout_row = dout_ptr + offset_of(token, C.DOUT_STRIDE_T) + offset_of(offs_h[:, None], C.DOUT_STRIDE_H, HEADS)
    out = tl.load(out_row + offs_l, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_row + offs_l, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    size = tl.sum(tl.abs(out), 1)  # 0 without keys: there dout does not matter, whatever it is

    lse = tl.load(lse_ptr + offset_of(token, C.LSE_STRIDE) + offs_h, mask=head_ok, other=0.0) * C.LSE_UNIT
    total = lse
    if not C.LSE_SINK:  # −inf or +inf is a row without keys
        total = tl.where(tl.abs(lse) == float("inf"), float("-inf"), lse)
    dlse = tl.zeros([BLOCK_H], tl.float32)
    if C.HAS_DLSE:
        dlse = tl.load(dlse_ptr + offset_of(token, C.DLSE_STRIDE) + offs_h, mask=head_ok, other=0.0)
        dlse *= LOG2E / C.LSE_UNIT
    if C.DETERMINISTIC:
        reach = tl.maximum(tl.load(reach_ptr + token), tl.load(extra_reach_ptr + token))
        slope = norm(dout) * reach + tl.abs(delta) + tl.abs(dlse)
    else:  # only whether all is finite: nothing is bounded
        slope = tl.abs(delta) + tl.abs(dlse)
    slope = tl.abs(slope * C.SCALE)  # a negative scale bounds as much as a positive one
    bound = slope * greatest_q + tl.max(tl.abs(dout), 1)
    row = offset_of(token, HEADS) + offs_h
    if C.HAS_SINK:
        sink = tl.load(sink_ptr + offs_h, mask=head_ok, other=0.0) * LOG2E
        if not C.LSE_SINK:
            base = tl.maximum(total, sink)
            base = tl.where(tl.abs(base) == float("inf"), 0.0, base)
            total = base + tl.log2(tl.exp2(total - base) + tl.exp2(sink - base))
        weight = tl.where(sink == total, 1.0, tl.exp2(sink - total))
        weight = tl.where(sink == float("-inf"), 0.0, weight)
        moved = tl.where(size == 0.0, 0.0, delta)
        if C.LSE_SINK:
            moved -= dlse
        tl.store(dsinks_ptr + row, -weight * moved, mask=head_ok)
    if C.LSE_SINK or not C.HAS_SINK:  # the derivative of lse is the probability, as in out
        delta -= dlse
    finite &= bound < float("inf")
    tl.store(total_ptr + row, tl.where(finite, total, float("nan")), mask=head_ok)
    tl.store(delta_ptr + row, delta, mask=head_ok)
    if C.DETERMINISTIC:
        tl.store(slope_ptr + row, slope, mask=head_ok)
        tl.store(bound_ptr + row, tl.where(finite, bound, 0.0), mask=head_ok)


@triton.jit
def head_rows(ptr, token, offs_h, STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, HEADS: tl.constexpr):
    """Pointers to the rows of heads `offs_h`, [BLOCK_H, 1], of an array [T, H, …]."""
    return ptr + offset_of(token, STRIDE_T) + offset_of(offs_h[:, None], STRIDE_H, HEADS)


@triton.jit
def load_dims(rows, ok, FIRST: tl.constexpr, DIMS: tl.constexpr):
    """Dims FIRST … FIRST + DIMS − 1 of rows, [N, DIMS]; 0 where not `ok` [N]."""
    return tl.load(rows + FIRST + tl.arange(0, DIMS)[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def load_rows(total_ptr, delta_ptr, lse_ptr, dlse_ptr, token, offs_h, C: tl.constexpr):
    """Total and delta of heads `offs_h` [BLOCK_H], and if OWN_LSE lse in log2 and its gradient."""
    mask = offs_h < C.HEADS
    row = offset_of(token, C.HEADS) + offs_h
    total = tl.load(total_ptr + row, mask=mask, other=float("inf"))  # a head that is none has no probabilities
    delta = tl.load(delta_ptr + row, mask=mask, other=0.0)
    lse, dlse = total, delta
    if C.OWN_LSE:
        lse = tl.load(lse_ptr + offset_of(token, C.LSE_STRIDE) + offs_h, mask=mask, other=float("inf")) * C.LSE_UNIT
        dlse = tl.load(dlse_ptr + offset_of(token, C.DLSE_STRIDE) + offs_h, mask=mask, other=0.0) * (LOG2E / C.LSE_UNIT)
    return total, delta, lse, dlse


@triton.jit
def derive(scores, dp, total, delta, lse, dlse, C: tl.constexpr):
    """Probabilities, and the gradient of scores q · k, from scores in log2 and dout · value; all broadcast.

    With another call's lse probabilities may be anything: the gradient of such a score is NaN.
    """
    p = tl.exp2(scores - total)
    greatest = p
    ds = p * (dp - delta)
    if C.OWN_LSE:
        own = tl.exp2(scores - lse)
        ds += own * dlse
        greatest = tl.maximum(p, own)
    return p, tl.where(greatest <= MOST_PROBABLE, ds * C.SCALE, float("nan"))


@triton.jit
def exponent_of_ds(slope_ptr, token, offs_h, HEADS: tl.constexpr, dtype: tl.constexpr):
    """|ds · 2**e| of these heads is at most 2**14 for e = this, in float16, whose exponents are few; 0 in bfloat16."""
    if dtype == tl.float16:
        slope = tl.load(slope_ptr + offset_of(token, HEADS) + offs_h, mask=offs_h < HEADS, other=0.0)
        bits = tl.max(tl.where(slope < float("inf"), slope, 0.0), 0).to(tl.int32, bitcast=True)
        return exponent_within(bits, 14)
    else:
        return 0


@triton.jit
def scaled_ds(ds, dtype: tl.constexpr):
    """A tile of ds in `dtype`, and what products of it are multiplied by: in float16 by the tile's greatest."""
    if dtype == tl.float16:
        bits = tl.where(tl.abs(ds) < float("inf"), tl.abs(ds), 0.0).to(tl.int32, bitcast=True)
        exponent = exponent_within(tl.max(tl.max(bits, 1), 0), 14)
        return (ds * power_of_two(exponent)).to(dtype), power_of_two(-exponent)
    else:
        return ds.to(dtype), 1.0


@triton.jit
def add_dq(
    dq, dq_tail, q, q_tail, dout, total, delta, lse, dlse, ds_up, cache_ptr, slots_ptr, end, num_slots,
    PAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add the entries of the first `end` slots to dq of a tile of heads, times what ds is multiplied by."""
    LAYOUT: tl.constexpr = PAGES.LAYOUT
    BLOCK_N: tl.constexpr = C.BLOCK_N
    for first in tl.range(0, tl.maximum(end, 0), BLOCK_N, disable_licm=True):
        offs_n = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + offs_n, mask=offs_n < end, other=-1)
        ok = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        data, scales = entry_offsets(slot, LAYOUT, PAGES.PAGE_STRIDE, PAGES.PAGE_SIZE)
        value, tail = load_entries(cache_ptr, data, scales, ok, q.dtype, LAYOUT)
        scores = tl.dot(q, tl.trans(value))  # [BLOCK_H, BLOCK_N] f32
        if LAYOUT.tail:
            scores = tl.dot(q_tail, tl.trans(tail), scores)
        dp = tl.dot(dout, tl.trans(value))
        _, ds = derive(scores * (C.SCALE * LOG2E), dp, total[:, None], delta[:, None], lse[:, None], dlse[:, None], C)
        if C.DETERMINISTIC or q.dtype == tl.bfloat16:
            ds = (tl.where(ok[None, :], ds, 0.0) * ds_up).to(q.dtype)
            dq = tl.dot(ds, value, dq)
            if LAYOUT.tail:
                dq_tail = tl.dot(ds, tail, dq_tail)
        else:
            ds, ds_down = scaled_ds(tl.where(ok[None, :], ds, 0.0), q.dtype)
            dq += tl.dot(ds, value) * ds_down
            if LAYOUT.tail:
                dq_tail += tl.dot(ds, tail) * ds_down
    return dq, dq_tail


@triton.jit
def sparse_mla_dq_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    dout_ptr,  # [T, H, LANES]
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    extra_cache_ptr,  # [EXTRA_P, EXTRA_R, EXTRA_ROW] if EXTRA
    extra_slots_ptr,  # [T, EXTRA_K] i32 if EXTRA
    extra_lengths_ptr,  # [T] i32 if EXTRA.HAS_LENGTHS
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    slope_ptr,  # [T, H] f32 if DETERMINISTIC
    num_slots,
    num_keys,  # K
    num_extra_slots,
    num_extra_keys,  # EXTRA_K
    dq_ptr,  # [T, H, L+E]
    C: tl.constexpr,  # QueryProducts
):
    LAYOUT: tl.constexpr = C.LAYOUT
    HEADS: tl.constexpr = C.HEADS
    BLOCK_H: tl.constexpr = C.BLOCK_H
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    offs_h = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = offs_h < HEADS
    q_rows = head_rows(q_ptr, token, offs_h, C.Q_STRIDE_T, C.Q_STRIDE_H, HEADS)
    q = load_dims(q_rows, head_ok, 0, LANES)
    q_tail = load_dims(q_rows, head_ok, LANES, TAIL_LANES) if LAYOUT.tail else q
    dout = load_dims(head_rows(dout_ptr, token, offs_h, C.DOUT_STRIDE_T, C.DOUT_STRIDE_H, HEADS), head_ok, 0, LANES)
    total, delta, lse, dlse = load_rows(total_ptr, delta_ptr, lse_ptr, dlse_ptr, token, offs_h, C)
    exponent = 0
    if C.DETERMINISTIC:
        exponent = exponent_of_ds(slope_ptr, token, offs_h, HEADS, q.dtype)
    ds_up = power_of_two(exponent)
    end = keys_of(lengths_ptr, token, num_keys, C.SOURCE.HAS_LENGTHS)
    dq = tl.zeros([BLOCK_H, LANES], tl.float32)
    dq_tail = tl.zeros([BLOCK_H, TAIL_LANES], tl.float32)
    dq, dq_tail = add_dq(
        dq, dq_tail, q, q_tail, dout, total, delta, lse, dlse, ds_up, cache_ptr,
        slots_ptr + offset_of(token, C.SLOT_STRIDE), end, num_slots, C.SOURCE, C,
    )  # fmt: skip
    if C.EXTRA is not None:
        extra_end = num_extra_keys
        if C.EXTRA.HAS_LENGTHS:
            extra_end = tl.minimum(tl.load(extra_lengths_ptr + token), num_extra_keys)
        dq, dq_tail = add_dq(
            dq, dq_tail, q, q_tail, dout, total, delta, lse, dlse, ds_up, extra_cache_ptr,
            extra_slots_ptr + offset_of(token, C.EXTRA_SLOT_STRIDE), extra_end, num_extra_slots, C.EXTRA, C,
        )  # fmt: skip
    ds_down = power_of_two(-exponent)
    row = dq_ptr + offset_of((offset_of(token, HEADS) + offs_h)[:, None], LAYOUT.dims)
    mask = (offs_h < HEADS)[:, None]
    tl.store(row + tl.arange(0, LANES)[None, :], (dq * ds_down).to(q.dtype), mask=mask)
    if LAYOUT.tail:
        tl.store(row + LANES + tl.arange(0, TAIL_LANES)[None, :], (dq_tail * ds_down).to(q.dtype), mask=mask)


@triton.jit
def add_to_sums(row, offs_d, x, bits, mask, DIMS: tl.constexpr):
    """Add x [N, D], rounded to integers, to the sums at dims `offs_d`; the high parts of those that have one."""
    low, high = parts_of(tl.floor(x + 0.5).to(tl.int32), bits)
    tl.atomic_add(row + offs_d, low, mask=mask, sem="relaxed")
    tl.atomic_add(as_sums(row + DIMS) + offs_d, high.to(tl.int64), mask=mask & (high != 0), sem="relaxed")


@triton.jit
def load_sums(row, offs_d, bits, mask, DIMS: tl.constexpr, PAIRED: tl.constexpr):
    """The sums at dims `offs_d`, [N, D] f32.

    PAIRED: low words of dims d and d + 8 of 16 are neighbours, and summands were added to both at once, in 64 bits: the
    second word lacks 1 if the first is negative.
    """
    if PAIRED:
        first = row + (offs_d // 16 * 16 + offs_d % 8 * 2)
        low = tl.load(first, mask=mask, other=0)
        second = tl.load(first + 1, mask=mask, other=0) + (low < 0).to(tl.int32)
        low = tl.where(offs_d % 16 < 8, low, second)
    else:
        low = tl.load(row + offs_d, mask=mask, other=0)
    high = tl.load(as_sums(row + DIMS) + offs_d, mask=mask, other=0)
    return ((high << bits.to(tl.int64)) + low).to(tl.float32)


@triton.jit
def differentiate_entries(
    q_ptr, cache_ptr, slots_ptr, dout_ptr, lengths_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, slope_ptr, num_slots,
    num_keys, C: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of a token's entries.

    Returns the slots, which of them are valid, gradients by parts of dims, and of roped dims, and which entries are NaN
    if DETERMINISTIC; else NaN is among the gradients.
    """
    LAYOUT: tl.constexpr = C.LAYOUT
    HEADS: tl.constexpr = C.HEADS
    BLOCK_H: tl.constexpr = C.BLOCK_H
    BLOCK_N: tl.constexpr = C.BLOCK_N
    PART: tl.constexpr = C.PART
    # Tiles of keys of one token are neighbours: they read the same queries.
    tiles = tl.cdiv(num_keys, BLOCK_N)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    offs_n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    end = keys_of(lengths_ptr, token, num_keys, C.SOURCE.HAS_LENGTHS)
    slot = tl.load(slots_ptr + offset_of(token, C.SLOT_STRIDE) + offs_n, mask=offs_n < end, other=-1)
    ok = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
    data, _ = entry_offsets(slot, LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
    entries = cache_ptr + data[:, None]
    # By parts: a warp's operands of all dims at once take more registers than there are.
    values = ()
    for part in tl.static_range(LANES // PART):
        values = values + (load_dims(entries, ok, part * PART, PART),)  # noqa: RUF005  # Triton has no starred ones
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    P_EXPONENT: tl.constexpr = 14 if dtype == tl.float16 else 0
    dvalue = (tl.zeros([BLOCK_N, PART], tl.float32),) * (LANES // PART)
    dtail = tl.zeros([BLOCK_N, TAIL_LANES], tl.float32)
    wrong = tl.zeros([BLOCK_N], tl.int32)
    for first_head in tl.range(0, HEADS, BLOCK_H, disable_licm=True):
        offs_h = first_head + tl.arange(0, BLOCK_H)
        head_ok = offs_h < HEADS
        q_rows = head_rows(q_ptr, token, offs_h, C.Q_STRIDE_T, C.Q_STRIDE_H, HEADS)
        dout_rows = head_rows(dout_ptr, token, offs_h, C.DOUT_STRIDE_T, C.DOUT_STRIDE_H, HEADS)
        total, delta, lse, dlse = load_rows(total_ptr, delta_ptr, lse_ptr, dlse_ptr, token, offs_h, C)
        exponent = 0
        if C.DETERMINISTIC:
            exponent = exponent_of_ds(slope_ptr, token, offs_h, HEADS, dtype)
        ds_up, ds_down = power_of_two(exponent), power_of_two(-exponent)
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        dp = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for part in tl.static_range(LANES // PART):
            value = tl.trans(values[part])
            scores = tl.dot(load_dims(q_rows, head_ok, part * PART, PART), value, scores)
            dp = tl.dot(load_dims(dout_rows, head_ok, part * PART, PART), value, dp)
        if LAYOUT.tail:
            q_tail = load_dims(q_rows, head_ok, LANES, TAIL_LANES)
            scores = tl.dot(q_tail, tl.trans(load_dims(entries, ok, LANES, TAIL_LANES)), scores)
        p, ds = derive(scores * (C.SCALE * LOG2E), dp, total[:, None], delta[:, None], lse[:, None], dlse[:, None], C)
        if C.DETERMINISTIC:
            wrong |= tl.max(tl.where(tl.abs(ds) < float("inf"), 0, 1), 0)
            ds = (ds * ds_up).to(dtype)
        else:  # NaN, and infinities times 0, are NaN in all dims
            ds, ds_down = scaled_ds(tl.where(tl.abs(ds) < float("inf"), ds, float("nan")), dtype)
        p = tl.trans((p * 2.0**P_EXPONENT).to(dtype))
        ds = tl.trans(ds)
        added = ()
        for part in tl.static_range(LANES // PART):
            q = load_dims(q_rows, head_ok, part * PART, PART)
            dout = load_dims(dout_rows, head_ok, part * PART, PART)
            if P_EXPONENT:
                of_both = dvalue[part] + tl.dot(ds, q) * ds_down + tl.dot(p, dout) * 2.0**-P_EXPONENT
            else:
                of_both = tl.dot(p, dout, tl.dot(ds, q, dvalue[part]))
            added = added + (of_both,)  # noqa: RUF005  # Triton has no starred expressions
        dvalue = added
        if LAYOUT.tail:
            dtail += tl.dot(ds, load_dims(q_rows, head_ok, LANES, TAIL_LANES)) * ds_down
    return slot, ok, dvalue, dtail, wrong


@triton.jit
def sparse_mla_dcache_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    dout_ptr,  # [T, H, LANES]
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    bounds_ptr,  # [P, R] i32
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    slope_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    references_ptr,  # [P, R] i32
    sums_ptr,  # [P, R, WORDS·ROW] i32
    C: tl.constexpr,  # EntryProducts
):
    LAYOUT: tl.constexpr = C.LAYOUT
    PART: tl.constexpr = C.PART
    BLOCK_N: tl.constexpr = C.BLOCK_N
    slot, ok, dvalue, dtail, wrong = differentiate_entries(
        q_ptr, cache_ptr, slots_ptr, dout_ptr, lengths_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, slope_ptr,
        num_slots, num_keys, C,
    )  # fmt: skip
    unit = power_of_two(exponent_within(tl.load(bounds_ptr + slot, mask=ok, other=0), SUMMAND_BITS))[:, None]
    # Another program may have stored NOT_A_NUMBER there; then what is added does not matter.
    bits = low_bits(tl.load(references_ptr + slot, mask=ok, other=1))[:, None]
    row = sums_ptr + offset_of(slot[:, None], WORDS * LAYOUT.dims)
    right = (ok & (wrong == 0))[:, None]
    for part in tl.static_range(LANES // PART):
        add_to_sums(row, part * PART + tl.arange(0, PART)[None, :], dvalue[part] * unit, bits, right, LAYOUT.dims)
    if LAYOUT.tail:
        add_to_sums(row, LANES + tl.arange(0, TAIL_LANES)[None, :], dtail * unit, bits, right, LAYOUT.dims)
    tl.store(references_ptr + slot, tl.full([BLOCK_N], NOT_A_NUMBER, tl.int32), mask=ok & (wrong != 0))


@triton.jit
def sparse_mla_dcache_any_order_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    dout_ptr,  # [T, H, LANES]
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    sums_ptr,  # [P, R, ROW] f32
    C: tl.constexpr,  # EntryProducts
):
    LAYOUT: tl.constexpr = C.LAYOUT
    PART: tl.constexpr = C.PART
    slot, ok, dvalue, dtail, _ = differentiate_entries(
        q_ptr, cache_ptr, slots_ptr, dout_ptr, lengths_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, delta_ptr,
        num_slots, num_keys, C,
    )  # fmt: skip
    row = sums_ptr + offset_of(slot[:, None], LAYOUT.dims)
    for part in tl.static_range(LANES // PART):
        offs_d = part * PART + tl.arange(0, PART)[None, :]
        tl.atomic_add(row + offs_d, dvalue[part], mask=ok[:, None], sem="relaxed")
    if LAYOUT.tail:
        offs_e = LANES + tl.arange(0, TAIL_LANES)[None, :]
        tl.atomic_add(row + offs_e, dtail, mask=ok[:, None], sem="relaxed")


@triton.jit
def clear_sums_kernel(
    num_slots,
    sums_ptr,  # [P, R, ROW] f32
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK, LANES], tl.float32)
    tail = tl.zeros([BLOCK, TAIL_LANES], tl.float32)
    store_entries(sums_ptr, slot, slot < num_slots, zeros, tail, LAYOUT, LAYOUT.dims, 1, 0)


@triton.jit
def store_sums_kernel(
    sums_ptr,  # [P, R, ROW] f32
    num_slots,
    dcache_ptr,  # [P, R, ROW]
    LAYOUT: tl.constexpr,
    FOURS: tl.constexpr,  # of 16 dims, those that stand together are 2i, 2i + 1, 2i + 8 and 2i + 9
    BLOCK: tl.constexpr,
):
    slot = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    ok = slot < num_slots
    row = sums_ptr + offset_of(slot[:, None], LAYOUT.dims)
    offs_l, offs_e = tl.arange(0, LANES)[None, :], LANES + tl.arange(0, TAIL_LANES)[None, :]
    if FOURS:
        offs_l = offs_l // 16 * 16 + offs_l % 8 // 2 * 4 + offs_l // 8 % 2 * 2 + offs_l % 2
        offs_e = offs_e // 16 * 16 + offs_e % 8 // 2 * 4 + offs_e // 8 % 2 * 2 + offs_e % 2
    value = tl.load(row + offs_l, mask=ok[:, None], other=0.0)
    tail = tl.zeros([BLOCK, TAIL_LANES], tl.float32)
    if LAYOUT.tail:
        tail = tl.load(row + offs_e, mask=ok[:, None], other=0.0)
    store_entries(dcache_ptr, slot, ok, value, tail, LAYOUT, LAYOUT.dims, 1, 0)


@triton.jit
def round_sums_kernel(
    references_ptr,  # [P, R] i32
    sums_ptr,  # [P, R, WORDS·ROW] i32
    bounds_ptr,  # [P, R] i32
    num_slots,
    dcache_ptr,  # [P, R, ROW]
    LAYOUT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ADDITIONS: tl.constexpr,  # to an entry's sums per reference
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DIMS: tl.constexpr = LAYOUT.dims
    slot = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    ok = slot < num_slots
    references = tl.load(references_ptr + slot, mask=ok, other=0)
    mask = (references > 0)[:, None]
    wrong = (references == NOT_A_NUMBER)[:, None]
    bound = tl.load(bounds_ptr + slot, mask=references > 0, other=0)
    unit = power_of_two(-exponent_within(bound, SUMMAND_BITS))[:, None]
    bits = low_bits(tl.maximum(references, 1) * ADDITIONS)[:, None]
    row = sums_ptr + offset_of(slot[:, None], WORDS * DIMS)
    value = load_sums(row, tl.arange(0, LANES)[None, :], bits, mask, DIMS, PAIRED) * unit
    value = tl.where(wrong, float("nan"), value)
    tail = tl.zeros([BLOCK, TAIL_LANES], tl.float32)
    if LAYOUT.tail:
        tail = load_sums(row, LANES + tl.arange(0, TAIL_LANES)[None, :], bits, mask, DIMS, PAIRED) * unit
        tail = tl.where(wrong, float("nan"), tail)
    store_entries(dcache_ptr, slot, ok, value, tail, LAYOUT, PAGE_SIZE * DIMS, PAGE_SIZE, 0)


@triton.jit
def sum_sinks_kernel(
    dsinks_ptr,  # [T, H] f32
    num_tokens,  # T
    dsink_ptr,  # [H] f32
    HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    head = tl.program_id(0)
    total = tl.zeros([BLOCK_T], tl.float32)
    for first in tl.range(0, num_tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total += tl.load(dsinks_ptr + offset_of(token, HEADS) + head, mask=token < num_tokens, other=0.0)
    tl.store(dsink_ptr + head, tl.sum(total, 0))
