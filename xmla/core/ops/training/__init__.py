"""Training the indexer: its scores, their target, the loss, derivatives."""

from xmla.core.ops.training import indexer_loss, indexer_scores, indexer_target

OPS = (indexer_scores.OP, indexer_target.OP, indexer_loss.OP, indexer_scores.backward.OP, indexer_loss.backward.OP)
