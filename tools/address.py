"""The repository's address, in the files of a release: nothing in the tree has it, and clones need none.

Without an address a release has no URLs, and its page on a package index names files of the tree, without links and
pictures.
"""

import re
from pathlib import Path

PLACE = "<the address of this repository>"  # where a reader of the tree has to know it
LOCAL = r"(?!\w+:|#)"  # a link's target that is a file of the tree
LINK = re.compile(rf"(!?)(\[[^\[\]]*\]\(){LOCAL}")
WHOLE_LINK = re.compile(rf"(!?)\[([^\[\]]*)\]\({LOCAL}([^()#]*)[^()]*\)")
ANCHOR = re.compile(r"\[([^\[\]]*)\]\(#[^()]*\)")  # an index gives headings none
CLONE = re.compile(r"<!-- clone -->\n.*?<!-- /clone -->\n", re.DOTALL)  # what holds of a clone alone
EXTRAS = "'.["  # what pip installs in a clone
READ, PAGE = 'readme = "README.md"\n', "INDEX.md"
ADDRESS = re.compile(r"https://[^/\s]+(/[^/\s]+)+")


def index_page(readme: str, distribution: str, address: str | None, tag: str) -> str:
    """The README as a package index shows it: what is installed is the package, and a link says the whole address.

    Without an address a link is its text and the file's name in the source archive.
    """
    page = ANCHOR.sub(r"\1", CLONE.sub("", readme)).replace(EXTRAS, f"'{distribution}[")
    if address is None:
        return WHOLE_LINK.sub(lambda link: "" if link[1] else f"{link[2]} (`{link[3]}`)", page)
    return LINK.sub(lambda link: f"{link[0]}{address}/{'raw' if link[1] else 'blob'}/{tag}/", page)


def checked(address: str) -> str:
    """The address, if links can begin with it."""
    if not ADDRESS.fullmatch(address):
        raise SystemExit(f"REPOSITORY is {address!r}, expected such as https://HOST/OWNER/NAME, without a last slash")
    return address


def in_place_of(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if old not in text:
        raise SystemExit(f"{file.name} has no {old!r}, in whose place the address is written")
    file.write_text(text.replace(old, new))


def write(tree: Path, distribution: str, address: str | None, tag: str) -> None:
    """Give the package in `tree` a page for the index beside the README and, by an address, its URLs."""
    project = tree / "pyproject.toml"
    in_place_of(project, READ, READ.replace("README.md", PAGE))
    (tree / PAGE).write_text(index_page((tree / "README.md").read_text(), distribution, address, tag))
    if address is None:
        return
    urls = {
        "Repository": address, "Documents": f"{address}/blob/{tag}/README.md#documents",
        "Changes": f"{address}/blob/{tag}/CHANGELOG.md", "Issues": f"{address}/issues",
    }  # fmt: skip
    table = "\n".join(["[project.urls]", *(f'{label} = "{url}"' for label, url in urls.items())])
    optional = "[project.optional-dependencies]\n"
    in_place_of(project, optional, f"{table}\n\n{optional}")
    version = "\nversion: "
    in_place_of(tree / "CITATION.cff", version, f'\nrepository-code: "{address}"{version}')
