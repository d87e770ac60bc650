"""A decode loop as an engine runs it, in PyTorch: paged fp8 caches, two tokens per request, one CUDA graph replayed.

python examples/decode_loop.py [steps]

Each step stores the keys of two new tokens of every request and attends with them. All that changes from step to step,
lengths, slots and inputs, is copied into the tensors that the graph was captured with; the last request is padding, as
in a batch padded to a captured size. Without a GPU the steps run eagerly, interpreted, at toy size.
"""

import os
import sys
import time
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch

from xmla import torch_api as xt

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
REQUESTS, HEADS, INDEX_HEADS, CONTEXT, K = (64, 128, 64, 16384, 2048) if GPU else (3, 4, 4, 90, 32)
NEXT_N, PAGE_SIZE = 2, 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else (200 if GPU else 2)
if STEPS < 1:
    sys.exit(f"steps is {STEPS}, expected at least 1")
PAGES = -(-(CONTEXT + NEXT_N * STEPS) // PAGE_SIZE)  # a request
TOKENS = REQUESTS * NEXT_N


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


# The pools and who owns which page.
mla_cache = torch.zeros(REQUESTS * PAGES, PAGE_SIZE, 656, dtype=torch.uint8, device=DEVICE)
indexer_cache = torch.zeros(REQUESTS * PAGES, PAGE_SIZE, 132, dtype=torch.uint8, device=DEVICE)
block_table = torch.randperm(REQUESTS * PAGES, device=DEVICE, dtype=torch.int32).view(REQUESTS, PAGES)

# What a model's projections give each step; static tensors, as a graph needs.
latent, rope, index_k = normal(TOKENS, 512), normal(TOKENS, 64), normal(TOKENS, 128)
q, index_q = normal(TOKENS, HEADS, 576), normal(TOKENS, INDEX_HEADS, 128)
index_weights = torch.randn(TOKENS, INDEX_HEADS, device=DEVICE)
slots = torch.zeros(TOKENS, dtype=torch.int32, device=DEVICE)
lengths = torch.zeros(TOKENS, dtype=torch.int32, device=DEVICE)
ATTRIBUTES = {"k": K, "softmax_scale": 0.1352}


def attend() -> tuple[torch.Tensor, ...]:
    xt.write_mla_cache(latent, rope, slots, mla_cache)
    xt.write_indexer_cache(index_k, slots, indexer_cache)
    return xt.dsa_attention(q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, **ATTRIBUTES)


def place(context: int) -> None:
    """Lengths and slots of this step's tokens, behind `context` keys; the last request is padding."""
    position = context + torch.arange(NEXT_N, device=DEVICE, dtype=torch.int32).repeat(REQUESTS, 1)
    mapped, _ = xt.map_slots(position, block_table, page_size=PAGE_SIZE)
    position[-1], mapped[-1] = -1, -1
    slots.copy_(mapped.flatten())
    lengths.copy_(position.flatten() + 1)


def fill() -> None:
    """The keys of every request's context, a page's worth at a time."""
    for first in range(0, CONTEXT, PAGE_SIZE):
        count = min(PAGE_SIZE, CONTEXT - first)
        position = first + torch.arange(count, device=DEVICE, dtype=torch.int32).repeat(REQUESTS, 1)
        mapped, _ = xt.map_slots(position, block_table, page_size=PAGE_SIZE)
        keys = REQUESTS * count
        xt.write_mla_cache(normal(keys, 512), normal(keys, 64), mapped.flatten(), mla_cache)
        xt.write_indexer_cache(normal(keys, 128), mapped.flatten(), indexer_cache)


def main() -> None:
    torch.manual_seed(0)
    fill()
    place(CONTEXT)
    out, lse, _ = attend()  # compiles what no earlier process has
    step = attend
    if GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse, _ = attend()
        step = graph.replay

    start = time.perf_counter()
    for index in range(STEPS):
        place(CONTEXT + NEXT_N * index)
        for tensor in (latent, rope, index_k, q, index_q):
            tensor.normal_()
        result = step()
        if result is not None:
            out, lse, _ = result
    if GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert out[:-NEXT_N].isfinite().all() and not out[-NEXT_N:].any() and lse[-NEXT_N:].isneginf().all()
    print(f"{STEPS * (TOKENS - NEXT_N) / seconds:.0f} tokens/s of attention, {REQUESTS - 1} requests of {CONTEXT} keys")


if __name__ == "__main__":
    main()
