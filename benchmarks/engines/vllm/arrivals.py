"""Requests of many lengths that come to an engine by and by: a trace, and a round of it."""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.served import prompt
from benchmarks.engines.vllm.steps import Watch, summary

TYPICAL, SPREAD, SHORTEST, LONGEST = 2048, 1.2, 64, 32768  # tokens of a trace's prompts: median, of the logarithm
FEWEST, MOST = 16, 256  # new tokens of its requests
AT_ONCE = 64  # of its requests
# Prompts before a trace. Triton compiles vLLM's kernel for experts apart for numbers of tokens that are divisible by 8,
# by 4 alone and by neither, in each of its five ranges above those that graphs hold; a request would wait for each.
BEFORE = (80, 76, 73, 112, 116, 113, 144, 148, 145, 528, 532, 529, 2048, 2052, 2049)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace: the seconds after which it comes, the tokens of its prompt, and its new ones."""

    comes: float
    tokens: int
    new: int


def trace_of(requests: int, rate: float) -> list[Request]:
    """Always the same: `rate` requests a second, at random times, of random lengths."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.empty(requests).exponential_(rate, generator=generator)
    lengths = torch.empty(requests).log_normal_(math.log(TYPICAL), SPREAD, generator=generator)
    new = torch.randint(FEWEST, MOST + 1, (requests,), generator=generator)
    whole = lengths.clamp(SHORTEST, LONGEST).long().tolist()
    return [Request(*each) for each in zip(gaps.cumsum(0).tolist(), whole, new.tolist(), strict=True)]


def play(served: Any, watch: Watch, requests: int, rate: float, number: int, pace: float) -> dict[str, Any]:
    """A round of a trace with new prompts, `pace` times as fast: of each request the time from when it comes until its
    first token, and from there the time of a token; seconds until the last, and what steps took.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, trace = served.engine, trace_of(requests, rate)
    prompts = [prompt(request.tokens, number << 20 | place) for place, request in enumerate(trace)]
    coming = deque(enumerate(trace))
    first, last = dict[int, float](), dict[int, float]()
    served.passes()
    watch.begin()
    begun = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - begun
        while coming and coming[0][1].comes / pace <= now:
            place, request = coming.popleft()
            parameters = SamplingParams(
                temperature=0, max_tokens=request.new, detokenize=False, ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            given = {"prompt_token_ids": prompts[place]}
            engine.add_request(f"{number}-{place}", given, parameters)
        if not engine.has_unfinished_requests():
            time.sleep(coming[0][1].comes / pace - now)
            continue
        results = watch.step()
        now = time.perf_counter() - begun
        for result in results:
            if result.outputs[0].token_ids:
                place = int(result.request_id.partition("-")[2])
                first.setdefault(place, now)
                last[place] = now
    watch.passes(served.passes())
    waited = [(request.tokens, request.comes / pace, first[place]) for place, request in enumerate(trace)]
    return {
        "ttft_ms": [1e3 * (first[place] - request.comes / pace) for place, request in enumerate(trace)],
        "tpot_ms": [1e3 * (last[place] - first[place]) / (request.new - 1) for place, request in enumerate(trace)],
        "seconds": max(last.values()),
    } | summary(watch, max(last.values()), waited)
