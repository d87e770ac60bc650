from xmla.core.ops.blocks.indexer_block_logits.cases import with_blocks
from xmla.core.ops.cases import BF16
from xmla.core.ops.indexer.indexer_logits_paged.cases import make_case

CASES = (
    with_blocks(make_case((150,), 64, heads=32), 7, 8),
    with_blocks(make_case((5, 0, 131), 2, next_n=3, heads=32, padding=132), 5, 4),
    with_blocks(make_case((70, 300), 61, heads=7, dim=64, padding=4), 3, 64),
    with_blocks(make_case((129, 1, 33), 64, next_n=2, heads=8, dim=32, shuffled=True), 33, 1),
    with_blocks(make_case((150, 3), 64, layout="mxfp4", padding=68), 20, 8),
    with_blocks(
        make_case((305, 0, 131), 61, next_n=3, heads=32, dim=64, layout="mxfp4", dtype=BF16, padding=4), 2, 128
    ),
    with_blocks(make_case((66, 9), 53, next_n=3, heads=16), 9, 8),
    with_blocks(make_case((66, 9), 64, heads=16), 5, 8, logits_dtype="bfloat16"),
    with_blocks(make_case((150, 3), 61, heads=32, layout="fp8_ue8m0"), 9, 8),
    # Pages and blocks of whole pieces of Hopper's kernel, of which neither has whole ones of the other.
    with_blocks(make_case((305, 0, 131), 24, next_n=2, heads=32, dim=64, padding=16), 7, 32),
    with_blocks(make_case((129, 1, 33), 40, next_n=2, heads=8, dim=32, shuffled=True), 9, 16),
)
