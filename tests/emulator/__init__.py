"""Gluon kernels on the CPU: their Python source is run with NumPy, and what GPUs leave undefined is a `Fault`.

What is modelled: values, dtypes and 32-bit integers; shared memory byte by byte, laid out as Triton says; tensor
memory, without its layout; global memory, where an address outside of a launch's arrays is a fault; asynchronous
copies, mbarriers with phases, warpgroup products, those of tcgen05 and proxy fences, and partitions that run beside
each other in an order that is drawn (cta.py says how); PTX of the instructions that kernels use (ptx.py). What is not:
warps of one partition, which the compiler keeps in order; registers; programs beside each other; the order in which
hardware adds; speed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.semantic import TritonSemantic

from emulator.cta import Fault
from emulator.language import Program
from xmla.core.compile import interpreter
from xmla.core.plan import Launch, Plan

__all__ = ["Fault", "run"]


def run(
    plan: Plan, arrays: dict[str, np.ndarray], seed: int = 0,
    edits: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """`xmla.core.compile.interpreter.run` of a plan with Gluon kernels, and edits of the text of modules, by name."""
    program, of_triton = Program(edits), interpreter._interpret
    to_tensor = TritonSemantic.to_tensor

    def unwrapped(self: TritonSemantic, x: Any, check_type: bool = True) -> Any:
        """A constant as its value: to the interpreter a constant plus a tensor is a constant."""
        return to_tensor(self, x.value if isinstance(x, tl.constexpr) else x, check_type)

    def interpret(launch: Launch, arrays: dict[str, np.ndarray]) -> None:
        if isinstance(launch.kernel, GluonJITFunction):
            program.run(launch, arrays, seed)
        else:
            of_triton(launch.in_turn(), arrays)

    with mock.patch.object(interpreter, "_interpret", interpret), mock.patch.object(
        TritonSemantic, "to_tensor", unwrapped
    ):  # fmt: skip
        return interpreter.run("emulator", plan, arrays)
