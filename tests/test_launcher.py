"""JAX's launcher (xmla/jax_api/launcher.cc) above a driver that notes launches: no GPU is needed."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import kit
import noting as stand_in
import numpy as np
import pytest
from noting import WARPS, Noting

from xmla import ArgumentError, UnsupportedError
from xmla._frameworks import LAUNCHERS
from xmla.core.op import Case, Op, plan_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import H100, Device
from xmla.jax_api import _launcher
from xmla.jax_api._run import spec_of

# More than 48 KB of shared memory has to be asked for, which the driver of the tests adds to a kernel's name.
SHARED = {"small": 1 << 10, "large": 100 << 10}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launcher") / "noting.so"
    stand_in.build(path)
    return path


@pytest.fixture(scope="session")
def registered(library: Path) -> Noting:
    return Noting(library)


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    """Beside a GPU too: the driver of the tests is registered for the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=SHARED)
def noting(request: pytest.FixtureRequest, registered: Noting, monkeypatch: pytest.MonkeyPatch) -> Noting:
    """The launcher with kernels of some shared memory, none of which is compiled."""
    registered.shared_bytes = SHARED[request.param]
    monkeypatch.setattr(_launcher, "compiled", registered.compiled)
    monkeypatch.setattr(_launcher, "library", lambda: registered.library)
    return registered


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], object]]:
    """What `library` gives with CXX, as on a machine with CUDA's driver whose cache is empty."""
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: "the driver" if name == "libcuda.so.1" else load(name))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(_launcher, "SOURCE", "../../tests/shared/launcher_on_host.cc")  # which has a driver of its own
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def build(compiler: str) -> object:
        monkeypatch.setenv("CXX", compiler)
        _launcher.library.cache_clear()
        return _launcher.library()

    yield build
    _launcher.library.cache_clear()


def test_cxx_may_have_options(building: Callable[[str], object]) -> None:
    """Without any it is the compiler of the library that the wheel's stands for, below."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("no C++ compiler")
    assert building(f"{compiler} -O1 '-DNAME=two words'") is not None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/g++", "No such file or directory: '/nowhere/g++'"),
        ("ccache-that-is-not-there g++", "No such file or directory: 'ccache-that-is-not-there'"),
        ("false -O1", "false -O1 failed on "),
        ("true", "No such file or directory: "),
        ("g++ 'unclosed", "No closing quotation"),
    ],
)
def test_a_compiler_that_fails_is_told_once(
    compiler: str, reason: str, building: Callable[[str], object], caplog: pytest.LogCaptureFixture
) -> None:
    """As one that is missing: JAX then launches by jaxlib, and no later call tries it again."""
    assert building(compiler) is None and _launcher.library() is None
    (warning,) = caplog.messages
    assert "JAX launches every kernel by itself, which is slower: " in warning and reason in warning


def test_the_wheels_library_needs_no_compiler(
    library: Path, building: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(LAUNCHERS, "jax", library)
    assert building("/nowhere/g++") is not None
    assert not caplog.messages


@pytest.mark.parametrize("fault", ["file", "version"])
def test_a_wheels_library_that_does_not_load_is_built_here(
    fault: str, library: Path, building: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One of another machine, or of a version of XLA's FFI that this jaxlib refuses."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("no C++ compiler")
    shipped = tmp_path / "launcher.so"
    shipped.write_bytes(b"no library" if fault == "file" else library.read_bytes())
    monkeypatch.setitem(LAUNCHERS, "jax", shipped)
    if fault == "version":
        refusals = iter([jax.errors.JaxRuntimeError("XLA FFI handler registration failed")])

        def register(*_: object, **__: object) -> None:
            for refusal in refusals:
                raise refusal

        monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    with caplog.at_level("INFO", "xmla"):
        assert building(compiler) is not None
    assert "the wheel's launcher of JAX does not load and is built here: " in caplog.text


def run(op: Op, inputs: dict[str, np.ndarray], attrs: Mapping[str, Any], device: Device) -> tuple[Plan, dict[str, int]]:
    """A call's plan, run on the CPU by the launcher, and the address of each of its arrays that has elements."""
    given = {n: a for n, a in zip(op.tensors, kit.jax_inputs(op, inputs), strict=True) if a is not None}
    specs = {name: spec_of(array) for name, array in given.items()}
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), op.attributes(**attrs), device)
    if not plan.active:
        return plan, {}
    found = jax.jit(lambda arrays: _launcher.run(plan, arrays, specs, op.mutates, device))(given)
    arrays = given | dict(zip([*plan.results, *op.mutates], found, strict=True))
    return plan, {name: array.unsafe_buffer_pointer() for name, array in arrays.items() if array.size}


