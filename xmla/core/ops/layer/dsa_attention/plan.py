from dataclasses import replace
from itertools import pairwise

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.attention import sparse_mla
from xmla.core.ops.indexer import indexer_topk_paged, quantize_indexer_query
from xmla.core.ops.layer.dsa_attention.kernels import select_slots_kernel, whole_slots_kernel
from xmla.core.ops.selection.select_topk.kernels import topk_whole_kernel
from xmla.core.ops.selection.select_topk.plan import going_on, may_go_on
from xmla.core.ops.slots import map_slots
from xmla.core.ops.slots.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device

# For errors: the arguments of the call from which the intermediate arguments of its steps are computed.
COMPUTED_FROM = {
    "q8": "index_q",
    "weights": "index_weights",
    "scale": "index_scale",
    "format": "indexer_cache",
    "cache_format": "mla_cache_format",
    "indices": "lengths",
    "slots": "lengths",
}


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device, COMPUTED_FROM)
    attend(composition)
    return selecting_slots(composition.plan())


def attend(composition: Composition) -> None:
    """The calls of the four ops."""
    problem, attrs = composition.problem, composition.problem.attrs
    composition.call(
        quantize_indexer_query.OP, {"q": "index_q", "weights": "index_weights"}, scale=attrs.index_scale,
        format=problem.formats["indexer_cache"].format,
    )  # fmt: skip
    composition.call(
        indexer_topk_paged.OP,
        same_names("q8", "block_table", "lengths", "request_ids")
        | {"weights": "folded_weights", "cache": "indexer_cache"},
        k=attrs.k, workspace_bytes=attrs.workspace_bytes,
    )  # fmt: skip
    mapped = same_names("indices", "block_table", "request_ids")
    composition.call(map_slots.OP, mapped, page_size=problem.page_size("mla_cache"))
    composition.call(
        sparse_mla.OP, same_names("q", "slots", "sink") | {"cache": "mla_cache"},
        softmax_scale=attrs.softmax_scale, cache_format=attrs.mla_cache_format, batch_invariant=attrs.batch_invariant,
    )  # fmt: skip


def selecting_slots(plan: Plan) -> Plan:
    """The plan in which the programs that select a row whole, or of few, also map it to slots: a launch less."""
    launches = list(plan.launches)
    for place, (first, second) in enumerate(pairwise(plan.launches)):
        if may_go_on(first) and second.kernel is map_slots_kernel:
            launches[place : place + 2] = [select_slots(first, second)]
    return replace(plan, launches=tuple(launches))


def select_slots(select: Launch, mapping: Launch) -> Launch:
    """One launch of what two do: of slots of all of a row's indices."""
    kernel = whole_slots_kernel if select.kernel is topk_whole_kernel else select_slots_kernel
    keys = {mapping.sizes["num_keys"], mapping.sizes["index_stride"], select.sizes["k"]}
    if mapping.constants["HAS_LENGTHS"] or len(keys) > 1:
        raise RuntimeError(f"{kernel.__name__} maps whole rows of k indices, the plan {mapping}")
    # Without request ids the mapping's stand-in is the array that this launch writes.
    requests = (
        mapping.pointers["request_ids_ptr"] if mapping.constants["HAS_REQUEST_IDS"] else select.pointers["ends_ptr"]
    )
    return going_on(
        select,
        kernel,
        outputs=("slots", "counts"),
        arrays={
            "block_table": mapping.pointers["block_table_ptr"],
            "request_ids": requests,
            "slots": mapping.pointers["slots_ptr"],
            "counts": mapping.pointers["counts_ptr"],
        },
        sizes={name: mapping.sizes[name] for name in ("num_requests", "table_stride", "table_width", "next_n")},
        constexprs={"MAPPING": mapping.constexprs["MAPPING"]},
    )
