"""XMLA_SHADOW=p: a share p of the rows of each call again, by the definition, beside the call.

What the kernels make of live data is so compared with what they should make of it: recall of selections, cosine drift
of everything else, logged at INFO with the worst so far. Beyond a bound it is an ERROR, with a reproducer.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmla.core.config import settings
from xmla.core.op import Op
from xmla.core.reproducer import Take, has_tokens, save, shrink
from xmla.core.spec import Spec

log = logging.getLogger("xmla")

# 1 − 2Σab / Σ(a² + b²): FlashMLA's and DeepGEMM's own bound for results of 16 bits and of fp8 products.
MAX_DRIFT = 5e-6
# Keys within rounding of the last one selected may be told apart otherwise than in float64.
MIN_RECALL = 0.99

# A selection that differs by such a key changes the attention over it.
MAX_DRIFT_AFTER_SWAP = 1e-3

_random = np.random.default_rng(0)
_lock = threading.Lock()
_worst: dict[tuple[str, str], float] = {}
_rows: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Sample:
    """Part of a call, taken before it ran; `rows` are its tokens, None for all of it."""

    op: Op
    attrs: Mapping[str, Any]
    arrays: dict[str, np.ndarray]
    rows: np.ndarray | None
    strides: Mapping[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far one result is from its definition: 1 − recall, cosine drift, or the share of wrong elements."""

    result: str
    kind: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound


def sample(
    op: Op, arrays: Mapping[str, Any], specs: Mapping[str, Spec], attrs: Mapping[str, Any], take: Take
) -> Sample | None:
    """Choose rows of a call that is about to run, or None. A call that updates a cache is taken as a whole."""
    tokens = next((spec.shape[0] for name, spec in specs.items() if has_tokens(op, name)), 0)
    rows = None
    if tokens and not op.mutates:
        rows = np.flatnonzero(_random.random(tokens) < settings.shadow)
        if not len(rows):
            return None
    elif _random.random() >= settings.shadow:
        return None
    small, rows = shrink(op, arrays, rows, take)
    return Sample(op, dict(attrs), small, rows, {name: spec.strides for name, spec in specs.items()})


def compare(taken: Sample, arrays: Mapping[str, Any], results: Sequence[Any], take: Take) -> list[Drift]:
    """The sampled rows of `results` (and of updated caches in `arrays`) against the definition; logged.

    A call beyond its bounds is logged as an error with the command that repeats it; nothing is raised.
    """
    op = taken.op
    got = {name: take(result, taken.rows) for name, result in zip(op.outputs, results, strict=True)}
    if op.mutates:
        after, _ = shrink(op, arrays, None, take)
        got |= {name: after[name] for name in op.mutates}
    found = drifts(op, taken.arrays, taken.attrs, got)
    with _lock:
        _rows[op.name] += 1 if taken.rows is None else len(taken.rows)
        for drift in found:
            key = op.name, drift.result
            _worst[key] = max(_worst.get(key, 0.0), drift.value)
        shown = ", ".join(f"{d.result} {d.kind} {d.value:.1e} (worst {_worst[op.name, d.result]:.1e})" for d in found)
        count = _rows[op.name]
    log.info("shadow %s: %s; %d rows so far", op.name, shown, count)
    if wrong := [drift for drift in found if not drift.ok]:
        failure = "; ".join(f"{d.result}: {d.kind} {d.value:.3g}, at most {d.bound:g}" for d in wrong)
        repeat = save("XMLA_SHADOW", op.name, taken.arrays, taken.attrs, failure, taken.strides)
        log.error("shadow %s: %s; %s", op.name, failure, repeat)
    return found


def drifts(
    op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any], got: Mapping[str, np.ndarray]
) -> list[Drift]:
    """Each result, and each array that the call updates, against the definition on the same inputs."""
    inputs = {name: array.copy() if name in op.mutates else array for name, array in arrays.items()}
    with np.errstate(all="ignore"):
        values = op.reference(**inputs, **attrs)
    values = values if isinstance(values, tuple) else () if values is None else (values,)
    want = dict(zip(op.outputs, map(np.asarray, values), strict=True)) | {name: inputs[name] for name in op.mutates}
    found: list[Drift] = []
    for name, value in want.items():
        if name == "indices":
            found.append(Drift(name, "1 − recall", 1 - _recall(got[name], value), 1 - MIN_RECALL))
        elif value.dtype.kind in "iub":
            found.append(Drift(name, "wrong share", float(np.mean(got[name] != value)) if value.size else 0.0, 0.0))
        else:
            swapped = "indices" in want and not np.array_equal(got["indices"], want["indices"])
            bound = MAX_DRIFT_AFTER_SWAP if swapped else MAX_DRIFT
            found.append(Drift(name, "cosine drift", _cosine_drift(got[name], value), bound))
    return found


def _recall(got: np.ndarray, want: np.ndarray) -> float:
    """The least share of a row's keys that were found."""
    rows = [(set(a[a >= 0].tolist()), set(b[b >= 0].tolist())) for a, b in zip(got, want, strict=True)]
    return min((len(a & b) / max(len(a), len(b)) for a, b in rows if a or b), default=1.0)


def _cosine_drift(got: np.ndarray, want: np.ndarray) -> float:
    """1 − 2Σab / Σ(a² + b²) where the definition is finite; NaN there is not defined. Infinite for other infinities."""
    with np.errstate(invalid="ignore"):  # what nobody wrote may be a signalling NaN
        a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]):
        return float("inf")
    finite = np.isfinite(b)
    a, b = a[finite], b[finite]
    if not np.isfinite(a).all():
        return float("inf")
    total = float((a * a + b * b).sum())
    return abs(1 - 2 * float((a * b).sum()) / total) if total else 0.0
