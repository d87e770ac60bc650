"""Tables and pictures of the documents (`make report`)."""

import json
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest

from tools.report import engines, evidence, frameworks, layer, megatron, pages, pictures, speeds
from tools.report.__main__ import main
from tools.report.pages import TABLES


def markdown(page: str, marker: str) -> str:
    """The table that stands there in the committed pages."""
    (table,) = [table for table in TABLES if (table.page, table.marker) == (page, marker)]
    return table.markdown()


def test_committed_results_are_told() -> None:
    """As many rows as the pages have had, so that none is left out."""
    table = markdown("docs/performance.md", "ops")
    assert table.count("\n| ") == 11 and table.count("FlashMLA") == 5 and "SGLang" in table and "vLLM" in table
    assert markdown("docs/performance.md", "steps").count("\n| ") == 19
    table = markdown("docs/performance_cases.md", "numbers")
    assert "beside FlashMLA |" in table and table.count("\n| `torch.add` |") == 2
    table = markdown("docs/performance_frameworks.md", "frameworks")
    assert "in 19 of 19 cases" in table and "step of 8 layers" in table
    assert markdown("docs/ranks.md", "ranks").count("µs") > 20
    table = markdown("docs/training.md", "layer")
    assert table.count("ms") >= 5 and "out of memory" in table
    assert markdown("docs/vllm_measured.md", "speed").count(" µs (") > 40
    assert markdown("docs/vllm_measured.md", "answers").count(" of ") > 150
    assert markdown("docs/vllm_measured.md", "trace").count(" ms (") == 8
    assert markdown("docs/vllm_measured.md", "parts").count(" µs (") == 4 * (3 + 3 + 1 + 1 + 2) - 2 * 2
    models = "DeepSeek-V3.2", "DeepSeek-V4", "DeepSeek-V4.1", "GLM-5.3-Flash"
    table = markdown("docs/vllm_measured.md", "glance")
    assert all(table.count(f"| {model} | vLLM 0.33.0 | ") >= 2 for model in models) and "| two | 2 |" in table
    table = markdown("docs/sglang_measured.md", "speed")
    assert table.count(" µs (") == 3 * (5 + 4 + 4)  # a pass, its fastest round, a step
    table = markdown("docs/sglang_measured.md", "answers")
    assert table.count(" of 32 |") == (6 + 8 + 2 + 8) * 5
    assert markdown("docs/megatron.md", "megatron").count(" ms, ") >= 4
    rows = markdown("docs/contract.md", "evidence").splitlines()
    assert {"test suite", "fuzzer"} < {line.split(" | ")[0].removeprefix("| ") for line in rows}
    assert markdown("README.md", "speed").count("\n| ") == 21
    shown = pictures.shown_speeds(pages.RESULTS / "h200/bench.jsonl")
    assert [len(bars) for bars in shown["bars"].values()] == [7, 3, 6]


