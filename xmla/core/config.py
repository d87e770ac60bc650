"""The environment variables, read once when xmla is imported."""

import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


@dataclass(slots=True)
class Settings:
    """What the environment asks for; each field's variable and meaning stand in its metadata."""

    log: str = field(
        default_factory=lambda: os.environ.get("XMLA_LOG", ""),
        metadata={"variable": "XMLA_LOG", "meaning": "level of the `xmla` logger, on stderr: INFO tells each compile"},
    )
    forbid_jit: bool = field(
        default_factory=lambda: _flag("XMLA_FORBID_JIT"),
        metadata={"variable": "XMLA_FORBID_JIT", "meaning": "1: a kernel that no warm-up made ready raises"},
    )
    check: bool = field(
        default_factory=lambda: _flag("XMLA_CHECK"),
        metadata={
            "variable": "XMLA_CHECK",
            "meaning": "1: every index, page and length is read back and validated before a call; slow, waits",
        },
    )
    print_plans: bool = field(
        default_factory=lambda: _flag("XMLA_PRINT_PLANS"),
        metadata={"variable": "XMLA_PRINT_PLANS", "meaning": "1: each new plan is printed once, on stderr"},
    )
    tuned_dir: Path | None = field(
        default_factory=lambda: Path(os.environ["XMLA_TUNED_DIR"]) if os.environ.get("XMLA_TUNED_DIR") else None,
        metadata={
            "variable": "XMLA_TUNED_DIR",
            "meaning": "folder of <op>/<device>.json whose tile choices replace the built-in ones",
        },
    )


settings = Settings()
if settings.log:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger("xmla").addHandler(_handler)
    logging.getLogger("xmla").setLevel(settings.log.upper())


def variables() -> list[tuple[str, str, object]]:
    """Each variable with its meaning and the value in force."""
    return [(f.metadata["variable"], f.metadata["meaning"], getattr(settings, f.name)) for f in fields(Settings)]
