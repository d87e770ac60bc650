"""What a run is compared with: the model as shipped, the reference, and JAX."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from xmla import interop, torch_api
from xmla.core.registry import registry
from xmla.demo.figures import Figure, figure
from xmla.demo.paged import Call, PagedAttention
from xmla.demo.passes import Run
from xmla.demo.tensors import errors, identical, overlap
from xmla.machine.calls import as_tuple

if TYPE_CHECKING:
    import jax

Results = tuple[torch.Tensor, ...]


@dataclass
class Comparison:
    """A run with xmla as an engine would serve it, one over plain rows, the figures, and tables to print below them."""

    run: Run
    plain: Run
    figures: list[Figure]
    tables: list[Table] = field(default_factory=list)


def against_model(
    run: Run, shipped: Run, how: str, places: Sequence[str], bounds: Mapping[str, float]
) -> Iterator[Figure]:
    """Selection, attention and logits of a run against the model's own; `places` names the layers."""
    for layer, where in enumerate(places):
        ours, theirs = run.indices[layer], shipped.indices[layer]
        if ours is not None and theirs is not None:
            yield figure(f"selection, {how}", where, overlap(ours, theirs), bounds)
        yield from errors(
            f"attention, {how}", where, run.attention[layer], shipped.attention[layer], run.prompt, bounds
        )
    yield from errors(f"logits, {how}", "", run.logits, shipped.logits, run.prompt, bounds)


def writes(call: Call) -> bool:
    """Whether the op updates its arguments in place."""
    return bool(registry()[call.op].mutates)


def by_reference(call: Call) -> Results:
    """The reference's results of a call that writes nothing."""
    return as_tuple(getattr(torch_api, call.op)(*call.tensors, **call.attrs, implementation="reference"))


def _to_jax(tensor: torch.Tensor) -> "jax.Array":
    """A tensor as a JAX array by DLPack; a view that JAX cannot share is copied."""
    dense = tensor.contiguous()
    shared = dense.data_ptr() % interop.ALIGNMENT[dense.device.type] == 0
    return interop.to_jax(dense if shared else dense.clone())


def by_jax(call: Call) -> Results:
    """JAX's results of a call that writes nothing; tensors and results cross by DLPack."""
    from xmla import jax_api

    arrays = [None if tensor is None else _to_jax(tensor) for tensor in call.tensors]
    return tuple(map(interop.to_torch, as_tuple(getattr(jax_api, call.op)(*arrays, **call.attrs))))


def flatten(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of several tensors in one."""
    return torch.cat([result.contiguous().view(torch.uint8).reshape(-1) for result in results])


def against_reference(
    layer: PagedAttention, where: str, how: str, prompt: int, bounds: Mapping[str, float]
) -> Iterator[Figure]:
    """A layer's calls, except writes, against the float64 reference on the same inputs.

    A selection must overlap and attention's `out` must be close. Of other ops the results must be identical, except
    those that are computed in float32.
    """
    pairs: dict[str, list[tuple[Results, Results]]] = {}
    for call in (call for step in layer.steps for call in step if not writes(call)):
        pairs.setdefault(call.op, []).append((call.results, by_reference(call)))
    for op, answers in pairs.items():
        names = list(registry()[op].outputs)
        ours, theirs = ([dict(zip(names, answer[side], strict=True)) for answer in answers] for side in (0, 1))
        if "indices" in names:
            got, want = (torch.cat([results["indices"] for results in side]) for side in (ours, theirs))
            yield figure(f"selection, {how}", where, overlap(got, want), bounds)
        if "out" in names:
            got, want = (torch.cat([results["out"] for results in side]) for side in (ours, theirs))
            yield from errors(f"attention, {how}", where, got, want, prompt, bounds)
        if not {"indices", "out"} & set(names):
            got, want = (
                flatten([result for results in side for result in results.values() if result.dtype != torch.float32])
                for side in (ours, theirs)
            )
            yield identical(f"{op}, {how}", where, got, want)


def _empty(layer: PagedAttention) -> dict[int, torch.Tensor]:
    """Empty pages like the layer's, by the address of the pages that they stand for."""
    pools = (pool.pages for pool in layer.pools.values())
    return {pages.data_ptr(): torch.full_like(pages.view(torch.uint8), 255).view(pages.dtype) for pages in pools}


def _written(layer: PagedAttention) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    """The layer's calls that write, each with its tensors."""
    for call in (call for step in layer.steps for call in step if writes(call)):
        yield call, [tensor for tensor in call.tensors if tensor is not None]


def written_by_reference(layer: PagedAttention) -> list[torch.Tensor]:
    """The pages of the layer's pools, written from empty ones by the reference of the same calls."""
    pages = _empty(layer)
    for call, tensors in _written(layer):
        replaced = [pages.get(tensor.data_ptr(), tensor) for tensor in tensors]
        getattr(torch_api, call.op)(*replaced, **call.attrs, implementation="reference")
    return list(pages.values())


def written_by_jax(layer: PagedAttention) -> list[torch.Tensor]:
    """The pages of the layer's pools, written from empty ones by the same calls in JAX, in Refs."""
    import jax

    from xmla import jax_api

    refs = {place: jax.new_ref(interop.to_jax(pages)) for place, pages in _empty(layer).items()}
    for call, tensors in _written(layer):
        arrays = [refs[place] if (place := tensor.data_ptr()) in refs else _to_jax(tensor) for tensor in tensors]
        getattr(jax_api, call.op)(*arrays, **call.attrs)
    return [interop.to_torch(ref[...]) for ref in refs.values()]


def against_jax(layers: Sequence[PagedAttention], places: Sequence[str]) -> Iterator[Figure]:
    """JAX's results of the first layer's prefill and of every layer's last step, and what it writes, bit for bit.

    `places` names the layers.
    """
    for layer, where in zip(layers, places, strict=True):
        steps = [("prefill", layer.steps[0])] if layer is layers[0] else []
        for phase, calls in (*steps, ("decode", layer.steps[-1])):
            answers = [(call.results, by_jax(call)) for call in calls if not writes(call)]
            ours, theirs = (flatten([result for answer in answers for result in answer[side]]) for side in (0, 1))
            yield identical("torch = JAX: results", f"{where}, {phase}", ours, theirs)
        for (name, pool), theirs in zip(layer.pools.items(), written_by_jax(layer), strict=True):
            yield identical(f"torch = JAX: {name}", where, pool.pages, theirs)
