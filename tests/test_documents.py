"""README and documents: code blocks run, figures are those of the committed results, links lead somewhere."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from conftest import EVERYTHING, marked_jax, require_tool, require_transformers

import xmla
from tools import fresh
from tools.report.pages import PICTURES, RESULTS, TABLES, Picture, Table
from tools.report.pictures import described
from xmla.bench.picture import COLORS
from xmla.command import app
from xmla.core.registry import public_ops, registry

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w*|\{[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


PROGRAMS = {page: "\n".join(blocks(page, "python")) for page in PAGES if page.name != "README.md"}


def names_of(block: str) -> tuple[set[str], set[str]]:
    """The names that a block gives, and those that it takes from elsewhere."""
    nodes = [*ast.walk(ast.parse(block))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    gives = {name.id for name in names if isinstance(name.ctx, ast.Store)} | {
        n.arg for n in nodes if isinstance(n, ast.arg)
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            gives |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            gives.add(node.name)
    return gives, {name.id for name in names} - gives


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_needs_an_earlier_one_says_so(page: Path) -> None:
    """A reader who copies it alone would meet a NameError; the README's are programs each."""
    before: set[str] = set()
    for block in blocks(page, "python"):
        gives, takes = names_of(block)
        if needed := takes & before:
            text = " ".join(page.read_text().split())
            assert "The blocks of this page are one program" in text and page.name != "README.md", (block, needed)
        before |= gives


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_file_that_the_built_page_shows_is_linked(page: Path) -> None:
    """A viewer of the repository shows the directive, not the file."""
    text = page.read_text()
    for file in re.findall(r"^```\{literalinclude\} (\S+)$", text, re.MULTILINE):
        assert f"]({file})" in text, file


