"""The kernels that hand over between warpgroups, again and again: `test_shared_gpu.py` starts several on one GPU.

    python tests/programs/shared_gpu.py SECONDS

Processes that share a GPU take turns on it. Warps are then stopped between any two instructions, for milliseconds, as
they never are alone: a hand-over that is right only because one warp is quicker goes wrong. Prints the calls of each
kernel; exit status 1 if a result's bits differ from the first one's.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from xmla import torch_api as xt
from xmla.torch_api._all_ops import TORCH_OPS

Call = Callable[[], tuple[torch.Tensor, ...]]
TOGETHER = 4  # calls that are launched one behind the other


def calls(
    device: str, tokens: int, pages: int, key_pages: int, implementation: str | None
) -> Iterator[tuple[str, Call]]:
    """Pools of so many `pages` that no packed one is dequantised first, but for one of eight."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    def slots(count: int) -> torch.Tensor:
        return torch.randint(0, pages * 64, (tokens, count), device=device, generator=generator, dtype=torch.int32)

    every = torch.arange(pages * 64, device=device, dtype=torch.int32)

    def packed(row: int, latent: int) -> torch.Tensor:
        cache = torch.zeros(pages, 64, row, dtype=torch.uint8, device=device)
        xt.write_mla_cache(normal(pages * 64, latent), normal(pages * 64, 64), every, cache)
        return cache

    def attention(name: str, q: torch.Tensor, *inputs: torch.Tensor | None) -> tuple[str, Call]:
        return name, lambda: xt.sparse_mla(q, *inputs, softmax_scale=0.05, implementation=implementation)

    v4, more, v32, rows = packed(584, 448), packed(584, 448), packed(656, 512), normal(pages, 64, 576)
    q, wide = normal(tokens, 64, 512), normal(tokens, 64, 576)
    window, chosen, counts = slots(128), slots(512), torch.full((tokens,), 500, device=device, dtype=torch.int32)
    yield attention("v4", q, v4, window)
    yield attention("v4, two sources", q, v4, window, None, None, more, chosen, counts)
    yield attention("v32", wide, v32, chosen, counts)
    yield attention("nvfp4", wide, packed(352, 512), chosen, counts)
    yield attention("plain", wide, rows, chosen, counts)
    yield attention("v32, each entry dequantised once", wide, v32[:8], chosen % 512, counts)
    yield attention("few heads", wide[:, :16].contiguous(), v32, chosen, counts)

    out, lse = xt.sparse_mla(wide, rows, chosen, softmax_scale=0.05)
    dout = normal(*out.shape)

    def derivative(deterministic: bool) -> tuple[torch.Tensor, ...]:
        return TORCH_OPS.sparse_mla_backward(
            wide, rows, chosen, out, lse, dout, softmax_scale=0.05, deterministic=deterministic,
            implementation=implementation,
        )  # fmt: skip

    yield "backward", lambda: derivative(deterministic=True)
    yield "backward in any order", lambda: (derivative(deterministic=False)[0],)

    # Programs that pool an entry's dims count themselves, and the last one goes on.
    few, ratio = 8, 128
    kv, score, state = normal(few, 512), normal(few, 512), normal(few * 16, 8, 1024).float()
    ring = torch.arange(few * 16, device=device, dtype=torch.int32).view(few, 16)
    own = torch.arange(few, device=device, dtype=torch.int32)
    bias, angles, entries = normal(ratio, 512).float(), normal(ratio, 64).float(), torch.zeros_like(v4[:few, :2])

    def compressor() -> tuple[torch.Tensor, ...]:
        entries.zero_()
        xt.compress_kv(
            kv, score, bias, kv[0], angles, torch.full_like(own, ratio - 1), state, ring, entries, own[:, None]
        )
        return (entries.clone(),)

    yield "compressor", compressor

    q8, weights = normal(tokens, 64, 128).to(torch.float8_e4m3fn), normal(tokens, 64).float()
    keys = torch.zeros(key_pages, 64, 132, dtype=torch.uint8, device=device)
    every = every[: key_pages * 64]
    xt.write_indexer_cache(normal(len(every), 128), every, keys)
    table = torch.arange(key_pages, device=device, dtype=torch.int32).expand(tokens, key_pages)
    lengths = torch.full((tokens,), len(every), device=device, dtype=torch.int32)
    yield (
        "paged logits",
        lambda: (xt.indexer_logits_paged(q8, weights, keys, table, lengths, implementation=implementation),),
    )
    read = xt.read_indexer_cache(keys, every)
    yield (
        "logits",
        lambda: (
            xt.indexer_logits(q8, weights, *read, torch.zeros_like(lengths), lengths, implementation=implementation),
        ),
    )
    called = q8, weights, *read, torch.zeros_like(lengths), lengths
    blocks = xt.indexer_blocks(*called, k=len(every) // 16, granularity=8)
    yield (
        "blocks",
        lambda: (xt.indexer_blocks(*called, k=len(every) // 16, granularity=8, implementation=implementation),),
    )
    yield (
        "logits in blocks",
        lambda: (xt.indexer_block_topk(*called, blocks, k=64, granularity=8, implementation=implementation),),
    )

    yield (
        "logits in blocks of pages",
        lambda: (
            xt.indexer_block_topk_paged(
                q8, weights, keys, table, lengths, blocks, k=64, granularity=8, implementation=implementation
            ),
        ),
    )

    scores = normal(tokens, len(every)).float()
    yield "selection of many rows", lambda: (xt.select_topk(scores, lengths, k=512),)

    # Whose first launch writes a key and an entry for each of a few tokens, in place of others.
    some = slice(8)
    latent, rope, key = normal(8, 512), normal(8, 64), normal(8, 128)
    own_entries, own_keys = v32[:key_pages].clone(), keys.clone()

    def step() -> tuple[torch.Tensor, ...]:
        own_entries[0].zero_(), own_keys[0].zero_()
        return xt.dsa_step(
            latent, rope, key, every[some], wide[some], latent.view(8, 4, 128), rope[:, :4], own_entries, own_keys,
            table[some], lengths[some], k=64, softmax_scale=0.05,
        )  # fmt: skip

    yield "dsa_step", step


def repeat(kernels: dict[str, Call], seconds: float) -> tuple[Counter[str], Counter[str]]:
    """The calls of each kernel, and the results that differ from the first."""
    first = {name: call() for name, call in kernels.items()}
    made, differ = Counter[str](), Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in kernels.items():
            for results in [call() for _ in range(TOGETHER)]:
                made[name] += 1
                differ[name] += not all(map(torch.equal, results, first[name]))
    return made, +differ


if __name__ == "__main__":
    made, differ = repeat(dict(calls("cuda", 8192, 4096, 64, "gluon")), float(sys.argv[1]))
    print(f"calls {dict(made)}, of them with other results {dict(differ)}")
    sys.exit(bool(differ))
