"""Context and tensor parallel attention over 8 devices of one JAX process; a script, since the devices are made first.

python jax_ranks.py [RANKS …]      Prints a JSON line for each number of ranks.
"""

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

import jax
import jax.numpy as jnp
import kit
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import PROBLEMS, SCALE, K, Problem

from xmla import ArgumentError, jax_api
from xmla.core.parallel import received_bytes
from xmla.core.registry import registry
from xmla.core.values import ATTENTION_LSE
from xmla.jax_api.parallel import ContextParallel, tensor_parallel_attention

OP = registry()["dsa_attention"]
INVARIANT = {"k": K, "softmax_scale": SCALE, "batch_invariant": True}
POOLS = ("block_table", "mla_cache", "indexer_cache")


def arguments(problem: Problem, mesh: Mesh) -> dict[str, jax.Array]:
    """Queries on every device, pools and block tables of the ranks along the first axis, each on its own."""
    placed = {}
    for name, array in problem.whole.items():
        spec, value = P(), array
        if name in POOLS:
            spec, value = P("context"), np.stack([rank[name] for rank in problem.ranks])
        placed[name] = jax.device_put(np.ascontiguousarray(value), NamedSharding(mesh, spec))
    return placed


def context_step(problem: Problem, mesh: Mesh, **options: object):
    """A jitted step over the mesh; out and lse are replicated, or sharded over their heads with scatter_heads."""
    parallel = ContextParallel("context", problem.ownership)
    names = list(problem.whole)

    def step(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        own = {n: a[0] if n in POOLS else a for n, a in zip(names, arrays, strict=True)}
        batch = parallel.batch(own["block_table"], own["lengths"], own.get("request_ids"))
        return parallel.dsa_attention(
            own["q"], own["index_q"], own["index_weights"], own["mla_cache"], own["indexer_cache"], batch, own["sink"],
            k=K, softmax_scale=SCALE, **options,
        )  # fmt: skip

    heads = P(None, "context") if options.get("scatter_heads") else P()
    specs = tuple(P("context") if name in POOLS else P() for name in names)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(heads, heads, P()), check_vma=False))


def exchanged(text: str, ranks: int) -> int:
    """Bytes that a device receives in the collectives of a compiled step, from the results' shapes in its HLO."""
    total = 0
    size = {"s32": 4, "f32": 4, "bf16": 2, "u16": 2, "u32": 4}
    for line in text.splitlines():
        if not (found := re.search(r"= (.*?) (all-gather|all-to-all)(-start)?\(", line)):
            continue
        shapes = re.findall(r"([a-z0-9]+)\[([0-9,]*)\]", found[1])
        if found[3]:  # a GPU's come as (operands, results)
            shapes = shapes[len(shapes) // 2 :]
        total += sum(size[kind] * int(np.prod([int(n) for n in dims.split(",") if n])) for kind, dims in shapes)
    return total * (ranks - 1) // ranks


@cache
def on_one_device() -> tuple[jax.Array, ...]:
    whole = PROBLEMS["mixed, padding"](1).whole
    return jax_api.dsa_attention(*(jnp.asarray(whole[n]) if n in whole else None for n in OP.tensors), **INVARIANT)


def check(ranks: int) -> dict[str, object]:
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    found: dict[str, object] = {"ranks": ranks}
    for name in PROBLEMS if ranks < 8 else ("decode, interleaved",):  # interpreting takes a while
        problem = PROBLEMS[name](ranks)
        placed = arguments(problem, mesh)
        out, lse, indices = context_step(problem, mesh)(*placed.values())
        whole = [jnp.asarray(problem.whole[n]) if n in problem.whole else None for n in OP.tensors]
        one = jax_api.dsa_attention(*whole, k=K, softmax_scale=SCALE)
        assert np.array_equal(indices, one[2]), f"{name}: other keys than one device"
        want = OP.reference(**problem.whole, k=K, softmax_scale=SCALE)
        kit.assert_close(f"{name}: out", out, want[0], kit.MERGED_OUT)
        kit.assert_close(f"{name}: lse", lse, want[1], ATTENTION_LSE)

    tokens, heads, _ = problem.whole["q"].shape
    for scatter in (False, True):
        compiled = context_step(problem, mesh, scatter_heads=scatter).lower(*placed.values()).compile()
        if scatter and ranks == 2:
            for mine, theirs in zip(compiled(*placed.values()), (out, lse, indices), strict=True):
                kit.assert_bits_equal(name, mine, theirs)
        predicted = sum(received_bytes(tokens, heads, K, ranks, scatter_heads=scatter).values())
        found["scattered" if scatter else "gathered"] = [exchanged(compiled.as_text(), ranks), predicted]

    # Tensor parallel: under jit, q already sharded over its heads, as a model's projection leaves it.
    whole = PROBLEMS["mixed, padding"](1).whole
    arrays = {n: jax.device_put(np.ascontiguousarray(a), NamedSharding(mesh, P())) for n, a in whole.items()}
    arrays["q"] = jax.device_put(arrays["q"], NamedSharding(mesh, P(None, "context")))

    @jax.jit
    def step(given: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        ordered = [given.get(n) for n in OP.tensors]
        return tensor_parallel_attention(*ordered, mesh=mesh, axis_name="context", **INVARIANT)

    got = step(arrays)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "context")), 3)
    for mine, theirs in zip(got, on_one_device(), strict=True):
        kit.assert_bits_equal("tensor parallel", mine, theirs)
    if ranks > 1:
        try:
            jax.eval_shape(
                lambda q: tensor_parallel_attention(
                    q, *(whole[n] for n in list(OP.tensors)[1:7]), mesh=mesh, axis_name="context", **INVARIANT
                ),
                jax.ShapeDtypeStruct((*whole["q"].shape[:1], ranks + 1, 576), jnp.bfloat16),
            )
        except ArgumentError as error:
            found["uneven"] = str(error)
    return found


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ("2", "4", "8")):
        print(json.dumps(check(count)), flush=True)
