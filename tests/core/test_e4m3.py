"""e4m3 in integers, as sm_80 has it: every value, interpreted and as its PTX, and every op that reads or writes it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import kit
import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from conftest import HAS_GPU, require_assembler
from emulator import ptx

from tools import compile_e4m3, support_matrix
from xmla.core.compile import interpreter
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.lang import numbers
from xmla.core.op import Case, Op
from xmla.core.values import A100, INTERPRETER, L40S

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CODES = np.arange(256, dtype=np.uint8)


def values_to_round() -> np.ndarray:
    """e4m3's values, what lies halfway between neighbours, and the float32 beside each; zeros, NaN, the least; some."""
    exact = CODES.view(E4M3).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    halves = (exact[1:] + exact[:-1]) / 2
    all_ = np.concatenate([exact, halves, np.array([2.0**-10, -(2.0**-10), 1e-45, -1e-45, 1e-38], np.float32)])
    beside = [np.nextafter(all_, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(2000) * np.exp2(rng.integers(-14, 8, 2000))
    found = np.concatenate([all_, *beside, drawn.astype(np.float32)])
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([found[np.abs(found) <= 448], [np.float32(-0.0)], nan])


def check_decoded(got: np.ndarray) -> None:
    want = CODES.view(E4M3).astype(np.float32)
    assert np.isnan(want).nonzero()[0].tolist() == [0x7F, 0xFF] == np.isnan(got).nonzero()[0].tolist()
    kit.assert_bits_equal("values", np.where(np.isnan(got), np.float32(0), got), np.where(np.isnan(want), 0, want))


def check_encoded(x: np.ndarray, got: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        want = np.where(np.isnan(x), 0x7F, x.astype(E4M3).view(np.uint8))  # the instruction's NaN has no sign
    assert {0x00, 0x80, 0x01, 0x81, 0x7E, 0xFE, 0x7F} <= {*want.tolist()}
    kit.assert_bits_equal("codes", got, want.astype(np.uint8))


@contextmanager
def in_integers() -> Iterator[mock.Mock]:
    """Kernels are interpreted as for an architecture without e4m3; tells of each time that they ask."""
    with mock.patch.object(numbers, "converts_e4m3", return_value=tl.constexpr(False)) as asked:
        yield asked


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
def test_every_value_interpreted() -> None:
    values, x = np.zeros(256, np.float32), values_to_round()
    codes = np.zeros(len(x), np.uint8)
    with interpreter.corrections(), in_integers(), np.errstate(all="ignore"):
        compile_e4m3.decode_kernel[(2,)](interpreter._pointer(CODES), interpreter._pointer(values), N=128)
        compile_e4m3.encode_kernel[(len(x),)](interpreter._pointer(x), interpreter._pointer(codes), N=1)
    check_decoded(values)
    check_encoded(x, codes)


def computed(code: str, x: np.ndarray) -> np.ndarray:
    """What the PTX between a kernel's load and its store, of an element a thread, makes of the bits of `x`."""
    load, store = (rf"{what}\.global\.b\d+ {operands};" for what, operands in (
        ("ld", r"\{ (%\w+) \}, \[ \S+ \+ 0 \]"), ("st", r"\[ \S+ \+ 0 \], \{ (%\w+) \}")))  # fmt: skip
    ((source, body, result),) = re.findall(f"{load}(.*?){store}", code, re.DOTALL)
    body = re.sub(r"^\s*(\.loc.*|//.*|\$L\w+:)\n", "", body, flags=re.MULTILINE)
    for register, operand in ((result, "$0"), (source, "$1")):
        body = re.sub(rf"{register}\b", lambda _, operand=operand: operand, body)
    with np.errstate(invalid="ignore"):
        return ptx.run(body, 1, [x], lambda *_: None)[0]


def test_every_value_by_the_ptx_for_sm_80() -> None:
    """Compiled without a GPU; its instructions on NumPy's arrays."""
    require_assembler(A100.arch)
    (line,) = support_matrix.lines_of(Path(compile_e4m3.__file__), str(A100.arch))
    values, x = computed(line["decode_kernel"], CODES.astype(np.uint16)), values_to_round()
    check_decoded(values.view(np.float32))
    check_encoded(x, computed(line["encode_kernel"], x.view(np.uint32)).astype(np.uint8))


def test_architectures_with_e4m3_convert_by_instruction() -> None:
    require_assembler(L40S.arch)
    (line,) = support_matrix.lines_of(Path(compile_e4m3.__file__), str(L40S.arch))
    assert "cvt.rn.f16x2.e4m3x2" in line["decode_kernel"] and "cvt.rn.satfinite.e4m3x2.f32" in line["encode_kernel"]
    assert "mul.f32" not in line["decode_kernel"] and "selp" not in line["encode_kernel"]


def of_formats() -> list[tuple[Op, Case]]:
    """The smallest case of each op for each formats of its caches, or dtypes of arrays of bytes."""
    chosen: dict[tuple[object, ...], tuple[int, Op, Case]] = {}
    for op, case in kit.all_cases():
        specs = kit.specs(case)
        formats = op.bind(specs, op.attributes(**case.attrs)).formats
        arrays = specs | dict(kit.plan_of(op, case, INTERPRETER).buffers)
        kinds = {name: spec.dtype for name, spec in arrays.items() if spec.itemsize == 1 and spec.dtype != "int8"}
        kinds |= {name: layout.format if isinstance(layout, IndexerLayout) else layout.name
                  for name, layout in formats.items() if name in kinds}  # fmt: skip
        if kinds:
            size = kit.size(case)
            key = op.name, *sorted(kinds.items()), case.attrs.get("source_format")
            chosen[key] = min(chosen.get(key, (size, op, case)), (size, op, case), key=lambda each: each[0])
    return [(op, case) for _, op, case in chosen.values()]


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled, not interpreted, on a GPU")
@pytest.mark.parametrize(("op", "case"), of_formats(), ids=kit.case_id)
def test_every_op_has_the_same_results(op: Op, case: Case) -> None:
    plan = kit.plan_of(op, case, INTERPRETER)
    found = []
    for context in (nullcontext(), in_integers()):
        inputs = kit.copies(kit.make(case))
        with context:
            results = interpreter.run(op.name, plan, inputs)
        found.append({**inputs, **dict(zip(plan.results, results, strict=True))})
    for name, want in found[0].items():
        got = found[1][name]
        if want.dtype.kind not in "iu" and want.dtype.itemsize > 1:
            want, got = (np.where(np.isnan(x), np.ones((), x.dtype), x) for x in (want, got))
        kit.assert_bits_equal(name, got, want)
