"""Derivatives that an op does not have: whichever way one is asked for is an error that names op and argument."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import kit
import pytest
import torch
from torch.autograd import forward_ad

from xmla import ArgumentError, UnsupportedError, torch_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import Spec
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()


def is_floating(spec: Spec) -> bool:
    return getattr(torch, spec.dtype).is_floating_point


def floating(op: Op) -> list[tuple[Op, Case, str]]:
    """Each argument of `op` that can be floating, with the smallest case in which it is."""
    cases = sorted(op.cases, key=kit.size)[::-1]
    found = {name: case for case in cases for name, spec in kit.specs(case).items() if is_floating(spec)}
    return [(op, case, name) for name, case in found.items()]


FLOATING = [found for op in OPS.values() for found in floating(op)]
CONSTANT = [(op, case, name) for op, case, name in FLOATING if name not in op.gradients]
FIRST = list({op.name: (op, case, name) for op, case, name in reversed(CONSTANT)}.values())
Call = Callable[..., Any]


def total(found: object) -> torch.Tensor:
    """A number that depends on every result, and on nothing where there are none."""
    values = [value.float().sum() for value in kit.as_tuple(found) if value.is_floating_point()]
    return torch.stack(values).sum() if values else torch.zeros(())


def forward(function: Call, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def compiled(function: Call, x: torch.Tensor) -> None:
    """Dynamo wraps what it meets while it traces; the error is its cause."""
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend="aot_eager")(x.requires_grad_())
    except torch._dynamo.exc.Unsupported as error:
        assert str(error.__cause__) in str(error)
        raise error.__cause__ from None


REVERSE = {
    "backward": lambda f, x: f(x.requires_grad_()),
    "of another tensor": lambda f, x: f(x.requires_grad_().view_as(x)),
    "grad": lambda f, x: torch.func.grad(lambda y: total(f(y)))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "compile": compiled,
}
FORWARD = {
    "dual": forward,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
}


def ways_to_call(op: Op, case: Case, device: str) -> dict[str, Call]:
    """The public function, its options and torch's own op, of all arguments."""
    function, packet = getattr(TORCH_OPS, op.name), getattr(torch.ops.xmla, op.name)
    calls = {
        "function": lambda *a: function(*a, **case.attrs),
        "reference": lambda *a: function(*a, **case.attrs, implementation="reference"),
        "torch.ops": lambda *a: packet(*a, **case.attrs),
    }
    if op.outputs:
        inputs = [None if t is None else t.to("meta") for t in kit.torch_inputs(op, kit.make(case), device)]
        given = [torch.empty_like(t, device=device) for t in kit.as_tuple(packet(*inputs, **case.attrs))]
        named = {f"out_{name}": tensor for name, tensor in zip(op.outputs, given, strict=True)}
        calls["out"] = lambda *a: function(*a, **case.attrs, out=tuple(given))
        calls["torch.ops out"] = lambda *a: packet.out(*a, **case.attrs, **named)
    return calls


def with_argument(op: Op, case: Case, name: str, call: Call, device: str) -> tuple[Call, torch.Tensor]:
    """`call` as a function of its argument `name`, and that argument."""
    inputs = dict(zip(op.tensors, kit.torch_inputs(op, kit.make(case), device), strict=True))

    def function(x: torch.Tensor) -> Any:
        return call(*(inputs | {name: x}).values())

    return function, inputs[name]


def without_derivative(op: Op) -> str:
    """What is supported of an op that has none."""
    by_steps = any(step.derivative is not None for step in op.steps)
    return "constants (its step sparse_mla has derivatives)" if by_steps else "constants"


def message(op: Op, name: str, way: str, remedy: str) -> str:
    what, has = f"{op.name}: {name} is differentiated", without_derivative(op)
    if name in op.gradients and remedy == f"{name}.detach()":
        return f"{what} in forward mode, supported: reverse mode (backward, torch.func.grad)"
    if op.gradients:
        has = f"derivatives of {', '.join(op.gradients)}"
        if name in op.gradients and "out" in way:
            what, has = f"{what} with out", f"{has} without"
    return f"{what}, supported: {has}; {remedy} makes it a constant"


@pytest.fixture
def refused(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Op, Case, str, str, Call, str], None]:
    """Whether a derivative of a call is refused before a kernel, or the reference, runs."""

    def check(op: Op, case: Case, name: str, way: str, derive: Call, remedy: str) -> None:
        call = ways_to_call(op, case, device)[way]
        function, x = with_argument(op, case, name, call, device)
        with monkeypatch.context() as patch:
            for what in ("call", "_reference"):
                patch.setattr(torch_api._ops, what, lambda *_, **__: pytest.fail("it ran"))
            with pytest.raises(UnsupportedError) as caught, warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                derive(function, x)
        assert str(caught.value) == message(op, name, way, remedy)

    return check


