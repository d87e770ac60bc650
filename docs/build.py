"""Documents as HTML: the pages of this folder, one made for every public op, and the files that pages link to.

python -m docs.build [folder]       (build/docs; `make docs`)

Pages are put together in `<folder>/source`; Sphinx then reads them strictly: a warning is an error. `python -m
tools.report` writes tables of the declarations into the pages, which a viewer of the repository shows; a built page has
more in their place.
"""

import inspect
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

import xmla
from tools.report import declarations
from tools.report.declarations import plain, table
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import MLA_LAYOUTS, MlaLayout
from xmla.core.formats.parts import Parts, entry_of
from xmla.core.op import Op
from xmla.core.op.docstrings import JAX, TORCH, document, updates
from xmla.core.registry import public_ops
from xmla.layouts import LAYOUTS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FORMAT_NAMES = {layout.name for layout in MLA_LAYOUTS}
HEADINGS = ("Args", "Returns", "Raises", "Example", "Implementations, best first")
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml"}  # not results, which are long


def paragraphs(text: str) -> str:
    """Blocks of a docstring: indented ones and lists of formulas are preformatted, others are prose."""
    shown = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith(" "):
            shown.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            shown.append(plain(" ".join(block.split())))
    return "\n\n".join(shown)


def entries(text: str) -> list[tuple[str, str]]:
    """The `name: description` of a docstring's section."""
    found: list[list[str]] = []
    for line in inspect.cleandoc("\n" + text).splitlines():
        if line[:1].strip():
            name, _, rest = line.partition(": ")
            found.append([name, rest])
        elif found:
            found[-1][1] += f" {line.strip()}"
    return [(name, description) for name, description in found]


def sections(doc: str) -> tuple[str, dict[str, str], str]:
    """A docstring's text before its sections, these by heading, and the text that stands after or between them."""
    text, found, notes, current = [], {}, [], ""
    for line in doc.splitlines():
        if line.removesuffix(":") in HEADINGS and line.endswith(":"):
            current = line.removesuffix(":")
            found[current] = ""
        elif current and (line.startswith(" ") or not line):
            found[current] += f"{line}\n"
        else:
            if current:
                notes.append("")
            current = ""
            (notes if found else text).append(line)
    return "\n".join(text), found, "\n".join(notes)


