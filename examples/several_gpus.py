"""Context parallel in PyTorch: the pages of a request on two ranks, NCCL on GPUs and gloo on the CPU. Runs anywhere.

python examples/several_gpus.py
"""

import os
import tempfile
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from xmla import torch_api as xt
from xmla.core.parallel import Ownership
from xmla.torch_api.parallel import ContextParallel

RANKS, PAGE_SIZE, PAGES, CONTEXT, K = 2, 16, 6, 90, 32


# Each rank
def run(rank: int, store: str) -> None:
    device = f"cuda:{rank}" if GPU else "cpu"
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device.partition(":")[0], (RANKS,), mesh_dim_names=("context",))
    ownership = Ownership(RANKS, PAGE_SIZE)
    parallel = ContextParallel(mesh["context"], ownership)

    # Every rank has the same queries and keys, and stores its own pages of both caches under its own ids.
    torch.manual_seed(0)
    latent, rope, index_k = (torch.randn(CONTEXT, dims, device=device).bfloat16() for dims in (512, 64, 128))
    q, index_q = (torch.randn(1, heads, dims, device=device).bfloat16() for heads, dims in ((8, 576), (4, 128)))
    index_weights = torch.randn(1, 4, device=device)

    def pool(pages: int, row: int) -> torch.Tensor:
        return torch.zeros(pages, PAGE_SIZE, row, dtype=torch.uint8, device=device)

    def write(block_table: torch.Tensor, mla_cache: torch.Tensor, indexer_cache: torch.Tensor) -> None:
        positions = torch.arange(CONTEXT, device=device, dtype=torch.int32)[None]
        slots = xt.map_slots(positions, block_table, page_size=PAGE_SIZE)[0].flatten()  # −1 on pages of other ranks
        xt.write_mla_cache(latent, rope, slots, mla_cache)
        xt.write_indexer_cache(index_k, slots, indexer_cache)

    own = ownership.own_pages(PAGES, rank)
    block_table = torch.full((1, PAGES), -1, dtype=torch.int32, device=device)
    block_table[0, own] = torch.arange(len(own), dtype=torch.int32, device=device)
    mla_cache, indexer_cache = pool(len(own), 656), pool(len(own), 132)
    write(block_table, mla_cache, indexer_cache)

    lengths = torch.tensor([CONTEXT], dtype=torch.int32, device=device)
    batch = parallel.batch(block_table, lengths)  # once per step, for all layers
    out, _, indices = parallel.dsa_attention(
        q, index_q, index_weights, mla_cache, indexer_cache, batch, k=K, softmax_scale=0.1352
    )

    # One GPU with all pages selects the same keys.
    table = torch.arange(PAGES, dtype=torch.int32, device=device)[None]
    mla_cache, indexer_cache = pool(PAGES, 656), pool(PAGES, 132)
    write(table, mla_cache, indexer_cache)
    alone, _, expected = xt.dsa_attention(
        q, index_q, index_weights, mla_cache, indexer_cache, table, lengths, k=K, softmax_scale=0.1352
    )
    rounding = 2**-7 * alone.abs().max().item()  # each rank's part and the merged result are bfloat16
    assert torch.equal(indices, expected) and torch.allclose(out.float(), alone.float(), atol=rounding)
    if rank == 0:
        print(f"out {tuple(out.shape)} {out.dtype} on {RANKS} ranks, which select the same {K} keys as one GPU")
    dist.destroy_process_group()


if __name__ == "__main__":
    if GPU and torch.cuda.device_count() < RANKS:
        raise SystemExit(f"needs {RANKS} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)
