"""Trainings of a demo's model from the same weights, by xmla and without, and how far their curves part."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
from rich.progress import Progress

from xmla.demo.figures import Figure, bounded, equal, relative_error


@dataclass(frozen=True)
class Stage:
    """A part of the training. While it is `dense` the indexer learns alone, and every key is attended to."""

    name: str
    dense: bool
    rate: float


WARM_UP, JOINT = Stage("warm-up", dense=True, rate=1e-3), Stage("joint", dense=False, rate=3e-4)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: each step sees all the texts."""

    texts: int
    tokens: int
    topk: int
    steps: dict[Stage, int]


SIZES = {
    "cuda": Sizes(4, 256, 32, {WARM_UP: 100, JOINT: 200}),
    "cpu": Sizes(2, 16, 4, {WARM_UP: 6, JOINT: 4}),  # where kernels are interpreted
}
REPEATED = 2  # steps of the second run

# xmla rounds what attention reads and writes to bfloat16, the third run that and all other products. Both are measured
# against float32 in the same run, and xmla may be twice as far from it as the third run is: their roundings are of one
# size but fall on other numbers. Where those of the third happen to cancel, one rounding of the curve itself is
# allowed. A gradient of the rows that is a tenth too large is farther (tests/test_demo.py).
ROUNDINGS, UNIT = 2.0, 2**-9
# Of the first step, from the same weights: scores of bfloat16 queries and keys may swap keys with nearly equal scores.
SELECTION = 0.95
# In the warm-up attention stands still, and each step follows the gradient of the same loss.
KL_FALLS = 0.75
OVERLAP_RISES = 0.1


@dataclass
class Curve:
    """What a stage went through: a number for each step, each layer's selection, the gradients of the first step."""

    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)  # the layers' mean, as overlap
    overlap: list[float] = field(default_factory=list)
    selected: list[list[np.ndarray]] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


Runs = Mapping[str, Mapping[Stage, Curve]]  # each run's stages, by its name


class Train(Protocol):
    """Trains a model: by xmla, or without `over` the keys that xmla selected; `half` with products in bfloat16."""

    def __call__(
        self, model: Any, stage: Stage, steps: int, *, over: Curve | None = None, half: bool = False,
        advance: Any = None,
    ) -> Curve: ...  # fmt: skip


class Training(Protocol):
    """What the module of a training's demo gives."""

    TITLE: str
    STORY: Mapping[str, str]  # what the model is, what is replaced, what is beside it
    RUNS: tuple[str, str, str]  # names of the runs: xmla's, the one without it in float32, and in bfloat16
    COMMAND: str

    @staticmethod
    def prepare() -> tuple[Sizes, Any, Train]:
        """Sizes for this machine, a model, and what trains it on the texts of the sizes."""


def texts_of(sizes: Sizes) -> np.ndarray:
    """The beginning of Moby Dick by bytes, in texts [B, T+1]: each ends with the token that the next begins with."""
    text = files("xmla.demo").joinpath("moby_dick.txt").read_bytes()[: sizes.texts * sizes.tokens + 1]
    starts = np.arange(sizes.texts)[:, None] * sizes.tokens
    return np.array(list(text))[starts + np.arange(sizes.tokens + 1)]


def measure(
    names: tuple[str, str, str], sizes: Sizes, model: Any, train: Train, bar: Progress
) -> tuple[Runs, list[Figure]]:
    """Train three copies of the model, and the first again for the first steps of each stage."""
    xmla, shipped, autocast = names
    figures: list[Figure] = []
    models = {name: deepcopy(model) for name in names}
    runs: dict[str, dict[Stage, Curve]] = {name: {} for name in names}
    task = bar.add_task("", total=3 * sum(sizes.steps.values()) + REPEATED * len(sizes.steps))
    for stage, steps in sizes.steps.items():

        def run(name: str, model: Any, steps: int = steps, stage: Stage = stage, **options: Any) -> Curve:
            bar.update(task, description=f"{stage.name}, {name}")
            return train(model, stage, steps, advance=lambda: bar.advance(task), **options)

        start = deepcopy(models[xmla])
        ours = runs[xmla][stage] = run(xmla, models[xmla])
        again = run(f"{xmla} again", start, REPEATED)
        exact = runs[shipped][stage] = run(shipped, models[shipped], over=ours)
        rounded = runs[autocast][stage] = run(autocast, models[autocast], over=ours, half=True)
        figures += [repeated(stage, ours, again), *against_shipped(stage, ours, exact, rounded)]
    return runs, [*figures, *learned(runs[xmla])]


