"""Functions from text that depends on a call: what a loop at run time would cost more than a launch."""

import linecache
from functools import cache
from types import CodeType
from typing import Any


def exec_function(source: str, name: str, **scope: Any) -> Any:
    """The function `name` that `source` defines, with the globals `scope`; a traceback shows its lines."""
    exec(_code(source, f"<{name} {hash(source):x}>"), scope)
    return scope[name]


@cache
def _code(source: str, label: str) -> CodeType:
    linecache.cache[label] = len(source), None, source.splitlines(keepends=True), label
    return compile(source, label, "exec")
