"""What `make report` makes: each table with its place in a page and the results that it is of, and each picture."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.report import (
    declarations,
    engines,
    evidence,
    frameworks,
    layer,
    megatron,
    pictures,
    ranks,
    roofline,
    selections,
    speeds,
    summary,
    transformers,
)

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True, slots=True)
class Table:
    """Markdown between two comments of a page, `<!-- marker -->` and `<!-- /marker -->`.

    Attributes:
        results: Files of benchmarks/results: the arguments of `report`.
    """

    page: str
    marker: str
    report: Callable[..., str]
    results: tuple[str, ...]

    def markdown(self) -> str:
        return self.report(*(RESULTS / file for file in self.results))

    def insert(self, text: str) -> str:
        """The page's text with this table in its place."""
        begin, end = f"<!-- {self.marker} -->\n", f"<!-- /{self.marker} -->"
        before, rest = text.split(begin)
        return before + begin + self.markdown() + end + rest.split(end)[1]


def of_engine(page: str, *results: str) -> list[Table]:
    """The tables of a page that says how xmla serves in an engine."""
    reports = {"glance": engines.glance, "speed": engines.speed, "answers": engines.answers}
    return [Table(page, marker, report, results) for marker, report in reports.items()]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of a file of results.

    Attributes:
        shown: What the drawing says that it shows, as `pictures.described` reads it back.
    """

    file: str
    shown: Callable[[Path], Any]
    draw: Callable[[Path, Path], None]
    results: str


TABLES = (
    Table("README.md", "speed", summary.report, (
        "h200/bench.jsonl", "h200/frameworks.jsonl", "h100/bench.jsonl", "h200/backward.jsonl", "h100/backward.jsonl",
        "h200/jax_peers.jsonl", "h200/layer.jsonl", "h200/megatron.jsonl", "h200/transformers.jsonl",
        "h200/vllm_033.jsonl", "h100/vllm_033.jsonl",
    )),
    Table("docs/concepts.md", "axes", declarations.axes, ()),
    Table("docs/formats.md", "formats", declarations.formats, ()),
    Table("docs/ops.md", "ops", declarations.ops, ()),
    Table("docs/package.md", "package", declarations.package, ()),
    Table("docs/contract.md", "evidence", evidence.report, ("h200/test.jsonl", "h200/contract.jsonl")),
    Table("docs/megatron.md", "megatron", megatron.report, ("h200/megatron.jsonl",)),
    Table("docs/performance.md", "ops", summary.ops, (
        "h200/bench.jsonl", "h200/frameworks.jsonl", "h100/bench.jsonl", "h200/backward.jsonl", "h100/backward.jsonl",
        "h200/blocks.jsonl", "h100/blocks.jsonl",
    )),
    Table("docs/performance.md", "steps", summary.steps, (
        "h200/frameworks.jsonl", "h200/model_step.jsonl", "h200/jax_peers.jsonl", "h200/layer.jsonl",
        "h200/megatron.jsonl", "h200/transformers.jsonl", "h200/vllm_033.jsonl", "h100/vllm_033.jsonl",
        "h200/sglang.jsonl", "h100/sglang.jsonl",
    )),
    Table("docs/performance_cases.md", "numbers", speeds.report, (
        "h200/bench.jsonl", "h100/bench.jsonl", "h200/backward.jsonl", "h100/backward.jsonl", "h100/blocks.jsonl",
        "h200/blocks.jsonl",
    )),
    Table("docs/performance_cases.md", "kinds", selections.report, ("h200/selection_kinds.jsonl",)),
    Table("docs/performance_frameworks.md", "frameworks", frameworks.report, ("h200/frameworks.jsonl",)),
    Table("docs/ranks.md", "ranks", ranks.report, ("h200/parallel.jsonl",)),
    Table("docs/roofline.md", "roofline", roofline.report, ("h200/bench.jsonl",)),
    Table("docs/transformers.md", "layer", transformers.report, ("h200/transformers.jsonl",)),
    Table("docs/training.md", "layer", layer.report, ("h200/layer.jsonl",)),
    *of_engine("docs/sglang_measured.md", "h100/sglang.jsonl", "h200/sglang.jsonl"),
    *of_engine("docs/vllm_measured.md", "h200/vllm_033.jsonl", "h100/vllm_033.jsonl", "h200/vllm_026.jsonl"),
    Table("docs/vllm_measured.md", "parts", engines.parts, ("h200/vllm_parts.jsonl",)),
    Table("docs/vllm_measured.md", "trace", engines.trace, ("h200/vllm_033.jsonl",)),
)  # fmt: skip
PICTURES = (
    Picture("docs/images/speed.svg", pictures.shown_speeds, pictures.draw_speeds, "h200/bench.jsonl"),
    Picture("docs/images/run.svg", pictures.shown_run, pictures.draw_run, "h200/bench.jsonl"),
    Picture("docs/images/frameworks.svg", pictures.shown_frameworks, pictures.draw_frameworks, "h200/frameworks.jsonl"),
)


def pages() -> dict[str, str]:
    """Each page's text with its tables in their places."""
    texts = {table.page: (ROOT / table.page).read_text() for table in TABLES}
    for table in TABLES:
        texts[table.page] = table.insert(texts[table.page])
    return texts


def others() -> list[str]:
    """The pages and pictures that are not those of the committed results."""
    wrong = [page for page, text in pages().items() if (ROOT / page).read_text() != text]
    return wrong + [
        picture.file
        for picture in PICTURES
        if pictures.described(ROOT / picture.file) != picture.shown(RESULTS / picture.results)
    ]


def write() -> None:
    for page, text in pages().items():
        (ROOT / page).write_text(text)
    for picture in PICTURES:
        picture.draw(RESULTS / picture.results, ROOT / picture.file)
