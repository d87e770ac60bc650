"""What kernels of compressed rows, and of their derivative, are compiled for."""

from dataclasses import dataclass
from typing import Any

from xmla.core.call import Problem
from xmla.core.ops.training.compress_rows.check import dims_of
from xmla.core.plan import Constants
from xmla.core.values import next_power_of_2

POOLED = 8192  # elements of a window that a program holds at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Constants):
    """The projections of tokens, and the groups that these form."""

    KV_STRIDE: int
    SCORE_STRIDE: int
    APE_STRIDE: int
    RATIO: int
    SERIES: int
    D: int
    HAS_ANGLES: bool  # of what is rotated; an entry whose position has none is not made


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor(Tokens):
    """Constants of the kernel of rows: what becomes of a pooled window."""

    ANGLE_STRIDE: int
    E: int  # 0: no rotation
    EPS: float
    HAS_NORM: bool
    BLOCK_W: int  # rows of a window at once

    @property
    def WINDOW(self) -> int:
        return self.SERIES * self.RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDerivative(Compressor):
    """Constants of the derivative's kernel of windows."""

    DROW_STRIDE: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDerivative(Tokens):
    """Constants of the derivative's kernels of tokens: tiles of tokens by dims."""

    BLOCK_T: int
    BLOCK_D: int


def token_constants(problem: Problem) -> dict[str, Any]:
    """The fields of `Tokens`."""
    specs, dims = problem.specs, dims_of(problem)
    return {
        "KV_STRIDE": specs["kv"].stride(0),
        "SCORE_STRIDE": specs["score"].stride(0),
        "APE_STRIDE": specs["ape"].stride(0),
        "RATIO": problem["r"],
        "SERIES": problem["C·D"] // dims,
        "D": dims,
        "HAS_ANGLES": problem.has("cos_sin"),
    }


def compressor_constants(problem: Problem) -> dict[str, Any]:
    """The fields of `Compressor`."""
    tokens, turned = token_constants(problem), problem.has("cos_sin")
    return {
        **tokens,
        "ANGLE_STRIDE": problem.specs["cos_sin"].stride(0) if turned else 0,
        "E": problem["E"] if turned else 0,
        "EPS": float(problem.attrs.eps) if problem.has("norm_weight") else 0.0,
        "HAS_NORM": problem.has("norm_weight"),
        "BLOCK_W": min(next_power_of_2(tokens["SERIES"] * tokens["RATIO"]), POOLED // tokens["D"]),
    }
