import numpy as np

from xmla.core.ops.blocks.indexer_block_logits.reference import positions_of


def reference(blocks: np.ndarray, lengths: np.ndarray, *, granularity: int, tail: bool = True) -> tuple[np.ndarray]:
    """Reference of `expand_blocks`."""
    lengths = np.maximum(lengths, 0).astype(np.int64)
    complete = lengths // granularity * granularity
    indices = positions_of(blocks, complete if tail else lengths, granularity)
    if tail:
        rest = complete[:, None] + np.arange(granularity - 1)
        indices = np.concatenate([indices, np.where(rest < lengths[:, None], rest, -1)], axis=1)
    return (indices.astype(np.int32),)
