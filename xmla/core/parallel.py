"""Attention over several ranks: which rank owns which key or head, and the bytes that a step exchanges."""

from dataclasses import dataclass
from typing import Any, Protocol

from xmla.core.call import unequal, whole_vectors
from xmla.core.errors import ArgumentError
from xmla.core.formats.indexer import indexer_layouts, indexer_rows
from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.values import cdiv

LOGITS_BYTES = 1 << 29  # of logits that `ContextParallel.select` stores at a time, unless told otherwise


class _Integers(Protocol):
    """A number or an array of any framework."""

    def __add__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which rank owns which keys of every request: block-cyclic over blocks of pages.

    Key p belongs to rank p // block % ranks, block = block_pages · page_size. Each rank numbers its own keys of a
    request from 0, in order, and stores them in its own pools. The methods take numbers or arrays of any framework.

    Attributes:
        ranks: W, ranks that share a request.
        page_size: R, entries per page.
        block_pages: Adjacent pages of one rank: 1 interleaves pages, `contiguous` gives each rank one run.
    """

    ranks: int
    page_size: int
    block_pages: int = 1

    @classmethod
    def contiguous(cls, ranks: int, page_size: int, pages: int) -> "Ownership":
        """Each rank owns one run of a request's pages, of which there are at most `pages`."""
        return cls(ranks, page_size, max(cdiv(pages, ranks), 1))

    def __post_init__(self) -> None:
        for name in ("ranks", "page_size", "block_pages"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Ownership: {name} is {getattr(self, name)}, expected at least 1")

    @property
    def block(self) -> int:
        """Keys per block."""
        return self.block_pages * self.page_size

    def owner[N: _Integers](self, position: N) -> N:
        """The rank that owns the key at `position` ≥ 0 of a request."""
        return position // self.block % self.ranks

    def position[N: _Integers](self, own: N, rank: N | int) -> N:
        """The position within its request of the `own`-th key of `rank`; a negative number for −1."""
        return own + own // self.block * ((self.ranks - 1) * self.block) + rank * self.block

    def count[N: _Integers](self, length: N, rank: N | int) -> N:
        """How many of a request's first `length` keys belong to `rank`; 0 for a negative length."""
        whole = length // (self.ranks * self.block)
        rest = length % (self.ranks * self.block) - rank * self.block
        rest = rest * (rest > 0) - (rest - self.block) * (rest > self.block)
        return (whole * self.block + rest) * (length > 0)

    def own_pages(self, pages: int, rank: int) -> list[int]:
        """The pages of `rank` among a request's first `pages`, ascending."""
        return [page for page in range(pages) if page // self.block_pages % self.ranks == rank]

    def own_width(self, pages: int) -> int:
        """The most pages that a rank owns of a request's first `pages`: the width of every rank's own block table."""
        return min(cdiv(pages, self.ranks * self.block_pages) * self.block_pages, pages)

    def check_ranks(self, ranks: int, what: str) -> None:
        """Refuse a number of ranks other than that of the Ownership."""
        if ranks != self.ranks:
            raise ArgumentError(f"ContextParallel: {what} has {ranks} ranks, expected {self.ranks}, as its Ownership")

    def check_pool(self, cache: str, page_size: int) -> None:
        """Refuse a cache whose pages are not those by which keys are divided."""
        if page_size != self.page_size:
            axis = f"{cache} axis R (axis 1)"
            raise ArgumentError(f"ContextParallel: {axis} is {page_size}, expected {self.page_size}, as its Ownership")


def check_rows(tokens: int, requests: int, width: int, lengths: int, ids: int | None) -> None:
    """Refuse a batch whose tokens are not those of the queries: a slice of tokens would not show it.

    Args:
        tokens: Those of the queries.
        requests, width: The axes of the block table.
        lengths, ids: Tokens of the lengths, and of the request ids.
    """
    if not width:
        raise ArgumentError("ContextParallel: block_table axis M (axis 1) is 0, expected at least 1")
    for name, count in (("lengths", lengths), ("request_ids", ids)):
        if count is not None and count != tokens:
            raise ArgumentError(f"ContextParallel: {name} axis T (axis 0) is {count}, expected {tokens}, as index_q")
    if ids is None and (expected := unequal(tokens, requests)):
        raise ArgumentError(f"ContextParallel: index_q axis T (axis 0) is {tokens}, expected {expected}")


def parts(tokens: int, columns: int, workspace_bytes: int) -> list[slice]:
    """The tokens whose logits, of so many keys each, are stored at a time: a call of no tokens is one part."""
    most = max(workspace_bytes // (4 * columns), 1)
    step = whole_vectors(most) if most < tokens else max(tokens, 1)
    return [slice(first, first + step) for first in range(0, max(tokens, 1), step)]


def query_format(row: int, dim: int) -> str:
    """The format of queries of `dim` dims over an indexer's cache with rows of `row` bytes: that of its keys.

    Raises:
        ArgumentError: No format has such rows.
    """
    layouts = indexer_layouts(row, dim)
    if not layouts:
        raise ArgumentError(f"ContextParallel: indexer_cache axis ROW (axis 2) is {row}, expected {indexer_rows(dim)}")
    return layouts[0].format


def heads_of(heads: int, ranks: int) -> int:
    """Heads per rank.

    Raises:
        ArgumentError: The number of heads is not a multiple of the ranks.
    """
    if heads % ranks:
        raise ArgumentError(
            f"tensor parallel: axis H is {heads}, expected a multiple of {ranks} ranks: every rank runs the same "
            "kernel, so that its heads have the bits they have on one GPU"
        )
    return heads // ranks


def received_bytes(tokens: int, heads: int, k: int, ranks: int, *, scatter_heads: bool = False) -> dict[str, int]:
    """Bytes that each rank receives in one layer's context-parallel step, by their content.

    Args:
        tokens, heads, k: T, H and K of the step.
        ranks: W.
        scatter_heads: As in `ContextParallel.merge`: a rank merges H / W heads instead of all.
    """
    merged = heads_of(heads, ranks) if scatter_heads else heads
    return {
        "candidates": (ranks - 1) * tokens * k * (4 + 4),  # a value and an index
        "partial attention": (ranks - 1) * tokens * merged * (VALUE_DIMS * 2 + 4),  # a row in bfloat16 and its lse
    }
