"""GPU time of the model's forward passes in an engine of vLLM, between events in its workers.

Workers of several ranks are processes of their own, which import this module by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

AHEAD = 1 << 22  # cycles, some 2 ms


class Forwards:
    """The passes of the first rank.

    They include what the GPU waits for the host between the events, but not if the host is let ahead: then the GPU
    first waits so long that the host has launched all of a pass before it begins.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        engine.collective_rpc(watch)

    def let_ahead(self, ahead: bool) -> None:
        self._engine.collective_rpc(let_ahead, args=(ahead,))

    def milliseconds(self) -> list[float]:
        """Milliseconds of the passes since the last call."""
        return self._engine.collective_rpc(milliseconds)[0]


@dataclass(slots=True)
class Noted:
    """What a worker notes."""

    events: list[list[torch.cuda.Event]] = field(default_factory=list)
    ahead: bool = False

    def begin(self) -> None:
        if self.ahead:
            torch.cuda._sleep(AHEAD)
        self.events.append([recorded()])

    def end(self) -> None:
        self.events[-1].append(recorded())


NOTED = Noted()


def watch(worker: Any) -> None:
    """Note passes of vLLM's runner; its second, of 0.33, runs graphs beside the model and tells where a pass begins."""
    if getattr(worker.vllm_config, "use_v2_model_runner", False):
        from vllm.v1.worker.gpu.async_utils import StepTimingCollector
        from vllm.v1.worker.gpu.kv_connector import KVConnector

        before, after = (StepTimingCollector, "forward_start"), (KVConnector, "finish_forward")
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        before = after = GPUModelRunner, "_model_forward"
    hook(*before, first=NOTED.begin)
    hook(*after, last=NOTED.end)


def let_ahead(worker: Any, ahead: bool) -> None:
    NOTED.ahead = ahead


def milliseconds(worker: Any) -> list[float]:
    torch.cuda.synchronize()
    found = [first.elapsed_time(last) for first, last in NOTED.events]
    NOTED.events.clear()
    return found


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def hook(of: type, name: str, first: Callable[[], Any] = lambda: None, last: Callable[[], Any] = lambda: None) -> None:
    """Call `first` before each call of a method, and `last` after it."""
    method = getattr(of, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        first()
        result = method(*args, **kwargs)
        last()
        return result

    setattr(of, name, hooked)
