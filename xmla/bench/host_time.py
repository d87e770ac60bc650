"""The timer of what the CPU spends on a call before the GPU can start."""

import statistics
import time
from collections.abc import Callable
from typing import Any

WARM_UP, REPEATS, ROUNDS = 20, 300, 7


def host_us(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Microseconds until `call` returns, median of rounds; the GPU keeps up, so nothing waits for it."""
    for _ in range(WARM_UP):
        call()
    rounds = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        rounds.append((time.perf_counter() - start) / REPEATS * 1e6)
    wait()
    return round(statistics.median(rounds), 2)
