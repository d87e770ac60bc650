import numpy as np


def reference(
    query_starts: np.ndarray,
    lengths: np.ndarray,
    has_context: np.ndarray | None = None,
    *,
    num_tokens: int,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `split_batch`: one request and one token at a time."""
    requests = len(lengths)
    starts = np.clip(query_starts.astype(np.int64), 0, num_tokens)
    new = np.maximum(np.diff(starts), 0)
    if requests == 0 or new[0] > decode_threshold:
        split = 0
    elif require_uniform and all(n in (new[0], 0) for n in new):
        split = requests
    else:
        prefill = new != new[0] if require_uniform else new > decode_threshold
        if has_context is not None:
            prefill |= has_context == 0
        split = int(np.argmax(prefill)) if prefill.any() else requests
    decode_tokens = num_tokens if split == requests else int(starts[split])
    counts = np.array([split, requests - split, decode_tokens, num_tokens - decode_tokens], np.int32)

    request_ids, token_lengths = np.full(num_tokens, -1, np.int32), np.zeros(num_tokens, np.int32)
    for token in range(num_tokens):
        # Of ascending starts, those at or before a token belong to the requests up to its own.
        request = int((starts[1:] <= token).sum())
        if request < requests:
            request_ids[token] = request
            place = token - starts[request]
            visible = int(lengths[request]) - new[request] + 1 + place
            token_lengths[token] = max(0, min(visible, int(lengths[request])))
    return counts, request_ids, token_lengths
