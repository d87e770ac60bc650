"""The kernels written by hand for Hopper, against the definition and the portable kernels."""

from collections.abc import Mapping

import jax
import kit
import numpy as np
import pytest
import torch
from garbage import garbage_inputs
from hypothesis import given, settings

from xmla import jax_api, torch_api
from xmla.core.device import H200
from xmla.core.errors import UnsupportedError
from xmla.core.op import Case, plan_call, registry
from xmla.core.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]

OP = registry()["sparse_mla"]


def supported(inputs: dict[str, np.ndarray], attrs: Mapping[str, object]) -> bool:
    specs = tuple(Spec.of_numpy(inputs[name]) if name in inputs else None for name in OP.tensors)
    values = OP.defaults | attrs
    try:
        plan_call(OP, specs, tuple(values[attr.name] for attr in OP.attrs), H200, "gluon")
    except UnsupportedError:
        return False
    return True


CASES = [case for case in OP.cases if supported(kit.make(case), case.attrs)]
by_case = pytest.mark.parametrize("case", CASES, ids=kit.case_id)


def attend(inputs: dict[str, np.ndarray], attrs: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_api.sparse_mla(*kit.torch_inputs(OP, inputs, "cuda"), **attrs, implementation="gluon")


@by_case
def test_agrees_with_the_definition(case: Case) -> None:
    inputs = kit.make(case)
    got = attend(kit.copies(inputs), dict(case.attrs))
    want = OP.reference(**inputs, **kit.attributes(OP, case))
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, kit.tolerance_of(OP, name))


@given(garbage_inputs(OP).filter(lambda drawn: supported(*drawn)))
@settings(max_examples=30)
def test_garbage_integers_give_the_definition(drawn: tuple[dict[str, np.ndarray], dict[str, object]]) -> None:
    inputs, attrs = drawn
    got = attend(inputs, attrs)
    with np.errstate(all="ignore"):
        want = OP.reference(**inputs, **attrs)
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, kit.tolerance_of(OP, name))


@by_case
def test_jax_gives_the_same_bits(case: Case) -> None:
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    ours = attend(inputs, dict(case.attrs))
    step = jax.jit(lambda *arrays: jax_api.sparse_mla(*arrays, **case.attrs, implementation="gluon"))
    for name, a, b in zip(OP.outputs, ours, step(*kit.jax_inputs(OP, inputs)), strict=True):
        kit.assert_bits_equal(name, a, b)


def test_repeated_calls_and_graph_replays_give_the_same_bits() -> None:
    inputs = kit.torch_inputs(OP, kit.make(CASES[0]), "cuda")
    attrs = dict(CASES[0].attrs)
    want = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
    for _ in range(20):
        again = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
        graph.replay()
        for name, a, b, c in zip(OP.outputs, want, again, captured, strict=True):
            kit.assert_bits_equal(name, a, b)
            kit.assert_bits_equal(name, a, c)
