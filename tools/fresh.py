"""Install xmla as the README says, in environments with nothing else, and run the README's and the documents' programs.

python -m tools.fresh [extras …]       (torch torch,transformers jax torch,jax jax,cuda torch,jax,cuda: minutes)

tests/test_wheel.py runs them in CI from the wheel and links to what it requires of the environment that is there.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
GPU = Path("/dev/nvidiactl").exists()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


# The README's are programs each; a document's are one together.
PROGRAMS = {f"README.md, {number}": code for number, code in enumerate(blocks(ROOT / "README.md"), 1)}
PROGRAMS |= {page.name: code for page in sorted((ROOT / "docs").glob("*.md")) if (code := "\n".join(blocks(page)))}


NAMES = "torch", "jax", "flax", "transformers"
CALLS = {"cuda": "jax.export.export(", "flatbuffers": ".serialize()"}  # which need what they do not import


def frameworks(code: str) -> set[str]:
    """What a program needs, Flax and flatbuffers too, which no extra brings."""
    lines = [line for line in code.splitlines() if re.match(r"\s*(import|from) ", line)]
    imported = {name for name in NAMES if any(re.search(rf"\b{name}(_api)?\b", line) for line in lines)}
    return imported | {name for name, call in CALLS.items() if call in code}


def run(command: Sequence[str | Path], folder: Path, **more: str) -> float:
    """Run a command that sees nothing of this environment's but `more`; its seconds."""
    private = ("PYTHON", "TRITON", "JAX", "XLA", "XMLA", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment | more, check=True)
    return time.perf_counter() - start


def programs(extras: str) -> dict[str, str]:
    """The programs whose frameworks are among the extras."""
    return {name: code for name, code in PROGRAMS.items() if frameworks(code) <= set(extras.split(","))}


def interpreted(name: str) -> dict[str, str]:
    """What to set for a program without a GPU, as docs/install.md says; the README's set it themselves."""
    return {} if name.startswith("README") or GPU else {"TRITON_INTERPRET": "1"}


def try_extras(extras: str) -> None:
    """One environment: install, run each program whose framework is there, and `xmla info` and `xmla plan`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", "env"], folder)
        python = folder / "env/bin/python"
        installed = run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[{extras}]"], folder)
        # JAX's CUDA plugin looks for a GPU (docs/install.md).
        more = {"JAX_PLATFORMS": "cpu"} if "cuda" in extras and not GPU else {}
        for name, code in programs(extras).items():
            (folder / "program.py").write_text(code)
            print(f"{extras}: {name} took {run([python, 'program.py'], folder, **more, **interpreted(name)):.0f} s")
        for words in (("info",), ("plan", "--device", "H200")):
            run([folder / "env/bin/xmla", *words], folder, **more)
        size = sum(file.stat().st_size for file in (folder / "env").rglob("*") if file.is_file())
        print(f"{extras}: installed in {installed:.0f} s, {size / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    for extras in sys.argv[1:] or ("torch", "torch,transformers", "jax", "torch,jax", "jax,cuda", "torch,jax,cuda"):
        try_extras(extras)
