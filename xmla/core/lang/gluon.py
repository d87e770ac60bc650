"""Gluon under the names of Triton 3.9, also with 3.7 and 3.8: kernels import `gluon`, `gl` and `async_copy` from here.

Gluon is experimental. A Triton that has neither name fails here, at import, not in the middle of a compilation.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

__all__ = ["add", "async_copy", "cluster", "gl", "gluon"]

cluster = getattr(hopper, "cluster", None)  # kernels of clusters need Triton 3.9


def _provide(owner: Any, name: str, before: str) -> None:
    if not hasattr(owner, name):
        if not hasattr(owner, before):
            raise ImportError(
                f"this Triton's Gluon has neither {name} nor {before}; see `xmla info` for tested versions"
            )
        setattr(owner, name, getattr(owner, before))


_provide(async_copy, "async_load", "async_copy_global_to_shared")
_provide(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@gluon.jit
def add(a, b):
    """The sum of two values, for `gl.associative_scan`: Gluon has `cumsum` from Triton 3.9 on."""
    return a + b
