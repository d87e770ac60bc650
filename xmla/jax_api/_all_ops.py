"""Every op as a function, those too that `xmla.jax_api` has none of: for code of xmla, its tools and its tests."""

from types import SimpleNamespace
from typing import Any

from xmla.core.op import Op, op_function
from xmla.core.registry import registry
from xmla.jax_api import _functions
from xmla.jax_api._ops import public


def _function(op: Op) -> Any:
    if op.name in _functions.__all__:
        return getattr(_functions, op.name)
    return op_function(op, public(op), ("implementation",))


JAX_OPS = SimpleNamespace(**{name: _function(op) for name, op in registry().items()})
