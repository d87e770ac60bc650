from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.cache import write_indexer_cache, write_mla_cache
from xmla.core.ops.cache.write_indexer_cache.kernels import write_indexer_cache_kernel
from xmla.core.ops.cache.write_indexer_cache.plan import CachedKeys
from xmla.core.ops.cache.write_mla_cache.kernels import write_mla_cache_kernel
from xmla.core.ops.cache.write_mla_cache.plan import Entries
from xmla.core.ops.indexer.quantize_indexer_query.kernels import quantize_indexer_query_kernel
from xmla.core.ops.indexer.quantize_indexer_query.plan import QuantizedQuery
from xmla.core.ops.layer.dsa_attention.plan import COMPUTED_FROM, FUSIONS, attend
from xmla.core.ops.layer.dsa_step.kernels import prepare_step_kernel, write_both_kernel
from xmla.core.plan import Constants, Fusion, Launch, Plan
from xmla.core.values import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes(Constants):
    """Constants of the kernel that writes both caches: those of the kernels that write one."""

    ENTRIES: Entries
    KEYS: CachedKeys
    OVERLAP_LIMIT: int  # core/lang/launches.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation(Writes):
    """Constants of the kernel that also quantises the queries."""

    QUERY: QuantizedQuery


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device, {"cache_format": "mla_cache_format"})
    composition.call(
        write_mla_cache.OP, same_names("latent", "rope") | {"slots": "entry_slots", "cache": "mla_cache"},
        cache_format=problem.attrs.mla_cache_format, scale_floor=problem.attrs.scale_floor,
    )  # fmt: skip
    composition.call(
        write_indexer_cache.OP, {"keys": "index_k", "slots": "entry_slots", "cache": "indexer_cache"},
        cache_format=problem.attrs.indexer_cache_format,
    )  # fmt: skip
    composition.computed_from = COMPUTED_FROM  # its slots are the selection's
    attend(composition)
    plan = composition.plan(
        (
            *FUSIONS,
            Fusion(write_mla_cache_kernel, write_indexer_cache_kernel, partial(write_both, device.overlap_limit)),
            Fusion(write_both_kernel, quantize_indexer_query_kernel, prepare),
        )
    )
    writes, second, *others = plan.launches
    if "KEYS_EARLY" not in second.constants:  # no other kernel has been timed beside the writes
        second = second.in_turn()
    return replace(plan, launches=(writes, second, *others))


def write_both(overlap_limit: int, entries: Launch, keys: Launch) -> Launch:
    """One launch that writes both caches."""
    slots = entries.pointers["slots_ptr"]
    if entries.sizes != keys.sizes or keys.pointers["slots_ptr"] != slots:
        raise RuntimeError(f"{write_both_kernel.__name__} writes both caches at the same slots, the plan {keys}")
    constants: dict[str, Any] = {"ENTRIES": entries.constexprs["C"], "KEYS": keys.constexprs["C"]}
    return Launch(
        write_both_kernel,
        grid=(entries.grid[0] + keys.grid[0],),
        arrays={
            "latent": entries.pointers["latent_ptr"],
            "rope": entries.pointers["rope_ptr"],
            "index_k": keys.pointers["keys_ptr"],
            "entry_slots": slots,
            "mla_cache": entries.pointers["cache_ptr"],
            "indexer_cache": keys.pointers["cache_ptr"],
        },
        sizes=entries.sizes,
        constexprs={"C": Writes(**constants, OVERLAP_LIMIT=overlap_limit)},
    )


def prepare(writes: Launch, query: Launch) -> Launch:
    """One launch that writes both caches and quantises the queries."""
    constants: Any = query.constexprs["C"]
    written: Any = writes.constexprs["C"]
    return Launch(
        prepare_step_kernel,
        grid=(query.grid[0] + writes.grid[0],),
        outputs=query.outputs,
        arrays={
            **{name.removesuffix("_ptr"): array for name, array in writes.pointers.items()},
            "index_q": query.pointers["q_ptr"],
            "index_weights": query.pointers["weights_ptr"],
            **{name: query.pointers[f"{name}_ptr"] for name in query.outputs},
        },
        sizes={**writes.sizes, **query.sizes},
        constexprs={
            "C": Preparation(
                ENTRIES=written.ENTRIES,
                KEYS=written.KEYS,
                OVERLAP_LIMIT=written.OVERLAP_LIMIT,
                QUERY=replace(constants, OVERLAP_LIMIT=0),
            )
        },
    )
