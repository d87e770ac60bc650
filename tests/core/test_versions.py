"""Bounds of the requirements, and what is said of a version outside of them."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
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
