"""Clause 1: every kernel terminates for any input bytes; loop bounds are clamped to a capacity the host knows."""

import os
import time

import hypothesis.strategies as st
import kit
import numpy as np
import pytest
from conftest import EVERYTHING
from garbage import DEVICE, OPS
from hypothesis import given, settings

from tools import fuzz
from xmla.torch_api._all_ops import TORCH_OPS


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # a maximum in the interpreter
@pytest.mark.parametrize("name", sorted(OPS))
def test_arbitrary_bytes_give_the_reference(name: str) -> None:
    """A slice of `make fuzz`: calls return, agree with the reference and write nothing besides their outputs."""
    chosen = st.sampled_from(fuzz.targets([name]))

    @given(chosen, st.integers(0, 10**6))
    @settings(max_examples=12 if EVERYTHING else 6)
    def check(target: fuzz.Target, seed: int) -> None:
        assert list(fuzz.run_batch(target, [seed])) == []

    check()


def test_the_watchdog_of_the_fuzzer_reads_processor_time() -> None:
    ticks = 0.1  # of a hundredth of a second, of each thread
    before, counted, after = time.process_time(), fuzz.processor_time(os.getpid()), time.process_time()
    assert before - ticks <= counted <= after + ticks
    assert fuzz.processor_time(2**30) == 0  # no process has such a number


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("name", sorted(OPS))
def test_arrays_of_one_byte(name: str, byte: int) -> None:
    """Every input filled with one byte: NaN, the least and the largest integers, all at once."""
    op = OPS[name]
    inputs = kit.make(op.cases[0])
    for argument, array in inputs.items():
        if name.startswith("write") and argument == "slots":
            continue  # valid slots are distinct
        inputs[argument] = np.full(array.nbytes, byte, np.uint8).view(array.dtype).reshape(array.shape)
    arguments = kit.torch_inputs(op, inputs, DEVICE)
    results = kit.as_tuple(getattr(TORCH_OPS, name)(*arguments, **op.cases[0].attrs))
    assert len(results) == len(op.outputs)
    for result in results:
        kit.as_numpy(result)  # waits for the kernel
