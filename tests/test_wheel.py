"""What `make wheel` makes has the whole package, and runs where the tree is not."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest
from conftest import EVERYTHING, HAS_GPU
from packaging.requirements import Requirement

import xmla
from tools import address, fresh
from xmla._frameworks import DISTRIBUTION
from xmla.core.registry import public_ops

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = (ROOT / "CHANGELOG.md").read_text()
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
    for name in ("pyproject.toml", PROJECT["readme"], "LICENSE", "Makefile"):
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


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True)
    return site


def link_required(site: Path, extras: str) -> None:
    """Links in `site`, which has xmla, to each installed distribution that it requires with `extras`, and so on."""
    (xmla_itself,) = distributions(path=[str(site)])
    linked: set[tuple[str, frozenset[str]]] = set()
    waiting = [(xmla_itself, frozenset(extras.split(",")))]
    while waiting:
        of, wanted = waiting.pop()
        for text in of.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                continue
            installed, key = distribution(requirement.name), (requirement.name, frozenset(requirement.extras))
            assert requirement.specifier.contains(installed.version, prereleases=True), (text, installed.version)
            if key not in linked:
                linked.add(key)
                waiting.append((installed, key[1]))
            for name in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists() and not name.endswith(".pth"):
                    (site / name).symlink_to(installed.locate_file(name))


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="on a GPU JAX needs another extra; the packages are the same")
@pytest.mark.parametrize("extras", ["torch", "torch,transformers", "jax"])
def test_programs_of_the_documents_need_no_more_than_it_requires(unpacked: Path, tmp_path: Path, extras: str) -> None:
    """As after `pip install 'xmla-kernels[…]'` alone: what is not declared, or not packed, is missing here.

    A program that needs only PyTorch is run beside transformers by XMLA_ALL alone. All are forks of one process, which
    has imported PyTorch or JAX.
    """
    site = tmp_path / "site"
    site.mkdir()
    for part in unpacked.iterdir():
        (site / part.name).symlink_to(part)
    link_required(site, extras)
    alone = [sys.executable, "-S"]  # without the environment's own packages
    fresh.run([*alone, "-m", "xmla", "info"], tmp_path, PYTHONPATH=str(site))
    programs = fresh.programs(extras)
    if extras == "torch,transformers" and not EVERYTHING:
        programs = {name: code for name, code in programs.items() if name not in fresh.programs("torch")}
    words: list[str] = []
    for number, (name, code) in enumerate(programs.items()):
        (tmp_path / f"program{number}.py").write_text(code)
        variables = [f"{variable}={value}" for variable, value in fresh.interpreted(name).items()]
        words += ["--"] * bool(words) + [f"program{number}.py", *variables]
    forked = str(ROOT / "tests/programs/forked.py")
    fresh.run([*alone, forked, extras.partition(",")[0], *words], tmp_path, PYTHONPATH=str(site))


def test_it_runs_where_the_tree_is_not(unpacked: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    call = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = f"{unpacked / 'xmla' / '__init__.py'} {xmla.__version__} [[192, 321, -1]] {sorted(public_ops())}"
    assert done.stdout.strip() == expected
    command = [unpacked / "bin" / "xmla", "supports", "map_slots"]
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "H200" in told


def test_the_newest_version_of_the_changes_is_the_packages() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)$", CHANGES, re.MULTILINE)
    assert versions[0] == xmla.__version__ and versions == sorted(versions, reverse=True)


def released(folder: Path, repository: str | None) -> tuple[dict[str, Any], str, str]:
    """A release's project, its page on a package index, and the README that it is made of."""
    if PROJECT["readme"] != "README.md":
        pytest.skip("this is a release's tree, which has them already")
    for name in ("pyproject.toml", "README.md", "CITATION.cff"):
        copy(ROOT / name, folder)
    address.write(folder, DISTRIBUTION, repository, "v9.8.7")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project, (folder / project["readme"]).read_text(), (ROOT / "README.md").read_text()


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("repository", ["https://example.org/group/xmla", None])
def test_the_page_on_an_index_is_of_the_package(tmp_path: Path, repository: str | None) -> None:
    """What it installs has the package's name, nothing needs a clone, and the README's programs are the same."""
    _, page, readme = released(tmp_path, repository)
    assert f"pip install '{DISTRIBUTION}[torch]'" in page and "'.[" not in page
    assert not any(of_a_clone in page for of_a_clone in ("git clone", "make demo", "make docs", "clone -->"))
    assert PYTHON.findall(page) == PYTHON.findall(readme)
    assert not address.LINK.search(page) and len(address.LINK.findall(readme)) > 40
    assert "](#" in readme and "](#" not in page  # headings are no targets there
    assert "`docs/`" in page


