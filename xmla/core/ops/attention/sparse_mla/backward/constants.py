"""What kernels of attention's derivative are compiled for, as of attention itself: one object a kernel."""

from dataclasses import dataclass

from xmla.core.formats.mla import MlaLayout
from xmla.core.ops.attention.sparse_mla.constants import Pages, Source
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEntries(Constants):
    """Constants of the kernel that dequantises."""

    LAYOUT: MlaLayout
    PAGE_STRIDE: int  # bytes
    PAGE_SIZE: int
    ROWS: MlaLayout
    BLOCK: int  # entries of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Constants):
    """The rows of a token's heads."""

    HEADS: int
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    DOUT_STRIDE_T: int
    DOUT_STRIDE_H: int
    LSE_STRIDE: int
    DLSE_STRIDE: int
    SCALE: float
    LSE_UNIT: float  # of lse, in binary logarithms


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation(Rows):
    """Constants of the kernel before the products."""

    DETERMINISTIC: bool
    OUT_STRIDE_T: int
    OUT_STRIDE_H: int
    TAIL: int  # roped dims of q beside those of values
    HAS_DLSE: bool
    HAS_SINK: bool
    LSE_SINK: bool  # whether the lse's sum has the sink
    BLOCK_H: int  # heads of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(Rows):
    """Constants of every kernel that computes probabilities again."""

    OWN_LSE: bool  # the lse's derivative is not the probability in out: the sink is in that one alone
    SOURCE: Pages

    @property
    def LAYOUT(self) -> MlaLayout:
        return self.SOURCE.LAYOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableProducts(Products):
    """Constants of either portable kernel: its tile of BLOCK_H heads against BLOCK_N keys."""

    SOURCE: Source
    SLOT_STRIDE: int
    DETERMINISTIC: bool
    BLOCK_H: int
    BLOCK_N: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryProducts(PortableProducts):
    """Constants of dq's kernel, which takes both sources."""

    EXTRA: Source | None
    EXTRA_SLOT_STRIDE: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryProducts(PortableProducts):
    """Constants of the kernels of a source's gradient."""

    PART: int  # dims that are multiplied at a time
