"""What fails around the library gives a clear error, loses nothing, and the next call works."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import kit
import pytest
import torch
from triton.runtime import driver

from xmla import UnsupportedError, torch_api
from xmla.core.registry import registry
from xmla.torch_api import _prepared, _private
from xmla.torch_api._all_ops import TORCH_OPS

# Compiling needs no GPU, but a Triton that was imported without TRITON_INTERPRET: a process of its own for all of it.
COMPILING = """
import errno, json, logging, os, sys
from pathlib import Path
from triton.runtime.cache import FileCacheManager
from xmla import CompileError
from xmla.core.compile import compiler as xc
from xmla.core.values import H200
from xmla.core.models.calls import Call
from xmla.core.values import Spec

folder = Path(sys.argv[1])
call = Call("map_slots", {"indices": Spec((3, 8), "int32"), "block_table": Spec((1, 4), "int32")}, {"page_size": 4})
plan = call.plan(H200)
(wanted,) = [xc.specialize(launch, plan, call.specs) for launch in plan.launches]
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("xmla").addHandler(handler)

def compiled():
    xc._compiled.cache_clear()
    return xc.compiled(wanted, 90)

def fails(*words):
    try:
        compiled()
    except CompileError as error:
        assert str(error).startswith("map_slots: map_slots_kernel was not compiled for sm_90: "), error
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError(f"no error, expected one with {words}")

# A folder that cannot be made, as on a read-only file system.
(folder / "file").write_text("")
os.environ["TRITON_CACHE_DIR"] = str(folder / "file" / "cache")
fails("Not a directory", str(folder / "file" / "cache"), "TRITON_CACHE_DIR names another folder")
if os.geteuid():
    (folder / "locked").mkdir(mode=0o555)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "locked")
    fails("Permission denied", "TRITON_CACHE_DIR")

# A full disk, half-way through the files of a kernel.
os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
put = FileCacheManager.put
def full(self, data, filename, binary=True):
    if filename.endswith(".cubin"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), filename)
    return put(self, data, filename, binary)
FileCacheManager.put = full
fails("No space left on device", "map_slots_kernel.cubin")
FileCacheManager.put = put

# An assembler that fails, and one that is not there.
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas
ptxas = folder / "ptxas"
version = os.popen(f"{get_ptxas(90).path} --version").read()
ptxas.write_text(f"#!/bin/sh\\ncase $1 in --version) cat {folder}/version;; *) echo broken >&2; exit 7;; esac\\n")
(folder / "version").write_text(version)
ptxas.chmod(0o755)
with knobs.nvidia.scope():
    os.environ["TRITON_PTXAS_PATH"] = os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(ptxas)  # since 3.9 the latter
    fails("`ptxas` failed with error code 7", "broken")
assert records == [], records

kernel = compiled()  # the next call works
want = kernel.asm["cubin"]
assert xc.is_whole(want)

# Damaged files: each is found, told and made again.
def files(pattern):
    found = list((folder / "cache").rglob(pattern))
    assert len(found) == 1, found
    return found[0]
