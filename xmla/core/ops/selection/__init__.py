"""Selections: the top k of given logits, and of what ranks have selected."""

from xmla.core.ops.selection import merge_topk, select_topk

OPS = (select_topk.OP, merge_topk.OP)
