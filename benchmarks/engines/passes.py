"""GPU time of a model's forward passes, between events in the process that makes them."""

from dataclasses import dataclass, field
from typing import Any

import torch

AHEAD = 1 << 22  # cycles, some 2 ms


@dataclass(slots=True)
class Passes:
    """What a process notes of its passes.

    They include what the GPU waits for the host between the events, but not if it is `ahead`: then the GPU first waits
    so long that the host has launched all of a pass before it begins.
    """

    events: list[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    ahead: bool = False

    def begin(self) -> torch.cuda.Event:
        if self.ahead:
            torch.cuda._sleep(AHEAD)
        return recorded()

    def end(self, begun: torch.cuda.Event, kind: Any = None) -> None:
        self.events.append((kind, begun, recorded()))

    def take(self, ahead: bool) -> list[tuple[Any, float]]:
        """Kind and milliseconds of each pass since the last call; whether those from now on are `ahead`."""
        torch.cuda.synchronize()
        found = [(kind, first.elapsed_time(last)) for kind, first, last in self.events]
        self.events.clear()
        self.ahead = ahead
        return found


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
