"""XMLA_SHADOW=p: compute a share p of the rows of each call again with the reference.

This compares the kernels with the reference on live data: the recall of selections and the cosine drift of all other
results are logged at INFO, with the worst so far. Drift beyond a bound is logged as an ERROR, with a reproducer; so is
a factor common to a result, as a wrong scale is, of which the cosine has half of the square alone.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmla.core.config import settings
from xmla.core.debug.reproducer import Take, has_tokens, save, shrink
from xmla.core.op import Op
from xmla.core.values import (
    EXACT,
    Attributes,
    Device,
    Selection,
    Spec,
    are_subnormal,
    cosine_difference,
    factor_difference,
)

log = logging.getLogger("xmla")

ROUNDED_ONCE = 5e-6  # cosine difference of exact results: the reference does not round to 16 bits
# Drift of attention over a selection that differs in a key within rounding of the last one.
MAX_DRIFT_AFTER_SWAP = 1e-3

_random = np.random.default_rng(0)
_lock = threading.RLock()  # a handler of signals may call an op while its thread holds it
_worst: dict[tuple[str, str, str], float] = {}
_rows: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Sample:
    """Part of a call, taken before it ran; `rows` are its tokens, None for all of it."""

    op: Op
    attrs: Mapping[str, Any]
    arrays: dict[str, np.ndarray]
    rows: np.ndarray | None
    strides: Mapping[str, tuple[int, ...] | None]
    device: str

    def save(self, failure: str) -> str:
        """Save the call; return the command that repeats it, or why there is none."""
        return save("XMLA_SHADOW", self.op.name, self.arrays, self.attrs, failure, self.strides, self.device)


@dataclass(frozen=True, slots=True)
class Drift:
    """The distance of one result from the reference: 1 − recall, cosine drift, the share of wrong elements, or how far
    a common factor is from 1.
    """

    result: str
    kind: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound


def sample(
    op: Op, arrays: Mapping[str, Any], specs: Mapping[str, Spec], attrs: Attributes, take: Take, device: Device
) -> Sample | None:
    """Choose rows of a call on `device` before it runs, or None.

    A call that updates a cache or sums over tokens is sampled as a whole.
    """
    tokens = next((spec.shape[0] for name, spec in specs.items() if has_tokens(op, name)), 0)
    rows = None
    if tokens and not op.mutates and not op.sums_over_tokens:
        rows = np.flatnonzero(_random.random(tokens) < settings.shadow)
        if not len(rows):
            return None
    elif _random.random() >= settings.shadow:
        return None
    small, rows = shrink(op, arrays, rows, take)
    strides = {name: spec.strides for name, spec in specs.items()}
    return Sample(op, attrs._asdict(), small, rows, strides, device.name)


def compare(taken: Sample, arrays: Mapping[str, Any], results: Sequence[Any], take: Take) -> list[Drift]:
    """Compare the sampled rows of `results` (and of updated caches in `arrays`) with the reference, and log the drift.

    A call beyond its bounds is logged as an error with the command that repeats it, and so is a reference that fails;
    nothing is raised.
    """
    op = taken.op
    got = {name: take(result, taken.rows) for name, result in zip(op.outputs, results, strict=True)}
    if op.mutates:
        after, _ = shrink(op, arrays, None, take)
        got |= {name: after[name] for name in op.mutates}
    try:
        all_drifts = drifts(op, taken.arrays, taken.attrs, got)
    except Exception as error:
        log.error("shadow %s: the reference raised %r; %s", op.name, error, taken.save(f"reference: {error!r}"))
        return []
    with _lock:
        _rows[op.name] += 1 if taken.rows is None else len(taken.rows)
        for drift in all_drifts:
            key = op.name, drift.result, drift.kind
            _worst[key] = max(_worst.get(key, 0.0), drift.value)
        summary = ", ".join(
            f"{d.result} {d.kind} {d.value:.1e} (worst {_worst[op.name, d.result, d.kind]:.1e})" for d in all_drifts
        )
        count = _rows[op.name]
    log.info("shadow %s: %s; %d rows so far", op.name, summary, count)
    if wrong := [drift for drift in all_drifts if not drift.ok]:
        failure = "; ".join(f"{d.result}: {d.kind} {d.value:.3g}, at most {d.bound:g}" for d in wrong)
        log.error("shadow %s: %s; %s", op.name, failure, taken.save(failure))
    return all_drifts


def drifts(
    op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any], got: Mapping[str, np.ndarray]
) -> list[Drift]:
    """Each result, and each array that the call updates, against the reference on the same inputs."""
    inputs = {name: array.copy() if name in op.mutates else array for name, array in arrays.items()}
    with np.errstate(all="ignore"):
        values = op.reference(**inputs, **attrs)
    want = dict(zip(op.outputs, map(np.asarray, values), strict=True)) | {name: inputs[name] for name in op.mutates}
    agreements = {name: result.agreement for name, result in op.outputs.items()}
    swapped = any(
        isinstance(agreement, Selection) and not np.array_equal(got[name], want[name])
        for name, agreement in agreements.items()
    )
    all_drifts: list[Drift] = []
    for name, value in want.items():
        agreement = agreements.get(name)
        if isinstance(agreement, Selection):
            all_drifts.append(Drift(name, "1 − recall", 1 - _recall(got[name], value), 1 - agreement.recall))
        elif value.dtype.kind in "iub":
            all_drifts.append(
                Drift(name, "wrong share", float(np.mean(got[name] != value)) if value.size else 0.0, 0.0)
            )
        else:
            bound = 0.0 if agreement is None else agreement.array(got[name].dtype)
            bound = MAX_DRIFT_AFTER_SWAP if swapped else max(bound, ROUNDED_ONCE)
            # Another key moves all dims of a row together: there a factor tells nothing.
            factor = np.inf if swapped else (agreement or EXACT).factor
            all_drifts.append(_drift(name, got[name], value, bound, factor))
    return all_drifts


def _recall(got: np.ndarray, want: np.ndarray) -> float:
    """The least share of a row's keys that were found."""
    rows = [(set(a[a >= 0].tolist()), set(b[b >= 0].tolist())) for a, b in zip(got, want, strict=True)]
    return min((len(a & b) / max(len(a), len(b)) for a, b in rows if a or b), default=1.0)


def _drift(name: str, got: np.ndarray, want: np.ndarray, bound: float, most: float) -> Drift:
    """1 − 2Σab / Σ(a² + b²) where the reference is finite, ignoring NaN there; infinite if infinities differ.

    Of a result that is within this `bound` and multiplied by more than `most` admits, the factor's distance from 1.
    """
    with np.errstate(invalid="ignore"):  # unwritten elements may be signalling NaN
        a, b = got.astype(np.float64), want.astype(np.float64)
    infinite = Drift(name, "cosine drift", float("inf"), bound)
    if not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]):
        return infinite
    finite = np.isfinite(b)
    a, b = a[finite], b[finite]
    if not np.isfinite(a).all():
        return infinite
    drift = Drift(name, "cosine drift", cosine_difference(a, b), bound)
    counted = ~are_subnormal(a, b, got.dtype)
    factor, by_chance = factor_difference(a[counted], b[counted], bound)
    scaled = Drift(name, "factor beside 1", abs(factor), most + by_chance)
    return scaled if drift.ok and not scaled.ok else drift
