"""Prefill of packed requests in PyTorch: two prompts of different lengths in one flat batch. Runs anywhere.

python examples/prefill_packed.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt

device = "cuda" if torch.cuda.is_available() else "cpu"
new, context, page_size, k = [5, 3], [37, 20], 16, 16  # new tokens, and keys with them, of each request
torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# Pages of every request, and caches that hold all keys, the new ones included.
block_table = torch.randperm(6, device=device, dtype=torch.int32).view(2, 3)
mla_cache = torch.zeros(6, page_size, 656, dtype=torch.uint8, device=device)
indexer_cache = torch.zeros(6, page_size, 132, dtype=torch.uint8, device=device)
positions = torch.cat([torch.arange(count, device=device, dtype=torch.int32) for count in context])
owners = integers([0] * context[0] + [1] * context[1])
slots = xt.map_slots(positions[:, None], block_table, owners, page_size=page_size)[0].flatten()
xt.write_mla_cache(normal(len(slots), 512), normal(len(slots), 64), slots, mla_cache)
xt.write_indexer_cache(normal(len(slots), 128), slots, indexer_cache)

# Each new token's request and the keys that it sees: causal within its prompt.
starts_of_requests = integers([0, new[0], sum(new)])
_, request_ids, lengths = xt.split_batch(starts_of_requests, integers(context), num_tokens=sum(new))
assert lengths.tolist() == [33, 34, 35, 36, 37, 18, 19, 20]

# The keys of all requests, one request after another, still quantised; each token's range among them.
keys, key_scales = xt.read_indexer_cache(indexer_cache, slots)
starts = integers([0, context[0]])[request_ids]
q8, weights = xt.quantize_indexer_query(normal(sum(new), 8, 128), normal(sum(new), 8))
indices = xt.indexer_topk(q8, weights, keys, key_scales, starts, starts + lengths, k=k)

# Positions within each request become slots of the pool, and attention reads only these.
selected, counts = xt.map_slots(indices, block_table, request_ids, page_size=page_size)
q = normal(sum(new), 16, 576)
out, lse = xt.sparse_mla(q, mla_cache, selected, counts, softmax_scale=0.1352)

# The same by PyTorch alone, from the dequantised entries.
entries = xt.read_mla_cache(mla_cache, selected.flatten(), dtype="float32").view(sum(new), k, 576)
scores = torch.einsum("thd,tkd->thk", q.float(), entries) * 0.1352
want = torch.einsum("thk,tkd->thd", scores.softmax(-1), entries[..., :512])
assert torch.allclose(out.float(), want, atol=2e-2)
print(f"out {tuple(out.shape)} {out.dtype} of {len(new)} packed prompts, largest difference from PyTorch "
      f"{(out.float() - want).abs().max():.1e}")  # fmt: skip
