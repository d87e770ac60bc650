"""Measured tile choices: `core/ops/<op>/tuned/<device>.json`, written by benchmarks/tune.py.

A file holds `choices`, {"h128-plain": {"block_n": 32}}, whose keys name what an op's choice depends on and whose fields
replace those of the heuristic, and beside them the timings that chose. A device without a file, or a key that is in
none, has the heuristic. XMLA_TUNED_DIR names a folder of <op>/<device>.json that comes before the files here.
"""

import json
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from xmla.core.config import settings
from xmla.core.device import Device
from xmla.core.errors import ArgumentError

OPS = Path(__file__).with_name("ops")


def file_name(device_name: str) -> str:
    return f"{device_name.replace(' ', '_')}.json"


def built_in(op: str, device_name: str) -> Path:
    """Where the choices of an op on a device stand, if they were measured."""
    return OPS / op / "tuned" / file_name(device_name)


@lru_cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text())["choices"] if file.exists() else {}


def tuned[Config](op: str, device: Device, key: str, config: Config) -> Config:
    """`config` with the fields that were measured to be best under `key` on this device.

    Raises:
        ArgumentError: A file names a field that the op's config does not have.
    """
    files = [built_in(op, device.name)]
    if settings.tuned_dir is not None:
        files.append(settings.tuned_dir / op / file_name(device.name))
    for file in files:
        chosen = _read(file).get(key, {})
        if unknown := set(chosen) - {field.name for field in fields(config)}:  # pyrefly: ignore
            known = ", ".join(field.name for field in fields(config))  # pyrefly: ignore
            raise ArgumentError(f"{op}: {file} names {min(unknown)} under {key}, expected one of {known}")
        config = replace(config, **chosen)  # pyrefly: ignore
    return config
