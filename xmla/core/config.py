"""The environment variables, read once when xmla is imported."""

import logging
import os
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from xmla.core.errors import ArgumentError


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _fraction(name: str) -> float:
    text = os.environ.get(name, "") or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} is {text!r}, expected a number from 0 to 1")
    return value


def _level(name: str) -> str:
    text, levels = os.environ.get(name, ""), logging.getLevelNamesMapping()
    if text and text.upper() not in levels:
        raise ArgumentError(f"{name} is {text!r}, expected one of {', '.join(levels)}")
    return text


@dataclass(slots=True)
class Settings:
    """The settings from the environment; each field's metadata has its variable and meaning.

    `live` is whether `check` or `shadow` is on: the only field that a call reads if both are off.
    """

    live: bool = field(default=False, init=False)
    log: str = field(
        default_factory=lambda: _level("XMLA_LOG"),
        metadata={"variable": "XMLA_LOG", "meaning": "level of the `xmla` logger, on stderr: INFO tells each compile"},
    )
    forbid_jit: bool = field(
        default_factory=lambda: _flag("XMLA_FORBID_JIT"),
        metadata={
            "variable": "XMLA_FORBID_JIT",
            "meaning": "1: raise instead of compiling a kernel that warm-up did not build",
        },
    )
    check: bool = field(
        default_factory=lambda: _flag("XMLA_CHECK"),
        metadata={
            "variable": "XMLA_CHECK",
            "meaning": "1: every index, page and length is read back and validated before a call; slow, waits",
        },
    )
    shadow: float = field(
        default_factory=lambda: _fraction("XMLA_SHADOW"),
        metadata={
            "variable": "XMLA_SHADOW",
            "meaning": "0 to 1: this share of rows is computed again by the reference, and drift logged; slow, waits",
        },
    )
    reproducer_dir: Path = field(
        default_factory=lambda: Path(
            os.environ.get("XMLA_REPRODUCER_DIR") or Path(tempfile.gettempdir(), f"xmla-reproducers-{os.getuid()}")
        ),
        metadata={
            "variable": "XMLA_REPRODUCER_DIR",
            "meaning": "folder of one's own for calls that failed a check, for `xmla replay`; "
            "by default in that of temporary files",
        },
    )
    print_plans: bool = field(
        default_factory=lambda: _flag("XMLA_PRINT_PLANS"),
        metadata={"variable": "XMLA_PRINT_PLANS", "meaning": "1: each new plan is printed once, on stderr"},
    )

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("check", "shadow"):
            object.__setattr__(self, "live", bool(getattr(self, "check", False) or getattr(self, "shadow", 0)))


settings = Settings()
if settings.log:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger("xmla").addHandler(_handler)
    logging.getLogger("xmla").setLevel(settings.log.upper())


def variables() -> list[tuple[str, str, object]]:
    """Each variable with its meaning and the value in force."""
    public_fields = [f for f in fields(Settings) if f.metadata]
    return [(f.metadata["variable"], f.metadata["meaning"], getattr(settings, f.name)) for f in public_fields]
