"""The core knows neither framework."""

import os
import subprocess
import sys
from pathlib import Path

import xmla


def test_importing_the_core_imports_no_framework() -> None:
    code = (
        "import sys\nimport xmla, xmla.core.op, xmla.core.interpreter, xmla.core.compile, xmla.interop\n"
        "assert len(xmla.core.op.registry()) >= 11\n"
        "print([name for name in ('torch', 'jax', 'jaxlib', 'jax_triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_assert_guards_a_user() -> None:
    """`assert` vanishes under -O; what a user can get wrong raises ArgumentError or UnsupportedError."""
    for file in Path(xmla.__file__).parent.rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            bare = line.strip().startswith("assert ")
            assert not bare or line.endswith("# checked by bind"), f"{file.name}:{number}: {line.strip()}"


def test_no_framework_is_named_in_an_import_of_the_core() -> None:
    for file in (Path(xmla.__file__).parent / "core").rglob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            assert words[:1] not in (["import"], ["from"]) or words[1].split(".")[0] not in ("torch", "jax"), (
                file,
                line,
            )
