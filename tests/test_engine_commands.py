"""Commands over engines in benchmarks/engines, of vLLM and of SGLang, whose processes are stand-ins."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import LOCK_SH
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.engines import answers, cases, commands, processes
from benchmarks.engines.__main__ import app
from benchmarks.engines.adapter import Adapter
from benchmarks.engines.commands import Run
from benchmarks.engines.sglang import adapter as of_sglang
from benchmarks.engines.sglang.adapter import Sglang
from benchmarks.engines.sglang.engines import LOCK
from benchmarks.engines.vllm import adapter as of_vllm
from benchmarks.engines.vllm.adapter import Vllm

NOBODY = 1 << 30  # a process that there is not
LENGTHS = 6000, 3000, 2500, 700, 40
CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}
ROUND = {
    "step_us": 5.0, "forward_us": 1.5, "prefill_tokens_per_s": 2**20, "prefill_forward_ms": 1.5, "same_tokens": 1.0,
}  # fmt: skip
KERNEL = {"kernel": "a kernel", "launches": 4, "us": 9.5}
Question = tuple[Any, ...]
Answer = Callable[[str, Question], Any]


@pytest.fixture(params=[Vllm, Sglang], ids=["vllm", "sglang"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return request.param()


def answer_of(logprob: float = -1.0, likely: int = 7, equal: int = 32) -> dict[str, Any]:
    """Answers to all prompts, with so many new tokens as others have them."""
    new = [5] * equal + [6] * (32 - equal)
    told = {"tokens": new, "logprobs": [-1.0, logprob], "likely": [3, likely], "again": new, "accepted": 1.5}
    return {str(length): told | {"cached": length - 1} for length in LENGTHS}


def answered(name: str, **others: Any) -> dict[str, Any]:
    """What an engine on V3.2 answers, and its log tells, if it is as it should be."""
    ours = "xmla" in name
    calls = {*of_vllm.CALLED, *of_vllm.WRITERS, *of_sglang.OPS} if ours else ()
    told = {"attention": ["XmlaSparseImpl" if ours else "FlashMLASparseImpl"], "calls": dict.fromkeys(calls, 1)}
    told |= {
        "seconds": {},
        "steps": 40,
        "cache_tokens": 9000,
        "kernels": 90,
        "compiled_late": [] if ours else None,
        "runs": ours,
    }
    return told | {"not_loaded": [], "answers": answer_of()} | others


def figures(question: Question, **others: Any) -> Any:
    """What an engine answers, of a case's round with the tokens that its prompts cache."""
    what, context, requests, *number = question
    if what == "kernels":
        return [{"phase": "decode"} | KERNEL]
    told = ROUND | {"cached_tokens": context * requests} | others
    return told if number[1] else {key: value for key, value in told.items() if "prefill" not in key}


