"""`python -m xmla.bench.frameworks_report FILE [--into docs/performance.md] [--pictures docs/images]`.

PyTorch and JAX side by side: times of the GPU, of the host, and those of the best peer. The file's lines are those of
`xmla bench --framework torch,jax`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench import picture
from xmla.bench.provenance import origin
from xmla.bench.report import read, show

MARKERS = "<!-- frameworks -->\n", "<!-- /frameworks -->"


def peer_of(line: dict[str, Any]) -> str:
    """The fastest other implementation, and its time."""
    peers = {name: times[0] for name, times in line["us"].items() if name != "xmla" and not name.startswith("itself")}
    if not peers:
        return ""
    name = min(peers, key=peers.__getitem__)
    return f"{peers[name]} {name}"


def gpu_rows(lines: list[dict[str, Any]]) -> list[str]:
    table = ["| op | case | PyTorch, µs | JAX, µs | PyTorch / JAX | best peer, µs |", "|---|---|---|---|---|---|"]
    for line in lines:
        ours, by_jax = picture.in_turns(line)
        table.append(f"| `{line['op']}` | {line['case']} | {ours} | {by_jax} | {ours / by_jax:.2f} | {peer_of(line)} |")
    return table


def host_rows(lines: list[dict[str, Any]]) -> list[str]:
    head = "| op | case | PyTorch: call, with result, µs | jitted JAX: call, with result, µs | without work, µs |"
    table = [head, "|---|---|---|---|---|"]
    for line in lines:
        cells = [f"{line[name]['host_us']}, {line[name]['waited_us']}" for name in ("torch", "jax")]
        cells.append(str(line["jax"]["without_work_us"]))
        table.append(f"| `{line['op']}` | {line['case']} | {' | '.join(cells)} |")
    return table


def cache_rows(lines: list[dict[str, Any]]) -> list[str]:
    """What caches cost the host, as donated arrays and as Refs."""
    times = {line["case"]: line["host_us"] for line in lines if line["op"] == "jit"}
    counts = sorted({int(case.split()[0]) for case in times})
    if not counts:
        return []
    table = [
        "",
        "| caches of a jitted step that does next to nothing | donated arrays, µs | Refs, µs |",
        "|---|---|---|",
    ]
    return table + [f"| {n} | {times[f'{n} donated arrays']} | {times[f'{n} Refs']} |" for n in counts]


def report(file: Path) -> str:
    """Markdown: of each run where its figures come from and GPU times; then the host's times of steps, the last."""
    markdown, every = [], []
    for head, *lines in read([file]):
        versions, timed = head["versions"], [line for line in lines if "us" in line.get("jax", {})]
        same = sum(line["jax"]["same_bits"] for line in timed)
        packages = ", ".join(f"{name} {versions[name.lower()]}" for name in ("torch", "Triton", "JAX"))
        markdown += [f"{origin(head)}, {packages}. The same bits by both in {same} of {len(timed)} cases.", ""]
        markdown += [*gpu_rows(timed), ""]
        every += lines
    steps = {line["case"]: line for line in every if line["op"] == "dsa_attention" and "us" in line}
    return "\n".join([*markdown, *host_rows([*steps.values()]), *cache_rows(every)]) + "\n"


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines written by `xmla bench`.")],
    into: Annotated[Path | None, typer.Option(help="Put the tables between this file's markers.", exists=True)] = None,
    pictures: Annotated[Path | None, typer.Option(help="Draw into this folder.", exists=True)] = None,
) -> None:
    """Print the tables in Markdown, or put them in their place."""
    show(report(file), into, MARKERS)
    if pictures is not None:
        head, *lines = (line for run in read([file]) for line in run)
        picture.draw_frameworks(head, lines, pictures / "frameworks.svg")


if __name__ == "__main__":
    typer.run(main)
