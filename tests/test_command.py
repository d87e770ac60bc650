"""The `xmla` command as a user starts it: in a clean environment, and with a part of the frameworks."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import kit
import numpy as np
import pytest
from started import ROOT, run, short_demo, xmla

from xmla import ArgumentError
from xmla.cli.replay import run as repeat
from xmla.core.config import settings
from xmla.core.debug.checks import find_violation
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def reproduce(
    op: Op, case: Case, argument: str, value: int, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The file that XMLA_CHECK writes of a case whose every `argument` is `value`."""
    monkeypatch.setattr(settings, "reproducer_dir", folder / "calls")
    inputs = kit.make(case)
    inputs[argument][...] = value
    with monkeypatch.context() as context:
        context.setattr(settings, "check", True)
        with pytest.raises(ArgumentError, match="; xmla replay ") as raised:
            getattr(TORCH_OPS, op.name)(*kit.torch_inputs(op, inputs, device), **case.attrs)
    return Path(str(raised.value).rpartition(" ")[2])


@pytest.fixture
def file(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a failed check wrote."""
    op = registry()["map_slots"]
    return reproduce(op, op.cases[0], "indices", 10**6, device, tmp_path, monkeypatch)


def imported(file: Path) -> Iterator[str]:
    """Every module that a file names in an import, at its top or in a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))


# Which of the packages around the ops a package may import; `command` composes them all.
PACKAGES = {"bench": {"machine"}, "cli": {"machine"}, "demo": {"machine"}, "machine": set()}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_of_the_command_do_not_import_each_other(package: str) -> None:
    files = [*(ROOT / "xmla" / package).rglob("*.py")]
    found = {(file.name, name) for file in files for name in imported(file) if name.startswith("xmla.")}
    assert found
    others = {*PACKAGES, "command", "__main__"} - PACKAGES[package] - {package}
    assert [(file, name) for file, name in sorted(found) if name.split(".")[1] in others] == []


def test_importing_xmla_leaves_triton_to_the_command(tmp_path: Path) -> None:
    code = "import sys, xmla, xmla.command; print([n for n in ('triton', 'torch', 'jax', 'numpy') if n in sys.modules])"
    assert run(tmp_path, "-c", code).stdout.strip() == "[]"


def test_every_public_name(tmp_path: Path) -> None:
    """What a type checker sees is what there is, in whatever order modules were imported."""
    code = """
import ast, xmla, xmla._warmup, xmla.cli.plan
tree = ast.parse(open(xmla.__file__).read())
names = {a.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names if a.asname}
assert len(names) > 9, names
assert names == {name for name in dir(xmla) if not name.startswith("_")} & names
assert callable(xmla.warmup) and xmla.layouts.inspect and {getattr(xmla, name) for name in names}
try:
    xmla.nothing
except AttributeError as error:
    assert str(error) == "module 'xmla' has no attribute 'nothing'; ops are in xmla.torch_api and xmla.jax_api"
else:
    raise SystemExit("nothing was found")
assert names == {*xmla._MODULES, "layouts"}
"""
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


def test_verify_and_replay_need_no_variables(tmp_path: Path, file: Path) -> None:
    verified = xmla(tmp_path, "verify", "--op", "map_slots")
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.count("identical") == len(registry()["map_slots"].cases)
    replayed = xmla(tmp_path, "replay", str(file))
    assert replayed.returncode == 1, replayed.stderr
    assert "is 1000000, limit" in replayed.stdout and not replayed.stderr


@pytest.mark.parametrize(("there", "absent"), [("torch", "jax"), ("jax", "torch")])
def test_verify_and_replay_with_one_framework(there: str, absent: str, tmp_path: Path, file: Path) -> None:
    told = f"left out: {absent}, since xmla.{absent}_api needs {absent}"
    without = {"jax": "jax jaxlib jax_triton", "torch": "torch"}[absent]
    verified = xmla(tmp_path, "verify", "--op", "map_slots", without=without)
    assert verified.returncode == 0, verified.stderr
    assert told in verified.stdout and f"xmla verify, {there}, " in verified.stdout
    assert verified.stdout.count("agrees") == len(registry()["map_slots"].cases)
    assert "identical" not in verified.stdout
    replayed = xmla(tmp_path, "replay", str(file), without=without)
    assert replayed.returncode == 1, replayed.stderr
    assert told in replayed.stdout and f"{there}, slots: wrong share 0," in replayed.stdout


