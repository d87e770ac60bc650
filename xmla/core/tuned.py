"""Tile choices from a folder instead of the built-in heuristics: XMLA_TUNED_DIR."""

import json
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from xmla.core.config import settings
from xmla.core.device import Device
from xmla.core.errors import ArgumentError


@lru_cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else {}


def tuned[Config](op: str, device: Device, key: str, config: Config) -> Config:
    """`config` with the fields that `<folder>/<op>/<device name with underscores>.json` holds under `key`.

    The file maps keys to fields, {"h128-packed": {"block_n": 32}}; `key` names what the op's choice depends on.

    Raises:
        ArgumentError: The file names a field that the op's config does not have.
    """
    if settings.tuned_dir is None:
        return config
    file = settings.tuned_dir / op / f"{device.name.replace(' ', '_')}.json"
    chosen = _read(file).get(key, {})
    if unknown := set(chosen) - {field.name for field in fields(config)}:  # pyrefly: ignore
        known = ", ".join(field.name for field in fields(config))  # pyrefly: ignore
        raise ArgumentError(f"{op}: {file} names {min(unknown)} under {key}, expected one of {known}")
    return replace(config, **chosen)  # pyrefly: ignore