def test_a_release_names_the_repository(tmp_path: Path) -> None:
    """In URLs, links and the citation. Elsewhere a reader of the tree has to know it."""
    project, page, _ = released(tmp_path, "https://example.org/group/xmla")
    assert project["urls"]["Changes"] == "https://example.org/group/xmla/blob/v9.8.7/CHANGELOG.md"
    assert "](https://example.org/group/xmla/blob/v9.8.7/docs/install.md)" in page
    assert "](https://example.org/group/xmla/raw/v9.8.7/docs/images/step.svg)" in page
    assert '\nrepository-code: "https://example.org/group/xmla"\n' in (tmp_path / "CITATION.cff").read_text()
    files = [file for pattern in ("*.md", "*.toml", "docs/*.md", "xmla/**/*.py") for file in ROOT.glob(pattern)]
    assert {file.name for file in files if address.PLACE in file.read_text()} == {"README.md", "CONTRIBUTING.md"}


def test_a_release_without_an_address_has_no_dead_link(tmp_path: Path) -> None:
    project, page, _ = released(tmp_path, None)
    assert "urls" not in project and "docs/images" not in page and "](docs/" not in page
    assert "both on a GPU; sizes and versions (`docs/install.md`). Then" in page


@pytest.mark.parametrize("given", ["git@example.org:xmla", "https://example.org/xmla/", "https://example.org", "x"])
def test_an_address_that_links_cannot_begin_with_is_refused(given: str) -> None:
    with pytest.raises(SystemExit, match="expected such as https://HOST/OWNER/NAME"):
        address.checked(given)


def test_it_can_be_cited() -> None:
    """CITATION.cff has the version and the day of the newest release, and the package's own words."""
    cited = dict(re.findall(r"^([a-z-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    (newest,) = re.findall(rf"^## {re.escape(xmla.__version__)}\n\n(\d{{4}}-\d\d-\d\d)\.", CHANGES, re.MULTILINE)
    assert cited["version"] == xmla.__version__ and cited["date-released"] == newest
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == f"[{', '.join(PROJECT['keywords'])}]" and PROJECT["description"] in cited["title"]
    names = re.findall(r'^  - name: "(.*)"$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert names == [author["name"] for author in PROJECT["authors"]]


def test_nobody_is_told_to_install_another_project() -> None:
    """The package index's "xmla" is not this one."""
    folders = [ROOT / name for name in (".github", "benchmarks", "docs", "examples", "tests", "tools", "xmla")]
    files = [*ROOT.glob("*"), *(file for folder in folders for file in folder.rglob("*"))]  # an sdist has no git
    texts = [file for file in files if file.name.endswith((".py", ".md", ".toml", ".yml", ".cc", ".c", "Makefile"))]
    command = re.compile(r"(?:install|download|add)\b[^\n]*?[\s'\"]xmla(?=[\[\s'\"=<>~]|$)", re.MULTILINE)
    told = {f"{file.relative_to(ROOT)}: {found[0]}" for file in texts for found in command.finditer(file.read_text())}
    assert {line for line in told if "pip" in line} == set()
    assert command.search("pip install 'xmla[jax]'") and not command.search("pip install 'xmla-kernels[jax]'")
