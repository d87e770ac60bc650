"""Install xmla as the README says, in environments with nothing else, and run the README's programs there.

python tests/fresh.py [extras …]       (torch jax torch,jax: minutes and gigabytes)
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
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def run(command: Sequence[str | Path], folder: Path) -> float:
    """Run a command that does not see this environment; its seconds."""
    private = ("PYTHON", "TRITON", "JAX", "XLA", "XMLA", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return time.perf_counter() - start


def try_extras(extras: str) -> None:
    """One environment: install, run each program whose framework is there, print what `xmla info` says."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", "env"], folder)
        python = folder / "env/bin/python"
        installed = run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[{extras}]"], folder)
        for framework in extras.split(","):
            (program,) = [code for code in PROGRAMS if f"from xmla import {framework}_api" in code]
            (folder / "program.py").write_text(program)
            print(f"{extras}: {framework}'s program took {run([python, 'program.py'], folder):.0f} s")
        run([folder / "env/bin/xmla", "info"], folder)
        size = sum(file.stat().st_size for file in (folder / "env").rglob("*") if file.is_file())
        print(f"{extras}: installed in {installed:.0f} s, {size / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    for extras in sys.argv[1:] or ("torch", "jax", "torch,jax"):
        try_extras(extras)
