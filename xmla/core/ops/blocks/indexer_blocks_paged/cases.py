from xmla.core.ops.blocks.indexer_blocks.cases import with_granularity
from xmla.core.ops.indexer.indexer_topk_paged.cases import make_case

CASES = (
    with_granularity("fits", 8, 1, make_case("", (150, 9), 64, 7)),
    with_granularity(
        "parts-ids", 4, 2, make_case("", (470, 70), 2, 25, next_n=2, shuffled=True, workspace_bytes=25_000)
    ),
    with_granularity(
        "parts-next3", 64, 1, make_case("", (290, 0, 131), 61, 3, next_n=3, heads=64, workspace_bytes=25_000)
    ),
    with_granularity(
        "parts-mxfp4", 8, 0, make_case("", (350, 40), 61, 12, dim=64, layout="mxfp4", workspace_bytes=12_000)
    ),
    with_granularity(
        "parts-ue8m0", 8, 1, make_case("", (350, 40), 61, 12, dim=128, layout="fp8_ue8m0", workspace_bytes=12_000)
    ),
)
