"""The environment variables, read once when xmla is imported."""

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from xmla.core.errors import ArgumentError


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _number(name: str, most: float | None = None) -> float:
    text = os.environ.get(name, "") or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (most is not None and value > most):
        expected = "of at least 0" if most is None else f"from 0 to {most:g}"
        raise ArgumentError(f"{name} is {text!r}, expected a number {expected}")
    return value


def _level(name: str) -> str:
    text, levels = os.environ.get(name, ""), logging.getLevelNamesMapping()
    if text and text.upper() not in levels:
        raise ArgumentError(f"{name} is {text!r}, expected one of {', '.join(levels)}")
    return text


def _folder(name: str) -> Path:
    return Path(os.environ.get(name) or Path(tempfile.gettempdir(), f"xmla-reproducers-{os.getuid()}"))


def _setting(variable: str, read: Callable[[str], Any], meaning: str) -> Any:
    """A field that `read` takes from the environment's variable."""
    return field(default_factory=lambda: read(variable), metadata={"variable": variable, "meaning": meaning})


@dataclass(slots=True)
class Settings:
    """The settings from the environment; each field's metadata has its variable and meaning.

    `live` is whether `check` or `shadow` is on: the only field that a call reads if both are off.
    """

    live: bool = field(default=False, init=False)
    log: str = _setting(
        "XMLA_LOG",
        _level,
        "level of the `xmla` logger, on stderr or where the program's own logging goes: INFO logs each compile, DEBUG "
        "each new plan too",
    )
    forbid_jit: bool = _setting(
        "XMLA_FORBID_JIT", _flag, "1: raise instead of compiling a kernel that warm-up did not build"
    )
    check: bool = _setting(
        "XMLA_CHECK",
        _flag,
        "1: every index, page and length is read back and validated before a call, and that no entry is written twice; "
        "slow, waits",
    )
    shadow: float = _setting(
        "XMLA_SHADOW",
        partial(_number, most=1),
        "0 to 1: this share of rows is computed again by the reference, and drift logged; slow, waits",
    )
    reproducer_dir: Path = _setting(  # noqa: RUF009
        "XMLA_REPRODUCER_DIR",
        _folder,
        "folder of one's own for calls that failed a check, for `xmla replay`; by default in that of temporary files",
    )
    print_plans: bool = _setting(
        "XMLA_PRINT_PLANS",
        _flag,
        "1: each new plan is logged once, by the logger `xmla.plans`, whatever XMLA_LOG is",
    )
    selections_gib: float = _setting(
        "XMLA_SELECTIONS_GIB",
        _number,
        "GiB of pinned host memory, at most, in which each worker of vLLM records what requests select",
    )
    sglang_required: bool = _setting(
        "XMLA_SGLANG_REQUIRED",
        _flag,
        "1: a process of SGLang ends if xmla cannot be installed into it; without the variable it serves with SGLang's "
        "own kernels",
    )

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("check", "shadow"):
            object.__setattr__(self, "live", bool(getattr(self, "check", False) or getattr(self, "shadow", 0)))


settings = Settings()


def variables() -> list[tuple[str, str, object]]:
    """Each variable with its meaning and the value in force."""
    public_fields = [f for f in fields(Settings) if f.metadata]
    return [(f.metadata["variable"], f.metadata["meaning"], getattr(settings, f.name)) for f in public_fields]


def _start_logging() -> None:
    """Tell on stderr what is asked for, as long as the program has set up no logging that tells it."""
    log, plans = logging.getLogger("xmla"), logging.getLogger("xmla.plans")
    if settings.log:
        log.setLevel(settings.log.upper())
    if settings.print_plans:
        plans.setLevel(logging.DEBUG)
    if settings.log or settings.print_plans:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        handler.addFilter(lambda record: [*logging.getLogger().handlers, *log.handlers] == [handler])
        log.addHandler(handler)


def _warn_of_misspelt() -> None:
    """Warn of a variable that is none of xmla's, but nearly; others may be anybody's, such as those of a service."""
    prefix = "XMLA_"
    known = [variable.removeprefix(prefix) for variable, _, _ in variables()]
    for name in os.environ:
        word = name.upper().removeprefix(prefix)
        if name.upper().startswith(prefix) and name.removeprefix(prefix) not in known:
            for near in get_close_matches(word, known, n=1, cutoff=0.5):
                message = "the environment has %s, which is not read; did you mean %s%s?"
                logging.getLogger("xmla").warning(message, name, prefix, near)


_start_logging()
_warn_of_misspelt()
