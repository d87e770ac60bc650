from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.blocks import select_blocks
from xmla.core.ops.blocks.indexer_blocks.gluon_sm90.plan import maxima
from xmla.core.ops.blocks.shared import refuse_workspace, selection_attributes
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.indexer_topk.plan import arrays_of_tokens
from xmla.core.ops.indexer.key_source import plan_by_logits
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Part, Plan, in_parts
from xmla.core.values import Device, cdiv


def plan_by_maxima(problem: Problem, device: Device, tokens: int) -> Plan:
    """The plan that stores the largest logit of each block of so many tokens."""
    composition = Composition(problem, device)
    buffers = same_names("block_counts", "maxima")
    composition.add(Part("block_maxima", maxima(problem, device, tokens), buffers))
    composition.call(select_topk.OP, {"logits": "maxima", "ends": "block_counts"}, k=problem.attrs.k)
    return composition.plan()


def plan(problem: Problem, device: Device) -> Plan:
    implementation, choice = indexer_logits.OP.choose(problem, device)
    by_hopper = implementation is indexer_logits.gluon_sm90.IMPLEMENTATION
    stored_keys = cdiv(problem["N"], problem.attrs.granularity) if by_hopper else problem["N"]
    whole = ("block_counts",) if by_hopper else ("select_blocks.block_counts",)

    def part(rows: int) -> Plan:
        if by_hopper:
            of_logits = replace(choice, op=indexer_logits.OP.name)  # as the steps' plan tells it
            return replace(plan_by_maxima(problem, device, rows), choices=(of_logits,))
        arrays = arrays_of_tokens(problem, rows)
        return plan_by_logits(problem, device, select_blocks.OP, arrays, **selection_attributes(problem))

    at_once = part(problem["T"])
    if at_once.workspace_bytes <= problem.attrs.workspace_bytes:
        return at_once
    # Tokens of a program share keys. Where no room is for so many, each part has as few as fit.
    for together in (min(indexer_logits.tokens_a_program(problem, device), problem["T"]), 1):
        parts = in_parts(problem, part, 4 * max(stored_keys, 1), together, lambda size: True, whole)
        if parts is not None:
            return parts
    refuse_workspace(problem, part, 1, whole)
