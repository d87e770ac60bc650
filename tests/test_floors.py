"""Tests with the lowest release of each dependency that pyproject.toml admits, and that a job tests each of these."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import HAS_GPU
from packaging.requirements import Requirement
from packaging.version import Version

from tools import releases

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WEEKLY = (ROOT / ".github/workflows/weekly.yml").read_text()
FLOORS = releases.EXTRAS
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A process of Python with every dependency at its floor."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([releases.path_of(FLOORS), os.environ["PYTHONPATH"]])}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_with_the_lowest_of_each() -> None:
    """The tests that are marked so, in one process: `make floors` has more."""
    if missing := {name: of for name, of in releases.floors(FLOORS).items() if not releases.installed(name, of)}:
        if HAS_GPU:
            pytest.skip("floors are tested where CI runs; tools/releases.py installs them")
        pytest.fail(f"not installed: {missing}; {sys.executable} -m tools.releases installs them")
    present = json.loads(run("-c", VERSIONS, *releases.floors(FLOORS)).stdout)
    assert {name: Version(of) for name, of in present.items()} == {
        name: Version(of) for name, of in releases.floors(FLOORS).items()
    }
    files = [str(file) for file in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.floors" in file.read_text()]
    done = run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "floors", *files)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout


def test_what_is_compiled_is_so_at_the_floors_too() -> None:
    """Of what xmla calls an older release lacks most of torch.compile."""
    make = ["make", "--dry-run", "floors", f"PYTHON={sys.executable}"]
    files = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    uses = {file for file in TESTS.rglob("test_*.py") if re.search(r"torch\.compile\(", file.read_text())}
    assert {str(file.relative_to(ROOT)) for file in uses - {*(TESTS / "gpu").glob("*.py")}} <= {*files}


# Extras that no machine without a GPU tests: JAX's plugin of another CUDA, of the same release as `cuda`, and what
# `xmla bench` times beside the ops on one.
ON_A_GPU = {"cuda12", "peers"}


def test_every_floor_is_one_that_a_job_tests() -> None:
    assert re.findall(r"tools\.releases floors ([\w,]+)", MAKEFILE) == [releases.EXTRAS]
    tested = {*releases.EXTRAS.split(",")}
    extras = {name: [*map(Requirement, lines)] for name, lines in PROJECT["optional-dependencies"].items()}
    assert extras["cuda12"][0].specifier == extras["cuda"][0].specifier == extras["jax"][0].specifier
    for engine in extras.keys() - tested - ON_A_GPU:
        (required,) = extras[engine]
        (listed,) = re.findall(rf"^{engine.upper()} \?= (.*)$", MAKEFILE, re.MULTILINE)
        floor = Version(str(releases.lowest(required)))
        assert any(Version(release) == floor for release in listed.split()), (engine, floor)
        for release in listed.split():
            assert f'"{engine} {engine.upper()}={release}"' in WEEKLY, (engine, release)
    assert {"floors", "jax"} <= set(re.findall(r"[\w-]+", re.findall(r"target:\s*\[(.*?)\]", WEEKLY, re.DOTALL)[0]))
    for package, served in releases.SERVED.items():
        floor = releases.floors(FLOORS)[package]
        assert min(map(Version, served)) == Version(floor), package
