import numpy as np


def reference(
    indices: np.ndarray, held: np.ndarray, slots: np.ndarray, *, num_entries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `resolve_slots`; updates `held` and `slots` in place."""
    requests, places = held.shape
    columns = indices.size // max(requests, 1)
    selected = np.full((requests, columns), -1, np.int32)
    missing, destinations = selected.copy(), selected.copy()
    counts = np.zeros(requests, np.int32)
    for request, row in enumerate(indices.reshape(requests, columns)):
        valid = (row >= 0) & (row < num_entries)
        named = [*dict.fromkeys(row[valid].tolist())]
        place = {entry: j for j, entry in enumerate(held[request].tolist())}
        hits = sorted(place[entry] for entry in named if entry in place)
        absent = [entry for entry in named if entry not in place]
        free = np.setdiff1d(np.arange(places), hits)
        loaded, left = np.split(free, [len(absent)])
        place |= zip(absent, loaded, strict=True)
        selected[request, valid] = slots[request, [place[entry] for entry in row[valid].tolist()]]
        counts[request] = len(absent)
        missing[request, : len(absent)] = absent
        destinations[request, : len(absent)] = slots[request, loaded]
        held[request, loaded] = absent
        order = np.concatenate([left, loaded, hits]).astype(int)
        held[request], slots[request] = held[request, order], slots[request, order]
    return selected.reshape(indices.shape), missing, destinations, counts
