"""Functions of ops that no module has a text of."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from xmla.core.compile import exec_function
from xmla.core.op.op import Op


def op_function(op: Op, call: Callable[..., Any], keywords: Sequence[str]) -> Any:
    """The function of an op by a front-end's `call`, as the front-end's modules have it, but for types and docstring.

    Args:
        call: Takes a list of the tensors, a tuple of the attributes, and the keywords.
        keywords: Of every op, by default None.
    """
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for each in inspect.signature(op.prototype).parameters.values()]
    signature = inspect.Signature([*parameters, *(inspect.Parameter(name, kind, default=None) for name in keywords)])
    tensors, attrs = ", ".join(op.tensors), "".join(f"{attr.name}, " for attr in op.attrs)
    source = f"def {op.name}{signature}:\n    return _{op.name}([{tensors}], ({attrs}), {', '.join(keywords)})\n"
    function = exec_function(source, op.name, **{f"_{op.name}": call})
    # Not a global `__name__`: before 2.15 torch.compile looks for globals in the module that it names.
    function.__module__ = __name__
    return function
