from xmla.core.composition import Composition, same_names
from xmla.core.device import Device
from xmla.core.ops import indexer_logits, select_blocks
from xmla.core.ops.indexer_topk.plan import of_tokens
from xmla.core.parts import in_parts, join_parts
from xmla.core.plan import Plan
from xmla.core.problem import Problem
from xmla.core.selection import selection_attributes

WHOLE = ("select_blocks.block_counts",)


def stored(problem: Problem, device: Device, tokens: int) -> Plan:
    """The plan that stores all logits of so many tokens and selects from them."""
    composition = Composition(problem, device, arrays=of_tokens(problem, tokens))
    composition.call(indexer_logits.OP, same_names(*indexer_logits.OP.tensors))
    composition.call(select_blocks.OP, same_names("logits", "starts", "ends"), **selection_attributes(problem))
    return composition.plan()


def plan(problem: Problem, device: Device) -> Plan:
    def part(rows: int) -> Plan:
        return stored(problem, device, rows)

    whole, given = stored(problem, device, problem["T"]), problem.attrs.workspace_bytes
    if whole.workspace_bytes <= given:
        return whole
    together = min(indexer_logits.tokens_a_program(problem, device), problem["T"])
    found = in_parts(problem, part, 4 * max(problem["N"], 1), together, lambda size: True, WHOLE)
    if found is None:
        needed = join_parts(problem, part, together, WHOLE).workspace_bytes
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    return found
