import numpy as np

from xmla.core.op import Case
from xmla.core.ops.blocks.indexer_block_logits.cases import some_blocks


def _case(rows: int, blocks: int, granularity: int, tail: bool = True) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        lengths = rng.integers(0, 3 * blocks * granularity, rows).astype(np.int32)
        lengths[0] = 5 * granularity  # no tail
        if rows > 3:
            lengths[1:4] = -(2**31), 2**31 - 1, granularity - 1
        return {"blocks": some_blocks(rng, np.minimum(lengths, 10**6), blocks, granularity), "lengths": lengths}

    return Case(f"t{rows}-{blocks} of {granularity}{'-tail' if tail else ''}", make,
                {"granularity": granularity, "tail": tail})  # fmt: skip


CASES = (
    _case(5, 512, 4),
    _case(6, 7, 16),
    _case(7, 9, 8, tail=False),
    _case(4, 3, 128),
    _case(4, 50, 1),
)
