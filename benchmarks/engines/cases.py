"""Speeds of engines that take turns: the rounds of a case, and its figures."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.answers import equal_before
from benchmarks.engines.lines import write
from benchmarks.engines.processes import Running, ask_in_turn

Answered = dict[tuple[int, int, int], list[list[int]]]  # by context, requests and number of the prompts: new tokens

SAME_TOKENS = 0.5  # of the rounds of a case; near ties change some answers from their place on
ROUNDS = 12  # of a case
COMPILED = 1 << 17  # tokens of a case's prompts that an engine has had before it is ready


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def cases_of(contexts: Iterable[int], requests: Iterable[int]) -> list[tuple[int, int]]:
    """Contexts and numbers of requests, by their product."""
    cases = [(context, count) for context in sorted(contexts) for count in sorted(requests)]
    return sorted(cases, key=lambda case: case[0] * case[1])


def few_of(context: int, requests: int) -> int:
    """How many of the requests have prompts of COMPILED tokens together, or one."""
    return min(requests, max(COMPILED // context, 1))


def same_tokens(answered: Answered, case: tuple[int, int, int], tokens: list[list[int]]) -> float:
    """What share of a round's tokens are those of the first round of its prompts, before the first that differs.

    Behind cached keys an engine that lost some would be fast, too.
    """
    first = answered.setdefault(case, tokens)
    return round(sum(map(equal_before, tokens, first)) / sum(map(len, first)), 4)


def case_of(rounds: list[dict[str, float]], step: Callable[[Iterable[float]], float]) -> dict[str, Any]:
    """The figures of a case from its rounds.

    They are `step` of the rounds' steps, the fastest prefill, medians of passes, and the fewest tokens that were cached
    and that are those of the prompts' first round. There is no step, and why, if a longer request took no longer in
    some round, or if answers changed.
    """
    by_round = {
        key: [each[key] for each in rounds if key in each]
        for key in ("step_us", "forward_us", "prefill_tokens_per_s", "prefill_forward_ms")
    }
    steps, same = by_round["step_us"], min(each["same_tokens"] for each in rounds)
    case: dict[str, Any]
    if min(steps) <= 0:
        case = {"refused": "more steps took no longer"}
    elif same < SAME_TOKENS:
        case = {"refused": "answers behind cached prompts are not those of the first round"}
    else:
        case = {"step_us": round(step(steps), 2)}
    case |= {
        "forward_us": round(median(by_round["forward_us"]), 2),
        "prefill_tokens_per_s": max(by_round["prefill_tokens_per_s"]),
        "prefill_forward_ms": round(median(by_round["prefill_forward_ms"]), 3),
        "cached_tokens": min(each["cached_tokens"] for each in rounds),
        "same_tokens": same,
    }
    return case | {f"{key}_by_round": figures for key, figures in by_round.items()}


@dataclass(slots=True)
class Turns:
    """Rounds of cases, as many as there is time for.

    A round of a case has new prompts, whose prefill is timed, and steps behind them. If they are long, prompts are new
    only until each engine has begun a round, and then are cached. Known before a round is what rounds have told:
    `rate`, tokens/s of the slowest prefill, and `steps`, seconds of the last round without its prefills.
    """

    deadline: float
    rate: float = float("inf")
    steps: float = 0

    def play(self, engines: Running, context: int, requests: int) -> list[dict[str, Any]]:
        """The engines' answers, by round: each begins as many as another. Empty if there is no time for one of each."""
        running, each = engines, max(1, len(engines))
        rounds: list[dict[str, Any]] = []
        while running and len(rounds) < max(ROUNDS // each, 1) * each:
            new = context * requests <= COMPILED or len(rounds) < each
            begun = time.monotonic()
            needs = self.steps + new * len(running) * context * requests / self.rate
            if begun + (0 if len(rounds) % each else each * needs) >= self.deadline:
                break
            question = "round", context, requests, len(rounds) if new else each - 1, new
            answers = ask_in_turn(running, len(rounds), *question)
            rates = [answer["prefill_tokens_per_s"] for answer in answers.values() if "prefill_tokens_per_s" in answer]
            self.rate = min([self.rate, *rates])
            self.steps = max(0, time.monotonic() - begun - sum(context * requests / rate for rate in rates))
            rounds.append(answers)
            running = {name: engine for name, engine in running.items() if "step_us" in answers.get(name, ())}
        return rounds


def write_kernels(file: Path, answers: dict[str, Any], context: int, requests: int) -> None:
    for name, rows in answers.items():
        for row in rows:
            write(file, {"engine": name, "context": context, "requests": requests} | row)
            print(f"{name:>14} {row['phase']:>8} {row['us']:>10} µs {row['launches']:>5} × {row['kernel'][:80]}")


def time_cases(
    file: Path, names: list[str], engines: Running, contexts: str, requests: str, seconds: float,
    step: Callable[[Iterable[float]], float],
) -> bool:  # fmt: skip
    """Write each case's figures when its rounds are over, smallest first, then kernels of one request of each context.

    Engines answer ("round", context, requests, number of the prompts, are they new?) with a round's figures or why they
    have none, and ("kernels", context, requests) with lines. Whether no engine and no case was refused.
    """
    turns = Turns(time.monotonic() + seconds)
    for name in names:
        if name not in engines:
            write(file, {"engine": name, "refused": "the engine was not ready"})
    complete = len(engines) == len(names)
    for context, count in cases_of(numbers(contexts), numbers(requests)):
        running = {name: engine for name, engine in engines.items() if not engine.pipe.closed}
        rounds = turns.play(running, context, count)
        for name in engines:
            told = [answers[name] for answers in rounds if name in answers]
            ran = [answer for answer in told if "step_us" in answer]
            line = {"engine": name, "context": context, "requests": count} | (case_of(ran, step) if ran else {})
            if engines[name].pipe.closed:
                line |= {"refused": "the engine ended"}
            elif not rounds:
                line |= {"skipped": "no time left"}
            elif len(ran) < len(told):
                line |= told[-1]
            complete &= "refused" not in line
            write(file, line)
            print(" ".join(f"{key} {value}" for key, value in line.items() if "round" not in key), flush=True)
    for turn, context in enumerate(numbers(contexts)):
        if time.monotonic() < turns.deadline:
            write_kernels(file, ask_in_turn(engines, turn, "kernels", context, 1), context, 1)
    return complete and not any(engine.pipe.closed for engine in engines.values())
