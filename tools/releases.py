"""Releases of packages beside the environment's own, each in a folder that goes before it on PYTHONPATH.

python -m tools.releases                            (installs all that tests take)
python -m tools.releases triton|jax [RELEASE …]     (these, or all of the package's, and prints a folder a line)
python -m tools.releases floors EXTRA,…             (the lowest that xmla and its extras require, printed as one path)
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
# By package: each older Triton, with which every plan is compiled too, and the JAX releases that its tests run with.
SERVED = {"triton": ("3.7.1", "3.8.0"), "jax": ("0.11.2", "0.12.0.1")}
# What a release does not come without. All else is the environment's: of torch nearly all libraries of CUDA.
WITH = {
    "jax": ("jaxlib=={0}", "jax-cuda13-plugin=={0}", "jax-cuda13-pjrt=={0}"),
    "torch": ("nvidia-curand>=10.4,<11",),
}
PARTS = {Requirement(part.format(0)).name for parts in WITH.values() for part in parts}
# Whose floors tests run with; the other extras' are engines', or of packages for a GPU (tests/test_floors.py).
EXTRAS = "torch,jax,cuda,transformers,demo"


def folder(package: str, release: str) -> Path:
    """Where a release is installed, to be put before the environment's own on PYTHONPATH."""
    return Path(sys.prefix) / "releases" / f"{package}-{release}"


def installed(package: str, release: str) -> bool:
    """Whether the environment has a release, as its own or in a folder."""
    if folder(package, release).exists():
        return True
    try:
        return Version(version(package)) == Version(release)
    except PackageNotFoundError:
        return False


def lowest(requirement: Requirement) -> str | None:
    """The lowest release that a requirement admits, or None if it has no bound below."""
    return next((bound.version for bound in requirement.specifier if bound.operator in (">=", "==")), None)


def floors(extras: str) -> dict[str, str]:
    """The lowest release of each package that xmla and these extras require."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras.split(","):
        lines += PROJECT["optional-dependencies"][extra]
    releases = {made.name: lowest(made) for made in map(Requirement, lines)}
    return {package: release for package, release in releases.items() if release and package not in PARTS}


def path_of(extras: str) -> str:
    """What goes before the environment's packages on PYTHONPATH, so that each of `floors` is found."""
    return os.pathsep.join(str(folder(*release)) for release in floors(extras).items())


def install(package: str, release: str) -> None:
    """Install a release in its folder unless the environment has it."""
    if installed(package, release):
        return
    print(f"{package} {release}, for tests", file=sys.stderr, flush=True)
    target = folder(package, release)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    parts = (part.format(release) for part in WITH.get(package, ()))
    subprocess.run([*command, f"{package}=={release}", *parts], check=True)
    if package == "torch":
        link_cuda(target)


def link_cuda(target: Path) -> None:
    """Link the environment's libraries of CUDA to where a torch in `target` looks for them: beside itself."""
    site = Path(str(distribution("torch").locate_file("")))
    for library in site.glob("nvidia/*/lib/*.so*"):
        link = target / library.relative_to(site)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(library)


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            for package, releases in SERVED.items():
                for release in releases:
                    install(package, release)
            for package, release in floors(EXTRAS).items():
                install(package, release)
        case ["floors", extras]:
            for package, release in floors(extras).items():
                install(package, release)
            print(path_of(extras))
        case [package, *releases] if package in SERVED:
            for release in releases or SERVED[package]:
                install(package, release)
                print(folder(package, release))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
