"""Committed results as documents show them: tables and pictures.

python -m xmla.bench.report FILE … [--beside FILE] [--into docs/performance.md] [--pictures docs/images]

`make report` runs it and its neighbours for every figure of the README and the documents. A file holds one run or
several, each begun by the line that names its command. A run of another device stands beside the first.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench import picture
from xmla.bench.provenance import origin

BEGIN, END = "<!-- numbers -->\n", "<!-- /numbers -->"


def cells(line: dict[str, Any]) -> tuple[str, str, str, str]:
    """A case's time, rate, share of the ceiling and ratios to peers."""
    rate = f"{line['tflop_per_s']:.0f} TFLOP/s" if line["ceiling"] != "copy" else f"{line['gb_per_s']:.0f} GB/s"
    against = ", ".join(f"{ratio:.2f} × {peer}" for peer, ratio in line["ratio_to_peer"].items())
    return str(line["us"]["xmla"][0]), rate, f"{line['share_of_ceiling']:.2f} {line['ceiling']}", against


def by_case(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["op"], line["case"]): line for line in lines if "us" in line}


def rows(lines: list[dict[str, Any]], others: Sequence[dict[str, Any]] = (), device: str = "") -> list[str]:
    """A run's cases; the `others`, of another `device`, in columns beside them, and its further cases below."""
    head, own, beside = ["op", "case", "µs", "rate", "share of ceiling", "against"], by_case(lines), by_case(others)
    if beside:
        head += [f"{device}: µs", "share of ceiling", "against"]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for op, case in own | beside:
        row = [f"`{op}`", case, *(cells(own[op, case]) if (op, case) in own else [""] * 4)]
        if beside:
            us, _, share, against = cells(beside[op, case]) if (op, case) in beside else [""] * 4
            row += [us, share, against]
        table.append(f"| {' | '.join(row)} |")
    return table


def host_rows(lines: list[dict[str, Any]]) -> list[str]:
    calls = [line for line in lines if "torch_add_us" in line]
    if not calls:
        return []
    table = ["", "| host time of an eager torch call | launches | allocations | µs | with `out` and `workspace` |"]
    table.append("|---|---|---|---|---|")
    for line in calls:
        with_out = line.get("host_us_out_workspace", "")
        table.append(
            f"| `{line['op']}` | {line['launches']} | {line['allocations']} | {line['host_us']} | {with_out} |"
        )
    table.append(f"| `torch.add` | 1 | 1 | {calls[0]['torch_add_us']} | |")
    for line in (line for line in lines if "jitted_addition_us" in line):
        addition = f"a jitted addition takes {line['jitted_addition_us']} µs"
        table += ["", f"Dispatch of a jitted JAX `{line['op']}`: {line['host_us']} µs; {addition}."]
    return table


def beginning(head: dict[str, Any]) -> str:
    """Where the figures of one file come from, with the ceilings then."""
    limits, versions = head["ceilings"], head["versions"]
    peers = [head[name] for name in ("flash_mla", "cudnn", "sglang", "vllm", "deep_gemm") if head.get(name)]
    packages = [f"torch {versions['torch']}", f"Triton {versions['triton']}", *peers]
    return (
        f"{origin(head)}, {', '.join(packages)}. "
        f"Ceilings when the run began: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 {limits['bf16_flop_per_s'] / 1e12:.0f} and fp8 {limits['fp8_flop_per_s'] / 1e12:.0f} TFLOP/s."
    )


def read(files: list[Path]) -> list[list[dict[str, Any]]]:
    """The runs of some files: of each the line where its figures come from, then a line per case."""
    runs: list[list[dict[str, Any]]] = []
    for line in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        if "command" in line:
            runs.append([])
        runs[-1].append(line)
    return runs


def report(files: list[Path], beside: Path | None = None) -> str:
    """Markdown of each run: where its figures come from, then a line per case; host times of the last that has any.

    The last run `beside` is another device's. Its cases stand beside the first run's, in a table of their own if it has
    none of these; its host times follow.
    """
    (first, *cases), *more = runs = read(files)
    tables = [[beginning(first), "", *rows(cases)]]
    hosts = [next(run for run in reversed(runs) if host_rows(run[1:]))]
    if beside is not None:
        head, *others = read([beside])[-1]
        hosts += [[head, *others]] if host_rows(others) else []
        if by_case(cases).keys().isdisjoint(by_case(others)):
            more += [[head, *others]]
        else:
            device = head["versions"]["devices"][0].removeprefix("NVIDIA ").split()[0]
            tables = [[beginning(first), "", f"{device}: {beginning(head)}", "", *rows(cases, others, device)]]
    tables += [[beginning(head), "", *rows(lines)] for head, *lines in more if by_case(lines)]
    markdown = [line for table in tables for line in ("", *table)][1:]
    for head, *lines in hosts:
        markdown += ["", *([beginning(head)] if head is not first else []), *host_rows(lines)]
    return "\n".join(markdown) + "\n"


def draw(files: list[Path], folder: Path) -> None:
    """The pictures of the first run."""
    head, *lines = read(files)[0]
    picture.draw_speeds(head, lines, folder / "speed.svg")
    picture.draw(head, lines, folder / "run.svg")


def insert(text: str, numbers: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """`text` with what stands between its two markers replaced by `numbers`."""
    begin, end = markers
    before, rest = text.split(begin)
    return before + begin + numbers + end + rest.split(end)[1]


def show(numbers: str, into: Path | None, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Print `numbers`, or put them between a file's two markers."""
    if into is None:
        typer.echo(numbers)
    else:
        into.write_text(insert(into.read_text(), numbers, markers))


def main(
    files: Annotated[list[Path], typer.Argument(help="JSON lines written by `xmla bench`, the ops' times first.")],
    beside: Annotated[Path | None, typer.Option(help="Another device's, beside the first run's.", exists=True)] = None,
    into: Annotated[Path | None, typer.Option(help="Put the table between this file's markers.", exists=True)] = None,
    pictures: Annotated[Path | None, typer.Option(help="Draw into this folder.", exists=True)] = None,
) -> None:
    """Print the table in Markdown, or put it in its place; the ratios are speeds, above 1 is faster than the peer."""
    show(report(files, beside), into)
    if pictures is not None:
        draw(files, pictures)


if __name__ == "__main__":
    typer.run(main)
