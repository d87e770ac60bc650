"""`python -m xmla.bench.record --out FILE COMMAND …`: run a command, append what it showed as a JSON line."""

import json
import shlex
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from xmla.bench.provenance import provenance
from xmla.machine.files import writable

app = typer.Typer(add_completion=False)


# The command's own options follow its name.
@app.command(context_settings={"allow_interspersed_args": False})
def main(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    out: Annotated[Path, typer.Option(help="Append to this file.", callback=writable)],
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines to keep.")] = 40,
) -> None:
    """Run a command, show its output, and keep its exit code, seconds and last lines with versions and commit."""
    start = time.monotonic()
    last: deque[str] = deque(maxlen=lines)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            if line.strip():  # where Python and the tree lie is the machine's own
                last.append(line.rstrip().replace(sys.prefix, "PYTHON").replace(str(Path.cwd()), "."))
    seconds = round(time.monotonic() - start, 1)
    figures = {"exit_code": running.returncode, "seconds": seconds, "last_lines": [*last]}
    with out.open("a") as file:
        file.write(json.dumps(provenance(shlex.join(command), commit) | figures, ensure_ascii=False) + "\n")
    raise typer.Exit(code=running.returncode)


if __name__ == "__main__":
    app()
