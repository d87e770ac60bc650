"""A picture of a run: time against batch and context, and the roofline; and the theme of all pictures."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xmla.bench.provenance import origin

Line = dict[str, Any]
# On a light page, which is what the file says, and on a dark one, which its style sheet says.
COLORS = {
    "text": ("#24292f", "#d7dde5"),
    "xmla": ("#2f6fde", "#5b9bff"),
    "peer": ("#a8b3c2", "#8592a3"),
    "ceiling": ("#b3541e", "#f0a35e"),
}
LIGHT = {name: light for name, (light, _) in COLORS.items()}


def _number(case: str, name: str) -> int | None:
    match = re.search(rf"\b{name}=(\d+)", case)
    return int(match[1]) if match else None


@contextmanager
def theme() -> Iterator[Any]:
    """matplotlib in the pictures' theme; the same results give the same SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colors = dict.fromkeys(inked, LIGHT["text"]) | {"legend.facecolor": "none", "legend.edgecolor": "none"}
    svg = {"svg.fonttype": "none", "svg.hashsalt": "xmla", "font.family": "sans-serif"}
    with pyplot.rc_context(colors | svg):
        yield pyplot


def _dark_rules() -> str:
    """CSS that gives the colours of a dark page to a reader who prefers one."""
    rules = [
        f'[style*="{kind}: {light}"] {{{kind}: {dark} !important}}'
        for light, dark in COLORS.values()
        for kind in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme: dark) {" + " ".join(rules) + "}"


def save(pyplot: Any, figure: Any, file: Path, contents: object = None) -> None:
    """Write the figure. An SVG has no ground, follows its reader's scheme, and describes what it shows."""
    if file.suffix == ".svg":
        described = {} if contents is None else {"Description": json.dumps(contents)}
        figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": "xmla"} | described)
        file.write_text(file.read_text().replace("</style>", f"\n{_dark_rules()}\n</style>", 1))
    else:
        figure.savefig(file, dpi=110, facecolor="white")
    pyplot.close(figure)


def logarithmic(*axes: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, …, with k for thousands."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e3:g}k" if x >= 1e4 else f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def draw(head: Line, lines: list[Line], file: Path) -> None:
    """Decode time by batch with the peers', logits time by context, and all cases under the ceilings."""
    with theme() as pyplot:
        figure, panels = pyplot.subplot_mosaic(
            [["batch", "context"], ["roofline", "roofline"]], figsize=(11, 8.5), layout="constrained"
        )
        by_batch, by_context, roofline = panels["batch"], panels["context"], panels["roofline"]
        timed = [line for line in lines if "us" in line]
        decode = [line for line in timed if line["op"] == "sparse_mla" and " h=128 s_q=1 " in line["case"]]
        for name in sorted({peer for line in decode for peer in line["us"]}, reverse=True):
            points = sorted((_number(line["case"], "b"), line["us"][name][0]) for line in decode if name in line["us"])
            by_batch.plot(*zip(*points, strict=True), marker="o", label=name)
        by_batch.set(xscale="log", yscale="log", xlabel="requests", ylabel="µs", title="sparse_mla, decode, 128 heads")

        paged = [line for line in timed if line["op"] == "indexer_logits_paged"]
        for group in sorted({(_number(line["case"], "b"), _number(line["case"], "next_n")) for line in paged}):
            points = sorted(
                (_number(line["case"], "keys"), line["us"]["xmla"][0])
                for line in paged
                if (_number(line["case"], "b"), _number(line["case"], "next_n")) == group
            )
            if len(points) > 1:
                by_context.plot(*zip(*points, strict=True), marker="o", label=f"b={group[0]} next_n={group[1]}")
        by_context.set(xscale="log", yscale="log", xlabel="keys", ylabel="µs", title="indexer_logits_paged")

        limits = head["ceilings"]
        bandwidth = limits["copy_bytes_per_s"]
        intensities = [10.0 ** (e / 20) for e in range(81)]
        for name, dashes in (("bf16", "--"), ("fp8", ":")):
            top = limits[f"{name}_flop_per_s"]
            ceiling = [min(top, bandwidth * x) / 1e12 for x in intensities]
            roofline.plot(intensities, ceiling, dashes, color=LIGHT["ceiling"], label=f"{name} ceiling")
        for op in sorted({line["op"] for line in timed}):
            points = [
                (line["tflop_per_s"] * 1e3 / line["gb_per_s"], line["tflop_per_s"])
                for line in timed
                if line["op"] == op and line["tflop_per_s"] and line["gb_per_s"]
            ]
            if points:
                roofline.scatter(*zip(*points, strict=True), label=op)
        roofline.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title="all cases")
        for panel in (by_batch, by_context, roofline):
            logarithmic(panel.xaxis, panel.yaxis)
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                panel.legend(fontsize=9)
        figure.supxlabel(origin(head), fontsize=9)
        save(pyplot, figure, file, origin(head))
