import numpy as np

from xmla.core.formats.mla import VALUE_DIMS, MlaLayout, mla_layouts
from xmla.core.values import Spec


def reference(
    q: np.ndarray,
    cache: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    extra_cache: np.ndarray | None = None,
    extra_slots: np.ndarray | None = None,
    extra_lengths: np.ndarray | None = None,
    cos_sin: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    extra_rows: np.ndarray | None = None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    empty_lse: str = "-inf",
    lse_base: str = "e",
    lse_sink: bool = False,
    batch_invariant: bool = False,
    deterministic: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `sparse_mla`, in float64 on the stored entries rounded to q's dtype."""
    (layout,) = mla_layouts(Spec.of_numpy(cache), cache_format)
    tokens, heads, _ = q.shape
    out = np.zeros((tokens, heads, VALUE_DIMS))
    lse = np.full((tokens, heads), -np.inf)
    sink_logit = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    for token in range(tokens):
        entries = selected(layout, cache, slots, lengths, token)
        if extra_cache is not None and extra_slots is not None:
            (extra,) = mla_layouts(Spec.of_numpy(extra_cache), extra_cache_format)
            entries = np.concatenate([entries, selected(extra, extra_cache, extra_slots, extra_lengths, token)])
        if not len(entries):
            continue
        keys = entries.astype(q.dtype).astype(np.float64)
        scores = softmax_scale * (q[token].astype(np.float64) @ keys.T)
        lse[token] = np.logaddexp.reduce(scores, axis=1)
        # exp(s) / (Σ exp(s) + exp(sink)), through the logarithm of the whole denominator
        whole, has_keys = np.logaddexp(lse[token], sink_logit), lse[token] != -np.inf
        weights = np.exp(scores[has_keys] - whole[has_keys, None])
        out[token, has_keys] = weights @ keys[:, :VALUE_DIMS]
        if cos_sin is not None and positions is not None and 0 <= positions[token] < len(cos_sin):
            cos, sin = np.split(cos_sin[positions[token]].astype(np.float64), 2)
            roped = out[token, :, layout.latent :]
            even, odd = roped[:, ::2].copy(), roped[:, 1::2].copy()
            roped[:, ::2], roped[:, 1::2] = even * cos + odd * sin, odd * cos - even * sin
    if lse_sink:
        lse = np.logaddexp(lse, sink_logit)
    if lse_base == "2":
        lse = lse / np.log(2)
    return out, np.where(lse == -np.inf, np.inf if empty_lse == "+inf" else -np.inf, lse)


def selected(
    layout: MlaLayout, cache: np.ndarray, slots: np.ndarray, lengths: np.ndarray | None, token: int
) -> np.ndarray:
    """The entries of one cache that a token attends to, float32 [keys, L+E]."""
    length = slots.shape[1] if lengths is None else max(int(lengths[token]), 0)
    slot = slots[token, :length]
    return layout.gather(cache, slot[(slot >= 0) & (slot < cache.shape[0] * cache.shape[1])])
