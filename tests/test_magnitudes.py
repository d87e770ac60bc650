"""Results of scores far from 0, of either sign: a lane, tile or part that saw no key has no number to be subtracted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kit
import numpy as np
import pytest
from conftest import EVERYTHING

from xmla.core.formats.mla import mla_layouts
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import INTERPRETER, Spec, Tolerance
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
Inputs = dict[str, np.ndarray]
NEAR, FAR = (-1000.0, -100.0, 100.0, 1000.0), (-3e38, -1e30, 1e30, 3e38)
UNIT = 64.0  # the last dim of a key whose product with a query's is the shift


@dataclass(frozen=True)
class Shift:
    """`apply(inputs, attrs, by)` moves every score of a softmax of `op` by one number.

    `magnitudes`: those that float32 has as scores, of which `NEAR` ones leave differences of scores, too.
    `roundings`: how much larger absolute errors are there than near 0, of sums whose summands are multiplied by `by` or
    by `UNIT` and nearly cancel.
    """

    op: str
    apply: Callable[[Inputs, dict[str, Any], float], None]
    magnitudes: tuple[float, ...] = NEAR + FAR
    roundings: float = 10.0
    overflowing: tuple[str, ...] = ()


def shift_argument(*names: str) -> Callable[[Inputs, dict[str, Any], float], None]:
    def apply(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
        for name in names:
            wide = inputs[name].astype(np.float64) + by
            inputs[name][...] = np.where(np.isfinite(wide), np.clip(wide, -3.3e38, 3.3e38), wide)

    return apply


def shift_gates(argument: str) -> Callable[[Inputs, dict[str, Any], float], None]:
    """Shifts the gates of the call and those that earlier calls have kept."""
    shift = shift_argument(argument, "kept")

    def apply(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
        shift(inputs | {"kept": inputs["state"][..., inputs[argument].shape[1] :]}, attrs, by)

    return apply


def shift_keys(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
    """Shift attention's scores: the last dim of every key is the same, and a query's as large as makes them so."""
    for name in {"cache", "extra_cache"} & inputs.keys():
        (layout,) = mla_layouts(Spec.of_numpy(inputs[name]), attrs.get(f"{name}_format"))
        every = np.arange(inputs[name].shape[0] * inputs[name].shape[1])
        rows = layout.gather(inputs[name], every)
        keys = every[np.isfinite(rows).all(axis=1)]
        rows[:, -1] = UNIT
        layout.scatter(inputs[name], keys, *np.split(rows[keys], [layout.latent], axis=1))
    inputs["q"][..., -1] = by / UNIT / attrs["softmax_scale"]


def shift_keys_and_sink(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
    shift_keys(inputs, attrs, by)
    shift_argument("sink")(inputs, attrs, by)


def shift_forward(shift: Callable[[Inputs, dict[str, Any], float], None]) -> Callable[..., None]:
    """Shifts a derivative's call, at the shifted call's own results."""

    def apply(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
        shift(inputs, attrs, by)
        forward = OPS["sparse_mla"]
        results = forward.reference(**{name: inputs[name] for name in forward.tensors if name in inputs}, **attrs)
        for name, result in zip(forward.outputs, results, strict=True):
            inputs[f"forward_{name}"][...] = result

    return apply


def shift_rows(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
    inputs["rows"][:, -1] = UNIT
    inputs["q"][..., -1] = by / UNIT / attrs["softmax_scale"]
    moved = inputs["q"][..., -1].astype(np.float64) * UNIT * attrs["softmax_scale"]
    inputs["lse"] += np.where(np.isfinite(inputs["lse"]), moved, 0.0)


def shift_indexer(inputs: Inputs, attrs: dict[str, Any], by: float) -> None:
    """Shift the indexer's scores by the first head alone, whose product with each key is the same."""
    unit = UNIT / 4
    inputs["index_k"][:, -1] = unit
    inputs["index_q"][:, :, -1] = 0
    inputs["index_q"][:, 0] = 0
    inputs["index_q"][:, 0, -1] = 1
    inputs["index_weights"][:, 0] = by / unit


SHIFTS = {
    "scores": Shift("sparse_mla", shift_keys, (*NEAR, -1e30, 1e30)),  # q · k is 14 times as large
    "sink": Shift("sparse_mla", shift_argument("sink"), (*NEAR, -2e38, 2e38)),
    "scores and sink": Shift("sparse_mla", shift_keys_and_sink, (*NEAR, -1e30, 1e30)),
    # A probability is that of a score and of an lse whose roundings are not the same.
    "derivative": Shift("sparse_mla_backward", shift_forward(shift_keys), NEAR, UNIT),
    "derivative and sink": Shift("sparse_mla_backward", shift_forward(shift_keys_and_sink), NEAR, UNIT),
    "lses": Shift("merge_attention", shift_argument("lses")),
    "lses and sink": Shift("merge_attention", shift_argument("lses", "sink")),
    "scores of positions": Shift("compress_kv", shift_gates("score")),
    "gates": Shift("pool_keys", shift_gates("gates")),
    "scores of rows": Shift("compress_rows", shift_argument("score")),
    "derivative of rows": Shift("compress_rows_backward", shift_argument("score"), NEAR),
    "attention's scores": Shift("indexer_target", shift_rows, NEAR),
    "attention's scores in the loss": Shift("indexer_loss", shift_rows, NEAR),
    "indexer's scores": Shift("indexer_loss", shift_indexer, roundings=max(NEAR), overflowing=("dindex_q", "dindex_k")),
}


