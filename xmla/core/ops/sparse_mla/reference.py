import numpy as np

from xmla.core.layout import mla_layout
from xmla.core.spec import Spec


def reference(
    q: np.ndarray,
    cache: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    *,
    softmax_scale: float,
    empty_lse: str = "-inf",
    batch_invariant: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Definition of `sparse_mla`, in float64 on the stored entries rounded to q's dtype."""
    layout = mla_layout(Spec.of_numpy(cache))
    assert layout is not None  # checked by bind
    pages, entries, _ = cache.shape
    tokens, heads, _ = q.shape
    out = np.zeros((tokens, heads, layout.latent))
    lse = np.full((tokens, heads), np.inf if empty_lse == "+inf" else -np.inf)
    sink_logit = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    for token in range(tokens):
        length = slots.shape[1] if lengths is None else max(int(lengths[token]), 0)
        slot = slots[token, :length]
        slot = slot[(slot >= 0) & (slot < pages * entries)]
        if not len(slot):
            continue
        page, offset = np.divmod(slot, entries)
        entry = layout.read(cache[page, offset]).astype(q.dtype).astype(np.float64)
        scores = softmax_scale * (q[token].astype(np.float64) @ entry.T)
        lse[token] = np.logaddexp.reduce(scores, axis=1)
        # exp(s) / (Σ exp(s) + exp(sink)), through the logarithm of the whole denominator
        weights = np.exp(scores - np.logaddexp(lse[token], sink_logit)[:, None])
        out[token] = weights @ entry[:, : layout.latent]
    return out, lse