def test_pages_of_other_results_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `--check`, which writes nothing; without it they are written."""
    copytree(pages.ROOT / "docs/images", tmp_path / "docs/images")
    for table in TABLES:
        copy(pages.ROOT / table.page, tmp_path / table.page)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.others() == []
    page, drawn = tmp_path / "docs/ranks.md", tmp_path / "docs/images/run.svg"
    text = page.read_text()
    page.write_text(text.replace("<!-- /ranks -->", "| another row |\n<!-- /ranks -->"))
    drawn.write_text(drawn.read_text().replace("2026-", "2025-"))
    with pytest.raises(SystemExit, match=r"of other results: docs/ranks\.md, docs/images/run\.svg; run python -m"):
        main(check=True)
    main()
    assert page.read_text() == text and pages.others() == []


def test_another_devices_times_stand_beside_the_first_runs(tmp_path: Path) -> None:
    """Its last run's."""
    ceilings = {"copy_bytes_per_s": 4e12, "bf16_flop_per_s": 8e14, "fp8_flop_per_s": 1.5e15}
    versions = {"devices": ["NVIDIA H200 (sm_90, 132 SMs)"], "torch": "2.11", "triton": "3.9"}
    head = {"command": "", "date": "2026-11-28", "commit": "0123456", "versions": versions, "ceilings": ceilings}
    other = head | {"versions": versions | {"devices": ["NVIDIA H100 80GB HBM3 (sm_90, 132 SMs)"]}}

    def case(name: str, us: float) -> dict[str, object]:
        return {"op": "an op", "case": name, "us": {"xmla": [us, us, us]}, "tflop_per_s": 1.0, "gb_per_s": 2.0,
                "ceiling": "copy", "share_of_ceiling": 0.5, "ratio_to_peer": {"a peer": us / 10}}  # fmt: skip

    host = {"op": "an op", "case": "", "launches": 1, "allocations": 1, "host_us": 3.0, "torch_add_us": 2.0}

    def table(*lines: dict[str, object]) -> list[str]:
        for name, each in (("first", (head, case("a", 10), case("b", 20), host)), ("other", lines)):
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in each))
        return speeds.report(tmp_path / "first", tmp_path / "other").splitlines()

    together = table(other, case("a", 11), other, case("b", 30), case("c", 40))
    assert together[:4] == [
        "| run | of | software | copy, TB/s | bf16, TFLOP/s | fp8, TFLOP/s |",
        "|---|---|---|---|---|---|",
        "| H200 at 0123456 | NVIDIA H200 (sm_90, 132 SMs), 2026-11-28, commit 0123456 | torch 2.11, Triton 3.9 | "
        "4.00 | 800 | 1500 |",
        "| H100 at 0123456 | NVIDIA H100 80GB HBM3 (sm_90, 132 SMs), 2026-11-28, commit 0123456 | "
        "torch 2.11, Triton 3.9 | 4.00 | 800 | 1500 |",
    ]
    alone = "| case | µs | rate | share of ceiling | beside a peer |", "|---|---|---|---|---|"
    assert [line for line in together[4 : together.index("## The host's time")] if line] == [
        "## `an op`",
        "H200 at 0123456:", *alone, "| a | 10 | 2 GB/s | 0.50 copy | 1.00 × |",
        "H200 at 0123456 and H100 at 0123456:",
        "| case | H200: µs | H200: rate | H200: share of ceiling | H200: beside a peer "
        "| H100: µs | H100: share of ceiling | H100: beside a peer |",
        "|---" * 8 + "|",
        "| b | 20 | 2 GB/s | 0.50 copy | 2.00 × | 30 | 0.50 copy | 3.00 × |",
        "H100 at 0123456:", *alone, "| c | 40 | 2 GB/s | 0.50 copy | 4.00 × |",
    ]  # fmt: skip
    both = table(other, case("a", 11), host | {"host_us": 4.0})
    assert [line for line in both if line.startswith("| `an op` | 1 |")] == [
        "| `an op` | 1 | 1 | 3.0 |  |", "| `an op` | 1 | 1 | 4.0 |  |",
    ]  # fmt: skip


def test_a_layers_table_has_what_was_measured(tmp_path: Path) -> None:
    head = {
        "command": "", "date": "2026-11-24", "commit": "0123456789abcdef",
        "versions": {"devices": ["a GPU"], "torch": "2.11", "triton": "3.9", "jax": "0.11"},
    }  # fmt: skip
    fits, full = {"ms": 2.4, "peak_gib": 1.25, "difference": {"q": 0.02}}, {"out_of_memory": True}
    lines = [
        {"tokens": 2048, "xmla": {"ms": 1.0, "peak_gib": 0.5}, "dense": {"ms": 3.0, "peak_gib": 2.0},
         "difference": {"q": 0.016}, "dense_in_jax": fits},
        {"tokens": 4096, "xmla": {"ms": 1.0, "peak_gib": 0.5}, "dense": full, "dense_in_jax": full},
        {"tokens": 8192, "xmla": {"ms": 1.0, "peak_gib": 0.5}, "dense": full, "dense_in_jax": {"failed": "why"}},
    ]  # fmt: skip
    file = tmp_path / "layer.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    assert layer.report(file).splitlines()[2:] == [
        "| tokens | xmla | dense | dense in JAX | difference of gradients |",
        "|---|---|---|---|---|",
        "| 2,048 | 1 ms, 0.5 GiB | 3 ms, 2.0 GiB | 2 ms, 1.2 GiB | 2.0% at most |",
        "| 4,096 | 1 ms, 0.5 GiB | out of memory | out of memory |  |",
        "| 8,192 | 1 ms, 0.5 GiB | out of memory | failed |  |",
    ]