for pattern, content in (
    ("map_slots_kernel.json", b"{\\"na"), ("map_slots_kernel.json", b"{}"), ("map_slots_kernel.json", b""),
    ("map_slots_kernel.cubin", want[:1000]), ("map_slots_kernel.cubin", want[:-1]), ("map_slots_kernel.cubin", b""),
    ("map_slots_kernel.ttir", b"\\xff\\xfe"),
):
    records.clear()
    files(pattern).write_bytes(content)
    assert compiled().asm["cubin"] == want and files("*.cubin").read_bytes() == want, pattern
    assert len(records) == 1 and "map_slots_kernel for sm_90 was damaged in" in records[0], (pattern, records)
records.clear()
files("__grp__*").write_text("nothing")
(folder / "cache" / "left").mkdir()  # of a process that ended while it wrote
assert compiled().asm["cubin"] == want
files("*.cubin").unlink()
assert compiled().asm["cubin"] == want
print("done")
"""


def test_compiling(tmp_path: Path) -> None:
    """A cache that is read-only, full or damaged, an assembler that fails: an error that names op, kernel and cause."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split()[-1] == "done", done.stderr[-3000:]


# Mistakes in a function that a kernel calls, in the kernel, and of a name.
WRONG = """
import triton
import triton.language as tl

@triton.jit
def helper(n):
    return tl.zeros([n], tl.float32)

@triton.jit
def wrong_kernel(out_ptr, KIND: tl.constexpr):
    if KIND == 0:
        tl.store(out_ptr, tl.sum(helper(3)))
    elif KIND == 1:
        tl.static_assert(KIND == 0, "KIND is 0")
    else:
        tl.store(out_ptr, nowhere)
"""
COMPILING_WRONG = """
import sys
from xmla import CompileError
from xmla.core.compile import compiler as xc
sys.path.insert(0, sys.argv[1])
from wrong import wrong_kernel

for kind in range(3):
    try:
        xc.compiled(xc.Specialization(wrong_kernel, (("out_ptr", "*fp32"),), (("KIND", kind),), 4, 1), 90)
    except CompileError as error:
        print(error, end="\\0")
"""


def test_the_first_line_of_a_compile_error_has_the_cause(tmp_path: Path) -> None:
    """Below stand the lines that led there, of the kernel and of what it calls."""
    (tmp_path / "wrong.py").write_text(WRONG)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING_WRONG, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *messages, rest = done.stdout.split("\0")
    assert not rest
    for message, cause, place in zip(
        messages,
        (
            "ValueError: Shape element 0 must be a power of 2",
            "CompileTimeAssertionFailure: KIND is 0",
            "nowhere is not def",
        ),
        ("return tl.zeros([n], tl.float32)", "tl.static_assert(KIND == 0", "tl.store(out_ptr, nowhere)"),
        strict=True,
    ):
        first, below = message.split("\n", 1)
        assert first.startswith("wrong: wrong_kernel was not compiled for sm_90: ") and cause in first, first
        assert place in below and "def wrong_kernel(out_ptr" in below, below


def test_out_of_memory_names_the_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry()["select_topk"]
    case = op.cases[5]
    arguments = kit.torch_inputs(op, kit.make(case), device)
    want = torch_api.select_topk(*arguments, **case.attrs)
    name = "empty_strided_cuda" if device == "cuda" else "empty_strided_cpu"
    real = getattr(_private, name)

    def exhausted(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.uint8:
            raise torch.OutOfMemoryError("Tried to allocate more than there is")
        return real(shape, strides, dtype)

    monkeypatch.setattr(_private, name, exhausted)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate more than there is") as raised:
        torch_api.select_topk(*arguments, **case.attrs)
    (note,) = raised.value.__notes__
    nbytes = torch_api.select_topk.plan(*arguments, **case.attrs).workspace_bytes
    assert note.startswith("select_topk: results ") and f" and {nbytes} bytes of workspace" in note
    monkeypatch.undo()
    kit.assert_bits_equal("indices", torch_api.select_topk(*arguments, **case.attrs), want)


@pytest.mark.gpu
def test_out_of_memory_on_the_device() -> None:
    """The allocator's own limit: torch's error, nothing written, the same call works with room."""
    logits = torch.randn(64, 65536, device="cuda")
    ends = torch.full((64,), 65536, dtype=torch.int32, device="cuda")
    want = torch_api.select_topk(logits, ends, k=2048)
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(used)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch_api.select_topk(logits, ends, k=2048)
        assert raised.value.__notes__[0].startswith("select_topk: results ")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    kit.assert_bits_equal("indices", torch_api.select_topk(logits, ends, k=2048), want)


@pytest.mark.gpu
def test_a_kernel_that_could_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has no memory left for the code: its error, and the same call works with room."""
    op = registry()["sparse_mla"]
    arguments = kit.torch_inputs(op, kit.make(kit.smallest(op)), "cuda")
    attrs = kit.smallest(op).attrs | {"softmax_scale": 0.765432}  # compiled in, so that no test has loaded the kernels

    def exhausted(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(driver.active.utils, "load_binary", exhausted)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            torch_api.sparse_mla(*arguments, **attrs)
    monkeypatch.undo()
    out, want = (
        torch_api.sparse_mla(*arguments, **attrs)[0],
        torch_api.sparse_mla(*arguments, **attrs, implementation="reference")[0],
    )
    assert torch.allclose(out.float(), want.float(), 2**-6, 2**-7)


def fork_once(device: str) -> None:
    """Raise unless a fork of this process does as the test says."""
    op = registry()["map_slots"]
    case = op.cases[0]
    arguments = kit.torch_inputs(op, kit.make(case), device)
    want = torch_api.map_slots(*arguments, **case.attrs)
    assert _prepared.call_cache.prepared
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if _prepared.call_cache.prepared or _prepared.call_cache.recent:
                code = 4
            else:
                again = torch_api.map_slots(*arguments, **case.attrs)
                code = 0 if device == "cpu" and torch.equal(again[0], want[0]) else 2
        except UnsupportedError as error:
            refused = str(error) == (
                "map_slots: process was forked after CUDA was initialised, supported: processes that are spawned"
            )
            code = 0 if device == "cuda" and refused else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kit.assert_bits_equal("slots", torch_api.map_slots(*arguments, **case.attrs)[0], want[0])


def test_a_forked_process_starts_from_nothing(device: str) -> None:
    """On the CPU a forked process works; with CUDA it is refused, and the process it came from goes on."""
    parent = multiprocessing.get_context("spawn").Process(target=fork_once, args=(device,))  # one without JAX's threads
    parent.start()
    parent.join()
    assert parent.exitcode == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device() -> None:
    """Tensors on a GPU that is not the current one: the call runs where they are and leaves the current one alone."""
    current = torch.cuda.current_device()  # that of the tests before in this process
    other = (current + 1) % torch.cuda.device_count()
    for op in registry().values():
        case = op.cases[0]
        here = kit.torch_inputs(op, kit.make(case), f"cuda:{current}")
        there = kit.torch_inputs(op, kit.make(case), f"cuda:{other}")
        want = kit.as_tuple(getattr(TORCH_OPS, op.name)(*here, **case.attrs))
        got = kit.as_tuple(getattr(TORCH_OPS, op.name)(*there, **case.attrs))
        assert torch.cuda.current_device() == current
        for name in op.mutates:
            want, got = (*want, here[list(op.tensors).index(name)]), (*got, there[list(op.tensors).index(name)])
        assert got and all(tensor.get_device() == other for tensor in got)
        where = None
        if op.partial:
            where = kit.written(op, op.reference(**kit.make(case), **kit.attributes(op, case)))
        for a, b in zip(got, want, strict=True):
            kit.assert_bits_equal(op.name, a, b, where)
