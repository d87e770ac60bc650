"""What `run_on_gpu.py` makes of answers, without SGLang."""

import fcntl
import json
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Thread
from types import SimpleNamespace
from typing import Any

import engine
import harness
import pytest
import run_on_gpu
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

NOBODY = 1 << 30  # a process that there is not
LIKE = {"prompt": [6000], "mean_abs_logprob": [0.1], "same_likely": [0.99], "equal_tokens": [32]}
AGAIN = {"prompt": [6000], "cached": [5952], "equal_again": [32], "accepted": [None]}
OURS = {"runs": True, "calls": [*engine.OPS], "compiled_late": [], "not_loaded": []}
OWN = {"runs": False, "calls": [], "compiled_late": None, "not_loaded": []}


def answers(logprob: float, likely: int, tokens: int) -> dict[str, Any]:
    new = [5] * tokens + [6] * (engine.NEW_TOKENS - tokens)
    asked = {"tokens": new, "logprobs": [-1.0, logprob], "likely": [3, likely]}
    return {str(length): asked | {"again": new, "cached": length - 1, "accepted": 1.5} for length in engine.LENGTHS}


def test_what_is_asked_again() -> None:
    one = {"tokens": [5, 5, 6], "again": [5, 5, 7], "cached": 64, "accepted": 1.5}
    assert run_on_gpu.repeated({"100": one}) == {
        "prompt": [100], "cached": [64], "equal_again": [2], "accepted": [1.5]
    }  # fmt: skip


def test_verdicts() -> None:
    def holds(pairs: dict[tuple[str, str], Any], again: dict[str, Any], ran: dict[str, Any]) -> list[bool]:
        return [*run_on_gpu.verdicts(pairs, again, ran).values()]

    assert holds({}, {}, {"xmla": OURS, "own": OWN}) == [True] * 5
    assert holds({}, {}, {"xmla": OWN, "own": OURS}) == [True, False, False, True, False]
    assert holds({}, {}, {"xmla": OURS | {"calls": ["sparse_mla"]}}) == [True, False, True]
    assert holds({}, {}, {"xmla": OURS | {"compiled_late": ["a kernel"]}}) == [True, True, False]
    for name, answered in (("xmla", OURS), ("own", OWN), ("v4-xmla-drafts", OURS)):
        assert holds({}, {}, {name: answered | {"not_loaded": ["a weight"]}})[0] is False
    assert holds({}, {"xmla": AGAIN}, {}) == [True]
    assert holds({}, {"xmla": AGAIN | {"cached": [0]}}, {}) == [False]
    pairs = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own"), ("xmla-graphs", "xmla")
    found = dict.fromkeys(pairs, LIKE)
    assert holds(found, {}, {}) == [True, True]
    assert holds(found | {pairs[0]: LIKE | {"mean_abs_logprob": [0.3]}}, {}, {}) == [True, False]
    assert holds(found | {pairs[3]: LIKE | {"equal_tokens": [31]}}, {}, {}) == [False, True]
    for name in ("ranks", "chunks", "all-graphs", "gathered"):
        pair = (f"xmla-{name}", "xmla")
        assert holds({pair: LIKE}, {}, {}) == [True]
        assert holds({pair: LIKE | {"same_likely": [0.89]}}, {}, {}) == [False]


@pytest.mark.parametrize("name", ["xmla-drafts", "xmla-drafts-3", "v4-xmla-drafts", "v4-xmla-drafts-graphs"])
def test_verdicts_of_drafts(name: str) -> None:
    """Of one prompt near ties may give other tokens; what is drafted has to be accepted now and then."""
    pair = (name, "v4-xmla" if name.startswith("v4") else "xmla")
    several = {key: values * 5 for key, values in LIKE.items()}
    assert [*run_on_gpu.verdicts({pair: several}, {}, {}).values()] == [True, True]
    for tokens, right in (([32, 32, 32, 32, 13], True), ([32, 32, 32, 13, 13], False)):
        found = {pair: several | {"equal_tokens": tokens}}
        assert [*run_on_gpu.verdicts(found, {}, {}).values()] == [right, True]
    assert [*run_on_gpu.verdicts({pair: several | {"same_likely": [0.89]}}, {}, {}).values()] == [True, False]
    for accepted, right in (([1.0, 1.9, 2.0], True), ([1.0, 1.0, 2.0], False), ([None] * 3, False)):
        again = {"prompt": [700] * 3, "cached": [640] * 3, "equal_again": [32] * 3, "accepted": accepted}
        *_, taken = run_on_gpu.verdicts({}, {name: again}, {}).values()
        assert taken is right