def test_what_has_run_is_told_by_commit(tmp_path: Path) -> None:
    """Parts at one commit are added, what ran again counts once, what is missing is named; of an op the last run."""

    def write(file: str, *runs: tuple[str, str, str, dict[str, Any]]) -> None:
        versions = {"devices": ["a GPU"] * 2, "triton": "3.9.0"}
        lines = [
            {"command": command, "commit": commit, "versions": versions, "exit_code": 0, "last_lines": last.split("; ")}
            | more
            for command, commit, last, more in runs
        ]
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    suite = "timeout -k 9 60 python3 -m pytest -v tests --ignore=tests/core --ignore=tests/gpu"
    core, gpu = ("python3 -m pytest -v tests/core", "python3 -m pytest tests/gpu")
    old, new = "0123456" + "789" * 11, "abcdef0, with a remark"
    write(
        "test",
        (gpu, old, "== 1 failed in 2.5s ==", {"exit_code": 1}),
        (suite, old, "== 5 passed, 1 skipped in 7s ==", {}),
        (core, old, "== 7 passed in 1s ==", {}),
        (gpu, old, "== 2 failed, 1 passed in 2.5s ==", {"exit_code": 124}),
        (gpu, old, "== 1 passed in 2.5s ==", {"resumes": True}),
        (suite, new, "== 1 failed, 2 passed in 60s ==", {"exit_code": 124, "collected": 10, "remark": "mended"}),
        (core, new, "== 3 passed, 1 error in 1s ==", {"exit_code": 1}),
        ("python3 -m pytest tests/test_bench.py -k told", "fffffff", "1 passed in 1s", {}),
    )
    fuzz, tool = "python3 -m tools.fuzz --seconds 9", "compute-sanitizer --tool {} python3 -m tools.fuzz"
    write(
        "contract",
        (fuzz, old, "map_slots: 100 cases, 0 failures; merge_topk: 100 cases, 0 failures", {}),
        (tool.format("memcheck"), old, "map_slots: 4 cases, 0 failures", {}),
        (tool.format("synccheck"), old, "map_slots: 4 cases, 0 failures", {}),
        (tool.format("racecheck"), old, "map_slots: 4 cases, 0 failures", {"exit_code": 9}),
        (
            fuzz, new,
            "map_slots: 900 cases of 2 of 6 shapes, 0 failures; merge_topk: 0 cases of 0 of 4 shapes, 0 failures",
            {},
        ),
        (fuzz, new, "map_slots: 200 cases of 3 of 6 shapes, 1 failures; 200 cases of 3 of 10 shapes", {"exit_code": 1}),
    )  # fmt: skip
    told = evidence.report(tmp_path / "test.jsonl", tmp_path / "contract.jsonl").splitlines()
    assert told[:2] == ["| what | scope | commit, Triton | result |", "|---|---|---|---|"]
    assert told[2:6] == [
        "| test suite | on 2 GPUs; without `gpu`; cut by its time: 7 tests not reached | abcdef0, 3.9.0 | "
        "5 passed, 2 failed; mended |",
        "| test suite | all, on 2 GPUs | 0123456, 3.9.0 | 14 passed, none failed |",
        "| fuzzer | 1,100 cases of `map_slots` | abcdef0, 3.9.0 | 1 failed |",
        "| fuzzer | 100 cases of `merge_topk` | 0123456, 3.9.0 | clean |",
    ]
    assert told[6].startswith("| fuzzer | `compress_kv`, ") and told[6].endswith(" |  | not run yet |")
    assert told[7:9] == [
        "| memcheck, synccheck | 4 cases of `map_slots` | 0123456, 3.9.0 | clean |",
        "| racecheck | 4 cases of `map_slots` | 0123456, 3.9.0 | reports, see below |",
    ]
    assert told[-1] == "| `map_slots` | 3 of 6 |"
    assert [line.split(" | ")[0] for line in told if "initcheck" in line] == ["| initcheck"]


