"""Inputs at serving size, made on the GPU: random values, pages and keys drawn at random, no zeros."""

import torch

from xmla import torch_api
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32, MlaLayout
from xmla.core.values import cdiv

DEVICE = "cuda"


def latent_pool(tokens: int, entries: int = 64, layout: MlaLayout = V32) -> torch.Tensor:
    """A cache [P, R, ROW] in which every entry holds a key; pages lie as allocators of the format have them."""
    pool = torch.empty(cdiv(tokens, entries), layout.page_stride(entries), dtype=torch.uint8, device=DEVICE)
    cache = pool[:, : entries * layout.row].view(-1, entries, layout.row)
    for first in range(0, tokens, 1 << 18):
        count = min(1 << 18, tokens - first)
        latent = torch.randn(count, layout.latent, device=DEVICE, dtype=torch.bfloat16)
        rope = torch.randn(count, layout.rope, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.arange(first, first + count, device=DEVICE, dtype=torch.int32)
        torch_api.write_mla_cache(latent, rope, slots, cache)
    return cache


def indexer_pool(tokens: int, entries: int = 64, dim: int = 128) -> torch.Tensor:
    """An indexer cache [P, R, D+4] in which every entry holds a key."""
    cache = torch.empty(-(-tokens // entries), entries, IndexerLayout(dim).row, dtype=torch.uint8, device=DEVICE)
    for first in range(0, tokens, 1 << 20):
        count = min(1 << 20, tokens - first)
        keys = torch.randn(count, dim, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.arange(first, first + count, device=DEVICE, dtype=torch.int32)
        torch_api.write_indexer_cache(keys, slots, cache)
    return cache


def chosen_keys(rows: int, keys: int, k: int) -> torch.Tensor:
    """`k` distinct keys per row, [rows, k] int32, in random order."""
    chunks = []
    for first in range(0, rows, 256):
        noise = torch.rand(min(256, rows - first), keys, device=DEVICE)
        chunks.append(noise.argsort(dim=1)[:, :k].to(torch.int32))
    return torch.cat(chunks)


def block_table(requests: int, tokens: int, entries: int = 64) -> torch.Tensor:
    """[B, M] int32: every request owns its own shuffled pages."""
    width = -(-tokens // entries)
    return torch.randperm(requests * width, device=DEVICE, dtype=torch.int32).reshape(requests, width)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def causal(tokens: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """starts and ends [T] of the last `tokens` of a sequence of `keys`."""
    ends = torch.arange(keys - tokens + 1, keys + 1, device=DEVICE, dtype=torch.int32)
    return torch.zeros_like(ends), ends


def shuffled(table: torch.Tensor, sets: int) -> list[torch.Tensor]:
    """The requests of a block table in so many other orders."""
    return [table[torch.randperm(len(table), device=DEVICE)].contiguous() for _ in range(sets)]
