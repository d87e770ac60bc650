"""The repository's address, in the files of a release: nothing in the tree has it, and clones need none."""

import re
from pathlib import Path

PLACE = "<the address of this repository>"  # where a reader of the tree has to know it
LINK = re.compile(r"(!?)(\[[^\[\]]*\]\()(?!\w+:|#)")  # of Markdown, to a file of the tree
READ, PAGE = 'readme = "README.md"\n', "INDEX.md"


def index_page(readme: str, address: str, tag: str) -> str:
    """The README as a package index shows it, where a link has to say the whole address."""
    page = LINK.sub(lambda link: f"{link[0]}{address}/{'raw' if link[1] else 'blob'}/{tag}/", readme)
    return page.replace(PLACE, f"{address}.git")


def write(tree: Path, address: str, tag: str) -> None:
    """Give the package in `tree` its URLs, and a page for the index beside the README."""
    project = tree / "pyproject.toml"
    text = project.read_text()
    urls = {
        "Repository": address, "Documents": f"{address}/blob/{tag}/README.md#documents",
        "Changes": f"{address}/blob/{tag}/CHANGELOG.md", "Issues": f"{address}/issues",
    }  # fmt: skip
    table = "\n".join(["[project.urls]", *(f'{label} = "{url}"' for label, url in urls.items())])
    optional = "[project.optional-dependencies]\n"
    for part in (READ, optional):
        if part not in text:
            raise SystemExit(f"pyproject.toml has no {part!r}, in whose place the address is written")
    text = text.replace(READ, READ.replace("README.md", PAGE))
    project.write_text(text.replace(optional, f"{table}\n\n{optional}"))
    (tree / PAGE).write_text(index_page((tree / "README.md").read_text(), address, tag))
