"""Make a release's files twice, compare and check them, and use them in empty environments.

python tools/release.py [FOLDER]            (dist; `make release` has what it needs)

An sdist with the tests, a wheel for any machine, and a wheel with both launchers for each platform, by `zig cc`, which
compiles for any of them. The second build has to give the same bytes: times are those of SOURCE_DATE_EPOCH, or of the
commit. REPOSITORY, which .github/workflows/release.yml sets, is the repository's address; without it a package has no
URLs (tools/address.py). tools/use_release.py uses the files.
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

from xmla._frameworks import LAUNCHERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xmla"
# Of glibc, in which the wheels of Triton and jaxlib are no older.
GLIBC = "2.28"
PLATFORMS = {arch: f"manylinux_{GLIBC.replace('.', '_')}_{arch}" for arch in ("x86_64", "aarch64")}


def epoch() -> str:
    """The time of every file in a release."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()


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
        if repository := os.environ.get("REPOSITORY"):
            (version,) = re.findall(r'^__version__ = "(.*)"$', (tree / "xmla/__init__.py").read_text(), re.MULTILINE)
            address.write(tree, repository, f"v{version}")
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


def main(folder: Path) -> None:
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
    use(folder, [*USE])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve())
