"""The versions that xmla is tested with, which are the bounds of pyproject.toml, and a warning for others."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

# The compile matrix covers every Triton here, the suite the newest of each.
TESTED = {
    "triton": SpecifierSet(">=3.7.1,<3.10"),
    "torch": SpecifierSet(">=2.12.1,<2.16"),
    "jax": SpecifierSet(">=0.11.2,<0.13"),
    "jax-triton": SpecifierSet(">=0.4.1,<0.5"),
}
# The first release of transformers that has all models of xmla.transformers, which refuses earlier ones.
TRANSFORMERS = "5.24"
FOLLOWS = {
    "triton": "kernels may not compile, or compile to code whose speed nobody measured",
    "torch": "torch below 2.12.1 pins a Triton below 3.7.1; a later one may lack private calls, which are then slower",
    "jax": "the primitive may fail to import or lose Refs and sharding under jit",
    "jax-triton": "GPU kernels under JAX may fail to lower",
}


def installed(package: str) -> str | None:
    """The version of an installed distribution, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def older(package: str, first: str) -> str | None:
    """The version of an installed distribution, if it came before a release of it."""
    release = installed(package)
    return release if release is not None and Version(release) < Version(first) else None


def untested() -> list[str]:
    """A sentence for each installed package whose version is not tested."""
    versions = {package: installed(package) for package in TESTED}
    return [
        f"{package} {versions[package]}: tested with {TESTED[package]}; {FOLLOWS[package]}"
        for package in TESTED
        if (have := versions[package]) is not None and not TESTED[package].contains(have, prereleases=True)
    ]