def shifted(shift: Shift, case: Case, by: float) -> Inputs | None:
    """The case's inputs; None if it is large, or lacks what is shifted, or its dtype has no such numbers."""
    inputs = kit.make(case)
    infinities = {name: np.isinf(array).sum() for name, array in inputs.items() if array.dtype.kind not in "iu"}
    if sum(array.size for array in inputs.values()) > 800_000:
        return None
    try:
        with np.errstate(over="ignore"):
            shift.apply(inputs, kit.attributes(OPS[shift.op], case), by)
    except KeyError:
        return None
    same = all(np.isinf(inputs[name]).sum() == count for name, count in infinities.items())
    return inputs if same else None


def cases_of(shift: Shift, by: float = 100.0) -> list[tuple[Case, Inputs]]:
    found = [(case, shifted(shift, case, by)) for case in kit.cases(OPS[shift.op])]
    return [(case, inputs) for case, inputs in found if inputs is not None]


@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_scores(name: str, device: str) -> None:
    """Of four magnitudes that follow each other each case has one, so that neighbours have others; by XMLA_ALL all."""
    shift = SHIFTS[name]
    op = OPS[shift.op]
    for place, by in enumerate(shift.magnitudes):
        cases = cases_of(shift, by)
        assert cases
        if not EVERYTHING:
            step = min(4, len(cases))
            cases = cases[place % step :: step]
        for case, inputs in cases:
            arguments = kit.torch_inputs(op, kit.copies(inputs), device)
            with np.errstate(all="ignore"):
                want = op.reference(**inputs, **kit.attributes(op, case))
                found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs))
            for (result, right), value in zip(kit.results(op, want), found, strict=True):
                if by not in NEAR and result in shift.overflowing:
                    continue
                agreement = op.outputs[result].agreement
                assert isinstance(agreement, Tolerance)
                many = shift.roundings if by in NEAR else np.inf
                loose = replace(agreement, absolute=many * agreement.absolute, cosine=np.inf, factor=np.inf)
                kit.assert_close(f"{case.name}, {by}: {result}", value, right, loose)
            for mutated in op.mutates:
                got = arguments[list(op.tensors).index(mutated)]
                kit.assert_updated(op, kit.attributes(op, case), inputs, mutated, got)


def functions(op: Op, cases: list[Case]) -> dict[str, set[str]]:
    """The names that each function of kernels uses."""
    found: dict[str, set[str]] = {}

    def walk(function: Any) -> None:
        code = function.fn.__code__
        found[f"{function.fn.__module__}.{function.fn.__name__}"] = set(code.co_names)
        for name in code.co_names:
            if hasattr(called := function.fn.__globals__.get(name), "fn"):
                walk(called)

    for case in cases:
        for launch in kit.plan_of(op, case, INTERPRETER).launches:
            walk(launch.kernel)
    return found


def exponentials(op: Op, cases: list[Case]) -> set[str]:
    return {function for function, names in functions(op, cases).items() if names & {"exp", "exp2"}}


def test_every_softmax_is_shifted() -> None:
    every = {function for op in OPS.values() for function in exponentials(op, list(op.cases))}
    seen = [exponentials(OPS[shift.op], [case for case, _ in cases_of(shift)]) for shift in SHIFTS.values()]
    assert every and every == set().union(*seen)


def scaled(op: Op) -> list[str]:
    """Arguments of floats whose factor is one of the results, of an op that takes the greatest of something."""
    names = set().union(*functions(op, list(op.cases)).values())
    if "max" not in names or names & {"exp", "exp2"}:
        return []
    return [name for name, tensor in op.tensors.items() if "float32" in tensor.dtypes]


SCALED = [(op, name) for op in OPS.values() for name in scaled(op)]


@pytest.mark.parametrize("factor", [-(2.0**100), 2.0**-100])
@pytest.mark.parametrize(("op", "argument"), SCALED, ids=lambda value: getattr(value, "name", value))
def test_a_factor(op: Op, argument: str, factor: float, device: str) -> None:
    """Every other case has a factor, the rest the other one; by XMLA_ALL all have both."""
    for case in op.cases if EVERYTHING else op.cases[factor > 0 :: 2]:
        inputs = kit.make(case)
        if argument not in inputs or any(array.dtype == np.float16 for array in inputs.values()):
            continue
        with np.errstate(all="ignore"):
            inputs[argument][...] = inputs[argument].astype(np.float32) * np.float32(factor)
        arguments = kit.torch_inputs(op, kit.copies(inputs), device)
        with np.errstate(all="ignore"):
            found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs))
            want = op.reference(**inputs, **kit.attributes(op, case))
        for (name, right), value in zip(kit.results(op, want), found, strict=True):
            result, where = op.outputs[name], op.outputs[name].written(right)
            agreement = result.agreement
            if isinstance(agreement, Tolerance):
                agreement = replace(agreement, absolute=agreement.absolute * abs(factor))
            kit.assert_close(f"{case.name}: {name}", value, right, agreement, where)
        for mutated in op.mutates:
            got = arguments[list(op.tensors).index(mutated)]
            kit.assert_updated(op, kit.attributes(op, case), inputs, mutated, got)
