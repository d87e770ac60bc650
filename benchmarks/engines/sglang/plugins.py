"""Plugins of SGLang that its engines load beside xmla's, in each of their processes."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import calls
from benchmarks.engines.passes import Passes
from benchmarks.engines.sglang.engines import OPS

CALLED = "XMLA_TEST_CALLED"  # names a file; each op's name is appended to it at the op's first call in a process
POINTS = {
    "called": f"{__name__}:count_calls", "passes": f"{__name__}:watch_passes", "streams": f"{__name__}:without_tilelang"
}  # fmt: skip


def without_tilelang() -> None:
    """Replace mHC's kernel in TileLang by SGLang's own in Triton, which is for an AMD GPU."""
    from sglang.kernels.ops.layernorm import mhc

    mhc.is_gfx1250_supported = lambda: True


def count_calls() -> None:
    """Append to the file which ops are called in this process; loaded behind xmla."""
    calls.count(OPS, first=note_call)


def note_call(name: str) -> None:
    with Path(os.environ[CALLED]).open("a") as file:
        file.write(f"{name}\n")


@dataclass(frozen=True, slots=True)
class Watch:
    """Passes in the process of SGLang's scheduler."""

    passes: Passes = field(default_factory=Passes)

    def forward(self, forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `ModelRunner.forward`."""
        begun = self.passes.begin()
        result = forward(runner, batch, *args, **kwargs)
        self.passes.end(begun, (batch.forward_mode.name, batch.batch_size))
        return result

    def tell(self, scheduler: Any, out: str, ahead: bool) -> None:
        """Write kind, requests and milliseconds of each pass since the last time; a method of SGLang's scheduler."""
        passes = [(*kind, ms) for kind, ms in self.passes.take(ahead)]
        if torch.distributed.get_rank() == 0:
            Path(out).write_text(json.dumps(passes))


def watch_passes() -> None:
    """Have SGLang's scheduler tell of passes when it is asked."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    watch = Watch()
    Scheduler.tell_passes = lambda scheduler, **asked: watch.tell(scheduler, **asked)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", watch.forward, HookType.AROUND)
