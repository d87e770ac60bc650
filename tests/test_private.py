"""Without a private name of torch, Triton or JAX that xmla takes where it is there, calls give the same bits.

Each script takes the names away before xmla is imported, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xmla

SOURCES = Path(xmla.__file__).parent

TORCH = """
import os, torch
from operator import attrgetter

def take_away(path):
    owner, _, name = path.rpartition(".")
    delattr(attrgetter(owner)(torch), name)

take_away("_C._dynamo.guards._empty_strided_cpu")
take_away("_C._dynamo.guards._empty_strided_cuda")
gone = ["_C._cuda_getDevice", "_C._len_torch_dispatch_stack", "_C._functorch.maybe_current_level"]
gone += ["_C._dynamo.guards.TensorGuards"]
kept = {path: attrgetter(path)(torch) for path in gone}
for path in gone:
    take_away(path)
from xmla.torch_api import _private
for path, value in kept.items():  # torch itself needs them
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(torch), name, value)
assert len(_private.FALLBACKS) == 6, _private.FALLBACKS
assert _private.dispatches()

from xmla import torch_api
device = "cuda" if torch.cuda.is_available() else "cpu"
logits = torch.arange(40.0, device=device).reshape(4, 10) % 7
ends = torch.full((4,), 10, dtype=torch.int32, device=device)
got = torch_api.select_topk(logits, ends, k=3)
want = torch_api.select_topk(logits, ends, k=3, implementation="reference")
assert torch.equal(got, want), (got, want)
compiled = torch.compile(lambda a, b: torch_api.select_topk(a, b, k=3), fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(logits, ends), want)
"""

LAUNCHER = """
import torch
from triton.backends.nvidia.driver import CudaLauncher

from xmla import torch_api
from xmla.torch_api import _launch
_launch.NEEDED = (*_launch.NEEDED, "what no launcher has")
logits = torch.arange(40.0, device="cuda").reshape(4, 10) % 7
ends = torch.full((4,), 10, dtype=torch.int32, device="cuda")
got = torch_api.select_topk(logits, ends, k=3)
assert torch.equal(got, torch_api.select_topk(logits, ends, k=3, implementation="reference"))
"""

JAX = """
import jax
import jax.numpy as jnp
import jax._src.core, jax._src.dispatch, jax._src.sharding_impls, jax._src.state.discharge, jax._src.state.types

for module, name in (
    (jax._src.state.discharge, "register_discharge_rule"), (jax._src.core, "ManualAxisType"),
    (jax._src.dispatch, "prim_requires_devices_during_lowering"), (jax._src.dispatch, "apply_primitive"),
):
    kept = getattr(module, name)
    delattr(module, name)
    globals().setdefault("restore", []).append((module, name, kept))
import xmla
from xmla.jax_api import _private
for module, name, kept in restore:  # JAX itself needs them
    setattr(module, name, kept)
assert len(_private.MISSING) == 4, _private.MISSING
assert not (_private.REFS or _private.MESHES)

from xmla import jax_api
logits, ends = jnp.arange(40.0).reshape(4, 10) % 7, jnp.full((4,), 10, jnp.int32)
want = jax_api.select_topk(logits, ends, k=3, implementation="reference")
for call in (jax_api.select_topk, jax.jit(jax_api.select_topk, static_argnames="k")):
    assert (call(logits, ends, k=3) == want).all()
keys, slots = jnp.ones((2, 128), jnp.bfloat16), jnp.arange(2, dtype=jnp.int32)
cache = jnp.zeros((1, 64, 132), jnp.uint8)
assert jax_api.write_indexer_cache(keys, slots, cache).any()
try:
    jax_api.write_indexer_cache(keys, slots, jax.new_ref(cache))
except xmla.ArgumentError as error:
    assert "cache is" in str(error) and "expected jax.Array" in str(error), error
else:
    raise AssertionError("a Ref was taken")
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.floors
@pytest.mark.parametrize("code", [TORCH, JAX], ids=["torch", "jax"])
def test_without_private_names(code: str) -> None:
    run(code)


@pytest.mark.gpu
def test_without_tritons_launcher() -> None:
    run(LAUNCHER)


def test_private_names_have_one_home() -> None:
    homes = {
        "jax._src": "jax_api/_private.py",
        "torch._C": "torch_api/_private.py",
        "kernel_signature": "torch_api/_launch.py",
    }
    for words, home in homes.items():
        users = {str(file.relative_to(SOURCES)) for file in SOURCES.rglob("*.py") if words in file.read_text()}
        assert users <= {home}, (words, users)
