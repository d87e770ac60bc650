"""`python -m xmla.bench.ranks_report FILE [--readme README.md]`: steps over several GPUs, measured and projected.

A run of the benchmark is a table; more than two numbers of ranks are projected.

A projection adds up terms that were measured: logits and top-k at the same local context (or the shortest measured),
attention as on the most ranks measured, merges and exchanges along the line through the two largest numbers of ranks.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench.report import insert

MARKERS = "<!-- ranks -->\n", "<!-- /ranks -->"
PROJECTED = (8, 64)


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

    def local(self, part: str, requests: int, local: float) -> float:
        """Microseconds of a part that depends on a rank's own keys, at the measured share nearest to `local`."""
        shares = {c / w: case["us"][part] for (w, r, c), case in self.cases.items() if r == requests}
        return shares[min(shares, key=lambda share: abs(share - local))]

    def line(self, part: str, requests: int, context: int, ranks: int) -> float:
        """Microseconds of a part that grows with the ranks, extrapolated."""
        few, most = self.ranks[-2:]
        low, high = (self.cases[w, requests, context]["us"][part] for w in (few, most))
        return max(high + (high - low) / (most - few) * (ranks - most), high)

    def projected(self, requests: int, context: int, ranks: int) -> float:
        """Microseconds of a step with scattered heads."""
        most = self.cases[self.ranks[-1], requests, context]["us"]
        exchange = "exchange attention, scattered"  # a rank receives nearly the same bytes whatever the ranks
        known = ("logits", "topk", "attention", "merge_topk", "merge_attention", "exchange candidates", exchange)
        rest = most["step, scattered"] - sum(most[part] for part in known)
        return (
            max(rest, 0.0)
            + sum(self.local(part, requests, context / ranks) for part in ("logits", "topk"))
            + most["attention"]
            + sum(self.line(part, requests, context, ranks) for part in ("merge_topk", "exchange candidates"))
            + most["merge_attention"]
            + most[exchange]
        )


def _table(results: Results) -> str:
    versions = results.head["versions"]
    *_, most = several = [ranks for ranks in results.ranks if ranks > 1]
    projected = PROJECTED if len(several) > 1 else ()
    columns = [f"{ranks} GPUs" for ranks in several]
    columns += ["exchange", "bytes, predicted", "by NVLink", *(f"{ranks} GPUs, projected" for ranks in projected)]
    shown = [
        f"{versions['devices'][0]} × {len(versions['devices'])}, {results.head['date']}, commit "
        f"{results.head['commit'][:12]}, torch {versions['torch']}, Triton {versions['triton']}, NCCL.",
        "",
        f"| context | requests | 1 GPU | {' | '.join(columns)} |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for context, requests in sorted({(context, requests) for _, requests, context in results.cases}):
        alone = results.cases.get((1, requests, context))  # a run that was short of time has it on more ranks alone
        cells = [f"{context:,}", str(requests), f"{alone['us']['one GPU']:.0f} µs" if alone else ""]
        for count in several:
            times = results.cases[count, requests, context]["us"]
            cells.append(f"{times['step']:.0f} / {times['step, scattered']:.0f} µs")
        last = results.cases[most, requests, context]
        cells += [f"{last['share_of_exchange']:.0%}", f"{sum(last['received_bytes'].values()) / 1e6:.2f} MB"]
        cells.append(f"{last['nvlink_received_bytes'] / 1e6:.2f} MB" if "nvlink_received_bytes" in last else "")
        cells += [f"{results.projected(requests, context, count):.0f} µs" for count in projected]
        shown.append(f"| {' | '.join(cells)} |")
    return "\n".join(shown) + "\n"


def report(file: Path) -> str:
    """Markdown: of each run where the figures come from, then a line a case."""
    return "\n".join(map(_table, Results.read(file)))


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines written by `python -m xmla.bench.parallel run`.")],
    readme: Annotated[Path | None, typer.Option(help="Put the table between this file's markers.", exists=True)] = None,
) -> None:
    """Print the tables in Markdown, or put them in their place."""
    if readme is None:
        typer.echo(report(file))
    else:
        readme.write_text(insert(readme.read_text(), report(file), MARKERS))


if __name__ == "__main__":
    typer.run(main)
