"""JSON lines of results, and the ends of logs beside them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def begin(file: Path, command: str, commit: str | None, model: Path, releases: Mapping[str, str]) -> None:
    """Write where the lines behind this come from."""
    from xmla.bench.provenance import provenance  # engines of their own import this module, and nothing of xmla

    file.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config |= config.pop("text_config", {})  # V4.1's
    sizes = {name: config[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "index_topk")}
    settings = {name: value for name, value in os.environ.items() if name.startswith("XMLA_")}
    write(file, provenance(command, commit) | {"environment": settings} | {**releases} | {"model": sizes})


def write(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def keep_log(out: Path, name: str, log: Path, status: int, lines: int = 80) -> None:
    """Keep a log's end, before it what names xmla and an engine's lines with times; print the end of a failure."""
    text = [line for line in log.read_text().strip().splitlines() if not line.startswith((" - leaked", "nanobind"))]
    named = [line for line in text[:-lines] if "xmla" in line or line.startswith(("INFO", "WARNING"))]
    with (out / "logs.txt").open("a") as file:
        file.write("\n".join([f"=== {name}: exit status {status}", *named, "…", *text[-lines:], ""]))
    told = "" if status == 0 else ": " + "\n    ".join(text[-12:])
    print(f"{name}: exit status {status}{told}", flush=True)
