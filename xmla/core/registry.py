"""Every op by name. A new op is one folder in `xmla.core.ops` and two lines here."""

from xmla.core.errors import ArgumentError, meant
from xmla.core.op import Op
from xmla.core.ops import (
    compress_kv,
    convert_indexer_cache,
    convert_mla_cache,
    dsa_attention,
    dsa_step,
    expand_blocks,
    indexer_block_logits,
    indexer_block_logits_paged,
    indexer_block_topk,
    indexer_block_topk_paged,
    indexer_blocks,
    indexer_blocks_paged,
    indexer_logits,
    indexer_logits_paged,
    indexer_loss,
    indexer_scores,
    indexer_target,
    indexer_topk,
    indexer_topk_paged,
    map_slots,
    merge_attention,
    merge_topk,
    pool_keys,
    quantize_indexer_query,
    read_indexer_cache,
    read_mla_cache,
    resolve_slots,
    select_blocks,
    select_topk,
    sparse_mla,
    sparse_mla_paged,
    split_batch,
    window_slots,
    write_indexer_cache,
    write_mla_cache,
)

_OPS = {
    op.name: op
    for op in (
        compress_kv.OP,
        convert_indexer_cache.OP,
        convert_mla_cache.OP,
        dsa_attention.OP,
        dsa_step.OP,
        expand_blocks.OP,
        indexer_block_logits.OP,
        indexer_block_logits_paged.OP,
        indexer_block_topk.OP,
        indexer_block_topk_paged.OP,
        indexer_blocks.OP,
        indexer_blocks_paged.OP,
        indexer_logits.OP,
        indexer_logits_paged.OP,
        indexer_loss.OP,
        indexer_loss.backward.OP,
        indexer_scores.OP,
        indexer_scores.backward.OP,
        indexer_target.OP,
        indexer_topk.OP,
        indexer_topk_paged.OP,
        map_slots.OP,
        merge_attention.OP,
        merge_topk.OP,
        pool_keys.OP,
        quantize_indexer_query.OP,
        read_indexer_cache.OP,
        read_mla_cache.OP,
        resolve_slots.OP,
        select_blocks.OP,
        select_topk.OP,
        sparse_mla.OP,
        sparse_mla.backward.OP,
        sparse_mla_paged.OP,
        split_batch.OP,
        window_slots.OP,
        write_indexer_cache.OP,
        write_mla_cache.OP,
    )
}


def registry() -> dict[str, Op]:
    """The ops by name."""
    return dict(_OPS)


def find_op(name: str, asked_by: str) -> Op:
    """The op of that name.

    Raises:
        ArgumentError: There is none; the message starts with `asked_by`.
    """
    if name not in _OPS:
        raise ArgumentError(f"{asked_by}: op is {name!r}, expected one of {', '.join(_OPS)}{meant(name, _OPS)}")
    return _OPS[name]