SHORT_DEMO = short_demo("from xmla.demo import deepseek_v32, shell", "deepseek_v32.PROMPT, shell.DECODED = 40, 2")


def test_demo_without_jax(tmp_path: Path) -> None:
    """And without the Makefile's variables, as all of these."""
    words = ("-c", SHORT_DEMO, "demo", "--json", "--out", "figures.json")
    done = run(tmp_path, *words, without="jax jaxlib jax_triton")
    assert done.returncode == 0, done.stderr
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("left out:"))
    assert told.endswith(" torch = JAX, since xmla.jax_api needs jax and jax-triton: pip install 'xmla-kernels[jax]'")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert json.loads(done.stdout) == figures
    names = {figure["name"] for figure in figures}
    assert "attention, same caches" in names and not any("JAX" in name for name in names)


TORCH = "xmla.torch_api needs torch: pip install 'xmla-kernels[torch]'"
BOTH = f"{TORCH}; xmla.jax_api needs jax and jax-triton: pip install 'xmla-kernels[jax]'"


@pytest.mark.parametrize(
    ("words", "without", "message"),
    [
        (["verify"], "torch jax jax_triton", f"verify: {BOTH}"),
        (["replay", "FILE"], "torch jax jax_triton", f"replay: {BOTH}"),
        (["bench"], "torch jax jax_triton", f"bench: {BOTH}"),
        (["demo"], "torch", f"demo: the model is one of PyTorch, and {TORCH}; --framework jax has a model in Flax"),
        (["demo"], "torch jax jax_triton", f"demo: the model is one of PyTorch, and {TORCH}"),
        (["demo", "--framework", "jax"], "jax jax_triton",
         "demo: xmla.jax_api needs jax and jax-triton: pip install 'xmla-kernels[jax]'"),
        (["demo", "--framework", "jax"], "flax", "demo: No module named 'flax': pip install 'flax>=0.12'"),
        (["demo"], "transformers", "demo: No module named 'transformers': pip install 'xmla-kernels[demo]'"),
        (["demo", "--model", "deepseek_v4"], "transformers",
         "demo: No module named 'transformers': pip install 'xmla-kernels[demo]'"),
        (["bench", "--op", "sparse_mla"], "torch", f"bench: no op sparse_mla; there are host, since {TORCH}"),
        (["bench", "--picture", "a.png"], "torch", f"bench: a picture is of times by PyTorch, and {TORCH}"),
    ],
)  # fmt: skip
def test_what_is_not_installed_is_one_line(
    words: list[str], without: str, message: str, tmp_path: Path, file: Path
) -> None:
    words = [str(file) if word == "FILE" else word for word in words]
    done = xmla(tmp_path, *words, without=without)
    assert done.returncode == 2, done.stdout + done.stderr
    assert lines(done.stderr) == [f"xmla: {message}"]


@pytest.mark.parametrize(
    ("framework", "without", "packages"),
    [("torch", "torch", "torch"), ("jax", "jax jaxlib", "jax"), ("jax", "jax_triton", "jax-triton"),
     ("jax", "jax jaxlib jax_triton", "jax and jax-triton")],
)  # fmt: skip
def test_a_front_end_without_its_framework(framework: str, without: str, packages: str, tmp_path: Path) -> None:
    others = {"torch": ["compat", "megatron", "transformers"], "jax": ["maxtext"]}[framework]
    for module in (f"xmla.{framework}_api", f"xmla.{framework}_api.parallel", *(f"xmla.{name}" for name in others)):
        done = run(tmp_path, "-c", f"import {module}", without=without)
        message = f"ImportError: xmla.{framework}_api needs {packages}: pip install 'xmla-kernels[{framework}]'"
        assert lines(done.stderr)[-1] == message, done.stderr


