"""What every module keeps to: no circles of imports, no op below the ops, no framework in the core, names, errors."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import xmla
from xmla.core.registry import FAMILIES, registry

PACKAGE = Path(xmla.__file__).parent
ROOT = PACKAGE.parent


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """The modules of xmla that each of them imports, wherever in the file: in functions and for type checkers too."""
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in files else node.module for name in inner}
        graph[module] = named & files.keys()
    return graph


def test_no_circle_of_imports() -> None:
    try:
        order = [*TopologicalSorter(imports()).static_order()]
    except CycleError as error:
        raise AssertionError(f"circle: {' → '.join(error.args[1])}") from None
    assert {"xmla.core.op.op", "xmla.core.registry", "xmla.torch_api._ops", "xmla.jax_api._primitive"} <= set(order)


def test_nothing_below_the_ops_imports_one() -> None:
    for module, named in imports().items():
        if not module.startswith("xmla.core.ops"):
            found = {name for name in named if name.startswith("xmla.core.ops.")}
            assert not found or module == "xmla.core.registry", f"{module} imports {found}"


# Of the core, from below; the first are modules that the command has before NumPy.
ROOMS = ("errors", "config", "versions", "values", "formats", "lang", "call", "plan", "compile", "op", "ops", "debug")
# What is imported past the façade of its room: modules with state, what is loaded late, and one module a task.
DOORS = ("values.device", "compile.interpreter", "debug", "formats", "lang", "ops")


def room_of(module: str) -> str:
    """The room of the core that a module is in; registry, support, parallel and other packages are in none."""
    name = module.removeprefix("xmla.core.").partition(".")[0]
    return name if name in ROOMS and module.startswith("xmla.core.") else ""


def test_rooms_of_the_core_import_downwards_and_through_facades() -> None:
    for module, named in imports().items():
        own = room_of(module)
        for name in named:
            room, path = room_of(name), name.removeprefix("xmla.core.")
            if room and room != own:
                assert not own or ROOMS.index(room) < ROOMS.index(own), f"{module} imports {name}, of a room above it"
                assert path == room or path.startswith(DOORS), f"{module} imports {name}, expected xmla.core.{room}"


def test_no_room_imports_a_private_name_of_another() -> None:
    for file in PACKAGE.rglob("*.py"):
        own = room_of(module_of(file))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (room := room_of(node.module or "")) and room != own:
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert private == [], f"{file.relative_to(PACKAGE)}:{node.lineno}: {private} of xmla.core.{room}"


def test_families_of_ops_import_each_other_in_no_circle() -> None:
    """A module of a family imports all of it first, through its `__init__`; each op is of one family."""
    families: dict[str, set[str]] = {family.__name__: set() for family in FAMILIES}
    for module, named in imports().items():
        for family in families:
            if module.startswith(f"{family}."):
                others = families.keys() - {family}
                families[family] |= {other for other in others for name in named if f"{name}.".startswith(f"{other}.")}
    [*TopologicalSorter(families).static_order()]
    folders = {file.parent for file in (PACKAGE / "core" / "ops").glob("*/*/__init__.py")}
    derivatives = {file.parent for file in (PACKAGE / "core" / "ops").glob("*/*/backward/__init__.py")}
    assert {Path(inspect.getfile(op.prototype)).parent for op in registry().values()} == folders | derivatives


# Folders of tests/ whose files are no tests: what tests share, and what they start or are compared with.
FIXTURES = ("emulator", "jax_programs", "parallel", "programs", "shared", "core/compiled")


def test_the_package_stands_alone() -> None:
    """What is not in the wheel may import the package, and the package none of it."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            apart = [name for name in names if name.split(".")[0] in ("benchmarks", "tools", "tests")]
            assert not apart, f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)} imports {apart}"


