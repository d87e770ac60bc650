from xmla.core.device import Device
from xmla.core.ops.indexer_block_logits.plan import part
from xmla.core.ops.indexer_block_topk_paged.plan import select_in_blocks
from xmla.core.plan import Plan
from xmla.core.problem import Problem


def plan(problem: Problem, device: Device) -> Plan:
    return select_in_blocks(problem, device, part)
