from collections.abc import Callable, Mapping
from typing import Any

from xmla.core.call import BYTES, F32, INDEX, Problem, Tensor
from xmla.core.op import Op
from xmla.core.ops.indexer.indexer_logits import plan as portable
from xmla.core.ops.indexer.indexer_logits.cases import CASES
from xmla.core.ops.indexer.indexer_logits.gluon_sm90 import plan as gluon_sm90
from xmla.core.ops.indexer.indexer_logits.reference import reference
from xmla.core.ops.indexer.shared import QUERY, check_keys, check_logits_dtype, logits_of, logits_work
from xmla.core.values import Attributes, Device


def indexer_logits(q8, weights, keys, key_scales, starts, ends, *, logits_dtype: str = "float32") -> Any:
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
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # two keys of ones
        >>> starts, ends = xp.asarray([0], dtype=xp.int32), xp.asarray([1], dtype=xp.int32)
        >>> ops.indexer_logits(q8, weights, keys, key_scales, starts, ends).tolist()
        [[64.0, -inf]]
    """


def check(problem: Problem) -> None:
    check_keys(problem)
    check_logits_dtype(problem)


def tokens_a_program(problem: Problem, device: Device) -> int:
    """Tokens per program: a call with one more token may cost as much as a call with this many more."""
    implementation, _ = OP.choose(problem, device)
    if implementation.tokens_a_program is None:
        raise RuntimeError(f"{OP.name}: {implementation.name} does not say how many tokens a program has")
    return implementation.tokens_a_program(problem, device)


def batch(xp: Any, call: Callable[..., Any], arrays: Mapping[str, Any], attrs: Attributes) -> tuple[Any, ...]:
    """Batched calls with separate keys: each call's keys become its only page, all values and then all scales.

    Folded into one array of keys, each row would get the logits of every call's keys.
    """
    keys, scales = arrays["keys"], arrays["key_scales"]
    size, count = keys.shape[:2]
    tokens = arrays["q8"].shape[1]
    page = xp.concatenate([x.view(xp.uint8).reshape(size, -1) for x in (keys, scales)], axis=1)
    flat = {name: arrays[name].reshape(size * tokens, *arrays[name].shape[2:]) for name in ("q8", "weights", "ends")}
    (logits,) = call(
        "indexer_logits_paged",
        {
            "q8": flat["q8"],
            "weights": flat["weights"],
            "cache": page.reshape(size, count, -1),
            "block_table": xp.arange(size, dtype=xp.int32)[:, None],
            "lengths": flat["ends"],
        },
        max_len=count,
        logits_dtype=attrs.logits_dtype,
        cache_format="fp8_ue8m0" if scales.dtype == xp.int32 and keys.shape[2] == flat["q8"].shape[2] else None,
    )
    column = xp.arange(count, dtype=xp.int32)[None, None]
    seen = (column >= arrays["starts"][..., None]) & (column < arrays["ends"][..., None])
    return (xp.where(seen, logits.reshape(size, tokens, count), -xp.inf),)


OP = Op(
    prototype=indexer_logits,
    tensors={
        "q8": QUERY,
        "weights": Tensor("T I", F32),
        "keys": Tensor("N ROW", BYTES, pool=True),
        "key_scales": Tensor("N", ("float32", "int32")),
        "starts": Tensor("T", INDEX, bound_of="N"),
        "ends": Tensor("T", INDEX, bound_of="N"),
    },
    outputs={"logits": logits_of("T N")},
    check=check,
    work=logits_work,
    batch=batch,
    implementations=(gluon_sm90.IMPLEMENTATION, portable.IMPLEMENTATION),
    reference=reference,
    cases=CASES,
)