def test_tests_are_tests() -> None:
    """But for folders of fixtures, and for what tests of engines start, which stands beside them."""
    tests = Path(__file__).parent.parent
    for file in tests.rglob("*.py"):
        place = str(file.relative_to(tests))
        if not place.startswith((*FIXTURES, "vllm_engine", "sglang_engine")) and place != "conftest.py":
            assert file.name.startswith("test_"), f"tests/{place} is no test: tools/, or one of {', '.join(FIXTURES)}"


def imported(modules: str, among: tuple[str, ...]) -> str:
    """The modules among some that importing others leads to, in a process of its own."""
    code = f"import sys\nimport {modules}\nprint([name for name in {among} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_core_imports_no_framework() -> None:
    modules = "xmla, xmla.core.registry, xmla.core.compile.interpreter, xmla.interop"
    assert imported(modules, ("torch", "jax", "jaxlib", "jax_triton")) == "[]"


@pytest.mark.parametrize("front_end", ["torch_api", "jax_api"])
def test_a_front_end_does_not_import_what_the_command_needs(front_end: str) -> None:
    assert imported(f"xmla.{front_end}", ("typer", "rich")) == "[]"


def test_no_assert_guards_a_user() -> None:
    """`assert` vanishes under -O; what a user can get wrong raises ArgumentError or UnsupportedError."""
    for file in Path(xmla.__file__).parent.rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            bare = line.strip().startswith("assert ")
            assert not bare or line.endswith("# checked by bind"), f"{file.name}:{number}: {line.strip()}"


PARTICIPLES = {"found", "given", "told", "made", "wanted", "shown"}


def test_names_say_what_a_value_is() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[:2] in (("core", "ops"), ("core", "lang")):
            continue  # digests of kernels follow names
        for node in ast.walk(ast.parse(file.read_text())):
            name = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.FunctionDef):
                name = node.name
            assert name.strip("_") not in PARTICIPLES, f"{file.relative_to(PACKAGE)}:{node.lineno}: {name}"


def test_no_framework_is_named_in_an_import_of_the_core() -> None:
    for file in (Path(xmla.__file__).parent / "core").rglob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            assert words[:1] not in (["import"], ["from"]) or words[1].split(".")[0] not in ("torch", "jax"), (
                file,
                line,
            )


# What calls ops for a user: everything else takes what the declarations say.
CALLERS = (
    "core/ops/", "core/registry.py", "core/models/", "torch_api/_functions.py", "torch_api/parallel.py",
    "jax_api/_functions.py", "jax_api/parallel.py", "layouts.py", "compat/", "maxtext.py", "megatron.py", "vllm/",
    "sglang/", "demo/", "bench/", "transformers/",
)  # fmt: skip


def test_no_other_file_knows_an_op_by_name() -> None:
    """Op names in code, not in docstrings: a new op touches its folder and the front-ends' lists alone."""
    ops = set(registry())
    for file in PACKAGE.rglob("*.py"):
        if str(file.relative_to(PACKAGE)).startswith(CALLERS):
            continue
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            named = getattr(node, "value", None) if isinstance(node, ast.Constant) else getattr(node, "id", None)
            assert getattr(node, "attr", named) not in ops, f"{file}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


# Peers, engines and trainers, which only their own environments have.
ELSEWHERE = {"jla", "nemo_automodel", "playwright", "sglang", "tokamax", "torchtitan", "verl", "vllm", "xtuner"}


def test_programs_that_seldom_run_import_what_is_there() -> None:
    """Engines' tests run in environments of their own: a module that has moved is not missed before."""
    folders = [ROOT / name for name in ("benchmarks", "docs", "examples", "tests", "tools")]
    beside = [
        ROOT,
        *(ROOT / "tests" / name for name in ("", "shared", "parallel", "vllm_engine")),
        ROOT / "examples/trainers",
    ]
    missing = []
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names} - ELSEWHERE - sys.stdlib_module_names:
                here = any(
                    (place / name).is_dir() or (place / f"{name}.py").exists() for place in (*beside, file.parent)
                )
                if not here and importlib.util.find_spec(name) is None:
                    missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert missing == []
