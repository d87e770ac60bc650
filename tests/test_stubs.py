"""The front-ends' `.pyi` files are those of the declarations, and tell the truth about the functions."""

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import stubs
from conftest import require_tool

from xmla import jax_api, torch_api
from xmla.core.registry import registry

Function = Callable[..., Any]


def functions_of(body: list[ast.stmt], scope: dict[str, Any]) -> Iterator[Function]:
    """The functions of a part of a stub, with their annotations evaluated; each overload by itself."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            node.decorator_list = []
            exec(compile(ast.Module([node], []), node.name, "exec"), scope)
            yield scope[node.name]


def read(file: Path) -> tuple[list[Function], list[Function]]:
    """The functions of a stub, and those that stand for their `plan`."""
    tree = ast.parse(file.read_text())
    scope: dict[str, Any] = {}
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), file.name, "exec"), scope)
    plans = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "_Plans"]
    return [*functions_of(tree.body, scope)], [f for node in plans for f in functions_of(node.body, scope)]


TORCH, PLANS = read(stubs.TORCH)
JAX, _ = read(stubs.JAX)


def test_stubs_are_made_from_the_declarations() -> None:
    require_tool("ruff")
    for file, text in stubs.stubs().items():
        assert file.read_text() == text, f"{file.name} is another: run python tests/stubs.py"


def names_of(file: Path) -> set[str]:
    """What a module defines by assignment or `def`, but for names with an underscore."""
    body = ast.parse(file.read_text()).body
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    found |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    found |= {target.id for target in assigned if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(("file", "module"), [(stubs.TORCH, torch_api), (stubs.JAX, jax_api)], ids=["torch", "jax"])
def test_every_public_name_has_its_type_and_docstring(file: Path, module: ModuleType) -> None:
    assert names_of(file) == names_of(file.with_suffix(".py")) >= {*module.__all__}
    # Overloads are documented once.
    documented = {f.__name__: f.__doc__ for f in reversed(TORCH if module is torch_api else JAX)}
    for name in module.__all__:
        assert inspect.cleandoc(documented[name] or "") == inspect.getdoc(getattr(module, name))


def test_signatures_are_those_of_the_functions() -> None:
    for function in TORCH:
        assert bare(function) == bare(getattr(torch_api, function.__name__))
    assert [plan.__name__ for plan in PLANS] == [function.__name__ for function in TORCH]
    for plan in PLANS:
        assert bare(plan) == bare(getattr(torch_api, plan.__name__).plan)
    for function in JAX:
        assert bare(function) == bare(getattr(jax_api, function.__name__))
    overloads = Counter(function.__name__ for function in JAX)
    assert overloads == {name: 2 ** len(op.mutates) for name, op in registry().items()}


def bare(function: Function) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]


@pytest.mark.parametrize("function", TORCH, ids=lambda function: function.__name__)
def test_torch_returns_what_its_stub_says(function: Function, device: str) -> None:
    op = registry()[function.__name__]
    case = op.cases[0]
    call = getattr(torch_api, op.name)
    tensors = kit.torch_inputs(op, kit.make(case), device)
    returned = call(*tensors, **case.attrs, implementation="reference")
    check(function, returned)
    again = call(*tensors, **case.attrs, implementation="reference", out=returned)
    assert again is returned


@pytest.mark.parametrize("function", JAX, ids=lambda function: function.__name__)
def test_jax_takes_and_returns_what_its_stub_says(function: Function) -> None:
    """Once with NumPy arrays, once with Refs, wherever the stub allows them."""
    op = registry()[function.__name__]
    case = op.cases[0]
    kinds = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
    given = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    updated = {name for name in given if kinds[name] is jax.Ref}  # in this overload
    refs = updated | {name for name in given if jax.Ref in get_args(kinds[name])}
    assert refs - {*op.mutates} == given.keys() & {*op.pools} - {*op.mutates}
    for kind, as_ref in ((np.asarray, updated), (jnp.asarray, refs)):
        arrays = {
            name: jax.new_ref(jnp.asarray(array)) if name in as_ref else kind(array) for name, array in given.items()
        }
        check(function, getattr(jax_api, op.name)(**arrays, **case.attrs, implementation="reference"))


def check(function: Function, returned: object) -> None:
    declared = inspect.signature(function).return_annotation
    if get_origin(declared) is tuple:
        assert isinstance(returned, tuple) and len(returned) == len(get_args(declared))
        assert all(map(isinstance, returned, get_args(declared)))
    else:
        assert returned is None if declared is None else isinstance(returned, declared)
