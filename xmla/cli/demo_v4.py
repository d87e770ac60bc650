"""`xmla demo --model deepseek_v4`: window, compressors, indexer and attention with two sources on a real client."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from xmla import interop, torch_api
from xmla._frameworks import missing
from xmla.cli import client_v4
from xmla.cli.client_v4 import Call, PagedAttention, Run
from xmla.cli.figures import Figure, figure, identical, overlap, relative_error, show, tell_left_out
from xmla.core.ops.compress_kv.reference import stored_values
from xmla.torch_api._arrays import to_numpy

# Prefill ends in the first group of 128: its entry is completed while decoding.
PROMPT, DECODED = 124, 8

# Definition: the kernels' share on the very same inputs. Results of attention are rounded to bfloat16 (2**-9), keys
# whose logits tie may swap, and an entry computed in float32 may round the other way: then one value of hundreds moves
# by a step of e4m3, 2**-3.
# Plain rows: queries, rows, probabilities and results of float16, 2**-11 each, with the entries that the model's own
# indexer picked: everything but quantisation.
# As shipped: e4m3 moves every value by up to 2**-4, 2**-5.3 in the mean square, and with it the indexer's keys and so
# the selection where logits are close.
BOUNDS = {
    "selection, definition": 0.99,
    "attention, definition": 1e-2,
    "entries, definition": 5e-3,
    "attention, plain rows": 2e-3,
    "logits, plain rows": 2e-3,
    "selection, as shipped": 0.85,
    "attention, as shipped": 0.12,
    "logits, as shipped": 0.12,
}
TITLE = "DeepSeek-V4 of transformers, attention by xmla"
CAPTION = """definition: each call again by the float64 definition on the same inputs, the kernels' share.
plain rows: against the model's own float32 attention, with float16 rows for its keys and its own picks.
as shipped: the same with 584-byte entries and own picks; the rest is the share of fp8."""
WRITES = ("write_mla_cache", "compress_kv")

Results = tuple[torch.Tensor, ...]


def _phases(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "prefill", tensor[:PROMPT]
    yield "decode", tensor[PROMPT:]


def against_model(run: Run, shipped: Run, how: str) -> Iterator[Figure]:
    """`how` the figures are named: "plain rows" or "as shipped"."""
    for layer, kind in enumerate(client_v4.LAYERS):
        where = f"layer {layer}, {kind.removesuffix('_attention')}"
        picked, wanted = run.indices[layer], shipped.indices[layer]
        if picked is not None and wanted is not None:
            yield figure(f"selection, {how}", where, overlap(picked, wanted), BOUNDS)
        phases = zip(_phases(run.attention[layer]), _phases(shipped.attention[layer]), strict=True)
        for (phase, got), (_, want) in phases:
            yield figure(f"attention, {how}", f"{where}, {phase}", relative_error(got, want), BOUNDS)
    for (phase, got), (_, want) in zip(_phases(run.logits), _phases(shipped.logits), strict=True):
        yield figure(f"logits, {how}", phase, relative_error(got, want), BOUNDS)


def by_definition(call: Call) -> Results:
    """What the float64 definition answers to a call that writes nothing."""
    results = getattr(torch_api, call.op)(*call.tensors, **call.attrs, implementation="reference")
    return results if isinstance(results, tuple) else (results,)


def by_jax(call: Call) -> Results:
    from xmla import jax_api

    arrays = [None if tensor is None else interop.to_jax(tensor.contiguous()) for tensor in call.tensors]
    results = getattr(jax_api, call.op)(*arrays, **call.attrs)
    return tuple(interop.to_torch(array) for array in (results if isinstance(results, tuple) else (results,)))


def _empty(pages: torch.Tensor) -> torch.Tensor:
    return torch.full_like(pages.view(torch.uint8), 255).view(pages.dtype)


def written_by_definition(layer: PagedAttention) -> list[torch.Tensor]:
    """The layer's pools, written from empty ones by the definition of the same calls."""
    pools = {pool.pages.data_ptr(): _empty(pool.pages) for pool in layer.caches.named().values()}
    for call in _writes(layer):
        tensors = [pools.get(tensor.data_ptr(), tensor) for tensor in call.tensors if tensor is not None]
        getattr(torch_api, call.op)(*tensors, **call.attrs, implementation="reference")
    return list(pools.values())


def written_by_jax(layer: PagedAttention) -> list[torch.Tensor]:
    import jax

    from xmla import jax_api

    pools = {pool.pages.data_ptr(): _empty(pool.pages) for pool in layer.caches.named().values()}
    refs = {place: jax.new_ref(interop.to_jax(pages)) for place, pages in pools.items()}
    for call in _writes(layer):
        tensors = [tensor for tensor in call.tensors if tensor is not None]
        arrays = [
            refs[place] if (place := tensor.data_ptr()) in refs else interop.to_jax(tensor.contiguous())
            for tensor in tensors
        ]
        getattr(jax_api, call.op)(*arrays, **call.attrs)
    return [interop.to_torch(ref[...]) for ref in refs.values()]


