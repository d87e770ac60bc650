import numpy as np


def reference(
    indices: np.ndarray,
    block_table: np.ndarray,
    request_ids: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    *,
    page_size: int,
    compact: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `map_slots`."""
    tokens, (requests, width) = len(indices), block_table.shape
    slots = np.full(indices.shape, -1, np.int32)
    for token in range(tokens):
        request = token // (tokens // requests) if request_ids is None else request_ids[token]
        if not 0 <= request < requests or not width:
            continue
        index = indices[token]
        inside = (index >= 0) & (index // page_size < width)
        if lengths is not None:
            inside &= index < lengths[token]
        page = np.where(inside, block_table[request, np.where(inside, index // page_size, 0)], -1).astype(np.int64)
        slot = page * page_size + index % page_size
        slots[token] = np.where((page >= 0) & (slot < 2**31), slot, -1)
    if compact:
        slots = np.take_along_axis(slots, np.argsort(slots < 0, axis=1, kind="stable"), axis=1)
    return slots, (slots >= 0).sum(axis=1, dtype=np.int32)
