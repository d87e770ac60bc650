import numpy as np

from xmla.core.call import requests_of
from xmla.core.formats.indexer import indexer_layouts
from xmla.core.op import Case
from xmla.core.ops.blocks.indexer_block_logits_paged.reference import positions_of
from xmla.core.ops.cases import BF16, empty_pages
from xmla.core.ops.indexer.indexer_logits.cases import E4M3
from xmla.core.ops.indexer.indexer_logits_paged.cases import make_case


def some_blocks(rng: np.random.Generator, lengths: np.ndarray, blocks: int, granularity: int) -> np.ndarray:
    """Random blocks [T, blocks] of rows of `lengths` keys: ascending, then any order with −1, garbage and repeats."""
    rows = np.full((len(lengths), blocks), -1, np.int32)
    for row, length in enumerate(np.maximum(lengths, 0)):
        count = -(-int(length) // granularity)
        picked = np.sort(rng.permutation(count)[:blocks])
        if count:
            picked[-1:] = count - 1  # the newest, which may be incomplete
        rows[row, : len(picked)] = picked
        if row % 3 == 1:
            rows[row] = rng.permutation(rows[row])
        if row % 3 == 2:
            wrong = rng.choice([-1, -(2**31), count, 2**31 - 1], blocks)
            rows[row] = np.where(rng.random(blocks) < 0.3, wrong, rows[row])
    return rows


def keep_selected(inputs: dict[str, np.ndarray], granularity: int) -> None:
    """Put the keys in tokens' blocks into a pool that holds no others."""
    cache, table = inputs["cache"], inputs["block_table"]
    (layout,) = indexer_layouts(cache.shape[2], inputs["q8"].shape[2])
    used = [np.empty(0, np.int64)]
    owners = requests_of(inputs, len(inputs["lengths"]), len(table))
    visible = np.clip(inputs["lengths"], 0, table.shape[1] * cache.shape[1])
    for owner, position in zip(owners, positions_of(inputs["blocks"], visible, granularity), strict=True):
        if owner >= 0:
            page, offset = np.divmod(position[position >= 0], cache.shape[1])
            used.append(table[owner, page].astype(np.int64) * cache.shape[1] + offset)
    slots = np.unique(np.concatenate(used))
    pages, entries, row = cache.shape
    inputs["cache"] = empty_pages(pages, entries, row, cache.dtype, cache.strides[0] - entries * row)
    layout.scatter(inputs["cache"], slots, *layout.gather(cache, slots))


def with_blocks(case: Case, blocks: int, granularity: int, **attrs: object) -> Case:
    """A case of `indexer_logits_paged` with some blocks of each token."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        inputs["blocks"] = some_blocks(rng, inputs["lengths"], blocks, granularity)
        keep_selected(inputs, granularity)
        return inputs

    return Case(f"{case.name}-{blocks} of {granularity}", make, {"granularity": granularity, **attrs})


CASES = (
    with_blocks(make_case((150,), 64, heads=32), 7, 8),
    with_blocks(make_case((5, 0, 131), 2, next_n=3, heads=32, padding=132), 5, 4),
    with_blocks(make_case((70, 300), 61, heads=7, dim=64, padding=4), 3, 64),
    with_blocks(make_case((129, 1, 33), 64, next_n=2, heads=8, dim=32, shuffled=True), 33, 1),
    with_blocks(make_case((150, 3), 64, layout="mxfp4", padding=68), 20, 8),
    with_blocks(
        make_case((305, 0, 131), 61, next_n=3, heads=32, dim=64, layout="mxfp4", dtype=BF16, padding=4), 2, 128
    ),
    with_blocks(make_case((66, 9), 53, next_n=3, heads=16, dtype=E4M3), 9, 8),
    with_blocks(make_case((66, 9), 64, heads=16), 5, 8, logits_dtype="bfloat16"),
)
