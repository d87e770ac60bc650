"""Training the indexer, its scores, their target and the loss, and the compressor; derivatives."""

from xmla.core.ops.training import compress_rows, indexer_loss, indexer_scores, indexer_target

OPS = (
    indexer_scores.OP,
    indexer_target.OP,
    indexer_loss.OP,
    compress_rows.OP,
    indexer_scores.backward.OP,
    indexer_loss.backward.OP,
    compress_rows.backward.OP,
)
