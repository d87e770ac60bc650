"""The training demo: a model trained by xmla and as shipped from the same weights, and how far their curves part."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from rich.progress import Progress

from xmla.demo.figures import Figure, bounded, identical, relative_error
from xmla.demo.trained import JOINT, WARM_UP, Curve, Runs, Stage, build_sharp, mask_of, train

TITLE = "DeepSeek-V3.2 of transformers, trained by xmla"
STORY = {
    "model": "DeepSeek-V3.2 of transformers: two layers with its own head dims (latent 512, rope 64, indexer 128) and "
    "little else, random weights in float32 with sharp attention",
    "replaced": "each layer's attention and indexer, by sparse_mla, indexer_scores, select_topk and indexer_loss over "
    "bfloat16 rows",
    "beside it": "the same model as shipped (eager attention over the keys that xmla selected, the indexer's loss in "
    "PyTorch's own operations), in float32 and under autocast to bfloat16",
}


@dataclass(frozen=True)
class Sizes:
    """Of a run: each step sees all the texts."""

    texts: int
    tokens: int
    topk: int
    steps: dict[Stage, int]


SIZES = {
    "cuda": Sizes(4, 256, 32, {WARM_UP: 100, JOINT: 200}),
    "cpu": Sizes(2, 16, 4, {WARM_UP: 6, JOINT: 4}),  # where kernels are interpreted
}
XMLA, SHIPPED, AUTOCAST = RUNS = ("xmla", "as shipped", "as shipped, autocast")
REPEATED = 2  # steps of the second run

# xmla rounds what attention reads and writes to bfloat16, autocast that and all other products. Both are measured
# against float32 in the same run, and xmla may be twice as far from it as autocast is: their roundings are of one size
# but fall on other numbers. Where those of autocast happen to cancel, one rounding of the curve itself is allowed. A
# gradient of the rows that is a tenth too large is farther (tests/test_demo.py).
ROUNDINGS, UNIT = 2.0, 2**-9
# Of the first step, from the same weights: scores of bfloat16 queries and keys may swap keys that all but tie.
SELECTION = 0.95
# In the warm-up attention stands still, and each step follows the gradient of the same loss.
KL_FALLS = 0.75
OVERLAP_RISES = 0.1


def texts_of(sizes: Sizes, device: str) -> torch.Tensor:
    """The beginning of Moby Dick by bytes, in texts [B, T+1]: each ends with the token that the next begins with."""
    text = files("xmla.demo").joinpath("moby_dick.txt").read_bytes()[: sizes.texts * sizes.tokens + 1]
    return torch.tensor(list(text), device=device).unfold(0, sizes.tokens + 1, sizes.tokens)


def measure(sizes: Sizes, device: str, bar: Progress) -> tuple[Runs, list[Figure]]:
    """Train three copies of the model, and the first again for the first steps of each stage."""
    batch, figures = texts_of(sizes, device), []
    models: dict[str, Any] = {name: build_sharp(device, sizes.topk) for name in RUNS}
    runs: dict[str, dict[Stage, Curve]] = {name: {} for name in RUNS}
    task = bar.add_task("", total=3 * sum(sizes.steps.values()) + REPEATED * len(sizes.steps))
    for stage, steps in sizes.steps.items():

        def run(name: str, model: Any, steps: int = steps, stage: Stage = stage, **options: Any) -> Curve:
            bar.update(task, description=f"{stage.name}, {name}")
            return train(model, stage, batch, steps, advance=lambda: bar.advance(task), **options)

        start = deepcopy(models[XMLA])
        ours = runs[XMLA][stage] = run(XMLA, models[XMLA])
        again = run(f"{XMLA} again", start, REPEATED)
        exact = runs[SHIPPED][stage] = run(SHIPPED, models[SHIPPED], over=ours)
        rounded = runs[AUTOCAST][stage] = run(AUTOCAST, models[AUTOCAST], over=ours, half=True)
        figures += [repeated(stage, ours, again), *against_shipped(stage, sizes.tokens, ours, exact, rounded)]
    return runs, [*figures, *learned(runs[XMLA])]


def repeated(stage: Stage, ours: Curve, again: Curve) -> Figure:
    """Whether a second run has the same curve, bit for bit."""
    first, second = (torch.tensor([curve.loss[:REPEATED], curve.kl[:REPEATED]]) for curve in (ours, again))
    return identical(f"second run, first {REPEATED} steps", stage.name, second, first)


def against_shipped(stage: Stage, tokens: int, ours: Curve, exact: Curve, rounded: Curve) -> Iterator[Figure]:
    """Gradients of the first step and the curves, each as far from float32 as rounding explains."""
    for part, of_indexer in (("indexer", True), ("rest", False)):
        names = [name for name in exact.gradients if (".indexer." in name) is of_indexer]
        if names:
            wide, *others = (torch.cat([c.gradients[name].flatten() for name in names]) for c in (exact, ours, rounded))
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
            chosen = mask_of(mine, tokens)
            share = float((chosen & mask_of(theirs, tokens)).sum() / chosen.sum())
            yield bounded("selection", f"layer {layer}, first step", share, SELECTION, at_least=True)


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
    warm_up, joint = runs[XMLA][WARM_UP], runs[XMLA][JOINT]
    return {
        "warm-up": f"the indexer alone, over all keys: KL {warm_up.kl[0]:.4f} to {warm_up.kl[-1]:.4f}; its top-"
        f"{sizes.topk} holds {warm_up.overlap[0]:.0%} of attention's own, then {warm_up.overlap[-1]:.0%}",
        "joint": f"everything, over the selected keys: loss {joint.loss[0]:.4f} to {joint.loss[-1]:.4f}, as shipped "
        f"{runs[SHIPPED][JOINT].loss[-1]:.4f}, under autocast {runs[AUTOCAST][JOINT].loss[-1]:.4f}; overlap at its "
        f"end {joint.overlap[-1]:.0%}",
    }
