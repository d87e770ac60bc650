"""Attributes at their edges, found in the registry: factors below, at and near 0, at their limits and beyond."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import kit
import numpy as np
import pytest
import torch
from conftest import HAS_GPU

from xmla import UnsupportedError, torch_api
from xmla.core.call import LARGEST_SIZE
from xmla.core.op import Case, Op
from xmla.core.ops.attention.sparse_mla.splits import MOST_SPLITS, Config, count_splits
from xmla.core.registry import registry
from xmla.core.values import GRADIENT, H200, KNOWN_DEVICES, LARGEST_FACTOR, Spec, cosine_difference
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
FACTORS = [(op, attr.name) for op in OPS.values() for attr in op.attrs if attr.type is float]
Tensors = dict[str, torch.Tensor]


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape))


def attention(rng: np.random.Generator, factor: float) -> tuple[Tensors, Tensors]:
    """Queries by which scores are of order 1 at a limit, and gradients whose products do not overflow."""
    q, entry = (4 / abs(factor), 1 / 64) if factor in LIMITS else (1.0, 1.0)
    arguments = {"q": normal(rng, 3, 5, 576) * q, "cache": normal(rng, 2, 4, 576) * entry}
    slots = torch.from_numpy(rng.integers(-1, 8, (3, 6)).astype(np.int32))
    slots[:, 0] = torch.tensor([0, 3, 5])
    upstream = 2.0**-16 if factor in LIMITS else 1.0
    gradients = {"out": normal(rng, 3, 5, 512) * upstream, "lse": normal(rng, 3, 5) * upstream}
    return arguments | {"slots": slots}, gradients


def attend(given: Tensors, softmax_scale: float) -> Tensors:
    outs, lses = [], []
    for q, slots in zip(given["q"], given["slots"], strict=True):
        entries = given["cache"].flatten(0, 1)[slots[slots >= 0].long()]
        scores = softmax_scale * (q @ entries.T)
        outs.append(scores.softmax(1) @ entries[:, :512])
        lses.append(scores.logsumexp(1))
    return {"out": torch.stack(outs), "lse": torch.stack(lses)}


def training(rng: np.random.Generator, factor: float) -> tuple[Tensors, Tensors]:
    arguments = {
        "index_q": normal(rng, 4, 3, 32), "index_k": normal(rng, 9, 32), "index_weights": normal(rng, 4, 3) / 4,
        "q": normal(rng, 4, 2, 64), "rows": normal(rng, 9, 64), "lse": torch.zeros(4, 2, dtype=torch.float64),
    }  # fmt: skip
    return arguments, {"loss": torch.full((1,), 2.0**-16 if factor in LIMITS else 3.0, dtype=torch.float64)}


def loss(given: Tensors, softmax_scale: float, coeff: float = 1.0) -> Tensors:
    logits = softmax_scale * torch.einsum("thd,nd->thn", given["q"], given["rows"])
    target = (logits - given["lse"][..., None]).exp().sum(1)
    target = target / target.sum(1, keepdim=True)
    dots = torch.einsum("tid,nd->tin", given["index_q"], given["index_k"]).relu()
    logs = torch.einsum("ti,tin->tn", given["index_weights"], dots).log_softmax(1)
    each = (target * (target.clamp(min=1e-10).log() - logs)).sum(1)
    return {"loss": coeff * each.mean()[None]}


def compression(rng: np.random.Generator, factor: float) -> tuple[Tensors, Tensors]:
    """Windows whose mean squares exceed 1, so that those with a factor below 0 have roots."""
    arguments = {
        "kv": normal(rng, 12, 32) * 8, "score": normal(rng, 12, 32), "ape": normal(rng, 4, 32),
        "positions": torch.arange(12, dtype=torch.int32), "norm_weight": normal(rng, 32),
    }  # fmt: skip
    return arguments, {"rows": normal(rng, 12, 32)}


def compress(given: Tensors, eps: float) -> Tensors:
    weights = (given["score"].view(3, 4, 32) + given["ape"]).softmax(1)
    pooled = (weights * given["kv"].view(3, 4, 32)).sum(1)
    rows = torch.zeros(12, 32, dtype=pooled.dtype)
    return {
        "rows": rows.index_copy(
            0,
            torch.arange(3, 12, 4),
            pooled * (pooled.square().mean(1, keepdim=True) + eps).rsqrt() * given["norm_weight"],
        )
    }


# Of each op that has a derivative and a factor: arguments and the gradients of results, and the formula for autograd.
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sparse_mla": (attention, attend), "indexer_loss": (training, loss), "compress_rows": (compression, compress),
}  # fmt: skip
DIFFERENTIATED = [(op, name) for op, name in FACTORS if op.derivative is not None]
NEAR_1 = (-1.0, -0.05, -0.001, 0.0, 0.05)
LIMITS = (-LARGEST_FACTOR, LARGEST_FACTOR, -(2.0**-100), 2.0**-100)


def test_each_factor_of_a_derivative_has_its_formula() -> None:
    assert {op.name for op, _ in DIFFERENTIATED} == FORMULAS.keys()


@pytest.mark.parametrize("factor", [1e-50, -1e-40])
@pytest.mark.parametrize(("op", "name"), FACTORS, ids=kit.case_id)
def test_a_factor_that_is_no_normal_float32_is_0(op: Op, name: str, factor: float, device: str) -> None:
    case = next((case for case in op.cases if name in case.attrs), op.cases[0])
    (tiny, *_), (zero, *_) = (
        (*kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **{**case.attrs, name: value})), *arguments)
        for value, arguments in ((v, kit.torch_inputs(op, kit.make(case), device)) for v in (factor, 0.0))
    )
    kit.assert_bits_equal(name, tiny, zero, None if not op.partial else kit.as_numpy(tiny) == kit.as_numpy(tiny))


@pytest.mark.parametrize("implementation", [None, "triton"] if HAS_GPU else [None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [*NEAR_1, *LIMITS])
@pytest.mark.parametrize(("op", "name"), DIFFERENTIATED, ids=kit.case_id)
def test_gradients_of_any_factor(
    op: Op, name: str, factor: float, dtype: torch.dtype, implementation: str | None, device: str
) -> None:
    """Against torch's own autograd of the formula, in float64."""
    if factor in LIMITS and (dtype == torch.float16 or (op.name, name) == ("indexer_loss", "softmax_scale")):
        pytest.skip("float16 holds no gradients, or queries, that differ so much from 1")
    if (name, factor) == ("eps", -LARGEST_FACTOR):
        pytest.skip("a mean square that exceeds it is no float32")
    if implementation is not None and implementation not in op.choices:
        pytest.skip(f"no {implementation}")
    draw, formula = FORMULAS[op.name]
    given, upstream = draw(np.random.default_rng(0), factor)
    attrs: dict[str, float] = {a.name: 0.05 for a in op.attrs if a.type is float} | {"coeff": 1.0} | {name: factor}
    attrs = {a.name: attrs[a.name] for a in op.attrs if a.name in attrs}
    halves = {n for n in given if "bfloat16" in op.tensors[n].dtypes}
    made = {
        n: t if not t.is_floating_point() else t.to(dtype if n in halves else torch.float32) for n, t in given.items()
    }
    wide = {
        n: t if not t.is_floating_point() else t.double().requires_grad_(n in op.gradients) for n, t in made.items()
    }
    made = {n: t.to(device).requires_grad_(n in op.gradients) for n, t in made.items()}
    own = formula(wide, **attrs)
    found = kit.as_tuple(getattr(TORCH_OPS, op.name)(**made, **attrs, implementation=implementation))
    results = dict(zip(op.outputs, found, strict=True))
    sum((own[n] * g).sum() for n, g in upstream.items()).backward()
    sum((results[n].cpu().double() * g).sum() for n, g in upstream.items()).backward()
    for argument in op.gradients:
        if argument in given:
            got, want = made[argument].grad.cpu().double().numpy(), wide[argument].grad.numpy()
            scale = np.abs(want).max() or 1.0  # so that squares neither overflow nor vanish
            assert cosine_difference(got / scale, want / scale) <= GRADIENT.cosine, argument
            assert want.any() or not got.any()


