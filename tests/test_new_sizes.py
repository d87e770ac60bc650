"""Calls of ever new sizes, as `xmla bench` draws them: few families serve all, and all of these are kept."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xmla.bench import host, problems
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.core.op.template import sizes_of, trace_call
from xmla.core.registry import registry
from xmla.core.values import H200
from xmla.torch_api import _run
from xmla.torch_api._arrays import spec_of

MOST_FAMILIES = {
    "write_mla_cache": 2, "map_slots": 13, "indexer_topk_paged": 13, "sparse_mla_paged": 40, "dsa_attention": 41,
}  # fmt: skip


@pytest.mark.parametrize("name", MOST_FAMILIES)
def test_families_of_ever_new_sizes_are_few_and_all_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two thousand calls of random sizes: one whose family was dropped is traced again, for milliseconds."""
    for pool, row in (("latent_pool", V32.row), ("indexer_pool", IndexerLayout(128).row)):
        monkeypatch.setattr(
            problems, pool, lambda n, row=row: torch.empty(n // 64, 64, row, dtype=torch.uint8, device="meta")
        )
    monkeypatch.setattr(problems, "DEVICE", "meta")
    op, source = registry()[name], random.Random(0)
    draw = host.of_new_sizes()[name]
    families: list[Callable[..., Any]] = []
    for _ in range(2000):
        tensors, named = draw(source)
        attrs = op.attributes(**named)
        specs = tuple(spec_of(tensors[place]) if place < len(tensors) else None for place, _ in enumerate(op.tensors))
        sizes = sizes_of(specs, attrs)
        for place, family in enumerate(families):
            if family(*sizes) is not None:
                families.insert(0, families.pop(place))
                break
        else:
            template = trace_call(op, specs, attrs, H200, None)
            families.insert(0, template.trace.function((template.workspace_bytes,)))
    assert len(families) <= MOST_FAMILIES[name] <= _run.CallCache.FAMILIES
