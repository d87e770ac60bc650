"""Tables of what the package declares, ops, formats, axes and functions, as a viewer of the repository shows them.

The built documents (docs/build.py) have the same tables with links to their pages.
"""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import xmla
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import MlaLayout
from xmla.core.op import Op
from xmla.core.registry import FAMILIES, public_ops
from xmla.layouts import LAYOUTS

DOCS = Path(__file__).parent.parent.parent / "docs"
WRITERS = {
    "v32": "DeepSeek-V3.2", "v4": "DeepSeek-V4", "v41": "DeepSeek-V4.1", "v41_fp4": "V4.1, compressed entries",
    "v41_footer": "V4.1 before FlashMLA of 2026-09-30", "v41_fp4_footer": "the same, compressed entries",
    "nope": "GLM in FlashInfer", "nvfp4": "vLLM's `nvfp4_ds_mla`", "nvfp4_bf16": "b12x's `nvfp4_ds_mla`",
    "nvfp4_fp8": "the same, with roped dims in e4m3", "nvfp4_scaled": "the same, with a scale of all latent dims",
    "nvfp4_nope": "the same, GLM-5.3-Flash", "v4_nvfp4": "V4 in FlashInfer on SM12x",
    "v4_mxfp4": "V4 on Hopper, proposed for SGLang", "plain": "V3.2's dims", "plain_v4": "V4's dims",
    **{layout.name: "indexer keys" for layout in LAYOUTS if isinstance(layout, IndexerLayout)},
    "indexer_fp8_ue8m0_d128": "vLLM's indexer keys on Blackwell",
}  # fmt: skip


def plain(text: str) -> str:
    """Prose of a docstring as Markdown: everything but `code` stands for itself."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", part) for part in parts)


def table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *rows]) + "\n"


def source_of(op: Op) -> str:
    return os.path.relpath(inspect.getfile(op.prototype), DOCS)


def ops(link: Callable[[Op], str] = source_of) -> str:
    """The public ops by family, with their first sentence."""
    shown, public = [], public_ops()
    for family in FAMILIES:
        rows = []
        for op in (op for op in family.OPS if op.name in public):
            summary = " ".join(inspect.cleandoc(op.doc).partition("\n\n")[0].split())
            rows.append(f"| [`{op.name}`]({link(op)}) | {plain(summary)} |")
        title = inspect.cleandoc(family.__doc__ or "").partition("\n")[0].rstrip(".")
        shown.append(f"## {title}\n\n{table('op | what it does', rows)}")
    return "\n".join(shown)


def formats(link: Callable[[MlaLayout | IndexerLayout], str] = lambda layout: f"`{layout.name}`") -> str:
    """All formats side by side."""
    if WRITERS.keys() != {layout.name for layout in LAYOUTS}:
        names = ", ".join(sorted(WRITERS.keys() ^ {layout.name for layout in LAYOUTS}))
        raise RuntimeError(f"tools/report/declarations.py: WRITERS and the formats differ in {names}")
    rows = []
    for layout in LAYOUTS:
        if isinstance(layout, IndexerLayout):
            scale = "UE8M0, each 32 dims" if layout.format == "mxfp4" else f"{layout.scale}, each key"
            values, scale = layout.values, scale.replace("ue8m0", "UE8M0 four times")
            dims, where = str(layout.dim), "page's footer"
        else:
            values = layout.values if layout.packed else "16-bit"
            dims = f"{layout.latent} + {layout.rope}" if layout.rope else str(layout.latent)
            if layout.rope_values == "bfloat16" or (layout.rope_values == "e4m3" and values == "e2m1"):
                values += f", rope {layout.rope_values}"
            scale = f"{layout.scale}, each {layout.tile} dims".replace("ue8m0", "UE8M0") if layout.packed else ""
            where = ("page's footer" if layout.footer else "entry") if layout.packed else ""
        row = f"{layout.row} bytes" if layout.packed else f"{layout.row} elements"
        rows.append(f"| {link(layout)} | {WRITERS[layout.name]} | {row} | {dims} | {values} | {scale} | {where} |")
    return table("format | of | ROW | dims | values | scales | scales in", rows)


def axes() -> str:
    """The glossary of axes, from the package's docstring."""
    text = (xmla.__doc__ or "").partition("Glossary of axes, the same everywhere:\n")[2]
    body, _, rest = text.partition("\nA prefix ")
    rows = []
    for line in inspect.cleandoc("\n" + body).splitlines():
        names, _, meaning = line.partition("  ")
        if names:
            rows.append(f"| `{names}` | {plain(meaning.strip())} |")
        else:
            rows[-1] = f"{rows[-1].removesuffix(' |')} {plain(meaning.strip())} |"
    return table("axis | meaning", rows) + f"\nA prefix {plain(' '.join(rest.split()))}\n"


def exported() -> list[str]:
    """The names of the functions and classes that the package itself exports."""
    every = {name: getattr(xmla, name) for name in dir(xmla) if not name.startswith("_")}
    return [name for name, value in every.items() if getattr(value, "__module__", "").startswith("xmla.")]


def package() -> str:
    """What the package itself exports, with first sentences."""
    rows = []
    for name in exported():
        summary = " ".join(inspect.cleandoc(getattr(xmla, name).__doc__ or "").partition("\n\n")[0].split())
        rows.append(f"| `xmla.{name}` | {plain(summary)} |")
    return table("name | what it is", rows)
