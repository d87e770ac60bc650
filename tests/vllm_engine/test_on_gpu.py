"""What `on_gpu.py` makes of answers, without vLLM."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forwards
import gpu_engine
import harness
import on_gpu
import pytest
import torch
import typer
from triton.runtime import autotuner
from typer.testing import CliRunner

from benchmarks.engines.vllm import steps
from benchmarks.engines.vllm.steps import Event, Step


def answers(logprob: float, last: int, tokens: int) -> dict[str, Any]:
    new = [5] * tokens + [6] * (gpu_engine.NEW_TOKENS - tokens)
    return {"6000": {"logprobs": [-1.0, logprob], "likely": [3, last], "tokens": new}}


def test_difference_of_answers() -> None:
    found = harness.difference(answers(-1.5, 4, 32), answers(-1.0, 7, 20))
    assert found == {"prompt": [6000], "mean_abs_logprob": [0.25], "same_likely": [0.5], "equal_tokens": [20]}


def test_verdicts() -> None:
    def holds(pairs: dict[tuple[str, str], Any], ran: dict[str, Any], release: str = "0.26.0") -> list[bool]:
        return [*on_gpu.verdicts(pairs, ran, release).values()]

    near, far, all_equal = ({"mean_abs_logprob": [apart], "equal_tokens": [32]} for apart in (0.1, 0.3, 0.0))
    found = {
        ("xmla", "own-bf16"): near, ("own", "own-bf16"): near, ("own-chunks", "own"): near,
        ("xmla-graphs", "xmla"): all_equal,
    }  # fmt: skip
    called = dict.fromkeys(on_gpu.CALLED | on_gpu.WRITERS, 1)
    ran = {"xmla": {"attention": ["XmlaSparseImpl"], "calls": called, "compiled_late": []}}
    assert holds(found, ran) == [True] * 4
    assert holds({}, {"xmla": ran["xmla"] | {"compiled_late": ["a kernel"]}}) == [True, False]
    assert not all(holds(found | {("xmla", "own-bf16"): far}, ran))
    graphs = {("xmla-graphs", "xmla"): {"mean_abs_logprob": [0.0], "equal_tokens": [31]}}
    assert not all(holds(found | graphs, ran))
    own, ours, fused = (
        {"attention": [kind], "calls": dict.fromkeys(called, 1), "compiled_late": []}
        for kind, called in (("FlashMLASparseImpl", ()), ("XmlaSparseImpl", ()), ("XmlaSparseImpl", on_gpu.CALLED))
    )
    assert holds({}, {"xmla": own}) == holds({}, {"xmla": ours}) == holds({}, {"xmla": fused}) == [False, True]
    assert holds({}, {"xmla": fused}, "0.33.0") == holds({}, {"xmla-ranks": ours}) == [True, True]
    assert holds({}, {"v4-xmla": fused | {"attention": ["XmlaV4Attention"]}}) == [True, True]
    in_blocks = {"attention": ["XmlaV41Attention"], "calls": dict.fromkeys(on_gpu.CALLED | on_gpu.IN_BLOCKS, 1)}
    assert holds({}, {"v41-xmla": fused | in_blocks}) == [True, True]
    assert holds({}, {"v41-xmla": fused | {"attention": ["XmlaV41Attention"]}}) == [False, True]
    apart = {("xmla-drafts", "xmla"): {"same_likely": [1.0, 0.89]}}
    assert not all(holds(apart, {}))
    alone = {("xmla-invariant-alone", "xmla-invariant"): near}
    for logprob, equal in ((-1.0, True), (-1.0 - 2**-20, False)):
        given = {"xmla-invariant": answers(-1.0, 4, 32), "xmla-invariant-alone": answers(logprob, 4, 32)}
        ran = {name: fused | {"answers": answer} for name, answer in given.items()}
        assert holds(alone, ran, "0.33.0") == [*[True] * 4, equal]


def test_options_of_ranks_and_drafts() -> None:
    ranks, drafts = (gpu_engine.ENGINES[f"xmla-{name}"].arguments(()) for name in ("keys", "drafts-3"))
    assert ranks["tensor_parallel_size"] == ranks["decode_context_parallel_size"] == 2
    assert drafts["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}


def test_engines_of_one_model(tmp_path: Path) -> None:
    (tmp_path / "v4").mkdir()
    (tmp_path / "v4" / "config.json").write_text("{}")
    assert on_gpu.model_in(tmp_path, "v4-own,v4-xmla", 4, 128) == tmp_path / "v4"
    with pytest.raises(typer.BadParameter, match="engines of one model"):
        on_gpu.model_in(tmp_path, "xmla,v4-xmla", 4, 128)


def test_an_engine_to_measure_by_the_sizes_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V4.1's are inside of its configuration. Its cache holds windows and entries, each in pages as large."""
    asked = []
    monkeypatch.setattr(
        gpu_engine, "start", lambda *_, kv_cache_memory_bytes, **__: asked.append(kv_cache_memory_bytes)
    )
    for config in ({"num_hidden_layers": 5}, {"text_config": {"num_hidden_layers": 5}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        gpu_engine.start_for("v41-xmla-graphs", tmp_path, [4096, 32768], [1, 8], 64, 8192)
    assert asked == [(1 << 30) + int(1.25 * 3 * 8 * (32768 + 64 + 128) * 5 * (656 + 132))] * 2


@pytest.mark.parametrize(("name", "layers"), [("own", 4), ("v4-own", 4), ("v41-own", 5), ("glm-own", 4)])
def test_two_engines_fit_an_h100(name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches leave each 8 GiB of 78 for weights, workspaces and passes."""
    asked = []
    monkeypatch.setattr(
        gpu_engine, "start", lambda *_, kv_cache_memory_bytes, **__: asked.append(kv_cache_memory_bytes)
    )
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    for kind in ("own", "xmla"):
        whole = name.replace("own", f"{kind}-graphs")
        gpu_engine.start_for(whole, tmp_path, [4096, 32768], [1, 8, 64], gpu_engine.TOKENS, 8192)
    assert sum(asked) <= (78 - 2 * 8) << 30


def test_decode_counts_steps_after_the_first() -> None:
    steps = [(1.0, 0), (9.0, 2), *((9.0 + 0.5 * number, 2) for number in range(1, 21))]
    times = gpu_engine.Drained(0.0, steps, 0, []).decode_us(2)
    assert times == [500000.0] * 13


def test_a_round_is_of_new_prompts_and_then_of_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int, bool]] = []  # prompts, their tokens, new tokens, does the GPU wait?

    def drain(engine: Any, prompts: list[Any], tokens: int) -> gpu_engine.Drained:
        asked.append((len(prompts), len(prompts[0]["prompt_token_ids"]), tokens, forwards.ahead))
        steps = [(0.5 * (number + 1), len(prompts)) for number in range(tokens)]
        return gpu_engine.Drained(0.0, steps, 60, [[prompt["prompt_token_ids"][0]] * tokens for prompt in prompts])

    monkeypatch.setattr(gpu_engine, "drain", drain)
    monkeypatch.setattr(gpu_engine, "TOKENS", 2)
    forwards = SimpleNamespace(milliseconds=lambda: [9.0, 1.0, 3.0], ahead=False)
    forwards.let_ahead = lambda ahead: setattr(forwards, "ahead", ahead)
    steps = {"step_us": 500000.0, "forward_us": 2000.0, "cached_tokens": 60, "same_tokens": 1.0}
    answered = harness.Answered()
    filled = {"prefill_tokens_per_s": 120, "prefill_forward_ms": 13.0}
    assert gpu_engine.timed_round(None, forwards, answered, 30, 2, 0, True) == steps | filled
    assert asked == [(2, 30, 1, False), (2, 30, 10, False), (2, 30, 10, True)] and not forwards.ahead
    assert gpu_engine.timed_round(None, forwards, answered, 30, 2, 0, False) == steps
    answered[30, 2, 0][0] = [-1] * 10
    assert gpu_engine.timed_round(None, forwards, answered, 30, 2, 0, False) == steps | {"same_tokens": 0.5}
    monkeypatch.setattr(gpu_engine, "drain", lambda *_: gpu_engine.Drained(0.0, [(1.0, 1)] * 72, 0, []))
    refusal = {"refused": "the cache does not hold 2 requests at once"}
    assert gpu_engine.timed_round(None, forwards, answered, 30, 2, 0, True) == refusal


def test_no_prompt_is_cached_by_another() -> None:
    """Nor is one that compiles, or whose kernels are shown."""
    prompts = [
        tuple(each["prompt_token_ids"][:64]) for context, requests in ((1024, 8), (4096, 1), (4096, 8))
        for number in range(-3, 9) for each in gpu_engine.new_prompts(context, requests, number)
    ]  # fmt: skip
    assert len({*prompts}) == len(prompts) == 17 * 12


def test_passes_are_timed_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is let ahead of those that are not to include its time."""
    times, slept = iter([1.0, 4.0, 10.0, 12.5, 20.0, 24.0]), list[int]()

    def event(**_: bool) -> Any:
        at = SimpleNamespace(record=lambda: None, ms=next(times))
        at.elapsed_time = lambda last: last.ms - at.ms
        return at

    class Runner:
        def _model_forward(self, inputs: str) -> str:
            return inputs

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=Runner))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(forwards, "NOTED", forwards.Noted())
    worker = SimpleNamespace(vllm_config=SimpleNamespace())
    engine = SimpleNamespace(collective_rpc=lambda function, args=(): [function(worker, *args), None])
    passes = forwards.Forwards(engine)
    assert Runner()._model_forward("inputs") == "inputs" and passes.milliseconds() == [3.0] and not slept
    passes.let_ahead(True)
    Runner()._model_forward("inputs")
    assert passes.milliseconds() == [2.5] and slept == [forwards.AHEAD] and passes.milliseconds() == []
    passes.let_ahead(False)
    Runner()._model_forward("inputs")
    assert passes.milliseconds() == [4.0] and slept == [forwards.AHEAD]


def test_an_engine_is_ready_when_every_case_has_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a case of many tokens only some prompts run, each with as many requests beside as the case has."""
    ours, theirs = Pipe()
    ran: list[Any] = []
    engine = SimpleNamespace(collective_rpc=lambda _: [{"attention": []}])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(EngineArgs=None, LLMEngine=None))
    monkeypatch.setattr(gpu_engine, "start_for", lambda *sizes: ran.append(sizes[1:-2]) or engine)
    monkeypatch.setattr(gpu_engine, "tune_in_turn", lambda lock: ran.append(lock))
    monkeypatch.setattr(gpu_engine, "Forwards", lambda engine: None)
    monkeypatch.setattr(
        gpu_engine, "drain", lambda _, prompts, tokens: ran.append((len(prompts), len({*map(str, prompts)}), tokens))
    )
    monkeypatch.setattr(gpu_engine, "timed_round", lambda *case: {"round": case[3:]})
    monkeypatch.setattr(gpu_engine, "kernels_of", lambda *case: [{"kernels": case[1:]}])
    monkeypatch.setattr(gpu_engine, "Connection", lambda number: theirs)
    for question in (tmp_path / "model", ("round", 64, 1, 0, True), ("kernels", 64, 1), None):
        ours.send(question)
    gpu_engine.measure("own", 3, "65536,64", "1,8")
    sizes = tmp_path / "model", [65536, 64], [1, 8]
    cases = [(1, 1, 1), (1, 1, 8), (8, 8, 1), (8, 8, 8), (1, 1, 1), (1, 1, 8), (2, 2, 1), (8, 2, 8)]
    assert ran == [tmp_path / "tuning.lock", sizes, *cases]
    answers = [ours.recv() for _ in range(3)]
    assert answers == [os.getpid(), {"round": (64, 1, 0, True)}, [{"kernels": (64, 1)}]]


def test_engines_tune_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside: list[int] = []

    def look_up(tuner: int, *_: Any) -> str:
        inside.append(tuner)
        time.sleep(0.05)
        assert inside.pop() == tuner and not inside
        return f"choice of {tuner}"

    monkeypatch.setattr(autotuner.Autotuner, "check_disk_cache", look_up)
    gpu_engine.tune_in_turn(tmp_path / "lock")
    with ThreadPoolExecutor(4) as threads:
        chosen = threads.map(autotuner.Autotuner.check_disk_cache, range(8), [()] * 8, [[]] * 8, [None] * 8)
        assert [*chosen] == [f"choice of {tuner}" for tuner in range(8)]


def test_every_engine_that_is_compared_exists() -> None:
    named = {name for pair in on_gpu.PAIRS for name in pair} | set(on_gpu.CHECKED.split(","))
    assert named <= gpu_engine.ENGINES.keys()
    assert gpu_engine.ENGINES["xmla"].environment() == {"VLLM_PLUGINS": "xmla"}
    assert gpu_engine.ENGINES["own"].arguments(()) == {
        "attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8", "enforce_eager": True
    }  # fmt: skip


NOBODY = 1 << 30  # a process that there is not
ROUND = {
    "step_us": 5.0, "forward_us": 1.5, "prefill_tokens_per_s": 2**20, "prefill_forward_ms": 1.5, "same_tokens": 1.0,
}  # fmt: skip
Answer = Callable[[str, tuple[Any, ...]], Any]


def run(
    command: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str, answer: Answer | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the lines of a command whose engines are stand-ins.

    `answer(name, question)` is what a measured one puts into its pipe; it ends if that is None.
    """
    config = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}

    def child(
        log: Path, seconds: float, environment: dict[str, str], *words: Any, pipe: Connection | None = None
    ) -> int:
        kind, name, *rest = words
        log.write_text("started\nended")
        if kind == "model":
            name.mkdir()
            (name / "config.json").write_text(json.dumps(config))
            return 0
        if name == "xmla-bf16":
            return 1
        if kind == "answer":
            given = {length: answers(-1.0, 7, 32)["6000"] for length in gpu_engine.JOINS}
            attention = ["XmlaSparseImpl"] if environment["VLLM_PLUGINS"] else ["FlashMLASparseImpl"]
            calls = dict.fromkeys(on_gpu.CALLED | on_gpu.WRITERS, 1)
            answered = {"answers": given, "attention": attention, "calls": calls, "seconds": {}, "steps": 40}
            rest[-1].write_text(json.dumps(answered | {"kernels": 90, "compiled_late": []}))
            return 0
        assert kind == "measure" and answer and environment["TRITON_CACHE_AUTOTUNING"] == "1"
        assert pipe.recv() == str(folder / "model-4-128")
        if name == "xmla-ranks":
            with suppress(OSError):
                time.sleep(1.5)  # is not ready in time
                pipe.send(NOBODY)
            return 1
        pipe.send(NOBODY)
        while (question := pipe.recv()) is not None:
            if (told := answer(name, question)) is None:
                return 1
            pipe.send(told)
        return 0

    monkeypatch.setattr(on_gpu, "child", child)
    monkeypatch.setattr(on_gpu, "version", lambda package: "0.26.0")
    words = [command, "--out", str(folder / "out"), "--work", str(folder), "--commit", "a commit", *more]
    done = CliRunner().invoke(on_gpu.app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    lines = (folder / "out" / "vllm.jsonl").read_text().splitlines()
    return done.exit_code, [json.loads(line) for line in lines]


def test_check_writes_what_every_engine_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (first, *lines, last) = run("check", monkeypatch, tmp_path)
    assert status == 1  # one engine failed
    assert first["commit"] == "a commit" and first["vllm"] == "0.26.0"
    assert {line["engine"]: line["exit_code"] for line in lines if "exit_code" in line}["xmla-bf16"] == 1
    assert [line["equal_tokens"] for line in lines if "beside" in line] == [[32] * 5] * 6
    assert all(last["holds"].values()) and len(last["holds"]) == 8
    assert "=== xmla-bf16: exit status 1" in (tmp_path / "out" / "logs.txt").read_text()


def figures(question: tuple[Any, ...], **others: Any) -> Any:
    """What an engine answers, of a case's round with the tokens that its prompts cache."""
    what, context, requests, *number = question
    if what == "kernels":
        return [{"phase": "decode", "kernel": "a kernel", "launches": 4, "us": 9.5}]
    told = ROUND | {"cached_tokens": context * requests} | others
    return told if number[1] else {key: value for key, value in told.items() if "prefill" not in key}


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each case is written with what its rounds have, each engine begins as many, and all have the same cores."""
    asked: list[Any] = []
    placed: list[str] = []

    def answer(name: str, question: tuple[Any, ...]) -> Any:
        asked.append((name, *question))
        return figures(question, step_us=5.0 + question[3] if question[0] == "round" else 0.0)

    monkeypatch.setattr(harness, "place", lambda engines, name: placed.append(name))
    words = "--contexts", "64,262144", "--requests", "1"
    status, (first, *lines) = run("speed", monkeypatch, tmp_path, *words, answer=answer)
    engines = "xmla-graphs", "own-graphs"
    assert status == 0 and first["vllm"] == "0.26.0"
    turns = [engines[:: -1 if number % 2 else 1] for number in range(12)]
    assert asked[:48] == [
        (name, "round", context, 1, *question)
        for context, questions in (
            (64, [(number, True) for number in range(12)]),
            # Long prompts are new twice.
            (262144, [(0, True), (1, True), *[(1, False)] * 10]),
        )
        for turn, question in zip(turns, questions, strict=True)
        for name in turn
    ]
    assert asked[48:] == [
        ("xmla-graphs", "kernels", 64, 1), ("own-graphs", "kernels", 64, 1),
        ("own-graphs", "kernels", 262144, 1), ("xmla-graphs", "kernels", 262144, 1),
    ]  # fmt: skip
    assert placed == [each[0] for each in asked]
    assert [(line["engine"], line["context"], "kernel" in line) for line in lines] == [
        (name, context, shown) for shown in (False, True) for context in (64, 262144) for name in engines
    ]
    by_round = [5.0 + number for number in range(12)]
    assert lines[0] == {
        "engine": "xmla-graphs", "context": 64, "requests": 1, "cached_tokens": 64, **ROUND,
        "step_us_by_round": by_round, "forward_us_by_round": [1.5] * 12, "prefill_tokens_per_s_by_round": [2**20] * 12,
        "prefill_forward_ms_by_round": [1.5] * 12,
    }  # fmt: skip
    assert lines[2]["prefill_forward_ms_by_round"] == [1.5] * 2 and len(lines[2]["forward_us_by_round"]) == 12


def test_cases_end_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a clock that goes on by what engines take: 1 s a round of steps, and 32768 tokens/s of prefill."""
    now, begun = [0.0], time.monotonic()

    def answer(name: str, question: tuple[Any, ...]) -> Any:
        _, context, requests, _, new = question if question[0] == "round" else (*question, 0, True)
        now[0] += 1 + new * context * requests / 32768
        return figures(question, prefill_tokens_per_s=32768)

    monkeypatch.setattr(time, "monotonic", lambda: begun + now[0])
    words = "--contexts", "16384,65536", "--requests", "1,8", "--seconds", "64"
    status, (_, *lines) = run("speed", monkeypatch, tmp_path, *words, answer=answer)
    assert status == 0
    told = [(line["context"], line["requests"], len(line.get("forward_us_by_round", ()))) for line in lines[:8]]
    # A round takes 3 s, 6 s, 10 s, 34 s: twelve rounds, four (12 and 12 s of 28), and no time for two of any other.
    assert told == [(context, count, rounds) for context, count, rounds in (
        (16384, 1, 12), (65536, 1, 4), (16384, 8, 0), (65536, 8, 0)
    ) for _ in range(2)]  # fmt: skip
    assert [line.get("skipped") for line in lines[:8]] == [None] * 4 + ["no time left"] * 4
    assert now[0] == 60 + 3 + 6 and len(lines) == 12  # with kernels, which begin in time


def test_engines_that_end_leave_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four engines one never starts, one is not ready in time, one ends in a case, and one goes on."""

    def answer(name: str, question: tuple[Any, ...]) -> Any:
        what, context, _, *number = question
        if (name, context, number[:1]) == ("own-bf16", 64, [2]):
            return None
        full = name == "own" and context == 128 and what == "round"
        return {"refused": "the cache does not hold 1 requests at once"} if full else figures(question)

    words = "--engines", "xmla-bf16,own-bf16,own,xmla-ranks", "--contexts", "64,128", "--requests", "1", "--start", "1"
    status, (_, *lines) = run("speed", monkeypatch, tmp_path, *words, answer=answer)
    assert status == 1
    assert [(line["engine"], line.get("context"), line.get("refused")) for line in lines] == [
        ("xmla-bf16", None, "the engine was not ready"),
        ("xmla-ranks", None, "the engine was not ready"),
        ("own-bf16", 64, "the engine ended"),
        ("own", 64, None),
        ("own-bf16", 128, "the engine ended"),
        ("own", 128, "the cache does not hold 1 requests at once"),
        ("own", 64, None),
        ("own", 128, None),
    ]
    assert [len(line["step_us_by_round"]) for line in lines if "step_us" in line] == [2, 12]
    logs = (tmp_path / "out" / "logs.txt").read_text()
    assert all(f"=== {name}: exit status 1" in logs for name in ("xmla-bf16", "own-bf16", "xmla-ranks"))


@pytest.mark.parametrize("engines", ["own,xmla-bf16", "own,xmla"], ids=["at start", "behind all cases"])
def test_an_engine_that_ends_fails_the_run(engines: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if every case that ran is complete."""

    def answer(name: str, question: tuple[Any, ...]) -> Any:
        return None if (name, question[0]) == ("xmla", "kernels") else figures(question)

    words = "--engines", engines, "--contexts", "64", "--requests", "1"
    status, (_, *lines) = run("speed", monkeypatch, tmp_path, *words, answer=answer)
    assert status == 1 and ("own", 9.5) in [(line["engine"], line.get("us")) for line in lines]


def test_engines_end_without_a_model(tmp_path: Path) -> None:
    ended: list[str] = []

    def run(name: str, log: Path, pipe: Connection) -> int:
        log.write_text("started")
        ended.append(f"{name}: {pipe.recv()}")
        return 1

    def model() -> Path:
        raise typer.Exit(3)

    with pytest.raises(typer.Exit), harness.ready(tmp_path, tmp_path, ["own", "xmla"], run, model, 9):
        raise AssertionError("there is no model")
    assert sorted(ended) == ["own: None", "xmla: None"]


def test_an_engine_has_half_of_the_cores_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all processes that it started; the others have the rest."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4})
    placed: dict[int, list[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", placed.__setitem__)
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['cat'])"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as ours,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
    ):
        deadline = time.monotonic() + 20
        while len({*harness.threads_of(ours.pid)}) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        engines = {name: harness.Ready(None, each.pid) for name, each in (("ours", ours), ("other", other))}
        harness.place(engines, "ours")
        (started,) = {*placed} - {ours.pid, other.pid}
        assert started and placed == {ours.pid: [0, 1], started: [0, 1], other.pid: [2, 3, 4]}
        harness.place(engines, "other")
        assert placed == {ours.pid: [2, 3, 4], started: [2, 3, 4], other.pid: [0, 1]}
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
        harness.place(engines, "other")
        assert {*map(tuple, placed.values())} == {(0,)}
        for each in (ours, other):
            each.stdin.close()


def test_an_engine_ends_when_its_pipe_is_closed_or_its_time_is_over(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys, time; print(*sys.argv[1:], flush=True); time.sleep(float(sys.argv[1]))")
    assert harness.run_engine([script, 0, "words"], log, os.environ, 60, None) == 0
    assert log.read_text() == "0 words\n"
    assert harness.run_engine([script, 60], log, os.environ, 1, None) == 124
    _, end = Pipe()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(harness.run_engine, [script, 60], log, os.environ, 60, end)
        time.sleep(0.5)
        end.close()
        assert running.result(20) != 0


def test_a_trace_is_always_the_same() -> None:
    trace = gpu_engine.trace_of(200, 8.0)
    assert trace == gpu_engine.trace_of(200, 8.0)
    assert [each.comes for each in trace] == sorted(each.comes for each in trace)
    assert 20 < trace[-1].comes < 30  # 8 a second
    assert {64 <= each.tokens <= 32768 and 16 <= each.new <= 256 for each in trace} == {True}


def test_a_round_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in gives each request a token a step of 10 ms; a request waits for the step that runs when it comes."""
    now, running = [0.0], dict[str, int]()

    def step() -> list[Any]:
        now[0] += 0.01
        running.update({name: left - 1 for name, left in running.items()})
        results = [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[5])]) for name in running]
        for name in [name for name, left in running.items() if not left]:
            del running[name]
        return results

    def sleep(seconds: float) -> None:
        now[0] += seconds

    engine = SimpleNamespace(
        add_request=lambda name, prompt, parameters: running.update({name: parameters.max_tokens}), step=step,
        has_unfinished_requests=lambda: bool(running),
    )  # fmt: skip
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    watch = SimpleNamespace(
        steps=[], events=[], begin=lambda: None, step=lambda: engine.step(), passes=lambda milliseconds: None
    )
    forwards = SimpleNamespace(milliseconds=list)
    trace = [gpu_engine.Request(1.0, 30, 3), gpu_engine.Request(1.005, 40, 2), gpu_engine.Request(3.0, 50, 5)]
    told = gpu_engine.play(engine, trace, 7, 1, watch, forwards)
    assert told["ttft_ms"] == pytest.approx([10, 15, 10]) and told["tpot_ms"] == pytest.approx([10, 10, 10])
    assert told["seconds"] == pytest.approx(3.05)
    now[0] = 0.0
    assert gpu_engine.play(engine, trace, 8, 2, watch, forwards)["seconds"] == pytest.approx(1.55)


def test_what_a_round_is_made_of() -> None:
    """A request of 1 s that a kernel takes most of, one that prefills do, one that nothing explains, a short one."""
    made = [
        Step(0.1, 0.9, prefill=100, prefills=1, gpu_ms=4.0, where={"a": 1, "b": 2}), Step(1.0, 0.1, decodes=1),
        Step(2.0, 0.25, prefill=8192, prefills=2, decodes=3, gpu_ms=90.0), Step(4.0, 0.3, decodes=2, gpu_ms=1.0),
    ]  # fmt: skip
    events = [Event(0.1, 0.7, "kernels", "compiled k"), Event(4.2, 0.08, "garbage", "generation 2")]
    requests = [(100, 0.0, 1.0), (9000, 2.0, 2.25), (7, 4.0, 4.3), (7, 4.2, 4.3)]
    found = steps.summary(SimpleNamespace(steps=made, events=events), 5.0, requests)
    assert (found["prefill_share"], found["busy_share"]) == (0.23, 0.31)
    assert (found["kernels_ms"], found["garbage_ms"]) == (700, 80)
    assert [(wait["cause"], wait["ms"], wait["prefill_tokens"]) for wait in found["waits"]] == [
        ("kernels", 1000, 100), ("prefills", 250, 8192), ("other", 300, 0)
    ]  # fmt: skip
    assert found["waits"][0]["events"] == {"compiled k": 700}
    assert found["waits"][0]["longest"] == {
        "begun": 0.1, "seconds": 0.9, "prefill": 100, "prefills": 1, "gpu_ms": 4.0, "where": {"b": 2, "a": 1}
    }  # fmt: skip
    assert [step["seconds"] for step in found["slowest"]] == [0.9, 0.3, 0.25, 0.1]
    assert [(row["prefill_tokens"], row["steps"], row["ms"], row.get("gpu_ms")) for row in found["by_size"]] == [
        (0, 2, 200.0, 1.0), (512, 1, 900.0, 4.0), (8192, 1, 250.0, 90.0)
    ]  # fmt: skip


def test_steps_are_watched() -> None:
    """Of an engine that compiles a kernel and collects garbage in a long step, in which the host waits."""
    asked = [SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="a")], num_scheduled_tokens={"a": 1}),
             SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens={"a": 1, "b": 30}),
             SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens={})]  # fmt: skip
    scheduler = SimpleNamespace(schedule=lambda: asked.pop(0))

    def step() -> str:
        if scheduler.schedule().num_scheduled_tokens.get("b"):
            watch.compiled(metadata={"name": "k"}, times=SimpleNamespace(total=20_000), cache_hit=True)
            watch.load()
            watch.loaded(None, None, "k")
            watch.collected("start", {"generation": 2})
            time.sleep(0.12)
            watch.collected("stop", {"generation": 2})
        return "results"

    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)), step=step)
    watch = steps.Watch(engine)
    watch.begin()
    assert [watch.step() for _ in range(3)] == ["results"] * 3
    watch.end()
    watch.passes([1.25, 2.5])
    assert [(each.prefill, each.prefills, each.decodes, each.gpu_ms) for each in watch.steps] == [
        (1, 1, 0, 1.25), (30, 1, 1, 2.5), (0, 0, 0, None)
    ]  # fmt: skip
    assert [event.what for event in watch.events] == ["read k", "loaded k", "generation 2"]
    assert watch.events[0].seconds == pytest.approx(0.02) and watch.events[2].seconds > 0.1
    assert not watch.steps[0].where and any(name.endswith("test_on_gpu.step") for name in watch.steps[1].where)
    watch.passes([1.0])  # of another number of steps
    assert watch.steps[0].gpu_ms == 1.25


@pytest.mark.parametrize("apart", [False, True])
def test_a_trace_of_engines(apart: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model-4-128").mkdir()
    config = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}
    (tmp_path / "model-4-128" / "config.json").write_text(json.dumps(config))
    order, places = [], {}

    def child(log: Path, seconds: float, environment: dict[str, str], *words: Any, pipe: Connection) -> int:
        log.write_text("started")
        places[words[1]] = environment.get("CUDA_VISIBLE_DEVICES"), *words[3:]
        assert environment["TRITON_CACHE_DIR"].endswith(f"{words[1]}-triton") and 0 < seconds <= 300
        assert pipe.recv() == str(tmp_path / "model-4-128")
        pipe.send(NOBODY)
        while (question := pipe.recv()) is not None:
            order.append((words[1], *question))
            times = {"ttft_ms": [10.0 * question[2]] * 99 + [500.0], "tpot_ms": [2.0] * 100}
            watched = {"prefill_share": 0.25, "busy_share": 0.5, "kernels_ms": question[2], "garbage_ms": 0}
            watched |= {"events": {}, "by_size": [], "slowest": [], "waits": [{"cause": "kernels", "ms": 500}]}
            pipe.send(times | {"seconds": 12.0} | watched)
        return 0

    monkeypatch.setattr(on_gpu, "child", child)
    monkeypatch.setattr(on_gpu, "version", lambda package: "0.33.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    words = ["trace", "--out", str(tmp_path / "out"), "--work", str(tmp_path), "--commit", "a commit", "--rounds", "2"]
    done = CliRunner().invoke(on_gpu.app, [*words, "--rates", "8,4", *["--apart"] * apart])
    assert done.exit_code == 0, done.output
    names, rounds = ("xmla-graphs", "own-graphs"), [(96, 8.0)] * 3 + [(48, 4.0)] * 2
    expected = [
        (name, *asked, number, 1 if number else 2) for number, asked in enumerate(rounds)
        for name in names[:: -1 if number % 2 else 1]
    ]  # fmt: skip
    assert sorted(order) == sorted(expected) if apart else order == expected
    own = ("2", "--cores", "0,1"), ("3", "--cores", "2,3")
    assert places == (dict(zip(names, own, strict=True)) if apart else dict.fromkeys(names, (None,)))
    _, *lines = [json.loads(line) for line in (tmp_path / "out" / "vllm.jsonl").read_text().splitlines()]
    assert [(line["engine"], line["trace"]["rate"]) for line in lines] == [
        (name, rate) for name in names for rate in (8.0, 4.0)
    ]  # fmt: skip
    assert lines[0]["ttft_ms"] == {"median": 20.0, "p99": 24.8}
    assert lines[0]["ttft_ms_by_round"] == [10.0, 20.0]
    assert lines[0]["trace"] == {"requests": 96, "rate": 8.0, "rounds": 2} | ({"apart": True} if apart else {})
    assert (lines[0]["prefill_share"], lines[0]["kernels_ms_by_round"]) == (0.25, [1, 2])
    assert lines[0]["waits"] == {"kernels": 2}
    written = (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in written] == [number for number in range(5) for _ in names]


def test_a_trace_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model-4-128").mkdir()
    config = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}
    (tmp_path / "model-4-128" / "config.json").write_text(json.dumps(config))

    def child(log: Path, seconds: float, *words: Any, pipe: Connection, **more: Any) -> int:
        log.write_text("started")
        pipe.recv()
        pipe.send(NOBODY)
        assert pipe.recv() is None
        return 0

    monkeypatch.setattr(on_gpu, "child", child)
    monkeypatch.setattr(on_gpu, "version", lambda package: "0.33.0")
    words = [
        "trace",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path),
        "--seconds",
        "30",
        "--commit",
        "a commit",
    ]
    assert CliRunner().invoke(on_gpu.app, words).exit_code == 0
    _, *lines = [json.loads(line) for line in (tmp_path / "out" / "vllm.jsonl").read_text().splitlines()]
    assert [line["refused"] for line in lines] == ["no time left"] * 2


def test_profile_writes_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (_, *lines) = run("profile", monkeypatch, tmp_path, answer=lambda name, question: figures(question))
    assert status == 0
    assert [(line["engine"], line["context"], line["us"]) for line in lines] == [
        ("xmla-graphs", 4096, 9.5), ("own-graphs", 4096, 9.5)
    ]  # fmt: skip


def test_kernels_are_those_that_took_time() -> None:
    events = [SimpleNamespace(key=key, count=2, self_device_time_total=us) for key, us in (("a", 1.0), ("b", 3.04))]
    events.append(SimpleNamespace(key="on the host", count=1, self_device_time_total=0.0))
    assert gpu_engine.kernels(events, most=2) == [
        {"kernel": "b", "launches": 2, "us": 3.0}, {"kernel": "a", "launches": 2, "us": 1.0}
    ]  # fmt: skip
