"""Programs of one engine in benchmarks/engines, without a GPU, vLLM and SGLang."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from programs import stand_in_engine
from programs.stand_in_engine import StandIn
from safetensors.torch import load_file
from triton.runtime import autotuner

from benchmarks.engines import calls, models, served
from benchmarks.engines.passes import AHEAD, Passes
from benchmarks.engines.processes import run_engine
from benchmarks.engines.sglang import child as sglang
from benchmarks.engines.sglang import plugins
from benchmarks.engines.sglang.adapter import Sglang
from benchmarks.engines.vllm import arrivals, marks, parts, steps, workers
from benchmarks.engines.vllm import child as vllm
from benchmarks.engines.vllm.adapter import Vllm
from benchmarks.engines.vllm.engines import ENGINES
from benchmarks.engines.vllm.parts import Kernel
from benchmarks.engines.vllm.steps import Event, Step
from xmla import torch_api as xt

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("adapter", [Vllm(), Sglang()], ids=lambda adapter: adapter.name)
def test_programs_start(adapter: Any) -> None:
    done = subprocess.run([sys.executable, "-m", adapter.child, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("model", "measure", "answer", *adapter.compiling.values()))


def test_a_program_answers_through_its_pipe(tmp_path: Path) -> None:
    """One that `run_engine` starts inherits it, is ready when every case has run, and ends when it is told to.

    Of a case of many tokens only some prompts run, each with as many requests beside as the case has.
    """
    ours, theirs = Pipe()
    script, log = Path(stand_in_engine.__file__), tmp_path / "log"
    words = script, "measure", "xmla", theirs.fileno(), "65536,64", "1,8"
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_engine, words, log, os.environ | {"PYTHONPATH": str(ROOT)}, 60, theirs)
        for question in (tmp_path, ("round", 64, 1, 0, True), ("kernels", 64, 1), None):
            ours.send(question)
        assert ours.poll(60), log.read_text()
        process, figures, kernels = (ours.recv() for _ in range(3))
        assert running.result(60) == 0, log.read_text()
    assert process != os.getpid() and figures["step_us"] == 5.0 and figures["prefill_tokens_per_s"] == 128
    row = {"kernel": "a kernel", "us": 9.5}
    assert kernels == [{"phase": "prefill", "launches": 1} | row, {"phase": "decode", "launches": 3} | row]
    loaded, started, asked = log.read_text().splitlines()
    assert (loaded, started) == ("loaded", f"xmla {tmp_path} [65536, 64] [1, 8]")
    cases = [(1, 1, 1), (1, 1, 8), (8, 8, 1), (8, 8, 8), (1, 1, 1), (1, 1, 8), (2, 2, 1), (8, 2, 8)]
    assert [tuple(each[:3]) for each in json.loads(asked)[:8]] == cases


def test_a_round_is_of_new_prompts_and_then_of_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answered = StandIn(), dict[Any, Any]()
    figures = {"step_us": 5.0, "forward_us": 2000.0, "cached_tokens": 60, "same_tokens": 1.0}
    filled = {"prefill_tokens_per_s": 120, "prefill_forward_ms": 13.0}
    assert served.timed_round(engine, answered, 30, 2, 0, True) == figures | filled
    assert engine.asked == [(2, 2, 1, False), (2, 2, 64, False), (2, 2, 72, True)] and not engine.ahead
    assert served.timed_round(engine, answered, 30, 2, 0, False) == figures
    assert len(engine.asked) == 5
    answered[30, 2, 0][0] = [-1] * 72
    assert served.timed_round(engine, answered, 30, 2, 0, False) == figures | {"same_tokens": 0.5}
    refusal = {"refused": "the cache does not hold 2 requests at once"}
    monkeypatch.setattr(engine, "decodes", lambda requests: [])
    assert served.timed_round(engine, answered, 30, 2, 0, True) == refusal
    engine.holds = 1
    assert served.timed_round(engine, answered, 30, 2, 0, True) == refusal


def test_no_prompt_is_cached_by_another() -> None:
    """Nor is one that compiles, or whose kernels are shown."""
    numbers = served.COMPILING, *served.PROFILED, *range(12)
    prompts = [
        tuple(each[:64]) for context, requests in ((1024, 8), (4096, 1), (4096, 8)) for number in numbers
        for each in served.new_prompts(context, requests, number)
    ]  # fmt: skip
    assert len({*prompts}) == len(prompts) == 17 * 15


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an engine's process makes of torch: events, 3 ms apart, and waits."""
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            made.append(self)

        def elapsed_time(self, last: Any) -> float:
            return 3.0 * (made.index(last) - made.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", made.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_passes_of_vllm_are_timed_in_workers(monkeypatch: pytest.MonkeyPatch, events: list[Any]) -> None:
    """The host is let ahead of those that are not to include its time."""

    class Runner:
        def _model_forward(self, inputs: str) -> str:
            return inputs

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=Runner))
    monkeypatch.setattr(workers, "PASSES", Passes())
    layer = type("Attention", (), {"forward_mqa": None})()
    compilation = SimpleNamespace(static_forward_context={"a": layer, "b": SimpleNamespace(impl=layer)})
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    engine = SimpleNamespace(collective_rpc=lambda function, args=(): [function(worker, *args), None])
    served = vllm.StartedVllm(engine)
    assert workers.told(worker)["attention"] == ["Attention"]
    assert Runner()._model_forward("inputs") == "inputs" and served.passes(ahead=True) == [3.0]
    assert len(events) == 2
    Runner()._model_forward("inputs")
    assert served.passes() == [3.0] and events[2] == AHEAD and served.passes() == []
    for _ in range(70):
        Runner()._model_forward("inputs")
    assert served.decodes(8) == [3.0] * 64 and events.count(AHEAD) == 1


