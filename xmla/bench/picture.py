"""Pictures of results: speed beside the peer's under the ceiling; time against batch and context, and the roofline."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xmla.bench.provenance import origin

Line = dict[str, Any]
Bar = tuple[str, float, float]  # what is timed, TFLOP/s here, the peer's
PANELS = {
    "decode, 128 heads, V3.2": (r"decode b=(\d+) h=128 s_q=1 k=2048", "b={0}"),
    "decode, 64 heads, V4": (r"M1-1 b=(\d+) h=64 s_q=2 k=128\+512 pages 256, 64", "b={0}"),
    "prefill of 4096 tokens, 128 heads": (r"prefill (bf16|fp8) \w+ s_q=4096 h=128 k=2048 s_kv=(\d+)", "{0}\n{1}"),
}
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
def _pyplot() -> Iterator[Any]:
    """matplotlib in the pictures' theme; the same results give the same SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    theme = dict.fromkeys(inked, LIGHT["text"]) | {"legend.facecolor": "none", "legend.edgecolor": "none"}
    svg = {"svg.fonttype": "none", "svg.hashsalt": "xmla", "font.family": "sans-serif"}
    with pyplot.rc_context(theme | svg):
        yield pyplot


def _dark_rules() -> str:
    """CSS that gives the colours of a dark page to a reader who prefers one."""
    rules = [
        f'[style*="{kind}: {light}"] {{{kind}: {dark} !important}}'
        for light, dark in COLORS.values()
        for kind in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme: dark) {" + " ".join(rules) + "}"


def _save(pyplot: Any, figure: Any, file: Path, contents: object = None) -> None:
    """Write the figure. An SVG has no ground, follows its reader's scheme, and describes what it shows."""
    if file.suffix == ".svg":
        described = {} if contents is None else {"Description": json.dumps(contents)}
        figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": "xmla"} | described)
        file.write_text(file.read_text().replace("</style>", f"\n{_dark_rules()}\n</style>", 1))
    else:
        figure.savefig(file, dpi=110, facecolor="white")
    pyplot.close(figure)


def _logarithmic(*axes: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10, …, with k for thousands."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e3:g}k" if x >= 1e4 else f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def speeds(lines: list[Line]) -> dict[str, list[Bar]]:
    """The bars of each panel: cases that have FlashMLA as a peer."""
    panels: dict[str, list[Bar]] = {}
    for title, (pattern, label) in PANELS.items():
        for line in lines:
            match = re.fullmatch(pattern, line.get("case", ""))
            ratios = [ratio for peer, ratio in line.get("ratio_to_peer", {}).items() if peer.startswith("FlashMLA")]
            if match and ratios:
                name = label.format(
                    *(f"{int(x) // 1024}k" if len(x) > 3 and x.isdigit() else x for x in match.groups())
                )
                panels.setdefault(title, []).append((name, line["tflop_per_s"], line["tflop_per_s"] / ratios[0]))
    return panels


def described(file: Path) -> Any:
    """What an SVG of `draw_speeds` says that it shows."""
    from xml.etree import ElementTree

    description = ElementTree.parse(file).find(".//{http://purl.org/dc/elements/1.1/}description")
    return json.loads(description.text) if description is not None and description.text else None


def shown_speeds(head: Line, lines: list[Line]) -> Any:
    """What `draw_speeds` draws, as `described` reads it back."""
    bars = {title: [[name, round(x, 1), round(y, 1)] for name, x, y in panel] for title, panel in speeds(lines).items()}
    return {"origin": origin(head), "ceiling": round(head["ceilings"]["bf16_flop_per_s"] / 1e12), "bars": bars}


def draw_speeds(head: Line, lines: list[Line], file: Path) -> None:
    """TFLOP/s of `sparse_mla` as bars beside FlashMLA's, with their ratio, under the rate of a dense matmul."""
    contents = shown_speeds(head, lines)
    with _pyplot() as pyplot:
        widths = [len(bars) for bars in contents["bars"].values()]
        figure, panels = pyplot.subplots(
            1, len(widths), figsize=(11, 3.8), layout="constrained", sharey=True, width_ratios=widths, squeeze=False
        )
        for panel, (title, bars) in zip(panels[0], contents["bars"].items(), strict=True):
            places = range(len(bars))
            panel.bar([x - 0.2 for x in places], [bar[1] for bar in bars], 0.4, color=LIGHT["xmla"], label="xmla")
            panel.bar([x + 0.2 for x in places], [bar[2] for bar in bars], 0.4, color=LIGHT["peer"], label="FlashMLA")
            panel.axhline(contents["ceiling"], ls="--", color=LIGHT["ceiling"], label="dense bf16 matmul")
            for x, (_, ours, theirs) in enumerate(bars):
                panel.text(x, max(ours, theirs) + 8, f"{ours / theirs:.2f}×", ha="center", fontsize=9)
            panel.set_xticks(places, [bar[0] for bar in bars])
            panel.set_title(title, fontsize=11)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][0].set_ylabel("TFLOP/s of attention")
        panels[0][0].legend(fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.93))
        figure.supxlabel(contents["origin"], fontsize=9)
        _save(pyplot, figure, file, contents)


def in_turns(line: Line) -> tuple[float, float]:
    """Microseconds by PyTorch and by JAX. An older run has PyTorch's beside its peers alone."""
    return line["torch"].get("us", line["us"]["xmla"])[0], line["jax"]["us"][0]


def shown_frameworks(head: Line, lines: list[Line]) -> Any:
    """What `draw_frameworks` draws: of each op, times by PyTorch and speeds by JAX as multiples of PyTorch's."""
    points: dict[str, list[list[float]]] = {}
    for line in (line for line in lines if "us" in line.get("jax", {})):
        ours, by_jax = in_turns(line)
        points.setdefault(line["op"], []).append([ours, round(ours / by_jax, 3)])
    return {"origin": origin(head), "points": points}


def draw_frameworks(head: Line, lines: list[Line], file: Path) -> None:
    """Every case: its time by PyTorch across, its speed by JAX beside it upwards."""
    contents = shown_frameworks(head, lines)
    with _pyplot() as pyplot:
        figure, panel = pyplot.subplots(figsize=(11, 3.8), layout="constrained")
        for op, points in contents["points"].items():
            panel.scatter(*zip(*points, strict=True), s=18, label=op)
        panel.axhline(1, ls="--", color=LIGHT["ceiling"])
        panel.set(xscale="log", xlabel=f"µs by PyTorch\n{contents['origin']}", ylabel="PyTorch / JAX", ylim=(0.85, 1.2))
        _logarithmic(panel.xaxis)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=9, ncols=3)
        _save(pyplot, figure, file, contents)


def draw(head: Line, lines: list[Line], file: Path) -> None:
    """Decode time by batch with the peers', logits time by context, and all cases under the ceilings."""
    with _pyplot() as pyplot:
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
            _logarithmic(panel.xaxis, panel.yaxis)
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                panel.legend(fontsize=9)
        figure.supxlabel(origin(head), fontsize=9)
        _save(pyplot, figure, file, origin(head))
