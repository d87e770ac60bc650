"""Make a release's files twice, compare and check them, and use them in empty environments.

python tools/release.py [FOLDER]            (dist; `make release` has what it needs)

An sdist with the tests, a wheel for any machine, and a wheel with both launchers for each platform, by `zig cc`, which
compiles for any of them. The second build has to give the same bytes: times are those of SOURCE_DATE_EPOCH, or of the
commit. The sdist has to pass tests of its own tree; tools/use_release.py uses the files. REPOSITORY is the repository's
address, the one place for it: `make release REPOSITORY=https://…`, as .github/workflows/release.yml does. Without it
the files are made, and what they lack is said first and last (tools/address.py).
"""

import gzip
import hashlib
import importlib.resources
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import address
import jax
from use_release import USE, run, use

from xmla._frameworks import DISTRIBUTION, LAUNCHERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xmla"
# Of glibc, in which the wheels of Triton and jaxlib are no older.
GLIBC = "2.28"
NO_ADDRESS = """\
NO ADDRESS: REPOSITORY is not set. The package has no URLs, CITATION.cff no repository, and the page on a package index
names documents without links and has no pictures. To set it: make release REPOSITORY=https://HOST/OWNER/NAME"""
# What tells whether an archive has all that tests of the tree read: documents, tools, workflows, the package itself.
OF_THE_TREE = (
    "tests/test_docstrings.py", "tests/test_documents.py", "tests/test_examples.py", "tests/test_private.py",
    "tests/test_report.py", "tests/test_settings.py", "tests/test_wheel.py", "tests/core/test_imports.py",
    "tests/test_layouts.py", "tests/test_formats.py",
)  # fmt: skip
PLATFORMS = {arch: f"manylinux_{GLIBC.replace('.', '_')}_{arch}" for arch in ("x86_64", "aarch64")}


def epoch() -> str:
    """The time of every file in a release."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()


def repository() -> str | None:
    """The address that the user gave, or None."""
    given = os.environ.get("REPOSITORY")
    return address.checked(given) if given else None


def compile_launchers(arch: str, folder: Path) -> None:
    """Compile both launchers for a platform, into the package that lies in `folder`."""
    zig = [sys.executable, "-m", "ziglang"]
    options = ["-target", f"{arch}-linux-gnu.{GLIBC}", "-O2", "-s", "-shared", "-fPIC"]
    cuda = f"-I{importlib.resources.files('triton.backends.nvidia') / 'include'}"
    # XLA takes handlers of older versions of its FFI: those of the oldest release that is served.
    compilers = {
        "torch": ("cc", "torch_api/launcher.c", f"-I{sysconfig.get_path('include')}"),
        "jax": ("c++", "jax_api/launcher.cc", f"-I{jax.ffi.include_dir()}"),
    }
    for framework, (language, source, headers) in compilers.items():
        more = ["-std=c++17"] if language == "c++" else []
        output = folder / "xmla" / LAUNCHERS[framework].relative_to(PACKAGE)
        run(*zig, language, *options, *more, cuda, headers, PACKAGE / source, "-o", output)


def repacked(sdist: Path, seconds: int) -> None:
    """Pack an archive again with one time, one owner and sorted names, which setuptools leaves to chance."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=seconds))


def build(folder: Path) -> list[Path]:
    """A release's files, from what git has of the tree."""
    seconds = epoch()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT))) as archive:
            archive.extractall(tree, filter="data")
        (version,) = re.findall(r'^__version__ = "(.*)"$', (tree / "xmla/__init__.py").read_text(), re.MULTILINE)
        address.write(tree, DISTRIBUTION, repository(), f"v{version}")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree, SOURCE_DATE_EPOCH=seconds)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    repacked(sdist, int(seconds))
    for arch, platform in PLATFORMS.items():
        with tempfile.TemporaryDirectory() as name:
            run(sys.executable, "-m", "wheel", "unpack", "--dest", name, wheel)
            (inside,) = Path(name).iterdir()
            compile_launchers(arch, inside)
            (facts,) = inside.glob("*.dist-info/WHEEL")
            text = facts.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
            facts.write_text(text.replace("py3-none-any", f"cp312-abi3-{platform}"))
            run(sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, inside, SOURCE_DATE_EPOCH=seconds)
    return sorted(folder.iterdir())


def check(files: list[Path]) -> None:
    """What the index asks for, and that a platform's wheel links to nothing but glibc of its tag."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for wheel in (file for file in files if "manylinux" in file.name):
        told = run(sys.executable, "-m", "auditwheel", "show", wheel)
        if "manylinux_" not in told:
            sys.exit(f"{wheel.name} is of no manylinux:\n{told}")
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def test(sdist: Path) -> None:
    """The tests of its own tree, in the unpacked archive alone."""
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(sdist) as archive:
            archive.extractall(name, filter="data")
        (tree,) = Path(name).iterdir()
        chosen = ("-m", "not slow", "--one-case", *OF_THE_TREE)
        print(run(sys.executable, "-m", "pytest", "-q", *chosen, cwd=tree, PYTHONPATH=str(tree)).splitlines()[-1])


def main(folder: Path) -> None:
    if repository() is None:
        print(NO_ADDRESS, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = build(folder)
    with tempfile.TemporaryDirectory() as name:
        again = build(Path(name))
        differ = [a.name for a, b in zip(files, again, strict=True) if a.read_bytes() != b.read_bytes()]
    if differ:
        sys.exit(f"a second build gave other bytes: {', '.join(differ)}")
    check(files)
    for file in files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}", flush=True)
    (sdist,) = folder.glob("*.tar.gz")
    test(sdist)
    use(folder, [*USE])
    if repository() is None:
        print(NO_ADDRESS, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve())
