from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.blocks import select_blocks
from xmla.core.ops.blocks.indexer_block_logits_paged.plan import part as all_logits
from xmla.core.ops.blocks.shared import capacity_of, selection_attributes
from xmla.core.ops.indexer import indexer_logits_paged
from xmla.core.plan import Part, Plan, in_parts, join_parts
from xmla.core.values import Device

WHOLE = ("widths", "select_blocks.block_counts")


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device)
    composition.call(indexer_logits_paged.OP, same_names(*indexer_logits_paged.OP.tensors))
    composition.call(select_blocks.OP, {"logits": "logits", "ends": "lengths"}, **selection_attributes(problem))
    stored = composition.plan()
    return stored if stored.workspace_bytes <= problem.attrs.workspace_bytes else plan_in_parts(problem, device)


def plan_in_parts(problem: Problem, device: Device) -> Plan:
    """The plan that stores the logits of as many tokens at a time as fit the workspace; these share no keys."""

    def part(rows: int) -> Plan:
        composition = Composition(problem, device)
        composition.add(Part("logits", all_logits(problem, device, rows), {"logits": "logits", "widths": "widths"}))
        composition.call(select_blocks.OP, {"logits": "logits", "ends": "widths"}, **selection_attributes(problem))
        return composition.plan()

    given = problem.attrs.workspace_bytes
    if problem.implementation not in (None, "triton"):
        got = f"{problem.implementation!r} where the logits do not fit workspace_bytes"
        problem.unsupported("implementation", "value", got, "'triton', or more workspace_bytes")
    found = in_parts(problem, part, 4 * max(capacity_of(problem), 1), 1, lambda size: True, WHOLE)
    if found is None:
        needed = join_parts(problem, part, 1, WHOLE).workspace_bytes
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    return found