def smallest(op: Op, name: str) -> Case:
    """The smallest of the cases that give the attribute, or of all if none does."""
    giving = [case for case in op.cases if case.attrs.get(name) is not None] or op.cases
    return min(giving, key=kit.size)


# A derivative's gradients are those of a call, for which autograd is the measure above.
DERIVATIVES = [op.derivative for op in OPS.values()]
OF_RESULTS = [(op, name) for op, name in FACTORS if op not in DERIVATIVES]


@pytest.mark.parametrize("factor", [-1.0, -0.05, 0.0])
@pytest.mark.parametrize(("op", "name"), OF_RESULTS, ids=kit.case_id)
def test_results_of_any_factor(op: Op, name: str, factor: float, device: str) -> None:
    case = smallest(op, name)
    inputs, attrs = kit.make(case), dict(case.attrs) | {name: factor}
    arguments = kit.torch_inputs(op, kit.copies(inputs), device)
    found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **attrs))
    with np.errstate(all="ignore"):
        want = op.reference(**inputs, **op.attributes(**attrs)._asdict())
    for (result, declared), got, value in zip(op.outputs.items(), found, want, strict=True):
        kit.assert_close(result, got, value, declared.agreement, declared.written(np.asarray(value)))


def test_a_zero_has_no_sign(device: str) -> None:
    """A call's bits do not follow from an earlier one whose factor is equal, but for the sign of 0."""
    q, weights = torch.ones(2, 1, 32, device=device), torch.ones(2, 1, device=device)
    for scale in (-0.0, 0.0, -0.0, 0):
        _, folded = torch_api.quantize_indexer_query(q, weights, scale=scale)
        assert not folded.any() and not folded.signbit().any()