def signature(op: Op, front_end: str, options: str) -> str:
    parameters = inspect.signature(op.prototype).parameters.values()
    tensors = ", ".join(name + "=None" * (name in op.optional) for name in op.tensors)
    attributes = [str(parameter) for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    lines = [f"    {line}" for line in wrap(f"{tensors}, *,", 84)]
    lines += [*(f"    {attribute}," for attribute in attributes), f"    {options},"]
    return "\n".join([f"{front_end}.{op.name}(", *lines, ")"])


def described(name: str, op: Op, rest: str) -> str:
    """An argument with what the declaration says of it, where its description does not begin with its axes."""
    told = f"`{name}`"
    if name not in op.tensors:
        return told
    tensor = op.tensors[name]
    if not rest.startswith("["):
        told += f" \\[{plain(', '.join(tensor.names))}\\] {', '.join(tensor.dtypes)}"
    return told + ", optional" * (name in op.optional) + ", **updated in place**" * (name in op.mutates)


def definitions(text: str, op: Op | None = None) -> str:
    """A section as a list of definitions; with an op the declaration's axes and dtypes stand beside the names."""
    shown = []
    for names, rest in entries(text):
        terms = [", ".join(described(name, op, rest) for name in names.split(", "))] if op else [plain(names)]
        shown.append("\n".join([*terms, f": {plain(rest)}"]))
    return "\n\n".join(shown)


def op_page(op: Op) -> str:
    """The page of an op, from its declaration alone."""
    text, found, notes = sections(inspect.cleandoc(document(op, TORCH)))
    summary, _, rest = text.partition("\n\n")
    options = "out=None, workspace=None, implementation=None" if op.outputs else "implementation=None"
    page = [f"# {op.name}", plain(" ".join(summary.split())), f"```py\n{signature(op, 'xt', options)}\n```"]
    less = ", without `out` and `workspace`." if op.outputs else "."
    page.append(" ".join(filter(None, [f"In JAX `xj.{op.name}`{less}", updates(op, JAX)])))
    page.append(paragraphs(rest))
    arguments = definitions(found["Args"], op)
    told = "[what all of them have](/ops.md#what-all-of-them-have)"
    page += ["## Arguments", arguments.replace(f"`help({TORCH.package})`", told)]
    if "Returns" in found:
        page += ["## Results", definitions(found["Returns"], op)]
    page += ["## Errors", definitions(found["Raises"])]
    page += ["## Example"]
    for title, style in (("PyTorch", TORCH), ("JAX", JAX)):
        example = sections(inspect.cleandoc(document(op, style)))[1]["Example"]
        page += [f"{title}:", f"```pycon\n{inspect.cleandoc(example)}\n```"]
    if notes.strip():
        page += ["## Notes", paragraphs(notes)]
    page += ["## Implementations, best first", definitions(found["Implementations, best first"])]
    support = (DOCS / "support.md").read_text()
    if f"| `{op.name}` |" in support:
        page += ["## Support", "As in [Support](/support.md), where the cells are explained.", folded(support, op.name)]
    folder = Path(inspect.getfile(op.prototype)).parent
    page.append("## Definition\n\nThe NumPy reference that every implementation is compared with.")
    shown = os.path.relpath(inspect.getfile(op.reference), DOCS)
    page.append(f"```{{literalinclude}} {shown}\n:language: python\n```")
    files = [file for file in sorted(folder.glob("*.py")) if file.stem not in ("reference", "cases")]
    files += sorted(folder.glob("gluon_*/*.py"))
    files = [file for file in files if file.stat().st_size]
    shown = [f"[`{file.relative_to(folder)}`](../{os.path.relpath(file, ROOT)})" for file in files]
    page += ["## Source", f"{', '.join(shown)}. {len(op.cases)} named inputs in `cases.py` test every implementation."]
    return "\n\n".join(page) + "\n"


def format_of(form: str) -> str:
    """A row of docs/support.md by the names of its caches' formats: `uint8 656 + bfloat16 576, triton` is `v32 + plain
    bfloat16, triton`. Where several formats have a size, and for what is no latent entry, the size stays."""
    sizes, *given = form.split(", ")
    named = [name for name in given if name in FORMAT_NAMES]
    shown = []
    for place, size in enumerate(sizes.split(" + ")):
        dtype, _, row = size.partition(" ")
        known = [layout.name for layout in MLA_LAYOUTS if (str(layout.row), layout.packed) == (row, dtype == "uint8")]
        if len(named) > sizes.count("+"):
            known = [named[place]]
        elif len(known) > 1:
            known = [name for name in known if name in named]
        shown.append(f"{known[0]} {dtype}".removesuffix(" uint8") if len(known) == 1 else size)
    others = [name for name in given if name not in FORMAT_NAMES]
    return ", ".join(filter(None, [" + ".join(shown), *others])) or "any"


def worse(cells: Iterable[str]) -> str:
    """One cell for several calls of a format: every instruction that one of them uses, and the most that one spills."""
    found = [cell.partition("; spills ")[::2] for cell in cells]
    if any(used == "no" for used, _ in found):
        return "no"
    used = dict.fromkeys(name for names, _ in found for name in names.split(", "))
    spilled = max(int(spills.removesuffix(" B") or 0) for _, spills in found)
    return ", ".join(used) + (f"; spills {spilled} B" if spilled else "")


def folded(text: str, op: str | None = None) -> str:
    """The table of docs/support.md, or an op's part of it: formats and architectures of which it says the same share a
    row and a column."""
    _, begin, rest = text.partition("| op | format |")
    cut = [[cell.strip() for cell in line[1:-1].split("|")] for line in (begin + rest).splitlines()]
    head, _, *lines = cut
    calls: dict[tuple[str, str], list[list[str]]] = {}
    for name, form, *cells in lines:
        if op in (None, name.strip("`")):
            calls.setdefault((name, format_of(form)), []).append(cells)
    found = {call: [worse(same) for same in zip(*cells, strict=True)] for call, cells in calls.items()}
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in zip(head[2:], *found.values(), strict=True):
        columns.setdefault(tuple(cells), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (name, form), *cells in zip(found, *columns, strict=True):
        rows.setdefault((name, *cells), []).append(form)
    shown = [[*([] if op else [name]), "; ".join(forms), *cells] for (name, *cells), forms in rows.items()]
    start = ["format"] if op else ["op", "format"]
    return table(" | ".join([*start, *map(", ".join, columns.values())]), [f"| {' | '.join(row)} |" for row in shown])


def fields_of(layout: MlaLayout | IndexerLayout) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What an entry holds, in bytes (elements of a plain row): beside it, and in its part of the page's footer."""
    if not layout.packed:
        return [(f"{layout.latent} latent dims", layout.latent), (f"{layout.rope} roped", layout.rope)], []
    entry = entry_of(layout)
    if isinstance(layout, IndexerLayout):
        scales = {"fp8": "float32 scale", "mxfp4": f"{layout.dim // 32} UE8M0 scales", "fp8_ue8m0": "UE8M0 × 4"}
        scale = scales[layout.format]
        labels = {"dims": f"{layout.dim} {entry.values}", "scales": scale}
    else:
        scale = f"{layout.scales} {layout.scale.upper().replace('FLOAT', 'float').replace('E4M3', 'e4m3')} scales"
        labels = {
            "latent": f"{layout.latent} {layout.values}", "rope": f"{layout.rope} {layout.rope_values} rope",
            "scales": scale, "interleaved scales": scale, "outer scale": "float32 scale of all",
            "rope scale": "float32 scale of rope", "pad": "pad",
        }  # fmt: skip

    def labelled(parts: Parts) -> Iterator[tuple[str, int]]:
        for name, size in parts:
            if name == "dims" and isinstance(layout, MlaLayout):  # roped dims are stored as the others, behind them
                latent = layout.latent * layout.value_bits // 8
                yield from ((labels["latent"], latent), (f"{layout.rope} {layout.values} rope", size - latent))
            else:
                yield labels[name], size

    return [*labelled(entry.parts)], [*labelled(entry.footer)]


# As in the pictures of docs/images (docs/concepts.md has the legend).
COLORS = {"scale": "#8957e5", "rope": "#d29922", "pad": "#8b949e"}


def diagram(layout: MlaLayout | IndexerLayout) -> str:
    """A page of a format: its entries' bytes, and its footer if it has one. Widths are drawn, not to scale."""
    data, footer = fields_of(layout)
    unit = "bytes" if layout.packed else "elements"
    pieces, x, place = [], 0.0, 0
    groups = [("entry 0", data, 0)]
    if footer:
        groups += [("entry 1 … R − 1", [("the same", 0)], None), ("footer, entry 0", footer, None)]
        groups += [("entry 1 … R − 1", [("the same", 0)], None)]
    for title, fields, start in groups:
        pieces.append(f'<text x="{x}" y="12" font-size="12">{title}</text>')
        place = start or 0
        for label, size in fields:
            width = max(34 + 5.2 * len(label), size / 3.0, 0 if size else 92)
            color = next((value for word, value in COLORS.items() if word in label), "#4c7fd9")
            color = "none" if label == "the same" else color
            pieces.append(
                f'<rect x="{x}" y="20" width="{width}" height="30" fill="{color}" fill-opacity="0.35" rx="2"/>'
                f'<text x="{x + width / 2}" y="39" font-size="12" text-anchor="middle">{escape(label)}</text>'
            )
            if size:
                shown = f"{place}–{place + size - 1}" if start is not None else f"{size} B"
                pieces.append(f'<text x="{x + 2}" y="63" font-size="10">{shown}</text>')
            place += size
            x += width
        x += 10
    label = f"{layout.name}: {layout.row} {unit} per entry"
    return (
        f'<div class="byte-diagram"><svg role="img" aria-label="{label}" width="{x:.0f}" height="68">'
        f"{''.join(pieces)}</svg></div>"
    )


def ops() -> str:
    """The table of ops, with a page for each."""
    pages = "\n".join(f"ops/{name}" for name in public_ops())
    made = declarations.ops(lambda op: f"/ops/{op.name}.md")
    return f"{made}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def formats() -> str:
    """Every declared format with its bytes."""
    shown = [declarations.formats(lambda layout: f"[{layout.name}](#{layout.name.replace('_', '-')})")]
    for layout in LAYOUTS:
        shown.append(f"## {layout.name}")
        if isinstance(layout, IndexerLayout):
            told = f"{layout.row} bytes per entry: keys of {layout.dim} dims, scales in the page's footer."
        elif layout.packed:
            where = "in the page's footer" if layout.footer else "in the entry"
            told = (
                f"{layout.row} bytes per entry: {layout.latent} + {layout.rope} dims, {layout.values} with one "
                f"{layout.scale} scale per {layout.tile} dims, {where}."
            )
            if layout.interleaved:
                told += " Scale g is at place 8 · (g mod 4) + g div 4."
            if layout.page_multiple > 1:
                told += f" Allocators round a page up to a multiple of {layout.page_multiple} bytes."
        else:
            told = f"Rows of {layout.row} bfloat16 or float16 elements: {layout.latent} + {layout.rope} dims."
        shown += [told, f"```{{raw}} html\n{diagram(layout)}\n```"]
    return "\n\n".join(shown)


def package() -> str:
    """The functions and classes that the package itself exports, with their docstrings."""
    shown = []
    for name in declarations.exported():
        value = getattr(xmla, name)
        kind = "function" if inspect.isfunction(value) else "exception" if issubclass(value, Exception) else "class"
        shown.append(f".. auto{kind}:: xmla.{name}")
    return "\n\n".join(["```{eval-rst}", *shown, "```"])


# Of a page the table between two comments, in whose place the built page has more.
MADE = {"formats.md": formats, "ops.md": ops, "package.md": package}


def pages() -> Iterator[tuple[Path, Path, str]]:
    """Every page: its place, the file whose relative links it has, its text."""
    for file in sorted(DOCS.rglob("*.md")):
        text = file.read_text()
        if make := MADE.get(file.name):
            before, rest = text.split(f"<!-- {file.stem} -->\n")
            text = before + make() + rest.split(f"<!-- /{file.stem} -->\n")[1]
        if file.name == "support.md":
            text = text.partition("| op |")[0] + folded(text)
        yield file.relative_to(DOCS), file, text
    for op in public_ops().values():
        yield Path("ops") / f"{op.name}.md", DOCS / "ops.md", op_page(op)


def stage(source: Path) -> None:
    """Put all pages into `source`. A link out of docs leads to a page that shows the file."""
    linked: set[Path] = set()

    def local(found: re.Match[str], file: Path) -> str:
        target = found[2].partition("#")[0]
        if not target or re.match(r"[a-z]+:|/", target):
            return found[0]
        path = Path(os.path.normpath(file.parent / target))
        if path.is_relative_to(DOCS) and path.suffix != ".py":
            return found[0]
        if not path.is_file():
            raise FileNotFoundError(f"{file.relative_to(ROOT)} links to {target}")
        linked.add(path)
        return f"{found[1]}/source/{path.relative_to(ROOT)}.md{found[3]}"

    for place, file, text in pages():
        shown = re.sub(r"(\]\()([^)\s]+)(\))", lambda found, file=file: local(found, file), text)
        shown = re.sub(
            r"(\{literalinclude\} )(\S+)",
            lambda found, file=file: found[1] + "/" + os.path.relpath((file.parent / found[2]).resolve(), source),
            shown,
        )
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        (source / place).write_text(shown)
    for path in linked:
        page = source / "source" / f"{path.relative_to(ROOT)}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        shown = f"/{os.path.relpath(path, source)}\n:language: {LANGUAGES.get(path.suffix, 'text')}"
        page.write_text(f"---\norphan: true\n---\n\n# {path.relative_to(ROOT)}\n\n```{{literalinclude}} {shown}\n```\n")
    shutil.copy(DOCS / "conf.py", source)
    shutil.copytree(DOCS / "images", source / "images")


def build(folder: Path) -> int:
    """The documents in `<folder>/html`; Sphinx's exit status."""
    from sphinx.cmd.build import main as sphinx

    source = folder.resolve() / "source"
    shutil.rmtree(source, ignore_errors=True)
    stage(source)
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    return sphinx([*strict, "-b", "html", "-d", str(folder / "doctrees"), str(source), str(folder / "html")])


def main(folder: Annotated[Path, typer.Argument()] = ROOT / "build" / "docs") -> None:
    """Build the documents in FOLDER/html."""
    raise typer.Exit(build(folder))


if __name__ == "__main__":
    typer.run(main)
