from collections.abc import Iterator
from typing import Any

from xmla.core.call import Arrays, Limit, Problem, Result
from xmla.core.op import Op
from xmla.core.ops.blocks.indexer_block_logits.cases import CASES
from xmla.core.ops.blocks.indexer_block_logits.gluon_sm90.plan import IMPLEMENTATION as GLUON_SM90
from xmla.core.ops.blocks.indexer_block_logits.plan import plan
from xmla.core.ops.blocks.indexer_block_logits.reference import reference
from xmla.core.ops.blocks.shared import BLOCKS, block_logits_work, capacity_of, check_granularity, entries_of
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.key_source import source_of
from xmla.core.ops.indexer.shared import check_keys, check_logits_dtype, logits_of
from xmla.core.plan import Implementation


def indexer_block_logits(
    q8, weights, keys, key_scales, starts, ends, blocks, *, granularity: int, logits_dtype: str = "float32"
) -> Any:  # fmt: skip
    """Lightning-indexer logits of the keys in each token's selected blocks alone, over contiguous keys (prefill).

        logits[t,c] = logit of t and key starts[t] + n as in `indexer_logits`,  n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                          where there is no such block or starts[t] + n ≥ ends[t]
        widths[t]   = 1 + the last column c with a key, 0 if there is none                          g = granularity

    Time follows the blocks, not the context: keys in no block are never read.

    Args:
        q8, weights, keys, key_scales, starts, ends, blocks, granularity: As in `indexer_block_topk`.
        logits_dtype: "float32", or "bfloat16" for float32 logits that are rounded when they are written: half of the
            memory and of its traffic, and logits that differ by less than 2**-7 of their size may tie.

    Returns:
        logits: [T, BLOCKS · g] in logits_dtype, every element written.
        widths: [T] int32: `select_topk` takes it as `ends`. With blocks in ascending order every column below it has a
            key.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong.
        UnsupportedError: I > 128.

    Numerics as in `indexer_logits`; on Hopper the bits are those of the logits over all keys.
    Bits may differ between arrays whose first addresses differ modulo 16 bytes.
    DeepGEMM's fp8_fp4_sparse_mqa_logits is the same function.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 3, 32)), xp.ones((1, 3)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # three keys of ones
        >>> starts, ends = xp.asarray([0], dtype=xp.int32), xp.asarray([3], dtype=xp.int32)
        >>> blocks = xp.asarray([[1]], dtype=xp.int32)  # key 2
        >>> logits, widths = ops.indexer_block_logits(
        ...     q8, weights, keys, key_scales, starts, ends, blocks, granularity=2
        ... )
        >>> logits.tolist(), widths.tolist()
        ([[96.0, -inf]], [1])
    """


def check_blocks(problem: Problem) -> None:
    check_keys(problem)
    check_granularity(problem)


def check(problem: Problem) -> None:
    check_blocks(problem)
    check_logits_dtype(problem)


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    yield from source_of(problem.specs).logits.limits(problem, arrays)
    yield Limit("blocks", -1, -(-capacity_of(problem) // problem.attrs.granularity) - 1)


OP = Op(
    prototype=indexer_block_logits,
    tensors=dict(indexer_logits.OP.tensors) | {"blocks": BLOCKS},
    outputs={
        "logits": logits_of("T ENTRIES", sizes={"ENTRIES": entries_of}),
        "widths": Result("T", "int32"),
    },
    check=check,
    limits=limits,
    work=block_logits_work,
    implementations=(GLUON_SM90, Implementation("triton", plan)),
    reference=reference,
    cases=CASES,
    instead="indexer_block_topk",
)
