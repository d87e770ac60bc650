"""Adaptive verification in an engine on a CPU: without streams and graphs, and by costs for which it trims drafts."""

from contextlib import nullcontext
from typing import Any

import torch


class Nothing:
    """A stream, or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def install() -> list[tuple[list[int], list[int]]]:
    """Let vLLM's manager run here; the tokens of each step's requests that the host is told, and those of the device.

    They are of steps whose drafts were trimmed.
    """
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    VllmConfig._validate_adaptive_verification = lambda self: None  # it asks for graphs
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *_: Nothing()
    adaptive_verification.stream = lambda *_: nullcontext()
    adaptive_verification._assign_draft_token_budget_compiled = adaptive_verification._assign_draft_token_budget
    manager = adaptive_verification.AdaptiveVerificationManager
    create, compact, reallocate = manager.__init__, manager.compact_batch, manager.reallocate_drafts
    trimmed: list[tuple[list[int], list[int]]] = []
    told: list[list[int]] = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        tokens = self.req_states.max_num_batched_tokens
        self.set_cost_curves([(1, 1.0), (tokens, 1.0)], [(n, 1.0 + n) for n in range(1, tokens + 1)])

    def compact_batch(self: Any, drafts: Any, scheduled: Any, logits: Any) -> Any:
        compacted = compact(self, drafts, scheduled, logits)
        told.append([] if compacted[0] is scheduled else compacted[0].tolist())
        return compacted

    def reallocate_drafts(self: Any, requests: list[str], mapping: torch.Tensor) -> Any:
        found = reallocate(self, requests, mapping)
        if host := told.pop():
            trimmed.append((host, found[1][: len(requests) + 1].diff().tolist()))
        return found

    manager.__init__, manager.compact_batch, manager.reallocate_drafts = init, compact_batch, reallocate_drafts
    return trimmed
