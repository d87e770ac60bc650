"""A cache in the host's memory, of which the device holds a tenth, in PyTorch. Runs anywhere.

python examples/host_cache.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt
from xmla.interop import on_device

device = "cuda" if torch.cuda.is_available() else "cpu"
requests, heads, context, page_size, k, steps = 2, 16, 1280, 16, 48, 8
places = context // 10  # of each request on the device
torch.manual_seed(0)

# The whole cache, in pinned memory that kernels read where it is, and the pages of each request in it.
pages = requests * context // page_size
memory = torch.zeros(pages, page_size, 656, dtype=torch.uint8, pin_memory=device == "cuda")
cache = on_device(memory) if device == "cuda" else memory
block_table = torch.randperm(pages, device=device, dtype=torch.int32).view(requests, -1)
every = torch.arange(pages * page_size, device=device, dtype=torch.int32)
xt.write_mla_cache(
    torch.randn(len(every), 512, device=device), torch.randn(len(every), 64, device=device), every, cache
)

# The pool on the device, and each request's list of places: no entry is in one yet.
pool = torch.zeros(requests * places // page_size, page_size, 656, dtype=torch.uint8, device=device)
slots = torch.arange(requests * places, device=device, dtype=torch.int32).view(requests, places)
held = torch.full_like(slots, -1)

for step in range(steps):
    # What an indexer selects, whose keys are on the device: here entries of a part of the context that moves.
    near = torch.stack([torch.randperm(2 * k, device=device)[:k] for _ in range(requests)])
    indices = ((40 * step + near) % context).int()

    selected, missing, destinations, counts = xt.resolve_slots(indices, held, slots, num_entries=context)
    sources, _ = xt.map_slots(missing, block_table, page_size=page_size)
    xt.convert_mla_cache(cache, sources.flatten(), destinations.flatten(), pool)  # the bytes of what is missing

    q = torch.randn(requests, heads, 576, device=device).bfloat16()
    out, lse = xt.sparse_mla(q, pool, selected, softmax_scale=0.1352)

    # The same over the whole cache, bit for bit.
    whole, _ = xt.map_slots(indices, block_table, page_size=page_size)
    want, _ = xt.sparse_mla(q, cache, whole, softmax_scale=0.1352)
    assert torch.equal(out, want)
    print(f"out {tuple(out.shape)} {out.dtype}: {int(counts.sum())} of {requests * k} entries were copied")
