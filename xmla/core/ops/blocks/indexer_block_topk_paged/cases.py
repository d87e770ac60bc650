from xmla.core.ops.blocks.indexer_block_logits.cases import with_blocks
from xmla.core.ops.indexer.indexer_topk_paged.cases import make_case

CASES = (
    with_blocks(make_case("all", (150, 9), 64, 20), 19, 8, k=20),
    with_blocks(make_case("parts", (270, 70), 2, 25, next_n=3, shuffled=True), 9, 8, k=25, workspace_bytes=20_000),
    with_blocks(make_case("few", (90, 0, 31), 61, 30, heads=64, dim=128), 3, 4, k=30),
    with_blocks(make_case("single", (300, 40), 53, 30, next_n=2), 77, 1, k=30),
    with_blocks(make_case("mxfp4", (350, 40), 61, 30, dim=64, layout="mxfp4"), 4, 64, k=30),
    with_blocks(make_case("ue8m0", (150, 9), 64, 20, dim=128, layout="fp8_ue8m0"), 9, 8, k=20),
)
