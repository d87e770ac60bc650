"""Look at the built documents in a browser: what does not fit a page, and pictures of the pages.

python docs/check_pages.py [--html FOLDER] [--pictures FOLDER] [page …]       (`make pages`, after `make docs`)

Every page is laid out at the width of a phone and of a desktop. Each line names a table, picture or page that does not
fit: it sticks out of the column of text, or has to be scrolled to be seen. On a phone what is wide may scroll in a box
of its own, but for tables of up to six columns. The exit status is 1 if there is such a line. With --pictures each
page is also drawn to PNG files, at each width, light and dark. It needs playwright (`pip install --group pages`),
Chromium (Debian: `apt-get install chromium`), and no network.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

HTML = Path(__file__).parent.parent / "build" / "docs" / "html"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"phone": 390, "desktop": 1400}
HEIGHT = 900
MOST_COLUMNS = 6
TALLEST = 8000  # of a picture; a page may be longer
# Of every table and picture: what it is, its columns, by how much it sticks out, and how much of it is hidden.
MEASURE = """
(() => {
  const column = document.querySelector('article').getBoundingClientRect();
  const found = [...document.querySelectorAll('article :is(table, img, .byte-diagram > svg)')].map(element => {
    let box = element;
    while (box.tagName !== 'ARTICLE' && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX))
      box = box.parentElement;
    const scrolls = box.tagName !== 'ARTICLE';
    const {left, right} = (scrolls ? box : element).getBoundingClientRect();
    const pad = scrolls ? parseFloat(getComputedStyle(box).paddingRight) : 0;
    const row = element.rows?.[0];
    const name = row?.innerText ?? element.getAttribute('aria-label') ?? element.alt;
    return {
      name: `${element.tagName.toLowerCase()} "${name.replace(/\\s+/g, ' ').trim()}"`,
      columns: row?.cells.length,
      outside: Math.max(right - pad - column.right, column.left - left - pad),
      hidden: scrolls ? box.scrollWidth - box.clientWidth : 0,
    };
  });
  const root = document.documentElement;
  return [...found, {name: 'the page', outside: root.scrollWidth - root.clientWidth, hidden: 0}];
})()
"""


@contextmanager
def tab() -> Iterator[Page]:
    """A page of the machine's own Chromium."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("docs/check_pages.py: there is no Chromium on the PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        # Elsewhere its sandbox may be missing, and the pages are ours.
        chromium = playwright.chromium.launch(
            executable_path=program, chromium_sandbox=False, ignore_default_args=["--hide-scrollbars"]
        )
        yield chromium.new_page()
        chromium.close()


def faults(found: list[dict[str, Any]], kind: str) -> Iterator[str]:
    """What does not fit, of that which `MEASURE` found."""
    for one in found:
        if one["outside"] > 1:
            yield f"{one['name']} is {one['outside']:.0f} px outside"
        narrow = one.get("columns") is not None and one["columns"] <= MOST_COLUMNS
        if one["hidden"] > 1 and (kind == "desktop" or narrow):
            yield f"{one['name']} has {one['hidden']:.0f} px to scroll"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="such as concepts or ops/sparse_mla; all of them if none is named")
    parser.add_argument("--html", type=Path, default=HTML)
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    pages = [options.html / f"{page}.html" for page in options.pages]
    # Those of source/ show files of the repository, which are code alone.
    pages = pages or sorted({*options.html.rglob("*.html")} - {*options.html.glob("source/**/*.html")})
    if not pages:
        parser.error(f"no pages in {options.html}: make docs")
    wrong = 0
    with tab() as window:
        for page, (kind, width) in product(pages, WIDTHS.items()):
            name = str(page.relative_to(options.html).with_suffix(""))
            window.set_viewport_size({"width": width, "height": HEIGHT})
            window.emulate_media(color_scheme="light")
            window.goto(page.resolve().as_uri())
            for fault in faults(window.evaluate(MEASURE), kind):
                print(f"{name}, {kind}: {fault}", flush=True)
                wrong += 1
            for scheme in ("light", "dark") if options.pictures else ():
                window.emulate_media(color_scheme=scheme)
                height = min(window.evaluate("document.documentElement.scrollHeight"), TALLEST)
                window.screenshot(
                    path=options.pictures / f"{name.replace('/', '-')}-{kind}-{scheme}.png", full_page=True,
                    clip={"x": 0, "y": 0, "width": width, "height": height},
                )  # fmt: skip
    print(f"{len(pages)} pages, {wrong} faults")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
