"""The `xmla` command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints
from zipfile import ZipFile

import numpy as np
import pytest
import torch
import triton
import typer
from conftest import HAS_GPU
from kit import all_cases, assert_bits_equal
from triton.runtime.cache import get_cache_manager
from typer.models import OptionInfo
from typer.testing import CliRunner

from benchmarks import parallel
from xmla import ArgumentError, CompileError, ModelConfig, UnsupportedError, __version__, torch_api
from xmla._warmup import present_device
from xmla.bench import picture, record, run
from xmla.cli.plan import find_device, typical
from xmla.cli.verify import chosen, compare, formats_of_case, largest_error
from xmla.command import app, main
from xmla.core.compile import packs
from xmla.core.config import settings, variables
from xmla.core.op import Op
from xmla.core.parallel import received_bytes
from xmla.core.registry import registry
from xmla.core.support import CHECKED
from xmla.core.values import H200, KNOWN_DEVICES, Spec
from xmla.layouts import digest
from xmla.machine import calls, facts
from xmla.torch_api._all_ops import TORCH_OPS
from xmla.torch_api._arrays import from_strided

ROOT = Path(__file__).parent.parent
SERVING = (ROOT / "docs/serving.md").read_text()
README = (ROOT / "README.md").read_text()
needs_keys = pytest.mark.skipif(triton.__version__.startswith("3.7"), reason="packs need Triton 3.8 or newer")
WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.mark.floors
def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, as_json = (CliRunner().invoke(app, ["info", *extra]) for extra in ((), ("--json",)))
    assert plain.exit_code == as_json.exit_code == 0
    found = json.loads(as_json.output)
    if not HAS_GPU:
        assert [line.partition(":")[0] for line in found["your programs must set"]] == [
            "TRITON_INTERPRET=1", "JAX_PLATFORMS=cpu",
        ]  # fmt: skip
        monkeypatch.setattr(facts, "entry_points", lambda group: ())
        (advice,) = facts.collect()["your programs must set"]
        assert "JAX" not in advice  # where its CUDA plugin is not installed
    assert found["xmla"] == __version__ and found["kernels"] == ("compiled" if HAS_GPU else "interpreted")
    assert found["triton"] in plain.output and len(found["devices"]) >= 1


def test_layouts_that_differ() -> None:
    """Named, or as the digests that two sides have printed; each field in which they differ."""
    digests = [CliRunner().invoke(app, ["layouts", "digest", named]).output.strip() for named in ("v32:64", "v4:64")]
    told = CliRunner().invoke(app, ["layouts", "check", *digests])
    assert told.exit_code == 1 and [line.partition(":")[0] for line in lines(told)] == [
        "format", "stride", "scale", "tile", "parts"
    ]  # fmt: skip
    assert "stride: 41984, 37440" in told.output
    same = CliRunner().invoke(app, ["layouts", "check", digests[0], "v32:64"])
    assert same.exit_code == 0 and lines(same) == ["the same layout: pages can be moved as bytes"]
    told = CliRunner().invoke(app, ["layouts", "check", "plain:64:bfloat16", "plain:64:float16"])
    assert told.exit_code == 1 and lines(told) == ["values: bfloat16, float16"]
    for text in ("v32", "plain:64:"):
        refused = CliRunner().invoke(app, ["layouts", "check", text, "v32:64"]).exception
        expected = "expected a digest or FORMAT:PAGE, such as v32:64, of plain rows plain:64:bfloat16"
        assert str(refused) == f"layouts: got {text!r}, {expected}"


def lines(result: Any) -> list[str]:
    return result.output.splitlines()


def test_info_tells_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nvidia-smi, which may fail or hang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts._driver() == ["not known: there is no nvidia-smi"]
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    for script, want in (
        ("echo 'NVIDIA H200, GPU-1-2, 580.65'\necho 'NVIDIA H200, GPU-3-4, 580.65'",
         ["NVIDIA H200, GPU-1-2, 580.65", "NVIDIA H200, GPU-3-4, 580.65"]),
        ("echo 'No devices were found'; exit 6", ["not known: nvidia-smi says No devices were found"]),
        ("exit 0", ["not known: nvidia-smi says nothing"]),
    ):  # fmt: skip
        program.write_text(f"#!/bin/sh\n{script}\n")
        assert facts._driver() == want
    program.write_text("no program")
    assert facts._driver()[0].startswith("not known: ")


def test_info_tells_tritons_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    missing = ["torch's launcher: not compiled yet", "jax's launcher: not compiled yet"]
    assert facts._triton_cache() == [str(tmp_path / "none"), "0.0 MiB in 0 files", *missing]
    for name, nbytes in (
        ("a/xmla_launcher.cpython-312.so", 1 << 20),
        ("b/kernel.cubin", 1 << 19),
        ("b/launcher.so", 0),
    ):
        (tmp_path / "none" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "none" / name).write_bytes(bytes(nbytes))
    compiled = ["torch's launcher: compiled", "jax's launcher: compiled"]
    assert facts._triton_cache()[1:] == ["1.5 MiB in 3 files", *compiled]


def test_info_tells_every_setting_and_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "log", "")
    told = facts.collect()
    assert [line.partition("=")[0] for line in told["settings"]] == [variable for variable, _, _ in variables()]
    assert "XMLA_LOG=" in told["settings"]
    if torch.version.cuda is not None:
        assert any(line.startswith(f"torch's: CUDA {torch.version.cuda}, cuDNN ") for line in told["CUDA"])


def test_info_names_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are text: which extra to install stands in them."""
    monkeypatch.setattr(facts, "missing", lambda framework: framework == "jax")
    plain = CliRunner().invoke(app, ["info"], env=WIDE)
    assert facts.needed("jax") in plain.output and "[jax]" in plain.output


