"""Where a figure comes from: command, commit, date, versions, devices."""

import subprocess
import time
from collections import Counter
from typing import Any

from xmla.machine.facts import collect


def provenance(command: str, commit: str | None = None) -> dict[str, Any]:
    """The first fields of every committed result; `commit` where the tree is not a git checkout."""
    if commit is None:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = done.stdout.strip() if done.returncode == 0 else "unknown"
    facts = collect()
    apart = ("supported", "untested", "settings", "your programs must set", "driver", "Triton's cache", "compilers")
    versions = {name: value for name, value in facts.items() if name not in apart}
    return {"command": command, "commit": commit, "date": time.strftime("%Y-%m-%d"), "versions": versions}


def origin(head: dict[str, Any]) -> str:
    """Devices, date and commit of a run, as documents and pictures tell them."""
    devices = [f"{name} × {n}" if n > 1 else name for name, n in Counter(head["versions"]["devices"]).items()]
    return f"{', '.join(devices)}, {head['date']}, commit {head['commit'][:12]}"
