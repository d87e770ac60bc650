"""Install a release's files into environments with one framework, or none, and call an op there.

python tools/use_release.py FOLDER [FRAMEWORK …]        (torch, jax; both and none of them if no one is named)

Each Python that this machine or uv has is used; of the others uv's reason is printed. It needs uv and nothing of the
tree.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.12", "3.13", "3.14")
# A call of an op with nothing but what is declared.
USE = {
    "": "import xmla; print(xmla.supports('map_slots', 'H200'))",
    "torch": """
import torch
from xmla import torch_api as xt
print(xt.map_slots(torch.tensor([[0, 65]], dtype=torch.int32), torch.tensor([[3, 5]], dtype=torch.int32), page_size=64))
""",
    "jax": """
import jax.numpy as jnp
from xmla import jax_api as xj
print(xj.map_slots(jnp.array([[0, 65]]), jnp.array([[3, 5]]), page_size=64))
""",
}


def run(*command: str | Path, cwd: Path | None = None, **more: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | more, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def python_of(version: str) -> tuple[str, str]:
    """A Python of this version, or "" and why there is none."""
    done = subprocess.run([sys.executable, "-m", "uv", "python", "find", version], capture_output=True, text=True)
    return done.stdout.strip(), " ".join(done.stderr.split())


def use(wheels: Path, extras: Sequence[str]) -> None:
    """Install and call, in an environment for each Python and extra; "" is none."""
    uv = (sys.executable, "-m", "uv")
    for version in PYTHONS:
        python, why = python_of(version)
        if not python:
            print(f"NOT TRIED: Python {version}. {why}", flush=True)
            continue
        for extra in extras:
            with tempfile.TemporaryDirectory() as name:
                run(*uv, "venv", "--quiet", "--python", python, Path(name, "env"))
                inside = Path(name, "env/bin/python")
                wanted = f"xmla-kernels[{extra}]" if extra else "xmla-kernels"
                run(*uv, "pip", "install", "--quiet", "--python", inside, "--find-links", wheels, wanted)
                more = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
                run(inside, "-c", USE[extra], cwd=Path(name), **more)
                run(Path(name, "env/bin/xmla"), "info", cwd=Path(name), **more)
                shipped = "from xmla._frameworks import LAUNCHERS as all_; print(*map(str, all_.values()), sep='\\n')"
                paths = run(inside, "-c", shipped, cwd=Path(name), **more).splitlines()
                if not all(Path(path).exists() for path in paths):
                    sys.exit(f"Python {version}, {wanted}: the wheel that pip chose has no launchers")
            print(f"used: Python {version}, {wanted}", flush=True)


if __name__ == "__main__":
    use(Path(sys.argv[1]).resolve(), sys.argv[2:] or [*USE])
