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
LIGHT = {"text": "#24292f", "xmla": "#2f6fde", "peer": "#a8b3c2", "ceiling": "#b3541e"}
DARK = {"text": "#d7dde5", "xmla": "#5b9bff", "peer": "#66717f", "ceiling": "#f0a35e"}


def _number(case: str, name: str) -> int | None:
    found = re.search(rf"\b{name}=(\d+)", case)
    return int(found[1]) if found else None


@contextmanager
def _pyplot(dark: bool) -> Iterator[Any]:
    """matplotlib in a theme, on a transparent ground; the same results give the same SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = (DARK if dark else LIGHT)["text"]
    theme = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    ground = {"axes.facecolor": "none", "legend.facecolor": "none", "legend.edgecolor": "none"}
    svg = {"svg.fonttype": "none", "svg.hashsalt": "xmla", "font.family": "sans-serif"}
    with pyplot.rc_context(theme | ground | svg):
        yield pyplot


def _save(pyplot: Any, figure: Any, file: Path, dark: bool, shown: object = None) -> None:
    """Write the figure; an SVG has no date, and what it shows is in its description."""
    options: dict[str, Any] = {"facecolor": "#14181e" if dark else "white"}
    if file.suffix == ".svg":
        described = {} if shown is None else {"Description": json.dumps(shown)}
        options = {"transparent": True, "metadata": {"Date": None, "Creator": "xmla"} | described}
    figure.savefig(file, dpi=110, **options)
    pyplot.close(figure)


def speeds(lines: list[Line]) -> dict[str, list[Bar]]:
    """The bars of each panel: cases that have FlashMLA as a peer."""
    panels: dict[str, list[Bar]] = {}
    for title, (pattern, label) in PANELS.items():
        for line in lines:
            found = re.fullmatch(pattern, line.get("case", ""))
            ratios = [ratio for peer, ratio in line.get("ratio_to_peer", {}).items() if peer.startswith("FlashMLA")]
            if found and ratios:
                name = label.format(
                    *(f"{int(x) // 1024}k" if len(x) > 3 and x.isdigit() else x for x in found.groups())
                )
                panels.setdefault(title, []).append((name, line["tflop_per_s"], line["tflop_per_s"] / ratios[0]))
    return panels


def described(file: Path) -> Any:
    """What an SVG of `draw_speeds` says that it shows."""
    from xml.etree import ElementTree

    found = ElementTree.parse(file).find(".//{http://purl.org/dc/elements/1.1/}description")
    return json.loads(found.text) if found is not None and found.text else None


def shown_speeds(head: Line, lines: list[Line]) -> Any:
    """What `draw_speeds` draws, as `described` reads it back."""
    bars = {title: [[name, round(x, 1), round(y, 1)] for name, x, y in found] for title, found in speeds(lines).items()}
    return {"origin": origin(head), "ceiling": round(head["ceilings"]["bf16_flop_per_s"] / 1e12), "bars": bars}


def draw_speeds(head: Line, lines: list[Line], file: Path, dark: bool = False) -> None:
    """TFLOP/s of `sparse_mla` as bars beside FlashMLA's, under the rate of a dense matmul."""
    shown, colors = shown_speeds(head, lines), DARK if dark else LIGHT
    with _pyplot(dark) as pyplot:
        widths = [len(found) for found in shown["bars"].values()]
        figure, panels = pyplot.subplots(
            1, len(widths), figsize=(11, 3.4), layout="constrained", sharey=True, width_ratios=widths, squeeze=False
        )
        for panel, (title, found) in zip(panels[0], shown["bars"].items(), strict=True):
            places = range(len(found))
            panel.bar([x - 0.2 for x in places], [bar[1] for bar in found], 0.4, color=colors["xmla"], label="xmla")
            panel.bar([x + 0.2 for x in places], [bar[2] for bar in found], 0.4, color=colors["peer"], label="FlashMLA")
            panel.axhline(shown["ceiling"], ls="--", color=colors["ceiling"], label="dense bf16 matmul")
            panel.set_xticks(places, [bar[0] for bar in found])
            panel.set_title(title, fontsize=10)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][0].set_ylabel("TFLOP/s of attention")
        panels[0][0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.93))
        figure.supxlabel(shown["origin"], fontsize=8)
        _save(pyplot, figure, file, dark, shown)


