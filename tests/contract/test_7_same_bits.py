"""Clause 7: same inputs, shapes and strides, same bits; with batch_invariant also whatever the batch around a row.

Exempt are the gradients of caches with `deterministic=False`, of entries with more than two summands: cases of ops have
no such entries. tests/test_training.py holds them to their bound.
Torch against JAX is tests/test_parity.py.
"""

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import kit
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from garbage import DEVICE, OPS, run
from hypothesis import given, settings

from tools import alignment, kept
from tools.alignment import ARCHITECTURES, aligned, apart, plan_of
from tools.fuzz import Dyadic
from xmla.core.formats.mla import V32
from xmla.core.op import Case, Op
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.ops.indexer.indexer_logits_paged.cases import make_case as logits_case
from xmla.core.values import KNOWN_DEVICES
from xmla.torch_api._all_ops import TORCH_OPS

RERUNS = 20 if HAS_GPU else 1
# On a GPU all of it; the interpreter takes one case an op for reruns, and one change of the batch a case.
CASES = [(op, case) for op, case in kit.all_cases() if HAS_GPU or case is op.cases[-1]]
CHANGES = ("permuted", "padded", "a part")


def depends(op: Op, change: str) -> bool:
    """Whether other tokens of a call change a token's results: of one request's list, and of a mean over tokens."""
    axes = {axis for result in op.outputs.values() for axis in result.names}
    return "B" in axes or ("LOSS" in axes and change != "permuted")


ROWS = [
    (op, case, change)
    for op in OPS.values()
    for case in kit.cases(op)
    for index, change in enumerate(CHANGES)
    if not depends(op, change)
    and next(iter(op.tensors.values())).names[0] == "T"
    and (HAS_GPU or op.cases.index(case) % len(CHANGES) == index)
]


def defined(op: Op, inputs: dict[str, np.ndarray], case: Case) -> np.ndarray | None:
    """Where the result of the one op that leaves some of it unwritten is defined."""
    if not op.partial:
        return None
    return kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))


@pytest.mark.parametrize(("op", "case"), CASES, ids=kit.case_id)
def test_repeated_calls_give_the_same_bits(op: Op, case: Case) -> None:
    first = [kit.as_numpy(r).copy() for r in run(op, kit.make(case), case.attrs)]
    where = defined(op, kit.make(case), case)
    for _ in range(RERUNS):
        for a, b in zip(run(op, kit.make(case), case.attrs), first, strict=True):
            kit.assert_bits_equal(op.name, a, b, where)


STATED = "Bits may differ between arrays whose first addresses differ modulo 16 bytes."


def planned_by_address(op: Op, case: Case) -> bool:
    """Whether a device's plan of the case has other launches where one of its arrays starts elsewhere."""
    specs = aligned(case)
    for device in KNOWN_DEVICES:
        plan = plan_of(op, case, specs, device)
        for name in specs:
            moved = plan_of(op, case, apart(op, specs, name), device)
            if moved is not None and moved.launches != plan.launches:
                return True
    return False


@pytest.mark.slow
def test_the_ops_whose_bits_depend_on_addresses_say_so(record_property: Callable[[str, object], None]) -> None:
    """By another kernel of the plan, or by another order of its sums: wgmma's architecture and one of mma.sync.

    An op that is known to depend on addresses by one of these is not looked at for the next.
    """
    by_plan = {op.name for op in OPS.values() if any(planned_by_address(op, case) for case in op.cases)}
    digests, answers = kept.changed("alignment", Path(alignment.__file__), *sorted(OPS.keys() - by_plan))
    record_property(kept.OLD, kept.old("alignment", digests))
    for arch in ARCHITECTURES:
        assert sum(answer["sums"] > 0 and answer["arch"] == arch for answer in answers) > 1
    by_order = {answer["op"] for answer in answers if not answer["same"]}
    assert by_plan and by_order
    stated = {op.name for op in OPS.values() if STATED in " ".join(op.prototype.__doc__.split())}
    assert by_plan | by_order == stated
    kept.keep("alignment", digests)


@pytest.mark.parametrize(("op", "case"), CASES, ids=kit.case_id)
def test_bits_at_another_address(op: Op, case: Case) -> None:
    """Alike modulo 16 bytes, the bits are the same; elsewhere too, but of ops that say otherwise and run on a GPU."""
    inputs = kit.make(case)
    arguments = kit.torch_inputs(op, inputs, DEVICE)
    want = results_at(op, case, arguments, 0)
    where = defined(op, inputs, case)
    for first in (16, 48, 4) if STATED not in " ".join(op.prototype.__doc__.split()) or not HAS_GPU else (16, 48):
        for a, b in zip(results_at(op, case, arguments, first), want, strict=True):
            kit.assert_bits_equal(op.name, a, b, where)


