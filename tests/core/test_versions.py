"""Bounds of the requirements, and what is said of a version outside of them."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from xmla.command import app
from xmla.core import versions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_requirements_are_the_tested_versions() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["torch"], *extras["jax"]]
    required = {made.name: made.specifier for made in map(Requirement, lines)}
    assert {package: required[package] for package in versions.TESTED} == versions.TESTED
    for package, bounds in versions.TESTED.items():
        assert {bound.operator for bound in bounds} == {">=", "<"}, package


@pytest.mark.parametrize(("engine", "releases"), [("vllm", "0.{}"), ("sglang", "0.5.{}")])
def test_engines_are_required_in_tested_releases(engine: str, releases: str) -> None:
    """The plugin knows every release that its extra admits, up to the newest; an older one may pin too old a Triton."""
    (required,) = map(Requirement, PROJECT["optional-dependencies"][engine])
    admitted = [release for release in map(releases.format, range(100)) if required.specifier.contains(release)]
    assert admitted and admitted == [*import_module(f"xmla.{engine}").TESTED][-len(admitted) :]


def test_transformers_is_required_from_the_release_that_is_served() -> None:
    (required,) = map(Requirement, PROJECT["optional-dependencies"]["transformers"])
    assert SpecifierSet(f">={versions.TRANSFORMERS},<6") == required.specifier


@pytest.mark.parametrize(("release", "refused"), [("5.17.0", True), ("5.24.0", False), ("5.25.1", False)])
def test_an_older_transformers_is_refused_by_name(release: str, refused: bool) -> None:
    """Before anything of it is imported, which may lack what the package takes."""
    program = f"""
import sys
from xmla import UnsupportedError
from xmla.core import versions
versions.installed = lambda package: {{"transformers": "{release}"}}[package]
try:
    import xmla.transformers
except UnsupportedError as error:
    print(error, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message = f"xmla.transformers: transformers {release} is installed, expected 5.24 or later: "
    assert done.stdout == (f"{message}pip install 'xmla-kernels[transformers]' False\n" if refused else "")


def test_this_environment_is_a_tested_one() -> None:
    """The suite runs on the newest Triton, torch and JAX that the bounds allow."""
    assert all("triton" not in line.split()[0] for line in versions.untested()), versions.untested()


@pytest.mark.parametrize(("package", "version"), [("triton", "3.10.0"), ("triton", "3.6.0"), ("torch", "2.11.0")])
def test_info_names_a_version_outside_of_the_tested_ones(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: version if name == package else real(name))
    said = " ".join(CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"}).output.split())
    assert f"{package} {version}: tested with" in said and versions.FOLLOWS[package][:30] in said
