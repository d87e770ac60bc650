"""Every op by name. A new op is one folder in a family of `xmla.core.ops` and its name in the family's `OPS`."""

from xmla.core.errors import ArgumentError, did_you_mean
from xmla.core.op import Op
from xmla.core.ops import attention, blocks, cache, indexer, layer, selection, slots, training

FAMILIES = (layer, attention, indexer, selection, slots, blocks, cache, training)  # in the order that documents list
_OPS = {op.name: op for op in sorted((op for family in FAMILIES for op in family.OPS), key=lambda op: op.name)}


def registry() -> dict[str, Op]:
    """The ops by name."""
    return dict(_OPS)


def find_op(name: str, asked_by: str) -> Op:
    """The op of that name.

    Raises:
        ArgumentError: There is none; the message starts with `asked_by`.
    """
    if name not in _OPS:
        raise ArgumentError(f"{asked_by}: op is {name!r}, expected one of {', '.join(_OPS)}{did_you_mean(name, _OPS)}")
    return _OPS[name]
