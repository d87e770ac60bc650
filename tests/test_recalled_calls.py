"""Torch calls like the last ones are found without their key; calls that differ in any way are not."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from xmla import ArgumentError, torch_api
from xmla.core.registry import registry
from xmla.core.values import ATTENTION_OUT, difference
from xmla.torch_api import _prepared, _run

Arguments = dict[str, Any]
CALL: Arguments = {"softmax_scale": 0.25}


@pytest.fixture
def arguments(device: str) -> Arguments:
    """A call of sparse_mla that has been made twice: of sizes that never come again nothing is recalled."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    slots = torch.arange(6, dtype=torch.int32).reshape(2, 3).to(device)
    made = {"q": normal(2, 4, 512), "cache": normal(2, 3, 512), "slots": slots} | CALL
    for _ in range(2):
        torch_api.sparse_mla(**made)
    return made


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call that follows was recalled."""
    found: list[bool] = []
    real = _run.recall

    def recall(*given: Any) -> Any:
        recalled = real(*given)
        found.append(recalled is not None)
        return recalled

    for module in (_run, torch_api._ops):
        monkeypatch.setattr(module, "recall", recall)
    return found


def result(arguments: Arguments, **changed: Any) -> np.ndarray:
    return torch_api.sparse_mla(**arguments | changed)[0].float().cpu().numpy()


def test_a_call_like_the_last_is_recalled(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_up(monkeypatch)
    changed = {name: arguments[name].clone() for name in ("q", "cache", "slots")}
    assert (result(changed | CALL) == result(arguments)).all() and found == [True, True]
    out = torch_api.sparse_mla(**arguments)
    assert torch_api.sparse_mla(**arguments, out=out) is out and found == [True] * 4


def beside_16_bytes(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view_as(tensor).copy_(tensor)


def in_space(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with other strides."""
    room = torch.empty((2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    return room[::2].copy_(tensor)


CHANGED: dict[str, Callable[[Arguments], Arguments]] = {
    "shape": lambda a: {"slots": a["slots"][:, :2].contiguous()},
    "strides": lambda a: {"q": in_space(a["q"])},
    "dtype": lambda a: {"q": a["q"].half(), "cache": a["cache"].half()},
    "address": lambda a: {"q": beside_16_bytes(a["q"])},
    "another argument": lambda a: {"lengths": a["slots"][:, 0].clone() * 0 + 2},
    "attribute": lambda _: {"softmax_scale": 0.5},
    "implementation": lambda _: {"implementation": "reference"},
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_is_not(change: str, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_up(monkeypatch)
    other = arguments | CHANGED[change](arguments)
    got = result(other)
    assert True not in found
    want = result(other, implementation="reference")
    assert difference(got, want, ATTENTION_OUT) is None
    _prepared.call_cache.clear()
    assert np.array_equal(result(other), got), "as in a process that has made no other call"
    assert change in ("strides", "address", "implementation") or not np.array_equal(want, result(arguments))


def test_true_is_not_1(device: str) -> None:
    indices = torch.zeros(2, 3, dtype=torch.int32, device=device)
    torch_api.map_slots(indices, indices, page_size=64, compact=True)
    with pytest.raises(ArgumentError, match="compact type is int, expected bool"):
        torch_api.map_slots(indices, indices, page_size=64, compact=1)


def test_gradients_are_recorded(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_up(monkeypatch)
    q = arguments["q"].clone().requires_grad_()
    torch_api.sparse_mla(**arguments | {"q": q})[0].sum().backward()
    assert q.grad is not None and bool(q.grad.any()) and True not in found
    with torch.no_grad():  # another state of torch
        result(arguments | {"q": q.detach()})
    q.grad = None
    torch_api.sparse_mla(**arguments | {"q": q})[0].sum().backward()
    assert bool(q.grad.any())
    parameter = torch.nn.Parameter(arguments["q"])
    assert torch_api.sparse_mla(**arguments | {"q": parameter})[0].requires_grad


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_and_transformations_see_the_call(arguments: Arguments) -> None:
    with Seen() as seen:
        torch_api.sparse_mla(**arguments)
    assert "xmla.sparse_mla.default" in seen.names
    gradient = torch.func.grad(lambda q: torch_api.sparse_mla(**arguments | {"q": q})[0].sum())(arguments["q"])
    assert bool(gradient.any())


def test_a_fake_mode_sees_the_call(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's comparison of tensors ignores a mode of fake tensors, so the call must be asked about beforehand."""
    found = looked_up(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got, _ = torch_api.sparse_mla(**arguments)
    assert isinstance(got, FakeTensor) and True not in found


@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode, nullcontext])
def test_each_state_of_torch_recalls(state: Any, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    with state():
        first = result(arguments)
        found = looked_up(monkeypatch)
        assert (result(arguments) == first).all()
    assert found == [True]


def test_no_more_are_kept_than_a_few(arguments: Arguments) -> None:
    for columns in range(1, 4):
        for rows in range(1, 3):
            for scale in (0.25, 0.5) * 2:
                result(
                    arguments, q=arguments["q"][:rows], slots=arguments["slots"][:rows, :columns], softmax_scale=scale
                )
    assert len(_prepared.call_cache.recent[registry()["sparse_mla"]]) == _prepared.CallCache.RECENT


def test_of_many_sizes_the_ones_that_come_again_are_kept(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of sizes that never come again would be looked at by each collection of garbage: 16000 take 0.3 s."""
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    monkeypatch.setattr(_prepared.CallCache, "MOST", 4)
    prepared: list[int] = []
    prepare = _prepared.prepare

    def counted(op: Any, tensors: Any, *rest: Any) -> Any:
        prepared.append(tensors[2].shape[1])
        return prepare(op, tensors, *rest)

    monkeypatch.setattr(_prepared, "prepare", counted)
    for columns in (*range(1, 11), 1, 10):
        for size in (3, columns):
            _prepared.call_cache.recent.clear()
            slots = arguments["slots"][:, :1].expand(2, size).contiguous()
            torch_api.sparse_mla(**arguments | {"slots": slots})
    assert len(_prepared.call_cache.prepared) == 4
    assert prepared == [3, 1, 2, *range(4, 11), 1]


def test_calls_of_new_sizes_are_planned_once_and_kept_in_few_objects(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that a collection of garbage looks at; each of thousands of sizes has so many."""
    table = torch.zeros(2, 4, dtype=torch.int32, device=device)
    traced: list[object] = []
    trace_call = _prepared.trace_call
    monkeypatch.setattr(_prepared, "trace_call", lambda *given: [traced.append(given), trace_call(*given)][1])
    monkeypatch.setattr(_run, "run", lambda *_: ((), ()))
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())

    def call(columns: int) -> None:
        indices = torch.zeros(2, columns, dtype=torch.int32, device=device)
        _run.look_up(registry()["map_slots"], [indices, table, None, None], (64, False))

    for columns in range(65, 97):
        call(columns)
    families = len(traced)
    assert families <= 3
    gc.collect()
    before = len(gc.get_objects())
    for columns in range(101, 1001, 4):
        call(columns)
    gc.collect()
    sizes, new = len(range(101, 1001, 4)), len(traced) - families
    assert new <= 3 and len(_prepared.call_cache.prepared) == 32 + sizes
    assert len(gc.get_objects()) - before <= 5 * sizes + 1000 * new


def test_a_family_that_comes_again_stays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many kinds of calls the ones that came last, and of a kind the families that did."""
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    monkeypatch.setattr(_prepared.CallCache, "MOST_KINDS", 1)
    monkeypatch.setattr(_prepared.CallCache, "FAMILIES", 2)
    made: list[int] = []
    make_family = _prepared.make_family

    def counted(op: Any, tensors: Any, *rest: Any) -> Any:
        made.append(tensors[0].shape[1])
        return make_family(op, tensors, *rest)

    monkeypatch.setattr(_prepared, "make_family", counted)
    table = torch.zeros(0, 4, dtype=torch.int32, device=device)
    for columns in (4, 516, 8, 520, 2052, 12):  # tiles of three sizes, of which two are kept
        torch_api.map_slots(torch.zeros(0, columns, dtype=torch.int32, device=device), table, page_size=64)
    assert made == [4, 516, 2052, 12]
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    for page_size in (1, 2):  # constants of a kernel
        torch_api.map_slots(table, table, page_size=page_size, compact=True)
    assert made[4:] == [4, 4]
    (kind,) = _prepared.call_cache.kinds.values()  # without those of another kind
    assert kind.count == 2
