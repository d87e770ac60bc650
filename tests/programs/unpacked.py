"""A decode step's calls in one framework, with the kernels that Triton's cache on disk has: none is compiled.

A script of its own, for a process without the interpreter. Without a GPU the step is lowered for an H200 in JAX, and
the kernels that PyTorch's front-end asks for are loaded. Prints how many kernels the cache had.
    JAX_PLATFORMS=cpu python tests/programs/unpacked.py torch|jax BATCH MAX_LEN HEADS K
"""

import sys

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from xmla.cli.plan import typical
from xmla.core.compile import compiled
from xmla.core.models.calls import Call
from xmla.core.registry import registry
from xmla.core.values import DTYPES, H200, assume_device
from xmla.machine.environment import HAS_GPU


def refuse(*_: object) -> None:
    raise AssertionError("a kernel is compiled")


def by_torch(call: Call) -> None:
    if not HAS_GPU:
        for kernel in call.specializations(H200):
            compiled(kernel, H200.arch)
        return
    import torch

    from xmla.torch_api._all_ops import TORCH_OPS

    tensors = {n: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for n, s in call.specs.items()}
    getattr(TORCH_OPS, call.op)(*map(tensors.get, registry()[call.op].tensors), **call.attrs)
    torch.cuda.synchronize()


def by_jax(call: Call) -> None:
    import jax
    import jax.numpy as jnp

    from xmla.jax_api import EXPORT_CHECKS
    from xmla.jax_api._all_ops import JAX_OPS

    shapes = {name: jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype][0]) for name, spec in call.specs.items()}
    names = registry()[call.op].tensors
    function = jax.jit(lambda given: getattr(JAX_OPS, call.op)(*map(given.get, names), **call.attrs))
    if HAS_GPU:
        jax.block_until_ready(function({name: jnp.zeros(like.shape, like.dtype) for name, like in shapes.items()}))
        return
    with assume_device(H200):
        jax.export.export(function, platforms=["cuda"], disabled_checks=EXPORT_CHECKS)(shapes)


def main() -> None:
    framework, batch, max_len, heads, k = sys.argv[1], *map(int, sys.argv[2:])
    hits: list[bool] = []
    CUDABackend.add_stages = refuse
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    config = typical("deepseek_v32", batches=[batch], max_lens=[max_len], heads=heads, k=k)
    for call in config.decode(batch, 1, max_len):
        {"torch": by_torch, "jax": by_jax}[framework](call)
    assert all(hits), hits
    print(len(hits))


if __name__ == "__main__":
    main()
