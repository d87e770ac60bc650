"""Clause 7: same inputs and shapes, same bits; with batch_invariant also whatever the batch around a row."""

import hypothesis.strategies as st
import kit
import pytest
from conftest import HAS_GPU
from garbage import OPS, run
from hypothesis import given, settings


@pytest.mark.parametrize("name", sorted(OPS))
def test_repeated_calls_give_the_same_bits(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    where = None
    if name == "indexer_logits_paged":
        inputs = kit.make(case)
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    first = [kit.as_numpy(r).copy() for r in run(op, kit.make(case), case.attrs)]
    for _ in range(20 if HAS_GPU else 2):
        for a, b in zip(run(op, kit.make(case), case.attrs), first, strict=True):
            kit.assert_bits_equal(name, a, b, where)


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
