from xmla.core.ops.blocks.indexer_block_logits.cases import with_blocks
from xmla.core.ops.indexer.indexer_topk.cases import make_case

# Blocks with as many keys as the call, or a few more, have plans over whole ranges; with fewer, as "half", on Hopper.
CASES = (
    with_blocks(make_case("all", 5, 4, 300, 20), 38, 8, k=20),
    with_blocks(make_case("parts", 7, 4, 330, 20), 9, 8, k=25, workspace_bytes=20_000),
    with_blocks(make_case("few", 6, 64, 230, 20, dim=128), 3, 4, k=30),
    with_blocks(make_case("mxfp4", 4, 4, 700, 20, layout="mxfp4"), 2, 64, k=20),
    with_blocks(make_case("all", 6, 4, 150, 20), 20, 8, twice=True, k=35),
    with_blocks(make_case("all-mxfp4", 3, 64, 140, 20, layout="mxfp4"), 71, 2, twice=True, k=20),
    with_blocks(make_case("half", 9, 32, 300, 20, dim=128), 19, 8, k=30, workspace_bytes=60_000),
    with_blocks(make_case("ue8m0", 4, 4, 700, 20, dim=128, layout="fp8_ue8m0"), 9, 8, k=20),
    with_blocks(make_case("all-ue8m0", 3, 64, 140, 20, dim=128, layout="fp8_ue8m0"), 71, 2, k=20),
)