def test_plan_prints_what_ranks_exchange() -> None:
    words = ["plan", "--batch", "64", "--max-len", "131072", "--device", "H200"]
    result = CliRunner().invoke(app, [*words, "--ranks", "4"])
    assert result.exit_code == 0, result.output
    assert "merge_topk" in result.output and "merge_attention" in result.output
    predicted = received_bytes(64, 128, 2048, 4)
    assert f"decode 64 requests × 1: {sum(predicted.values()):,} B" in result.output
    assert "merge" not in CliRunner().invoke(app, words).output


@pytest.mark.usefixtures("device")
def test_verify_passes() -> None:
    names = ("map_slots", "write_indexer_cache")
    result = CliRunner().invoke(app, ["verify", "--op", names[0], "--op", names[1]])
    assert result.exit_code == 0, result.output
    cases = sum(len(registry()[name].cases) for name in names)
    assert result.output.count("identical") == cases and "DIFFERS" not in result.output
    assert f"all {cases} cases agree\n" in result.output


def test_verify_takes_a_case_of_every_op_and_format_by_default() -> None:
    quick, every = chosen(None, False), chosen(None, True)
    assert [*quick] == [*every] == [*registry()]
    assert all(0 < len(cases) <= len(op.cases) for op, cases in quick.values())
    assert len(quick["select_topk"][1]) == 1 and len(quick["read_mla_cache"][1]) >= 8
    assert sum(len(cases) for _, cases in quick.values()) * 2 < sum(len(cases) for _, cases in every.values())
    assert all(cases == op.cases for op, cases in every.values())


@pytest.mark.usefixtures("device")
def test_verify_tells_each_op_and_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry()["map_slots"]
    monkeypatch.setattr("xmla.cli.verify.chosen", lambda *_: {op.name: (op, op.cases[:1])})
    result = CliRunner().invoke(app, ["verify"], env=WIDE)
    whole = len(op.cases)
    assert f"map_slots: 1 of {whole} cases" in result.output
    assert f"all 1 cases agree; of {whole} cases --all runs the other {whole - 1} too\n" in result.output


@pytest.mark.usefixtures("device")
def test_verify_notices_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_api.map_slots
    monkeypatch.setattr(TORCH_OPS, "map_slots", lambda *a, **k: tuple(r + 1 for r in real(*a, **k)))
    result = CliRunner().invoke(app, ["verify", "--op", "map_slots"])
    assert result.exit_code == 1 and "DIFFERS" in result.output
    cases = len(registry()["map_slots"].cases)
    assert f"{cases} of {cases} cases DIFFER\n" in result.output


def spoil(monkeypatch: pytest.MonkeyPatch, framework: str, result: str, change: Callable[[np.ndarray], None]) -> None:
    """Have a front-end give one result of each call otherwise."""
    real = calls.FRONT_ENDS[framework]

    def call(op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> calls.Arrays:
        results = {name: array.copy() for name, array in real(op, arrays, attrs).items()}
        change(results[result])
        return results

    monkeypatch.setitem(calls.FRONT_ENDS, framework, call)  # pyrefly: ignore


def double(result: np.ndarray) -> None:
    result *= 2


def next_number(result: np.ndarray) -> None:
    """A unit in the last place of the first element."""
    result.reshape(-1).view(f"u{result.itemsize}")[0] += 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "result"), [("sparse_mla", "out"), ("sparse_mla", "lse"), ("dsa_step", "mla_cache")])
