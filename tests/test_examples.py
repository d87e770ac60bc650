"""The examples run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HAS_GPU

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], env=os.environ, capture_output=True, text=True, check=False)
    if HAS_GPU and done.stderr.strip().endswith("needs 2 GPUs"):
        pytest.skip("needs 2 GPUs")
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(line.startswith("out (") or "tokens/s" in line for line in done.stdout.splitlines()), done.stdout
