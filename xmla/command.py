"""The `xmla` command: the options of every subcommand.

A subcommand imports what it needs when it runs, so that `xmla --help` is quick.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from xmla import __version__
from xmla.core.models.published import PUBLISHED
from xmla.demo import Framework, Model
from xmla.machine import environment
from xmla.machine.files import drawable, writable

app = typer.Typer(help="DeepSeek sparse attention for PyTorch and JAX.", no_args_is_help=True)


def show_version(value: bool) -> None:
    if value:
        typer.echo(f"xmla {__version__}")
        raise typer.Exit


@app.callback()
def prepare(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    environment.prepare(interpret=context.invoked_subcommand != "warmup")


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, devices, and whether kernels run compiled or interpreted."""
    from xmla.cli.info import show_info

    show_info(as_json)


@app.command()
def demo(
    model: Annotated[
        Model, typer.Option("--model", metavar="MODEL", help=f"Whose attention is replaced: {', '.join(Model)}.")
    ] = Model.V32,
    framework: Annotated[
        Framework,
        typer.Option(
            "--framework",
            metavar="FRAMEWORK",
            help="What the model is written in: torch, which is transformers', or jax.",
        ),
    ] = Framework.TORCH,
    details: Annotated[bool, typer.Option("--details", help="Print every figure beside its bound.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Train the model, and without xmla beside it.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="With --train: draw its curves into this file.", callback=drawable)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the figures to this file, as JSON.", callback=writable)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A model of transformers with its attention replaced: selection, outputs, logits, torch against JAX.

    With --framework jax a model in Flax, without PyTorch. Some minutes where kernels are interpreted, most of them with
    --train.
    """
    from xmla.demo import run

    figures = run(model, details, train, picture, framework, as_json)
    if as_json:
        typer.echo(json.dumps(figures))
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(code=0 if all(figure["ok"] for figure in figures) else 1)


NAMES = ", ".join(f"{name} ({model.title})" for name, model in PUBLISHED.items())


def names_from(incomplete: str) -> list[str]:
    """Names of released models, to complete what is typed."""
    return [name for name in PUBLISHED if name.startswith(incomplete)]


MODEL = typer.Option(
    "--model", metavar="MODEL", autocompletion=names_from,
    help=f"A checkpoint's folder, its config.json, or the name of a released model: {NAMES}.",
)  # fmt: skip
Served = Annotated[str, MODEL]
Checked = Annotated[str | None, MODEL]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that divide the model's query heads.")]
CacheFormat = Annotated[str | None, typer.Option(help="Of the latents' cache, or of V4's window; default: released.")]
ExtraFormat = Annotated[str | None, typer.Option(help="Of V4's compressed entries; default: the released one.")]
NopeFormat = Annotated[str | None, typer.Option(help="Of Mistral-Large-4's layers without rope; default: nope.")]
IndexFormat = Annotated[str | None, typer.Option(help="Of indexer keys: fp8, mxfp4, fp8_ue8m0; default: released.")]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", min=1, help="Requests of a decode step; default: 64, of warmup up to 512."),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option("--max-len", min=1, help="Longest context, in keys; default: 65536, of warmup the model's."),
]
NextN = Annotated[
    list[int] | None,
    typer.Option("--next-n", min=1, help="Tokens a request decodes at once; default: 1, of warmup up to 8."),
]
Prefills = Annotated[
    list[int] | None,
    typer.Option("--prefill", min=1, help="Tokens of a prefill step; default: none, of warmup up to 8192."),
]
Heads = Annotated[int | None, typer.Option(min=1, help="Query heads of this rank; default: the model's share.")]
IndexHeads = Annotated[int | None, typer.Option(min=1, help="Indexer heads; default: the model's.")]
TopK = Annotated[int | None, typer.Option("--k", min=1, help="Selected keys per token; default: the model's.")]
PageSize = Annotated[int | None, typer.Option(min=1, help="Entries a page; default: the model's.")]
Scale = Annotated[float | None, typer.Option(min=0, help="Compiled in; default: the released model's, with YaRN.")]
Floor = Annotated[str | None, typer.Option(help="Of what a step writes, scale or amax; default: each op's own.")]
Workspace = Annotated[int | None, typer.Option(min=1, help="The most bytes that a selection uses; default: 2**29.")]
Invariant = Annotated[bool, typer.Option("--batch-invariant", help="Attention's bits do not follow the batch.")]
Mixed = Annotated[bool, typer.Option(help="Requests of a batch may have different numbers of new tokens.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks that share each request's pages (context parallel).")]
Target = Annotated[str | None, typer.Option("--device", help="A known device; default: the GPU present.")]


@app.command()
def verify(
    op: Annotated[list[str] | None, typer.Option(help="Every case of these ops, and no other.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every case of every op: minutes without a GPU.")] = False,
    implementation: Annotated[
        str | None, typer.Option(help="By these kernels, such as gluon_sm100: the cases that they serve.")
    ] = None,
    model: Checked = None, cache_format: CacheFormat = None, extra_format: ExtraFormat = None,
    nope_format: NopeFormat = None, index_format: IndexFormat = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Every op against its reference, and the two front-ends against each other, on this machine.

    One case for each format of an op's caches: a minute where kernels are interpreted. With --model the ops that its
    steps call, over caches of its formats.
    """
    from xmla.cli.plan import typical
    from xmla.cli.verify import run

    config = None
    if model is not None:
        config = typical(
            model, prefill_tokens=[64], cache_format=cache_format, extra_format=extra_format, nope_format=nope_format,
            index_format=index_format,
        )  # fmt: skip
    raise typer.Exit(code=0 if run(op, every, implementation, config, as_json) else 1)


@app.command()
def replay(file: Annotated[Path, typer.Argument(help="What a failed check wrote.")], as_json: AsJson = False) -> None:
    """Repeat the call of a failed check on this machine, in each front-end; exit 1 if it fails here too."""
    from xmla.cli.replay import run

    raise typer.Exit(code=0 if run(file, as_json) else 1)


layouts = typer.Typer(help="Layouts of caches: what a connector compares before it moves pages.", no_args_is_help=True)
app.add_typer(layouts, name="layouts")
LayoutOf = Annotated[str, typer.Argument(help="A digest, or FORMAT:PAGE such as v32:64 or plain:64:bfloat16.")]


@layouts.command("digest")
def layout_digest(of: LayoutOf, as_json: AsJson = False) -> None:
    """Print all that decides which byte of a page is what."""
    from xmla.cli.layouts import digest_of

    typer.echo(json.dumps({"digest": digest_of(of)}) if as_json else digest_of(of))


@layouts.command("check")
def layout_check(first: LayoutOf, second: LayoutOf, as_json: AsJson = False) -> None:
    """Compare two layouts: the fields in which they differ; exit 1 if there are any."""
    from xmla.cli.layouts import check

    raise typer.Exit(code=0 if check(first, second, as_json) else 1)


@app.command()
def supports(
    op: Annotated[str | None, typer.Argument(help="An op's name; a word that is none lists them.")] = None,
    asked: Annotated[
        list[str] | None,
        typer.Argument(help="Sizes of axes, formats and dtypes of arguments, such as H=16 K=2048 cache=plain."),
    ] = None,
    device: Annotated[list[str] | None, typer.Option(help="Only devices whose names contain this.")] = None,
    model: Checked = None, tensor_parallel: TensorParallel = 1, cache_format: CacheFormat = None,
    extra_format: ExtraFormat = None, nope_format: NopeFormat = None, index_format: IndexFormat = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Whether an op runs at these sizes and formats, on each known device; needs no GPU. Exit 1 if on none of them.

    Sizes that are not given are those of an example call, which the first line shows. With --model, and no op, whether
    the steps of a model run, and by which kernels: a decode of 64 requests and prefills, at its longest context.
    """
    from xmla.cli.plan import configure, show_model_support, show_support
    from xmla.core.errors import ArgumentError

    if op is not None and model is None:
        raise typer.Exit(code=0 if show_support(op, asked or [], device, as_json) else 1)
    if op is not None or model is None:
        raise ArgumentError(f"supports: got {'neither' if op is None else 'both'}, expected an op or --model")
    config = configure(
        model, tensor_parallel, batches=[64], next_n=[1], cache_format=cache_format, extra_format=extra_format,
        nope_format=nope_format, index_format=index_format,
    )  # fmt: skip
    raise typer.Exit(code=0 if show_model_support(config, device, as_json) else 1)


@app.command()
def plan(
    model: Served = "deepseek_v32", batch: Batches = None, max_len: Contexts = None, next_n: NextN = None,
    prefill: Prefills = None, tensor_parallel: TensorParallel = 1, heads: Heads = None, index_heads: IndexHeads = None,
    k: TopK = None, page_size: PageSize = None, cache_format: CacheFormat = None, extra_format: ExtraFormat = None,
    nope_format: NopeFormat = None, index_format: IndexFormat = None, softmax_scale: Scale = None,
    scale_floor: Floor = None, workspace: Workspace = None, batch_invariant: Invariant = False, mixed: Mixed = False,
    ranks: Ranks = None, device: Target = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """What a model's steps launch, and the bytes of workspace and caches they need; without a GPU for the H200."""
    from xmla.cli.plan import show_plan, typical

    config = typical(
        model, tensor_parallel, batches=batch, max_lens=max_len, next_n=next_n, prefill_tokens=prefill, heads=heads,
        index_heads=index_heads, k=k, page_size=page_size, cache_format=cache_format, extra_format=extra_format,
        nope_format=nope_format, index_format=index_format, softmax_scale=softmax_scale, scale_floor=scale_floor,
        workspace_bytes=workspace, batch_invariant=batch_invariant, mixed=mixed, ranks=ranks,
    )  # fmt: skip
    show_plan(config, device, as_json)


@app.command()
def warmup(
    context: typer.Context, model: Served = "deepseek_v32", batch: Batches = None, max_len: Contexts = None,
    next_n: NextN = None, prefill: Prefills = None,
    no_prefill: Annotated[bool, typer.Option("--no-prefill", help="Decodes alone, as a pool of decodes has.")] = False,
    tensor_parallel: TensorParallel = 1, heads: Heads = None, index_heads: IndexHeads = None, k: TopK = None,
    page_size: PageSize = None, cache_format: CacheFormat = None, extra_format: ExtraFormat = None,
    nope_format: NopeFormat = None, index_format: IndexFormat = None, softmax_scale: Scale = None,
    scale_floor: Floor = None, workspace: Workspace = None, batch_invariant: Invariant = False, mixed: Mixed = False,
    ranks: Ranks = None, device: Target = None,
    pack: Annotated[
        Path | None, typer.Option(help="Write the kernels into this file, too.", callback=writable)
    ] = None,
    unpack: Annotated[
        Path | None,
        typer.Option(help="Take the kernels that such a file has; compile none.", exists=True, dir_okay=False),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compile every kernel that a model's steps launch into Triton's cache on disk, in parallel.

    What it does is told on stderr; --json prints the device, the number of kernels and the seconds.
    """
    if device is None:
        environment.require_gpu("warmup", "--device H200 fills the cache on disk for that device")
    if unpack is not None:
        check_unpack_alone(context)
    from xmla._warmup import present_device, warmup
    from xmla.cli.plan import configure, find_device
    from xmla.core.compile import check_steady_keys, read_pack, write_pack

    if pack is not None or unpack is not None:
        check_steady_keys()
    target = None if device is None else find_device(device)
    begun = time.perf_counter()
    if unpack is not None:
        present = target or present_device()[0]
        count = read_pack(unpack, present)
        typer.echo(f"{count} kernels of {unpack} ready for {present.name}", err=True)
        if as_json:
            seconds = round(time.perf_counter() - begun, 3)
            typer.echo(json.dumps({"device": present.name, "kernels": count, "seconds": seconds}))
        return
    config = configure(
        model, tensor_parallel, batches=batch, max_lens=max_len, next_n=next_n,
        prefill_tokens=[] if no_prefill else prefill, heads=heads, index_heads=index_heads, k=k, page_size=page_size,
        cache_format=cache_format, extra_format=extra_format, nope_format=nope_format, index_format=index_format,
        softmax_scale=softmax_scale, scale_floor=scale_floor, workspace_bytes=workspace,
        batch_invariant=batch_invariant, mixed=mixed, ranks=ranks,
    )  # fmt: skip
    report = warmup(config, target)
    if pack is not None:
        write_pack(pack, report.specializations, target or present_device()[0])
        typer.echo(f"{pack}: {pack.stat().st_size / 2**20:.1f} MiB", err=True)
    if as_json:
        name, seconds = (target or present_device()[0]).name, round(report.seconds, 3)
        typer.echo(json.dumps({"device": name, "kernels": len(report.specializations), "seconds": seconds}))


def check_unpack_alone(context: typer.Context) -> None:
    """Refuse what would say which kernels to compile, where a file says which there are."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in ("unpack", "device", "as_json") and source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(f"expected no {parameter.opts[0]} beside it", param_hint="'--unpack'")


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only these ops; `host` is the host time of calls.")] = None,
    framework: Annotated[
        str, typer.Option(help="Compare and time in these frameworks; PyTorch makes the inputs.")
    ] = "torch,jax",
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.", callback=writable)] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Show speed against this earlier file.", exists=True, dir_okay=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw times and roofline into this file.", callback=drawable)
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit to record, where the tree is not a git checkout.")
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Time these kernels, such as gluon_sm100, beside what calls take by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time ops at serving size on this GPU, beside peers where installed; exit 1 if a result was wrong.

    JAX makes the same calls on the same arrays: also exits 1 if its results have other bits.
    """
    from xmla.bench.run import run

    right = run(op, out, compare, picture, commit, framework.split(","), implementation, as_json)
    raise typer.Exit(code=0 if right else 1)


def main() -> None:
    """Run the command. A user's mistake is one line on stderr and exit code 2, not a traceback."""
    from xmla.core.errors import ArgumentError, CompileError, UnsupportedError

    try:
        app()
    except (ArgumentError, CompileError, UnsupportedError) as error:
        typer.echo(f"xmla: {error}", err=True)
        raise SystemExit(2) from None
    except SystemExit as end:
        if "triton" in sys.modules and end.code in (0, 1):
            leave(end.code)
        raise


def leave(code: int) -> None:
    """End the process at once: at a usual end Triton's bindings report functions as leaked once it has compiled."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
