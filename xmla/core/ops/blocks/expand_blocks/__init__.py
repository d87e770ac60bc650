from collections.abc import Iterator
from typing import Any

from xmla.core.call import INDEX, Arrays, Limit, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.blocks.expand_blocks.cases import CASES
from xmla.core.ops.blocks.expand_blocks.plan import plan
from xmla.core.ops.blocks.expand_blocks.reference import reference
from xmla.core.ops.blocks.shared import check_granularity, expanded_columns
from xmla.core.plan import Implementation


def expand_blocks(blocks, lengths, *, granularity: int, tail: bool = True) -> Any:
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

    Returns:
        indices: [T, BLOCKS · g + (g − 1 with tail)] int32, positions within the request. `map_slots` maps them to
            slots, and with `compact` lists the valid ones first.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; granularity is out of range.

    GLM-5.3-Flash attends to the tokens of 2048 / index_kpool pools and to the tail: 2051 columns with pools of 4.

    Example:
        >>> blocks, lengths = xp.asarray([[1, -1]], dtype=xp.int32), xp.asarray([9], dtype=xp.int32)
        >>> ops.expand_blocks(blocks, lengths, granularity=4).tolist()
        [[4, 5, 6, 7, -1, -1, -1, -1, 8, -1, -1]]
    """


def limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    yield Limit("lengths", 0, 2**31 - 1)
    yield Limit("blocks", -1, (2**31 - 1) // problem.attrs.granularity)


OP = Op(
    prototype=expand_blocks,
    tensors={"blocks": Tensor("T BLOCKS", INDEX), "lengths": Tensor("T", INDEX)},
    outputs={"indices": Result("T ENTRIES", "int32", sizes={"ENTRIES": expanded_columns})},
    check=check_granularity,
    limits=limits,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
