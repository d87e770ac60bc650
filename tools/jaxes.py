"""The releases of JAX that are served, and tests run with; those that the environment has not, in folders of it.

python -m tools.jaxes [RELEASE …]        (installs these, or all: JAX alone, and prints their folders)
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

RELEASES = ("0.11.2", "0.12.0.1")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def folder(release: str) -> Path:
    """Where a release is installed, to be put before the environment's own on PYTHONPATH."""
    return Path(sys.prefix) / "jaxes" / release


def installed(release: str) -> bool:
    return release == version("jax") or folder(release).exists()


if __name__ == "__main__":
    for release in sys.argv[1:] or RELEASES:
        if not installed(release):
            print(f"JAX {release}, for tests", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder(release))]
            subprocess.run([*command, *(f"{package}=={release}" for package in PACKAGES)], check=True)
        print(folder(release))
