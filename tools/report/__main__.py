"""`python -m tools.report [--check]`: write every table and picture of the README and the documents (`make report`)."""

import sys
from typing import Annotated

import typer

from tools.report.pages import others, write


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if one is of other results.")] = False,
) -> None:
    """Write every table and picture of the README and the documents, from benchmarks/results."""
    if not check:
        write()
    elif wrong := others():
        sys.exit(f"of other results: {', '.join(wrong)}; run python -m tools.report")


if __name__ == "__main__":
    typer.run(main)
