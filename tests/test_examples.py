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
def test_example(example: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / "curves.png"] if "picture" in example.read_text() else []
    command = [sys.executable, str(example), *map(str, pictures)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if HAS_GPU and done.stderr.strip().endswith("needs 2 GPUs"):
        pytest.skip("needs 2 GPUs")
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(line.startswith("out (") or "tokens/s" in line for line in done.stdout.splitlines()), done.stdout
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
