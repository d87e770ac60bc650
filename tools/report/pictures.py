"""Pictures of the documents: speeds beside the peer's under the ceiling, both frameworks, and a run of `xmla bench`."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from tools.report.frameworks import in_turns
from tools.report.results import Line, read
from xmla.bench import picture
from xmla.bench.picture import LIGHT, logarithmic, save, theme
from xmla.bench.provenance import origin

Bar = tuple[str, float, float]  # what is timed, TFLOP/s here, the peer's
PANELS = {
    "decode, 128 heads, V3.2": (r"decode b=(\d+) h=128 s_q=1 k=2048", "b={0}"),
    "decode, 64 heads, V4": (r"M1-1 b=(\d+) h=64 s_q=2 k=128\+512 pages 256, 64", "b={0}"),
    "prefill of 4096 tokens, 128 heads": (r"prefill (bf16|fp8) \w+ s_q=4096 h=128 k=2048 s_kv=(\d+)", "{0}\n{1}"),
}


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
    """What an SVG says that it shows."""
    from xml.etree import ElementTree

    description = ElementTree.parse(file).find(".//{http://purl.org/dc/elements/1.1/}description")
    return json.loads(description.text) if description is not None and description.text else None


def shown_speeds(results: Path) -> Any:
    """What `draw_speeds` draws, as `described` reads it back."""
    head, *lines = read(results)[0]
    bars = {title: [[name, round(x, 1), round(y, 1)] for name, x, y in panel] for title, panel in speeds(lines).items()}
    return {"origin": origin(head), "ceiling": round(head["ceilings"]["bf16_flop_per_s"] / 1e12), "bars": bars}


def draw_speeds(results: Path, file: Path) -> None:
    """TFLOP/s of `sparse_mla` as bars beside FlashMLA's, with their ratio, under the rate of a dense matmul."""
    contents = shown_speeds(results)
    with theme() as pyplot:
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
        save(pyplot, figure, file, contents)


def shown_frameworks(results: Path) -> Any:
    """What `draw_frameworks` draws: of each op, times by PyTorch and speeds by JAX as multiples of PyTorch's."""
    head, *lines = chain.from_iterable(read(results))
    points: dict[str, list[list[float]]] = {}
    for line in (line for line in lines if "us" in line.get("jax", {})):
        ours, by_jax = in_turns(line)
        points.setdefault(line["op"], []).append([ours, round(ours / by_jax, 3)])
    return {"origin": origin(head), "points": points}


def draw_frameworks(results: Path, file: Path) -> None:
    """Every case: its time by PyTorch across, its speed by JAX beside it upwards."""
    contents = shown_frameworks(results)
    with theme() as pyplot:
        figure, panel = pyplot.subplots(figsize=(11, 3.8), layout="constrained")
        for op, points in contents["points"].items():
            panel.scatter(*zip(*points, strict=True), s=18, label=op)
        panel.axhline(1, ls="--", color=LIGHT["ceiling"])
        panel.set(xscale="log", xlabel=f"µs by PyTorch\n{contents['origin']}", ylabel="PyTorch / JAX", ylim=(0.85, 1.2))
        logarithmic(panel.xaxis)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=9, ncols=3)
        save(pyplot, figure, file, contents)


def shown_run(results: Path) -> Any:
    """The origin of a run, all that `draw_run`'s picture is compared by."""
    return origin(read(results)[0][0])


def draw_run(results: Path, file: Path) -> None:
    """Draw a run as `xmla bench --picture` does."""
    head, *lines = read(results)[0]
    picture.draw(head, lines, file)
