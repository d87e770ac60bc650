"""What `run_on_gpu.py` makes of answers, without SGLang."""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import run_on_gpu
from typer.testing import CliRunner

LIKE = {"prompt": [6000], "mean_abs_logprob": [0.1], "same_likely": [0.99], "equal_tokens": [32]}
AGAIN = {"prompt": [6000], "cached": [5952], "equal_again": [32], "accepted": [None]}
OURS, OWN = {"runs": True, "calls": [*engine.OPS]}, {"runs": False, "calls": []}


def answers(logprob: float, likely: int, tokens: int) -> dict[str, Any]:
    new = [5] * tokens + [6] * (engine.NEW_TOKENS - tokens)
    asked = {"tokens": new, "logprobs": [-1.0, logprob], "likely": [3, likely]}
    return {str(length): asked | {"again": new, "cached": length - 1, "accepted": None} for length in engine.LENGTHS}


def test_what_is_asked_again() -> None:
    one = {"tokens": [5, 5, 6], "again": [5, 5, 7], "cached": 64, "accepted": 1.5}
    assert run_on_gpu.repeated({"100": one}) == {
        "prompt": [100], "cached": [64], "equal_again": [2], "accepted": [1.5]
    }  # fmt: skip


def test_verdicts() -> None:
    def holds(pairs: dict[tuple[str, str], Any], again: dict[str, Any], ran: dict[str, Any]) -> list[bool]:
        return [*run_on_gpu.verdicts(pairs, again, ran).values()]

    assert holds({}, {}, {"xmla": OURS, "own": OWN}) == [True, True]
    assert holds({}, {}, {"xmla": OWN, "own": OURS}) == [False, False]
    assert holds({}, {}, {"xmla": OURS | {"calls": ["sparse_mla"]}}) == [False]
    assert holds({}, {"xmla": AGAIN}, {}) == [True]
    assert holds({}, {"xmla": AGAIN | {"cached": [0]}}, {}) == [False]
    pairs = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own"), ("xmla-graphs", "xmla")
    found = dict.fromkeys(pairs, LIKE)
    assert holds(found, {}, {}) == [True, True]
    assert holds(found | {pairs[0]: LIKE | {"mean_abs_logprob": [0.3]}}, {}, {}) == [True, False]
    assert holds(found | {pairs[3]: LIKE | {"equal_tokens": [31]}}, {}, {}) == [False, True]
    for name in ("drafts", "ranks", "chunks", "all-graphs", "gathered"):
        pair = (f"xmla-{name}", "xmla")
        assert holds({pair: LIKE}, {}, {}) == [True]
        assert holds({pair: LIKE | {"same_likely": [0.89]}}, {}, {}) == [False]


def test_options() -> None:
    drafts = engine.ENGINES["xmla-drafts-3"].arguments()
    assert (drafts["speculative_num_steps"], drafts["speculative_num_draft_tokens"]) == (3, 4)
    graphs = engine.ENGINES["xmla-graphs"].arguments()
    assert graphs["disable_prefill_cuda_graph"] and not graphs["disable_decode_cuda_graph"]
    assert engine.ENGINES["own"].environment()["SGLANG_PLUGINS"] != ""  # which would load every plugin


def test_an_engine_is_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    served = SimpleNamespace(shutdown=lambda: order.append("shut down"))
    stand_in = SimpleNamespace(Engine=lambda **arguments: served)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", stand_in)

    def measure() -> None:
        with engine.started("own", tmp_path, alone=True):
            order.append("measured")

    beside = Thread(target=measure)
    with engine.started("own", tmp_path):
        beside.start()
        beside.join(0.5)
        assert beside.is_alive() and not order
    beside.join()
    assert order == ["shut down", "measured", "shut down"]


