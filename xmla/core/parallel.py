"""Attention over several ranks: who owns which key or head, and the bytes that a step exchanges."""

from dataclasses import dataclass
from typing import Any

from xmla.core.errors import ArgumentError
from xmla.core.layout import indexer_layouts, indexer_rows
from xmla.core.plan import cdiv


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which rank has which keys of every request: blocks of pages dealt out in turn (block-cyclic).

    Key p belongs to rank p // block % ranks, block = block_pages · page_size. Each rank counts its own keys of a
    request from 0, in order, and keeps them in its own pools. The methods take numbers or arrays of any framework.

    Attributes:
        ranks: W, ranks that share a request.
        page_size: R, entries a page.
        block_pages: Adjacent pages of one rank: 1 interleaves them, `contiguous` gives each rank one run.
    """

    ranks: int
    page_size: int
    block_pages: int = 1

    @classmethod
    def contiguous(cls, ranks: int, page_size: int, pages: int) -> "Ownership":
        """Each rank has one run of the up to `pages` pages that a request can have."""
        return cls(ranks, page_size, max(cdiv(pages, ranks), 1))

    def __post_init__(self) -> None:
        for name in ("ranks", "page_size", "block_pages"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Ownership: {name} is {getattr(self, name)}, expected at least 1")

    @property
    def block(self) -> int:
        """Keys a block."""
        return self.block_pages * self.page_size

    def owner(self, position: Any) -> Any:
        """The rank of the key at `position` ≥ 0 of a request."""
        return position // self.block % self.ranks

    def position(self, own: Any, rank: Any) -> Any:
        """Where in its request the key stands that is `own`-th of `rank`; something negative for −1."""
        return own + own // self.block * ((self.ranks - 1) * self.block) + rank * self.block

    def count(self, length: Any, rank: Any) -> Any:
        """How many of a request's first `length` keys belong to `rank`; 0 for a negative length."""
        whole = length // (self.ranks * self.block)
        rest = length % (self.ranks * self.block) - rank * self.block
        rest = rest * (rest > 0) - (rest - self.block) * (rest > self.block)
        return (whole * self.block + rest) * (length > 0)

    def own_pages(self, pages: int, rank: int) -> list[int]:
        """The pages of `rank` among a request's first `pages`, ascending."""
        return [page for page in range(pages) if page // self.block_pages % self.ranks == rank]

    def own_width(self, pages: int) -> int:
        """The most pages a rank has of a request's first `pages`: what every rank's share of a block table takes."""
        return min(cdiv(pages, self.ranks * self.block_pages) * self.block_pages, pages)

    def check_ranks(self, ranks: int, what: str) -> None:
        """Refuse another number of ranks than there are."""
        if ranks != self.ranks:
            raise ArgumentError(f"ContextParallel: {what} has {ranks} ranks, expected {self.ranks}, as its Ownership")


def query_format(row: int, dim: int) -> str:
    """The format of queries of `dim` dims over an indexer's cache with rows of `row` bytes: that of its keys.

    Raises:
        ArgumentError: No format has such rows.
    """
    found = indexer_layouts(row, dim)
    if not found:
        raise ArgumentError(f"ContextParallel: indexer_cache axis ROW (axis 2) is {row}, expected {indexer_rows(dim)}")
    return found[0].format


def heads_of(heads: int, ranks: int) -> int:
    """Heads a rank.

    Raises:
        ArgumentError: The heads cannot be dealt out evenly.
    """
    if heads % ranks:
        raise ArgumentError(
            f"tensor parallel: axis H is {heads}, expected a multiple of {ranks} ranks: every rank runs the same "
            "kernel, so that its heads have the bits they have on one GPU"
        )
    return heads // ranks


def received_bytes(
    tokens: int, heads: int, k: int, ranks: int, *, latent: int = 512, itemsize: int = 2, scatter_heads: bool = False
) -> dict[str, int]:
    """Bytes that each rank receives in one layer's context-parallel step, by what they are.

    Args:
        tokens, heads, k: T, H and K of the step.
        ranks: W.
        latent, itemsize: L dims of an output row and bytes of its dtype.
        scatter_heads: As in `ContextParallel.merge`: a rank merges H / W heads, else all.
    """
    merged = heads_of(heads, ranks) if scatter_heads else heads
    return {
        "candidates": (ranks - 1) * tokens * k * (4 + 4),  # a value and an index
        "partial attention": (ranks - 1) * tokens * merged * (latent * itemsize + 4),  # a row and its lse
    }
