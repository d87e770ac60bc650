"""A kernel's digest changes with its code, and with nothing else: what it spares is not compiled again."""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import conftest
import pytest
import triton
from triton import knobs

from tools import kept, support_matrix
from tools.compile_plans import identity, source
from tools.kept import file_of
from xmla.core.compile import Specialization
from xmla.core.formats.mla import V4, V32, MlaLayout
from xmla.core.plan import Constants

KERNEL = '''
from typing import NamedTuple

import triton
import triton.language as tl

STEP = tl.constexpr(2)


class Pair(NamedTuple):
    first: tl.tensor
    second: tl.tensor


@triton.jit
def scaled(x):
    """A helper."""
    return x * STEP


@triton.jit
def kernel(x_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    pair = Pair(scaled(tl.load(x_ptr + place)), place)
    tl.store(x_ptr + pair.second, pair.first)
'''


def loaded(folder: Path, text: str) -> ModuleType:
    name = "xmla.core.ops.trial"
    file = folder / f"{len(list(folder.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nSTEP", "\n# Why two.\n\n\nSTEP"),
        ("A helper.", "A helper of the kernel.\n\n    At some length."),
        ("    place = tl.arange(0, N)", "    # Each once.\n    place = tl.arange(0, N)  # one program"),
        ("import triton\n", "import math\n\nimport triton\n\nOTHER = 3\n"),
    ],
)
def test_what_the_compiler_does_not_see_leaves_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in KERNEL
    assert source(loaded(tmp_path, KERNEL.replace(old, new)).kernel) == source(loaded(tmp_path, KERNEL).kernel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constexpr(2)", "constexpr(3)"),
        ("x * STEP", "x + STEP"),
        ("tl.arange(0, N)", "tl.arange(0, N) + 1"),
        ("first: tl.tensor\n    second", "second: tl.tensor\n    first"),
        ("triton.jit\ndef scaled", "triton.jit(noinline=True)\ndef scaled"),
        ("N: tl.constexpr", "N"),
        ("import triton.language as tl", "import triton.experimental.gluon.language as tl"),
    ],
)
def test_all_that_the_compiler_sees_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in KERNEL
    with knobs.runtime.scope():
        knobs.runtime.interpret = False  # interpreted functions do not keep `noinline`
        assert source(loaded(tmp_path, KERNEL.replace(old, new)).kernel) != source(loaded(tmp_path, KERNEL).kernel)


def test_values_and_architecture_count(tmp_path: Path) -> None:
    kernel = loaded(tmp_path, KERNEL).kernel
    plain = Specialization(kernel, (("x_ptr", "*fp32"),), (("N", 16),), 4, 3)
    others = [
        Specialization(kernel, (("x_ptr", "*fp32"),), (("N", 32),), 4, 3),
        Specialization(kernel, (("x_ptr", "*fp16"),), (("N", 16),), 4, 3),
        Specialization(kernel, (("x_ptr", "*fp32"),), (("N", 16),), 8, 3),
        *(Specialization(kernel, (("x_ptr", "*fp32"),), (("N", 16), ("LAYOUT", layout)), 4, 3) for layout in (V32, V4)),
    ]
    assert len({identity(kernel, arch) for kernel in (plain, *others) for arch in (90, 100)}) == 12


def test_a_kernel_does_not_name_a_module_of_ours(tmp_path: Path) -> None:
    """Its functions would not be found."""
    text = KERNEL.replace("import triton\n", "import triton\n\nimport xmla.core.lang.offsets as helpers\n")
    with pytest.raises(TypeError, match=r"xmla\.core\.lang\.offsets: kernels name functions, classes and values"):
        source(loaded(tmp_path, text.replace("place = ", "helpers.offset_of\n    place = ")).kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Some(Constants):
    LAYOUT: MlaLayout

    @property
    def ONE(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class More(Some):
    SOURCE: Some


@pytest.mark.parametrize("value", [V32, More(LAYOUT=V4, SOURCE=Some(LAYOUT=V32))], ids=["layout", "constants"])
@pytest.mark.parametrize(("of", "name"), [(MlaLayout, "tail"), (Some, "ONE")], ids=["layout", "constants"])
def test_a_property_of_a_constant_counts(
    value: object, of: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read what follows from a layout, and from constants, too."""
    kernel = loaded(tmp_path, KERNEL).kernel
    made = Specialization(kernel, (("x_ptr", "*fp32"),), (("N", 16), ("C", value)), 4, 3)
    before = identity(made, 90)
    monkeypatch.setattr(of, name, property(lambda it: 3))
    assert (identity(made, 90) != before) == (of is MlaLayout or value is not V32)


def test_a_run_names_what_it_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    file_of("part").write_text(json.dumps({"a": "1", "b": "2", "gone": "3"}))
    said = [kept.old(*check) for check in (("new", {"a": "1"}), ("part", {"a": "1", "b": "4"}), ("part", {"a": "1"}))]
    assert said == ["new (1 of 1, such as a)", "part (1 of 2, such as b)", ""]
    test: dict[str, Any] = {"nodeid": "x.py::test", "location": ("x.py", 1, "test"), "keywords": {}, "when": "call"}
    reports = [
        pytest.TestReport(**test, outcome="passed", longrepr=None, user_properties=[(kept.OLD, text)], duration=2)
        for text in said
    ]
    skipped = pytest.CollectReport("y.py", "skipped", ("y.py", 1, "needs Hopper"), [])  # a file, which takes no time
    terminal = SimpleNamespace(
        stats={"passed": reports[:2], "failed": reports[2:], "skipped": [skipped]}, write_line=print
    )
    for durations in (None, 25):
        config = SimpleNamespace(option=SimpleNamespace(durations=durations))
        conftest.pytest_terminal_summary(terminal, config)
    digests = "old digests, which `make matrix` writes anew: new (1 of 1, such as a), part (1 of 2, such as b)"
    assert capsys.readouterr().out.splitlines() == [digests, digests, "slowest files: x.py 6 s"]


@pytest.mark.parametrize("arch", support_matrix.ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def test_the_committed_digests_are_of_this_tree(arch: int) -> None:
    """`make test` compiles a sample of what has changed; a kernel is committed with the digests of all of it."""
    file = file_of(f"triton-{triton.__version__}-sm_{arch}")
    (line,) = support_matrix.lines_of(support_matrix.SCRIPT, str(arch), "--digests")
    now, committed = line["digests"], json.loads(file.read_text())
    others = sorted(name for name in {*now, *committed} if now.get(name) != committed.get(name))
    assert not others, (
        f"{file.name} has other digests of {', '.join(others)}: run `make matrix`, which compiles what has changed, "
        "and commit tests/core/compiled"
    )
