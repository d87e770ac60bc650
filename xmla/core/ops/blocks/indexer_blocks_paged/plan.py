from xmla.core.call import Problem
from xmla.core.op import Composition
from xmla.core.ops.blocks import select_blocks
from xmla.core.ops.blocks.indexer_block_logits.plan import part as all_logits
from xmla.core.ops.blocks.shared import capacity_of, refuse_workspace, selection_attributes
from xmla.core.ops.indexer.indexer_topk.plan import require_portable
from xmla.core.ops.indexer.key_source import plan_by_logits
from xmla.core.plan import Part, Plan, in_parts
from xmla.core.values import Device

WHOLE = ("widths", "select_blocks.block_counts")


def plan(problem: Problem, device: Device) -> Plan:
    stored = plan_by_logits(problem, device, select_blocks.OP, **selection_attributes(problem))
    return stored if stored.workspace_bytes <= problem.attrs.workspace_bytes else plan_in_parts(problem, device)


def plan_in_parts(problem: Problem, device: Device) -> Plan:
    """The plan that stores the logits of as many tokens at a time as fit the workspace; these share no keys."""

    def part(rows: int) -> Plan:
        composition = Composition(problem, device)
        composition.add(Part("logits", all_logits(problem, device, rows), {"logits": "logits", "widths": "widths"}))
        composition.call(select_blocks.OP, {"logits": "logits", "ends": "widths"}, **selection_attributes(problem))
        return composition.plan()

    require_portable(problem)
    parts = in_parts(problem, part, 4 * max(capacity_of(problem), 1), 1, lambda size: True, WHOLE)
    if parts is None:
        refuse_workspace(problem, part, 1, WHOLE)
    return parts
