"""Chooses the interpreter where there is no GPU, before NumPy, Triton, JAX or torch are imported."""

import gc
import os
import re
import sys
from pathlib import Path

from tools.environment import EVERYTHING as EVERYTHING
from tools.environment import HAS_GPU

gc.disable()  # until tests are collected: modules and tests are kept, and looking through them takes a third of it

# Programs that tests start find this tree's packages as tests do: `tools`, which nobody installs, and `xmla` of this
# tree where another one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of NumPy and torch spin where other workers compute
    if "XMLA_TEST_GPUS" in os.environ:  # workers take these GPUs in turn
        gpus = os.environ["XMLA_TEST_GPUS"].split(",")
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
# Tests start a hundred processes, each of which would compile the package's Python again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from collections import Counter  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from importlib.metadata import PackageNotFoundError, version  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tools.kept import OLD  # noqa: E402
from xmla import torch_api  # noqa: E402
from xmla.core.compile import interpreter  # noqa: E402
from xmla.core.versions import TRANSFORMERS, older  # noqa: E402

# Other inputs in every run, of which a failure prints the line that repeats it: the same few would be all that is ever
# tried. Interpreted kernels take too long to shrink and explain one.
hypothesis.settings.register_profile(
    "xmla", print_blob=True, database=None, deadline=None, max_examples=25,
    suppress_health_check=list(hypothesis.HealthCheck), phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)  # fmt: skip
hypothesis.settings.load_profile("xmla")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="of tests that take every case of every op, the first")
    parser.addoption("--no-shortcuts", action="store_true", help="interpret kernels by Triton's own code alone")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.no_shortcuts:
        interpreter.SHORTCUTS = ()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.one_case:
        items[:] = [item for item in items if not _is_later_case(item)]
    if hasattr(config, "workerinput"):  # the longest first, so that workers end together
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """xdist tells groups apart by what it appends to the names of their tests, and tests by their names."""
    gc.freeze()
    gc.enable()
    if unstable := [item.nodeid for item in session.items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests have addresses, which differ between processes: {unstable}")
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if session.config.option.__dict__.get("loadgroup") and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError(f"pytest {pytest.__version__} and pytest-xdist do not group tests")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions would tell of what they take for leaks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What a run took time for: kernels that every run compiles again, and files of tests."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    digests = sorted(text for each in reports for name, text in each.user_properties if name == OLD and text)
    if digests:
        terminalreporter.write_line(f"old digests, which `make matrix` writes anew: {', '.join(digests)}")
    if config.option.durations is not None:
        seconds = Counter[str]()
        for kind in ("", "passed", "failed", "skipped"):  # setup and teardown that pass are of no kind
            for each in terminalreporter.stats.get(kind, []):
                if isinstance(each, pytest.TestReport):  # not a file that is skipped as a whole
                    seconds[each.location[0]] += each.duration
        slowest = ", ".join(f"{file} {taken:.0f} s" for file, taken in seconds.most_common(25))
        terminalreporter.write_line(f"slowest files: {slowest}")


def _is_later_case(item: pytest.Item) -> bool:
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    return {"op", "case"} <= chosen.keys() and chosen["case"] is not chosen["op"].cases[0]


@pytest.fixture(autouse=HAS_GPU)
def _device_memory_back() -> Iterator[None]:
    """The other workers have the same GPU."""
    yield
    if torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=not HAS_GPU)
def _cpu_tensors_only_where_a_gpu_would_stand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to run ops on CPU tensors, but in tests that put theirs on `device` (or DEVICE): a GPU interprets nothing.

    One whose code chooses the device itself, or that means the CPU, says so by `usefixtures("device")`.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("tensors on the CPU in a test without the fixture `device`: it fails on a GPU machine")

    if "device" not in request.fixturenames and not hasattr(request.module, "DEVICE"):
        monkeypatch.setattr(torch_api._run, "_interpret", refuse)


def require_assembler(arch: int) -> None:
    """Skip on a GPU machine whose Triton was packed without the assembler for other architectures than its own."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        get_ptxas(arch)
    except RuntimeError as error:
        if not HAS_GPU:
            raise
        pytest.skip(f"this Triton has no assembler for sm_{arch}: {error}")


def require_tool(distribution: str) -> None:
    """Skip on a GPU machine without a tool that checks text, where a GPU makes no difference: CI has it."""
    try:
        version(distribution)
    except PackageNotFoundError:
        if not HAS_GPU:
            raise
        pytest.skip(f"text alone, checked where CI runs: needs {distribution}")


def require_transformers() -> None:
    """Skip on a GPU machine whose transformers is older than what `xmla.transformers` serves; CI has it."""
    if HAS_GPU and older("transformers", TRANSFORMERS):
        pytest.skip(f"needs transformers {TRANSFORMERS} or later", allow_module_level=True)


def marked_jax(file: Path, code: str) -> Any:
    """A file as a test's parameter, which has the mark `jax` if its program takes JAX."""
    return pytest.param(file, marks=[pytest.mark.jax] if re.search(r"\bimport jax\b|\bjax_api\b", code) else [])


@pytest.fixture(scope="session")
def device() -> str:
    """Where torch tensors live: kernels are compiled on the GPU and interpreted on the CPU."""
    return "cuda" if HAS_GPU else "cpu"