def shown_frameworks(head: Line, lines: list[Line]) -> Any:
    """What `draw_frameworks` draws: of each op, times by PyTorch and speeds by JAX as multiples of PyTorch's."""
    points: dict[str, list[list[float]]] = {}
    for line in (line for line in lines if "us" in line.get("jax", {})):
        ours, by_jax = line["us"]["xmla"][0], line["jax"]["us"][0]
        points.setdefault(line["op"], []).append([ours, round(ours / by_jax, 3)])
    return {"origin": origin(head), "points": points}


def draw_frameworks(head: Line, lines: list[Line], file: Path, dark: bool = False) -> None:
    """Every case: its time by PyTorch across, its speed by JAX beside it upwards."""
    shown, colors = shown_frameworks(head, lines), DARK if dark else LIGHT
    with _pyplot(dark) as pyplot:
        figure, panel = pyplot.subplots(figsize=(11, 3.4), layout="constrained")
        for op, points in shown["points"].items():
            panel.scatter(*zip(*points, strict=True), s=18, label=op)
        panel.axhline(1, ls="--", color=colors["ceiling"])
        panel.set(xscale="log", xlabel=f"µs by PyTorch\n{shown['origin']}", ylabel="PyTorch / JAX", ylim=(0.85, 1.2))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, ncols=3)
        _save(pyplot, figure, file, dark, shown)


def draw(head: Line, lines: list[Line], file: Path, dark: bool = False) -> None:
    """Three panels: decode time by batch with the peer's, logits time by context, all cases under the ceilings."""
    with _pyplot(dark) as pyplot:
        figure, (by_batch, by_context, roofline) = pyplot.subplots(1, 3, figsize=(18, 5), layout="constrained")
        timed = [line for line in lines if "us" in line]
        decode = [line for line in timed if line["op"] == "sparse_mla" and " h=128 s_q=1 " in line["case"]]
        for name in sorted({peer for line in decode for peer in line["us"]}, reverse=True):
            points = sorted((_number(line["case"], "b"), line["us"][name][0]) for line in decode if name in line["us"])
            by_batch.plot(*zip(*points, strict=True), marker="o", label=name)
        by_batch.set(xscale="log", yscale="log", xlabel="requests", ylabel="µs", title="sparse_mla decode, 128 heads")

        paged = [line for line in timed if line["op"] == "indexer_logits_paged"]
        for group in sorted({(_number(line["case"], "b"), _number(line["case"], "next_n")) for line in paged}):
            points = sorted(
                (_number(line["case"], "keys"), line["us"]["xmla"][0])
                for line in paged
                if (_number(line["case"], "b"), _number(line["case"], "next_n")) == group
            )
            by_context.plot(*zip(*points, strict=True), marker="o", label=f"b={group[0]} next_n={group[1]}")
        by_context.set(xscale="log", yscale="log", xlabel="keys", ylabel="µs", title="indexer_logits_paged")

        limits = head["ceilings"]
        bandwidth = limits["copy_bytes_per_s"]
        intensities = [10.0 ** (e / 20) for e in range(81)]
        for name in ("bf16", "fp8"):
            top = limits[f"{name}_flop_per_s"]
            ceiling = [min(top, bandwidth * x) / 1e12 for x in intensities]
            roofline.plot(intensities, ceiling, "--", label=f"{name} ceiling")
        for op in sorted({line["op"] for line in timed}):
            points = [
                (line["tflop_per_s"] * 1e3 / line["gb_per_s"], line["tflop_per_s"])
                for line in timed
                if line["op"] == op and line["tflop_per_s"] and line["gb_per_s"]
            ]
            if points:
                roofline.scatter(*zip(*points, strict=True), label=op)
        roofline.set(xscale="log", yscale="log", xlabel="flop a byte", ylabel="TFLOP/s", title="roofline")
        for panel in (by_batch, by_context, roofline):
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                panel.legend()
        figure.suptitle(origin(head))
        _save(pyplot, figure, file, dark, origin(head))
