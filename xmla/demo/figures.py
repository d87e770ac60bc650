"""Figures of a demo: each a value beside the bound that it must keep."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Figure = dict[str, Any]  # name, where, value, bound, ok


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """‖got − want‖ / ‖want‖ in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def figure(name: str, where: str, value: float, bounds: Mapping[str, float]) -> Figure:
    """A share of selected keys, which must reach its bound, or an error, which must not exceed it."""
    return bounded(name, where, value, bounds[name], at_least=name.startswith("selection"))


def bounded(name: str, where: str, value: float, bound: float, at_least: bool = False) -> Figure:
    """A value that must not exceed its bound, or must reach it."""
    ok = value >= bound if at_least else value <= bound
    return {"name": name, "where": where, "value": value, "bound": f"{'≥' if at_least else '≤'} {bound:.3g}", "ok": ok}


def equal(name: str, where: str, same: bool) -> Figure:
    """Whether two results have the same bits."""
    return {"name": name, "where": where, "value": float(same), "bound": "identical", "ok": same}
