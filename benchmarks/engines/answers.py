"""Answers of engines to the same requests: how far apart they are, and what has to hold of them."""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer

from benchmarks.engines.lines import keep_log, write

Answers = dict[str, Any]  # of an engine, by its name
Figures = dict[str, list[Any]]  # by prompt
Pairs = dict[tuple[str, str], Figures]  # of an engine beside another

# Several GPUs and drafts change the order of sums; this share of a prompt's most likely tokens has to stay.
SAME_LIKELY = 0.9
# xmla may be this much farther from bfloat16 than an engine's own kernels are, besides what another chunking changes.
FARTHER = 1.25


def ask_all(
    file: Path, work: Path, names: list[str], at_once: int, run: Callable[[str, Path, Path], int],
    kept: Iterable[str], logged: Callable[[str], dict[str, Any]] = lambda log: {},
) -> Answers:  # fmt: skip
    """What each engine writes to its file in `work`, with what its log says; several engines run at once.

    `run(name, log, answer)` gives the exit status. Of what is answered, `kept` goes to the lines of `file`.
    """

    def ask(name: str) -> tuple[str, Any]:
        answer, log = work / f"{name}.json", work / f"{name}.log"
        answer.unlink(missing_ok=True)
        begun = time.monotonic()
        status = run(name, log, answer)
        answered = json.loads(answer.read_text()) | logged(log.read_text()) if answer.exists() else None
        told = {"exit_code": status, "total_seconds": round(time.monotonic() - begun, 1)}
        told |= {key: answered[key] for key in kept} if answered else {}
        keep_log(file.parent, name, log, status)
        write(file, {"engine": name} | told)
        print(f"    {told}", flush=True)
        return name, answered

    with ThreadPoolExecutor(at_once) as threads:
        return {name: answered for name, answered in threads.map(ask, names) if answered}


def equal_before(tokens: list[int], others: list[int]) -> int:
    """How many tokens are equal before the first that differs."""
    return [*(a == b for a, b in zip(tokens, others, strict=True)), False].index(False)


def difference(answers: Answers, others: Answers) -> Figures:
    """Mean distance of log-probabilities, share of equal most likely tokens, equal new tokens, by prompt."""
    found: Figures = {"prompt": [], "mean_abs_logprob": [], "same_likely": [], "equal_tokens": []}
    for length, answer in answers.items():
        other = others[length]
        apart = [abs(a - b) for a, b in zip(answer["logprobs"], other["logprobs"], strict=True)]
        same = [a == b for a, b in zip(answer["likely"], other["likely"], strict=True)]
        found["prompt"].append(int(length))
        found["mean_abs_logprob"].append(round(sum(apart) / len(apart), 5))
        found["same_likely"].append(round(sum(same) / len(same), 4))
        found["equal_tokens"].append(equal_before(answer["tokens"], other["tokens"]))
    return found


def compare(
    file: Path, pairs: Iterable[tuple[str, str]], answers: Answers, new_tokens: Callable[[str], int]
) -> Pairs:  # fmt: skip
    """How far apart pairs of engines are that both answered, also written and printed."""
    found = {
        (name, other): difference(answers[name]["answers"], answers[other]["answers"])
        for name, other in pairs
        if name in answers and other in answers
    }
    for (name, other), figures in found.items():
        write(file, {"engine": name, "beside": other, "new_tokens": new_tokens(name)} | figures)
        cells = (
            f"{length}: {apart:.4f} {same:.3f} {equal:>2}"
            for length, apart, same, equal in zip(*figures.values(), strict=True)
        )
        print(f"{name:>18} beside {other:12}" + "".join(f"{cell:>26}" for cell in cells))
    print("by prompt: mean |Δ| of log-probabilities, share of equal most likely tokens, equal new tokens")
    return found


def alike(found: Pairs, names: tuple[str, ...], new_tokens: int, engine: str) -> dict[str, bool]:
    """What has to hold of these pairs: those whose names begin so answer alike, and xmla is not far from bfloat16."""
    wanted = {
        f"{name} answers as {other}": min(figures["same_likely"]) >= SAME_LIKELY
        for (name, other), figures in found.items()
        if name.startswith(names)
    }
    if ("xmla-graphs", "xmla") in found:
        equal = found["xmla-graphs", "xmla"]["equal_tokens"]
        wanted["graphs give the tokens of eager"] = equal == [new_tokens] * len(equal)
    pairs = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own")
    if all(pair in found for pair in pairs):
        ours, own, floor = (found[pair]["mean_abs_logprob"] for pair in pairs)
        near = [a <= FARTHER * b + c for a, b, c in zip(ours, own, floor, strict=True)]
        wanted[f"xmla is as near to bfloat16 as {engine}'s own kernels"] = all(near)
    return wanted


def conclude(file: Path, holds: dict[str, bool], complete: bool) -> None:
    """Write and print the verdicts and exit: 1 if one does not hold or an engine gave no answers."""
    write(file, {"holds": holds})
    for what, right in holds.items():
        print(f"{'yes' if right else 'NO '} {what}")
    raise typer.Exit(code=int(not (all(holds.values()) and complete)))
