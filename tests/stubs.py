"""The front-ends' `.pyi` files: each op's signature as an editor and a type checker see it.

python tests/stubs.py [--check]       (writes them, or fails if they are others; some seconds)

The front-ends make their functions from the declarations at import, so their source tells a type checker nothing. The
stubs come from the same declarations, and need neither torch nor JAX. test_stubs.py compares.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from textwrap import indent

from xmla.core.documents import JAX as JAX_STYLE
from xmla.core.documents import TORCH as TORCH_STYLE
from xmla.core.documents import document
from xmla.core.op import Op
from xmla.core.registry import registry

ROOT = Path(__file__).parent.parent
TORCH = ROOT / "xmla" / "torch_api" / "__init__.pyi"
JAX = ROOT / "xmla" / "jax_api" / "__init__.pyi"

TORCH_HEAD = '''
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from xmla.core.plan import Plan

class _Op[**P, R, **Q](Protocol):
    """The function of an op."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @property
    def plan(self) -> Callable[Q, Plan]:
        """The plan of a call with these arguments, which is not run; its `workspace_bytes` are what the call needs."""

def _planned[**P, R, **Q](plan: Callable[Q, Plan]) -> Callable[[Callable[P, R]], _Op[P, R, Q]]: ...

class _Plans:
'''
JAX_HEAD = """
from typing import Literal, overload

import jax
import numpy as np

EXPORT_CHECKS: tuple[jax.export.DisabledSafetyCheck]
"""
ARRAY = "jax.Array | np.ndarray"
REF = "jax.Ref"


def stubs() -> dict[Path, str]:
    """What each file holds."""
    ops = list(registry().values())
    return {
        TORCH: _module(TORCH, TORCH_HEAD + "".join(map(_torch_plan, ops)), map(_torch_function, ops)),
        JAX: _module(JAX, JAX_HEAD, map(_jax_function, ops)),
    }


def _module(file: Path, head: str, functions: Iterable[str]) -> str:
    source = ast.parse(file.with_suffix(".py").read_text())
    made = "# Made by tests/stubs.py from the declarations of the ops.\n"
    doc = f'"""{ast.get_docstring(source)}\n"""\n'
    exported = f"__all__ = {sorted(registry())}\n"
    text = "\n".join([made + doc + head, *functions, exported])
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(file), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _torch_plan(op: Op) -> str:
    keywords = [*_attributes(op), _implementation(op.choices)]
    return indent("@staticmethod\n" + _function(op.name, _torch_tensors(op), keywords, "Plan"), "    ")


def _torch_function(op: Op) -> str:
    returns = _returns(["torch.Tensor"] * len(op.outputs))
    # An op that updates an argument in place has no results to preallocate.
    given, space = (f"{returns} | None", "torch.Tensor | None") if op.outputs else ("None", "None")
    preallocated = [f"out: {given} = None", f"workspace: {space} = None"]
    keywords = [*_attributes(op), *preallocated, _implementation((*op.choices, "reference"))]
    return f"@_planned(_Plans.{op.name})\n" + _function(
        op.name, _torch_tensors(op), keywords, returns, document(op, TORCH_STYLE)
    )


def _torch_tensors(op: Op) -> list[str]:
    return [_tensor(op, name, "torch.Tensor") for name in op.tensors]


def _jax_function(op: Op) -> str:
    """The function of an op; an overload for each way to pass the caches that it updates, whose results differ."""
    found = []
    for kinds in product((ARRAY, REF), repeat=len(op.mutates)):
        updated = dict(zip(op.mutates, kinds, strict=True))
        read = dict.fromkeys(op.pools, f"{ARRAY} | {REF}") | updated
        tensors = [_tensor(op, name, read.get(name, ARRAY)) for name in op.tensors]
        returns = _returns(["jax.Array"] * (len(op.outputs) + kinds.count(ARRAY)))
        keywords = [*_attributes(op), _implementation((*op.choices, "reference"))]
        found.append(_function(op.name, tensors, keywords, returns, "" if found else document(op, JAX_STYLE)))
    return "".join(f"@overload\n{one}" for one in found) if len(found) > 1 else found[0]


def _tensor(op: Op, name: str, kind: str) -> str:
    return f"{name}: {kind} | None = None" if name in op.optional else f"{name}: {kind}"


def _attributes(op: Op) -> Iterator[str]:
    parameters = inspect.signature(op.prototype).parameters.values()
    return (str(parameter) for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _implementation(names: Iterable[str]) -> str:
    return f"implementation: Literal[{', '.join(map(repr, names))}] | None = None"


def _returns(kinds: list[str]) -> str:
    return f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0] if kinds else "None"


def _function(name: str, tensors: Iterable[str], keywords: Iterable[str], returns: str, doc: str = "") -> str:
    body = f'"""{inspect.cleandoc(doc)}\n"""' if doc else "..."
    return f"def {name}({', '.join([*tensors, '*', *keywords])}) -> {returns}:\n{indent(body, '    ')}\n"


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    for file, text in stubs().items():
        if not check:
            file.write_text(text)
        elif file.read_text() != text:
            sys.exit(f"{file.relative_to(ROOT)} is another: run python tests/stubs.py")


if __name__ == "__main__":
    main()
