"""PyTorch's launcher in C (xmla/torch_api/launcher.c) above a driver that notes launches: no GPU is needed."""

import ctypes
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import kit
import pytest
import torch
from triton.runtime.build import compile_module_from_src

import xmla.torch_api
from xmla._frameworks import LAUNCHERS
from xmla.core.op import Calls, Case, Op, Start, plan_call, trace_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import H100, Spec
from xmla.torch_api import _launch, _prepared, _private, _run
from xmla.torch_api._arrays import from_strided

DEVICE, STREAM, WARPS, SHARED = 3, 7, 4, 100
PLAIN = SimpleNamespace(
    launch=None, launch_cooperative_grid=False, launch_pdl=False, arg_annotations=(), kernel_signature=b"",
    global_scratch_size=0, profile_scratch_size=0, gsan_enabled=False,
)  # fmt: skip


@pytest.fixture(scope="session")
def noting() -> Any:
    """The extension with that driver, which gives its lines by `noted`."""
    source = (Path(__file__).parent / "shared" / "torch_launcher_on_host.c").read_text()
    launcher = files("xmla.torch_api")
    # In one text, by which Triton knows what it has compiled.
    source = source.replace('#include "xmla/torch_api/launcher.c"', (launcher / "launcher.c").read_text())
    headers = [str(files("triton.backends.nvidia") / "include")]
    module = compile_module_from_src(source, "xmla_launcher", include_dirs=headers)
    library = ctypes.CDLL(module.__file__)
    library.noted_launches.restype = ctypes.c_char_p
    return SimpleNamespace(
        Kernels=module.Kernels, library=library,
        noted=lambda: [[*map(int, line.split())] for line in library.noted_launches().decode().splitlines()],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def extension(noting: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_launch, "_extension", lambda: noting)
    yield
    ctypes.c_int.in_dll(noting.library, "next_result").value = 0
    noting.noted()


def compiled(starts: tuple[Start, ...], run: Any = PLAIN) -> list[tuple[Any, Start]]:
    """What stands in for compiled kernels: the function of each is its place."""
    facts = {"run": run, "packed_metadata": (WARPS, 1, SHARED)}
    return [(SimpleNamespace(function=place, **facts), start) for place, start in enumerate(starts)]


def replace_in(facts: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(facts) | changes)


def tensors_of(op: Op, case: Case) -> list[torch.Tensor | None]:
    arrays = kit.make(case)
    return [from_strided(arrays[name], "cpu") if name in arrays else None for name in op.tensors]


def calls_of(op: Op, case: Case) -> tuple[Calls, tuple[int, ...]]:
    """All calls of a case's sizes and others, and the numbers of its own."""
    arrays = kit.make(case)
    specs = {name: Spec.of_numpy(arrays[name]) for name in op.tensors if name in arrays}
    template = trace_call(op, tuple(map(specs.get, op.tensors)), op.attributes(**case.attrs), H100, None)
    calls = template.calls([specs])
    *_, numbers, _ = calls.function(*calls.sizes)[1]
    return calls, numbers


def launches_of(plan: Plan, pointers: dict[str, int], space: int) -> list[list[int]]:
    """The lines of a plan's launches."""
    pointers = pointers | {name: space + offset for name, offset in plan.workspace.items()}
    return [
        [place, launch.grid[0], 32 * WARPS, SHARED, int(launch.starts_early(first=place == 0)), STREAM,
         *map(pointers.get, launch.reads), *launch.size_values, *map(pointers.get, launch.writes)]
        for place, launch in enumerate(plan.active)
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_launches_are_those_of_the_plan(op: Op, case: Case, noting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, and one after the other."""
    calls, numbers = calls_of(op, case)
    (specs,) = calls.places
    plan, _ = plan_call(op, tuple(map(specs.get, op.tensors)), calls.attrs, H100)
    inputs = [1 << 40 | place << 20 for place, _ in enumerate(specs)]
    results = [torch.empty(1) for _ in plan.results]
    space = torch.empty(1, dtype=torch.uint8) if plan.workspace else None
    pointers = dict(zip([*specs, *plan.results], [*inputs, *(tensor.data_ptr() for tensor in results)], strict=True))
    wanted = launches_of(plan, pointers, 0 if space is None else space.data_ptr())
    kernels = _launch.batch_launcher(DEVICE, compiled(calls.starts[0]))
    assert kernels is not None
    kernels(numbers)(STREAM, inputs, results, space)
    assert noting.noted() == wanted
    kernels(numbers)(STREAM, tuple(inputs), tuple(results), space)
    assert noting.noted() == wanted and noting.library.noted_device() == DEVICE
    seen: list[list[int]] = []

    def bound(kernel: Any, _: Any, early: bool) -> Any:
        facts = [32 * WARPS, SHARED, int(early)]
        return lambda programs, stream, enter, leave, arguments: seen.append(
            [kernel.function, programs, *facts, stream, *arguments]
        )

    monkeypatch.setattr(_launch, "bind_launch", bound)
    launch_each = _launch.sequential_launcher(compiled(calls.starts[0]), len(inputs), len(results))
    launch_each(numbers, STREAM, None, None, inputs, results, space)
    assert seen == wanted


def test_numbers_that_are_missing_are_refused() -> None:
    calls, numbers = calls_of(*kit.all_cases()[0])
    kernels = _launch.batch_launcher(DEVICE, compiled(calls.starts[0]))
    assert kernels is not None
    with pytest.raises(ValueError, match="fewer numbers than the launches name"):
        kernels(numbers[:-1])
    with pytest.raises(TypeError):
        kernels((*numbers[:-1], "1"))


@pytest.mark.parametrize("profiled", [False, True])
def test_launches_are_on_the_current_stream_of_the_calls_gpu(
    profiled: bool, noting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, numbers = calls_of(*kit.all_cases()[0])
    streams: list[int] = []
    kernels = _launch.batch_launcher(DEVICE, compiled(calls.starts[0]))
    assert kernels is not None
    prepared: Any = SimpleNamespace(
        ordinal=DEVICE,
        numbers=numbers,
        family=SimpleNamespace(in_turn=lambda _, stream, *__: streams.append(stream)),
        launch_all=kernels(numbers),
    )
    monkeypatch.setattr(_private, "current_stream", {DEVICE: STREAM}.__getitem__)
    monkeypatch.setattr(_run, "profiler_hooks", lambda: (print, print) if profiled else (None, None))
    results = [torch.empty(1) for _ in calls.dtypes]
    space = torch.empty(1, dtype=torch.uint8)
    _run._launch(registry()["map_slots"], [], prepared, [0 for _ in calls.places[0]], results, space)
    lines = noting.noted()
    assert [*streams, *(line[5] for line in lines)] == [STREAM] * (1 if profiled else len(calls.starts[0]))


@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_a_profiler_sees_the_launches_that_are_made_without_one(
    op: Op, case: Case, noting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call that was planned ahead."""
    kernels: dict[Any, Any] = {}
    seen: list[list[int]] = []

    def launch(programs: int, *words: Any) -> None:
        stream, function, early, arguments = words[2], words[3], words[5], words[-1]
        seen.append([function, programs, 32 * WARPS, SHARED, int(early), stream, *arguments])

    def load(kernel: Any, *_: Any) -> Any:
        facts = {"run": replace_in(PLAIN, launch=launch), "packed_metadata": (WARPS, 1, SHARED)}
        return kernels.setdefault(kernel, SimpleNamespace(function=len(kernels), _init_handles=tuple, **facts))

    monkeypatch.setattr(_prepared, "compiled", load)
    monkeypatch.setattr(_prepared, "device_of", lambda _: H100)
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    monkeypatch.setattr(_private, "current_stream", {DEVICE: STREAM}.__getitem__)
    monkeypatch.setattr(_private, "is_in_bad_fork", lambda: False)
    tensors = tensors_of(op, case)
    attrs, specs = op.attributes(**case.attrs), _prepared.present_specs(op, tensors)
    template = trace_call(op, tuple(map(specs.get, op.tensors)), attrs, H100, None)
    _prepared.plan_ahead(template.calls([specs]), torch.device("cuda", DEVICE))
    kind, *_ = _prepared.call_cache.ahead  # and those that name fewer formats
    on_cpu, sizes, _ = _prepared.read(op, tensors, attrs, None)
    assert _prepared.kind_of_specs(op, specs, attrs, DEVICE) == kind
    assert _prepared.kind_of_specs(op, specs, attrs, -1) == on_cpu
    prepared = _prepared.call_cache.kind(kind).prepared(sizes, attrs)
    assert prepared is not None and prepared.family.in_turn is None
    results = [torch.empty(1) for _ in prepared.results]
    space = torch.empty(1, dtype=torch.uint8) if prepared.workspace_bytes else None
    pointers = [1 << 40 | place << 20 for place, _ in enumerate(specs)]
    _run._launch(op, tensors, prepared, pointers, results, space)
    wanted = noting.noted()
    monkeypatch.setattr(_run, "profiler_hooks", lambda: (None, print))
    prepared.launch_all = None
    for _ in range(2):
        _run._launch(op, tensors, prepared, pointers, results, space)
        assert seen == wanted
        seen.clear()


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_free_threaded_python_stays_so(noting: Any) -> None:
    """Importing an extension that does not say that it needs no GIL turns it on, but under PYTHON_GIL=0."""
    text = f"""if True:
        import sys
        from importlib.util import module_from_spec, spec_from_file_location

        module_from_spec(spec_from_file_location("xmla_launcher", {noting.library._name!r}))
        print(sys._is_gil_enabled())"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    assert subprocess.check_output([sys.executable, "-c", text], env=environment, text=True) == "False\n"


@pytest.mark.parametrize(
    "change", [{"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"gsan_enabled": True}], ids=str
)
def test_another_launcher_is_left_alone(change: dict[str, Any]) -> None:
    calls, _ = calls_of(*kit.all_cases()[0])
    assert _launch.batch_launcher(DEVICE, compiled(calls.starts[0], replace_in(PLAIN, **change))) is None


def test_without_the_extension_launches_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, _ = calls_of(*kit.all_cases()[0])
    monkeypatch.setattr(_launch, "_extension", lambda: None)
    assert _launch.batch_launcher(DEVICE, compiled(calls.starts[0])) is None


def test_an_extension_that_cannot_be_compiled_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()

    def compile_module(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(_launch, "compile_module_from_src", compile_module)
    with caplog.at_level("INFO", "xmla"):
        assert _launch._extension.__wrapped__() is None
    assert "launcher.c was not compiled, so that eager calls take longer: Failed to find C compiler" in caplog.text


def test_a_wheels_extension_that_does_not_load_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    shipped = tmp_path / "xmla_launcher.abi3.so"
    monkeypatch.setitem(LAUNCHERS, "torch", shipped)
    monkeypatch.setattr(xmla.torch_api, "__path__", [str(tmp_path)])
    monkeypatch.setattr(_launch, "compile_module_from_src", lambda *_, **__: "compiled here")
    shipped.write_bytes(b"no library")
    with caplog.at_level("INFO", "xmla"):
        assert _launch._extension.__wrapped__() == "compiled here"
    assert "the wheel's launcher of PyTorch does not load and is compiled here: " in caplog.text


def test_the_wheels_extension_is_not_compiled(noting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    shipped = tmp_path / "xmla_launcher.abi3.so"
    monkeypatch.setitem(LAUNCHERS, "torch", shipped)
    monkeypatch.setattr(xmla.torch_api, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "xmla.torch_api.xmla_launcher", raising=False)
    shipped.write_bytes(Path(noting.library._name).read_bytes())
    assert _launch._extension.__wrapped__().__file__ == str(shipped)


def test_a_failing_launch_is_told_and_ends_the_call(noting: Any) -> None:
    launches = noting.Kernels(DEVICE, [(place, WARPS, 1, 0, False, 0, ()) for place in range(2)])((1,))
    ctypes.c_int.in_dll(noting.library, "next_result").value = 1
    with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: an error of a test$"):
        launches(STREAM, [], [], None)
    assert len(noting.noted()) == 1


def test_wrong_arguments_are_errors(noting: Any) -> None:
    launches = noting.Kernels(DEVICE, [(1, WARPS, 1, 0, False, 0, ((0, -1),))])((1,))
    with pytest.raises(TypeError):
        launches(STREAM, [1], [])
    with pytest.raises(TypeError):
        launches(STREAM, ["address"], [], None)
    with pytest.raises(AttributeError, match="data_ptr"):
        launches(STREAM, [1], [object()], None)
    with pytest.raises(TypeError):
        noting.Kernels(DEVICE, [(1, WARPS, 1, 0, False, 0, (("place", 0),))])
    with pytest.raises(TypeError):
        type(launches)()
    assert not noting.noted()


def test_calls_of_many_threads_do_not_mix(noting: Any) -> None:
    arguments = tuple((place, 1 + place) for place in range(40))
    launches = noting.Kernels(DEVICE, [(1, WARPS, 1, 0, False, 0, arguments)])((1, *range(40)))
    threads = [
        Thread(target=lambda base=base: [launches(STREAM, [base] * 40, [], None) for _ in range(20)])
        for base in range(0, 4000, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line[6:] for line in noting.noted()) == sorted(
        [base + place for place in range(40)] for base in range(0, 4000, 1000) for _ in range(20)
    )
