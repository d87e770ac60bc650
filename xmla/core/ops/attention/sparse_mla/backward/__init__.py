from functools import partial
from math import prod
from typing import Any

from xmla.core.call import BYTES, F32, HALVES, INDEX, Problem, Result, Tensor, Work, mla_format
from xmla.core.op import Op
from xmla.core.ops.attention.sparse_mla.backward import plan as portable
from xmla.core.ops.attention.sparse_mla.backward.cases import CASES
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90 import plan as gluon_sm90
from xmla.core.ops.attention.sparse_mla.backward.reference import reference
from xmla.core.ops.attention.sparse_mla.sources import ROWS_OF_SOURCES, check_sources, source_limits
from xmla.core.values import GRADIENT

# All can name one entry, whose summands, one for each slot and block of 64 heads, are counted in 32 bits.
MOST_SLOTS = 2**30


def sparse_mla_backward(
    q, cache, slots, forward_out, forward_lse, dout, dlse=None, lengths=None, sink=None, extra_cache=None,
    extra_slots=None, extra_lengths=None, rows=None, extra_rows=None, *, softmax_scale: float,
    cache_format: str | None = None, extra_cache_format: str | None = None, lse_base: str = "e", lse_sink: bool = False,
    deterministic: bool = True,
) -> Any:  # fmt: skip
    """The derivative of `sparse_mla`, from its arguments, its results and the gradients of these.

        p[h,k]   = exp(s[h,k] − z[h])          s and S[t] as in `sparse_mla`, z = ln (Σ_k exp(s[h,k]) + exp(sink[h]))
        Δ[t,h]   = forward_out[t,h] · dout[t,h]
        ds[h,k]  = p[h,k] · (dout[t,h] · value(k) − Δ[t,h]) + dlse[t,h] · ∂forward_lse[t,h] / ∂s[h,k]
        dq[t,h]  = softmax_scale · Σ_k ds[h,k] · entry(k)                                            k over S[t]
        dentry   = Σ_t Σ_h softmax_scale · ds[h,k] · q[t,h], and on the dims of the value + p[h,k] · dout[t,h]
        dsink[h] = Σ_t −exp(sink[h] − z[h]) · Δ[t,h], and + exp(sink[h] − z[h]) · dlse[t,h] if lse_sink

    The sums over tokens are exact to the last bit of a unit that a bound of the entry's summands sets, so their order
    does not matter: the same arguments give the same bits. Without `deterministic` they are sums of float32 in any
    order. A slot that stands twice counts twice.

    Args:
        q, cache, slots, lengths, sink, extra_cache, extra_slots, extra_lengths, rows, extra_rows: As in `sparse_mla`;
            a cache is of plain rows ("plain", "plain_v4"), or has rows beside it. Entries that no valid slot names are
            never read, nor are rows and extra_rows.
        forward_out, forward_lse: [T, H, 512], dtype of q, and [T, H] float32: that call's results.
        dout: [T, H, 512], dtype of q: the gradient of its out.
        dlse: [T, H] float32: the gradient of its lse; default 0.
        softmax_scale, cache_format, extra_cache_format, lse_base, lse_sink, deterministic: As in that call.

    Returns:
        dq: [T, H, L+E], dtype of q; 0 for a row without valid keys.
        dcache: [P, R, ROW], dtype of cache; 0 for an entry that no valid slot names; [0, 0, 0] of a packed cache.
        dsink: [H] float32; [0] without sink. A head whose forward_out is 0 has Δ = 0 in it, whatever its dout is: so
            has a row without valid keys.
        dextra_cache: [EXTRA_P, EXTRA_R, EXTRA_ROW], as dcache; [0, 0, 0] without extra_cache.
        drows: [P, R, L+E], dtype of q: dentry, as dcache is of plain rows; [0, 0, 0] without rows.
        dextra_rows: [EXTRA_P, EXTRA_R, L+E], as drows.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; one of extra_cache and extra_slots is missing;
            rows or extra_rows are given without packed entries.
        UnsupportedError: A cache is packed and has no rows beside it, to which its entries' gradient would belong. H >
            128. More than 2**30 slots.

    Numerics: packed entries become rows of q's dtype in the workspace first, and gradients have the bits that those
    over these rows have. Products of operands in q's dtype, summed in float32. A summand's bound is B = |softmax_scale|
    · (‖dout[t,h]‖ · max‖value‖ + |Δ| + |dlse|) · max|q[t,h]| + max|dout[t,h]|, over the values that t attends to. Each
    summand is rounded to a multiple of 2**−29 of the greatest Σ_h B of the tokens that name the entry, or less, or of
    2**−126. An entry's whole gradient is NaN if Σ_h B, what B is computed from, or p of one of its summands is not
    finite in float32. dq[t,h] is NaN if its B, or what that is computed from, is not. Both are NaN if p, or the factor
    exp(softmax_scale · q · row − lse) of dlse, exceeds 1.5, as with another call's lse, or if all scores are −inf.
    Not deterministic, an entry's sum is bounded as in `sparse_mla`, and two runs are within twice that. There is no B:
    a sum that overflows float32 is infinite or NaN, maybe in some dims alone.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, cache = xp.ones((1, 1, 512), dtype=xp.bfloat16), xp.ones((1, 4, 512), dtype=xp.bfloat16)
        >>> slots = xp.asarray([[0, 3]], dtype=xp.int32)
        >>> out, lse = ops.sparse_mla(q, cache, slots, softmax_scale=0.1)
        >>> dq, dcache, *_ = ops.sparse_mla_backward(q, cache, slots, out, lse, out, softmax_scale=0.1)
        >>> dcache[0, :, 0].tolist()
        [0.5, 0.0, 0.0, 0.5]
    """