@pytest.mark.parametrize("late", [0, engine.ROUNDS])
def test_what_is_compiled_is_in_no_step(late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in takes 1 ms a step, and 2 s for the first requests with and without cached prompts. `late`: so do the
    short requests of a later round.
    """
    clock, asked, prefixes = [0.0], Counter[Any](), list[list[int]]()

    def generate(input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, cached = sampling_params["max_new_tokens"], input_ids == prefixes
        asked.update([cached, (cached, tokens)])
        compiles = asked[cached] == 1 or (tokens == engine.FEW and asked[cached, tokens] == late)
        clock[0] += 1e-3 * tokens + 2 * compiles
        prefixes[:] = input_ids
        return [{"meta_info": {"cached_tokens": 64}} for _ in input_ids]

    served = SimpleNamespace(generate=generate, flush_cache=prefixes.clear, shutdown=lambda: None)
    stand_in = SimpleNamespace(Engine=lambda **arguments: served)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", stand_in)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    out = tmp_path / "out.jsonl"
    words = ["measure", "own", str(tmp_path), str(out), "--contexts", "100", "--requests", "2"]
    status = CliRunner().invoke(engine.app, words).exit_code
    (case,) = map(json.loads, out.read_text().splitlines())
    assert case["prefill_tokens_per_s_by_round"] == [200_000] * engine.PREFILLS
    if late:
        assert status == 1 and "step_us" not in case and case["refused"] and min(case["step_us_by_round"]) < 0
    else:
        assert status == 0 and case["step_us"] == 1000 and case["step_us_by_round"] == [1000] * engine.ROUNDS


def test_kernels_are_those_that_took_time() -> None:
    events = [{"cat": "kernel", "name": name, "dur": us} for name, us in (("a", 1.0), ("b", 2.0), ("a", 3.5))]
    events.append({"cat": "cpu_op", "name": "on the host", "dur": 9.0})
    assert engine.kernels(events, most=1) == [
        {"kernel": "all", "launches": 3, "us": 6.5}, {"kernel": "a", "launches": 2, "us": 4.5}
    ]  # fmt: skip


def run(command: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the lines of a command whose engines are stand-ins: what they write, or a failure."""
    (folder / "model-4-128").mkdir()
    config = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}
    (folder / "model-4-128" / "config.json").write_text(json.dumps(config))

    def child(log: Path, seconds: float, environment: dict[str, str], *words: Any) -> int:
        kind, name, _, out = words[:4]
        ours = "xmla" in environment["SGLANG_PLUGINS"]
        log.write_text(f"started\n{run_on_gpu.RUNS if ours else ''}\nended")
        if name == "xmla-bf16":
            return 1
        calls = engine.OPS if ours else ()
        answered = {"answers": answers(-1.0, 7, 32), "calls": calls, "seconds": {}}
        times = {"step_us": 1.5, "prefill_tokens_per_s": 7, "cached_tokens": 4032}
        cases = [
            {"context": 4096, "requests": 1} | times,
            {"context": 32768, "requests": 64, "skipped": "no time left"},
            {"context": 4096, "requests": 8, "refused": "more steps took no longer", "prefill_tokens_per_s": 7},
        ]
        kernel = {"phase": "decode", "kernel": "a kernel", "launches": 4, "us": 9.5}
        lines = [{"engine": name} | case for case in cases]
        lines = {"answer": [answered], "measure": lines, "profile": [{"engine": name} | kernel]}[kind]
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return 0

    monkeypatch.setattr(run_on_gpu, "child", child)
    monkeypatch.setattr(run_on_gpu, "version", lambda package: "0.5.23")
    words = [command, "--out", str(folder / "out"), "--work", str(folder), "--commit", "a commit"]
    done = CliRunner().invoke(run_on_gpu.app, words)
    lines = (folder / "out" / "sglang.jsonl").read_text().splitlines()
    return done.exit_code, [json.loads(line) for line in lines]


def test_check_writes_what_every_engine_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (first, *lines, last) = run("check", monkeypatch, tmp_path)
    assert status == 1  # one engine failed
    assert first["commit"] == "a commit" and first["sglang"] == "0.5.23"
    assert {line["engine"]: line["exit_code"] for line in lines if "exit_code" in line}["xmla-bf16"] == 1
    engines = set(run_on_gpu.CHECKED.split(",")) - {"xmla-bf16"}
    assert {line["engine"] for line in lines if line.get("beside") == "itself"} == engines
    assert [line["equal_tokens"] for line in lines if "equal_tokens" in line] == [[32] * 5] * 8
    assert all(last["holds"].values()) and len(last["holds"]) == 2 * len(engines) + 5
    assert "=== xmla-bf16: exit status 1" in (tmp_path / "out" / "logs.txt").read_text()


def test_speed_writes_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (_, *lines) = run("speed", monkeypatch, tmp_path)
    assert status == 0
    assert [(line["engine"], line["requests"], "skipped" in line) for line in lines] == [
        (name, requests, requests == 64) for name in ("xmla-graphs", "own-graphs") for requests in (1, 64, 8)
    ]


def test_profile_writes_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (_, *lines) = run("profile", monkeypatch, tmp_path)
    assert status == 0
    assert [(line["engine"], line["us"]) for line in lines] == [("xmla-graphs", 9.5), ("own-graphs", 9.5)]
