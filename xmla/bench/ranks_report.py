"""`python -m xmla.bench.ranks_report FILE [--into docs/ranks.md]`: steps over several GPUs, a table per run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench.provenance import origin
from xmla.bench.report import show

MARKERS = "<!-- ranks -->\n", "<!-- /ranks -->"


@dataclass(frozen=True, slots=True)
class Results:
    """The cases of one run, by (ranks, requests, context)."""

    head: dict[str, Any]
    cases: dict[tuple[int, int, int], dict[str, Any]]

    @classmethod
    def read(cls, file: Path) -> "list[Results]":
        """The runs of a file, each of which begins with where it comes from."""
        runs: list[Results] = []
        for line in map(json.loads, file.read_text().splitlines()):
            if "command" in line:
                runs.append(cls(line, {}))
            else:
                runs[-1].cases[line["ranks"], line["requests"], line["context"]] = line
        return runs

    @property
    def ranks(self) -> list[int]:
        return sorted({ranks for ranks, _, _ in self.cases})


def _table(results: Results) -> str:
    versions = results.head["versions"]
    *_, most = several = [ranks for ranks in results.ranks if ranks > 1]
    columns = [column for ranks in several for column in (f"{ranks} GPUs", f"{ranks}, scattered")]
    columns += ["exchange", "bytes, predicted", "by NVLink"]
    table = [
        f"{origin(results.head)}, torch {versions['torch']}, Triton {versions['triton']}, NCCL.",
        "",
        f"| context | requests | 1 GPU | {' | '.join(columns)} |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for context, requests in sorted({(context, requests) for _, requests, context in results.cases}):
        alone = results.cases.get((1, requests, context))  # a run that was short of time has it on more ranks alone
        cells = [f"{context:,}", str(requests), f"{alone['us']['one GPU']:.0f} µs" if alone else "not timed"]
        for count in several:
            times = results.cases[count, requests, context]["us"]
            cells += [f"{times[kind]:.0f} µs" for kind in ("step", "step, scattered")]
        last = results.cases[most, requests, context]
        cells += [f"{last['share_of_exchange']:.0%}", f"{sum(last['received_bytes'].values()) / 1e6:.2f} MB"]
        cells.append(f"{last['nvlink_received_bytes'] / 1e6:.2f} MB" if "nvlink_received_bytes" in last else "")
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def report(file: Path) -> str:
    """Markdown: of each run where the figures come from, then a line per case."""
    return "\n".join(map(_table, Results.read(file)))


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines written by `python -m xmla.bench.parallel run`.")],
    into: Annotated[Path | None, typer.Option(help="Put the tables between this file's markers.", exists=True)] = None,
) -> None:
    """Print the tables in Markdown, or put them in their place."""
    show(report(file), into, MARKERS)


if __name__ == "__main__":
    typer.run(main)
