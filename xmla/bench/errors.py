"""Errors of results on sampled rows, against the formula in plain torch: it shares no kernel with what is timed."""

from collections.abc import Sequence

import numpy as np
import torch

from xmla import torch_api

CHECKED_ROWS = 4

# A cache, its slots [T, K], and how many of a row count [T], or None for all.
Source = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def sampled(rows: int) -> range:
    """A few rows of so many, the first among them."""
    return range(0, rows, max(1, rows // CHECKED_ROWS))


def attention_error(
    out: torch.Tensor, q: torch.Tensor, sources: Sequence[Source], scale: float, sink: torch.Tensor | None = None
) -> float:
    """The worst relative error of sampled rows of `out` against softmax attention in float64 over the same entries."""
    errors = []
    for row in sampled(len(q)):
        entries = []
        for cache, slots, lengths in sources:
            chosen = slots[row] if lengths is None else slots[row, : int(lengths[row])]
            entries.append(torch_api.read_mla_cache(cache, chosen[chosen >= 0].contiguous(), dtype="float32"))
        keys = torch.cat(entries).double()
        scores = q[row].double() @ keys.T * scale
        shares = (scores if sink is None else torch.cat([scores, sink.double()[:, None]], 1)).softmax(1)
        errors.append(relative_error(out[row], shares[:, : len(keys)] @ keys[:, :512]))
    return float(np.max(errors))  # NaN stays, unlike in max()


def missed(logits: torch.Tensor, indices: torch.Tensor, k: int) -> float:
    """The share of the k best keys of a token that its selection lacks."""
    best = logits.topk(min(k, len(logits)))[1]
    return 1 - float(torch.isin(best, indices).double().mean())


def step_error(arguments: Sequence[torch.Tensor], k: int, scale: float) -> float:
    """The worst error of sampled rows of `dsa_attention`: of attention over its selection, and the share of it missed.

    What it should select follows from the formula in float32 over the stored keys, with the query rounded to e4m3.
    """
    q, index_q, index_weights, mla, indexer, table, lengths = arguments
    out, _, indices = torch_api.dsa_attention(*arguments, k=k, softmax_scale=scale)
    page = mla.shape[1]
    slots = torch.where(indices < 0, -1, table.gather(1, indices.clamp(min=0).long() // page) * page + indices % page)
    errors = [attention_error(out, q, [(mla, slots.to(torch.int32), None)], scale)]
    q8, weights = torch_api.quantize_indexer_query(index_q, index_weights)
    for row in sampled(len(q)):
        place = torch.arange(int(lengths[row]), device=q.device)
        k8, scales = torch_api.read_indexer_cache(indexer, table[row, place // page] * page + place % page)
        errors.append(missed((q8[row].float() @ k8.float().T).relu().T @ weights[row] * scales, indices[row], k))
    return float(np.max(errors))


def selection_error(indices: torch.Tensor, arguments: Sequence[torch.Tensor], k: int) -> float:
    """The worst share of sampled tokens' best keys that is missed, by scores in float64."""
    index_q, index_k, weights, ends = arguments
    errors = []
    for token in sampled(len(index_q)):
        keys = index_k[: int(ends[token])].double()
        scores = (index_q[token].double() @ keys.T).relu().T @ weights[token].double()
        errors.append(missed(scores, indices[token], k))
    return float(np.max(errors))


def gradient_error(gradients: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], scale: float) -> float:
    """The worst relative error of sampled rows of dq, and of sampled rows of the keys' gradient, in float64."""
    q, rows, slots, out, lse, dout = arguments

    def of_scores(tokens: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """p and ds of tokens [N] and keys of each [N, K, L+E], [N, H, K]."""
        upstream = dout[tokens].double()
        p = (scale * q[tokens].double() @ keys.mT - lse[tokens].double()[:, :, None]).exp()
        delta = (out[tokens].double() * upstream).sum(-1, keepdim=True)
        return p, scale * p * (upstream @ keys[..., :512].mT - delta)

    dq, drows, *_ = gradients
    errors = []
    for token in sampled(len(q)):
        keys = rows[slots[token].long(), 0].double()
        _, ds = of_scores(torch.tensor([token], device=q.device), keys[None])
        errors.append(relative_error(dq[token], (ds @ keys)[0]))
    for entry in sampled(len(rows)):
        tokens = (slots == entry).any(1).nonzero()[:, 0]
        p, ds = (x[..., 0] for x in of_scores(tokens, rows[entry].double().expand(len(tokens), 1, -1)))
        want = torch.einsum("th,thd->d", ds, q[tokens].double())
        want[:512] += torch.einsum("th,thd->d", p, dout[tokens].double())
        errors.append(relative_error(drows[entry, 0], want))
    return float(np.max(errors))


def indexer_loss_error(
    results: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], indices: torch.Tensor | None, scale: float
) -> float:
    """The worst relative error of the gradients of sampled tokens' queries and weights, in float64."""
    index_q, index_k, weights, q, rows, lse, ends = arguments
    _, dindex_q, _, dweights = results
    errors = []
    for token in sampled(len(index_q)):
        seen = torch.arange(int(ends[token]), device=q.device) if indices is None else indices[token].long()
        seen = seen[(seen >= 0) & (seen < ends[token])]
        if len(seen) < 2:  # a distribution over one key has no gradient
            continue
        keys, factors = index_k[seen].double(), weights[token].double()
        products = index_q[token].double() @ keys.T
        prediction = (factors @ products.relu()).softmax(0)
        target = (scale * q[token].double() @ rows[seen].double().T - lse[token].double()[:, None]).exp().sum(0)
        dscores = (prediction - target / target.sum()) / len(index_q)
        errors.append(relative_error(dweights[token], products.relu() @ dscores))
        errors.append(relative_error(dindex_q[token], factors[:, None] * ((products > 0) * dscores) @ keys))
    return float(np.max(errors))
