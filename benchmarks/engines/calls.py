"""Calls of xmla's ops, counted in an engine's processes."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

CALLS: Counter[str] = Counter()


def count(ops: Iterable[str], first: Callable[[str], None] = lambda name: None) -> None:
    """Count the calls of these ops by PyTorch in this process; `first` is told an op's name before its first call."""
    from xmla import torch_api as xt

    for name in ops:
        setattr(xt, name, counted(getattr(xt, name), name, first))


def counted(op: Callable[..., Any], name: str, first: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(op)  # with its plan
    def call(*args: Any, **kwargs: Any) -> Any:
        if not CALLS[name]:
            first(name)
        CALLS[name] += 1
        return op(*args, **kwargs)

    return call
