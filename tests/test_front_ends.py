"""The front-ends' functions are those of the declarations, and what their signatures say is true."""

import inspect
import pickle
import re
import traceback
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args, get_origin, get_overloads

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from conftest import require_tool
from torch._subclasses import FakeTensorMode

from tools import front_ends
from xmla import ArgumentError, jax_api, torch_api
from xmla.core.op import docstrings as documents
from xmla.core.plan import Plan
from xmla.core.registry import public_ops, registry
from xmla.core.values import assume_device, find_device
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

Function = Callable[..., Any]


def functions_of(module: ModuleType) -> list[Function]:
    """The functions of a front-end, each overload by itself."""
    return [one for name in module.__all__ for one in get_overloads(getattr(module, name)) or [getattr(module, name)]]


TORCH = functions_of(torch_api)
PLANS = [getattr(torch_api, name).plan for name in torch_api.__all__]
JAX = functions_of(jax_api)


def test_they_are_made_from_the_declarations() -> None:
    require_tool("ruff")
    for file, text in front_ends.modules().items():
        assert file.read_text() == text, f"{file.name} is another: run python -m tools.front_ends"


@pytest.mark.parametrize(
    ("module", "style"), [(torch_api, documents.TORCH), (jax_api, documents.JAX)], ids=["torch", "jax"]
)
def test_functions_are_ordinary_ones(module: ModuleType, style: documents.Style) -> None:
    """To an editor, a debugger, and whoever reads them."""
    assert sorted(module.__all__) == sorted(public_ops())
    for name, op in public_ops().items():
        function = getattr(module, name)
        found = [function, *([function.plan] if module is torch_api else [])]
        for one in found:
            source = inspect.getsource(one)
            assert f"def {name}(" in source and f"return _{name}(" in source
            assert one.__name__ == name and one.__module__ == f"{module.__name__}._functions"
            assert pickle.loads(pickle.dumps(one)) is one
            assert inspect.getdoc(one) == inspect.cleandoc(documents.document(op, style))


def test_every_op_is_a_function_for_code_of_xmla() -> None:
    """The front-ends' own, and for an op that is not public one with the arguments of its declaration."""
    for module, ops, options in (
        (torch_api, TORCH_OPS, ["out", "workspace", "implementation"]), (jax_api, JAX_OPS, ["implementation"])
    ):  # fmt: skip
        assert vars(ops).keys() == registry().keys()
        for name, function in vars(ops).items():
            if name in public_ops():
                assert function is getattr(module, name)
                continue
            more = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None) for option in options]
            for one in [function, *([function.plan] if module is torch_api else [])]:
                assert bare(one) == [*bare(registry()[name].prototype), *more], name
                assert f"return _{name}(" in inspect.getsource(one)


INSTEAD = {
    "compress_rows_backward": "differentiate compress_rows",
    "convert_indexer_cache": "call xmla.layouts.convert",
    "indexer_block_logits": "call indexer_block_topk",
    "indexer_block_logits_paged": "call indexer_block_topk_paged",
    "indexer_loss_backward": "differentiate indexer_loss",
    "indexer_scores_backward": "differentiate indexer_scores",
    "select_blocks": "call indexer_blocks or indexer_blocks_paged",
    "sparse_mla_backward": "differentiate sparse_mla",
}


@pytest.mark.parametrize("module", [torch_api, jax_api], ids=["torch", "jax"])
def test_an_op_without_a_function_says_what_to_call(module: ModuleType) -> None:
    assert registry().keys() - public_ops().keys() == INSTEAD.keys()
    for name, instead in INSTEAD.items():
        told = f"{module.__name__} has no function {name}: {instead}. In PyTorch the op itself is torch.ops.xmla.{name}"
        with pytest.raises(AttributeError) as error:
            getattr(module, name)
        assert str(error.value) == told and isinstance(getattr(torch.ops.xmla, name), torch._ops.OpOverloadPacket)
        words = instead.replace("xmla.layouts.convert", "").split()[1:]
        assert {*words} - {"or"} <= public_ops().keys()
    with pytest.raises(
        AttributeError, match=f"^module '{module.__name__}' has no attribute 'sparse_mIa'; did you mean sparse_mla or "
    ):
        module.sparse_mIa  # noqa: B018


