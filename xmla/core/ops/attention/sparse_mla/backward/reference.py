import numpy as np

from xmla.core.formats.mla import VALUE_DIMS, mla_layouts
from xmla.core.values import Spec


def reference(
    q: np.ndarray,
    cache: np.ndarray,
    slots: np.ndarray,
    forward_out: np.ndarray,
    forward_lse: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    extra_cache: np.ndarray | None = None,
    extra_slots: np.ndarray | None = None,
    extra_lengths: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    extra_rows: np.ndarray | None = None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    lse_base: str = "e",
    lse_sink: bool = False,
    deterministic: bool = True,
) -> tuple[np.ndarray, ...]:
    """Reference of `sparse_mla_backward`, in float64."""
    tokens, heads, _ = q.shape
    sources = [Source(cache, cache_format, slots, lengths, q.dtype)]
    if extra_cache is not None and extra_slots is not None:
        sources.append(Source(extra_cache, extra_cache_format, extra_slots, extra_lengths, q.dtype))
    dq, dsink = np.zeros(q.shape), np.zeros(0 if sink is None else heads)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for token in range(tokens):
            query, upstream = q[token].astype(np.float64), dout[token].astype(np.float64)
            delta = (forward_out[token].astype(np.float64) * upstream).sum(axis=1)
            own = forward_lse[token].astype(np.float64) * (np.log(2) if lse_base == "2" else 1.0)
            dlog = np.zeros(heads) if dlse is None else dlse[token] / (np.log(2) if lse_base == "2" else 1.0)
            total = own if lse_sink else np.where(np.isinf(own), -np.inf, own)
            if sink is not None:
                if not lse_sink:
                    total = np.logaddexp(total, sink.astype(np.float64))
                weight = np.where(sink == -np.inf, 0.0, np.where(sink == total, 1.0, np.exp(sink - total)))
                moved = np.where(np.any(forward_out[token], axis=1), delta, 0.0)  # without keys dout does not matter
                dsink -= weight * (moved - (dlog if lse_sink else 0.0))
            found = [source.entries(token) for source in sources]
            values = np.concatenate([keys[:, :VALUE_DIMS] for _, keys in found])
            reach = np.linalg.norm(np.where(np.isfinite(values), values, 0.0), axis=1).max(initial=0) * deterministic
            norm = np.linalg.norm(upstream, axis=1)
            reaches = norm * reach + np.abs(delta) + np.abs(dlog)
            slope = abs(softmax_scale) * reaches
            bound = slope * np.abs(query).max(axis=1) + np.abs(upstream).max(axis=1)
            greatest = np.maximum.reduce([norm * deterministic, np.full(heads, reach), reaches, slope, bound])
            total = np.where(greatest <= np.finfo(np.float32).max, total, np.nan)
            for source, (named, keys) in zip(sources, found, strict=True):
                scores = softmax_scale * (query @ keys.T)
                p = own_p = np.exp(scores - total[:, None])
                dp = upstream @ keys[:, :VALUE_DIMS].T
                if lse_sink or sink is None or dlse is None:  # the lse's derivative is p, or not used
                    ds = softmax_scale * p * (dp - (delta - dlog)[:, None])
                else:
                    own_p = np.exp(scores - own[:, None])
                    ds = softmax_scale * (p * (dp - delta[:, None]) + own_p * dlog[:, None])
                ds[~((p <= 1.5) & (own_p <= 1.5))] = np.nan  # another call's lse
                dq[token] += ds @ keys
                summands = ds.T @ query
                summands[:, :VALUE_DIMS] += p.T @ upstream
                right = bound.sum() <= np.finfo(np.float32).max or not deterministic  # False of NaN
                summands[~(np.isfinite(ds) & right).all(axis=0)] = np.nan
                np.add.at(source.gradient, named, summands)
    none = np.zeros((0, 0, 0))
    gradients = [(none, none)] * 2  # of a source's plain rows, and of those beside packed entries
    for place, source in enumerate(sources):
        gradient = source.gradient.reshape(*source.cache.shape[:2], source.layout.dims)
        gradient[np.isnan(gradient).any(axis=-1)] = np.nan  # NaN of one dim is NaN of all
        gradients[place] = (none, gradient) if source.layout.packed else (gradient, none)
    (dcache, drows), (dextra_cache, dextra_rows) = gradients
    return dq, dcache, dsink, dextra_cache, drows, dextra_rows


class Source:
    """A cache and its slots, and the gradient of its entries, [P·R, L+E]."""

    def __init__(
        self, cache: np.ndarray, name: str | None, slots: np.ndarray, lengths: np.ndarray | None, dtype: np.dtype
    ) -> None:
        (self.layout,) = mla_layouts(Spec.of_numpy(cache), name)
        self.cache, self.slots, self.lengths, self.dtype = cache, slots, lengths, dtype
        self.gradient = np.zeros((cache.shape[0] * cache.shape[1], self.layout.dims))

    def entries(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots that a token attends to, and their entries, rounded to q's dtype, in float64 [keys, L+E]."""
        length = self.slots.shape[1] if self.lengths is None else max(int(self.lengths[token]), 0)
        slot = self.slots[token, :length]
        named = slot[(slot >= 0) & (slot < len(self.gradient))]
        return named, self.layout.gather(self.cache, named).astype(self.dtype).astype(np.float64)
