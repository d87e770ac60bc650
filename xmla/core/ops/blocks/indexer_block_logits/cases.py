import numpy as np

from xmla.core.call import requests_of
from xmla.core.formats.indexer import indexer_layouts
from xmla.core.op import Case
from xmla.core.ops.blocks.indexer_block_logits.reference import positions_of, ranges
from xmla.core.ops.cases import BF16, POISON, empty_pages
from xmla.core.ops.indexer.indexer_logits.cases import make_case


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


def keep_in_rows(inputs: dict[str, np.ndarray], positions: np.ndarray) -> None:
    """Let contiguous keys at no token's position [T, columns] be NaN."""
    first, _ = ranges(inputs)
    unread = np.ones(len(inputs["keys"]), bool)
    unread[(first[:, None] + positions)[positions >= 0]] = False
    for name in ("keys", "key_scales"):
        inputs[name].view(np.uint8).reshape(len(unread), -1)[unread] = POISON


def keep_in_pages(inputs: dict[str, np.ndarray], positions: np.ndarray, cache_format: str | None) -> None:
    """Put the keys at tokens' positions [T, columns] into a pool that holds no others."""
    cache, table = inputs["cache"], inputs["block_table"]
    (layout,) = indexer_layouts(cache.shape[2], inputs["q8"].shape[2], cache_format)
    used = [np.empty(0, np.int64)]
    owners = requests_of(inputs, len(inputs["lengths"]), len(table))
    for owner, position in zip(owners, positions, strict=True):
        if owner >= 0:
            page, offset = np.divmod(position[position >= 0], cache.shape[1])
            used.append(table[owner, page].astype(np.int64) * cache.shape[1] + offset)
    slots = np.unique(np.concatenate(used))
    pages, entries, row = cache.shape
    inputs["cache"] = empty_pages(pages, entries, row, cache.dtype, cache.strides[0] - entries * row)
    layout.scatter(inputs["cache"], slots, *layout.gather(cache, slots))


def with_blocks(case: Case, blocks: int, granularity: int, twice: bool = False, **attrs: object) -> Case:
    """A case of all keys with some blocks of each token, each listed `twice`; keys in none of them are NaN."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        _, lengths = ranges(inputs)
        listed = inputs["blocks"] = some_blocks(rng, lengths, blocks, granularity)
        if twice:
            listed[:, 1::2] = listed[:, : blocks // 2 * 2 : 2]
        positions = positions_of(listed, lengths, granularity)
        if "cache" in inputs:
            keep_in_pages(inputs, positions, case.attrs.get("cache_format"))
        else:
            keep_in_rows(inputs, positions)
        return inputs

    name = f"{case.name}-{blocks} of {granularity}{' twice' if twice else ''}"
    named = {name: value for name, value in case.attrs.items() if name == "cache_format"}
    return Case(name, make, {"granularity": granularity, **named, **attrs})


CASES = (
    with_blocks(make_case(1, 64, 65), 5, 8),
    with_blocks(make_case(19, 32, 300), 9, 4),
    with_blocks(make_case(5, 3, 129, dim=64), 77, 1),
    with_blocks(make_case(4, 128, 231, dim=32), 2, 64),
    with_blocks(make_case(3, 64, 133, layout="mxfp4"), 6, 8),
    with_blocks(make_case(5, 32, 329, dim=64, layout="mxfp4", dtype=BF16), 1, 128),
    with_blocks(make_case(3, 32, 65), 5, 8, logits_dtype="bfloat16"),
    with_blocks(make_case(5, 32, 131, layout="fp8_ue8m0"), 6, 8),
)
