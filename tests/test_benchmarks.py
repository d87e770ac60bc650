"""Programs of benchmarks/, as far as they run without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import require_transformers

import benchmarks
from benchmarks import layer, layer_jax

FOLDER = Path(benchmarks.__file__).parent


@pytest.mark.parametrize(("of_transformers", "least"), [(False, 8), (True, 1)], ids=["ops", "transformers"])
def test_every_program_is_imported(of_transformers: bool, least: int) -> None:
    """In a process of their own, whose environment some set."""
    if of_transformers:
        require_transformers()
    files = [file for file in FOLDER.glob("[!_]*.py") if ("xmla.transformers" in file.read_text()) == of_transformers]
    names = [f"benchmarks.{file.stem}" for file in sorted(files)]
    assert len(names) >= least
    command = [sys.executable, "-W", "ignore", "-c", f"import {', '.join(names)}"]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_layers_step_is_that_of_the_dense_formulation(device: str) -> None:
    """Gradients, which the benchmark compares where both fit; both have arrays and products in bfloat16."""
    torch.manual_seed(0)
    sizes = layer.Sizes(heads=3, index_heads=2, k=8)
    step = layer.Layer.random(sizes, 20, device)
    found, slots = step.gradients(step.by_xmla), step.select()
    wanted = step.gradients(lambda: step.dense(slots))
    assert found.keys() == {"loss", *step.leaves}
    assert all(error < 2**-5 for error in layer.difference(found, wanted).values())
    unlike = step.gradients(lambda: step.dense(slots.flip(0)))
    assert all(error > 2**-4 for error in layer.difference(found, unlike).values())
    in_jax = layer_jax.Step(step, slots).gradients()
    assert in_jax.keys() == found.keys()
    assert all(error < 2**-5 for error in layer.difference(found, in_jax).values())
    unlike = layer_jax.Step(step, slots.flip(0)).gradients()
    assert all(error > 2**-4 for error in layer.difference(found, unlike).values())


def test_a_failure_of_the_dense_step_in_jax_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU; its process ends where there is none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = layer.dense_in_jax(16)
    assert found.keys() == {"failed"} and found["failed"] and "No module" not in found["failed"]
