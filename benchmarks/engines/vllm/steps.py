"""What the steps of an engine take, and why some take long.

`Watch` notes each step of an engine in this process: its time on the host, the tokens that are scheduled in it, what
Triton compiles or loads meanwhile and which garbage is collected. Of a long step it also notes where the host is and
what torch asks the driver for.
"""

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

LONG = 0.05  # seconds of a step behind which it is looked at
EVERY = 0.01  # seconds between looks
WAIT = 0.2  # seconds until a request's first token from which on a wait is explained
BOUNDS = (0, 64, 512, 2048, 8191, 8192)  # tokens of prefills in the steps whose times are told together, at most
SHORT = 0.005  # seconds of a garbage collection that is left out
DRIVER = ("num_device_alloc", "num_device_free", "num_alloc_retries")  # of torch's statistics


@dataclass(slots=True)
class Step:
    """Times are in seconds since the round began. A scheduler that runs ahead waits in a step for the one before."""

    begun: float
    seconds: float = 0.0
    prefill: int = 0  # tokens of prompts
    prefills: int = 0  # requests that have them
    decodes: int = 0
    gpu_ms: float | None = None  # of the forward pass, with waits for the host in it
    where: dict[str, int] = field(default_factory=dict)  # functions that the host was in, with how often it was seen
    driver: dict[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> float:
        return self.begun + self.seconds


@dataclass(slots=True)
class Event:
    begun: float
    seconds: float
    kind: str  # kernels or garbage
    what: str

    def within(self, first: float, last: float) -> float:
        """Seconds of the event between the two times."""
        return max(0.0, min(self.begun + self.seconds, last) - max(self.begun, first))


class Watch:
    """Notes of an engine in this process, of one round at a time."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.origin = time.perf_counter()
        self.steps: list[Step] = []
        self.events: list[Event] = []
        self.current: Step | None = None
        self.driver = driver()
        self.loading = self.collecting = 0.0
        self.over = threading.Event()
        scheduler = engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if self.current is not None:
                self.note(output)
            return output

        scheduler.schedule = noted
        gc.callbacks.append(self.collected)
        self.listen()
        threading.Thread(target=self.look, args=(threading.get_ident(),), daemon=True).start()

    def begin(self) -> None:
        """A round begins."""
        self.origin, self.steps, self.events, self.driver = time.perf_counter(), [], [], driver()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def step(self) -> Any:
        """The engine's next step."""
        step = self.current = Step(self.now())
        results = self.engine.step()
        step.seconds = self.now() - step.begun
        self.current = None
        if step.seconds > LONG:
            before, self.driver = self.driver, driver()
            step.driver = {name: count - before[name] for name, count in self.driver.items() if count != before[name]}
        self.steps.append(step)
        return results

    def note(self, output: Any) -> None:
        """What the scheduler puts in the step. A request has all but the last of its prompt's tokens in prefills."""
        assert self.current is not None
        new = {request.req_id for request in output.scheduled_new_reqs}
        for request, tokens in output.num_scheduled_tokens.items():
            if tokens > 1 or request in new:
                self.current.prefill += tokens
                self.current.prefills += 1
            else:
                self.current.decodes += 1

    def passes(self, milliseconds: list[float]) -> None:
        """The GPU's times of the forward passes of this round, one for each step that has tokens."""
        ran = [step for step in self.steps if step.prefill or step.decodes]
        if len(ran) == len(milliseconds):
            for step, ms in zip(ran, milliseconds, strict=True):
                step.gpu_ms = round(ms, 3)

    def listen(self) -> None:
        """Have Triton tell what it compiles and loads."""
        from triton import knobs

        runtime: Any = knobs.runtime
        knobs.compilation.listener = self.compiled
        runtime.kernel_load_start_hook.add(self.load)
        runtime.kernel_load_end_hook.add(self.loaded)

    def compiled(self, *, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        what, seconds = "read" if cache_hit else "compiled", times.total * 1e-6
        self.events.append(Event(self.now() - seconds, seconds, "kernels", f"{what} {metadata['name']}"))

    def load(self, *_: Any) -> None:
        self.loading = self.now()

    def loaded(self, module: Any, function: Any, name: str, *_: Any) -> None:
        self.events.append(Event(self.loading, self.now() - self.loading, "kernels", f"loaded {name}"))

    def collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collecting = self.now()
        elif (seconds := self.now() - self.collecting) > SHORT:
            self.events.append(Event(self.collecting, seconds, "garbage", f"generation {info['generation']}"))

    def end(self) -> None:
        """No more is noted of what Triton and Python do."""
        from triton import knobs

        runtime: Any = knobs.runtime
        self.over.set()
        gc.callbacks.remove(self.collected)
        knobs.compilation.listener = None
        runtime.kernel_load_start_hook.remove(self.load)
        runtime.kernel_load_end_hook.remove(self.loaded)

    def look(self, thread: int) -> None:
        """Where the thread is in a long step, again and again: the innermost functions of whose packages."""
        while not self.over.wait(EVERY):
            step = self.current
            if step is None or self.now() - step.begun < LONG:
                continue
            place = place_of(sys._current_frames().get(thread))
            step.where[place] = step.where.get(place, 0) + 1


def driver() -> dict[str, int]:
    """How often torch has asked the driver for memory; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    statistics = torch.cuda.memory_stats()
    return {name: statistics.get(name, 0) for name in DRIVER}


def place_of(frame: Any) -> str:
    """The innermost function, and the innermost one of the engine or of xmla if it is another."""
    names: list[str] = []
    while frame is not None and len(names) < 2:
        name = f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"
        if not names or name.startswith(("vllm.", "xmla.")):
            names.append(name)
        if names[0].startswith(("vllm.", "xmla.")):
            break
        frame = frame.f_back
    return " < ".join(names)


def waits(watch: Watch, requests: Iterable[tuple[int, float, float]]) -> list[dict[str, Any]]:
    """What the engine did while a request waited long, of (tokens, when it comes, when its first token is there)."""
    explained = []
    for tokens, comes, first in requests:
        if first - comes < WAIT:
            continue
        during = [step for step in watch.steps if step.ended > comes and step.begun < first]
        took: dict[str, float] = {
            "prefills": sum(min(step.ended, first) - max(step.begun, comes) for step in during if step.prefill)
        }
        names = Counter[str]()
        for event in watch.events:
            seconds = event.within(comes, first)
            took[event.kind] = took.get(event.kind, 0) + seconds
            names.update({event.what: round(1e3 * seconds)} if seconds > 1e-3 else {})
        # What is compiled is so in steps with prefills too.
        causes = (cause for cause in ("kernels", "garbage", "prefills") if took.get(cause, 0) > (first - comes) / 2)
        explained.append({
            "cause": next(causes, "other"), "ms": round(1e3 * (first - comes)), "tokens": tokens,
            "prefill_tokens": sum(step.prefill for step in during), "steps": len(during),
            "of_these_ms": {cause: round(1e3 * seconds) for cause, seconds in took.items()},
            "events": dict(names.most_common(4)), "longest": told(max(during, key=lambda step: step.seconds)),
        })  # fmt: skip
    return explained


def told(step: Step) -> dict[str, Any]:
    """A step as a line has it."""
    most = sorted(step.where.items(), key=lambda each: -each[1])[:3]
    rounded = {"begun": round(step.begun, 4), "seconds": round(step.seconds, 4), "where": dict(most)}
    return {name: value for name, value in (asdict(step) | rounded).items() if value not in (None, 0, {})}


def by_size(steps: list[Step]) -> list[dict[str, Any]]:
    """Medians of the steps with so many tokens of prefills, at most."""
    rows = []
    for below, most in zip((-1, *BOUNDS), BOUNDS, strict=False):
        alike = [step for step in steps if below < step.prefill <= most and (step.prefill or step.decodes)]
        passes = [step.gpu_ms for step in alike if step.gpu_ms is not None]
        if alike:
            row = {"prefill_tokens": most, "steps": len(alike), "ms": 1e3 * median(step.seconds for step in alike)}
            row |= {"gpu_ms": median(passes)} if passes else {}
            rows.append({name: round(value, 3) for name, value in row.items()})
    return rows


def summary(watch: Watch, seconds: float, requests: Iterable[tuple[int, float, float]]) -> dict[str, Any]:
    """Summary of a round that took so long: shares of its time, events, medians of steps, long steps and waits."""
    prefills = sum(step.seconds for step in watch.steps if step.prefill)
    every = sum(step.seconds for step in watch.steps)
    kinds, names = Counter[str](), Counter[str]()
    for event in watch.events:
        kinds[event.kind] += round(1e3 * event.seconds)
        names[event.what] += round(1e3 * event.seconds)
    return {
        "prefill_share": round(prefills / seconds, 3), "busy_share": round(every / seconds, 3),
        "kernels_ms": kinds["kernels"], "garbage_ms": kinds["garbage"], "events": dict(names.most_common(12)),
        "by_size": by_size(watch.steps), "waits": waits(watch, requests),
        "slowest": [told(step) for step in sorted(watch.steps, key=lambda step: -step.seconds)[:10]],
        "steps": [[round(step.begun, 4), round(step.seconds, 4), step.prefill, step.prefills, step.decodes, step.gpu_ms]
                  for step in watch.steps],
    }  # fmt: skip
