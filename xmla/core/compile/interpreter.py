"""Runs plans on host arrays in Triton's interpreter, with a shim that corrects its low-precision arithmetic.

Triton 3.6 to 3.9 interpret bf16 and fp8 wrongly in three ways, silently:
  - `tl.dot` multiplies the raw 16-bit patterns of bf16 operands;
  - casts to bf16 and fp8 round half away from zero and lose the carry out of the mantissa;
  - casts from e4m3 read NaN as 480.
While a plan runs, `_convert_float` and `InterpreterBuilder.create_dot` are therefore replaced by ml_dtypes' casts and a
matmul; other kernels of the process see Triton's own. The matmul is in float64: some BLAS libraries add float32 in an
order that depends on a row's position, so tensor-parallel ranks would differ. Subnormal numbers stay what they are, as
in compiled kernels, also where a thread, as XLA's are, would make them 0.
tests/core/test_interpreter.py fails once upstream does all three right; then this shim is removed.
"""

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from xmla.core.compile.interpreter_fast import SHORTCUTS
from xmla.core.errors import UnsupportedError
from xmla.core.plan import Launch, Plan
from xmla.core.values import DTYPES

_NUMPY = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_ONE_THREAD = 1 << 18  # multiplications from which on OpenBLAS has threads
_LIBC = ctypes.CDLL(None)
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV
# The interpreter patches triton.language while it runs, so one plan runs at a time. What interrupts a thread, a handler
# of signals or a finaliser, is in the same thread: it may fork there, and is refused an op, for which it would wait.
_lock = threading.RLock()
_thread = threading.local()
# A fork waits for it: the child would inherit it locked, and the interpreter and the language patched.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    bits = np.dtype(f"uint{target.primitive_bitwidth}")
    typed = np.ascontiguousarray(data).view(_NUMPY[source])
    if source.primitive_bitwidth < 32:
        typed = typed.astype(np.float32)
    return typed.astype(_NUMPY[target]).view(bits).reshape(np.shape(data))


def _create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    wide = [np.ascontiguousarray(x.data).view(_NUMPY[x.dtype.scalar]).astype(np.float64) for x in (a, b)]
    return TensorHandle(_matmul(*wide).astype(d.data.dtype) + d.data, d.dtype.scalar)


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a · b in products that OpenBLAS computes on this thread: its others spin, and a busy machine waits for them.

    Beside two busy processes on two cores a product of 64 × 512 × 64 took 23 ms with threads, and takes 0.5 ms.
    """
    *batch, m, k = a.shape
    most = max(1, (_ONE_THREAD - 1) // (k * b.shape[-1]))
    rows = min(m, 1 << (most.bit_length() - 1))  # tiles have powers of two
    parts = np.matmul(a.reshape(*batch, m // rows, rows, k), b[..., None, :, :])
    return parts.reshape(*batch, m, b.shape[-1])


_CORRECTIONS: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_convert_float", _convert_float),
    (interpreter.InterpreterBuilder, "create_dot", _create_dot),
)


@contextmanager
def corrections() -> Iterator[None]:
    """Triton's interpreter with the shim and `SHORTCUTS`, for one thread at a time."""
    with _lock:
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in (*_CORRECTIONS, *SHORTCUTS)]
        try:
            for replacement in (*_CORRECTIONS, *SHORTCUTS):
                setattr(*replacement)
            yield
        finally:
            for original in kept:
                setattr(*original)


@contextmanager
def _default_arithmetic() -> Iterator[None]:
    """This thread's arithmetic of floats as a process begins with it."""
    kept = ctypes.create_string_buffer(64)  # more than any platform's fenv_t
    _LIBC.fegetenv(kept)
    _LIBC.fesetenv(_DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        _LIBC.fesetenv(kept)


def _pointer(array: np.ndarray) -> tl.tensor:
    kind = tl.str_to_ty("*" + DTYPES[array.dtype.name][1], None)
    return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), kind), kind)


def _size(value: int) -> tl.tensor:
    # For a bare integer Triton 3.7 would import torch to find its type.
    return tl.tensor(TensorHandle(np.array([value], np.int32), tl.int32), tl.int32)


def _interpret(launch: Launch, arrays: dict[str, np.ndarray]) -> None:
    pointers = {pointer: _pointer(arrays[name]) for pointer, name in launch.pointers.items()}
    sizes = {name: _size(value) for name, value in launch.sizes.items()}
    kernel: Any = launch.kernel
    kernel[launch.grid](**pointers, **sizes, **launch.constexprs)


def require(op: str, plan: Plan) -> None:
    """Refuse a call of `op` on the CPU whose kernels are not interpreted."""
    if not all(isinstance(launch.kernel, InterpretedFunction) for launch in plan.launches):
        raise UnsupportedError(
            f"{op}: arrays on the CPU need Triton's interpreter: start Python by `TRITON_INTERPRET=1 python …`, "
            "or pass implementation='reference'"
        )


def run(op: str, plan: Plan, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Run `plan` of a call of `op` on NumPy arrays by name; arrays a kernel updates in place are updated in place."""
    if getattr(_thread, "interprets", False):
        raise UnsupportedError(
            f"{op}: called while this thread interprets an op, as by a handler of signals or a finaliser, supported: "
            "one op after the other"
        )
    _thread.interprets = True
    try:
        return _run(plan, dict(arrays))
    finally:
        _thread.interprets = False


def _run(plan: Plan, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    for name, spec in plan.buffers.items():
        # Uninitialised memory on a GPU holds anything; 0xFF bytes are NaN in every float dtype and -1 in every integer.
        poison = np.full(spec.nbytes, 0xFF, np.uint8)
        arrays.setdefault(name, poison.view(DTYPES[spec.dtype][0]).reshape(spec.shape))
    with corrections(), _default_arithmetic(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)  # a row of NaN, which kernels accept
        for launch in plan.active:
            _interpret(launch, arrays)
    return tuple(arrays[name] for name in plan.results)
