"""Arguments of calls that select keys, whose kernels plugins of engines list: specs by name."""

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.values import Spec


def of_tokens(tokens: int, *names: str) -> dict[str, Spec]:
    """An integer for each of so many tokens, by each of these names."""
    return dict.fromkeys(names, Spec((tokens,), "int32"))


def query(tokens: int, heads: int, dim: int) -> dict[str, Spec]:
    """Queries in e4m3, and the weights of their heads."""
    shape = tokens, heads, dim
    return {"q8": Spec(shape, "float8_e4m3fn"), "weights": Spec(shape[:2], "float32")}


def paged(tokens: int, heads: int, dim: int, cache: Spec, table: tuple[int, int]) -> dict[str, Spec]:
    """Arguments over a cache of keys of `dim` dims, by a block table of so many rows and pages."""
    pages = {"cache": cache, "block_table": Spec(table, "int32")}
    return query(tokens, heads, dim) | pages | of_tokens(tokens, "lengths")


def ragged(tokens: int, heads: int, columns: int, layout: IndexerLayout) -> dict[str, Spec]:
    """Arguments over so many keys that were gathered of a cache of this format."""
    values, scales = layout.dtypes
    gathered = {"keys": Spec((columns, layout.value_bytes), values), "key_scales": Spec((columns,), scales)}
    return query(tokens, heads, layout.dim) | gathered | of_tokens(tokens, "starts", "ends")
