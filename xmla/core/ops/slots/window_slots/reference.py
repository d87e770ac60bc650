import numpy as np


def reference(
    block_table: np.ndarray, lengths: np.ndarray, request_ids: np.ndarray | None = None, *, window: int,
    page_size: int, ratio: int = 1,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Reference of `window_slots`: one entry at a time."""
    tokens, (requests, width) = len(lengths), block_table.shape
    slots = np.full((tokens, window), -1, np.int32)
    counts = np.zeros(tokens, np.int32)
    for token in range(tokens):
        request = token // (tokens // requests) if request_ids is None else request_ids[token]
        if not 0 <= request < requests:
            continue
        visible = min(max(int(lengths[token]), 0) // ratio, width * page_size)
        counts[token] = min(visible, window)
        for place, entry in enumerate(range(visible - counts[token], visible)):
            page, offset = int(block_table[request, entry // page_size]), entry % page_size
            if page >= 0 and page * page_size + offset < 2**31:
                slots[token, place] = page * page_size + offset
    return slots, counts
