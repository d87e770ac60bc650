"""Where an indexer's keys are, rows of a ragged batch or pages of a cache, and selections by the logits of all of them.

What is said of the keys alone asks the call (`shared.py`); here it is which op gives their logits.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmla.core.call import Problem
from xmla.core.op import Composition, Op, same_names
from xmla.core.ops.indexer import indexer_logits, indexer_logits_paged
from xmla.core.plan import Plan
from xmla.core.values import Device, Spec


@dataclass(frozen=True, slots=True)
class KeySource:
    """A place of keys.

    Attributes:
        logits: The op of the logits of all keys. Other ops over such keys take its arguments.
        ranges: The arguments of a selection that bound a row of these logits, and which of the call's they are.
        attributes: The call's attributes that say what the keys are.
    """

    logits: Op
    ranges: Mapping[str, str]
    attributes: tuple[str, ...] = ()


RAGGED = KeySource(indexer_logits.OP, same_names("starts", "ends"))
PAGED = KeySource(indexer_logits_paged.OP, {"ends": "lengths"}, ("cache_format",))


def source_of(arguments: Container[str]) -> KeySource:
    """The source of a call with these arguments."""
    return PAGED if "cache" in arguments else RAGGED


def plan_by_logits(
    problem: Problem, device: Device, select: Op, arrays: Mapping[str, Spec] | None = None, **attrs: object
) -> Plan:
    """The plan that stores the logits of all keys and selects from them by `select`.

    `arrays`: The arguments that are others than the call's.
    """
    source = source_of(problem.specs)
    composition = Composition(problem, device, arrays=arrays)
    of_keys = {name: getattr(problem.attrs, name) for name in source.attributes}
    composition.call(source.logits, same_names(*source.logits.tensors), **of_keys)
    composition.call(select, {"logits": "logits", **source.ranges}, **attrs)
    return composition.plan()


def reference_logits(call: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The reference's logits of all keys, by its arguments, and the ranges of their rows as a selection takes them."""
    source = source_of(call)
    (logits,) = source.logits.reference(**call)
    return logits, {bound: call[name] for bound, name in source.ranges.items()}