def runs_elsewhere(code: str) -> bool:
    """Whether tests/test_wheel.py runs a program in this run too, with nothing but what it needs."""
    return not EVERYTHING and fresh.frameworks(code) <= {"torch", "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [marked_jax(page, code) for page, code in PROGRAMS.items() if code and not runs_elsewhere(code)],
    ids=name_of,
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page are one program; tests/test_wheel.py runs those without JAX, XMLA_ALL all here too."""
    if "xmla.transformers" in PROGRAMS[page]:
        require_transformers()
    printed_by(PROGRAMS[page], tmp_path)


@pytest.mark.slow
@pytest.mark.jax
def test_the_readmes_programs_print_the_same(tmp_path: Path) -> None:
    """As it says: one in each framework, with equal inputs."""
    printed = [printed_by(code, tmp_path) for code in blocks(ROOT / "README.md", "python")]
    assert len(printed) == 2 and printed[0] == printed[1] and "(2, 8, 512)" in printed[0]


def printed_by(code: str, folder: Path) -> str:
    """What a program prints that runs to its end, in a reader's shell."""
    file = folder / "blocks.py"
    file.write_text(code)
    done = run([sys.executable, str(file)], unset={"TRITON_INTERPRET", "JAX_PLATFORMS"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(command: list[str], unset: Set[str] = frozenset()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment = {name: value for name, value in environment.items() if name not in unset}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for code in blocks(page, "bash"):
            for line in code.splitlines():
                if command := line.partition("#")[0].strip():
                    yield name_of(page), command


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [*commands()])
def test_commands_run(page: str, command: str) -> None:
    """`xmla` runs; `make` and `pip install`, which take minutes, name targets and extras that exist.

    A demo has options that exist, and by XMLA_ALL runs: tests/test_flax_model.py runs it on fewer tokens.
    """
    program, *arguments = command.split()
    if program == "xmla" and arguments[0] == "demo" and not EVERYTHING:
        arguments.append("--help")
    if program == "make":
        done = run(["make", "--dry-run", *arguments])
    elif program == "pip":
        return check_installation(command)
    else:
        assert program == "xmla", f"{page}: {command}"
        done = run([sys.executable, "-m", "xmla", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr


def check_installation(command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if group := re.fullmatch(r"pip install --group (\w+)", command):
        assert group[1] in project["dependency-groups"], command
        return
    found = re.fullmatch(r"pip install '\.\[([\w,]+)\]'", command)
    assert found and set(found[1].split(",")) <= project["project"]["optional-dependencies"].keys(), command


def test_installations_in_prose_name_extras() -> None:
    found = [command for page in PAGES for command in re.findall(r"`(pip install [^`]*)`", page.read_text())]
    assert found
    for command in found:
        check_installation(command)


@pytest.mark.slow
@pytest.mark.jax
def test_what_xla_fuses_is_what_the_page_says() -> None:
    """A release that prints something else has mended a fault, or has another."""
    import jax

    if shutil.which("c++") is None or find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs a C++ compiler and JAX's CUDA plugin")
    done = run([sys.executable, str(ROOT / "docs/xla_dynamic_slice_fusion.py")])
    assert done.returncode == 0, done.stderr[-3000:]
    page = ROOT / "docs/xla_dynamic_slice_fusion.md"
    (row,) = re.findall(rf"^\| {re.escape(jax.__version__)} \| yes \| (yes|no) \|$", page.read_text(), re.MULTILINE)
    told = next(code for code in blocks(page, "text") if code.startswith("JAX "))
    assert done.stdout == told.replace("0.11.2", jax.__version__).replace(
        "calls 2", "calls 2" if row == "yes" else "calls 1"
    )


def test_workflows_make_targets_that_exist() -> None:
    texts = [file.read_text() for file in (ROOT / ".github/workflows").glob("*.yml")]
    targets = {target for text in texts for target in re.findall(r"run: make ([\w-]+)", text)}
    makefile = (ROOT / "Makefile").read_text()
    assert {"docs", "release"} <= targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def test_no_block_is_of_another_language() -> None:
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text()) if not kind.startswith("{")}
    assert kinds <= {"python", "bash", "text", ""}, kinds


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.page} {table.marker}")
def test_tables_are_of_the_committed_results(table: Table) -> None:
    """`make report` writes them."""
    page = (ROOT / table.page).read_text()
    assert table.insert(page) == page


@pytest.mark.parametrize("drawn", PICTURES, ids=lambda drawn: drawn.file)
def test_pictures_are_of_the_committed_results(drawn: Picture, tmp_path: Path) -> None:
    """`make report` draws them."""
    results = RESULTS / drawn.results
    assert described(ROOT / drawn.file) == drawn.shown(results)
    drawn.draw(results, tmp_path / "drawn.svg")
    assert described(tmp_path / "drawn.svg") == drawn.shown(results)


@pytest.mark.parametrize("name", ["speed", "run", "frameworks"])
def test_drawn_pictures_are_light_and_dark(name: str) -> None:
    """One file: each of the pictures' colours that it uses has a rule for dark pages."""
    text = (ROOT / f"docs/images/{name}.svg").read_text()
    _, dark = text.split("@media (prefers-color-scheme: dark)")
    rules = dict(re.findall(r'\[style\*="(\w+: #\w{6})"\] \{\w+: (#\w{6}) !important\}', dark.partition("</style>")[0]))
    used = {style for light, _ in COLORS.values() for style in (f"fill: {light}", f"stroke: {light}")}
    used = {style for style in used if f"{style};" in dark or f'{style}"' in dark}
    assert used and used <= rules.keys()
    assert all(rules[style] != style.split(": ")[1] for style in used)


def test_the_readme_counts_the_ops() -> None:
    assert f" as {len(public_ops())} ops: " in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"(?:\]\(|src=\"|srcset=\"|\} )((?:\.\./|\w+/|\w+\.md)[^)#\s\"]*)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.slow
def test_documents_are_built(tmp_path: Path) -> None:
    """Strictly: a dead link or an unknown reference fails. Every public op has its page, every example its place."""
    require_tool("sphinx")
    done = run([sys.executable, "-m", "docs.build", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    html = tmp_path / "html"
    for name, op in public_ops().items():
        page = (html / "ops" / f"{name}.html").read_text()
        told = [*op.tensors, *op.defaults, *op.outputs, "implementation"]
        assert all(f'<span class="pre">{one}</span>' in page for one in told), name
        assert 'href="../ops.html#what-all-of-them-have"' in page, name
    for page in html.rglob("*.html"):
        assert not re.findall(r"(?:src|href)=\"(?:https?:)?//[^\"]*\.(?:js|css|woff2?)", page.read_text()), page
    exported = [name for name in dir(xmla) if getattr(getattr(xmla, name), "__module__", "").startswith("xmla.")]
    assert {"ArgumentError", "ModelConfig", "supports", "warmup"} <= {*exported}
    for name in exported:
        assert f'id="xmla.{name}"' in (html / "package.html").read_text(), name
    support = (html / "support.html").read_text()
    assert all(f'<span class="pre">{name}</span>' in support for name in registry())
    tutorials = "".join(page.read_text() for page in PAGES)
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in tutorials, example.name


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/serving.md").read_text()
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert len(names) >= 8
    for name in names:
        assert f"| `xmla {name}" in page, name


def test_one_name_means_one_thing() -> None:
    """`xmla` is the package; the front-ends are `xt` and `xj`, or have no other name than their own."""
    files = [
        *PAGES,
        *(
            file
            for folder in ("xmla", "benchmarks", "examples", "docs", "tests", "tools")
            for file in (ROOT / folder).rglob("*.py")
        ),
    ]
    wrong = re.compile(r"(torch_api|jax_api) as (?!xt\b|xj\b|api\b)\w+|import \w+(\.\w+)* as xmla\b")
    found = {name_of(file): wrong.findall(file.read_text()) for file in files}
    assert len(found) > 100
    assert {file: names for file, names in found.items() if names} == {}


def prose(text: str) -> Iterator[str]:
    """The sentences of Markdown or of a docstring but for code: of paragraphs, items of a list, cells of a table."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", re.sub(r"`[^`]*`", "code", text)):
        item = r"\||\n" if block.startswith("|") else r"\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\s+\w[\w, ]*: )"
        for part in re.split(item, block):
            for sentence in re.split(r"(?<=[.!?])[)*]*\s+|(?<=:)\s+(?=[A-Z])", re.sub(r"\]\([^)]*\)", "]", part)):
                yield " ".join(word for word in sentence.split() if re.search(r"\w", word))


def test_sentences_are_short() -> None:
    """A reader follows one of 35 words at once; longer ones are two, or a list."""
    texts = {name_of(page): page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    for name, op in registry().items():
        written, _, _ = inspect.cleandoc(op.doc).partition("Implementations, best first:")  # what follows is a list
        sections = re.split(r"\n\s*\n", written)
        texts[name] = "\n\n".join(part for part in sections if not part.startswith(" ") and ">>>" not in part)
    found = {name: list(prose(text)) for name, text in texts.items()}
    assert sum(map(len, found.values())) > 2000
    long = [(name, sentence) for name, told in found.items() for sentence in told if len(sentence.split()) > 35]
    assert not long, "\n".join(f"{name}: {sentence}" for name, sentence in long)


def paths(text: str) -> list[str]:
    """`a/{b,c}.py` is two paths; <name> stands for any."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return [re.sub(r"<\w+>", "*", "".join(chosen)) for chosen in product(*choices)]


def test_contributing_names_real_files() -> None:
    """Of paths from the root; of names alone, some file of an op."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = [path for quoted in re.findall(r"`([^`\n]+)`", text) for path in paths(quoted)]
    files = [path for path in named if re.fullmatch(r"[\w./*-]+(\.(py|md|txt|toml|pyi)|/)", path)]
    assert len(files) > 60
    folders = ("", "xmla/", "xmla/core/ops/**/", "xmla/torch_api/", "xmla/vllm/", "xmla/sglang/", "tests/")
    folders += ("benchmarks/engines/**/",)
    missing = [path for path in files if not any(any(ROOT.glob(folder + path)) for folder in folders)]
    assert missing == []
