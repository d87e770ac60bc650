"""The older Tritons that every plan is compiled with, each in a folder of the environment beside its own.

python -m tools.tritons        (installs them: Triton alone, without torch)
"""

import subprocess
import sys
from pathlib import Path

OLDER = ("3.7.1", "3.8.0")


def folder(version: str) -> Path:
    """Where an older Triton is installed, to be put before the environment's own on PYTHONPATH."""
    return Path(sys.prefix) / "tritons" / version


if __name__ == "__main__":
    for version in OLDER:
        if not folder(version).exists():
            print(f"Triton {version}, for tests", flush=True)
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder(version))]
            subprocess.run([*command, f"triton=={version}"], check=True)
