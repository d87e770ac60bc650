import numpy as np

from xmla.core.op import Case
from xmla.core.ops.blocks.indexer_block_logits.reference import ranges
from xmla.core.ops.blocks.indexer_block_logits_paged.cases import some_blocks
from xmla.core.ops.blocks.indexer_block_logits_paged.reference import positions_of
from xmla.core.ops.cases import BF16, POISON
from xmla.core.ops.indexer.indexer_logits.cases import make_case


def with_blocks(case: Case, blocks: int, granularity: int, twice: bool = False, **attrs: object) -> Case:
    """A case over contiguous keys with some blocks of each token, each listed `twice`; keys in none of them are NaN."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        first, length = ranges(inputs["starts"], inputs["ends"], len(inputs["keys"]))
        listed = inputs["blocks"] = some_blocks(rng, length, blocks, granularity)
        if twice:
            listed[:, 1::2] = listed[:, : blocks // 2 * 2 : 2]
        position = positions_of(inputs["blocks"], length, granularity)
        unread = np.ones(len(inputs["keys"]), bool)
        unread[(first[:, None] + position)[position >= 0]] = False
        for name in ("keys", "key_scales"):
            inputs[name].view(np.uint8).reshape(len(unread), -1)[unread] = POISON
        return inputs

    name = f"{case.name}-{blocks} of {granularity}{' twice' if twice else ''}"
    return Case(name, make, {"granularity": granularity, **attrs})


CASES = (
    with_blocks(make_case(1, 64, 65), 5, 8),
    with_blocks(make_case(19, 32, 300), 9, 4),
    with_blocks(make_case(5, 3, 129, dim=64), 77, 1),
    with_blocks(make_case(4, 128, 231, dim=32), 2, 64),
    with_blocks(make_case(3, 64, 133, layout="mxfp4"), 6, 8),
    with_blocks(make_case(5, 32, 329, dim=64, layout="mxfp4", dtype=BF16), 1, 128),
    with_blocks(make_case(3, 32, 65), 5, 8, logits_dtype="bfloat16"),
)
