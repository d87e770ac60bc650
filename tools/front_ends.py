"""The front-ends' functions: each public op's signature, types and docstring, and a body of one call.

python -m tools.front_ends [--check]       (writes both modules, or fails if they are others; some seconds)

They come from the declarations of the ops, and are ordinary modules to an editor, a type checker, `inspect` and pickle.
The script needs neither torch nor JAX. test_front_ends.py compares.
"""

import inspect
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from xmla.core.op import Op
from xmla.core.op.docstrings import JAX as JAX_STYLE
from xmla.core.op.docstrings import TORCH as TORCH_STYLE
from xmla.core.op.docstrings import document
from xmla.core.registry import public_ops

ROOT = Path(__file__).parent.parent
TORCH = ROOT / "xmla" / "torch_api" / "_functions.py"
JAX = ROOT / "xmla" / "jax_api" / "_functions.py"
MADE = "# Made by tools/front_ends.py from the declarations of the ops: change these and run it.\n"

TORCH_HEAD = '''
"""The public ops for PyTorch, a function of each."""

from typing import Literal

import torch

from xmla.core.registry import registry
from xmla.torch_api._ops import planned, public

_ops = registry()
'''
JAX_HEAD = '''
"""The public ops for JAX, a function of each."""

from typing import Literal, overload

import jax
import numpy as np

from xmla.core.registry import registry
from xmla.jax_api._ops import public

_ops = registry()
'''
ARRAY = "jax.Array | np.ndarray"
REF = "jax.Ref"


def modules() -> dict[Path, str]:
    """What each file holds."""
    ops = list(public_ops().values())
    return {
        TORCH: _module(TORCH, TORCH_HEAD, [*map(_call, ops), *map(_torch_function, ops)]),
        JAX: _module(JAX, JAX_HEAD, [*map(_call, ops), *map(_jax_function, ops)]),
    }


def _module(file: Path, head: str, parts: Iterable[str]) -> str:
    text = "\n".join([MADE + head, *parts, f"__all__ = {sorted(public_ops())}\n"])
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(file), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def _call(op: Op) -> str:
    return f'_{op.name} = public(_ops["{op.name}"])'


def _torch_function(op: Op) -> str:
    returns = _returns(["torch.Tensor"] * len(op.outputs))
    # An op that updates an argument in place has no results to preallocate.
    given, space = (f"{returns} | None", "torch.Tensor | None") if op.outputs else ("None", "None")
    preallocated = [f"out: {given} = None", f"workspace: {space} = None"]
    tensors = [_tensor(op, name, "torch.Tensor") for name in op.tensors]
    keywords = [*_attributes(op), *preallocated, _implementation(op)]
    body = f"return _{op.name}({_given(op)}, out, workspace, implementation)"
    return f"@planned\n{_function(op.name, tensors, keywords, returns, body, document(op, TORCH_STYLE))}"


def _jax_function(op: Op) -> str:
    """The function of an op; an overload for each way to pass the caches that it updates, whose results differ."""
    attributes = [*_attributes(op), _implementation(op)]

    def one(kinds: tuple[str, ...], returns: str, body: str, doc: str = "") -> str:
        updated = dict(zip(op.mutates, kinds, strict=True))
        read = dict.fromkeys(op.pools, f"{ARRAY} | {REF}") | updated
        tensors = [_tensor(op, name, read.get(name, ARRAY)) for name in op.tensors]
        return _function(op.name, tensors, attributes, returns, body, doc)

    ways = list(product((ARRAY, REF), repeat=len(op.mutates)))
    results = [_returns(["jax.Array"] * (len(op.outputs) + kinds.count(ARRAY))) for kinds in ways]
    overloads = [f"@overload\n{one(*way, '...')}" for way in zip(ways, results, strict=True)] if op.mutates else []
    either = tuple(f"{ARRAY} | {REF}" for _ in op.mutates)
    body, doc = f"return _{op.name}({_given(op)}, implementation)", document(op, JAX_STYLE)
    return "".join([*overloads, one(either, " | ".join(dict.fromkeys(results)), body, doc)])


def _given(op: Op) -> str:
    """The arguments of a call as the front-ends take them: a list of tensors, a tuple of attributes."""
    attrs = ", ".join(attr.name for attr in op.attrs)
    # A comma behind several would have each on a line of its own.
    return f"[{', '.join(op.tensors)}], ({attrs}{',' * (len(op.attrs) == 1)})"


def _tensor(op: Op, name: str, kind: str) -> str:
    return f"{name}: {kind} | None = None" if name in op.optional else f"{name}: {kind}"


def _attributes(op: Op) -> Iterator[str]:
    parameters = inspect.signature(op.prototype).parameters.values()
    return (str(parameter) for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _implementation(op: Op) -> str:
    return f"implementation: Literal[{', '.join(map(repr, (*op.choices, 'reference')))}] | None = None"


def _returns(kinds: list[str]) -> str:
    return f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0] if kinds else "None"


def _function(
    name: str, tensors: Iterable[str], keywords: Iterable[str], returns: str, body: str, doc: str = ""
) -> str:
    lines = f'"""{inspect.cleandoc(doc)}\n"""\n{body}' if doc else body
    return f"def {name}({', '.join([*tensors, '*', *keywords])}) -> {returns}:\n{indent(lines, '    ')}\n"


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if one is another.")] = False,
) -> None:
    """Write the functions of both front-ends, from the declarations."""
    for file, text in modules().items():
        if not check:
            file.write_text(text)
        elif file.read_text() != text:
            sys.exit(f"{file.relative_to(ROOT)} is another: run python -m tools.front_ends")


if __name__ == "__main__":
    typer.run(main)
