"""What is timed: ops at serving size, each beside peers, ceilings or itself at another size.

A function of a module here makes one case, a `Benchmark`; another, without arguments, yields all cases of its kind.
"""

from collections.abc import Callable, Iterator, Mapping

from xmla.bench.benchmark import Benchmark
from xmla.bench.cases import attention, blocks, compression, logits, selection, steps, training

BENCHMARKS: Mapping[str, tuple[Callable[[], Iterator[Benchmark]], ...]] = {
    "sparse_mla": (attention.decode, attention.decode_v4, attention.prefill),
    "sparse_mla_backward": (training.attention_backward,),
    "indexer_scores": (training.selections,),
    "indexer_loss": (training.indexer_losses,),
    "indexer_logits": (logits.ragged,),
    "indexer_logits_paged": (logits.paged,),
    "select_topk": (selection.topk,),
    "indexer_topk": (selection.bounded,),
    "indexer_topk_paged": (selection.paged,),
    "indexer_blocks": (blocks.ragged_sources,),
    "indexer_block_topk": (blocks.ragged_within,),
    "indexer_blocks_paged": (blocks.sources,),
    "indexer_block_topk_paged": (blocks.within,),
    "compress_kv": (compression.compressors,),
    "resolve_slots": (selection.resolved,),
    "dsa_step": (steps.writing_step,),
    "dsa_attention": (steps.one_layer, steps.long_tables, steps.layers),
}
