"""Calls of ops on arrays whose parts XLA fuses with them, of every size known without an array."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stacked import FUSED, Arrays, calling

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import Case, Op, plan_call
from xmla.core.op.derivative import check_derivative
from xmla.core.plan import Plan
from xmla.core.values import H200, Spec
from xmla.jax_api._all_ops import JAX_OPS

# Of axes, in place of a case's own, so that arrays along them are multiples of FUSED bytes.
SIZES = {
    "T": 128, "B": 63, "B+1": 64, "S": 64, "H": 64, "N": 256, "COLUMNS": 256, "PLACES": 448,
    "P": 7, "SOURCE_P": 7, "EXTRA_P": 7, "STATE_P": 7, "R": 64, "SOURCE_R": 64, "EXTRA_R": 64,
}  # fmt: skip
WITHOUT_ENDS = SIZES | {"B": 64}  # of requests, which would be one more


@dataclass(frozen=True)
class OpCall:
    """A call in a form; arrays by name, those that are read apart from those that are updated."""

    op: Op
    case: Case
    specs: dict[str, Spec]
    plan: Plan

    def __call__(self, read: Arrays, updated: Arrays) -> tuple[list[Any], Arrays]:
        return calling(self.op, self.case.attrs)(read, updated)

    def update(self, read: Arrays, refs: Arrays) -> list[Any]:
        """The results of a call that updates Refs."""
        arrays = read | refs
        return jax.tree.leaves(getattr(JAX_OPS, self.op.name)(*map(arrays.get, self.op.tensors), **self.case.attrs))

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        names = self.op.mutates
        return {n: a for n, a in arrays.items() if n not in names}, {n: a for n, a in arrays.items() if n in names}

    def shapes(self, *leading: int, batch: int | None = None) -> Arrays:
        """Shapes of all arguments with leading axes, the last of which is a batch's of those that it does not share."""
        shapes = {}
        for name, spec in self.specs.items():
            axes = leading if batch is None or self.batch_axes[name] is None else (*leading, batch)
            shapes[name] = jax.ShapeDtypeStruct((*axes, *spec.shape), jnp.dtype(spec.dtype))
        return shapes

    @property
    def batch_axes(self) -> dict[str, int | None]:
        """Rows and pools are each element's own."""
        own = {"T", "B", *(self.op.tensors[pool].names[0] for pool in (*self.op.pools, *self.op.mutates))}
        return {name: 0 if own & {*self.op.tensors[name].names} else None for name in self.specs}

    def results(self) -> list[Any]:
        return jax.eval_shape(self, *self.split(self.shapes()))[0]

    @property
    def alike(self) -> tuple[str, str] | None:
        """An argument, and one of its kind that is updated."""
        pairs = [(a, b) for b in self.op.mutates for a in self.specs if a != b and self.specs[a] == self.specs[b]]
        return pairs[0] if pairs else None

    @property
    def stored_over(self) -> tuple[str, int] | None:
        """An argument that is read, and the place of a result of its kind."""
        read = self.split(self.shapes())[0]
        kinds = [(result.shape, result.dtype) for result in self.results()]
        return next(
            ((n, kinds.index((a.shape, a.dtype))) for n, a in read.items() if (a.shape, a.dtype) in kinds), None
        )

    @property
    def uneven(self) -> list[str]:
        """The arguments whose parts XLA does not fuse."""
        return [name for name, spec in self.specs.items() if spec.nbytes % FUSED]

    @property
    def differentiated(self) -> list[str]:
        """The arguments that have gradients; none where the call's are refused."""
        names = [n for n in self.op.gradients if n in self.specs and jnp.issubdtype(self.specs[n].dtype, jnp.floating)]
        specs, attrs = {name: self.specs.get(name) for name in self.op.tensors}, self.op.attributes(**self.case.attrs)
        try:
            check_derivative(self.op, dict.fromkeys(names, ""), specs, attrs, None)
        except UnsupportedError:
            return []
        return names


def op_calls(op: Op) -> list[OpCall]:
    """The calls of an op's cases that launch kernels, at sizes whose parts are fused."""
    calls = []
    for case in op.cases:
        arrays = case.make(np.random.default_rng(0))
        axes = {axis for name in arrays for axis in op.tensors[name].names}
        sizes = SIZES if "B+1" in axes else WITHOUT_ENDS
        specs = {}
        for name, array in arrays.items():
            shape = tuple(sizes.get(axis, size) for axis, size in zip(op.tensors[name].names, array.shape, strict=True))
            specs[name] = Spec(shape, jax.dtypes.canonicalize_dtype(array.dtype).name)
        try:
            plan, _ = plan_call(op, tuple(map(specs.get, op.tensors)), op.attributes(**case.attrs), H200)
        except (ArgumentError, UnsupportedError):  # what the case is for has another size
            continue
        call = OpCall(op, case, specs, plan)
        if plan.active and not set(call.uneven) & {*op.mutates}:
            calls.append(call)
    return sorted(calls, key=lambda call: len(call.uneven))