def test_weights_that_no_checkpoint_has() -> None:
    """SGLang warns of them, and serves whatever memory had there."""
    missing = "Some weights are not initialized from checkpoints: {'model.decoder.mlp.gate.weight'}"
    unknown = "model.layers.0.a_weight not found in params_dict."
    assert run_on_gpu.not_loaded(f"started\n{missing}\n{unknown}\nended") == [missing, unknown]
    assert run_on_gpu.not_loaded("started\nended") == []


def test_what_is_compiled_behind_warm_up() -> None:
    kernel = "1.67 s for sm_90 select_topk: topk_select_kernel, its first kernel"
    ready = f"TP0] xmla: 58 {run_on_gpu.READY}, after 3.2 s"
    assert run_on_gpu.compiled_late(f"{kernel}\n{ready}\n{kernel}\nTP1] {ready}\nPrefill batch\n") == []
    assert run_on_gpu.compiled_late(f"{kernel}\n{ready}\nPrefill batch\n{kernel}\n") == [kernel]
    assert run_on_gpu.compiled_late(kernel) is None


def test_options() -> None:
    drafts = engine.ENGINES["xmla-drafts-3"].arguments()
    assert (drafts["speculative_num_steps"], drafts["speculative_num_draft_tokens"]) == (3, 4)
    graphs = engine.ENGINES["xmla-graphs"].arguments()
    assert graphs["disable_prefill_cuda_graph"] and not graphs["disable_decode_cuda_graph"]
    assert engine.ENGINES["own"].environment()["SGLANG_PLUGINS"] != ""  # which would load every plugin
    v4 = engine.ENGINES["v4-xmla-graphs"]
    assert (
        not any(name.startswith("dsa") for name in v4.arguments()) and not v4.arguments()["disable_decode_cuda_graph"]
    )
    drafts = engine.ENGINES["v4-xmla-drafts"].arguments()
    assert drafts["speculative_algorithm"] == "EAGLE"  # SGLang refuses NEXTN of this model
    assert (drafts["speculative_num_steps"], drafts["speculative_num_draft_tokens"]) == (3, 4)
    assert v4.environment()["SGLANG_PLUGINS"] == "xmla,called,passes,streams"
    own, torch_logits = (engine.ENGINES[name].environment() for name in ("v4-own", "v4-own-torch"))
    assert own["SGLANG_PLUGINS"] == "passes,streams"
    assert {*torch_logits.items()} - {*own.items()} == {("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")}


def test_engines_of_two_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="serve two models"):
        run_on_gpu.model_in(tmp_path, 4, 128, ["xmla", "v4-xmla"])


def test_a_model_of_v4_has_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    from benchmarks.engines import models as model

    model.save_v4(tmp_path)
    engine.name_for_sglang(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"hc_head_fn", "model.layers.1.attn.kv_norm.weight", "model.layers.1.attn.q_norm.weight"} <= names
    assert not any(".attn.norm." in name or ".hc_head.hc_" in name for name in names)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["topk_method"]) == ("deepseek_v4", "noaux_tc")