def test_verify_notices_one_result_of_several(name: str, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both front-ends alike, so that they agree with each other."""
    op = registry()[name]
    monkeypatch.setattr("xmla.cli.verify.chosen", lambda *_: {name: (op, op.cases[:1])})
    for framework in [*calls.FRONT_ENDS]:
        spoil(monkeypatch, framework, result, double)
    done = CliRunner().invoke(app, ["verify"], env=WIDE)
    assert done.exit_code == 1 and "1 of 1 cases DIFFER" in done.output
    assert done.output.count("DIFFERS") == 1 and "identical" in done.output
    assert name == "dsa_step" or "1.0e+00" in done.output, "the worst of the results' errors"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("framework", calls.FRONT_ENDS)
def test_verify_compares_the_front_ends(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit between them, within the reference's bounds."""
    op = registry()["sparse_mla"]
    monkeypatch.setattr("xmla.cli.verify.chosen", lambda *_: {op.name: (op, op.cases[:1])})
    spoil(monkeypatch, framework, "out", next_number)
    done = CliRunner().invoke(app, ["verify"], env=WIDE)
    assert done.exit_code == 1 and "1 of 1 cases DIFFER" in done.output
    assert done.output.count("DIFFERS") == 1 and "agrees" in done.output


@pytest.mark.usefixtures("device")
def test_verify_by_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not serve is counted; if that is all, nothing is right."""
    op = registry()["indexer_logits_paged"]
    assert chosen(["map_slots", op.name], True, "gluon_sm100") == {op.name: (op, op.cases)}
    monkeypatch.setattr("xmla.cli.verify.chosen", lambda *_: {op.name: (op, op.cases[:1])})
    result = CliRunner().invoke(app, ["verify", "--implementation", "triton"], env=WIDE)
    assert result.exit_code == 0 and "all 1 cases agree; of " in result.output
    result = CliRunner().invoke(app, ["verify", "--implementation", "gluon_sm100"], env=WIDE)  # needs sm_100
    assert result.exit_code == 1 and "all 0 cases agree; gluon_sm100 does not serve 1; of " in result.output


def test_verify_takes_every_case(device: str) -> None:
    """Also arrays without elements; what the kernels make of each case is tests/test_ops.py's."""
    for op, case in all_cases():
        arrays = case.make(np.random.default_rng(0))
        for name, array in arrays.items():
            tensor = from_strided(array, device)
            assert tuple(tensor.shape) == array.shape and str(tensor.dtype) == f"torch.{array.dtype.name}"
            assert not array.size or tensor.stride() == Spec.of_numpy(array).strides, (op, case, name)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("call", [*calls.FRONT_ENDS.values(), calls.by_reference], ids=lambda call: call.__name__)
def test_a_call_leaves_its_arrays(call: calls.Call) -> None:
    """Of an op that writes too: the next front-end and the reference start from the same."""
    op = registry()["write_mla_cache"]
    case = op.cases[1]
    arrays = case.make(np.random.default_rng(0))
    updated = call(op, arrays, case.attrs)["cache"]
    assert_bits_equal("cache", arrays["cache"], case.make(np.random.default_rng(0))["cache"])
    assert (updated != arrays["cache"]).any()


@pytest.mark.usefixtures("device")
def test_verify_without_elements() -> None:
    """The case whose entries have no rope."""
    op = registry()["write_mla_cache"]
    (case,) = [case for case in op.cases if case.name == "nope-t6-page64-float32-pad4-nope"]
    assert not case.make(np.random.default_rng(0))["rope"].size
    assert compare(op, case, calls.FRONT_ENDS) == (0.0, True, True)


def test_largest_error() -> None:
    want = np.array([1.0, -2.0, np.inf, np.nan])
    assert largest_error(want, want) == 0.0
    assert largest_error(want + np.array([0.0, 0.2, 0.0, 0.0]), want) == pytest.approx(0.1)
    assert largest_error(np.array([1.0, np.inf, np.inf, np.nan]), want) == np.inf


@pytest.mark.floors
def test_supports_answers_for_every_device() -> None:
    (example,) = re.findall(r"`xmla (supports [^`]*)`", SERVING)
    yes = CliRunner().invoke(app, example.split())
    assert yes.exit_code == 0 and yes.output.count("yes") == len(KNOWN_DEVICES)
    assert yes.output.startswith(
        "sparse_mla: q bfloat16[1, 16, 576], cache uint8[6, 64, 656] (v32), slots int32[1, 204"
    )
    plain = CliRunner().invoke(app, ["supports", "sparse_mla", "H=16", "cache=plain", "--device", "A100"])
    assert plain.exit_code == 0 and "cache bfloat16[201, 1, 576] (plain)" in plain.output and "H200" not in plain.output
    no = CliRunner().invoke(app, ["supports", "sparse_mla", "H=129", "--device", "GB10"])
    assert no.exit_code == 1 and "at most 128 heads" in no.output and "H200" not in no.output


def told_as_json(*words: str, code: int = 0) -> Any:
    """What a command prints with --json, all of which is JSON."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def test_supports_tells_what_has_run() -> None:
    """As the README does, by the architecture."""
    table = re.findall(r"^\| ((?:Hopper|Blackwell|SM12x|Ada|Ampere)[^|]*) \|.*\| ([^|]*) \|$", README, re.MULTILINE)
    told: dict[int, str] = {}
    for parts, checked in table:
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", checked)
        for arch in re.findall(r"sm_(\d+)", parts):
            told[int(arch)] = [*told.values()][-1] if words == "likewise" else words
    assert told == CHECKED
    answers = told_as_json("supports", "sparse_mla", "H=16")["devices"]
    assert [(each["device"], each["checked"]) for each in answers] == [(d.name, CHECKED[d.arch]) for d in KNOWN_DEVICES]
    shown = CliRunner().invoke(app, ["supports", "sparse_mla", "H=16"], env=WIDE).output
    assert all(each["checked"] in shown for each in answers)
    refused = told_as_json("supports", "sparse_mla", "H=129", "--device", "GB10", code=1)["devices"]
    assert [(each["ok"], each["checked"]) for each in refused] == [(False, "")]
    assert "at most 128 heads" in refused[0]["reason"]
    (model,) = told_as_json("supports", "--model", "deepseek_v32", "--device", "H200")["devices"]
    assert model["ok"] and model["checked"] == CHECKED[90] and "triton" in model["implementations"]["select_topk"]


@pytest.mark.usefixtures("device")
def test_commands_print_json() -> None:
    """Every command; of the demo test_demo.py has it, of the bench test_command.py."""
    plan = told_as_json("plan", "--device", "H200", "--ranks", "4")
    assert plan["device"] == "NVIDIA H200" and plan["kernels"] > 0
    assert plan["caches"]["mla_cache"] == {"bytes_per_entry": 656, "bytes_per_page": 656 * 64, "entries_per_page": 64}
    launch = plan["steps"][0]["calls"][0]["launches"][0]
    assert launch.keys() == {"kernel", "programs", "warps"} and plan["received_bytes"]
    verified = told_as_json("verify", "--op", "map_slots")
    assert verified["ok"] and len(verified["cases"]) == len(registry()["map_slots"].cases)
    assert verified["cases"][0].keys() == {"op", "case", "error", "agrees", "identical"}
    assert told_as_json("layouts", "check", "v32:64", "v32:64") == {"same": True, "fields": {}}
    assert told_as_json("layouts", "check", "v32:64", "v32:128", code=1)["fields"]
    assert told_as_json("layouts", "digest", "v32:64") == {"digest": digest("v32", 64)}
    commands = {command.callback.__name__: get_type_hints(command.callback) for command in app.registered_commands}
    assert {name for name, hints in commands.items() if "as_json" not in hints} == set()


def test_plan_prints_launches_and_workspace() -> None:
    arguments = ["plan", "--batch", "8", "--max-len", "32768", "--next-n", "2", "--mixed", "--prefill", "1024"]
    result = CliRunner().invoke(app, [*arguments, "--device", "GB10"], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    for shown in ("split_counts_kernel", "indexer_logits_paged_kernel", "8 requests × 2, mixed", "prefill 1024 tokens",
                  "656 bytes per entry and layer", "NVIDIA GB10", "or dsa_step"):  # fmt: skip
        assert shown in result.output
    config = typical("deepseek_v32", batches=[8], max_lens=[32768], next_n=[2], mixed=True)
    calls = dict(config.steps())["decode 8 requests × 2, mixed, max_len 32768"]
    attention = next(call for call in calls if call.op == "dsa_attention")
    assert f"{attention.plan(find_device('GB10')).workspace_bytes:,} B" in result.output


def test_plan_tells_of_steps_that_it_leaves_out() -> None:
    """Every key of a context no longer than top-k is selected."""
    words = ["plan", "--device", "H200", "--max-len"]
    text, longer = (CliRunner().invoke(app, [*words, length], env=WIDE).output for length in ("2048", "4096"))
    assert "indexer_logits_paged is left out: nothing reads its results" in text and "whole_slots_kernel" in text
    assert "indexer_logits_paged_sm90_kernel" not in text and "left out" not in longer


def test_plan_of_v4() -> None:
    words = ["plan", "--model", "deepseek_v4", "--batch", "8", "--max-len", "32768", "--device", "H200"]
    result = CliRunner().invoke(app, words, env=WIDE)
    assert result.exit_code == 0, result.output
    for shown in ("compress_kv", "window_slots", "ratio 128: 584 bytes per entry and layer", "37,440 per page of 64"):
        assert shown in result.output, shown
    assert "dsa_attention" not in result.output
    config = typical("deepseek_v4", batches=[8], max_lens=[32768], k=512)
    assert (config.k, config.page_size) == (512, 64), "what is not given is the model's own"
    config = typical("deepseek_v4", batches=[8], max_lens=[32768])
    assert f"{len(config.specializations(H200))} kernels" in result.output


def test_plan_of_glm() -> None:
    """Its heads, and layers that attend over the selection of an earlier one."""
    words = ["plan", "--model", "glm_moe_dsa", "--batch", "8", "--max-len", "32768", "--device", "H200"]
    result = CliRunner().invoke(app, words, env=WIDE)
    assert result.exit_code == 0, result.output
    assert "dsa_attention" in result.output and "sparse_mla_paged" in result.output
    config = typical("glm_moe_dsa", batches=[8], max_lens=[32768], prefill_tokens=[1024])
    calls = [call for _, calls in config.steps() for call in calls]
    assert {call.specs["q"].shape[1:] for call in calls if call.op == "sparse_mla_paged"} == {(64, 576)}
    assert {call.specs["index_q"].shape[1:] for call in calls if call.op == "dsa_attention"} == {(32, 128)}


@pytest.mark.parametrize(
    ("name", "row", "dims"), [("plain", 576, 576), ("nope", 528, 512), ("nvfp4", 352, 576), ("plain_v4", 512, 512)]
)
def test_rows_of_other_formats(name: str, row: int, dims: int) -> None:
    config = ModelConfig(cache_format=name, shared_selection=True, batches=(2,), max_lens=(4096,), prefill_tokens=(64,))
    assert config.caches()["mla_cache"].shape[2] == row
    calls = [call for _, calls in config.steps() for call in calls]
    assert {call.specs["q"].shape[2] for call in calls if call.op in ("sparse_mla", "dsa_attention")} == {dims}
    assert config.specializations(find_device("H200"))
    with pytest.raises(ArgumentError, match="ModelConfig: a cache's format is 'v4', expected one of v32, nope, "):
        ModelConfig(cache_format="v4").caches()


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"xmla {__version__}\n"


@pytest.mark.floors
def test_every_command_has_help() -> None:
    commands = ([], *([name] for name in typer.main.get_command(app).commands), ["layouts", "digest"])
    for words in commands:
        help_of = CliRunner().invoke(app, [*words, "--help"], env=WIDE)
        assert help_of.exit_code == 0 and "--help" in help_of.output, (words, help_of.exception)


@pytest.mark.floors
def test_completion() -> None:
    """Of commands, options and models, as the shell asks for it."""
    for words, offered in (("pl", {"plan"}), ("plan --pa", {"--page-size"}), ("warmup --model deep", {"deepseek_v4"})):
        typed = {"COMP_WORDS": f"xmla {words}", "COMP_CWORD": str(len(words.split()))}
        result = CliRunner().invoke(app, [], prog_name="xmla", env={"_XMLA_COMPLETE": "complete_bash", **typed})
        assert offered <= set(result.output.split()), result.output


@pytest.mark.floors
def test_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["plan", "--device", "V100"], "device is 'V100', expected one of H100, H200, "),
        (
            ["plan", "--model", "deepseek_v4", "--ranks", "2"],
            "model_config: got ranks, expected a field of ModelConfigV4: ",
        ),
        (["plan", "--device", "NVIDIA"], "device is 'NVIDIA', expected one of H100, H200, "),
        (["warmup", "--device", "H20"], "device is 'H20', expected one of H100, H200, "),
        (
            ["supports", "sparse_mla", "H:3"],
            "asked is 'H:3', expected AXIS=NUMBER, such as H=16, or ARGUMENT=FORMAT or ",
        ),
        (["supports", "sparse_mla", "H=two"], "asked is 'H=two', expected AXIS=NUMBER, such as H=16, or ARGUMENT="),
        (["supports", "sparse_mla", "cache=7"], "asked is 'cache=7', expected AXIS=NUMBER, such as H=16, or ARGUMENT="),
        (["supports", "sparse_mla", "cache=v9"], "supports: cache is 'v9', expected one of bfloat16, float16, nope, "),
        (["supports", "sparse_mla", "Z=3"], "supports: axis is 'Z', expected one of"),
        (["supports", "sparse_mla", "H=16", "H=32"], "asked is 'H=32' after H=16, expected each name once"),
        (
            ["supports", "sparse_mla", "--device", "H200", "--device", "V100"],
            "device is 'V100', expected one of H100, H200, ",
        ),
        (["verify", "--op", "sparse_mle"], "verify: op is 'sparse_mle', expected one of compress_kv, compress_rows"),
        (
            ["verify", "--op", "sparse_mla", "--implementation", "gluon_sm10"],
            "verify: implementation is 'gluon_sm10', expected one of gluon, gluon_sm100, triton",
        ),
        (["bench", "--op", "nothing"], "bench: no op nothing; there are sparse_mla, sparse_mla_backward, "),
        (["bench", "--framework", "torch,jaxx"], "bench: no framework jaxx; there are torch, jax"),
        (
            ["bench", "--implementation", "glue"],
            "bench: no implementation glue; there are gluon, gluon_sm100, gluon_sm90, gluon_sm90_cluster, triton",
        ),
    ):
        monkeypatch.setattr("sys.argv", ["xmla", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"xmla: {message}")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (
            ["verify", "--op", "sparse_mal"],
            "write_mla_cache; did you mean sparse_mla or sparse_mla_paged or sparse_mla_b",
        ),
        (["supports", "selct_topk"], "write_mla_cache; did you mean select_topk or "),
        (["supports", "sparse_mla", "h=16"], "S, T; did you mean H?"),
        (["supports", "sparse_mla", "cache=palin"], "cases of sparse_mla have; did you mean plain or plain_v4?"),
        (["supports", "sparse_mla", "q=flaot16"], "uint8; did you mean float16 or bfloat16 or float64?"),
    ],
)
def test_names_that_may_have_been_meant(
    words: list[str], end: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["xmla", *words])
    with pytest.raises(SystemExit):
        main()
    assert end in capsys.readouterr().err


@pytest.mark.skipif(HAS_GPU, reason="without a GPU")
def test_a_missing_gpu_is_told_before_anything_slow_is_imported() -> None:
    code = (
        "import sys; from xmla.command import main; sys.argv = ['xmla', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        "finally:\n    print(*{'torch', 'jax'} & {*sys.modules})"
    )
    for words, message in (
        (["bench"], "bench: no GPU is present; times of interpreted kernels mean nothing"),
        (["bench", "--op", "sparse_mla", "--op", "host"], "bench: no GPU is present; times of "),
        (["warmup"], "warmup: no GPU is present; --device H200 fills the cache on disk for that device"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith(f"xmla: {message}")
        assert not done.stdout.strip()


def test_softmax_scales_are_the_models() -> None:
    """The scale is compiled in, so that a kernel with the last bit of another is not the one that the model calls."""
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_apply_mscale

    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    released = DeepseekV32Config(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_parameters=rope | {"rope_theta": 1e4})
    scale = yarn_apply_mscale(released.rope_parameters, released.qk_head_dim**-0.5)
    assert typical("deepseek_v32").softmax_scale == scale == pytest.approx(0.1352, abs=1e-4)
    given = typical("deepseek_v4", softmax_scale=0.25)
    assert given.softmax_scale == 0.25


@needs_keys
def test_warmup_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Packed, its kernels are those that both front-ends ask for elsewhere, where nothing is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["COLUMNS"] = "150"

    def python(cache: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        there = environment | {"TRITON_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(command, env=there, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    pack = str(tmp_path / "kernels.pack")
    sizes = ["--batch", "1", "--max-len", "128", "--heads", "8", "--k", "64"]
    told = python(
        "there", "-m", "xmla", "warmup", *sizes, "--next-n", "1", "--no-prefill", "--device", "H200", "--pack", pack
    ).stderr
    assert "kernels ready for NVIDIA H200 in" in told and "sparse_mla_sm90_kernel × 1: " in told
    assert "q_ptr" not in told and "nanobind" not in told
    cubins = len(list(tmp_path.glob("there/*/*.cubin")))
    assert cubins >= 7
    if HAS_GPU and (present := present_device()[0]).num_sms != H200.num_sms:
        pytest.skip(f"the pack is for an H200, this is {present}")
    device = [] if HAS_GPU else ["--device", "H200"]
    assert python("here", "-m", "xmla", "warmup", "--unpack", pack, *device).stderr.startswith(f"{cubins} kernels of ")
    for framework in ("torch", "jax"):
        calls = python("here", str(ROOT / "tests" / "programs" / "unpacked.py"), framework, *sizes[1::2])
        assert int(calls.stdout) >= 7
    assert len(list(tmp_path.glob("here/*/*.cubin"))) == cubins


KEY = "ab" * 32
KERNEL = {"a_kernel.json": json.dumps({"hash": KEY}).encode(), "a_kernel.cubin": b"\x7fELF" + bytes(60)}


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of one kernel for an H200; an empty cache is in the place of Triton's."""
    for name, content in KERNEL.items():
        (tmp_path / name).write_bytes(content)
    kernel = SimpleNamespace(hash=KEY, metadata_group={name: tmp_path / name for name in KERNEL})
    with monkeypatch.context() as context:
        context.setattr(packs, "compiled", lambda *_: kernel)
        packs.write_pack(tmp_path / "pack", [None], H200)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "pack"


def rewritten(pack: Path, members: Mapping[str, bytes], change: Callable[[dict[str, Any]], object] = id) -> None:
    """The pack with other kernels, and a manifest that `change` has changed."""
    with ZipFile(pack) as archive:
        manifest = json.loads(archive.read(packs.MANIFEST))
    change(manifest)
    with ZipFile(pack, "w") as archive:
        for name, content in {packs.MANIFEST: json.dumps(manifest).encode(), **members}.items():
            archive.writestr(name, content)


def test_a_pack_goes_where_triton_looks(pack: Path) -> None:
    assert packs.read_pack(pack, H200) == packs.read_pack(pack, H200) == 1
    files = get_cache_manager(KEY).get_group("a_kernel.json")
    assert files and {name: Path(file).read_bytes() for name, file in files.items()} == KERNEL


def test_a_pack_for_something_else_is_refused(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what differs, of what Triton's keys and the plans follow from."""
    whole, parts = pack.read_bytes(), {"facts": packs.facts(H200), "options": packs.options(90)}
    assert all(parts["facts"].values()) and len(parts["facts"]) == 7
    for part, name, here in [(part, *item) for part, values in parts.items() for item in values.items()]:
        rewritten(pack, {}, lambda manifest, part=part, name=name: manifest[part].update({name: "another"}))
        with pytest.raises(UnsupportedError, match=f"else: {name} is another, expected {re.escape(str(here))}$"):
            packs.read_pack(pack, H200)
        pack.write_bytes(whole)
    rewritten(pack, {}, lambda manifest: manifest["options"].update(DISABLE_PTXAS_OPT="1"))
    with pytest.raises(UnsupportedError, match=r"else: DISABLE_PTXAS_OPT is 1, expected None$"):
        packs.read_pack(pack, H200)
    pack.write_bytes(whole)
    with pytest.raises(UnsupportedError, match=r"compute capability is 9.0, expected 10.0; SMs is 132, expected 148$"):
        packs.read_pack(pack, find_device("B200"))
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    with pytest.raises(UnsupportedError, match=r"DISABLE_PTXAS_OPT is None, expected "):
        packs.read_pack(pack, H200)


def test_what_is_no_pack_is_refused_whole(pack: Path, tmp_path: Path) -> None:
    """Before anything is stored: other files, names of other folders, kernels that are damaged or not all there."""
    whole, good = pack.read_bytes(), {f"{KEY}/{name}": content for name, content in KERNEL.items()}
    json_, cubin = good
    names = ["../a.cubin", "/a.cubin", f"{KEY}/../a.cubin", f"{KEY}/a/a.cubin", f"{KEY}/..", f"../{KEY}/a.cubin", "a"]
    kernels = [
        *({name: b"", **good} for name in names), {json_: good[json_]}, {cubin: good[cubin]},
        {**good, json_: json.dumps({"hash": "cd" * 32}).encode()}, {**good, json_: b"["},
        {**good, cubin: good[cubin][:63]}, {**good, cubin: good[cubin][:41] + b"\x01" + bytes(22)},
    ]  # fmt: skip
    for members in kernels:
        rewritten(pack, members)
        with pytest.raises(ArgumentError, match=r"pack is not what `xmla warmup --pack` writes, or damaged: "):
            packs.read_pack(pack, H200)
    for content in (b"", b"no archive", *(whole[:length] for length in range(0, len(whole), 37))):
        pack.write_bytes(content)
        with pytest.raises(ArgumentError, match="or damaged: BadZipFile"):
            packs.read_pack(pack, H200)
    pack.write_bytes(whole)
    rewritten(pack, good)
    pack.write_bytes(pack.read_bytes().replace(b"ELF", b"elf"))
    with pytest.raises(ArgumentError, match=r"or damaged: BadZipFile.*Bad CRC"):
        packs.read_pack(pack, H200)
    assert not (tmp_path / "cache").exists()


def test_a_pack_beside_a_cache_that_cannot_be_written(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(pack / "cache"))
    with pytest.raises(CompileError, match=r"not stored: .*Not a directory.* TRITON_CACHE_DIR names another folder"):
        packs.read_pack(pack, H200)


def test_packs_need_keys_that_every_process_computes(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton 3.7 are refused, before anything is compiled."""
    monkeypatch.setattr(packs.triton, "__version__", "3.7.1")
    for option in (["--pack", f"{pack}2"], ["--unpack", str(pack)]):
        result = CliRunner().invoke(app, ["warmup", *option, "--device", "H200"], env=WIDE)
        assert str(result.exception).startswith("warmup: Triton is 3.7.1, packs need 3.8 or newer"), result.output
    assert not Path(f"{pack}2").exists()


@needs_keys
def test_unpacking_takes_no_sizes(pack: Path) -> None:
    words = ["warmup", "--unpack", str(pack), "--device", "H200"]
    assert CliRunner().invoke(app, words, env=WIDE).exit_code == 0
    for option in (["--batch", "1"], ["--mixed"], ["--pack", f"{pack}2"], ["--model", "deepseek_v32"]):
        result = CliRunner().invoke(app, [*words, *option], env=WIDE)
        assert result.exit_code == 2 and f"expected no {option[0]} beside it" in result.output, result.output


def test_picture_and_comparison_of_results(tmp_path: Path) -> None:
    head, *lines = run.read_lines(ROOT / "benchmarks/results/h200/bench.jsonl")
    picture.draw(head, lines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    faster = [line | {"us": {"xmla": [2 * line["us"]["xmla"][0], 0, 0]}} for line in lines if "us" in line]
    earlier = {(line["op"], line["case"]): line for line in faster}
    table = run.table_of([line for line in lines if "us" in line], earlier)
    assert set(table.columns[7].cells) == {"2.00"}


def test_an_earlier_file_may_hold_several_runs(tmp_path: Path) -> None:
    """As one does to which `--out` has appended. It is read before the run, whose lines may go into the same file."""
    file = tmp_path / "runs.jsonl"

    def times(us: float) -> dict[str, object]:
        return {"op": "select_topk", "case": "a case", "us": {"xmla": [us, us, us]}}

    runs = [{"command": "xmla bench"}, times(3.0), {"command": "xmla bench"}, times(2.0), {"op": "jit", "case": "b"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in runs))
    assert run.earlier_times(file) == {("select_topk", "a case"): times(2.0)}


@pytest.mark.parametrize("text", ["no JSON", "[1]", "3", '{"us": 1}'])
def test_an_earlier_file_is_refused_before_the_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_text(text)
    message = re.escape(f"bench: compare is {file}, expected a file with times that xmla bench --out has written")
    with pytest.raises(ArgumentError, match=message):
        run.run(["host"], None, file, None, None)


NUMBERS = [
    "--batch", "--max-len", "--next-n", "--prefill", "--tensor-parallel", "--heads", "--index-heads", "--k",
    "--page-size", "--workspace", "--ranks",
]  # fmt: skip


@pytest.mark.parametrize("command", ["plan", "warmup"])
@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", ["0", "-3"])
def test_sizes_are_positive(command: str, option: str, value: str) -> None:
    result = CliRunner().invoke(app, [command, option, value], env=WIDE)
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.output, result.output


def test_a_checkpoint_in_the_place_of_a_name(tmp_path: Path) -> None:
    """Its folder or its config.json; what it says, and what options say instead."""
    config = {
        "model_type": "deepseek_v32", "num_attention_heads": 128, "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 1024, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    words = ["--tensor-parallel", "8", "--cache-format", "plain", "--index-format", "mxfp4", "--workspace", "4000000"]
    for model in (str(file), str(tmp_path)):
        planned = CliRunner().invoke(app, ["plan", "--model", model, *words, "--device", "H200"], env=WIDE)
        assert planned.exit_code == 0, planned.output
        assert "mla_cache: 1152 bytes per entry" in planned.output and "indexer_cache: 68 bytes" in planned.output
        mine = typical(model, 8, cache_format="plain", index_format="mxfp4", workspace_bytes=4_000_000)
        assert (mine.heads, mine.k, mine.softmax_scale) == (16, 1024, 192**-0.5)
        assert f"{len(mine.specializations(H200))} kernels serve these steps" in planned.output
    file.write_text(json.dumps(config | {"kv_lora_rank": 128}))
    refused = CliRunner().invoke(app, ["plan", "--model", str(tmp_path)])
    assert str(refused.exception) == "model_config: kv_lora_rank of deepseek_v32 is 128, expected 512"


def test_supports_tells_of_a_model() -> None:
    """On each device, by which kernels, and if not why."""
    words = ["supports", "--model", "deepseek_v4_flash", "--tensor-parallel", "2", "--device", "H200"]
    told = CliRunner().invoke(app, words, env=WIDE)
    assert told.exit_code == 0 and told.output.startswith("ModelConfigV4("), told.output
    assert "heads=32, " in told.output and "sparse_mla by gluon" in " ".join(told.output.split())
    told = CliRunner().invoke(app, ["supports", "--model", "glm5_next", "--cache-format", "v9", "--device", "H200"])
    assert "a cache's format is 'v9', expected one of v32, nope, " in str(told.exception)
    for words, got in (([], "neither"), (["sparse_mla", "--model", "hy_v4"], "both")):
        refused = CliRunner().invoke(app, ["supports", *words])
        assert str(refused.exception) == f"supports: got {got}, expected an op or --model"


def test_verify_of_a_model() -> None:
    """The ops that its steps call, over caches of its formats; with --all every such case."""
    config = typical("deepseek_v41", prefill_tokens=[64])
    ops, every = chosen(None, False, None, config), chosen(None, True, None, config)
    assert {"compress_kv", "window_slots", "indexer_block_topk_paged", "sparse_mla"} <= {*ops}
    assert "dsa_attention" not in ops and "sparse_mla_backward" not in ops
    formats = {formats_of_case(op, case) for op, cases in ops.values() for case in cases if op.name == "sparse_mla"}
    assert formats == {("v41", "v41_fp4")}
    assert ops.keys() == every.keys() and sum(len(cases) for _, cases in every.values()) > 2 * len(ops)


@pytest.mark.usefixtures("device")
def test_verify_tells_formats_without_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry()["sparse_mla"]
    every = chosen(["sparse_mla"], True, None, typical("deepseek_v41"))["sparse_mla"][1]
    monkeypatch.setattr("xmla.cli.verify.chosen", lambda *_: {op.name: (op, ())})
    result = CliRunner().invoke(app, ["verify", "--model", "deepseek_v41"], env=WIDE)
    assert 0 < len(every) < len(op.cases) and f"; of {len(every)} cases --all runs" in result.output
    assert "left out: sparse_mla over v41, of which there is no case\n" in result.output, result.output


def options() -> Iterator[tuple[str, type, OptionInfo]]:
    """Every option of this command and of programs beside it: its name, type and declaration."""
    for command in (command for part in (app, parallel.app, record.app) for command in part.registered_commands):
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            (declared,) = getattr(hint, "__metadata__", [None])
            if isinstance(declared, OptionInfo):
                kinds = [kind for kind in (int, float, Path) if str(kind.__name__) in str(hint.__origin__)]
                yield f"{command.callback.__name__} {name}", kinds[0] if kinds else str, declared


def test_every_number_has_a_bound() -> None:
    numbers = [(name, option.min) for name, kind, option in options() if kind in (int, float)]
    assert len(numbers) >= 20
    assert [name for name, least in numbers if least is None] == []


def test_every_file_is_checked_first() -> None:
    files = {name: option for name, kind, option in options() if kind is Path}
    assert {"demo out", "demo picture", "bench out", "bench picture", "bench compare", "run out", "main out",
            "warmup pack", "warmup unpack"} == set(files)  # fmt: skip
    assert [name for name, option in files.items() if option.callback is None and not option.exists] == []


@pytest.mark.parametrize(
    "words",
    [["demo", "--out"], ["demo", "--model", "deepseek_v4", "--out"], ["bench", "--out"], ["bench", "--picture"]],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_told_at_once(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path, message in (("missing/a.png", "is no folder"), ("folder.png", "cannot be written")):
        result = CliRunner().invoke(app, [*words, str(tmp_path / path)], env=WIDE)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_pictures_of_a_kind_that_is_drawn(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--picture", str(tmp_path / "a.xyz")], env=WIDE)
    assert result.exit_code == 2 and "ends in '.xyz', expected one of" in " ".join(result.output.split())
    missing = CliRunner().invoke(app, ["bench", "--compare", str(tmp_path / "none")], env=WIDE)
    assert missing.exit_code == 2 and "does not exist" in " ".join(missing.output.split())
