"""One rank of the torch tests, started once per rank: python torch_ranks.py STORE RANK RANKS WHAT.

Prints a JSON line: what was found, or the error's type and message.
"""

import hashlib
import json
import os
import socket
import struct
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from problem import PROBLEMS, SCALE, K, Problem
from torch.distributed.device_mesh import init_device_mesh

import xmla.core.compile.interpreter  # noqa: F401
from xmla import torch_api
from xmla.core.parallel import Ownership, received_bytes
from xmla.core.registry import registry
from xmla.torch_api.parallel import ContextParallel, TensorParallel

sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))
import kit
from torch_gradients import check_gradients  # noqa: F401

from xmla.core.values import ATTENTION_LSE

# Seconds of the engine: as long as a rank may be late on a busy machine.
TIMEOUT = 1800
# Those of a step in which ranks that have met wait in vain for each other.
SHORT = 5
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHARED = ("q", "index_q", "index_weights", "lengths", "request_ids", "sink")


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: kit.to_torch(np.ascontiguousarray(a), DEVICE) for name, a in arrays.items()}


def received() -> int:
    """Bytes that this process's TCP connections have received, from the kernel."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if not str(fd.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", facts, 128)[0]  # tcpi_bytes_received
        except OSError:
            continue
    return total


def attend(parallel: ContextParallel, problem: Problem, rank: int, **options: object) -> tuple[torch.Tensor, ...]:
    whole = tensors({name: problem.whole[name] for name in SHARED if name in problem.whole})
    own = tensors(problem.ranks[rank])
    batch = parallel.batch(own["block_table"], whole["lengths"], whole.get("request_ids"))
    return parallel.dsa_attention(
        whole["q"], whole["index_q"], whole["index_weights"], own["mla_cache"], own["indexer_cache"], batch,
        whole["sink"], k=K, softmax_scale=SCALE, **options,
    )  # fmt: skip


def check_context(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Every problem: the selection of one process, bit for bit, and its attention within the tolerance."""
    op = registry()["dsa_attention"]
    digests = []
    for name in PROBLEMS:
        problem = PROBLEMS[name](ranks)
        out, lse, indices = found = attend(ContextParallel(mesh, problem.ownership), problem, rank)
        digests.append(hashlib.sha256(b"".join(kit.as_numpy(x).tobytes() for x in found)).hexdigest())
        if rank == 0:  # the others have the same, which the digests show
            whole = tensors(problem.whole)
            one = torch_api.dsa_attention(*(whole.get(n) for n in op.tensors), k=K, softmax_scale=SCALE)
            assert torch.equal(indices, one[2]), f"{name}: other keys than one process"
            want = op.reference(**problem.whole, k=K, softmax_scale=SCALE)
            kit.assert_close(f"{name}: out", out, want[0], kit.MERGED_OUT)
            kit.assert_close(f"{name}: lse", lse, want[1], ATTENTION_LSE)
    return {"digests": digests}


def check_options(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Logits of a token at a time select the same keys; scattered heads are those of all."""
    problem = PROBLEMS["two tokens per request, contiguous"](ranks)
    parallel = ContextParallel(mesh, problem.ownership)
    out, lse, indices = attend(parallel, problem, rank)
    some, some_lse, few = attend(parallel, problem, rank, scatter_heads=True, workspace_bytes=1)
    assert torch.equal(few, indices)
    heads = out.shape[1] // ranks
    assert torch.equal(some, out[:, rank * heads : (rank + 1) * heads])
    assert torch.equal(some_lse, lse[:, rank * heads : (rank + 1) * heads])
    return {}


def check_writes(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Each rank's block table sends a new key to its owner alone."""
    ownership = Ownership(ranks, 4)
    table = torch.full((1, 8), -1, dtype=torch.int32, device=DEVICE)
    for place, page in enumerate(ownership.own_pages(8, rank)):
        table[0, page] = place
    position = torch.arange(32, dtype=torch.int32, device=DEVICE)[None]
    slots, counts = torch_api.map_slots(position, table, page_size=4)
    assert counts.item() == 32 // ranks
    assert ((slots[0] >= 0) == (ownership.owner(position[0]) == rank)).all()
    return {}


def check_heads(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """Each rank's heads have the bits that they have in one process."""
    op = registry()["dsa_attention"]
    whole = tensors(PROBLEMS["mixed, padding"](1).whole)
    parallel = TensorParallel(mesh)
    attrs = {"k": K, "softmax_scale": SCALE, "batch_invariant": True}
    want = torch_api.dsa_attention(*(whole.get(n) for n in op.tensors), **attrs)
    own = whole | {"q": parallel.shard(whole["q"], 1), "sink": parallel.shard(whole["sink"], 0)}
    out, lse, indices = torch_api.dsa_attention(*(own.get(n) for n in op.tensors), **attrs)
    kit.assert_bits_equal("out", parallel.gather(out, 1), want[0])
    kit.assert_bits_equal("lse", parallel.gather(lse, 1), want[1])
    assert torch.equal(indices, want[2])
    try:
        parallel.shard(torch.zeros(1, 2 * ranks + 1, 576), 1)
    except torch_api.parallel.ArgumentError as error:
        return {"uneven": str(error)}
    raise AssertionError("uneven heads were dealt out")


def check_bytes(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """What the sockets of this process received in a step, and what the function says."""
    found = {}
    problem = PROBLEMS["two tokens per request, contiguous"](ranks)
    parallel = ContextParallel(mesh, problem.ownership)
    tokens, heads, _ = problem.whole["q"].shape
    for scatter in (False, True):
        dist.barrier()
        before = received()
        attend(parallel, problem, rank, scatter_heads=scatter)
        after = received()
        expected = sum(received_bytes(tokens, heads, K, ranks, scatter_heads=scatter).values())
        found["scattered" if scatter else "gathered"] = [after - before, expected]
        dist.barrier()
    return {"bytes": found}


def check_shapes(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """The last rank has another number of heads in the first step, and in the third, when all have had the second."""
    problem = PROBLEMS["decode, interleaved"](ranks)
    fewer = {"q": problem.whole["q"][:, :4], "sink": problem.whole["sink"][:4]}
    other = replace(problem, whole=problem.whole | fewer) if rank == ranks - 1 else problem
    messages = []
    for step in (other, problem, *([] if GPU else [other])):  # NCCL tells the last after its watchdog's timeout
        if messages:
            dist.barrier()
            for group in (mesh.get_group(), dist.group.WORLD):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), group)
        try:
            attend(ContextParallel(mesh, problem.ownership), step, rank)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"messages": messages}), flush=True)
    os._exit(0)


def check_death(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    """The last rank is gone after the first step."""
    problem = PROBLEMS["decode, interleaved"](ranks)
    parallel = ContextParallel(mesh, problem.ownership)
    attend(parallel, problem, rank)
    if rank == ranks - 1:
        print(json.dumps({"died": True}), flush=True)
        os._exit(0)
    attend(parallel, problem, rank)
    return {}


def check_transformers(mesh: dist.DeviceMesh, rank: int, ranks: int) -> dict[str, object]:
    import transformers_gradients  # which no other check waits for

    return transformers_gradients.check(mesh, rank, ranks)


def main() -> None:
    store, rank, ranks, *checks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if GPU else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("context",))
    found: dict[str, object] = {}
    try:
        for check in checks:
            found |= globals()[f"check_{check}"](mesh, rank, ranks)
        found["ok"] = True
    except Exception as error:
        found |= {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(found), flush=True)
    if found.get("ok"):
        dist.destroy_process_group()
    else:
        os._exit(1)


if __name__ == "__main__":
    main()
