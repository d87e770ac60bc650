from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.attention import sparse_mla
from xmla.core.ops.indexer import indexer_topk_paged, quantize_indexer_query
from xmla.core.ops.layer.dsa_attention.gluon_sm90.kernel import select_slots_cluster_sm90_kernel
from xmla.core.ops.layer.dsa_attention.kernels import select_slots_kernel, whole_slots_kernel
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.kernel import topk_cluster_sm90_kernel
from xmla.core.ops.selection.select_topk.kernels import topk_select_kernel, topk_whole_kernel
from xmla.core.ops.slots import map_slots
from xmla.core.ops.slots.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Fusion, Kernel, Launch, Plan
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
    return composition.plan(FUSIONS)


def attend(composition: Composition) -> None:
    """The calls of the four ops."""
    problem, attrs = composition.problem, composition.problem.attrs
    composition.call(
        quantize_indexer_query.OP, {"q": "index_q", "weights": "index_weights"}, scale=attrs.index_scale,
        format=problem.formats["indexer_cache"].query_format,
    )  # fmt: skip
    composition.call(
        indexer_topk_paged.OP,
        same_names("q8", "block_table", "lengths", "request_ids")
        | {"weights": "folded_weights", "cache": "indexer_cache"},
        k=attrs.k, workspace_bytes=attrs.workspace_bytes, cache_format=attrs.indexer_cache_format,
    )  # fmt: skip
    mapped = same_names("indices", "block_table", "request_ids")
    composition.call(map_slots.OP, mapped, page_size=problem.page_size("mla_cache"))
    composition.call(
        sparse_mla.OP, same_names("q", "slots", "lengths", "sink") | {"cache": "mla_cache"},
        softmax_scale=attrs.softmax_scale, cache_format=attrs.mla_cache_format, batch_invariant=attrs.batch_invariant,
    )  # fmt: skip


def map_whole(select: Launch, mapping: Launch) -> Launch:
    """Programs that select all of a row's columns also map them."""
    return map_selected(select, mapping, whole_slots_kernel)


def map_few(select: Launch, mapping: Launch) -> Launch | None:
    """Programs that select among the candidates of few rows also map them; those of many rows have no time for it."""
    return map_selected(select, mapping, select_slots_kernel) if select.constants["PIECE"] else None


def map_cluster(select: Launch, mapping: Launch) -> Launch:
    """Clusters that select a row also map it: it has no more than `MOST` columns, which are one step of the mapping."""
    return map_selected(select, mapping, select_slots_cluster_sm90_kernel)


def map_selected(select: Launch, mapping: Launch, kernel: Kernel) -> Launch:
    """A launch of `kernel`, whose programs select as those of `select` and then map the row.

    The kernel has the parameters of the one that selects, in which `candidate_counts` stands for `counts`.
    """
    keys = {mapping.sizes["num_keys"], mapping.sizes["index_stride"], select.sizes["k"]}
    if mapping.constants["HAS_LENGTHS"] or len(keys) > 1:
        raise RuntimeError(f"{kernel.__name__} maps whole rows of k indices, the plan {mapping}")
    names = {"counts_ptr": "candidate_counts"}
    own = {names.get(pointer, pointer.removesuffix("_ptr")): array for pointer, array in select.pointers.items()}
    # Without request ids the mapping's stand-in is the array that this launch writes.
    requests = (
        mapping.pointers["request_ids_ptr"] if mapping.constants["HAS_REQUEST_IDS"] else select.pointers["ends_ptr"]
    )
    of_mapping = {
        "block_table": mapping.pointers["block_table_ptr"],
        "request_ids": requests,
        "slots": mapping.pointers["slots_ptr"],
        "counts": mapping.pointers["counts_ptr"],
    }
    sizes = {name: mapping.sizes[name] for name in ("num_requests", "table_stride", "table_width", "next_n")}
    return replace(
        select,
        kernel=kernel,
        outputs=(*select.outputs, "slots", "counts"),
        arrays={name: array for name, array in (own | of_mapping).items() if name != array},
        sizes={**select.sizes, **sizes},
        constexprs={**select.constexprs, "MAPPING": mapping.constexprs["MAPPING"]},
    )


FUSIONS = (
    Fusion(topk_whole_kernel, map_slots_kernel, map_whole),
    Fusion(topk_select_kernel, map_slots_kernel, map_few),
    Fusion(topk_cluster_sm90_kernel, map_slots_kernel, map_cluster),
)
