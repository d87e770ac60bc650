"""Docstrings: the example of every op runs in both front-ends; keywords and axes are explained where one looks."""

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from conftest import HAS_GPU

import xmla
from xmla import jax_api, torch_api
from xmla.core.formats.mla import MLA_LAYOUTS
from xmla.core.op import Op
from xmla.core.op.docstrings import JAX, TORCH, Style, document
from xmla.core.registry import public_ops, registry
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

STYLES = [TORCH, JAX]
SCOPES: dict[str, dict[str, Any]] = {"xt": {"xt": TORCH_OPS, "torch": torch}, "xj": {"xj": JAX_OPS, "jnp": jnp}}
OPS = [*registry().values()]
ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT / name for name in ("xmla", "tools", "benchmarks", "tests")]
# A first line that begins so needs the name before it, or another docstring, to say what it is about.
DEPENDENT = re.compile(
    r"(?:(?:all|each|one) of|also|and|as|at|both|but|by|for|from|in|its?|likewise|of|on|over|so|that|the same|their"
    r"|they|those|to|with)\b",
    re.IGNORECASE,
)


@contextmanager
def on_device() -> Iterator[None]:
    """Examples name no device."""
    if HAS_GPU:
        torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("style", STYLES, ids=["xt", "xj"])
def test_examples_run(style: Style, op: Op) -> None:
    function = f"{style.ops}.{op.name}"
    text, scope = inspect.cleandoc(document(op, style)), dict(SCOPES[style.ops])
    example = doctest.DocTestParser().get_doctest(text, scope, function, None, 0)
    assert any(f"{function}(" in step.source for step in example.examples), "no example calls the op"
    assert example.examples[-1].want, "the example shows no result"
    said: list[str] = []
    with on_device():
        failures = doctest.DocTestRunner().run(example, out=said.append)
    assert failures.failed == 0, "".join(said)


@pytest.mark.parametrize("op", public_ops().values(), ids=lambda op: op.name)
def test_help_leads_to_where_the_keywords_of_every_function_are_explained(op: Op) -> None:
    """By the last entry of its arguments, to the front-end's own docstring, which has them once."""
    for module in (torch_api, jax_api):
        function = getattr(module, op.name)
        names = list(inspect.signature(function).parameters)
        keywords = names[len(op.tensors) + len(op.defaults) :]
        assert keywords[-1] == "implementation"
        told = ", ".join(keywords if op.outputs else keywords[-1:])
        entry = f"\n    {told}: As in every op, see `help({module.__name__})`.\n\n"
        assert entry in inspect.getdoc(function).partition("\nArgs:\n")[2]
        for keyword in keywords:
            assert module.__doc__.count(f"\n  {keyword}: ") == 1, keyword


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_arguments_and_attributes_have_an_entry(op: Op) -> None:
    """Each one entry among `Args`, of its own or shared."""
    told = (inspect.getdoc(op.prototype) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): ", told, re.MULTILINE)
    named = [name for entry in entries for name in entry.split(", ")]
    assert sorted(named) == sorted([*op.tensors, *op.defaults])


def test_every_format_is_told_where_it_is_written() -> None:
    told = inspect.getdoc(torch_api.write_mla_cache) or ""
    assert [layout.name for layout in MLA_LAYOUTS if f'"{layout.name}"' not in told] == []


def test_help_explains_every_axis() -> None:
    declared = {axis for op in OPS for tensor in op.tensors.values() for axis in tensor.names}
    declared |= {axis for op in OPS for result in op.outputs.values() for axis in result.names}
    names = {part for axis in declared for part in axis.split("·") if not part.isdigit()}
    code = "import xmla; help(xmla)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    words = set(done.stdout.replace(",", " ").replace(";", " ").replace("·", " ").replace(":", " ").split())
    assert "Glossary of axes" in done.stdout and "Glossary of axes" in (xmla.__doc__ or "")
    assert names - words == set()


@pytest.mark.parametrize("op", [op for op in OPS if op.mutates], ids=lambda op: op.name)
def test_docstrings_say_what_becomes_of_updated_arrays(op: Op) -> None:
    names = " and ".join(f"`{name}`" for name in op.mutates)
    torch_doc, jax_doc = (inspect.cleandoc(document(op, style)) for style in STYLES)
    told = f"Updates {names} in place{'' if op.outputs else ' and returns None'}."
    assert told in torch_doc and "jax.Ref" not in torch_doc
    told = "The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is "
    assert " ".join(jax_doc.split()).count(told) == len(op.mutates)
    assert not re.search(r"\s[.,;](?!\.)", jax_doc), "a sign without its word"


@pytest.mark.parametrize("op", [op for op in OPS if not op.steps], ids=lambda op: op.name)
def test_docstrings_end_with_the_conditions_of_every_implementation(op: Op) -> None:
    """Of two that are asked for by one name, too."""
    _, _, told = " ".join(op.doc.split()).partition("Implementations, best first: ")
    for each in op.implementations:
        asked = f"{each.asked}{', by its name alone' * each.by_name}"
        line = f"{asked}: {'; '.join(condition.supported for condition in each.conditions) or 'every call'}."
        assert line in told
        told = told.partition(line)[2]


@pytest.mark.parametrize("op", public_ops().values(), ids=lambda op: op.name)
def test_help_names_functions_that_are_there(op: Op) -> None:
    """What a public op's docstring refers to; but a derivative's name, which profiles and plans show, is in its end."""
    written, _, _ = op.doc.partition("Implementations, best first:")
    assert {*re.findall(r"\w+", written)} & registry().keys() <= public_ops().keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_first_lines_stand_alone(folder: Path) -> None:
    """But those of tests, which go on from their names."""
    dependent = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name, (line, *_) = getattr(node, "name", ""), (ast.get_docstring(node) or "").split("\n")
            if DEPENDENT.match(line) and not name.startswith("test_"):
                dependent.append(f"{file.relative_to(ROOT)} {name}: {line}")
    assert dependent == []