@pytest.mark.parametrize(("op", "case", "name"), FLOATING, ids=kit.case_id)
def test_every_floating_argument_of_every_op(op: Op, case: Case, name: str, device: str, refused: Call) -> None:
    for way in ways_to_call(op, case, device):
        if name not in op.gradients or "out" in way:
            refused(op, case, name, way, REVERSE["backward"], f"{name}.detach() or torch.no_grad()")
        refused(op, case, name, way, FORWARD["dual"], f"{name}.detach()")


@pytest.mark.parametrize("derive", REVERSE | FORWARD)
@pytest.mark.parametrize(("op", "case", "name"), FIRST, ids=kit.case_id)
def test_every_way_to_ask(op: Op, case: Case, name: str, derive: str, device: str, refused: Call) -> None:
    remedy = f"{name}.detach()" if derive in FORWARD else f"{name}.detach() or torch.no_grad()"
    for way in ways_to_call(op, case, device):
        if derive != "compile" or "out" not in way:  # dynamo has its own rules for out=
            refused(op, case, name, way, (REVERSE | FORWARD)[derive], remedy)


def select(logits: torch.Tensor) -> torch.Tensor:
    return torch_api.select_topk(logits, torch.full_like(logits[:, 0], 6, dtype=torch.int32), k=2)


WANTED = [[4, 5]]


@pytest.fixture
def logits(device: str) -> torch.Tensor:
    return torch.arange(6.0, device=device)[None].requires_grad_()


def test_what_is_not_differentiated_runs(logits: torch.Tensor) -> None:
    whole = torch.compile(select, fullgraph=True, backend="aot_eager")
    weights = torch.nn.Parameter(logits.detach())
    assert select(logits.detach()).tolist() == whole(logits.detach()).tolist() == WANTED
    with torch.no_grad():
        assert select(logits).tolist() == whole(logits).tolist() == select(weights).tolist() == WANTED
    with torch.inference_mode():
        assert select(logits).tolist() == WANTED
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits.detach(), torch.ones_like(logits))
        assert select(dual.detach()).tolist() == WANTED


def test_a_constant_beside_what_is_differentiated(logits: torch.Tensor) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.gather(1, select(x.detach()).long()) ** 2).sum()

    loss(logits).backward()
    values = logits.detach()
    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    for found in (logits.grad, torch.func.grad(loss)(values), torch.func.jacfwd(loss)(values), compiled(values)):
        assert found.tolist() == [[0, 0, 0, 0, 8, 10]]


def test_results_given_must_not_be_differentiated(logits: torch.Tensor) -> None:
    op = OPS["indexer_logits"]
    arguments = kit.torch_inputs(op, kit.make(op.cases[0]), str(logits.device))
    out = torch.empty_like(torch_api.indexer_logits(*arguments)).requires_grad_()
    for call in (torch_api.indexer_logits, partial(torch_api.indexer_logits, implementation="reference")):
        with pytest.raises(UnsupportedError) as caught:
            call(*arguments, out=out)
        assert str(caught.value) == message(op, "out_logits", "out", "out_logits.detach() or torch.no_grad()")
    with torch.no_grad():
        assert torch_api.indexer_logits(*arguments, out=out) is out


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_backward_that_saved_what_an_op_wrote(device: str, implementation: str | None, inference: bool) -> None:
    """As after torch's own ops in place: an error instead of a gradient from the new contents."""
    scale = torch.ones(1, device=device, requires_grad=True)
    op = OPS["indexer_logits"]
    arguments = kit.torch_inputs(op, kit.make(op.cases[0]), device)
    cache, given = torch.ones(2, 4, 576, device=device).bfloat16(), torch_api.indexer_logits(*arguments)
    losses = [(scale * cache).sum(), (scale * given).sum()]
    latent, rope = torch.zeros(1, 512, device=device), torch.zeros(1, 64, device=device)
    with torch.inference_mode(inference):
        slots = torch.zeros(1, device=device, dtype=torch.int32)
        torch_api.write_mla_cache(latent, rope, slots, cache, implementation=implementation)
        torch_api.indexer_logits(*arguments, out=given, implementation=implementation)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_the_reference_writes_the_results_given(device: str) -> None:
    values, ends = torch.arange(6.0, device=device)[None], torch.tensor([6], device=device, dtype=torch.int32)
    out = torch.empty(1, 2, device=device, dtype=torch.int32)
    assert torch_api.select_topk(values, ends, k=2, out=out, implementation="reference") is out
    assert out.tolist() == WANTED
    with pytest.raises(ArgumentError, match=r"select_topk: out indices shape is \(1, 2\), expected \(1, 3\)"):
        torch_api.select_topk(values, ends, k=3, out=out, implementation="reference")