def test_latencies_of_a_trace_beside_own_kernels() -> None:
    def line(name: str, scale: float, rate: float = 8.0, **more: bool) -> dict[str, Any]:
        times = {"median": 10.0 * scale, "p99": 40.0 * scale}
        asked = {"requests": round(12 * rate), "rate": rate, "rounds": 3} | more
        return {"engine": name, "trace": asked, "ttft_ms": times, "tpot_ms": {"median": 2.0, "p99": 4.0}}

    told, _, _, _, row = engines.served([line("v41-xmla-graphs", 1.0), line("v41-own-graphs", 1.5)])
    assert told == "Both engines on one GPU, in turns."
    figures = "10.0 ms (1.50 ×) | 40.0 ms (1.50 ×) | 2.0 ms (1.00 ×) | 4.0 ms (1.00 ×)"
    assert row == f"| 96, 8 a second; 3 rounds | {figures} |"
    # At a rate that one of the two had no time for nothing is told.
    lines = [line(name, scale, rate, apart=True) for name, scale in (("xmla-graphs", 1.0), ("own-graphs", 1.5))
             for rate in (8.0, 4.0)]  # fmt: skip
    told, *_, first, second = engines.served([*lines, line("xmla-graphs", 1.0, 2.0)])
    assert told == "Each engine on a GPU of its own, at the same time."
    assert (first, second) == (row, f"| 48, 4 a second; 3 rounds | {figures} |")


def test_parts_of_an_engines_passes() -> None:
    """Of all rounds the median of their medians and the fastest pass; nothing of a case that only one engine has."""

    def line(name: str, requests: int, attention: float, selection: float) -> dict[str, Any]:
        both = {"selection": selection, "attention": attention, "pass": 10 * attention}
        figures = {f"{part}_us": {"median": us, "least": us - 1} for part, us in both.items()}
        return {"engine": f"v4-{name}-graphs", "context": 4096, "requests": requests} | figures

    ours = [line("xmla", 8, attention, 20.0) for attention in (80.0, 100.0, 130.0)]
    lines = [*ours, line("own", 8, 120.0, 10.0), line("xmla", 1, 9.0, 9.0)]
    *_, row = engines.divided(lines)
    assert row == "| 4,096 | 8 | 100 µs (1.20 ×) | 79 µs (1.51 ×) | 20 µs (0.50 ×) | 19 µs (0.47 ×) | 12% |"
    assert len(engines.divided(lines)) == 3
    del ours[0]["attention_us"]["least"]
    assert "| 100 µs (1.20 ×) |  | 20 µs (0.50 ×) | 19 µs (0.47 ×) |" in engines.divided(lines)[-1]


@pytest.mark.parametrize(("name", "gpus"), [("ranks", "Two GPUs"), ("ranks-4", "Four GPUs")])
def test_speeds_of_ranks_beside_own_kernels(name: str, gpus: str) -> None:
    """A case that only one of the two has is left out."""
    line = {"context": 4096, "requests": 8, "step_us": 3.0, "step_us_by_round": [3.0], "prefill_tokens_per_s": 1000}
    ranks = [
        line | {"engine": f"xmla-{name}-graphs"},
        line | {"engine": f"own-{name}-graphs", "step_us_by_round": [4.5]},
    ]
    told = engines.speeds([*ranks, ranks[0] | {"context": 64}])
    assert told[:2] == [f"{gpus} share the heads.", ""] and told[4:] == [
        "| 4,096 | 8 | 1,000 (1.00 ×) | 3 µs (1.50 ×) |"
    ]
    alone = [each | {"engine": each["engine"].replace(f"{name}-", "")} for each in ranks]
    assert engines.speeds(alone) == told[2:]


