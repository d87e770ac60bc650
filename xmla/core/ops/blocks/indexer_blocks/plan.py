from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.blocks import select_blocks
from xmla.core.ops.blocks.indexer_blocks.gluon_sm90.plan import maxima
from xmla.core.ops.blocks.shared import selection_attributes
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.indexer_topk.plan import arrays_of_tokens
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Part, Plan, in_parts, join_parts
from xmla.core.values import Device, cdiv


def plan_by_logits(problem: Problem, device: Device, tokens: int) -> Plan:
    """The plan that stores all logits of so many tokens and selects from them."""
    composition = Composition(problem, device, arrays=arrays_of_tokens(problem, tokens))
    composition.call(indexer_logits.OP, same_names(*indexer_logits.OP.tensors))
    composition.call(select_blocks.OP, same_names("logits", "starts", "ends"), **selection_attributes(problem))
    return composition.plan()


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
        return plan_by_logits(problem, device, rows)

    at_once, limit = part(problem["T"]), problem.attrs.workspace_bytes
    if at_once.workspace_bytes <= limit:
        return at_once
    together = min(indexer_logits.tokens_a_program(problem, device), problem["T"])
    parts = in_parts(problem, part, 4 * max(stored_keys, 1), together, lambda size: True, whole)
    if parts is None:
        needed = join_parts(problem, part, together, whole).workspace_bytes
        problem.unsupported("workspace_bytes", "value", limit, f"at least {needed} for these sizes")
    return parts
