"""What kernels of the indexer's loss are compiled for."""

from dataclasses import dataclass

from xmla.core.ops.training.indexer_scores.constants import Products
from xmla.core.ops.training.indexer_target.constants import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Products):
    """Constants of the kernel of the prediction's and the target's sums."""

    TARGET_STRIDE: int  # with indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Measurement):
    """Constants of the kernel of loss and gradients."""

    COEFF: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient(Products):
    """Constants of kernels of a gradient, or of its bound, that read no target."""

    COEFF: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTarget(Target):
    """Constants of the kernel of the target over ranges."""

    TURN: int  # tokens that take a tile of keys one after the other
