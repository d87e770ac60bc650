from dataclasses import dataclass, replace
from typing import Any

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.cache import write_indexer_cache, write_mla_cache
from xmla.core.ops.cache.write_indexer_cache.plan import CachedKeys
from xmla.core.ops.cache.write_mla_cache.plan import Entries
from xmla.core.ops.indexer.quantize_indexer_query.kernels import quantize_indexer_query_kernel
from xmla.core.ops.indexer.quantize_indexer_query.plan import QuantizedQuery
from xmla.core.ops.layer.dsa_attention.plan import COMPUTED_FROM, attend, selecting_slots
from xmla.core.ops.layer.dsa_step.kernels import prepare_step_kernel, write_both_kernel
from xmla.core.plan import Constants, Launch, Plan, with_constant
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
        write_indexer_cache.OP, {"keys": "index_k", "slots": "entry_slots", "cache": "indexer_cache"}
    )  # fmt: skip
    composition.computed_from = COMPUTED_FROM  # its slots are the selection's
    attend(composition)
    return preparing(selecting_slots(composition.plan()), device.overlap_limit)


def preparing(plan: Plan, overlap_limit: int) -> Plan:
    """The plan whose first launch writes both caches, and quantises the queries where they are: two launches less.

    Logits that follow it may begin early, but read no key before they wait. What else follows takes its turn: it may
    read a cache before it waits.
    """
    entries, keys, *others = plan.launches
    query = others.pop(0) if others[0].kernel is quantize_indexer_query_kernel else None
    if "KEYS_EARLY" in others[0].constants:
        others[0] = replace(others[0], constexprs=with_constant(others[0].constexprs, "KEYS_EARLY", False))
    else:
        others[0] = others[0].in_turn()
    return replace(plan, launches=(prepare(entries, keys, query, overlap_limit), *others))


def prepare(entries: Launch, keys: Launch, query: Launch | None, overlap_limit: int) -> Launch:
    """One launch of those that write both caches and, if it is given, of the one that quantises."""
    arrays = {
        "latent": entries.pointers["latent_ptr"],
        "rope": entries.pointers["rope_ptr"],
        "index_k": keys.pointers["keys_ptr"],
        "entry_slots": entries.pointers["slots_ptr"],
        "mla_cache": entries.pointers["cache_ptr"],
        "indexer_cache": keys.pointers["cache_ptr"],
    }
    if entries.sizes != keys.sizes or keys.pointers["slots_ptr"] != arrays["entry_slots"]:
        raise RuntimeError(f"{write_both_kernel.__name__} writes both caches at the same slots, the plan {keys}")
    grid = entries.grid[0] + keys.grid[0]
    written: dict[str, Any] = {
        "ENTRIES": entries.constexprs["C"], "KEYS": keys.constexprs["C"], "OVERLAP_LIMIT": overlap_limit,
    }  # fmt: skip
    if query is None:
        constexprs = {"C": Writes(**written)}
        return Launch(write_both_kernel, grid=(grid,), arrays=arrays, sizes=entries.sizes, constexprs=constexprs)
    constants: Any = query.constexprs["C"]
    arrays |= {"index_q": query.pointers["q_ptr"], "index_weights": query.pointers["weights_ptr"]}
    arrays |= {name: query.pointers[f"{name}_ptr"] for name in query.outputs}
    return Launch(
        prepare_step_kernel,
        grid=(query.grid[0] + grid,),
        outputs=query.outputs,
        arrays=arrays,
        sizes={**entries.sizes, **query.sizes},
        constexprs={"C": Preparation(**written, QUERY=replace(constants, OVERLAP_LIMIT=0))},
    )
