"""What a machine without a GPU has exported runs on one that has it, with the bits of a direct call."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kit
import pytest
import torch

from tools.export_for_cuda import exported_case, function_of
from xmla.core.registry import registry

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    script = Path(__file__).parents[2] / "tools" / "export_for_cuda.py"
    major, minor = torch.cuda.get_device_capability()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), str(major * 10 + minor), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.xdist_group("exports")
@pytest.mark.parametrize("name", registry())
def test_an_export_made_without_a_gpu_runs_on_one(name: str, exports: Path) -> None:
    op = registry()[name]
    case, inputs = exported_case(op)
    arrays = [jnp.asarray(array) for array in inputs.values()]
    restored = jax.export.deserialize(bytearray((exports / f"{name}.export").read_bytes()))
    got = jax.tree.leaves(restored.call(*arrays))
    want = jax.tree.leaves(jax.jit(function_of(op, case, [*inputs]))(*arrays))
    assert len(got) == len(want) > 0
    where = None
    if op.partial:
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    for ours, theirs in zip(got, want, strict=True):
        kit.assert_bits_equal(name, ours, theirs, where)
