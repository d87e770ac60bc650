"""The `xmla` command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import HAS_GPU
from typer.testing import CliRunner

from xmla import __version__, torch_api
from xmla.bench import picture, run
from xmla.cli import app, main
from xmla.cli.plan import configure, find_device
from xmla.cli.verify import largest_error
from xmla.core.device import KNOWN_DEVICES
from xmla.core.op import registry
from xmla.core.parallel import received_bytes

ROOT = Path(__file__).parent.parent


def test_info() -> None:
    plain, as_json = (CliRunner().invoke(app, ["info", *extra]) for extra in ((), ("--json",)))
    assert plain.exit_code == as_json.exit_code == 0
    facts = json.loads(as_json.output)
    assert facts["xmla"] == __version__ and facts["kernels"] == ("compiled" if HAS_GPU else "interpreted")
    assert facts["triton"] in plain.output and len(facts["devices"]) >= 1


def test_plan_prints_what_ranks_exchange() -> None:
    words = ["plan", "--batch", "64", "--max-len", "131072", "--device", "H200"]
    result = CliRunner().invoke(app, [*words, "--ranks", "4"])
    assert result.exit_code == 0, result.output
    assert "merge_topk" in result.output and "merge_attention" in result.output
    predicted = received_bytes(64, 128, 2048, 4)
    assert f"decode 64 requests × 1: {sum(predicted.values()):,} B" in result.output
    assert "merge" not in CliRunner().invoke(app, words).output


def test_verify_passes() -> None:
    names = ("map_slots", "write_indexer_cache")
    result = CliRunner().invoke(app, ["verify", "--op", names[0], "--op", names[1]])
    assert result.exit_code == 0, result.output
    cases = sum(len(registry()[name].cases) for name in names)
    assert result.output.count("identical") == cases and "DIFFERS" not in result.output


def test_verify_notices_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_api.map_slots
    monkeypatch.setattr(torch_api, "map_slots", lambda *a, **k: tuple(r + 1 for r in real(*a, **k)))
    result = CliRunner().invoke(app, ["verify", "--op", "map_slots"])
    assert result.exit_code == 1 and "DIFFERS" in result.output


def test_verify_names_what_there_is() -> None:
    result = CliRunner().invoke(app, ["verify", "--op", "sparse_mle"])
    assert result.exit_code != 0 and "no op sparse_mle; there are" in str(result.exception)


def test_largest_error() -> None:
    want = np.array([1.0, -2.0, np.inf, np.nan])
    assert largest_error(want, want) == 0.0
    assert largest_error(want + np.array([0.0, 0.2, 0.0, 0.0]), want) == pytest.approx(0.1)
    assert largest_error(np.array([1.0, np.inf, np.inf, np.nan]), want) == np.inf


def test_supports_answers_for_every_device() -> None:
    yes = CliRunner().invoke(app, ["supports", "sparse_mla", "H=16", "K=2048"])
    assert yes.exit_code == 1 and yes.output.count("yes") == len(KNOWN_DEVICES)
    assert "NVIDIA A100 has compute capability 8.0" in yes.output
    no = CliRunner().invoke(app, ["supports", "sparse_mla", "H=129", "--device", "GB10"])
    assert no.exit_code == 1 and "at most 128 heads" in no.output and "H200" not in no.output


def test_plan_prints_launches_and_workspace() -> None:
    arguments = ["plan", "--batch", "8", "--max-len", "32768", "--next-n", "2", "--mixed", "--prefill", "1024"]
    result = CliRunner().invoke(app, [*arguments, "--device", "GB10"], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    for shown in ("split_counts_kernel", "indexer_logits_paged_kernel", "8 requests × 2, mixed", "prefill 1024 tokens",
                  "656 bytes a key and layer", "NVIDIA GB10"):  # fmt: skip
        assert shown in result.output
    config = configure([8], [32768], [2], [], 128, 64, 2048, 64, True)
    calls = dict(config.steps())["decode 8 requests × 2, mixed, max_len 32768"]
    attention = next(call for call in calls if call.op == "dsa_attention")
    assert f"{attention.plan(find_device('GB10')).workspace_bytes:,} B" in result.output


def test_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["plan", "--device", "V100"], "device is 'V100', expected a part of one name of: NVIDIA H100"),
        (["plan", "--device", "NVIDIA"], "device is 'NVIDIA', expected a part of one name of: NVIDIA H100"),
        (["supports", "sparse_mla", "H:3"], "size is 'H:3', expected AXIS=NUMBER"),
        (["supports", "sparse_mla", "Z=3"], "supports: axis is 'Z', expected one of"),
        (["bench", "--op", "nothing"], "bench: no "),
    ):
        monkeypatch.setattr("sys.argv", ["xmla", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"xmla: {message}")


def test_warmup_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sizes = ["--batch", "1", "--max-len", "64", "--heads", "8", "--k", "64"]
    command = [sys.executable, "-m", "xmla.cli", "warmup", *sizes, "--device", "H200"]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "150"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernels ready for NVIDIA H200 in" in done.stderr and "sparse_mla_sm90_kernel(q_ptr: *bf16" in done.stderr
    assert len(list(tmp_path.glob("*/*.cubin"))) >= 8


def test_picture_and_comparison_of_results(tmp_path: Path) -> None:
    head, *lines = run.read_lines(ROOT / "benchmarks/results/h200/bench.jsonl")
    picture.draw(head, lines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    faster = [line | {"us": {"xmla": [2 * line["us"]["xmla"][0], 0, 0]}} for line in lines if "us" in line]
    earlier = {(line["op"], line["case"]): line for line in faster}
    table = run.table_of([line for line in lines if "us" in line], earlier)
    assert set(table.columns[7].cells) == {"2.00"}
