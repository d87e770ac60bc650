"""An engine on xmla beside its own kernels; ratios are speeds, above 1 xmla is faster.

The lines are those of `python -m benchmarks.engines`, runs of `check`, of `speed`, of `parts` and of `trace`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from tools.report.markdown import table
from tools.report.ratios import middle
from tools.report.results import Line, read
from xmla.bench.provenance import origin

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# Engines that are shown beside each other, with what a table of them begins with.
PAIRS = {
    ("xmla-graphs", "own-graphs"): None,
    ("xmla-ranks-graphs", "own-ranks-graphs"): "Two GPUs share the heads.",
    ("xmla-ranks-4-graphs", "own-ranks-4-graphs"): "Four GPUs share the heads.",
}
Pair = tuple[str, str]
MODELS = {"v4-": "DeepSeek-V4", "v41-": "DeepSeek-V4.1", "glm-": "GLM-5.3-Flash", "": "DeepSeek-V3.2"}


def prefix_of(name: str) -> str:
    """What an engine's name says of its model."""
    return next(prefix for prefix in MODELS if name.startswith(prefix))


def engine(head: Line, lines: list[Line]) -> str:
    """Where the figures of a run come from, and of which model."""
    versions, model = head["versions"], head["model"]
    name = MODELS[prefix_of(lines[0]["engine"])]
    (served,) = (f"{engine} {head[key]}" for key, engine in ENGINES.items() if key in head)
    return (
        f"{origin(head)}, {served}, torch {versions['torch']}, Triton {versions['triton']}; "
        f"{name}, {model['num_hidden_layers']} layers, "
        f"{model['num_attention_heads']} heads, top-k {model['index_topk']}."
    )


def brief(head: Line, lines: list[Line]) -> tuple[str, str, str]:
    """The model of a run, the engine's release and the device."""
    (served,) = (f"{engine} {head[key]}" for key, engine in ENGINES.items() if key in head)
    device = head["versions"]["devices"][0].removeprefix("NVIDIA ").split()[0]
    return MODELS[prefix_of(lines[0]["engine"])], served, device


def alike(lines: list[Line]) -> list[str]:
    """How far apart the answers of each pair of engines are, by prompt; a table for each set of prompts."""
    markdown: list[str] = []
    pairs = sorted((line for line in lines if "mean_abs_logprob" in line), key=lambda pair: max(pair["prompt"]))
    for prompts, of_prompts in groupby(pairs, key=lambda pair: sorted(pair["prompt"], reverse=True)):
        markdown += [""] if markdown else []
        rows = []
        for pair in of_prompts:
            columns = pair["prompt"], pair["mean_abs_logprob"], pair["same_likely"], pair["equal_tokens"]
            figures = sorted(zip(*columns, strict=True), reverse=True)
            cells = [f"{apart:.4f}, {same:.1%}, {equal} of {pair['new_tokens']}" for _, apart, same, equal in figures]
            rows.append([pair["engine"], pair["beside"], *cells])
        markdown += table(["engine", "beside", *(f"{prompt:,} tokens" for prompt in prompts)], rows)
    return markdown


def cases_of(lines: list[Line]) -> dict[tuple[int, int], dict[str, list[Line]]]:
    """The lines of each engine, by context and number of requests."""
    cases: dict[tuple[int, int], dict[str, list[Line]]] = {}
    for line in lines:
        if "step_us" in line:
            of_engine = cases.setdefault((line["context"], line["requests"]), {})
            name = line["engine"].removeprefix(prefix_of(line["engine"]))
            of_engine.setdefault(name, []).append(line)
    return cases


def pair_of(engines: Mapping[str, Any]) -> Pair | None:
    return next((pair for pair in PAIRS if {*pair} <= engines.keys()), None)