def repeated(stage: Stage, ours: Curve, again: Curve) -> Figure:
    """Whether a second run has the same curve, bit for bit."""
    first, second = ((curve.loss[:REPEATED], curve.kl[:REPEATED]) for curve in (ours, again))
    return equal(f"second run, first {REPEATED} steps", stage.name, first == second)


def against_shipped(stage: Stage, ours: Curve, exact: Curve, rounded: Curve) -> Iterator[Figure]:
    """Gradients of the first step and the curves, each as far from float32 as rounding explains."""
    for part, of_indexer in (("indexer", True), ("rest", False)):
        names = [name for name in exact.gradients if (".indexer." in name) is of_indexer]
        if names:
            wide, *others = (np.concatenate([c.gradients[n].ravel() for n in names]) for c in (exact, ours, rounded))
            error, bound = (relative_error(other, wide) for other in others)
            yield bounded("gradient", f"{stage.name}, {part}", error, ROUNDINGS * bound)
    curves = {"KL": [c.kl for c in (exact, ours, rounded)]}
    if not stage.dense:  # while it is nothing that the loss depends on learns
        curves["loss"] = [c.loss for c in (exact, ours, rounded)]
    for name, (wide, *others) in curves.items():
        error, bound = (distance(other, wide) for other in others)
        unit = UNIT * math.fsum(wide) / len(wide)
        yield bounded(f"curve of the {name}", stage.name, error, max(ROUNDINGS * bound, unit))
    if stage.dense:
        for layer, (mine, theirs) in enumerate(zip(ours.selected[0], exact.selected[0], strict=True)):
            yield bounded("selection", f"layer {layer}, first step", shared(mine, theirs), SELECTION, at_least=True)


def shared(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The share of the keys of `mine` [N, K], −1 where there is none, that `theirs` has, too."""
    both = (mine[:, :, None] == theirs[:, None, :]).any(-1)
    return float(both[mine >= 0].mean())


def distance(ours: list[float], exact: list[float]) -> float:
    """The mean difference of two curves."""
    return math.fsum(abs(x - y) for x, y in zip(ours, exact, strict=True)) / len(exact)


def learned(curves: Mapping[Stage, Curve]) -> Iterator[Figure]:
    """What the indexer has learned, before attention moved and with it."""
    warm_up, joint = curves[WARM_UP], curves[JOINT]
    yield bounded("KL, last step / first", WARM_UP.name, warm_up.kl[-1] / warm_up.kl[0], KL_FALLS)
    for stage, curve in ((WARM_UP, warm_up), (JOINT, joint)):
        rise = curve.overlap[-1] - warm_up.overlap[0]
        yield bounded("overlap gained", f"up to the end of {stage.name}", rise, OVERLAP_RISES, at_least=True)


def description(sizes: Sizes) -> str:
    warm_up, joint = (sizes.steps[stage] for stage in (WARM_UP, JOINT))
    return (
        f"{sizes.texts} texts of {sizes.tokens} tokens of Moby Dick in every step, {sizes.topk} keys selected; "
        f"{warm_up} steps of warm-up, {joint} of joint training"
    )


def summary(sizes: Sizes, runs: Runs) -> dict[str, str]:
    """The curves in words."""
    ours = next(iter(runs.values()))
    warm_up, joint = ours[WARM_UP], ours[JOINT]
    ends = ", ".join(f"{name} {run[JOINT].loss[-1]:.4f}" for name, run in list(runs.items())[1:])
    return {
        "warm-up": f"the indexer alone, over all keys: KL {warm_up.kl[0]:.4f} to {warm_up.kl[-1]:.4f}; its top-"
        f"{sizes.topk} holds {warm_up.overlap[0]:.0%} of attention's own, then {warm_up.overlap[-1]:.0%}",
        "joint": f"everything, over the selected keys: loss {joint.loss[0]:.4f} to {joint.loss[-1]:.4f}, {ends}; "
        f"overlap at its end {joint.overlap[-1]:.0%}",
    }
