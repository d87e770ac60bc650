"""`python -m benchmarks.report FILE`: the README's table of numbers from a committed result."""

import json
from pathlib import Path
from typing import Annotated

import typer


def rows(lines: list[dict]) -> list[str]:
    table = ["| op | case | µs | rate | share of ceiling | against |", "|---|---|---|---|---|---|"]
    for line in lines:
        rate = f"{line['tflop_per_s']:.0f} TFLOP/s" if line["ceiling"] != "copy" else f"{line['gb_per_s']:.0f} GB/s"
        against = ", ".join(f"{ratio:.2f} × {peer}" for peer, ratio in line["ratio_to_peer"].items())
        share = f"{line['share_of_ceiling']:.2f} {line['ceiling']}"
        table.append(f"| `{line['op']}` | {line['case']} | {line['us']['xmla'][0]} | {rate} | {share} | {against} |")
    return table


def main(file: Annotated[Path, typer.Argument(help="JSON lines written by benchmarks.run.")]) -> None:
    """Print the table in Markdown; the ratios are speeds, above 1 is faster than the peer."""
    head, *lines = (json.loads(line) for line in file.read_text().splitlines())
    limits, versions = head["ceilings"], head["versions"]
    typer.echo(
        f"{', '.join(versions['devices'])}, {head['date']}, commit {head['commit'][:12]}, "
        f"torch {versions['torch']}, Triton {versions['triton']}, FlashMLA: {head['flash_mla']}. "
        f"Ceilings in the same run: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 {limits['bf16_flop_per_s'] / 1e12:.0f} and fp8 {limits['fp8_flop_per_s'] / 1e12:.0f} TFLOP/s.\n"
    )
    typer.echo("\n".join(rows(lines)))


if __name__ == "__main__":
    typer.run(main)