def test_a_wrong_call_is_told_from_the_line_of_its_function() -> None:
    with pytest.raises(ArgumentError) as error:
        torch_api.select_topk(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32), k=0)
    frames = [frame for frame in traceback.extract_tb(error.tb) if frame.name == "select_topk"]
    assert [frame.line for frame in frames] == [
        "return _select_topk([logits, ends, starts], (k,), out, workspace, implementation)"
    ]


def test_jax_says_what_it_returns_of_the_arrays_that_an_op_updates() -> None:
    for name, op in public_ops().items():
        text = inspect.getdoc(getattr(jax_api, name)) or ""
        returns = re.search(r"^Returns:\n((?: .*\n)+)", text, re.MULTILINE)
        assert returns is not None, name
        for argument in op.mutates:
            assert re.search(rf"^    {argument}: The new array;", returns[1], re.MULTILINE)
        if op.mutates:
            assert "in place" not in text.replace(returns[1], "")


def test_signatures_are_those_of_the_declarations() -> None:
    """And the keywords of each front-end behind them, None by default."""
    for functions, options in (([*TORCH, *PLANS], ["out", "workspace", "implementation"]), (JAX, ["implementation"])):
        for function in functions:
            own = bare(public_ops()[function.__name__].prototype)
            more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in options]
            assert bare(function) == [*own, *more], function
    overloads = Counter(function.__name__ for function in JAX)
    assert overloads == {name: 2 ** len(op.mutates) for name, op in public_ops().items()}


def bare(function: Function) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]


def test_a_plan_takes_the_arguments_of_its_call() -> None:
    """What the call refuses it refuses by the same words, from the line of the function."""
    tensors = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)
    call, planner = torch_api.select_topk, torch_api.select_topk.plan
    assert inspect.signature(planner).return_annotation is Plan
    plan = planner(*tensors, k=2)
    out, wide = torch.empty(1, 2, dtype=torch.int32), torch.empty(1, 3, dtype=torch.int32)
    workspace = torch.empty(plan.workspace_bytes + 16, dtype=torch.uint8)
    assert str(planner(*tensors, k=2, out=out, workspace=workspace)) == str(plan)
    with FakeTensorMode(allow_non_fake_inputs=True), assume_device(find_device("H200")):
        planner(*tensors, k=2, out=torch.empty_like(out), workspace=torch.empty(1 << 20, dtype=torch.uint8))
    short = workspace[32:]
    for wrong, message in (
        ({"out": wide}, "out indices shape is (1, 3), expected (1, 2)"),
        ({"out": (out, out)}, "out has 2 tensors, expected 1"),
        ({"out": wide.view(-1)[1:].view(1, 2)}, "out indices does not start on a multiple of 16 bytes"),
        ({"workspace": workspace}, "workspace is given, expected none without out"),
        ({"out": out, "workspace": short}, f"workspace axis 0 is {len(short)}, expected at least {len(short) + 16}"),
        ({"out": out, "workspace": workspace[1:]}, "workspace starts at"),
    ):
        for function in (call, planner):
            with pytest.raises(ArgumentError, match=re.escape(f"select_topk: {message}")) as error:
                function(*tensors, k=2, **wrong)
            assert "select_topk" in [frame.name for frame in traceback.extract_tb(error.tb)]


@pytest.mark.parametrize("function", TORCH, ids=lambda function: function.__name__)
def test_torch_returns_what_its_signature_says(function: Function, device: str) -> None:
    op = public_ops()[function.__name__]
    case = op.cases[0]
    call = getattr(torch_api, op.name)
    tensors = kit.torch_inputs(op, kit.make(case), device)
    returned = call(*tensors, **case.attrs, implementation="reference")
    check(function, returned)
    again = call(*tensors, **case.attrs, implementation="reference", out=returned)
    assert again is returned


@pytest.mark.parametrize("function", JAX, ids=lambda function: function.__name__)
def test_jax_takes_and_returns_what_its_signature_says(function: Function) -> None:
    """Once with NumPy arrays, once with Refs, wherever the signature allows them."""
    op = public_ops()[function.__name__]
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
