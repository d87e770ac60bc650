from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.attention import sparse_mla
from xmla.core.ops.slots import map_slots
from xmla.core.plan import Plan
from xmla.core.values import Device


def plan(problem: Problem, device: Device) -> Plan:
    attrs = problem.attrs
    composition = Composition(problem, device, {"slots": "indices"})
    mapped = same_names("indices", "block_table", "request_ids", "lengths")
    composition.call(map_slots.OP, mapped, page_size=problem.page_size())
    composition.call(
        sparse_mla.OP, same_names("q", "cache", "slots", "sink"), softmax_scale=attrs.softmax_scale,
        cache_format=attrs.cache_format, batch_invariant=attrs.batch_invariant,
    )  # fmt: skip
    return composition.plan()
