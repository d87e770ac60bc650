"""The examples run."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EVERYTHING, HAS_GPU, marked_jax, require_transformers

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# What an example that needs a process of its own has: settings and devices of the process, or ranks.
OF_A_PROCESS = ("XMLA_", "jax.config", "torch.distributed")


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "example", [marked_jax(path, path.read_text()) for path in EXAMPLES], ids=lambda path: path.stem
)
def test_example(
    example: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs that begin; elsewhere than on a GPU and in `make test ALL=1`, the simple ones in this process, which
    has imported what takes half of their time."""
    code = example.read_text()
    if "Trainer" in code and HAS_GPU:
        pytest.importorskip("accelerate")  # which transformers' Trainer needs, and the group `dev` brings
    if "xmla.transformers" in code:
        require_transformers()
    pictures = [tmp_path / "curves.png"] if "picture" in code else []
    command = [str(example), *map(str, pictures)]
    if EVERYTHING or any(word in code for word in OF_A_PROCESS):
        done = subprocess.run([sys.executable, *command], env=os.environ, capture_output=True, text=True, check=False)
        if HAS_GPU and done.stderr.strip().endswith("needs 2 GPUs"):
            pytest.skip("needs 2 GPUs")
        assert done.returncode == 0, done.stderr[-3000:]
        printed = done.stdout
    else:
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "path", [str(example.parent), *sys.path])
        runpy.run_path(str(example), run_name="__main__")
        printed = capfd.readouterr().out
    assert any(line.startswith("out (") or "tokens/s" in line for line in printed.splitlines()), printed
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize("name", ["decode_loop", "decode_loop_jax"])
@pytest.mark.parametrize("steps", ["0", "-3"])
def test_a_loop_of_no_steps_is_refused(name: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = next(path for path in EXAMPLES if path.stem == name)
    monkeypatch.setattr(sys, "argv", [str(example), steps])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(example), run_name="__main__")
    assert ended.value.code == f"steps is {steps}, expected at least 1"


@pytest.mark.slow
def test_finetuning_without_a_checkpoint_by_two_ranks() -> None:
    """One rank makes the checkpoint that both load."""
    import torch

    if HAS_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    example = next(path for path in EXAMPLES if path.stem == "finetune_checkpoint")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "have the bits of the run that went on" in done.stdout
