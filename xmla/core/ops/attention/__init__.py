"""Attention over selected cache entries, and the merge of its parts."""

from xmla.core.ops.attention import merge_attention, sparse_mla, sparse_mla_paged

OPS = (sparse_mla.OP, sparse_mla_paged.OP, merge_attention.OP, sparse_mla.backward.OP)