def check(problem: Problem) -> None:
    for cache, layout in problem.formats.items():
        rows = cache.replace("cache", "rows")
        if layout.packed and not problem.has(rows):
            supported = f"derivatives over plain rows, 'plain' or 'plain_v4', or of {rows} beside the entries"
            problem.unsupported(cache, "format", repr(layout.name), supported)
    check_sources(problem)
    for slots in ("slots", "extra_slots"):
        if problem.has(slots) and prod(problem.specs[slots].shape) > MOST_SLOTS:
            problem.unsupported(slots, "shape", problem.specs[slots].shape, f"at most {MOST_SLOTS} slots")
    for name in ("forward_out", "dout"):
        if problem.specs[name].dtype != problem.specs["q"].dtype:
            problem.refuse(name, "dtype", problem.specs[name].dtype, f"{problem.specs['q'].dtype}, as q")
        if problem["V"] != 512:
            problem.refuse(name, "axis V (axis 2)", problem["V"], 512)


def work(problem: Problem, keys: float | None) -> Work:
    """Five products: scores again, dout · value, and those of dq, and of an entry's gradient by ds and by p."""
    tokens, heads, dims = problem.specs["q"].shape
    references = tokens * (problem["K"] + (problem["EXTRA_K"] if problem.has("extra_cache") else 0))
    unread = sum(problem.specs[name].nbytes for name in ROWS_OF_SOURCES if problem.has(name))
    return Work(problem.nbytes - unread, bf16_flops=2.0 * references * heads * (3 * dims + 2 * problem["V"]))


def gradient_of(rows: str, axes: str) -> Result:
    """The gradient of plain rows, empty of an argument that is not given, or is packed."""

    def size(problem: Problem, axis: str) -> int:
        layout = problem.formats.get(rows)
        return problem[axis] if problem.has(rows) and (layout is None or not layout.packed) else 0

    sizes = {axis: partial(size, axis=axis) for axis in axes.split()}
    return Result(axes, lambda p: p.specs["q"].dtype, sizes=sizes, agreement=GRADIENT, sum_over="T H")


OP = Op(
    prototype=sparse_mla_backward,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="cache_format"),
        "slots": Tensor("T K", INDEX, index_of="P R"),
        "forward_out": Tensor("T H V", HALVES),
        "forward_lse": Tensor("T H", F32),
        "dout": Tensor("T H V", HALVES),
        "dlse": Tensor("T H", F32),
        "lengths": Tensor("T", INDEX),
        "sink": Tensor("H", F32),
        "extra_cache": Tensor(
            "EXTRA_P EXTRA_R EXTRA_ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="extra_cache_format"
        ),
        "extra_slots": Tensor("T EXTRA_K", INDEX, index_of="EXTRA_P EXTRA_R"),
        "extra_lengths": Tensor("T", INDEX),
        **ROWS_OF_SOURCES,
    },
    outputs={
        "dq": Result("T H L+E", lambda p: p.specs["q"].dtype, agreement=GRADIENT),
        "dcache": gradient_of("cache", "P R ROW"),
        "dsink": Result(
            "H", "float32", sizes={"H": lambda p: p["H"] if p.has("sink") else 0}, agreement=GRADIENT, sum_over="T"
        ),
        "dextra_cache": gradient_of("extra_cache", "EXTRA_P EXTRA_R EXTRA_ROW"),
        "drows": gradient_of("rows", "P R L+E"),
        "dextra_rows": gradient_of("extra_rows", "EXTRA_P EXTRA_R L+E"),
    },
    check=check,
    limits=source_limits,
    work=work,
    implementations=(gluon_sm90.IMPLEMENTATION, portable.IMPLEMENTATION),
    reference=reference,
    cases=CASES,
)
