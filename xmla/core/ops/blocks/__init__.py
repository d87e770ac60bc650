"""Selections of blocks: V4.1's blocks, GLM-5.3-Flash's pools.

First blocks are selected by their maxima (`indexer_blocks`), then keys within them (`indexer_block_topk`).
"""

from xmla.core.ops.blocks import (
    expand_blocks,
    indexer_block_logits,
    indexer_block_logits_paged,
    indexer_block_topk,
    indexer_block_topk_paged,
    indexer_blocks,
    indexer_blocks_paged,
    select_blocks,
)

OPS = (
    indexer_blocks_paged.OP,
    indexer_blocks.OP,
    indexer_block_topk_paged.OP,
    indexer_block_topk.OP,
    indexer_block_logits_paged.OP,
    indexer_block_logits.OP,
    select_blocks.OP,
    expand_blocks.OP,
)
