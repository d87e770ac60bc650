"""A decode step of DeepSeek sparse attention in PyTorch: write the new token, then attend. Runs anywhere.

python examples/decode_torch.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt

device = "cuda" if torch.cuda.is_available() else "cpu"
requests, heads, index_heads, context, page_size = 2, 16, 8, 200, 64
pages = -(-context // page_size)
torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


# The paged fp8 caches and who owns which page.
mla_cache = torch.zeros(requests * pages, page_size, 656, dtype=torch.uint8, device=device)
indexer_cache = torch.zeros(requests * pages, page_size, 132, dtype=torch.uint8, device=device)
block_table = torch.randperm(requests * pages, device=device, dtype=torch.int32).view(requests, pages)

# What a model's projections give for every token so far, the new one included.
positions = torch.arange(context, device=device, dtype=torch.int32).repeat(requests, 1)
slots, _ = xt.map_slots(positions, block_table, page_size=page_size)
xt.write_mla_cache(normal(requests * context, 512), normal(requests * context, 64), slots.flatten(), mla_cache)
xt.write_indexer_cache(normal(requests * context, 128), slots.flatten(), indexer_cache)

out, lse, indices = xt.dsa_attention(
    normal(requests, heads, 576),
    normal(requests, index_heads, 128),
    torch.randn(requests, index_heads, device=device),
    mla_cache,
    indexer_cache,
    block_table,
    torch.full((requests,), context, device=device, dtype=torch.int32),
    k=64,
    softmax_scale=0.1352,
)
print(f"out {tuple(out.shape)} {out.dtype}, first selected positions {indices[0, :6].tolist()}, lse {lse[0, 0]:.3f}")
