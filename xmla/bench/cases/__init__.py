"""What is timed: ops at serving size, each beside peers, ceilings or itself at another size.

A function of a module here makes one case, a `Benchmark`; another, without arguments, yields all cases of its kind.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmla.bench.benchmark import Benchmark

# Of each op the functions that yield cases, by the names of their modules: what there is, is told without PyTorch.
CASES: Mapping[str, tuple[str, ...]] = {
    "sparse_mla": (
        "attention.decode",
        "attention.decode_v4",
        "attention.prefill",
        "attention.fp4",
        "attention.shared",
    ),
    "sparse_mla_backward": ("training.attention_backward",),
    "indexer_scores": ("training.selections",),
    "indexer_loss": ("training.indexer_losses",),
    "indexer_logits": ("logits.ragged",),
    "indexer_logits_paged": ("logits.paged",),
    "select_topk": ("selection.topk",),
    "indexer_topk": ("selection.bounded",),
    "indexer_topk_paged": ("selection.paged",),
    "indexer_blocks": ("blocks.ragged_sources",),
    "indexer_block_topk": ("blocks.ragged_within",),
    "indexer_blocks_paged": ("blocks.sources",),
    "indexer_block_topk_paged": ("blocks.within",),
    "compress_kv": ("compression.compressors",),
    "resolve_slots": ("selection.resolved",),
    "write_mla_cache": ("movement.written_latents",),
    "write_indexer_cache": ("movement.written_keys",),
    "read_mla_cache": ("movement.read_latents",),
    "read_indexer_cache": ("movement.read_keys",),
    "quantize_indexer_query": ("movement.queries",),
    "map_slots": ("movement.mapped",),
    "window_slots": ("movement.windows",),
    "expand_blocks": ("movement.expanded",),
    "merge_attention": ("movement.merged_attention",),
    "merge_topk": ("movement.merged_candidates",),
    "dsa_step": ("steps.writing_step",),
    "dsa_attention": ("steps.one_layer", "steps.long_tables", "steps.layers"),
}


def cases_of(op: str) -> "Iterator[Benchmark]":
    """Every case of an op; of another name none."""
    for place in CASES.get(op, ()):
        module, _, name = place.partition(".")
        family: Callable[[], Iterator[Benchmark]] = getattr(import_module(f"{__name__}.{module}"), name)
        yield from family()
