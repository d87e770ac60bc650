"""Every op as a function, those too that `xmla.torch_api` has none of: for code of xmla, its tools and its tests.

Importing it defines the latter in `torch.ops.xmla`.
"""

from types import SimpleNamespace
from typing import Any

from xmla.core.op import Op, op_function
from xmla.core.registry import registry
from xmla.torch_api import _functions
from xmla.torch_api._ops import planned, public


def _function(op: Op) -> Any:
    if op.name in _functions.__all__:
        return getattr(_functions, op.name)
    return planned(op_function(op, public(op), ("out", "workspace", "implementation")))


TORCH_OPS = SimpleNamespace(**{name: _function(op) for name, op in registry().items()})