def results_at(op: Op, case: Case, arguments: list[torch.Tensor | None], first: int) -> list[np.ndarray]:
    """Results and updated arguments of a call whose arguments all start `first` bytes past a multiple of 16."""
    moved = []
    for tensor in arguments:
        if tensor is None or not tensor.numel():
            moved.append(tensor)
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        skip = -(-first // tensor.itemsize)
        memory = torch.zeros(skip + span, dtype=tensor.dtype, device=tensor.device)[skip:]
        assert memory.data_ptr() % 16 == skip * tensor.itemsize % 16
        memory.view(BITS[tensor.itemsize]).copy_(tensor.as_strided((span,), (1,)).view(BITS[tensor.itemsize]))
        moved.append(memory.as_strided(tensor.shape, tensor.stride()))
    found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*moved, **case.attrs))
    return [kit.as_numpy(result) for result in (*found, *(moved[place] for place in op.mutated))]


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def batch(op: Op, inputs: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens `rows` as a batch of their own, each told its request."""
    chosen = {n: a[rows] if op.tensors[n].names[0] == "T" else a for n, a in inputs.items()}
    if "block_table" in inputs and "request_ids" not in inputs:
        tokens = next(len(a) for n, a in inputs.items() if op.tensors[n].names[0] == "T")
        chosen["request_ids"] = (rows // (tokens // len(inputs["block_table"]))).astype(np.int32)
    return chosen


def sums_in_order(op: Op, inputs: dict[str, np.ndarray], attrs: dict[str, object]) -> bool:
    """Whether a call adds float32 in the order of tokens."""
    plan = getattr(TORCH_OPS, op.name).plan(*kit.torch_inputs(op, inputs, DEVICE), **attrs)
    return any(launch.name == "key_gradient_kernel" for launch in plan.launches)


@pytest.mark.parametrize(("op", "case", "change"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_a_row_does_not_depend_on_its_batch(op: Op, case: Case, change: str) -> None:
    """Permuted, padded or a part of it; attention with batch_invariant, else its splits follow the number of tokens.

    The interpreter multiplies with NumPy, which adds in an order that depends on the shape: there no sum rounds.
    """
    inputs = kit.make(case) if HAS_GPU else case.make(Dyadic(np.random.PCG64(0)))
    tokens = len(next(iter(inputs.values())))
    attrs = dict(case.attrs) | ({"batch_invariant": True} if "batch_invariant" in op.defaults else {})
    whole = [kit.as_numpy(r).copy() for r in run(op, {n: a.copy() for n, a in inputs.items()}, attrs)]
    # A compressor has the tokens before those of a call, and so has attention that writes its tokens' entries.
    order = "positions" if "positions" in inputs else "lengths" if op.mutates and "lengths" in inputs else None
    in_order = np.arange(tokens) if order is None else np.argsort(inputs[order], kind="stable")
    rows = {
        "permuted": np.random.default_rng(1).permutation(tokens),
        "padded": np.append(np.arange(tokens), [0] * 3),
        "a part": np.sort(in_order[: (tokens + 1) // 2]) if op.mutates else np.arange(tokens)[::2],
    }[change]
    given = batch(op, inputs, rows)
    where = defined(op, inputs, case)
    if change == "padded":  # what a graph's padding holds: no keys, no slot, stale everything else
        for name in ("lengths", "extra_lengths", "ends"):
            if name in given:
                given[name][tokens:] = 0
        for name in ("slots", "extra_slots", "entry_slots", "indices"):
            if name in given:
                given[name][tokens:] = -1
        if "workspace_bytes" in attrs:
            attrs["workspace_bytes"] *= 4
    count = len(op.outputs)
    results = [kit.as_numpy(r).copy() for r in run(op, given, attrs)]
    updated = results[count:]
    if op.mutates and change == "a part":  # the others in a call of their own
        rest = batch(op, inputs, np.setdiff1d(np.arange(tokens), rows))
        updated = run(op, rest | dict(zip(op.mutates, updated, strict=True)), attrs)[count:]
    for name, a, b in zip(op.mutates, updated, whole[count:], strict=True):
        kit.assert_bits_equal(name, a, b)
    for result, a, b in zip(op.outputs.values(), results[:count], whole[:count], strict=True):
        kept = rows[:tokens]
        if "T" not in result.names:
            # Of keys and entries the sums do not depend on the order of tokens. Of a sink and a loss they do, and of
            # keys that `indexer_loss` multiplies with the tokens of their ranges.
            same = change == "permuted" or (change == "padded" and not {"ends", "slots", "indices"}.isdisjoint(given))
            if (
                same
                and len(result.names) > 1
                and case.attrs.get("deterministic", True)
                and not sums_in_order(op, inputs, attrs)
            ):
                kit.assert_bits_equal(op.name, a, b)
            continue
        kit.assert_bits_equal(op.name, a[: len(kept)], b[kept], None if where is None else where[kept])


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("layout", ["fp8", "mxfp4"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_drafts_verified_together_have_the_bits_of_decodes(drafts: int, layout: str, heads: int) -> None:
    op, tokens = OPS["indexer_logits_paged"], 1 + drafts
    case = logits_case((150, 70), 64, next_n=tokens, heads=heads, layout=layout)
    inputs = kit.make(case) if HAS_GPU else case.make(Dyadic(np.random.PCG64(0)))
    where = defined(op, inputs, case)
    together = kit.as_numpy(run(op, inputs, case.attrs)[0])
    for draft in range(tokens):
        step = np.arange(draft, 2 * tokens, tokens)  # a token of each request
        alone = {name: a[step] if op.tensors[name].names[0] == "T" else a for name, a in inputs.items()}
        kit.assert_bits_equal(f"draft {draft}", run(op, alone, case.attrs)[0], together[step], where[step])


@given(st.permutations(range(5)), st.integers(1, 5))
@settings(max_examples=6)
def test_batch_invariant_rows(order: list[int], kept: int) -> None:
    """Permuted, or a part alone: each row keeps its bits."""
    op = OPS["sparse_mla"]
    case = next(c for c in op.cases if c.name.startswith("t5"))
    inputs = kit.make(case)
    whole = run(op, inputs, case.attrs)
    chosen = order[:kept]
    part = {n: a[chosen] if op.tensors[n].names[0] == "T" else a for n, a in inputs.items()}
    for a, b in zip(run(op, part, case.attrs), whole, strict=True):
        kit.assert_bits_equal("row", a, kit.as_numpy(b)[chosen])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_batch_invariant_rows_of_many_splits(implementation: str | None) -> None:
    """A part of the rows, and of the heads as a rank has them: 320 rows and heads keep the bits that 6 have."""
    attrs = {"softmax_scale": 0.1, "batch_invariant": True, "implementation": implementation}
    inputs = kit.make(make_case(40, 8, 8192, 64, V32, with_sink=True))
    whole = run(OPS["sparse_mla"], inputs, attrs)
    part = inputs | {"q": inputs["q"][5:8, 2:4].copy(), "slots": inputs["slots"][5:8], "sink": inputs["sink"][2:4]}
    for a, b in zip(run(OPS["sparse_mla"], part, attrs), whole, strict=True):
        kit.assert_bits_equal("row", a, kit.as_numpy(b)[5:8, 2:4])


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in CASES if op.outputs], ids=kit.case_id)
def test_a_replayed_graph_gives_the_bits_of_the_call(op: Op, case: Case) -> None:
    arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
    updated = [(arguments[place], arguments[place].clone()) for place in op.mutated]
    function = getattr(TORCH_OPS, op.name)
    want = [kit.as_numpy(r).copy() for r in kit.as_tuple(function(*arguments, **case.attrs))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kit.as_tuple(function(*arguments, **case.attrs))
    for _ in range(2):
        for argument, first in updated:
            argument.copy_(first)
        graph.replay()
        for a, b in zip(captured, want, strict=True):
            kit.assert_bits_equal(op.name, a, b, defined(op, kit.make(case), case))


def test_what_adds_in_any_order_is_an_option_that_says_so() -> None:
    """The attribute is of attention and its derivative alone, and is not the default."""
    optional = {op.name: op.defaults["deterministic"] for op in OPS.values() if "deterministic" in op.defaults}
    assert optional == {"sparse_mla": True, "sparse_mla_backward": True}
    doc = " ".join(OPS["sparse_mla"].doc.split())
    assert (
        "gradients of caches then differ from run to run and between the front-ends; those of q and sink do not" in doc
    )


def test_in_any_order_other_gradients_have_the_same_bits() -> None:
    op = OPS["sparse_mla_backward"]
    case = op.cases[-1]
    attrs = {**case.attrs, "deterministic": False}
    first, *others = ([kit.as_numpy(r).copy() for r in run(op, kit.make(case), attrs)] for _ in range(1 + RERUNS))
    for results in others:
        for name, a, b in zip(op.outputs, results, first, strict=True):
            if name in ("dq", "dsink"):
                kit.assert_bits_equal(name, a, b)
