"""Which frameworks are installed, and the command that installs a missing one."""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"torch": ("torch",), "jax": ("jax", "jax_triton")}  # by framework, which is also the extra's name
# What a release's wheel for a platform has compiled, by framework: without it they are compiled where they are used.
LAUNCHERS = {
    "torch": Path(__file__).with_name("torch_api") / "xmla_launcher.abi3.so",
    "jax": Path(__file__).with_name("jax_api") / "launcher.so",
}

DISTRIBUTION = "xmla-kernels"  # what pip knows the package by: its "xmla" is another project


def install(extra: str) -> str:
    """The command that installs what an extra has."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def missing(framework: str) -> list[str]:
    """The packages that `xmla.torch_api` or `xmla.jax_api` needs and that are not installed."""
    return [package for package in PACKAGES[framework] if not _is_installed(package)]


def needed(framework: str) -> str:
    """The message if `missing` is not empty."""
    packages = " and ".join(missing(framework)).replace("_", "-")
    return f"xmla.{framework}_api needs {packages}: {install(framework)}"