def test_transformers_backend_without_transformers(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", "import xmla.transformers", without="transformers")
    message = "ImportError: xmla.transformers needs transformers: pip install 'xmla-kernels[transformers]'"
    assert lines(done.stderr)[-1] == message, done.stderr


# The host times of a jitted step, on the interpreter and once: that the lines are made, not what they say.
BENCH_BY_JAX = """
from pathlib import Path
from xmla.machine import environment
environment.prepare()
from xmla.bench import host_jax, host_time, run
run.present_device = environment.require_gpu = lambda *_: None
host_time.REPEATS = host_time.ROUNDS = host_time.WARM_UP = 1
host_jax.PAGES, host_jax.HEADS, host_jax.INDEX_HEADS = 8, 8, 8
assert run.run(None, Path("out.jsonl"), None, None, "a commit", as_json=True)
"""


def test_bench_by_jax_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", BENCH_BY_JAX, without="torch")
    assert done.returncode == 0, done.stderr
    assert f"left out: torch, since {TORCH}" in done.stderr
    assert done.stdout == (tmp_path / "out.jsonl").read_text()
    head, line, *caches = map(json.loads, lines(done.stdout))
    assert head["commit"] == "a commit" and head["ceilings"] == {}
    assert line["case"] == "dispatch of a jitted JAX step" and line["host_us"] > 0 < line["jitted_addition_us"]
    assert [cache["case"] for cache in caches] == [
        f"{count} {way}" for count in (1, 16, 64) for way in ("donated arrays", "Refs")
    ]
    assert all(cache["host_us"] > 0 for cache in caches)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_an_array_for_a_framework_that_is_not_there(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-c", f"from xmla import interop; interop.to_{name}(None)", without=name)
    assert done.stderr.splitlines()[-1] == f"ImportError: to_{name} needs {name}: pip install 'xmla-kernels[{name}]'"


def refused() -> Iterator[tuple[Op, Case, str, int]]:
    """Each integer argument with a value below and one above its limits, in the first case that is refused for it."""
    for op in registry().values():
        made = [(case, kit.make(case)) for case in op.cases]
        for argument, tensor in op.tensors.items():
            for value in (-5, 10**6) if tensor.dtypes[0].startswith("int") else ():
                for case, whole in made:
                    if argument in whole:
                        inputs = whole | {argument: np.full_like(whole[argument], value)}
                        found = find_violation(op, inputs, op.attributes(**case.attrs))
                        if found is not None and found.message.startswith(f"{op.name}: {argument}["):
                            yield op, case, argument, value
                            break


REFUSED = list(refused())


def test_most_ops_refuse_places() -> None:
    assert len({op.name for op, *_ in REFUSED}) >= 15 and len(REFUSED) >= 50


@pytest.mark.parametrize(
    ("op", "case", "argument", "value"), REFUSED, ids=[f"{op.name}-{name}-{value}" for op, _, name, value in REFUSED]
)
def test_replay_repeats_whatever_a_check_refused(
    op: Op, case: Case, argument: str, value: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also calls without one valid place, of whose caches no page is kept."""
    file = reproduce(op, case, argument, value, device, tmp_path, monkeypatch)
    assert repeat(file) is False
    assert f"values: {op.name}: {argument}[" in capsys.readouterr().out


def test_replay_prints_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeat(file, as_json=True) is False
    told = json.loads(capsys.readouterr().out)
    assert told["op"] == "map_slots" and told["by"] == "XMLA_CHECK" and told["values"].startswith("map_slots: indices[")
    assert {(each["framework"], each["ok"]) for each in told["results"]} == {("torch", True), ("jax", True)}
    assert told["arrays"]["indices"].startswith("int32[") and "torch" in told["others"]
