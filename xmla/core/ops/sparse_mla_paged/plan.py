from xmla.core.composition import Steps
from xmla.core.device import Device
from xmla.core.ops import map_slots, sparse_mla
from xmla.core.plan import Plan
from xmla.core.problem import Problem


def plan(problem: Problem, device: Device) -> Plan:
    attrs = problem.attrs
    steps = Steps(problem, device, {"slots": "indices"})
    steps.call(map_slots.OP, "indices block_table request_ids lengths", page_size=max(problem["R"], 1))
    steps.call(
        sparse_mla.OP, "q cache slots sink", softmax_scale=attrs.softmax_scale, cache_format=attrs.cache_format,
        batch_invariant=attrs.batch_invariant,
    )  # fmt: skip
    return steps.plan()
