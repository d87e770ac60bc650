"""Measured tiles: the files beside the ops fit their configs, and benchmarks/tune.py, which writes them, takes one at a
time."""

import json
from dataclasses import fields
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from xmla.core import tuned
from xmla.core.device import H200
from xmla.core.model import Call
from xmla.core.spec import Spec

SELECT = Call("select_topk", {"logits": Spec((64, 65536), "float32"), "ends": Spec((64,), "int32")}, {"k": 2048})
KEY = "rows64-columns65536-k2048"


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = spec_from_file_location("tune", Path(__file__).parents[2] / "benchmarks" / "tune.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_file(op: str, file: Path) -> None:
    """The file's choices are fields of the op's config, and faster than the heuristic and all else that was timed."""
    content = json.loads(file.read_text())
    known = {field.name for field in fields(import_module(f"xmla.core.ops.{op}.plan").Config)}
    assert content["measured"]["commit"] and content["measured"]["versions"]["devices"]
    for key, chosen in content["choices"].items():
        assert chosen and set(chosen) <= known, f"{key}: {chosen}"
        timings = {name: sum(us.values()) for name, us in content["microseconds"][key].items() if type(us) is dict}
        label = ", ".join(f"{name}={value}" for name, value in chosen.items())
        assert timings[label] <= min(timings.values()) * 1.05, f"{key}: {label}"
        assert timings[label] < timings["heuristic"], f"{key}: {label}"


def test_files_beside_the_ops() -> None:
    for file in tuned.OPS.glob("*/tuned/*.json"):
        check_file(file.parts[-3], file)


def test_what_a_file_must_hold(tmp_path: Path) -> None:
    file = tmp_path / tuned.file_name(H200.name)
    measured = {"commit": "0123456", "versions": {"devices": [H200.name]}}
    timed = {"heuristic": {"64 × 65536": 25.0}, "warps=16": {"64 × 65536": 21.5}, "warps=4": "OutOfResources"}
    for choice, holds in (
        ({"warps": 16}, True), ({"warp": 16}, False), ({"segments": 2}, False), ({}, False),
    ):  # fmt: skip
        file.write_text(json.dumps({"measured": measured, "choices": {KEY: choice}, "microseconds": {KEY: timed}}))
        if holds:
            check_file("select_topk", file)
        else:
            with pytest.raises((AssertionError, KeyError)):
                check_file("select_topk", file)


def test_a_candidate_is_planned_and_the_choice_comes_back(tune: ModuleType) -> None:
    before = SELECT.plan(H200)
    with tune.forced("select_topk", H200.name, KEY, {"segments": 16, "warps": 4}):
        forced = SELECT.plan(H200)
    assert forced.launches[0].grid == (64 * 16,) and forced.launches[0].num_warps == 4
    assert before != forced and SELECT.plan(H200) == before


def test_a_candidate_that_cannot_be_is_told(tune: ModuleType) -> None:
    fault = tune.compile_candidate(SELECT, H200, KEY, {"segment": 3})
    assert fault.startswith("ArgumentError: select_topk: ") and "names segment under" in fault
