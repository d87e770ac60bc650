"""Ratios of speed: above 1 xmla is faster."""

from collections.abc import Iterable
from statistics import median


def span(ratios: Iterable[float]) -> str:
    """The worst to the best."""
    ascending = [f"{ratio:.2f}" for ratio in sorted(ratios)]
    slowest, fastest = ascending[0], ascending[-1]
    return f"{slowest} ×" if slowest == fastest else f"{slowest} to {fastest} ×"


def middle(ratios: Iterable[float]) -> str:
    """The median, and in brackets the worst and the best."""
    ascending = sorted(ratios)
    shown = f"{median(ascending):.2f} ×"
    return shown if len(ascending) == 1 else f"{shown} ({ascending[0]:.2f} to {ascending[-1]:.2f})"