def figures(
    engines: dict[str, list[Line]], pair: Pair, key: str, of: Callable[[list[float]], float] = median
) -> list[float]:
    """xmla's figure of a case and that of the engine's own kernels, each `of` the rounds of all starts."""
    return [
        of([figure for line in engines[name] for figure in line.get(f"{key}_by_round", [line[key]])]) for name in pair
    ]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each case: `of` its rounds."""

    key: str
    heading: str
    of: Callable[[list[float]], float] = median

    def is_told(self, line: Line) -> bool:
        """Whether the line has it: prefills and passes without rounds have a median, a step has not."""
        one = self.of is median and self.key != "step_us"
        return f"{self.key}_by_round" in line or (one and self.key in line)


def speeds(lines: list[Line]) -> list[str]:
    """xmla's times in each case and, in brackets, its speed as a multiple of the engine's own kernels'.

    Left out are cases that one of the two had no time for, and a step that was timed in one round alone: the host's
    noise decides its ratio.
    """
    timed = [line for line in lines if "step_us" in line]
    columns = [Column("forward_us", "decode: the GPU's forward pass"), Column("forward_us", "fastest round", min)]
    columns += [Column("prefill_tokens_per_s", "prefill, tokens/s")]
    columns += [Column("prefill_tokens_per_s", "fastest round", max)]
    columns += [Column("step_us", "decode: a step, with the host's part")]
    columns = [column for column in columns if all(column.is_told(line) for line in timed)]
    rows, how = [], None
    for (context, requests), engines in sorted(cases_of(lines).items()):
        pair = pair_of(engines)
        if pair is None:
            continue
        cells, how = [], PAIRS[pair]
        for column in columns:
            ours, theirs = figures(engines, pair, column.key, column.of)
            time = column.key.endswith("_us")
            cells.append(beside_own(ours, theirs) if time else f"{ours:,.0f} ({ours / theirs:.2f} ×)")
        rows.append([f"{context:,}", str(requests), *cells])
    return [*([how, ""] if how else []), *table(["context", "requests", *(column.heading for column in columns)], rows)]


def beside_own(ours: float, theirs: float) -> str:
    """xmla's time, and its speed as a multiple of the own kernels'."""
    return f"{ours:.0f} µs ({theirs / ours:.2f} ×)"


def divided(lines: list[Line]) -> list[str]:
    """What selection and attention take of xmla's passes and, in brackets, their speed as multiples of own kernels'.

    Of each the median and, where lines have it, the fastest of all rounds, then the share of both in the pass.
    """
    cases: dict[tuple[int, int], dict[str, list[Line]]] = {}
    for line in lines:
        if "attention_us" in line:
            name = line["engine"].removeprefix(prefix_of(line["engine"]))
            cases.setdefault((line["context"], line["requests"]), {}).setdefault(name, []).append(line)
    rows = []
    for (context, requests), rounds in sorted(cases.items()):
        pair = pair_of(rounds)
        if pair is None:
            continue
        cells, ours_together = list[str](), 0.0
        for part in ("attention", "selection"):
            told = {name: [line[f"{part}_us"] for line in rounds[name]] for name in pair}
            middles = [median(each["median"] for each in told[name]) for name in pair]
            ours_together += middles[0]
            cells.append(beside_own(*middles))
            complete = all("least" in each for name in pair for each in told[name])
            cells.append(beside_own(*(min(each["least"] for each in told[name]) for name in pair)) if complete else "")
        whole = median(line["pass_us"]["median"] for line in rounds[pair[0]])
        rows.append([f"{context:,}", str(requests), *cells, f"{ours_together / whole:.0%}"])
    head = "attention: median", "fastest", "selection: median", "fastest", "both, of a pass"
    return table(["context", "requests", *head], rows)


def served(lines: list[Line]) -> list[str]:
    """xmla's latencies in a trace of requests and, in brackets, the engine's own kernels' as multiples of them."""
    rates: dict[float, dict[str, Line]] = {}
    for line in lines:
        if "ttft_ms" in line:
            name = line["engine"].removeprefix(prefix_of(line["engine"]))
            rates.setdefault(line["trace"]["rate"], {})[name] = line
    both = [(pair, engines) for engines in rates.values() if (pair := pair_of(engines)) is not None]
    apart = any(engines[name]["trace"].get("apart") for (name, _), engines in both)
    how = "Each engine on a GPU of its own, at the same time." if apart else "Both engines on one GPU, in turns."
    head = "requests of a round", "first token: median", "99 %", "each token after it: median", "99 %"
    rows = []
    for pair, engines in both:
        ours, theirs = (engines[name] for name in pair)
        cells = [
            f"{ours[key][of]:.1f} ms ({theirs[key][of] / ours[key][of]:.2f} ×)"
            for key in ("ttft_ms", "tpot_ms")
            for of in ("median", "p99")
        ]
        asked = ours["trace"]
        each = f"{asked['requests']}, {asked['rate']:g} a second; {asked['rounds']} rounds"
        rows.append([each, *cells])
    return [how, "", *table(head, rows)]


