"""Calls of ever new sizes: few families serve all, all of these are kept, and warm-up has planned a server's."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from tools import soak
from xmla.bench import host, problems
from xmla.core.compile import as_compiled, specialize
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.core.op import Calls, Op, Sizes, kind_of, make_plan, sizes_of, spaces, trace_call
from xmla.core.op.memory import distances
from xmla.core.op.template import Specs
from xmla.core.registry import registry
from xmla.core.values import H200, Families, Spec, row_major
from xmla.torch_api import _prepared
from xmla.torch_api._arrays import spec_of

CPU = torch.device("cpu")
MOST = {  # templates, and families: those of a template whose kernels have other constants
    "write_mla_cache": (2, 2), "map_slots": (8, 8), "indexer_topk_paged": (8, 10), "sparse_mla_paged": (16, 32),
    "dsa_attention": (16, 46),
}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
def test_families_of_ever_new_sizes_are_few_and_all_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two thousand calls of random sizes: one whose family was dropped is traced again, for milliseconds."""
    for pool, row in (("latent_pool", V32.row), ("indexer_pool", IndexerLayout(128).row)):
        monkeypatch.setattr(
            problems, pool, lambda n, row=row: torch.empty(n // 64, 64, row, dtype=torch.uint8, device="meta")
        )
    monkeypatch.setattr(problems, "DEVICE", "meta")
    op, source = registry()[name], random.Random(0)
    draw = host.of_new_sizes()[name]
    families: Families[set[Sizes]] = Families()  # the constants of kernels of each template
    traced = 0
    for _ in range(2000):
        tensors, named = draw(source)
        attrs = op.attributes(**named)
        specs = tuple(spec_of(tensors[place]) if place < len(tensors) else None for place, _ in enumerate(op.tensors))
        known = families.find(sizes_of(specs, attrs))
        if known is None or known[1][-1] not in known[0].value:
            calls = trace_call(op, specs, attrs, H200, None).calls([as_compiled(present(op, specs))])
            families.add(calls.sizes, calls.function, set()).value.add(calls.constants)
            traced += 1
    most_templates, most = MOST[name]
    assert len(families) <= most_templates and traced <= most <= _prepared.CallCache.FAMILIES


@pytest.mark.parametrize("name", ["ModelConfigV4", "ModelConfigGlmFlash"])
def test_no_step_of_a_server_is_planned_after_warmup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call of a family would wait for milliseconds, in the middle of serving."""
    monkeypatch.setattr(_prepared, "device_of", lambda _: H200)
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    config = soak.configuration(soak.MODELS[name], 0, "torch")
    for calls in config.kernel_list(H200).planned:
        _prepared.plan_ahead(calls, CPU)
    formats = ("cache_format", "extra_cache_format") if name == "ModelConfigV4" else ()  # which a user need not name
    count = 0
    for place in range(300):
        for call in soak.step(config, (0, place), "torch"):
            op, specs, attrs = call.bound
            attrs = attrs._replace(**dict.fromkeys(attr for attr in attrs._fields if attr in formats))
            seen = as_compiled(given(op, specs))
            kind, sizes = (
                _prepared.kind_of_specs(op, seen, attrs, -1),
                sizes_of(tuple(map(seen.get, op.tensors)), attrs),
            )
            prepared = _prepared.call_cache.kind(kind).prepared(sizes, attrs)
            assert prepared is not None, f"{name}/0/{place}: {call}"
            count += 1
    assert count > 2000


@pytest.mark.parametrize("name", soak.MODELS)
def test_a_call_by_anothers_plan_is_that_of_its_own(name: str) -> None:
    """Results, memory, grids, sizes and kernels of random steps, by what was planned for others before."""
    config = soak.configuration(soak.MODELS[name], 1, "torch")
    kinds: defaultdict[object, Families[dict[Sizes, Calls]]] = defaultdict(Families)
    count = planned = 0
    for place in range(40):
        for call in soak.step(config, (1, place), "torch"):
            op, specs, attrs = call.bound
            seen = as_compiled(given(op, specs))
            specs = tuple(map(seen.get, op.tensors))
            families, sizes = kinds[kind_of(op, specs, attrs)], sizes_of(specs, attrs)
            served = families.find(sizes)
            if served is None or served[1][-1] not in served[0].value:
                calls = trace_call(op, specs, attrs, H200, None).calls([seen])
                families.add(sizes, calls.function, {}).value[calls.constants] = calls
                served = families.find(sizes)
                planned += 1
            assert served is not None
            branch, (results, apart, workspace_bytes, numbers, constants) = served
            calls = branch.value[constants]
            plan, own = make_plan(op, specs, attrs, H200)
            assert results == tuple((spec.shape, row_major(spec.shape)) for spec in own)
            assert calls.dtypes == tuple(spec.dtype for spec in own) and workspace_bytes == plan.workspace_bytes
            launches = [number for launch in plan.active for number in (launch.grid[0], *launch.size_values)]
            assert numbers == (*plan.workspace.values(), *launches)
            kernels = [specialize(launch, plan, seen) for launch in plan.active]
            assert [start.kernel for start in calls.starts[0]] == kernels
            assert (calls.pairs, apart) == distances(op, spaces(op, seen, own, workspace_bytes))
            count += 1
    assert count > 5 * planned


def planned_call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of a warm-up, and nothing that is planned yet."""
    monkeypatch.setattr(_prepared, "device_of", lambda _: H200)
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    return soak.configuration(soak.MODELS["ModelConfigV4"], 0, "torch").kernel_list(H200).planned[0]


def test_a_second_warmup_keeps_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kept = planned_call(monkeypatch), []
    for _ in range(2):
        _prepared.plan_ahead(calls, CPU)
        kept.append({depends_on: len(kind.ahead) for depends_on, kind in _prepared.call_cache.ahead.items()})
    assert kept[0] == kept[1] and sum(kept[0].values()) > 0


def test_threads_that_warm_up_at_once_lose_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is interrupted where it has looked for a kind, by another that plans the same call."""
    calls = planned_call(monkeypatch)

    class Interrupted(dict[Any, Any]):
        others = 1

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if self.others:
                self.others -= 1
                _prepared.plan_ahead(calls, CPU)
            return found

    monkeypatch.setattr(_prepared.call_cache, "ahead", Interrupted())
    _prepared.plan_ahead(calls, CPU)
    kinds = _prepared.call_cache.ahead.values()
    assert len({id(kind) for kind in kinds}) == len(calls.places) and {len(kind.ahead) for kind in kinds} == {1}


def present(op: Op, specs: Specs) -> dict[str, Spec]:
    """The arguments that are given."""
    return {name: spec for name, spec in zip(op.tensors, specs, strict=True) if spec is not None}


def given(op: Op, specs: Specs) -> dict[str, Spec]:
    """The arguments as tensors have them: dense ones without strides."""
    named = present(op, specs).items()
    return {name: replace(spec, strides=None) if spec.is_dense else spec for name, spec in named}


def test_integers_that_begin_anywhere_are_of_two_kinds() -> None:
    """A step's prefill begins where its decodes end: on 4, 8 or 16 bytes, each array in its own way."""
    op, kinds = registry()["map_slots"], set()
    memory = torch.zeros(4, 100, dtype=torch.int32)
    for first, second in itertools.product(range(4), repeat=2):
        indices, table = (
            rows.flatten()[at : at + 63].view(9, 7) for rows, at in ((memory[0], first), (memory[2], second))
        )
        kinds.add(_prepared.read(op, [indices, table, None, None], op.attributes(page_size=64), None)[0])
    assert len(kinds) == 2


def test_a_dense_tensor_is_of_one_kind_whatever_its_strides_are() -> None:
    """Along an axis of one element they are any; a template would ask of each which one it is."""
    op, memory, table = registry()["map_slots"], torch.zeros(100, dtype=torch.int32), torch.zeros(1, 5).int()
    rows = [memory.as_strided((1, 8), (8, 1)), memory.as_strided((1, 8), (100, 1)), memory[:16].view(2, 8)]
    found = [_prepared.read(op, [each, table, None, None], op.attributes(page_size=64), None) for each in rows]
    assert len({kind for kind, _, _ in found}) == 1 and len({sizes for _, sizes, _ in found}) == 2
