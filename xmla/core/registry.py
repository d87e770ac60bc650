"""Every op by name. A new op is one folder in a family of `xmla.core.ops` and its name in the family's `OPS`."""

from xmla.core.errors import ArgumentError, did_you_mean
from xmla.core.op import Op
from xmla.core.ops import attention, blocks, cache, indexer, layer, selection, slots, training
from xmla.core.values import Attr

FAMILIES = (layer, attention, indexer, selection, slots, blocks, cache, training)  # in the order that documents list
_OPS = {op.name: op for op in sorted((op for family in FAMILIES for op in family.OPS), key=lambda op: op.name)}
_INSTEAD = {op.name: f"call {op.instead}" for op in _OPS.values() if op.instead}
_INSTEAD |= {op.derivative.name: f"differentiate {op.name}" for op in _OPS.values() if op.derivative is not None}


def registry() -> dict[str, Op]:
    """The ops by name."""
    return dict(_OPS)


def public_ops() -> dict[str, Op]:
    """The ops that the front-ends have a function of, by name."""
    return {name: op for name, op in _OPS.items() if name not in _INSTEAD}


def no_attribute(front_end: str, name: str) -> str:
    """The message of an AttributeError of a front-end, which says what to call in place of an op without a function."""
    if name not in _INSTEAD:
        return f"module {front_end!r} has no attribute {name!r}{did_you_mean(name, public_ops())}"
    return f"{front_end} has no function {name}: {_INSTEAD[name]}. In PyTorch the op itself is torch.ops.xmla.{name}"


def find_op(name: str, asked_by: str) -> Op:
    """The op of that name.

    Raises:
        ArgumentError: There is none; the message starts with `asked_by`.
    """
    if Attr("op", str, False, None).plain(asked_by, name) not in _OPS:
        raise ArgumentError(f"{asked_by}: op is {name!r}, expected one of {', '.join(_OPS)}{did_you_mean(name, _OPS)}")
    return _OPS[name]