def check(plan: Plan, addresses: Mapping[str, int], noting: Noting) -> None:
    """What reached the driver is the plan's launches, each with its arguments in order."""
    noted = noting.launches()
    assert len(noted) == len(plan.active)
    starts = set()  # of the workspace, as each of its buffers has it
    for place, (launch, line) in enumerate(zip(plan.active, noted, strict=True)):
        name = launch.name if noting.shared_bytes == SHARED["small"] else f"{launch.name}+{noting.shared_bytes}"
        early = int(launch.starts_early(first=place == 0))
        assert line[:5] == [name, *map(str, (launch.grid[0] * launch.num_ctas, 32 * WARPS, noting.shared_bytes, early))]
        arguments = [int(value) for value in line[5:]]
        assert len(arguments) == len(launch.reads) + len(launch.sizes) + len(launch.writes) + 2
        assert arguments[-2:] == [0, 0]  # scratch memory
        sizes = len(launch.reads), len(launch.reads) + len(launch.sizes)
        assert tuple(arguments[slice(*sizes)]) == launch.size_values
        pointers = [*arguments[: sizes[0]], *arguments[sizes[1] : -2]]
        for array, pointer in zip([*launch.reads, *launch.writes], pointers, strict=True):
            if array in addresses:
                assert pointer == addresses[array], f"{launch.name}: {array}"
            elif array in plan.workspace and plan.buffers[array].nbytes:
                starts.add(pointer - plan.workspace[array])
    assert len(starts) == bool(plan.workspace_bytes)
    assert not starts & set(addresses.values())


@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_a_plans_launches_reach_the_driver(op: Op, case: Case, noting: Noting) -> None:
    plan, addresses = run(op, kit.make(case), case.attrs, H100)
    if not plan.active:
        pytest.skip("the call launches nothing")
    check(plan, addresses, noting)


@pytest.mark.parametrize("noting", ["small"], indirect=True)
def test_arrays_without_elements_are_passed_too(noting: Noting) -> None:
    """Each axis at 0: a launch may still have work, though the call has not a byte of workspace."""
    launched = set()
    for op in registry().values():
        case = kit.smallest(op)
        for axis in kit.axes(op, kit.make(case)):
            try:
                plan, addresses = run(op, kit.with_axis(op, kit.make(case), axis, 0), case.attrs, H100)
            except (ArgumentError, UnsupportedError):
                continue
            if plan.active and addresses.keys() & {*plan.results, *op.mutates}:  # else XLA makes no call
                check(plan, addresses, noting)
                launched.add(op.name)
    nothing_left = {
        "compress_rows",
        "indexer_logits",
        "quantize_indexer_query",
        "write_indexer_cache",
        "write_mla_cache",
    }
    assert registry().keys() - launched == nothing_left, "of these no axis leaves results"


def test_the_driver_failing_and_an_unknown_kernel_are_told(noting: Noting) -> None:
    op = registry()["map_slots"]
    noting.library.fail_with(1)
    try:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="xmla: launch of map_slots_kernel on device 0: CUDA_ERROR"
        ):
            run(op, kit.make(op.cases[1]), op.cases[1].attrs, H100)
    finally:
        noting.library.fail_with(0)


def test_a_program_of_another_process_is_refused(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> int:
        return 1

    monkeypatch.setattr(_launcher, "_number", other)
    op = registry()["map_slots"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="another process has compiled the program"):
        run(op, kit.make(op.cases[1]), op.cases[1].attrs, H100)


@pytest.mark.parametrize("facts", [{"global_scratch_size": 8}, {"num_ctas": 2}], ids=str)
def test_a_kernel_that_needs_scratch_memory_or_a_cluster_is_refused(
    facts: dict[str, int], noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*given: Any) -> SimpleNamespace:
        kernel = noting.compiled(*given)
        vars(kernel.metadata).update(facts)
        return kernel

    monkeypatch.setattr(_launcher, "compiled", compiled)
    op = registry()["map_slots"]
    with pytest.raises(RuntimeError, match="map_slots_kernel needs scratch memory or a cluster, which JAX's launcher "):
        run(op, kit.make(op.cases[1]), op.cases[1].attrs, H100)


@pytest.mark.parametrize("noting", ["small"], indirect=True)
@pytest.mark.parametrize(
    ("aliases", "places", "message"),
    [
        ({}, [0], "operand 0, which is updated in place, and its new value two places in memory"),
        ({0: 0}, [0, 0], "operands 0 and 0, which are both updated in place, one place in memory"),
    ],
)
def test_places_that_no_kernel_bears_are_refused(
    noting: Noting, aliases: dict[int, int], places: list[int], message: str
) -> None:
    """By a call that tells XLA another thing than the launcher."""
    call = jax.ffi.ffi_call(_launcher.TARGET, [jax.ShapeDtypeStruct((8,), np.float32)], input_output_aliases=aliases)
    nothing = {name: np.zeros(0, np.int32) for name in ("programs", "early", "counts", "places")}
    nothing |= {name: np.zeros(0, np.int64) for name in ("kernels", "values")}
    updated = np.array(places, np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            jax.jit(lambda a: call(a, mutated=updated, updated=updated, **nothing))(np.zeros(8, "f4"))
        )


def test_programs_of_every_kind_are_taken(library: Path) -> None:
    """Over one device a call is made once; unused ones are dropped; over several devices XLA partitions it."""
    script = Path(__file__).parent / "parallel/jax_launcher.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}  # which has tests/shared
    command = [sys.executable, str(script), str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 8
