"""A picture of results: time against batch and context, and the roofline."""

import re
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def _number(case: str, name: str) -> int | None:
    found = re.search(rf"\b{name}=(\d+)", case)
    return int(found[1]) if found else None


def draw(head: Line, lines: list[Line], file: Path) -> None:
    """Three panels: decode time by batch with the peer's, logits time by context, all cases under the ceilings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
        roofline.plot(intensities, [min(top, bandwidth * x) / 1e12 for x in intensities], "--", label=f"{name} ceiling")
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
    figure.suptitle(f"{', '.join(head['versions']['devices'])}, {head['date']}, commit {head['commit'][:12]}")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
