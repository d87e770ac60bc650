"""What a pass asks of the indexer of a layer: transformers hands a pass's options to attention, not to the indexer."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from xmla.transformers.learning import IndexerLoss


class Asked(NamedTuple):
    """What a pass asks of a layer's indexer."""

    losses: IndexerLoss | None = None
    selected: torch.Tensor | None = None  # [B, S, K], rows of the layer's `Selections`


_ASKED: ContextVar[Asked] = ContextVar("_ASKED")
# Those of all threads: without any, torch.compile meets no ContextVar, which its older releases refuse.
_UNDER_WAY: list[Asked] = []


@contextmanager
def asking(what: Asked) -> Iterator[None]:
    """Ask this of the indexers that are called meanwhile."""
    _UNDER_WAY.append(what)
    token = _ASKED.set(what)
    try:
        yield
    finally:
        _ASKED.reset(token)
        _UNDER_WAY.pop()


def asked() -> Asked:
    """What is asked of an indexer that is called now."""
    return _ASKED.get(Asked()) if _UNDER_WAY else Asked()