def test_the_drafting_layer_of_v4_has_all_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a layer that attends to its window alone, a router and experts of one that tokens do not choose; SGLang
    would leave what it does not find as memory was."""
    from benchmarks.engines import models as model

    monkeypatch.setattr(model, "LARGE_V4", model.TINY_V4)
    engine.make_model_v4(tmp_path, device="cpu")
    weights = load_file(tmp_path / "model.safetensors")
    parts = {name.removeprefix("mtp.0.") for name in weights if name.startswith("mtp.0.")}
    first = {name.removeprefix("model.layers.0.") for name in weights if name.startswith("model.layers.0.")}
    second = {name.removeprefix("model.layers.1.") for name in weights if name.startswith("model.layers.1.ffn.")}
    own = {f"{part}{kind}.weight" for part in "eh" for kind in ("norm", "_proj")}
    own |= {"head.weight", "emb.tok_emb.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"}
    assert parts == first - {"ffn.gate.tid2eid"} | second | own and "ffn.gate.bias" in second
    assert torch.equal(weights["mtp.0.h_proj.weight"], 0.25 * weights["mtp.0.e_proj.weight"])
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_engines_are_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []

    def child(log: Path, *words: Any, pipe: Connection) -> int:
        log.write_text("")
        order.append(pipe.recv())
        pipe.send(NOBODY)
        order.append(f"ended by {pipe.recv()}")
        return 0

    def measure() -> None:
        with run_on_gpu.measured(tmp_path, tmp_path, "own", 4, 128, "4096", "1", 9, 9) as (model, _):
            order.append(f"measured {model}")

    monkeypatch.setattr(run_on_gpu, "child", child)
    monkeypatch.setattr(run_on_gpu, "model_in", lambda *_: tmp_path)
    beside = Thread(target=measure)
    with engine.locked(tmp_path, fcntl.LOCK_SH):  # as one that answers has it
        beside.start()
        beside.join(0.5)
        assert beside.is_alive() and order == [str(tmp_path)]
    beside.join()
    assert order[1:] == [f"measured {tmp_path}", "ended by None"]


def test_a_round_is_of_new_prompts_and_then_of_cached_ones(tmp_path: Path) -> None:
    """A stand-in takes 1 ms a step, 2 s for a new prompt, and as long for a pass of a decode as it has made passes."""
    now, cached, passes, ahead = [0.0], list[list[int]](), list[tuple[str, int, float]](), [False]

    def generate(input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, known = sampling_params["max_new_tokens"], input_ids == cached
        passes.append(("EXTEND", 1, 1500.0))
        passes.extend(("DECODE", 1, 7.0) for _ in range(tokens - 1))  # of one before the other
        passes.extend(("DECODE", len(input_ids), 0.5 if ahead[0] else 99.0) for _ in range(min(tokens - 1, most[0])))
        now[0] += 1e-3 * tokens + 2 * (not known)
        cached[:] = input_ids
        return [{"meta_info": {"cached_tokens": 64 * known}, "output_ids": [3] * tokens} for _ in input_ids]

    def tell(method: str, out: str, ahead: bool) -> None:
        assert method == "tell_passes"
        Path(out).write_text(json.dumps(passes))
        passes.clear()
        waits[0] = ahead

    waits, most = ahead, [1000]
    served = SimpleNamespace(generate=generate, collective_rpc=tell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        rounds = [
            engine.timed_round(served, tmp_path / "passes.json", {}, 2001, 2, number, new)
            for number, new in ((0, True), (1, True), (1, False))
        ]
        most[0] = engine.TOKENS - 1
        refused = engine.timed_round(served, tmp_path / "passes.json", {}, 2001, 2, 1, False)
    steps = {"step_us": 1000.0, "forward_us": 500.0, "cached_tokens": 64, "same_tokens": 1.0}
    assert rounds == [steps | {"prefill_tokens_per_s": 2000, "prefill_forward_ms": 1500.0}] * 2 + [steps]
    assert refused == {"refused": "the cache does not hold 2 requests at once"}


def test_every_case_runs_before_an_engine_is_ready() -> None:
    """Of a case of many tokens only some prompts, each with as many requests beside as the case has."""
    ran: list[tuple[int, int, int]] = []

    def generate(input_ids: list[list[int]], sampling_params: dict[str, Any]) -> None:
        ran.append((len(input_ids), len({*map(tuple, input_ids)}), sampling_params["max_new_tokens"]))

    engine.compile_cases(SimpleNamespace(generate=generate), [65536, 64], [1, 8])
    assert ran == [(1, 1, 1), (1, 1, 8), (8, 8, 1), (8, 8, 8), (1, 1, 1), (1, 1, 8), (2, 2, 1), (8, 2, 8)]


def test_no_prompt_is_cached_by_another() -> None:
    """Also of another case, and those that compile or come before the prompts whose kernels are shown."""
    numbers = *range(-1, 9), engine.SHOWN, engine.SHOWN + 1
    prompts = [
        tuple(each[:64]) for context, requests in ((1024, 8), (4096, 1), (4096, 8)) for number in numbers
        for each in engine.new_prompts(context, requests, number)
    ]  # fmt: skip
    assert len({*prompts}) == len(prompts) == 17 * len(numbers)


def test_passes_are_timed_between_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            ran.append(self)

        def elapsed_time(self, last: Any) -> float:
            return float(ran.index(last) - ran.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", ran.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    passes, out = engine.Passes(), tmp_path / "passes.json"
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE"), batch_size=3)

    def forward(runner: str, batch: Any, **more: Any) -> str:
        ran.append("forward")
        return f"{runner} {more}"

    for ahead in (True, False):
        assert passes.watch(forward, "runner", batch, proxies=None) == "runner {'proxies': None}"
        passes.tell(None, str(out), ahead)
        assert json.loads(out.read_text()) == [["DECODE", 3, 2.0]]
    assert [each for each in ran if isinstance(each, int)] == [engine.AHEAD] and ran[3] == engine.AHEAD


def test_a_case_is_what_its_rounds_have() -> None:
    rounds = [
        {"step_us": step, "forward_us": step / 2, "prefill_tokens_per_s": 7 + step, "prefill_forward_ms": 3.0,
         "cached_tokens": 64, "same_tokens": 1.0}
        for step in (10.0, 30.0, 20.0)
    ]  # fmt: skip
    case = harness.case_of(rounds, median)
    assert (case["step_us"], case["forward_us"], case["prefill_tokens_per_s"]) == (20.0, 10.0, 37.0)
    assert case["step_us_by_round"] == [10.0, 30.0, 20.0] and case["cached_tokens"] == 64 and "refused" not in case
    assert harness.case_of(rounds, min)["step_us"] == 10.0
    cached = {key: value for key, value in rounds[0].items() if not key.startswith("prefill")} | {"cached_tokens": 32}
    case = harness.case_of([*rounds, cached | {"step_us": -1.0}], median)
    assert case["refused"] and "step_us" not in case and case["step_us_by_round"][-1] == -1.0
    assert case["prefill_forward_ms_by_round"] == [3.0] * 3 and case["cached_tokens"] == 32
    case = harness.case_of([*rounds, cached | {"same_tokens": 0.49}], median)
    assert case["refused"] == "answers behind cached prompts are not those of the first round"
    assert case["same_tokens"] == 0.49 and "step_us" not in case


def test_answers_of_a_round_are_those_of_the_first_of_its_prompts() -> None:
    answered = harness.Answered()
    assert harness.same_tokens(answered, (64, 2, 1), [[1, 2, 3, 4], [5, 6, 7, 8]]) == 1.0
    assert harness.same_tokens(answered, (64, 2, 1), [[1, 2, 9, 4], [5, 6, 7, 8]]) == 0.75
    assert harness.same_tokens(answered, (64, 2, 1), [[9, 2, 3, 4], [9, 6, 7, 8]]) == 0.0
    assert harness.same_tokens(answered, (64, 2, 2), [[9, 2, 3, 4], [9, 6, 7, 8]]) == 1.0


def test_kernels_are_those_that_took_time() -> None:
    ran = ("a", 10.0, 1.0), ("b", 12.0, 2.0), ("a", 20.0, 3.5)
    events = [{"cat": "kernel", "name": name, "ts": begun, "dur": us} for name, begun, us in ran]
    events.append({"cat": "cpu_op", "name": "on the host", "ts": 5.0, "dur": 90.0})
    assert engine.kernels(events, most=1) == [
        {"kernel": "from the first to the last", "launches": 3, "us": 13.5},
        {"kernel": "all", "launches": 3, "us": 6.5}, {"kernel": "a", "launches": 2, "us": 4.5},
    ]  # fmt: skip


def run(
    command: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str, asked: list[Any] | None = None
) -> tuple[int, list[dict[str, Any]]]:  # fmt: skip
    """The exit status and the lines of a command whose engines are stand-ins, one of which fails.

    `asked` has what measured engines were asked, in order.
    """
    config = {"num_hidden_layers": 4, "num_attention_heads": 128, "hidden_size": 2048, "index_topk": 2048}

    def child(log: Path, seconds: float, environment: dict[str, str], *words: Any, pipe: Any = None) -> int:
        kind, name, *rest = words
        if kind == "model":
            name.mkdir()
            (name / "config.json").write_text(json.dumps(config))
            return 0
        ours = "xmla" in environment["SGLANG_PLUGINS"]
        log.write_text(f"started\n{f'{run_on_gpu.RUNS}, {run_on_gpu.READY}' if ours else ''}\nended")
        if name == "xmla-bf16":
            return 1
        if kind == "answer":
            calls = engine.OPS if ours else ()
            rest[1].write_text(json.dumps({"answers": answers(-1.0, 7, 32), "calls": calls, "seconds": {}}))
            return 0
        assert pipe.recv() == str(folder / "model-4-128")
        pipe.send(NOBODY)
        while (question := pipe.recv()) is not None:
            asked.append((name, *question))
            what, context, _, *number = question
            if name == "own-bf16" and number == [2, True]:
                return 1
            figures = {"step_us": -(context == 2048), "forward_us": 1.0, "prefill_tokens_per_s": 2**20}
            figures |= {"prefill_forward_ms": 2.0, "cached_tokens": 64, "same_tokens": 1.0}
            kernel = {"phase": "decode", "kernel": "a kernel", "launches": 4, "us": 9.5}
            pipe.send(figures if what == "round" else [kernel])
        return 0

    monkeypatch.setattr(run_on_gpu, "child", child)
    monkeypatch.setattr(run_on_gpu, "version", lambda package: "0.5.23")
    words = [command, "--out", str(folder / "out"), "--work", str(folder), "--commit", "a commit", *more]
    done = CliRunner().invoke(run_on_gpu.app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
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
    ours = [name for name in engines if name.startswith("xmla")]
    assert all(last["holds"].values()) and len(last["holds"]) == 3 * len(engines) + len(ours) + 7
    assert "=== xmla-bf16: exit status 1" in (tmp_path / "out" / "logs.txt").read_text()


@pytest.mark.parametrize("built", [0, 1])
def test_v4s_kernels_are_built_before_its_engines_start(
    built: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """Engines start also if that fails."""
    order: list[str] = []
    config = {"num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 2048, "index_topk": 512}

    def child(log: Path, seconds: float, environment: dict[str, str], kind: str, *words: Any) -> int:
        log.write_text("nvcc's words")
        if kind == "model-v4":
            words[0].mkdir()
            (words[0] / "config.json").write_text(json.dumps(config))
        if kind == "answer":
            ours = {"calls": [*engine.OPS] if "xmla" in words[0] else [], "seconds": {}}
            words[2].write_text(json.dumps({"answers": answers(-1.0, 7, 32)} | ours))
        order.append(words[0] if kind == "answer" else kind)
        return built if kind == "kernels-v4" else 0

    monkeypatch.setattr(run_on_gpu, "child", child)
    monkeypatch.setattr(run_on_gpu, "version", lambda package: "0.5.23")
    words = ["check", "--out", tmp_path / "out", "--work", tmp_path, "--commit", "a commit", "--at-once", 1]
    done = CliRunner().invoke(run_on_gpu.app, [*map(str, words), "--engines", "v4-own,v4-own-torch,v4-xmla"])
    assert order == ["model-v4", "kernels-v4", "v4-own", "v4-own-torch", "v4-xmla"]
    assert f"SGLang's kernels: exit status {built} after 0 s" in done.output
    assert ("nvcc's words" in done.output) == bool(built)
    lines = [json.loads(line) for line in (tmp_path / "out" / "sglang.jsonl").read_text().splitlines()]
    pairs = [(line["engine"], line["beside"]) for line in lines if "mean_abs_logprob" in line]
    assert pairs == [("v4-own-torch", "v4-own"), ("v4-xmla", "v4-own"), ("v4-xmla", "v4-own-torch")]


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    words = "--contexts", "64,32", "--requests", "1", "--seconds", "60"
    status, (_, *lines) = run("speed", monkeypatch, tmp_path, *words, asked=asked)
    engines, kernel = ("xmla-graphs", "own-graphs"), {"kernel": "a kernel", "launches": 4, "us": 9.5}
    rounds = [("round", context, 1, number, True) for context in (32, 64) for number in range(harness.ROUNDS)]
    turns = [(question, question[3]) for question in rounds] + [(("kernels", 64, 1), 0), (("kernels", 32, 1), 1)]
    assert asked == [(name, *question) for question, turn in turns for name in engines[:: -1 if turn % 2 else 1]]
    assert status == 1 and all(line["refused"] for line in lines[:4])  # a step takes no time
    assert [(line["engine"], line["context"]) for line in lines] == [
        (name, context) for context in (32, 64, 64, 32) for name in engines
    ]
    assert lines[4] == {"engine": engines[0], "context": 64, "requests": 1, "phase": "decode"} | kernel


def test_a_case_is_skipped_and_an_engine_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    words = "--engines", "own-bf16,own,xmla-bf16", "--contexts", "4096,4194304", "--requests", "1", "--seconds", "3"
    status, (_, *lines) = run("speed", monkeypatch, tmp_path, *words, asked=asked)
    assert status == 1
    assert lines[0] == {"engine": "xmla-bf16", "refused": "the engine was not ready"}
    told = [(line["engine"], line["context"], len(line.get("forward_us_by_round", ()))) for line in lines[1:5]]
    assert told == [("own-bf16", 4096, 2), ("own", 4096, 12), ("own-bf16", 4194304, 0), ("own", 4194304, 0)]
    ended, slow = "the engine ended", "more steps took no longer"
    assert [line.get("refused") for line in lines[1:5]] == [ended, slow, ended, None]
    assert lines[4]["skipped"] == "no time left"
    assert "=== xmla-bf16: exit status 1" in (tmp_path / "out" / "logs.txt").read_text()


def test_profile_writes_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (_, *lines) = run("profile", monkeypatch, tmp_path, asked=[])
    assert status == 0
    assert [(line["engine"], line["us"]) for line in lines] == [("xmla-graphs", 9.5), ("own-graphs", 9.5)]
