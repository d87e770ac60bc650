"""The order in which the derivative's kernels for Hopper take a token's keys."""

import numpy as np
import pytest
import torch

from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.order import BUCKETS, order_slots_kernel

CASES = [  # tokens, keys, entries, rows, lengths
    (3, 33, 20, 1, False), (4, 700, 100000, 2, True), (2, 1000, 32768, 4, False), (2, 70, 1, 8, False),
    (2, 50, 2**31 - 2, 8, True), (1, 2048, 2**24 + 3, 8, False),
]  # fmt: skip


def order(slots: torch.Tensor, lengths: torch.Tensor | None, entries: int, rows: int) -> list[list[int]]:
    """What the kernel writes, and that it writes no more."""
    tokens, keys = slots.shape
    ordered, ends = torch.full_like(slots, -7), torch.empty_like(slots[:, 0])
    order_slots_kernel[(tokens,)](
        slots, slots if lengths is None else lengths, entries, keys, slots.stride(0), ordered, ends,
        HAS_LENGTHS=lengths is not None, ROWS=rows, enable_fp_fusion=True,
    )  # fmt: skip
    assert all((row[end:] == -7).all() for row, end in zip(ordered, ends.tolist(), strict=True))
    return [row[:end].tolist() for row, end in zip(ordered, ends.tolist(), strict=True)]


@pytest.mark.parametrize(("tokens", "keys", "entries", "rows", "with_lengths"), CASES)
def test_valid_slots_in_ascending_buckets(
    tokens: int, keys: int, entries: int, rows: int, with_lengths: bool, device: str
) -> None:
    rng = np.random.default_rng(0)
    slots = rng.integers(0, entries, (tokens, keys + 1)).astype(np.int32)[:, :keys]
    slots[rng.random((tokens, keys)) < 0.2] = -1
    slots[rng.random((tokens, keys)) < 0.05] = entries
    slots[1:2] = -1  # a token without keys
    lengths = rng.integers(-3, keys + 4, tokens).astype(np.int32) if with_lengths else None
    on_device = [None if x is None else torch.from_numpy(x).to(device) for x in (slots, lengths)]
    got = order(*on_device, entries, rows)
    for token, ordered in enumerate(got):
        end = keys if lengths is None else max(lengths[token], 0)
        valid = [int(slot) for slot in slots[token, :end] if 0 <= slot < entries]
        assert sorted(ordered) == sorted(valid)
        if valid:
            width = (max(valid) - min(valid) + 1) / BUCKETS.value
            # No key comes after one of a later bucket.
            assert (np.maximum.accumulate(ordered) - ordered < 1.001 * width).all()
    if entries < 2**24:
        moved = torch.where((on_device[0] >= 0) & (on_device[0] < entries), on_device[0] + 99, -1)
        assert order(moved, on_device[1], entries + 99, rows) == [[slot + 99 for slot in row] for row in got]