def test_an_engines_speed_is_of_the_median_round() -> None:
    """Not of the best one; without rounds, of what was measured. Prefills of no more keys than top-k do not count."""
    head = {"model": {"index_topk": 2048}}

    def lines(context: int, ours: list[float], theirs: list[float]) -> list[dict[str, Any]]:
        return [
            {"engine": f"{name}-graphs", "context": context, "requests": 1, "step_us": 1.0, "forward_us": 1.0,
             "prefill_tokens_per_s": max(rounds), "prefill_tokens_per_s_by_round": rounds}
            for name, rounds in (("xmla", ours), ("own", theirs))
        ]  # fmt: skip

    found = [*lines(4096, [90.0, 60.0, 50.0], [30.0, 40.0, 95.0]), *lines(2048, [9.0], [1.0])]
    assert engines.ratios(head, found, "prefill_tokens_per_s") == [1.5]
    assert engines.ratios(head, found, "prefill_tokens_per_s", several=True) == []
    assert engines.ratios(head, found, "forward_us") == [1.0, 1.0]


def test_a_table_of_both_frameworks(tmp_path: Path) -> None:
    versions = {"devices": ["a GPU"], "torch": "2.11", "triton": "3.9", "jax": "0.11"}
    head = {"command": "", "date": "2026-11-27", "commit": "0123456789abcdef", "versions": versions}
    host = {"torch": {"us": [12.0, 11.0, 13.0], "host_us": 20.0, "waited_us": 50.0}}
    by_jax = {"us": [10.0, 9.0, 11.0], "host_us": 30.0, "waited_us": 60.0, "without_work_us": 40.0, "same_bits": True}
    times = {"xmla": [11.0, 1, 2], "FlashMLA": [12.0, 1, 2], "slow": [13.0, 1, 2], "itself twice": [5.0, 1, 2]}
    lines = [
        {"op": "dsa_attention", "case": "a", "us": times, "jax": by_jax, **host},
        {"op": "sparse_mla", "case": "b", "us": {"xmla": [9.0, 1, 2]}, "jax": by_jax | {"same_bits": False}, **host},
        {"op": "sparse_mla", "case": "c", "us": {"xmla": [9.0, 1, 2]}, "jax": {"failed": "why"}},
        {"op": "jit", "case": "16 donated arrays", "host_us": 75.0}, {"op": "jit", "case": "16 Refs", "host_us": 427.0},
    ]  # fmt: skip
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    table = frameworks.report(file)
    assert "The same bits by both in 1 of 2 cases." in table
    assert "| `dsa_attention` | a | 12.0 | 10.0 | 1.20 | 12.0 FlashMLA (11.0) |" in table
    assert "| `sparse_mla` | b | 12.0 | 10.0 | 1.20 |  |" in table
    assert "| `dsa_attention` | a | 20.0, 50.0 | 30.0, 60.0 | 40.0 |" in table and "| 16 | 75.0 | 427.0 |" in table
    pictures.draw_frameworks(file, tmp_path / "frameworks.svg")
    assert pictures.described(tmp_path / "frameworks.svg") == pictures.shown_frameworks(file)
    assert pictures.shown_frameworks(file)["points"] == {
        "dsa_attention": [[12.0, 1.2]], "sparse_mla": [[12.0, 1.2]]
    }  # fmt: skip


def test_a_step_of_megatrons_layer_by_xmla_alone_has_a_row() -> None:
    line = {"tokens": 131072, "tensor_parallel": 1, "context_parallel": 2, "sparse_loss": True}
    alone = line | {"xmla": {"ms": 900.4, "peak_gib": 49.04}}
    cells = "131,072", "2, tokens shared", "selected keys", "not run", "900 ms, 49.0 GiB", "", ""
    assert megatron.row(alone) == cells
    assert megatron.row(line | {"xmla": {"out_of_memory": True}})[-3:] == ("out of memory", "", "")


def test_megatrons_fused_backends_have_columns_where_a_line_has_them() -> None:
    line = {"tokens": 4096, "tensor_parallel": 1, "context_parallel": 1, "sparse_loss": True}
    line |= {"tilelang": {"ms": 167.3, "peak_gib": 3.19}, "xmla": {"ms": 36.5, "peak_gib": 3.12}}
    fused = ["cudnn", "tilelang"]
    assert megatron.row(line, fused)[3:-2] == ("not run", "not run", "167 ms, 3.2 GiB", "36 ms, 3.1 GiB")
    assert len(megatron.columns(fused)) == len(megatron.row(line, fused)) == 9
