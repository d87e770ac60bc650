"""The interpreter's shim computes bf16 and fp8 right, and is still needed."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kit
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from conftest import HAS_GPU

from xmla import torch_api
from xmla.core.compile import interpreter
from xmla.core.lang.numbers import load_e4m3
from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.core.values import DTYPES
from xmla.machine.calls import by_reference, by_torch

# Without the shim: a dot of two bf16 tiles of ones, and casts that round up into the next exponent and to even.
UPSTREAM = """
import numpy as np, triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float
one = np.full((16, 16), 0x3F80, np.uint16)
zero = TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
dot = InterpreterBuilder().create_dot(TensorHandle(one, tl.bfloat16), TensorHandle(one, tl.bfloat16), zero, None, 0)
values = np.array([1.99999, 1.00390625], np.float32)
cast = _convert_float(values, tl.float32, tl.bfloat16, None).view(np.uint16)
nan = _convert_float(np.array([0x7F], np.uint8), tl.float8e4nv, tl.float32, None).view(np.float32)
print(bool((dot.data == 16).all()), cast.tolist() == [0x4000, 0x3F80], bool(np.isnan(nan).all()))
"""


def test_upstream_still_needs_the_shim() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", UPSTREAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "False" in done.stdout, (
        "Triton interprets bf16 and fp8 right now: remove the shim of xmla.core.compile.interpreter"
    )


SPECIAL = [0.0, -0.0, 1.99999, 1.00390625, 1.01171875, 448.0, -449.0, 2.0**-10, 3e38, 1e-40, np.inf, -np.inf, np.nan]


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e4m3fn"])
def test_casts_are_those_of_ml_dtypes(target: str) -> None:
    triton_type = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float8_e4m3fn": tl.float8e4nv}[target]
    dtype = np.dtype(getattr(ml_dtypes, target, target))
    values = np.array(SPECIAL + np.random.default_rng(0).standard_normal(1000).tolist(), np.float32)
    with np.errstate(all="ignore"):
        want = values.astype(dtype)
        got = interpreter._convert_float(values, tl.float32, triton_type, None)
        back = interpreter._convert_float(got, triton_type, tl.float32, None).view(np.float32)
    assert np.array_equal(got, want.view(f"u{dtype.itemsize}"))
    assert np.array_equal(back, want.astype(np.float32), equal_nan=True)


@triton.jit
def load_operand(ptrs):
    """Load an operand of a product; elements of e4m3 are bytes to kernels."""
    return load_e4m3(ptrs, None) if ptrs.dtype.element_ty == tl.uint8 else tl.load(ptrs)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, tl.dot(load_operand(a_ptr + offs), load_operand(b_ptr + offs)))


@triton.jit
def int_dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), out_dtype=tl.int32))


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.float32])
def test_dot_multiplies_values(dtype: type) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(dtype) for _ in range(2))
    out = np.full((16, 16), np.nan, np.float32)
    with interpreter.corrections():
        dot_kernel[(1,)](*(interpreter._pointer(x) for x in (a, b, out)), N=16)
    assert np.allclose(out, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
def test_a_rows_bits_do_not_depend_on_its_place() -> None:
    """As in compiled kernels: tensor-parallel ranks have a head at another row of their tile."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    first, second = (np.full((64, 64), np.nan, np.float32) for _ in range(2))
    for left, out in ((a, first), (np.roll(a, 3, axis=0), second)):
        with interpreter.corrections():
            dot_kernel[(1,)](*(interpreter._pointer(x) for x in (left, b, out)), N=64)
    assert np.array_equal(np.roll(first, 3, axis=0), second)


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.float8e4b15).to(tl.float32))


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.usefixtures("device")
def test_subnormal_numbers_of_a_thread_that_flushes_them() -> None:
    """As threads of XLA do: kernels' numbers stay, and the thread flushes again afterwards."""
    least = torch.tensor([[2.0**-149, 0.0, 2.0**-148]])
    length = torch.tensor([3], dtype=torch.int32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert torch_api.select_topk(least, length, k=2).tolist() == [[0, 2]]
        assert (torch.tensor([2.0**-120]) * 2.0**-20).item() == 0.0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
def test_other_kernels_are_interpreted_as_without_xmla(device: str) -> None:
    """Products and casts of types that xmla has not, and of those that it corrects, before and after an op."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-5, 5, (16, 16)).astype(np.int8) for _ in range(2))
    ones = np.ones((16, 16), ml_dtypes.bfloat16)
    x = rng.uniform(-1.5, 1.5, 16).astype(np.float32)

    def run() -> list[np.ndarray]:
        product, raw, cast = np.zeros((16, 16), np.int32), np.zeros((16, 16), np.float32), np.zeros(16, np.float32)
        int_dot_kernel[(1,)](*map(interpreter._pointer, (a, b, product)), N=16)
        dot_kernel[(1,)](*map(interpreter._pointer, (ones, ones, raw)), N=16)
        cast_kernel[(1,)](*map(interpreter._pointer, (x, cast)), N=16)
        return [product, raw, cast]

    before = run()
    chosen = torch_api.select_topk(torch.arange(9.0)[None], torch.tensor([9], dtype=torch.int32), k=2)
    assert chosen.tolist() == [[7, 8]]
    after = run()
    assert np.array_equal(after[0], a.astype(np.int32) @ b)
    assert np.allclose(after[2], x, atol=0.25) and after[2].any()
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))
    assert not (after[1] == 16).all(), "Triton interprets bf16 right now: the shim is not needed"


UNWRITTEN = -1.25


def with_and_without_shortcuts(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What `run` gives by the shortcuts, which know its types by then, and by Triton's own interpreter."""
    run()
    ours = run()
    monkeypatch.setattr(interpreter, "SHORTCUTS", ())
    return ours, run()


@triton.jit
def less_half(a, b):
    return a - b / 2


@triton.jit
def operators_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    """Operands of either type as tiles, a row, a column, a scalar and numbers, by every kind of operator."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows * N + columns), tl.load(b_ptr + rows * N + columns)
    a_row, b_one = tl.load(a_ptr + columns), tl.load(b_ptr)
    place = out_ptr + rows * N + columns
    for value in (
        a + b, a - b_one, a_row * b, a_row + tl.trans(a_row), a * 3, 1 - b, -a, a == b, a_row < b, a >= b_one, a != 0,
        (a > 0) & (b > 0), (a > b) == (b > 1), tl.where(a > b, a, b), tl.where(a_row > 0, a, 0), tl.maximum(a, b_one),
        tl.minimum(a_row, tl.trans(a_row)), a.to(tl.float32) / (b.to(tl.float32) + 0.5), -0.0 * a.to(tl.float32),
        a.to(tl.int32) // 3, a.to(tl.int32) % 5, a.to(tl.int32) << 2, a.to(tl.int64) * b.to(tl.int32) >> 1,
        a.to(tl.uint8) ^ 5, tl.sum(a, axis=1)[:, None] + b, tl.max(b, axis=0)[None, :] - a, tl.cumsum(a, axis=0) * b,
        a[:, None, :].reshape(N, N) + b, tl.exp(a.to(tl.float32)) + rows, 2 + a, 3 * a, -a.to(tl.int32) // 4,
        (3 - a.to(tl.int64)) // (b_one.to(tl.int32) + 5), a.to(tl.int64) - b.to(tl.int32),
        a.to(tl.int32) < b.to(tl.int64), tl.load(a_ptr + 3) + tl.load(b_ptr + rows.to(tl.int64) + 1),
        tl.where(a > b, 1, b), tl.where(a > 3, 2, 1), tl.where(a_row > 1, tl.trans(a_row), a),
        (a != b).to(tl.int32) + (a > 1), (a * 0.75).to(tl.int16).to(tl.int64),
        # What a sum adds in turn follows the order in memory.
        tl.sum(tl.trans(a.to(tl.float32) / 7) + tl.load(b_ptr + columns).to(tl.float32) / 3, axis=1)[:, None] + rows,
        tl.sum(tl.where(a_row > 2, tl.trans(a.to(tl.float32) / 7), 0.1), axis=0)[None, :] + rows,
        tl.full([N, N], 2.5, tl.float32) * a, tl.full([N, N], -0.0, tl.float32), tl.zeros([N, N], tl.int8) + b,
        # In one order: another gives others.
        tl.reduce(a.to(tl.float32) / 7, 1, less_half)[:, None] + rows,
        tl.reduce(tl.trans(a.to(tl.float32)) / 7, 0, less_half, keep_dims=True) + rows,
    ):  # fmt: skip
        tl.store(place, value.to(tl.float64))
        place += N * N


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("left", ["int8", "uint8", "int32", "int64", "float16", "float32"])
def test_shortcuts_change_no_bit(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    operands = [
        rng.integers(0, 9, (16, 16)).astype(DTYPES[name][0])
        for name in ("int8", "int32", "int64", "float16", "float32")
    ]
    a = rng.integers(0, 9, (16, 16)).astype(DTYPES[left][0])

    def run() -> list[np.ndarray]:
        found = []
        for b in operands:
            out = np.full((48, 16, 16), UNWRITTEN)
            with interpreter.corrections():
                operators_kernel[(1,)](*map(interpreter._pointer, (a, b, out)), N=16)
            found.append(out)
        return found

    for mine, theirs in zip(*with_and_without_shortcuts(run, monkeypatch), strict=True):
        assert not (mine == UNWRITTEN).any() and np.array_equal(mine.view(np.uint64), theirs.view(np.uint64))


@triton.jit
def loads_kernel(a_ptr, n, out_ptr, N: tl.constexpr):
    """Masks and what stands in for masked elements as tiles, a row, a column, a scalar and numbers."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    row_ok, column_ok, one_ok = rows < n, columns < n - 3, n > 2
    tile, row = a_ptr + rows * N + columns, a_ptr + columns
    other = tl.load(tile)
    place = out_ptr + rows * N + columns
    for value in (
        tl.load(tile, mask=row_ok), tl.load(tile, mask=row_ok & column_ok, other=3), tl.load(tile, row_ok, True),
        tl.load(tile, mask=column_ok, other=other), tl.load(tile, mask=column_ok, other=tl.load(a_ptr + 5)),
        tl.load(row, mask=row_ok, other=2), tl.load(row, mask=column_ok, other=tl.load(row)) + rows.to(tl.float32),
        tl.load(a_ptr + 7, mask=one_ok, other=4) + tl.load(a_ptr, mask=n < 0, other=6) + 0 * other,
        tl.load(tile, mask=column_ok, other=2.5), tl.load(tile, mask=column_ok, other=float("-inf")),
        tl.load(tile, mask=column_ok, other=0.0), tl.load(tile, mask=column_ok, other=-0.0),
        tl.load(tile, mask=row_ok, other=rows), tl.load(tl.trans(tile), mask=row_ok, other=tl.trans(other)),
        # What a sum adds in turn follows the order in memory.
        tl.sum(tl.load(tl.trans(tile), mask=row_ok, other=0).to(tl.float32) / 7, axis=0)[None, :] + rows,
    ):  # fmt: skip
        tl.store(place, value.to(tl.float64))
        place += N * N


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("size", "shift"), [(16, 0), (32, 0), (32, 1)])
def test_loads_by_shortcuts_change_no_bit(kind: str, size: int, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few elements and of many, from any address."""
    values = np.random.default_rng(0).integers(0, 9, (size, size)).astype(DTYPES[kind][0])
    memory = np.zeros(shift + values.nbytes, np.uint8)
    a = memory[shift:].view(values.dtype).reshape(values.shape)
    a[...] = values

    def run() -> list[np.ndarray]:
        found = []
        for n in (9, 1, 16):
            out = np.full((15, size, size), UNWRITTEN)
            with interpreter.corrections(), np.errstate(all="ignore"):
                loads_kernel[(1,)](interpreter._pointer(a), interpreter._size(n), interpreter._pointer(out), N=size)
            found.append(out)
        return found

    for mine, theirs in zip(*with_and_without_shortcuts(run, monkeypatch), strict=True):
        assert not (mine == UNWRITTEN).any() and np.array_equal(mine.view(np.uint64), theirs.view(np.uint64))


@triton.jit
def products_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = load_operand(a_ptr + offs), load_operand(b_ptr + offs)
    first = tl.dot(a, b)
    for value in (first, tl.dot(a, tl.trans(b), acc=first), tl.dot(a, b, first, input_precision="ieee")):
        tl.store(out_ptr + offs, value)
        out_ptr += N * N


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.float32])
def test_products_by_shortcuts_change_no_bit(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(dtype) for _ in range(2))

    def run() -> np.ndarray:
        out = np.full((3, 16, 16), np.nan, np.float32)
        with interpreter.corrections():
            products_kernel[(1,)](*map(interpreter._pointer, (a, b, out)), N=16)
        return out

    ours, theirs = with_and_without_shortcuts(run, monkeypatch)
    assert np.isfinite(theirs).all() and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize("op", registry().values(), ids=kit.case_id)
def test_ops_by_shortcuts_change_no_bit(op: Op, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own types and shapes: every other test takes the shortcuts' word for them."""
    case = op.cases[0]

    def run() -> dict[str, np.ndarray]:
        return by_torch(op, kit.make(case), case.attrs)

    ours, theirs = with_and_without_shortcuts(run, monkeypatch)
    for name, want in by_reference(op, kit.make(case), case.attrs).items():
        written = op.outputs[name].written(want) if name in op.outputs else None
        kit.assert_bits_equal(name, ours[name], theirs[name], written)


# A process forks, as a loader of data does, while another thread is in the interpreter.
FORK = """
import os, signal, threading, time
import torch
from triton.runtime import interpreter as tritons
from xmla import torch_api
from xmla.core.compile import interpreter

original, inside = tritons._convert_float, threading.Event()

def stay():
    with interpreter.corrections():
        inside.set()
        time.sleep(1)

thread = threading.Thread(target=stay)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    found = torch_api.select_topk(torch.arange(9.0)[None], torch.tensor([9], dtype=torch.int32), k=2)
    os._exit(0 if found.tolist() == [[7, 8]] and tritons._convert_float is original else 1)
thread.join()
assert tritons._convert_float is original
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_beside_an_op() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


# A handler of signals and a finaliser interrupt the thread that is in the interpreter: an op that they call is refused,
# and the interrupted one goes on. The handler forks, too.
INTERRUPTED = """
import gc, os, signal, sys
import numpy as np
import torch
from triton.runtime import interpreter as tritons
from xmla import UnsupportedError, torch_api
from xmla.core.compile import interpreter

signal.alarm(60)
original, interpret, refusals = tritons._convert_float, interpreter._interpret, []
logits, ends = torch.arange(9.0)[None], torch.tensor([9], dtype=torch.int32)

def call(*_):
    try:
        torch_api.select_topk(logits, ends, k=2)
    except UnsupportedError as error:
        refusals.append(str(error))

def fork(*_):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(0)

class Finalised:
    __del__ = call

def interrupted(*args):
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    Finalised()
    interpret(*args)

signal.signal(signal.SIGUSR1, call)
signal.signal(signal.SIGUSR2, fork)
interpreter._interpret = interrupted
selected = torch_api.select_topk(logits, ends, k=2)
assert selected.tolist() == [[7, 8]] and tritons._convert_float is original, selected
interpreter._interpret = interpret
count = len(refusals)
call()
assert len(refusals) == count and count % 2 == 0
print(*{*refusals})
"""
REFUSED = (
    "select_topk: called while this thread interprets an op, as by a handler of signals or a finaliser, supported: one "
    "op after the other"
)


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
def test_what_interrupts_an_op() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout == f"{REFUSED}\n", done


@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 512, 64), (2, 128, 576, 64), (1, 2048, 256)], ids=str)
def test_products_are_of_rows_that_take_no_threads(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 2**18 multiplications each, or of one row; the values are those of the whole product."""
    *batch, m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (*batch, *sizes)).astype(np.float64) for sizes in ((m, k), (k, n)))
    want, parts = a @ b, []
    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", lambda x, y: [parts.append(x.shape), multiply(x, y)][1])
    np.testing.assert_array_equal(interpreter._matmul(a, b), want)
    ((*_, rows, _),) = parts
    assert rows == 1 or rows * k * n < 1 << 18
