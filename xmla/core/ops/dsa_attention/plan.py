from collections.abc import Mapping
from typing import Any

from xmla.core.device import Device
from xmla.core.layout import indexer_layouts
from xmla.core.op import Op, Problem, Whole
from xmla.core.ops import indexer_topk_paged, map_slots, quantize_indexer_query, sparse_mla
from xmla.core.plan import Plan, join
from xmla.core.spec import Spec

# Arguments of the parts that are not the whole's, by what of the whole they are made of.
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
    arrays: dict[str, Spec] = dict(problem.specs)
    steps: list[tuple[Plan, Mapping[str, str]]] = []

    def step(op: Op, names: Mapping[str, str], **values: Any) -> None:
        """Plan `op`, whose arguments and buffers are called `names[...]` in the whole."""
        specs = {argument: arrays.get(names.get(argument, argument)) for argument in op.tensors}
        chosen = problem.implementation if problem.implementation in op.implementations else None
        part = op.plan(
            op.bind(specs, op.defaults | values, chosen, Whole(problem.op.name, {**names, **CALLED})), device
        )
        arrays.update({names.get(name, name): spec for name, spec in part.buffers.items()})
        steps.append((part, names))

    (layout,) = indexer_layouts(problem["INDEXER_ROW"], problem["D"])
    step(
        quantize_indexer_query.OP,
        {"q": "index_q", "weights": "index_weights"},
        scale=attrs["index_scale"],
        format=layout.format,
    )
    step(
        indexer_topk_paged.OP,
        {"weights": "folded_weights", "cache": "indexer_cache"},
        k=attrs["k"],
        workspace_bytes=attrs["workspace_bytes"],
    )
    step(map_slots.OP, {}, page_size=problem["R"])
    step(
        sparse_mla.OP,
        {"cache": "mla_cache", "lengths": "no_lengths"},
        softmax_scale=attrs["softmax_scale"],
        cache_format=attrs["mla_cache_format"],
        batch_invariant=attrs["batch_invariant"],
    )
    return join(steps, ("out", "lse", "indices"))
