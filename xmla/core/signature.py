"""Functions with an op's own signature, generated once: binding arguments in Python costs more than a launch."""

import inspect
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from xmla.core.op import Op


def define(op: Op, target: Callable[..., Any], options: tuple[str, ...], doc: str) -> Any:
    """A function with the prototype's parameters, docstring `doc`, and keywords `options`, None by default.

    It calls `target(tensors, attrs, *options)` with a list and a tuple, in the order of the declaration.
    """
    parameters = inspect.signature(op.prototype).parameters.values()
    positional = [p.name + ("=None" if p.name in op.optional else "") for p in parameters if p.name in op.tensors]
    attributes = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    keywords = [p.name + ("" if p.default is p.empty else f"={p.default!r}") for p in attributes]
    keywords += [f"{name}=None" for name in options]
    star = ["*"] if keywords else []
    tensors = f"[{', '.join(op.tensors)}]"
    attrs = f"({''.join(attr.name + ', ' for attr in op.attrs)})"
    source = (
        f"def {op.name}({', '.join([*positional, *star, *keywords])}):\n"
        f"    return _target({', '.join([tensors, attrs, *options])})\n"
    )
    function = generated(source, op.name, _target=target)
    function.__doc__ = doc
    function.__module__ = target.__module__.rpartition(".")[0]  # the front-end, where pickle finds it
    return function


def generated(source: str, name: str, **scope: Any) -> Any:
    """The function `name` that `source` defines, with the globals `scope`."""
    exec(_code(source, f"<{name}>"), scope)
    return scope[name]


@cache
def _code(source: str, label: str) -> CodeType:
    return compile(source, label, "exec")
