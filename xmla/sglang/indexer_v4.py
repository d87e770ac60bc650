"""DeepSeek-V4's indexer in SGLang: `select_topk` and `map_slots`, and logits of long prefills by `indexer_logits`.

Other logits are `xmla.compat.deep_gemm`'s, over the pool. SGLang has a row of the page table for each token.
"""

from typing import Any

import torch

from xmla import torch_api as xt
from xmla.compat import deep_gemm

Tensor = torch.Tensor


def nonpaged_mqa_logits(
    *, q_indexer: Tensor, weights: Tensor, kv: tuple[Tensor, Tensor], plan: Any, rows: slice
) -> Tensor:
    """`_nonpaged_mqa_logits`: of rows of one request's tokens over all its keys, which SGLang has gathered; [T, N].

    DeepGEMM gets the number of columns, for rows that begin at any key. These begin at the first.
    """
    return deep_gemm.fp8_mqa_logits(
        q_indexer[rows], kv, weights[rows], plan.ks[rows], plan.ke[rows], clean_logits=False
    )


def topk_transform_paged(
    scores: Tensor, seq_lens: Tensor, page_tables: Tensor, out_page_indices: Tensor, page_size: int,
    out_raw_indices: Tensor | None = None,
) -> None:  # fmt: skip
    """Slots of the largest scores of each row to `out_page_indices` [T, K], −1 where there is no key, and if asked for
    their positions to `out_raw_indices`.
    """
    positions = xt.select_topk(scores, seq_lens, k=out_page_indices.shape[1], out=out_raw_indices)
    counts = seq_lens.new_empty(len(seq_lens))
    xt.map_slots(positions, page_tables, page_size=page_size, out=(out_page_indices, counts))


def topk_transform_paged_v2(
    scores: Tensor, seq_lens: Tensor, page_tables: Tensor, out_page_indices: Tensor, page_size: int, metadata: Tensor,
    out_raw_indices: Tensor | None = None,
) -> None:  # fmt: skip
    """`topk_transform_paged` with a plan, which is not read."""
    topk_transform_paged(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def plan_topk_v2(seq_lens: Tensor, static_threshold: int = -1, *, out: Tensor | None = None) -> Tensor:
    """What stands for a plan, of a shape that SGLang copies in graphs."""
    return seq_lens.new_empty(len(seq_lens) + 1, 2) if out is None else out


def get_paged_mqa_logits_metadata(seq_lens: Tensor, page_size: int, num_sm: int) -> Tensor:
    """What stands for DeepGEMM's schedule, of a shape that SGLang copies in graphs."""
    return seq_lens.new_empty((num_sm + 1, 2), dtype=torch.int32)
