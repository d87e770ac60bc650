from xmla.core.device import Device
from xmla.core.op import Problem, Steps
from xmla.core.ops import indexer_topk_paged, map_slots, quantize_indexer_query, sparse_mla
from xmla.core.plan import Plan

# For errors: the arguments of the call from which the intermediate arguments of its steps are computed.
CALLED = {
    "q8": "index_q",
    "weights": "index_weights",
    "scale": "index_scale",
    "format": "indexer_cache",
    "cache_format": "mla_cache_format",
    "indices": "lengths",
    "slots": "lengths",
}


def plan(problem: Problem, device: Device) -> Plan:
    attrs = problem.attrs
    steps = Steps(problem, device, CALLED)
    steps.call(
        quantize_indexer_query.OP, "", {"q": "index_q", "weights": "index_weights"}, scale=attrs["index_scale"],
        format=problem.formats["indexer_cache"].format,
    )  # fmt: skip
    steps.call(
        indexer_topk_paged.OP, "q8 block_table lengths request_ids",
        {"weights": "folded_weights", "cache": "indexer_cache"}, k=attrs["k"],
        workspace_bytes=attrs["workspace_bytes"],
    )  # fmt: skip
    steps.call(map_slots.OP, "indices block_table request_ids", page_size=problem["R"])
    steps.call(
        sparse_mla.OP, "q slots sink", {"cache": "mla_cache"}, softmax_scale=attrs["softmax_scale"],
        cache_format=attrs["mla_cache_format"], batch_invariant=attrs["batch_invariant"],
    )  # fmt: skip
    return steps.plan()