def test_passes_of_sglang_are_timed_in_its_scheduler(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], tmp_path: Path
) -> None:
    """By hooks of its own, each told with its kind."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    hooks: dict[str, Any] = {}

    class Scheduler: ...

    registry = SimpleNamespace(register=lambda name, hook, kind: hooks.update({name: hook}))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", SimpleNamespace(Scheduler=Scheduler))
    kinds = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", kinds)
    plugins.watch_passes()
    (forward,) = hooks.values()
    engine = SimpleNamespace(collective_rpc=lambda method, **asked: getattr(Scheduler(), method)(**asked))
    served = sglang.StartedSglang(engine, tmp_path)

    def run(kind: str, requests: int) -> None:
        batch = SimpleNamespace(forward_mode=SimpleNamespace(name=kind), batch_size=requests)
        ran = forward(lambda runner, _, **more: f"{runner} {more}", "runner", batch, proxies=None)
        assert ran == "runner {'proxies': None}"

    run("EXTEND", 1)
    assert served.told(ahead=True) == [["EXTEND", 1, 3.0]] and len(events) == 2
    run("DECODE", 3)
    assert served.passes() == [3.0] and events[2] == AHEAD
    for number in range(70):
        run("DECODE", 3 if number < 64 else 2)
    assert served.decodes(3) == [3.0] * 64 and events.count(AHEAD) == 1
    run("DECODE", 3)
    assert served.decodes(3) == []  # too few


def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang's processes write which ops they call; an op keeps its plan."""

    def sparse_mla(x: int) -> int:
        return x + 1

    sparse_mla.plan = "a plan"
    monkeypatch.setenv(plugins.CALLED, str(tmp_path / "called"))
    monkeypatch.setattr(plugins, "OPS", ("sparse_mla",))
    monkeypatch.setattr(calls, "CALLS", type(calls.CALLS)())
    monkeypatch.setattr(xt, "sparse_mla", sparse_mla)
    plugins.count_calls()
    assert [xt.sparse_mla(number) for number in range(3)] == [1, 2, 3] and xt.sparse_mla.plan == "a plan"
    assert calls.CALLS == {"sparse_mla": 3} and (tmp_path / "called").read_text() == "sparse_mla\n"


@pytest.mark.parametrize("point", plugins.POINTS.values())
def test_plugins_of_sglang_are_there(point: str) -> None:
    module, _, name = point.partition(":")
    assert callable(getattr(import_module(module), name))


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Bytes of the caches of an engine of vLLM with and without xmla, of a model with this configuration."""

    def asked(name: str, requests: list[int], config: dict[str, Any]) -> list[int]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        kinds = "own", "xmla"
        return [vllm.start_for(name.format(kind), tmp_path, [4096, 32768], requests) for kind in kinds]

    monkeypatch.setattr(vllm, "start", lambda *_, kv_cache_memory_bytes, **__: kv_cache_memory_bytes)
    return asked


def test_an_engine_of_vllm_by_the_sizes_of_text(caches: Callable[..., list[int]]) -> None:
    """V4.1's are inside of its configuration. Its cache holds windows and entries, each in pages as large."""
    for config in ({"num_hidden_layers": 5}, {"text_config": {"num_hidden_layers": 5}}):
        size = (1 << 30) + int(1.25 * 3 * 8 * (32768 + 64 + 128) * 5 * (656 + 132))
        assert caches("v41-{}-graphs", [1, 8], config) == [size] * 2


