"""The README's numbers are those of the committed result; its links lead somewhere."""

import re
from pathlib import Path

from xmla.bench import ranks_report
from xmla.bench.report import insert, report

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_numbers_are_the_committed_ones() -> None:
    numbers = report([ROOT / "benchmarks/results/h200/bench.jsonl"])
    assert "FlashMLA" in numbers
    assert insert(README, numbers) == README


def test_steps_over_several_gpus_are_the_committed_ones() -> None:
    table = ranks_report.report(ROOT / "benchmarks/results/h200/parallel.jsonl")
    page = (ROOT / "docs/ranks.md").read_text()
    assert insert(page, table, ranks_report.MARKERS) == page
    assert table.count("µs") > 20


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_one_name_means_one_thing() -> None:
    """`xmla` is the package; the front-ends are `xt` and `xj`, or have no other name than their own."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [file for folder in ("xmla", "examples", "docs", "tests") for file in (ROOT / folder).rglob("*.py*")]
    wrong = re.compile(r"(torch_api|jax_api) as (?!xt\b|xj\b|api\b)\w+|import \w+(\.\w+)* as xmla\b")
    found = {str(file.relative_to(ROOT)): wrong.findall(file.read_text()) for file in files if file.suffix != ".pyc"}
    assert len(found) > 100
    assert {file: names for file, names in found.items() if names} == {}
