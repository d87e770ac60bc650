from dataclasses import replace
from itertools import pairwise

from xmla.core.device import Device
from xmla.core.op import Problem, Steps
from xmla.core.ops import indexer_topk_paged, map_slots, quantize_indexer_query, sparse_mla
from xmla.core.ops.dsa_attention.kernels import select_slots_kernel
from xmla.core.ops.map_slots.kernels import map_slots_kernel
from xmla.core.ops.select_topk.kernels import topk_select_kernel
from xmla.core.plan import Launch, Plan

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
    return selecting_slots(steps.plan())


def selecting_slots(plan: Plan) -> Plan:
    """The plan in which the programs that select a row of few also map it to slots: a launch less."""
    launches = list(plan.launches)
    for place, (first, second) in enumerate(pairwise(plan.launches)):
        if (first.kernel, second.kernel) == (topk_select_kernel, map_slots_kernel) and first.constexprs["PIECE"]:
            launches[place : place + 2] = [select_slots(first, second)]
    return replace(plan, launches=tuple(launches))


def select_slots(select: Launch, mapping: Launch) -> Launch:
    """One launch of what two do, by the parameters of both; the mapping has no lengths."""
    mapped, selected = ({p.removesuffix("_ptr"): name for p, name in x.pointers.items()} for x in (mapping, select))
    arrays = {
        **selected,
        "candidate_counts": selected["counts"],
        "block_table": mapped["block_table"],
        "request_ids": mapped["request_ids"] if mapping.constexprs["HAS_REQUEST_IDS"] else selected["ends"],
        "slots": mapped["slots"],
        "counts": mapped["counts"],
    }
    sizes, constexprs = {**mapping.sizes, **select.sizes}, {**mapping.constexprs, **select.constexprs}
    names = select_slots_kernel.arg_names
    return replace(
        select,
        kernel=select_slots_kernel,
        outputs=(*select.outputs, "slots", "counts"),
        arrays={name: array for name, array in arrays.items() if name != array},
        sizes={name: size for name, size in sizes.items() if name in names},
        constexprs={name: value for name, value in constexprs.items() if name in names},
    )
