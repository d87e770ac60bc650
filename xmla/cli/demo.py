"""`xmla demo`: the main job on a real client, with every figure beside the bound it must keep."""

from collections.abc import Iterator
from importlib.resources import files

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from xmla import interop, torch_api
from xmla._frameworks import missing
from xmla.cli import client
from xmla.cli.client import ARRAYS, Attended, Run
from xmla.cli.figures import Figure, figure, identical, overlap, relative_error, show, tell_left_out

PROMPT, DECODED = 120, 8

# On the same caches, step by step, only the kernels can differ from the definition: results are rounded to bfloat16
# (2**-9), and two summation orders in float32 may swap keys whose logits tie. Over a whole run those roundings reach
# the next layer's queries, whose own rounding to fp8 may then swap one key of 32: a few percent of a token.
# Against the model as shipped fp8's share comes on top: 3 bits of mantissa move every key by up to 2**-4, and with it
# the selection where logits are close.
BOUNDS = {
    "selection, same caches": 0.99,
    "attention, same caches": 1e-2,
    "logits, same caches": 5e-2,
    "selection, as shipped": 0.85,
    "attention, as shipped": 0.25,
    "logits, as shipped": 0.2,
}


def _phases(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "prefill", tensor[:PROMPT]
    yield "decode", tensor[PROMPT:]


def against_shipped(ours: Run, shipped: Run) -> Iterator[Figure]:
    for layer in range(len(ours.indices)):
        share = overlap(ours.indices[layer], shipped.indices[layer])
        yield figure("selection, as shipped", f"layer {layer}", share, BOUNDS)
        for (phase, got), (_, want) in zip(
            _phases(ours.attention[layer]), _phases(shipped.attention[layer]), strict=True
        ):
            yield figure("attention, as shipped", f"layer {layer}, {phase}", relative_error(got, want), BOUNDS)
    for (phase, got), (_, want) in zip(_phases(ours.logits), _phases(shipped.logits), strict=True):
        yield figure("logits, as shipped", phase, relative_error(got, want), BOUNDS)


def against_definition(ours: Run, reference: Run) -> Iterator[Figure]:
    """Each layer's step again by the float64 definition on the very same inputs; logits of a whole run over them."""
    for layer, steps in enumerate(ours.steps):
        defined = [
            torch_api.dsa_attention(
                *(step.arguments[name] for name in ARRAYS), k=step.arguments["k"],
                softmax_scale=step.arguments["softmax_scale"], implementation="reference",
            )
            for step in steps
        ]  # fmt: skip
        picked = torch.cat([indices for _, _, indices in defined])
        yield figure("selection, same caches", f"layer {layer}", overlap(ours.indices[layer], picked), BOUNDS)
        for phase, part in (("prefill", slice(0, 1)), ("decode", slice(1, None))):
            got = torch.cat([step.out for step in steps[part]])
            want = torch.cat([out for out, _, _ in defined[part]])
            yield figure("attention, same caches", f"layer {layer}, {phase}", relative_error(got, want), BOUNDS)
    for (phase, got), (_, want) in zip(_phases(ours.logits), _phases(reference.logits), strict=True):
        yield figure("logits, same caches", phase, relative_error(got, want), BOUNDS)


def parity(step: Attended, where: str) -> Iterator[Figure]:
    """One layer's tensors handed to JAX through DLPack, its results handed back and compared bit for bit."""
    from xmla import jax_api

    arrays = [interop.to_jax(step.arguments[name].contiguous()) for name in ARRAYS]
    results = jax_api.dsa_attention(*arrays, k=step.arguments["k"], softmax_scale=step.arguments["softmax_scale"])
    for name, ours, theirs in zip(("out", "lse", "indices"), (step.out, step.lse, step.indices), results, strict=True):
        yield identical(f"torch = JAX: {name}", where, ours, interop.to_torch(theirs))


def cache_parity(step: Attended) -> Iterator[Figure]:
    """The first layer's cache read by one front-end, written again by the other: the same bytes."""
    from xmla import jax_api

    mla = step.arguments["mla_cache"]
    slots = torch.arange(mla.shape[0] * mla.shape[1], device=mla.device, dtype=torch.int32)
    rows = torch_api.read_mla_cache(mla, slots)
    used = (mla.flatten(0, 1) != 255).any(1)
    rows, slots = rows[used], slots[used]
    parts = [rows[:, :512].contiguous(), rows[:, 512:].contiguous(), slots]
    ours = torch.full_like(mla, 255)
    torch_api.write_mla_cache(*parts, ours)
    theirs = jax_api.write_mla_cache(*map(interop.to_jax, parts), interop.to_jax(torch.full_like(mla, 255)))
    yield identical("torch = JAX: cache bytes", "layer 0", ours, interop.to_torch(theirs))


TITLE = "DeepSeek-V3.2 of transformers, attention by xmla"
CAPTION = """same caches: against the definition on the same rounded caches, the kernels' share.
as shipped: against the model's own bfloat16 attention; the rest is the share of fp8."""


def run() -> list[Figure]:
    """Run the demo and print its table; each figure says whether it kept its bound."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = files("xmla.cli").joinpath("data/moby_dick.txt").read_text(encoding="ascii")
    tokens = torch.tensor(list(text.encode("ascii")[: PROMPT + DECODED]), device=device)
    steps = ("as shipped", "xmla", "definition", "comparing", "real sizes")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(steps[0], total=len(steps))

        def done(next_step: str = "") -> None:
            progress.update(task, advance=1, description=next_step)

        model = client.build(device)
        shipped = client.run_as_shipped(model, tokens, PROMPT)
        done(steps[1])
        ours = client.run_replaced(model, tokens, PROMPT)
        done(steps[2])
        reference = client.run_replaced(model, tokens, PROMPT, ours.caches, implementation="reference")
        done(steps[3])
        figures = [*against_definition(ours, reference), *against_shipped(ours, shipped)]
        if not missing("jax"):
            figures += [*parity(ours.steps[0][0], "layer 0, prefill"), *parity(ours.steps[1][-1], "layer 1, decode")]
            figures += cache_parity(ours.steps[0][-1])
        done(steps[4])
        timings = []
        if device == "cuda":
            from xmla.cli.real_sizes import measure

            found, timings = measure()
            figures += found
        done()
    agreement = float((ours.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())
    console.print(f"{PROMPT} tokens of text prefilled, {DECODED} decoded one by one; the most likely next token is the "
                  f"shipped model's for {agreement:.0%} of them.")  # fmt: skip
    show(figures, console, TITLE, CAPTION)
    tell_left_out(console)
    if timings:
        table = Table("op", "b = 1, µs", "b = 64, µs", title="128 heads, 64 indexer heads, top-k 2048, context 32768")
        for row in timings:
            table.add_row(*row)
        console.print(table)
    return figures