def _writes(layer: PagedAttention) -> Iterator[Call]:
    return (call for step in layer.steps for call in step if call.op in WRITES)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def _exact(results: Results) -> Results:
    """Those that are moved or rounded once, not computed in float32."""
    return tuple(result for result in results if result.dtype != torch.float32)


def _tuple(results: Any) -> Results:
    return results if isinstance(results, tuple) else (results,)


def against_definition(run: Run) -> Iterator[Figure]:
    for place, layer in enumerate(run.layers):
        where = f"layer {place}"
        pairs: dict[str, list[tuple[Results, Results]]] = {}
        for call in (call for step in layer.steps for call in step if call.op not in WRITES):
            pairs.setdefault(call.op, []).append((_tuple(call.results), by_definition(call)))
        for op, answers in pairs.items():
            if op not in ("sparse_mla", "indexer_topk_paged"):
                got, want = (torch.cat([_bytes(r) for pair in answers for r in _exact(pair[side])]) for side in (0, 1))
                yield identical(f"{op}, definition", where, got, want)
                continue
            got, want = (torch.cat([pair[side][0] for pair in answers]) for side in (0, 1))
            if op == "indexer_topk_paged":
                yield figure("selection, definition", where, overlap(got, want), BOUNDS)
                continue
            for (phase, ours), (_, defined) in zip(_phases(got), _phases(want), strict=True):
                yield figure("attention, definition", f"{where}, {phase}", relative_error(ours, defined), BOUNDS)
        defined = written_by_definition(layer)
        for (name, pool), want in zip(layer.caches.named().items(), defined, strict=True):
            if name.endswith("entries"):
                ours, theirs = (_values(pages) for pages in (pool.pages, want))
                yield figure("entries, definition", f"{where}, {name}", relative_error(ours, theirs), BOUNDS)
            else:
                yield identical(f"{name}, definition", where, pool.pages, want)


def _values(pages: torch.Tensor) -> torch.Tensor:
    """What the entries of a compressor's pool stand for, and zeros where nothing was written."""
    array = to_numpy(pages.cpu())
    return torch.from_numpy(stored_values(array, 128 if array.shape[2] == 132 else 512)).nan_to_num(0.0)


def parity(run: Run) -> Iterator[Figure]:
    """Tensors handed to JAX through DLPack, its results handed back and compared bit for bit."""
    for place, layer in enumerate(run.layers):
        steps: Sequence[tuple[str, list[Call]]] = [("decode", layer.steps[-1])]
        if place == 0:
            steps = [("prefill", layer.steps[0]), *steps]
        for phase, calls in steps:
            answers = [(_tuple(call.results), by_jax(call)) for call in calls if call.op not in WRITES]
            ours, theirs = (torch.cat([_bytes(r) for answer in answers for r in answer[side]]) for side in (0, 1))
            yield identical("torch = JAX: results", f"layer {place}, {phase}", ours, theirs)
        for (name, pool), theirs in zip(layer.caches.named().items(), written_by_jax(layer), strict=True):
            yield identical(f"torch = JAX: {name}", f"layer {place}", pool.pages, theirs)


@torch.no_grad()
def run() -> list[Figure]:
    """Run the demo and print its table; each figure says whether it kept its bound."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = files("xmla.cli").joinpath("data/moby_dick.txt").read_text(encoding="ascii")
    tokens = torch.tensor(list(text.encode("ascii")[: PROMPT + DECODED]), device=device)
    figures: list[Figure] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("as shipped", total=5)

        def done(next_step: str = "") -> None:
            progress.update(task, advance=1, description=next_step)

        model = client_v4.build(device)
        shipped = client_v4.run_as_shipped(model, tokens, PROMPT)
        done("plain rows")
        plain = client_v4.run_replaced(model, tokens, PROMPT, packed=False, picks=shipped.indices)
        figures += against_model(plain, shipped, "plain rows")
        done("v4 entries")
        packed = client_v4.run_replaced(model, tokens, PROMPT, packed=True)
        figures += against_model(packed, shipped, "as shipped")
        done("definition")
        figures += against_definition(packed)
        done("JAX")
        if not missing("jax"):
            figures += parity(packed)
        done()
    agreement = float((packed.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())
    console.print(f"{PROMPT} tokens of text prefilled, {DECODED} decoded one by one; the most likely next token is the "
                  f"shipped model's for {agreement:.0%} of them.")  # fmt: skip
    show(figures, console, TITLE, CAPTION)
    tell_left_out(console)
    return figures
