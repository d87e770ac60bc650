"""The indexer's selection: `select_topk` and `map_slots`. Its logits are `xmla.compat.deep_gemm`'s."""

from typing import Any

import torch

from xmla import torch_api as xt
from xmla.sglang.refusals import refuse

Tensor = torch.Tensor


def resolve(value: str) -> None:
    """Before `DSAPagedMQALogitsBackend.resolve`, which each layer calls for its indexer when it is made."""
    refuse({"--dsa-paged-mqa-logits-backend cutedsl": value == "cutedsl"})


def topk_transform(
    self: Any, logits: Tensor, lengths: Tensor, topk: int, topk_transform_method: Any, attn_metadata: Any,
    cu_seqlens_q_topk: Tensor | None = None, topk_indices_offset: Any = None,
    row_starts: Tensor | None = None, batch_idx_list: Tensor | None = None, force_unfused_topk: bool = False,
) -> Tensor:  # fmt: skip
    """`DSATopKBackend.topk_transform`: what attention reads, of the `topk` largest logits of each row; [T, topk].

    A row's keys begin at column `row_starts`, or 0. Unfused, positions within the request. RAGGED, rows of the entries
    that SGLang gathers of a prefill's requests, one request behind the other. PAGED, slots of the pool: a row of the
    page table is a request's in prefills, whose tokens `batch_idx_list` or the metadata map to it, and a token's in
    other steps. −1 where there is no key.
    """
    from sglang.srt.environ import envs

    ends = lengths if row_starts is None else row_starts + lengths
    positions = xt.select_topk(logits, ends, row_starts, k=topk)
    if force_unfused_topk or not envs.SGLANG_DSA_FUSE_TOPK.get():
        return positions
    if topk_transform_method.name == "RAGGED":
        return torch.where(positions < 0, positions, positions + topk_indices_offset[:, None])
    requests = attn_metadata.token_to_batch_idx if batch_idx_list is None else batch_idx_list
    pages, page_size = attn_metadata.real_page_table, attn_metadata.page_size
    return xt.map_slots(positions, pages, requests, page_size=page_size)[0]


def build_topk_v2_plan(self: Any, seqlens_expanded: Tensor) -> None:
    """`_build_topk_v2_plan`: None, as SGLang has it for the kernels that take no plan."""
