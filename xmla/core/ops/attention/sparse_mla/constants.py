"""What attention kernels are compiled for: one object a kernel, of which a call's plan names every field."""

from dataclasses import dataclass
from math import inf, log
from typing import Self

from xmla.core.call import Problem
from xmla.core.formats.mla import MlaLayout
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages(Constants):
    """The pages of a source's cache."""

    LAYOUT: MlaLayout
    PAGE_STRIDE: int  # bytes, or elements of plain rows
    PAGE_SIZE: int

    @classmethod
    def of(cls, problem: Problem, source: str = "", **lengths: bool) -> Self:
        """`source`: the prefix of its arrays."""
        cache = f"{source}cache"
        return cls(
            LAYOUT=problem.formats[cache],
            PAGE_STRIDE=problem.specs[cache].stride(0),
            PAGE_SIZE=problem.page_size(cache),
            **lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Pages):
    """A source: the pages of its cache, and whether tokens have lengths beside their slots."""

    HAS_LENGTHS: bool

    @classmethod
    def with_lengths(cls, problem: Problem, source: str = "") -> Self:
        return cls.of(problem, source, HAS_LENGTHS=problem.has(f"{source}lengths"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue(Constants):
    """What becomes of a row's sums, in the attention kernel itself or in the combination of its splits."""

    HAS_SINK: bool
    EMPTY_LSE: float  # of a row without valid keys
    LSE_UNIT: float  # of the lse in log2
    LSE_SINK: bool  # whether the lse's sum has the sink
    ROPE: int  # the last dims, which are rotated back; 0 if none are
    COS_SIN_STRIDE: int

    @classmethod
    def of(cls, problem: Problem) -> "Epilogue":
        attrs, rotate = problem.attrs, problem.has("cos_sin")
        return cls(
            HAS_SINK=problem.has("sink"),
            EMPTY_LSE=inf if attrs.empty_lse == "+inf" else -inf,
            LSE_UNIT=1.0 if attrs.lse_base == "2" else log(2),
            LSE_SINK=attrs.lse_sink,
            ROPE=problem.formats["cache"].rope if rotate else 0,
            COS_SIN_STRIDE=problem.specs["cos_sin"].stride(0) if rotate else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Constants):
    """Constants of every attention kernel."""

    HEADS: int
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    SOURCE: Source
    EXTRA: Source | None  # the second source
    SCALE: float
    SPLIT: bool  # whether the keys of a row are divided among programs
    EPILOGUE: Epilogue
    BLOCK_H: int  # heads of a program
    OVERLAP_LIMIT: int  # core/lang/launches.py

    @property
    def LAYOUT(self) -> MlaLayout:
        """The format of the first source's entries; in kernels for one architecture of all entries."""
        return self.SOURCE.LAYOUT

    @property
    def JOINED(self) -> Source | None:
        """The second source if it has entries of the first's layout."""
        return self.EXTRA if self.EXTRA is not None and self.EXTRA.LAYOUT == self.LAYOUT else None

    @property
    def HAS_LENGTHS(self) -> bool:
        """Whether rows may have fewer keys than others."""
        return self.SOURCE.HAS_LENGTHS or (self.EXTRA is not None and self.EXTRA.HAS_LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination(Constants):
    """Constants of the combination of splits."""

    HEADS: int
    EPILOGUE: Epilogue
    PARTS: int  # of a head's dims, each of a program
    POWERS: int  # groups of a split's dims that are f16 over a power of two each; 0 if they are f32
    SKIP: bool  # whether splits with the lse −inf may have no results; those of the others then come later
    MAX_SPLITS: int  # a power of two
    AT_ONCE: int  # splits whose results are loaded at once, a power of two
    OVERLAP_LIMIT: int
