"""The formulas of DeepSeek-V4's inference code for compressed entries, over whole groups at once."""

import torch


def compressed(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, cos_sin: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:  # fmt: skip
    """The entries of one document by whole groups, as torch differentiates it: [groups, D]."""
    (ratio, width), dim = ape.shape, len(norm_weight)
    groups, series = len(kv) // ratio, width // dim
    kv, score = (x[: groups * ratio].view(groups, ratio, series, dim) for x in (kv, score))
    score = score + ape.view(ratio, series, dim)
    if series == 2:
        before = lambda x, fill: torch.cat([torch.full_like(x[:1, :, 0], fill), x[:-1, :, 0]])
        kv = torch.cat([before(kv, 0.0), kv[:, :, 1]], dim=1)
        score = torch.cat([before(score, -torch.inf), score[:, :, 1]], dim=1)
    else:
        kv, score = kv[:, :, 0], score[:, :, 0]
    pooled = (score.softmax(1) * kv).sum(1)
    normed = pooled * (pooled.square().mean(1, keepdim=True) + eps).rsqrt() * norm_weight
    cos, sin = cos_sin[: groups * ratio : ratio].chunk(2, dim=1)
    rope = normed[:, dim - cos_sin.shape[1] :]
    even, odd = rope[:, ::2], rope[:, 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=2).flatten(1)
    return torch.cat([normed[:, : dim - cos_sin.shape[1]], turned], dim=1)
