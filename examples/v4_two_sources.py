"""DeepSeek-V4's attention in PyTorch: a sliding window and compressed entries in one softmax. Runs anywhere.

python examples/v4_two_sources.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt

device = "cuda" if torch.cuda.is_available() else "cpu"
context, ratio, window, heads, k = 45, 4, 8, 8, 8  # V4: ratio 4 or 128, window 128, k 512 or 1024
page_size, pages = 16, 3
torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def pool(count: int, entries: int) -> torch.Tensor:
    """Pages of V4 entries: 584 bytes each, with their scales in the page's footer."""
    return torch.zeros(count, entries, 584, dtype=torch.uint8, device=device)


# One request: its tokens' own entries, and one compressed entry every `ratio` tokens in a second pool.
table = torch.randperm(pages, device=device, dtype=torch.int32)[None]
window_cache, compressed_cache = pool(pages, page_size), pool(pages, page_size // ratio)
positions = torch.arange(context, device=device, dtype=torch.int32)
slots = xt.map_slots(positions[None], table, page_size=page_size)[0].flatten()
xt.write_mla_cache(normal(context, 448), normal(context, 64), slots, window_cache, scale_floor="amax")

# The compressor keeps each token's state, and writes the entries that the call's tokens complete: 45 // 4 = 11.
state = torch.zeros(pages, page_size, 2 * 2 * 512, device=device)
angle = torch.arange(context, device=device)[:, None] / 10000 ** (torch.arange(32, device=device) / 32)
cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
ape = torch.randn(ratio, 2 * 512, device=device)
kv, score = normal(context, 2 * 512), normal(context, 2 * 512)
norm_weight = torch.ones(512, device=device)
xt.compress_kv(kv, score, ape, norm_weight, cos_sin, positions, state, table, compressed_cache, table)

# A decode step of the last token. The indexer's selection among the 11 complete entries is made up here.
lengths = torch.tensor([context], dtype=torch.int32, device=device)
near, near_counts = xt.window_slots(table, lengths, window=window, page_size=page_size)
selected = torch.tensor([[0, 2, 3, 5, 7, 8, 9, 10]], dtype=torch.int32, device=device)
far, far_counts = xt.map_slots(selected, table, page_size=page_size // ratio)
q = normal(1, heads, 512)
sources = {"extra_cache": compressed_cache, "extra_slots": far, "extra_lengths": far_counts}
out, lse = xt.sparse_mla(q, window_cache, near, near_counts, **sources, softmax_scale=512**-0.5)

# The same by PyTorch alone: one softmax over the entries of both.
entries = torch.cat(
    [
        xt.read_mla_cache(window_cache, near[0], dtype="float32"),
        xt.read_mla_cache(compressed_cache, far[0], dtype="float32"),
    ]
)
scores = q[0].float() @ entries.T * 512**-0.5
assert torch.allclose(out[0].float(), scores.softmax(-1) @ entries, atol=2e-2)
assert torch.allclose(lse[0], scores.logsumexp(-1), atol=2e-2)

# The model's inverse rope of the output, in the same call.
turned, _ = xt.sparse_mla(
    q, window_cache, near, near_counts, **sources, cos_sin=cos_sin, positions=lengths - 1, softmax_scale=512**-0.5
)
assert torch.equal(turned[..., :448], out[..., :448]) and not torch.equal(turned, out)
print(f"out {tuple(out.shape)} {out.dtype} over {window} tokens and {k} of {context // ratio} compressed entries")
