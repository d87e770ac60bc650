"""Look at the built documents in a browser: what does not fit a page, and pictures of the pages.

python docs/check_pages.py [--html FOLDER] [--pictures FOLDER] [page …]       (`make pages`, after `make docs`)

Every page is laid out at the width of a phone and of a desktop. Each line names a table, picture or page that does not
fit: it sticks out of the column of text, or has to be scrolled to be seen. On a phone what is wide may scroll in a box
of its own, but for tables of up to three columns. The exit status is 1 if there is such a line. With --pictures each
page is also drawn to PNG files, at each width, light and dark. It needs Chromium (Debian: `apt-get install chromium`),
and no network.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from select import select
from typing import Any

HTML = Path(__file__).parent.parent / "build" / "docs" / "html"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe")
WIDTHS = {"phone": 390, "desktop": 1400}
MOST_COLUMNS = 3
PATIENCE = 120  # seconds
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
LOADED = "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"


class Browser:
    """A page of Chromium, which reads commands from one pipe and answers into another."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.read, self.calls, self.page = bytearray(), 0, {}
        target = self.call("Target.createTarget", url="about:blank")
        self.page = {"sessionId": self.call("Target.attachToTarget", **target, flatten=True)["sessionId"]}

    def message(self) -> Any:
        """The next that the browser says, an answer or an event."""
        while b"\0" not in self.read:
            if not select([self.answers], [], [], PATIENCE)[0]:
                raise TimeoutError(f"the browser has said nothing for {PATIENCE} seconds")
            if not (more := os.read(self.answers, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self.read += more
        text, _, self.read = self.read.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **parameters: Any) -> Any:
        """A method of the DevTools protocol and its result."""
        self.calls += 1
        command = {"id": self.calls, "method": method, "params": parameters} | self.page
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while (message := self.message()).get("id") != self.calls:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Lay out a page, with its pictures."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.evaluate(LOADED)

    def picture(self, width: int) -> bytes:
        height = min(self.evaluate("document.documentElement.scrollHeight"), TALLEST)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("docs/check_pages.py: there is no Chromium on the PATH (Debian: apt-get install chromium)")
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads file 3 and writes file 4.
        pipes = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
        command = ["bash", "-c", pipes, "bash", program, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)


def faults(found: list[dict[str, Any]], kind: str) -> Iterator[str]:
    """What does not fit, of that which `MEASURE` found."""
    for one in found:
        if one["outside"] > 1:
            yield f"{one['name']} is {one['outside']:.0f} px outside"
        if one["hidden"] > 1 and (kind == "desktop" or one.get("columns", MOST_COLUMNS + 1) <= MOST_COLUMNS):
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
    with browser() as window:
        for page, kind in product(pages, WIDTHS):
            name = str(page.relative_to(options.html).with_suffix(""))
            window.open(page, WIDTHS[kind], "light")
            for fault in faults(window.evaluate(MEASURE), kind):
                print(f"{name}, {kind}: {fault}", flush=True)
                wrong += 1
            for scheme in ("light", "dark") if options.pictures else ():
                window.open(page, WIDTHS[kind], scheme)
                file = options.pictures / f"{name.replace('/', '-')}-{kind}-{scheme}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(window.picture(WIDTHS[kind]))
    print(f"{len(pages)} pages, {wrong} faults")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