@pytest.mark.parametrize(("model", "layers"), [("", 4), ("v4-", 4), ("v41-", 5), ("glm-", 4)])
def test_two_engines_of_vllm_fit_an_h100(model: str, layers: int, caches: Callable[..., list[int]]) -> None:
    """Their caches leave each 8 GiB of 78 for weights, workspaces and passes."""
    assert sum(caches(model + "{}-graphs", [1, 8, 64], {"num_hidden_layers": layers})) <= (78 - 2 * 8) << 30


def test_steps_of_vllm_count_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in which each request has a token, but not of a cache that holds fewer requests."""
    steps = [(1.0, 0), (9.0, 2), *((9.0 + 0.5 * number, 2) for number in range(1, 21))]
    done = vllm.Drained(0.0, steps, 60, [])
    assert done.decode_us(2) == [500000.0] * 13
    engine = vllm.StartedVllm.__new__(vllm.StartedVllm)
    engine.engine = None
    monkeypatch.setattr(vllm, "drain", lambda _, prompts, tokens: done)
    assert engine.step_of([[1], [2]]) == (500000.0, 60) and engine.seconds_of([[1], [2]], 1) == 19.0
    assert engine.step_of([[1], [2], [3]]) is None


def test_a_step_of_sglang_is_what_a_longer_request_takes_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in takes 1 ms a token, and 2 s for a request."""
    now = [0.0]

    def generate(input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        now[0] += 2 + 1e-3 * sampling_params["max_new_tokens"]
        tokens = [3] * sampling_params["max_new_tokens"]
        return [{"meta_info": {"cached_tokens": 64 + each[0]}, "output_ids": tokens} for each in input_ids]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = sglang.StartedSglang(SimpleNamespace(generate=generate), tmp_path)
    assert engine.step_of([[2], [1]]) == (pytest.approx(1000.0), 65)
    assert engine.ask([[2], [1]], 2) == [[3, 3]] * 2


def test_engines_tune_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside: list[int] = []

    def look_up(tuner: int, *_: Any) -> str:
        inside.append(tuner)
        time.sleep(0.05)
        assert inside.pop() == tuner and not inside
        return f"choice of {tuner}"

    monkeypatch.setattr(autotuner.Autotuner, "check_disk_cache", look_up)
    vllm.tune_in_turn(tmp_path / "lock")
    with ThreadPoolExecutor(4) as threads:
        chosen = threads.map(autotuner.Autotuner.check_disk_cache, range(8), [()] * 8, [[]] * 8, [None] * 8)
        assert [*chosen] == [f"choice of {tuner}" for tuner in range(8)]


def test_options_of_vllm() -> None:
    ranks, drafts = (Vllm.engines[f"xmla-{name}"].arguments(()) for name in ("keys", "drafts-3"))
    assert ranks["tensor_parallel_size"] == ranks["decode_context_parallel_size"] == 2
    assert drafts["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    adaptive = Vllm.engines["v41-xmla-dspark-adaptive"].arguments((4, 8))
    told = {"method": "dspark", "num_speculative_tokens": 3, "enable_adaptive_verification": True}
    assert adaptive["speculative_config"] == told
    assert Vllm.engines["xmla"].environment() == {"VLLM_PLUGINS": "xmla"}
    assert Vllm.engines["own"].arguments(()) == {
        "attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8", "enforce_eager": True
    }  # fmt: skip


def test_options_of_sglang() -> None:
    engines = Sglang.engines
    drafts = engines["xmla-drafts-3"].arguments()
    assert (drafts["speculative_num_steps"], drafts["speculative_num_draft_tokens"]) == (3, 4)
    graphs = engines["xmla-graphs"].arguments()
    assert graphs["disable_prefill_cuda_graph"] and not graphs["disable_decode_cuda_graph"]
    assert engines["own"].environment()["SGLANG_PLUGINS"] != ""  # which would load every plugin
    v4 = engines["v4-xmla-graphs"]
    assert (
        not any(name.startswith("dsa") for name in v4.arguments()) and not v4.arguments()["disable_decode_cuda_graph"]
    )
    drafts = engines["v4-xmla-drafts"].arguments()
    assert drafts["speculative_algorithm"] == "EAGLE"  # SGLang refuses NEXTN of this model
    assert (drafts["speculative_num_steps"], drafts["speculative_num_draft_tokens"]) == (3, 4)
    assert v4.environment()["SGLANG_PLUGINS"] == "xmla,called,passes,streams"
    own, torch_logits = (engines[name].environment() for name in ("v4-own", "v4-own-torch"))
    assert own["SGLANG_PLUGINS"] == "passes,streams"
    assert {*torch_logits.items()} - {*own.items()} == {("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")}


def test_a_model_of_v4_has_the_names_that_sglang_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its drafting layer has all weights: those of a layer that attends to its window alone, a router and experts of
    one that tokens do not choose; SGLang would leave what it does not find as memory was."""
    monkeypatch.setattr(models, "LARGE_V4", models.TINY_V4)
    sglang.app(["model", str(tmp_path), "--kind", "v4", "--device", "cpu"], standalone_mode=False)
    weights = load_file(tmp_path / "model.safetensors")
    assert {"hc_head_fn", "model.layers.1.attn.kv_norm.weight", "model.layers.1.attn.q_norm.weight"} <= weights.keys()
    assert not any(".attn.norm." in name or ".hc_head.hc_" in name for name in weights)
    parts = {name.removeprefix("mtp.0.") for name in weights if name.startswith("mtp.0.")}
    first = {name.removeprefix("model.layers.0.") for name in weights if name.startswith("model.layers.0.")}
    second = {name.removeprefix("model.layers.1.") for name in weights if name.startswith("model.layers.1.ffn.")}
    own = {f"{part}{kind}.weight" for part in "eh" for kind in ("norm", "_proj")}
    own |= {"head.weight", "emb.tok_emb.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"}
    assert parts == first - {"ffn.gate.tid2eid"} | second | own and "ffn.gate.bias" in second
    assert torch.equal(weights["mtp.0.h_proj.weight"], 0.25 * weights["mtp.0.e_proj.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["topk_method"], config["moe_layer_freq"]) == ("deepseek_v4", "noaux_tc", 1)
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("module", [vllm, sglang], ids=["vllm", "sglang"])
def test_models_are_made(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """V3.2's has a layer that drafts, and vLLM's of V4 and V4.1 DSpark."""
    for kind in ("", "_V4", "_V41", "_GLM"):
        monkeypatch.setattr(models, f"LARGE{kind}", getattr(models, f"TINY{kind}"))
    made = {}
    for kind in ("v32", "v4", "v41", "glm") if module is vllm else ("v32",):
        words = ["model", str(tmp_path / kind), "--kind", kind, "--device", "cpu"]
        module.app(words, standalone_mode=False)
        made[kind] = json.loads((tmp_path / kind / "config.json").read_text())
    assert made["v32"]["num_nextn_predict_layers"] == 1
    assert ("moe_layer_freq" in made["v32"]) == (module is sglang)
    drafters = {kind: config.get("text_config", config).get("n_mtp_layers") for kind, config in made.items()}
    assert {kind for kind, stages in drafters.items() if stages == 2} == made.keys() & {"v4", "v41"}
    assert all(config["model_type"].startswith(("deepseek_v", "glm5")) for config in made.values())


def test_kernels_of_vllm_are_those_that_took_time() -> None:
    events = [SimpleNamespace(key=key, count=2, self_device_time_total=us) for key, us in (("a", 1.0), ("b", 3.04))]
    events.append(SimpleNamespace(key="on the host", count=1, self_device_time_total=0.0))
    assert vllm.kernels(events, most=2) == [
        {"kernel": "b", "launches": 2, "us": 3.0}, {"kernel": "a", "launches": 2, "us": 1.0}
    ]  # fmt: skip


def test_kernels_of_sglang_are_those_that_took_time() -> None:
    ran = ("a", 10.0, 1.0), ("b", 12.0, 2.0), ("a", 20.0, 3.5)
    events = [{"cat": "kernel", "name": name, "ts": begun, "dur": us} for name, begun, us in ran]
    events.append({"cat": "cpu_op", "name": "on the host", "ts": 5.0, "dur": 90.0})
    assert sglang.kernels(events, most=1) == [
        {"kernel": "from the first to the last", "launches": 3, "us": 13.5},
        {"kernel": "all", "launches": 3, "us": 6.5}, {"kernel": "a", "launches": 2, "us": 4.5},
    ]  # fmt: skip


def test_a_trace_is_always_the_same() -> None:
    trace = arrivals.trace_of(200, 8.0)
    assert trace == arrivals.trace_of(200, 8.0)
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
    served = SimpleNamespace(engine=engine, passes=list)
    trace = [arrivals.Request(1.0, 30, 3), arrivals.Request(1.005, 40, 2), arrivals.Request(3.0, 50, 5)]
    monkeypatch.setattr(arrivals, "trace_of", lambda requests, rate: trace)
    told = arrivals.play(served, watch, 3, 8.0, 7, 1)
    assert told["ttft_ms"] == pytest.approx([10, 15, 10]) and told["tpot_ms"] == pytest.approx([10, 10, 10])
    assert told["seconds"] == pytest.approx(3.05)
    now[0] = 0.0
    assert arrivals.play(served, watch, 3, 8.0, 8, 2)["seconds"] == pytest.approx(1.55)


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
    assert not watch.steps[0].where and any(name.endswith("test_engine_children.step") for name in watch.steps[1].where)
    watch.passes([1.0])  # of another number of steps
    assert watch.steps[0].gpu_ms == 1.25


def ran(*kernels: tuple[str, int, int]) -> list[Kernel]:
    """Kernels that begin and end at these microseconds."""
    return [Kernel(name, 1000 * begun, 1000 * ended) for name, begun, ended in kernels]


def test_a_pass_is_divided_by_its_marks() -> None:
    """What runs between passes, and before the first wait, is of none; a kernel beside another counts once."""
    layer = ran(
        ("a product", 10, 20), ("selection_begins", 20, 21), ("logits", 21, 25), ("top-k", 25, 27),
        ("selection_ends", 27, 28), ("attention_begins", 28, 29), ("attention", 29, 40), ("combination", 32, 44),
        ("attention_ends", 44, 45),
    )  # fmt: skip
    one = [*ran(("spin_kernel(long)", 0, 9)), *layer, *ran(("a product", 46, 50), ("pass_ends", 50, 51))]
    later = [Kernel(kernel.name, kernel.begun + 100_000, kernel.ended + 102_000) for kernel in one]
    passes = parts.passes_of([*ran(("a product", -5, -1)), *later, *one, *ran(("sampler", 60, 70))])
    assert [len(kernels) for kernels in passes] == [len(one)] * 2
    line = parts.figures(passes[:1])
    assert line["pass_us"] == {"median": 41.0, "least": 41.0}
    assert (line["selection_us"]["median"], line["attention_us"]["median"], line["other_us"]["median"]) == (6, 15, 14)
    assert line["between_us"] == {"median": 2.0, "least": 2.0}
    assert [line[f"{part}_launches"] for part in ("selection", "attention", "other")] == [2, 2, 2]
    assert line["kernels"][0] == {"part": "selection", "kernel": "logits", "launches": 1, "us": 4.0}
    both = parts.figures(passes)
    assert both["passes"] == 2 and both["pass_us"] == {"median": 40.0, "least": 39.0}


@pytest.mark.parametrize("name", ["xmla-graphs", "own-graphs", "v4-xmla-graphs", "v41-own-graphs", "glm-own-graphs"])
def test_both_engines_have_marks_around_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever selects and attends: V3.2's layers call the indexer by a name of their module, others by a layer's."""
    engine, launched = ENGINES[name], list[str]()
    for each in ("selection_begins", "selection_ends", "attention_begins", "attention_ends"):
        monkeypatch.setattr(marks, each, {(1,): lambda _, each=each: launched.append(each)})
    layer = type("Layer", (), {"forward_cuda": lambda self, x: launched.append("selection") or x + 1})
    attention = type("Attention", (), {"forward_mqa": lambda self, x: launched.append("attention") or x + 2})
    module, *of, function = marks.SELECTION[engine.kind]
    attends, name_of_attention = marks.ATTENTION[engine.kind][engine.plugin]
    selects = SimpleNamespace(**{of[0]: layer} if of else {function: layer().forward_cuda})
    modules = {module: selects, attends: SimpleNamespace(**{name_of_attention: attention})}
    monkeypatch.setattr(marks, "import_module", modules.__getitem__)
    marks.install(engine)
    select = layer().forward_cuda if of else getattr(selects, function)
    assert (select(1), attention().forward_mqa(1)) == (2, 3)
    expected = ["selection_begins", "selection", "selection_ends", "attention_begins", "attention", "attention_ends"]
    assert launched == expected
