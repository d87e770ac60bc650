"""What the contract's tests share: arbitrary integers for every op, and a call that returns what was written."""

import hypothesis.strategies as st
import kit
import numpy as np
from conftest import HAS_GPU
from hypothesis.extra import numpy as hnp

from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS

DEVICE = "cuda" if HAS_GPU else "cpu"
OPS = registry()
GARBAGE = st.one_of(st.integers(-2, 200), st.sampled_from([-(2**31), -(2**31) + 1, 2**31 - 1, 2**30, -1]))


def integers(op: Op) -> list[str]:
    """The arguments that hold places, lengths, bounds or flags; bytes of caches are none."""
    return [name for name, tensor in op.tensors.items() if tensor.dtypes[0] in ("int32", "int64")]


@st.composite
def garbage_inputs(draw: st.DrawFn, op: Op) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """A case of `op` whose integers are arbitrary and whose caches hold arbitrary bytes."""
    case = draw(st.sampled_from([c for c in op.cases if sum(a.size for a in kit.make(c).values()) < 400_000]))
    inputs = kit.make(case, seed=draw(st.integers(0, 3)))
    for name in (name for name in integers(op) if name in inputs):
        array = inputs[name]
        if kit.must_differ(op, name):
            chosen = draw(st.lists(GARBAGE, min_size=array.size, max_size=array.size, unique=True))
            inputs[name] = np.array(chosen).astype(array.dtype).reshape(array.shape)
        else:
            inputs[name] = draw(hnp.arrays(array.dtype, array.shape, elements=GARBAGE))
    return inputs, kit.attributes(op, case)


def run(op: Op, inputs: dict[str, np.ndarray], attrs: dict[str, object]) -> tuple[object, ...]:
    """Results, then the arrays that the call updated."""
    arguments = kit.torch_inputs(op, inputs, DEVICE)
    results = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **attrs))
    return (*results, *(arguments[list(op.tensors).index(name)] for name in op.mutates))