def test_as_many_keys_as_can_be_counted_are_planned_at_once() -> None:
    config = Config(block_h=64, block_n=64, num_warps=4, num_stages=2)
    for programs in (1, 2, 500):
        assert 1 <= count_splits(programs, LARGEST_SIZE, config, H200) <= MOST_SPLITS


def test_the_class_of_attributes_is_made_with_the_op() -> None:
    """And so before a call of it that torch.compile traces, which may be the first."""
    for op in OPS.values():
        assert "Values" in vars(replace(op)), op


def test_what_names_a_format_is_an_attribute_of_the_op() -> None:
    op = OPS["write_mla_cache"]
    tensors = {**op.tensors, "cache": replace(op.tensors["cache"], format_attribute="layout")}
    with pytest.raises(RuntimeError, match="write_mla_cache: cache declares layout, which is no attribute"):
        replace(op, tensors=tensors)


def test_a_reference_takes_what_its_op_declares() -> None:
    def another(logits: Any, ends: Any, starts: Any, width: int) -> Any: ...

    message = r"select_topk: its reference takes \['logits', 'ends', 'starts', 'width'\], declared: \[.*'k'\]"
    with pytest.raises(RuntimeError, match=message):
        replace(OPS["select_topk"], reference=another)

    def without_k(**arrays: Any) -> Any: ...

    with pytest.raises(RuntimeError, match=r"select_topk: its reference takes \[\], declared: \[.*'k'\]"):
        replace(OPS["select_topk"], reference=without_k)
    replace(OPS["select_topk"], reference=lambda *, k, **arrays: None)


class Reading:
    """An op's attributes, which note the names that are asked for."""

    def __init__(self, attrs: Any, names: set[str]) -> None:
        self.attrs, self.names = attrs, names

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.attrs, name)


@pytest.mark.parametrize("op", OPS.values(), ids=kit.case_id)
def test_every_attribute_is_read(op: Op) -> None:
    """By a check or a plan of some case and GPU: what none reads would be taken and change nothing."""
    names: set[str] = set()
    for case in op.cases:
        specs = {name: Spec(array.shape, array.dtype.name) for name, array in kit.make(case).items()}
        attrs: Any = Reading(op.attributes(**case.attrs), names)
        problem = op.bind({name: specs.get(name) for name in op.tensors}, attrs)
        for device in KNOWN_DEVICES:
            with suppress(UnsupportedError):
                op.plan(problem, device)
    of_the_derivative = {"deterministic"} if op.name == "sparse_mla" else set()
    assert op.defaults.keys() - names == of_the_derivative


# The gradients do not follow from these: what an empty row's lse is, and how a row's keys are split.
WITHOUT_GRADIENTS = {"sparse_mla": {"empty_lse", "batch_invariant"}}


def test_a_derivative_takes_every_attribute_that_changes_it() -> None:
    """One that it did not take would be dropped, and the gradients be those of another call."""
    for op in OPS.values():
        if op.derivative is not None and not op.derivative.tensors.keys().isdisjoint(op.tensors):
            dropped = op.defaults.keys() - op.derivative.defaults.keys()
            assert dropped == WITHOUT_GRADIENTS.get(op.name, set()), op


# What cases leave as it is: results do not follow from it.
WITHOUT_CASES = {"sparse_mla": {"deterministic"}}


@pytest.mark.parametrize("op", [op for op in OPS.values() if not op.steps], ids=kit.case_id)
def test_every_attribute_has_a_case(op: Op) -> None:
    """With another value than its default, or no kernel would have to read it; an op's steps have cases themselves."""
    varied = {name for case in op.cases for name, value in case.attrs.items() if value != op.defaults[name]}
    assert op.defaults.keys() - varied == WITHOUT_CASES.get(op.name, set())
