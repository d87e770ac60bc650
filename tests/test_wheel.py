"""What `make wheel` makes has the whole package, and runs where the tree is not."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

import xmla
from xmla._frameworks import DISTRIBUTION
from xmla.core.registry import registry

ROOT = Path(__file__).parent.parent
PROGRAM = """
import numpy as np
import torch
import xmla
from xmla import torch_api as xt

slots, counts = xt.map_slots(torch.tensor([[0, 65, -1]], dtype=torch.int32), torch.tensor([[3, 5]], dtype=torch.int32),
                             page_size=64, implementation="reference")
print(xmla.__file__, xmla.__version__, slots.tolist(), sorted(name for name in xt.__all__))
"""


def make_wheel(folder: Path) -> Path:
    """The wheel, made in a copy of the tree in `folder`."""
    copytree(ROOT / "xmla", folder / "xmla", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
        copy(ROOT / name, folder)
    command = ["make", "wheel", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("source"))


def test_it_has_the_files_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("xmla/")}
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "xmla").rglob("*") if file.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}
    assert wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{xmla.__version__}-py3-none-any.whl"


def test_it_runs_where_the_tree_is_not(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True)
    environment = os.environ | {"PYTHONPATH": str(site)}
    call = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = f"{site / 'xmla' / '__init__.py'} {xmla.__version__} [[192, 321, -1]] {sorted(registry())}"
    assert done.stdout.strip() == expected
    command = [site / "bin" / "xmla", "supports", "map_slots"]
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "H200" in told


def test_the_newest_version_of_the_changes_is_the_packages() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == xmla.__version__ and versions == sorted(versions, reverse=True)


def test_nobody_is_told_to_install_another_project() -> None:
    """The package index's "xmla" is not this one."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [ROOT / name for name in files if name.endswith((".py", ".md", ".toml", ".yml", ".cc", ".c", "Makefile"))]
    command = re.compile(r"(?:install|download|add)\b[^\n]*?[\s'\"]xmla(?=[\[\s'\"=<>~]|$)", re.MULTILINE)
    told = {f"{file.relative_to(ROOT)}: {found[0]}" for file in texts for found in command.finditer(file.read_text())}
    assert {line for line in told if "pip" in line} == set()
    assert command.search("pip install 'xmla[jax]'") and not command.search("pip install 'xmla-kernels[jax]'")
