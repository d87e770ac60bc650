from dataclasses import replace

from xmla.core.op import Case
from xmla.core.ops.indexer.indexer_topk.cases import make_case


def with_granularity(name: str, granularity: int, newest: int, case: Case) -> Case:
    return replace(case, name=name, attrs={**case.attrs, "granularity": granularity, "newest": newest})


CASES = (
    with_granularity("fits", 8, 1, make_case("", 5, 4, 300, 7)),
    with_granularity("parts", 4, 2, make_case("", 70, 4, 131, 9, workspace_bytes=610_000)),  # of 64 and 6 tokens
    with_granularity("apart", 8, 1, make_case("", 7, 32, 900, 20, dim=64)),  # blocks that begin anywhere among the keys
    with_granularity("mxfp4", 64, 0, make_case("", 4, 4, 260, 2, layout="mxfp4")),
    with_granularity("ue8m0", 8, 1, make_case("", 5, 4, 300, 7, dim=128, layout="fp8_ue8m0")),
)