class Shell:
    """Commands whose engines are stand-ins, of which `xmla-bf16` fails and `xmla-ranks` is not ready in time.

    `answer(name, question)` is what a measured one puts into its pipe; it ends if that is None. `started` has the
    words of every process, in order.
    """

    def __init__(self, adapter: Adapter, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapter, self.folder, self.started = adapter, folder, list[tuple[Any, ...]]()
        self.answer: Answer = lambda name, question: figures(question)
        self.environments: dict[str, dict[str, str]] = {}
        monkeypatch.setattr(Run, "child", lambda _, *arguments, **pipe: self.child(*arguments, **pipe))
        monkeypatch.setattr(commands, "version", lambda package: "0.26.0")

    def child(
        self, log: Path, seconds: float, environment: dict[str, str], kind: str, *words: Any,
        pipe: Connection | None = None,
    ) -> int:  # fmt: skip
        self.started.append((kind, *words))
        ours = words and "xmla" in str(words[0])
        log.write_text(f"started\n{f'{of_sglang.RUNS}, {of_sglang.READY}' if ours else ''}\nended")
        if kind == "model":
            words[0].mkdir(parents=True)
            (words[0] / "config.json").write_text(json.dumps(CONFIG))
            return 0
        name, *rest = words
        self.environments[name] = environment
        if name == "xmla-bf16":
            return 1
        if kind == "answer":
            rest[-1].write_text(json.dumps(answered(name)))
            return 0
        assert pipe and Path(pipe.recv()).parent == self.folder
        if name == "xmla-ranks":
            with suppress(OSError):
                time.sleep(1.5)  # is not ready in time
                pipe.send(NOBODY)
            return 1
        pipe.send(NOBODY)
        while (question := pipe.recv()) is not None:
            if (told := self.answer(name, question)) is None:
                return 1
            pipe.send(told)
        return 0

    def run(self, command: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
        """The exit status and the lines of a command."""
        out = self.folder / "out"
        words = [self.adapter.name, command, "--out", str(out), "--work", str(self.folder), "--commit", "a commit"]
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        self.printed = done.output
        lines = (out / f"{self.adapter.name}.jsonl").read_text().splitlines()
        return done.exit_code, [json.loads(line) for line in lines]

    @property
    def logs(self) -> str:
        return (self.folder / "out" / "logs.txt").read_text()


@pytest.fixture
def shell(adapter: Adapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return Shell(adapter, tmp_path, monkeypatch)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return Shell(Vllm(), tmp_path, monkeypatch)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return Shell(Sglang(), tmp_path, monkeypatch)


def test_difference_of_answers() -> None:
    one, other = ({"6000": answer_of(*given)["6000"]} for given in ((-1.5, 4, 32), (-1.0, 7, 20)))
    found = answers.difference(one, other)
    assert found == {"prompt": [6000], "mean_abs_logprob": [0.25], "same_likely": [0.5], "equal_tokens": [20]}


def test_every_engine_that_is_compared_exists(adapter: Adapter) -> None:
    assert {name for pair in adapter.pairs for name in pair} | {*adapter.checked.split(",")} <= adapter.engines.keys()
    assert {*commands.MEASURED.split(",")} <= adapter.engines.keys()


def test_engines_of_several_models_are_refused(adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="serve several models"):
        Run.of(adapter, tmp_path, "xmla,v4-xmla", tmp_path)


def test_what_an_engines_process_is_given(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """Its program, the tree and the entry points of xmla, and variables of the engine before those of this process."""
    started: list[Any] = []
    monkeypatch.setattr(processes, "run_engine", lambda *arguments: started.append(arguments) or 3)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    ran = Run.of(adapter, tmp_path, "xmla", tmp_path)
    assert ran.child(tmp_path / "xmla.log", 9, {"HF_HUB_OFFLINE": "another"}, "answer", "xmla") == 3
    ((words, log, environment, seconds, pipe),) = started
    assert words == ["-m", f"benchmarks.engines.{adapter.name}.child", "answer", "xmla"]
    assert (log, seconds, pipe) == (tmp_path / "xmla.log", 9, None) and environment["HF_HUB_OFFLINE"] == "another"
    assert environment["PYTHONUNBUFFERED"] == "1" and environment["PATH"] == os.environ["PATH"]
    root, installed, elsewhere = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "benchmarks" / "engines").is_dir() and elsewhere == "elsewhere"
    (points,) = Path(installed).glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nxmla = xmla.vllm:register\n" in points.read_text()
    assert "[sglang.srt.plugins]\nxmla = xmla.sglang:register\n" in points.read_text()
    assert ("called = " in points.read_text()) == (adapter.name == "sglang")


def test_check_writes_what_every_engine_answered(shell: Shell) -> None:
    status, (first, *lines, last) = shell.run("check")
    assert status == 1  # one engine failed
    assert first["commit"] == "a commit" and first[shell.adapter.name] == "0.26.0"
    assert first["command"] == f"python -m benchmarks.engines {shell.adapter.name} check"
    assert {line["engine"]: line["exit_code"] for line in lines if "exit_code" in line}["xmla-bf16"] == 1
    engines = {*shell.adapter.checked.split(",")} - {"xmla-bf16"}
    both = [pair for pair in shell.adapter.pairs if {*pair} <= engines]
    assert [(line["engine"], line["beside"]) for line in lines if "equal_tokens" in line] == both
    assert all(line["equal_tokens"] == [32] * 5 for line in lines if "equal_tokens" in line)
    again = {line["engine"] for line in lines if line.get("beside") == "itself"}
    assert again == (engines if shell.adapter.name == "sglang" else set())
    assert all(last["holds"].values()) and len(last["holds"]) == {"vllm": 8, "sglang": 36}[shell.adapter.name]
    assert "=== xmla-bf16: exit status 1" in shell.logs


def test_engines_take_turns(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is written with what its rounds have, each engine begins as many, and all have the same cores."""
    asked: list[Any] = []
    placed: list[str] = []

    def answer(name: str, question: Question) -> Any:
        asked.append((name, *question))
        return figures(question, step_us=5.0 + question[3] if question[0] == "round" else 0.0)

    shell.answer = answer
    monkeypatch.setattr(processes, "place", lambda engines, name: placed.append(name))
    status, (first, *lines) = shell.run("speed", "--contexts", "64,262144", "--requests", "1")
    engines = "xmla-graphs", "own-graphs"
    assert status == 0 and first["model"] == CONFIG
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
        "step_us": shell.adapter.step(by_round), "step_us_by_round": by_round, "forward_us_by_round": [1.5] * 12,
        "prefill_tokens_per_s_by_round": [2**20] * 12, "prefill_forward_ms_by_round": [1.5] * 12,
    }  # fmt: skip
    assert lines[2]["prefill_forward_ms_by_round"] == [1.5] * 2 and len(lines[2]["forward_us_by_round"]) == 12
    assert lines[4] == {"engine": engines[0], "context": 64, "requests": 1, "phase": "decode"} | KERNEL
    tuned = shell.environments["own-graphs"].get("TRITON_CACHE_AUTOTUNING")
    assert tuned == ("1" if shell.adapter.name == "vllm" else None)


def test_cases_end_in_time(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by what engines take: 1 s a round of steps, and 32768 tokens/s of prefill."""
    now, begun = [0.0], time.monotonic()

    def answer(name: str, question: Question) -> Any:
        _, context, requests, _, new = question if question[0] == "round" else (*question, 0, True)
        now[0] += 1 + new * context * requests / 32768
        return figures(question, prefill_tokens_per_s=32768)

    shell.answer = answer
    monkeypatch.setattr(time, "monotonic", lambda: begun + now[0])
    status, (_, *lines) = shell.run("speed", "--contexts", "16384,65536", "--requests", "1,8", "--seconds", "64")
    assert status == 0
    told = [(line["context"], line["requests"], len(line.get("forward_us_by_round", ()))) for line in lines[:8]]
    # A round takes 3 s, 6 s, 10 s, 34 s: twelve rounds, four (12 and 12 s of 28), and no time for two of any other.
    assert told == [(context, count, rounds) for context, count, rounds in (
        (16384, 1, 12), (65536, 1, 4), (16384, 8, 0), (65536, 8, 0)
    ) for _ in range(2)]  # fmt: skip
    assert [line.get("skipped") for line in lines[:8]] == [None] * 4 + ["no time left"] * 4
    assert now[0] == 60 + 3 + 6 and len(lines) == 12  # with kernels, which begin in time


def test_engines_that_end_leave_the_others(shell: Shell) -> None:
    """Of four engines one never starts, one is not ready in time, one ends in a case, and one goes on."""

    def answer(name: str, question: Question) -> Any:
        what, context, _, *number = question
        if (name, context, number[:1]) == ("own-bf16", 64, [2]):
            return None
        full = name == "own" and context == 128 and what == "round"
        return {"refused": "the cache does not hold 1 requests at once"} if full else figures(question)

    shell.answer = answer
    words = "--engines", "xmla-bf16,own-bf16,own,xmla-ranks", "--contexts", "64,128", "--requests", "1", "--start", "1"
    status, (_, *lines) = shell.run("speed", *words)
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
    assert all(f"=== {name}: exit status 1" in shell.logs for name in ("xmla-bf16", "own-bf16", "xmla-ranks"))


@pytest.mark.parametrize("engines", ["own,xmla-bf16", "own,xmla"], ids=["at start", "behind all cases"])
def test_an_engine_that_ends_fails_the_run(engines: str, vllm: Shell) -> None:
    """Also if every case that ran is complete."""
    vllm.answer = lambda name, question: None if (name, question[0]) == ("xmla", "kernels") else figures(question)
    status, (_, *lines) = vllm.run("speed", "--engines", engines, "--contexts", "64", "--requests", "1")
    assert status == 1 and ("own", 9.5) in [(line["engine"], line.get("us")) for line in lines]


def test_profile_writes_every_kernel(shell: Shell) -> None:
    status, (_, *lines) = shell.run("profile")
    assert status == 0
    requests = {"vllm": 1, "sglang": 8}[shell.adapter.name]
    assert [(line["engine"], line["context"], line["requests"], line["us"]) for line in lines] == [
        (name, 4096, requests, 9.5) for name in ("xmla-graphs", "own-graphs")
    ]


def test_a_case_is_what_its_rounds_have() -> None:
    rounds = [
        ROUND | {"step_us": step, "forward_us": step / 2, "prefill_tokens_per_s": 7 + step, "cached_tokens": 64}
        for step in (10.0, 30.0, 20.0)
    ]
    case = cases.case_of(rounds, median)
    assert (case["step_us"], case["forward_us"], case["prefill_tokens_per_s"]) == (20.0, 10.0, 37.0)
    assert case["step_us_by_round"] == [10.0, 30.0, 20.0] and case["cached_tokens"] == 64 and "refused" not in case
    assert cases.case_of(rounds, min)["step_us"] == 10.0
    cached = {key: value for key, value in rounds[0].items() if not key.startswith("prefill")} | {"cached_tokens": 32}
    case = cases.case_of([*rounds, cached | {"step_us": -1.0}], median)
    assert case["refused"] and "step_us" not in case and case["step_us_by_round"][-1] == -1.0
    assert case["prefill_forward_ms_by_round"] == [1.5] * 3 and case["cached_tokens"] == 32
    case = cases.case_of([*rounds, cached | {"same_tokens": 0.49}], median)
    assert case["refused"] == "answers behind cached prompts are not those of the first round"
    assert case["same_tokens"] == 0.49 and "step_us" not in case


def test_answers_of_a_round_are_those_of_the_first_of_its_prompts() -> None:
    known = cases.Answered()
    assert cases.same_tokens(known, (64, 2, 1), [[1, 2, 3, 4], [5, 6, 7, 8]]) == 1.0
    assert cases.same_tokens(known, (64, 2, 1), [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75
    assert cases.same_tokens(known, (64, 2, 1), [[9, 2, 3, 4], [9, 6, 7, 8]]) == 0.0
    assert cases.same_tokens(known, (64, 2, 2), [[9, 2, 3, 4], [9, 6, 7, 8]]) == 1.0


def test_engines_end_without_a_model(tmp_path: Path) -> None:
    ended: list[str] = []

    def run(name: str, log: Path, pipe: Connection) -> int:
        log.write_text("started")
        ended.append(f"{name}: {pipe.recv()}")
        return 1

    def model() -> Path:
        raise typer.Exit(3)

    with pytest.raises(typer.Exit), processes.ready(tmp_path, tmp_path, ["own", "xmla"], run, model, 9):
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
        while len({*processes.threads_of(ours.pid)}) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        engines = {name: processes.Ready(None, each.pid) for name, each in (("ours", ours), ("other", other))}
        processes.place(engines, "ours")
        (started,) = {*placed} - {ours.pid, other.pid}
        assert started and placed == {ours.pid: [0, 1], started: [0, 1], other.pid: [2, 3, 4]}
        processes.place(engines, "other")
        assert placed == {ours.pid: [2, 3, 4], started: [2, 3, 4], other.pid: [0, 1]}
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
        processes.place(engines, "other")
        assert {*map(tuple, placed.values())} == {(0,)}
        for each in (ours, other):
            each.stdin.close()


def test_an_engine_ends_when_its_pipe_is_closed_or_its_time_is_over(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys, time; print(*sys.argv[1:], flush=True); time.sleep(float(sys.argv[1]))")
    assert processes.run_engine([script, 0, "words"], log, os.environ, 60, None) == 0
    assert log.read_text() == "0 words\n"
    assert processes.run_engine([script, 60], log, os.environ, 1, None) == 124
    _, end = Pipe()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(processes.run_engine, [script, 60], log, os.environ, 60, end)
        time.sleep(0.5)
        end.close()
        assert running.result(20) != 0


def test_engines_of_sglang_are_measured_alone(sglang: Shell, tmp_path: Path) -> None:
    """They wait until none that answers has the model."""
    model = tmp_path / "model-v32"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    order: list[str] = []
    sglang.answer = lambda name, question: order.append(name) or figures(question)
    beside = Thread(target=lambda: order.append(str(sglang.run("profile", "--engines", "own")[0])))
    with processes.locked(model / LOCK, LOCK_SH):  # as one that answers has it
        beside.start()
        beside.join(0.5)
        assert beside.is_alive() and [kind for kind, *_ in sglang.started] == ["measure"] and not order
    beside.join()
    assert order == ["own", "0"]


@pytest.mark.parametrize("built", [0, 1])
def test_kernels_of_v4_are_built_before_sglangs_engines_start(built: int, sglang: Shell) -> None:
    """Engines start also if that fails."""
    child = sglang.child

    def build(log: Path, *arguments: Any, **pipe: Any) -> int:
        if "kernels-v4" not in arguments:
            return child(log, *arguments, **pipe)
        log.write_text("nvcc's words")
        sglang.started.append(("kernels-v4",))
        return built

    sglang.child = build
    _, lines = sglang.run("check", "--at-once", "1", "--engines", "v4-own,v4-own-torch,v4-xmla")
    order = [words[0] if words[0] != "answer" else words[1] for words in sglang.started]
    assert order == ["model", "kernels-v4", "v4-own", "v4-own-torch", "v4-xmla"]
    assert sglang.started[0][1:4] == (sglang.folder / "model-v4", "--kind", "v4")
    assert f"SGLang's kernels: exit status {built} after 0 s" in sglang.printed
    assert ("nvcc's words" in sglang.printed) == bool(built)
    pairs = [(line["engine"], line["beside"]) for line in lines if "mean_abs_logprob" in line]
    assert pairs == [("v4-own-torch", "v4-own"), ("v4-xmla", "v4-own"), ("v4-xmla", "v4-own-torch")]


def verdicts(adapter: Adapter, pairs: dict[tuple[str, str], Any], release: str = "0.26.0", **ran: Any) -> list[bool]:
    """What holds of these pairs and of engines, by their names with underscores."""
    return [*adapter.verdicts(pairs, {name.replace("_", "-"): ran[name] for name in ran}, release).values()]


def beside(apart: float = 0.1, likely: float = 0.99, equal: list[int] | None = None) -> dict[str, list[Any]]:
    equal = equal or [32]
    found = {"prompt": [6000], "mean_abs_logprob": [apart], "same_likely": [likely]}
    return {key: values * len(equal) for key, values in found.items()} | {"equal_tokens": equal}


def test_verdicts(adapter: Adapter) -> None:
    """xmla is as near to bfloat16 as the engine's own kernels, graphs have the tokens of eager steps, and engines that
    differ in the order of sums alone the most likely tokens."""
    near = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own"), ("xmla-graphs", "xmla")
    found = {pair: beside() for pair in near}
    assert verdicts(adapter, found) == [True, True]
    assert verdicts(adapter, found | {near[0]: beside(0.3)}) == [True, False]
    assert verdicts(adapter, found | {near[3]: beside(equal=[31])}) == [False, True]
    assert (
        verdicts(adapter, {}, xmla=answered("xmla"), own=answered("own"))
        == [True] * ({"vllm": 2, "sglang": 7}[adapter.name])
    )
    for name in adapter.near:
        pair = next((one, other) for one, other in adapter.pairs if one.startswith(name))
        if not adapter.engines[pair[0]].drafts:
            assert [verdicts(adapter, {pair: beside(likely=share)}) for share in (0.9, 0.89)] == [[True], [False]]


def test_verdicts_of_vllm() -> None:
    def holds(release: str = "0.26.0", **ran: Any) -> list[bool]:
        return verdicts(Vllm(), {}, release, **ran)

    right, called = answered("xmla"), dict.fromkeys(of_vllm.CALLED, 1)
    assert holds(xmla=right | {"compiled_late": ["a kernel"]}) == [True, False]
    own, silent, fused = answered("own") | {"compiled_late": []}, right | {"calls": {}}, right | {"calls": called}
    assert holds(xmla=own) == holds(xmla=silent) == holds(xmla=fused) == [False, True]
    assert holds("0.33.0", xmla=fused) == holds(xmla_ranks=silent) == [True, True]
    assert holds(v4_xmla=fused | {"attention": ["XmlaV4Attention"]}) == [True, True]
    v41 = fused | {"attention": ["XmlaV41Attention"]}
    assert holds(v41_xmla=v41) == [False, True]
    assert holds(v41_xmla=v41 | {"calls": called | dict.fromkeys(of_vllm.IN_BLOCKS, 1)}) == [True, True]
    alone = {("xmla-invariant-alone", "xmla-invariant"): beside()}
    for logprob, equal in ((-1.0, True), (-1.0 - 2**-20, False)):
        ran = {"xmla_invariant": fused, "xmla_invariant_alone": fused | {"answers": answer_of(logprob)}}
        assert verdicts(Vllm(), alone, "0.33.0", **ran) == [*[True] * 4, equal]


@pytest.mark.parametrize("name", ["xmla-drafts", "v4-xmla-dspark", "v41-xmla-dspark"])
def test_verdicts_of_vllm_with_drafts(name: str) -> None:
    """The most likely tokens are those without drafts, in fewer steps."""
    other = next(other for one, other in Vllm.pairs if one == name)
    for steps, likely, right in ((39, 0.9, [True, True]), (39, 0.89, [True, False]), (44, 0.9, [False, True])):
        ran = {name: answered(name, steps=steps), other: answered(other)}
        found = Vllm().verdicts({(name, other): beside(likely=likely)}, ran, "0.33.0")
        assert [value for what, value in found.items() if what.startswith(f"{name} ")] == right


def test_verdicts_of_sglang() -> None:
    def holds(**ran: Any) -> list[bool]:
        return verdicts(Sglang(), {}, **ran)

    ours, own = answered("xmla"), answered("own")
    assert holds(xmla=own, own=ours) == [True, False, False, True, True, False, True]
    assert holds(xmla=ours | {"calls": ["sparse_mla"]}) == [True, False, True, True]
    assert holds(xmla=ours | {"compiled_late": ["a kernel"]}) == [True, True, False, True]
    for name, right in (("xmla", ours), ("own", own), ("v4_xmla_drafts", ours)):
        assert holds(**{name: right | {"not_loaded": ["a weight"]}})[0] is False
    missed = {length: told | {"cached": 0} for length, told in answer_of().items()}
    assert holds(xmla=ours | {"answers": missed}) == [True, True, True, False]
    assert holds(v4_xmla=ours | {"answers": missed}) == [True, True, True]


@pytest.mark.parametrize("name", ["xmla-drafts", "xmla-drafts-3", "v4-xmla-drafts", "v4-xmla-drafts-graphs"])
def test_verdicts_of_drafts(name: str) -> None:
    """Of one prompt near ties may give other tokens; what is drafted has to be accepted now and then."""
    pair = (name, "v4-xmla" if name.startswith("v4") else "xmla")
    for tokens, right in (([32] * 5, True), ([32, 32, 32, 32, 13], True), ([32, 32, 32, 13, 13], False)):
        assert verdicts(Sglang(), {pair: beside(equal=tokens)}) == [right, True]
    assert verdicts(Sglang(), {pair: beside(likely=0.89, equal=[32] * 5)}) == [True, False]
    for accepted, right in (([1.0, 1.9, 2.0], True), ([1.0, 1.0, 2.0], False), ([None] * 3, False)):
        told = zip(answer_of().items(), accepted, strict=False)
        given = {length: answer | {"accepted": drafts} for (length, answer), drafts in told}
        *_, taken = Sglang().verdicts({}, {name: answered("xmla", answers=given)}, "").values()
        assert taken is right


def test_what_is_asked_again() -> None:
    one = {"tokens": [5, 5, 6], "again": [5, 5, 7], "cached": 64, "accepted": 1.5}
    assert Sglang().again({"100": one}) == {
        "prompt": [100], "cached": [64], "equal_again": [2], "accepted": [1.5]
    }  # fmt: skip


def test_what_sglangs_log_tells() -> None:
    """Weights that no checkpoint has, where SGLang serves whatever memory had there; kernels behind warm-up."""
    missing = "Some weights are not initialized from checkpoints: {'model.decoder.mlp.gate.weight'}"
    unknown = "model.layers.0.a_weight not found in params_dict."
    assert of_sglang.not_loaded(f"started\n{missing}\n{unknown}\nended") == [missing, unknown]
    assert of_sglang.not_loaded("started\nended") == []
    kernel = "1.67 s for sm_90 select_topk: topk_select_kernel, its first kernel"
    ready = f"TP0] xmla: 58 {of_sglang.READY}, after 3.2 s"
    assert of_sglang.compiled_late(f"{kernel}\n{ready}\n{kernel}\nTP1] {ready}\nPrefill batch\n") == []
    assert of_sglang.compiled_late(f"{kernel}\n{ready}\nPrefill batch\n{kernel}\n") == [kernel]
    assert of_sglang.compiled_late(kernel) is None
    assert Sglang().logged(f"{of_sglang.RUNS}\n") == {"runs": True, "compiled_late": None, "not_loaded": []}


def test_parts_of_passes(vllm: Shell) -> None:
    """Engines take turns; in two rounds of each case prompts are new, of the second its prompts come again."""
    asked: list[Any] = []

    def answer(name: str, question: Question) -> Any:
        asked.append((name, *question))
        return {"passes": 16, "kernels": []}

    vllm.answer = answer
    status, (_, *lines) = vllm.run("parts", "--requests", "8,1")
    assert status == 0, vllm.printed
    names = "xmla-graphs", "own-graphs"
    rounds = [(0, True), (1, True), (1, False), (1, False)]
    assert asked == [
        (name, "parts", 4096, count, *rounds[each]) for each in range(4) for count in (1, 8)
        for name in names[:: -1 if each % 2 else 1]
    ]  # fmt: skip
    assert [(line["engine"], line["requests"], line["round"]) for line in lines] == [
        (name, count, each) for each in range(4) for count in (1, 8) for name in names
    ]  # fmt: skip
    vllm.answer = lambda name, question: None if name == "own-graphs" else {"kernels": []}
    assert vllm.run("parts", "--requests", "1")[0] == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_trace_of_engines(apart: bool, vllm: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def answer(name: str, question: Question) -> Any:
        order.append((name, *question))
        times = {"ttft_ms": [10.0 * question[3]] * 99 + [500.0], "tpot_ms": [2.0] * 100, "seconds": 12.0}
        watched = {"prefill_share": 0.25, "busy_share": 0.5, "kernels_ms": question[3], "garbage_ms": 0}
        waits = [{"cause": "kernels", "ms": 500}]
        return times | watched | {"events": {}, "by_size": [], "slowest": [], "waits": waits}

    vllm.answer = answer
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    status, (_, *lines) = vllm.run("trace", "--rounds", "2", "--rates", "8,4", *["--apart"] * apart)
    assert status == 0, vllm.printed
    names, rounds = ("xmla-graphs", "own-graphs"), [(96, 8.0)] * 3 + [(48, 4.0)] * 2
    expected = [
        (name, "play", *asked, number, 1 if number else 2) for number, asked in enumerate(rounds)
        for name in names[:: -1 if number % 2 else 1]
    ]  # fmt: skip
    assert sorted(order) == sorted(expected) if apart else order == expected
    started = {words[1]: words[3:] for words in vllm.started if words[0] == "serve"}
    own = ("--cores", "0,1"), ("--cores", "2,3")
    assert started == (dict(zip(names, own, strict=True)) if apart else dict.fromkeys(names, ()))
    for name, gpu in zip(names, "23", strict=True):
        assert vllm.environments[name].get("CUDA_VISIBLE_DEVICES") == (gpu if apart else None)
        assert vllm.environments[name]["TRITON_CACHE_DIR"].endswith(f"{name}-triton")
    assert [(line["engine"], line["trace"]["rate"]) for line in lines] == [
        (name, rate) for name in names for rate in (8.0, 4.0)
    ]  # fmt: skip
    assert lines[0]["ttft_ms"] == {"median": 20.0, "p99": 24.8}
    assert lines[0]["ttft_ms_by_round"] == [10.0, 20.0]
    assert lines[0]["trace"] == {"requests": 96, "rate": 8.0, "rounds": 2} | ({"apart": True} if apart else {})
    assert (lines[0]["prefill_share"], lines[0]["kernels_ms_by_round"]) == (0.25, [1, 2])
    assert lines[0]["waits"] == {"kernels": 2}
    written = (vllm.folder / "out" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in written] == [number for number in range(5) for _ in names]


def test_a_trace_ends_in_time(vllm: Shell) -> None:
    status, (_, *lines) = vllm.run("trace", "--seconds", "30")
    assert status == 0 and [line["refused"] for line in lines] == ["no time left"] * 2
