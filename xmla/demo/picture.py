"""The picture of a training: losses beside each other, and what the indexer learns."""

import math
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from xmla.demo.curves import Runs

PANELS = {
    "loss": "loss (nats a token)",
    "kl": "the indexer's loss (KL from attention)",
    "overlap": "indexer's top-k among attention's own",
}
DASHES = ("-", "--", ":", "-.")  # curves that agree lie on each other


def draw(title: str, runs: Runs, file: Path) -> None:
    """A panel for each quantity, over the steps of all stages; a line for each run that tells it."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    for panel, (quantity, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for dashes, (name, stages) in zip(DASHES, runs.items(), strict=False):
            values = [value for curve in stages.values() for value in getattr(curve, quantity)]
            if not math.isnan(values[0]):
                panel.plot(range(1, len(values) + 1), values, dashes, label=name)
        first = next(iter(runs.values()))
        *starts, _ = accumulate((len(curve.loss) for curve in first.values()), initial=0)
        for stage, start in zip(first, starts, strict=True):
            panel.axvline(start + 0.5, color="gray", lw=0.5)
            panel.text(start + 0.5, 1.0, f" {stage.name}", va="top", fontsize=8, transform=panel.get_xaxis_transform())
        panel.set(xlabel="step", title=label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