def told(files: Sequence[Path], key: str, tables: Callable[[list[Line]], list[str]]) -> str:
    """Markdown of the runs that have figures of a kind: where they come from, and their table."""
    markdown: list[str] = []
    for head, *lines in read(*files):
        if any(key in line for line in lines):
            markdown += [engine(head, lines), "", *tables(lines), ""]
    return "\n".join(markdown[:-1]) + "\n"


def speed(*files: Path) -> str:
    return told(files, "step_us", speeds)


def parts(*files: Path) -> str:
    return told(files, "attention_us", divided)


def trace(*files: Path) -> str:
    return told(files, "ttft_ms", served)


def answers(*files: Path) -> str:
    return told(files, "mean_abs_logprob", alike)


def ratios(head: Line, lines: list[Line], key: str, several: bool = False) -> list[float]:
    """xmla's speed as a multiple of the engine's own kernels' in the cases that both have times for, of one GPU.

    Left out are prefills of no more keys than are selected: an engine as installed may compute these by dense
    attention, which SGLang's runs had turned off.

    Args:
        several: Of several GPUs instead, whose forward passes have waits for each other.
    """
    found = []
    for (context, _), engines in cases_of(lines).items():
        pair = pair_of(engines)
        sparse = key != "prefill_tokens_per_s" or context > head["model"]["index_topk"]
        if pair is not None and (PAIRS[pair] is not None) == several and sparse:
            ours, theirs = figures(engines, pair, key)
            found.append(theirs / ours if key.endswith("_us") else ours / theirs)
    return found


def glance(*files: Path) -> str:
    """Markdown: of each run with speeds their medians and ranges; of each with answers the worst prompt."""
    runs = [(head, lines) for head, *lines in read(*files)]
    timed = []
    for head, lines in runs:
        pairs = {pair for engines in cases_of(lines).values() if (pair := pair_of(engines)) is not None}
        for pair in pairs:
            gpus, several = (PAIRS[pair] or "One").split()[0].lower(), PAIRS[pair] is not None
            decode, prefill = (ratios(head, lines, key, several) for key in ("forward_us", "prefill_tokens_per_s"))
            timed.append([*brief(head, lines), gpus, str(len(decode)), middle(decode), middle(prefill)])
    begin = "model", "engine", "on"
    markdown = table([*begin, "GPUs", "cases", "decode, a forward pass", "prefill"], timed)
    compared = []
    for head, lines in runs:
        pairs = {(line["engine"], line["beside"]): line for line in lines if "mean_abs_logprob" in line}
        name = prefix_of(lines[0]["engine"])
        if (ours := pairs.get((f"{name}xmla", f"{name}own"))) is not None:
            chunks = pairs.get((f"{name}own-chunks", f"{name}own"))
            noise = f"{max(chunks['mean_abs_logprob']):.4f}" if chunks else ""
            tokens = f"{min(ours['equal_tokens'])} of {ours['new_tokens']}"
            same = f"{min(ours['same_likely']):.1%}"
            compared.append([*brief(head, lines), f"{max(ours['mean_abs_logprob']):.4f}", noise, same, tokens])
    columns = "log-probabilities differ by", "another chunk size changes", "same most likely token", "same new tokens"
    return "\n".join([*markdown, "", *table([*begin, *columns], compared), ""])
