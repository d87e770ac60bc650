"""`xmla info` and `xmla verify`."""

import json

import numpy as np
import pytest
from conftest import HAS_GPU
from typer.testing import CliRunner

from xmla import __version__, torch_api
from xmla.cli import app
from xmla.cli.verify import largest_error


def test_info() -> None:
    plain, as_json = (CliRunner().invoke(app, ["info", *extra]) for extra in ((), ("--json",)))
    assert plain.exit_code == as_json.exit_code == 0
    facts = json.loads(as_json.output)
    assert facts["xmla"] == __version__ and facts["kernels"] == ("compiled" if HAS_GPU else "interpreted")
    assert facts["triton"] in plain.output and len(facts["devices"]) >= 1


def test_verify_passes() -> None:
    result = CliRunner().invoke(app, ["verify", "--op", "map_slots", "--op", "write_indexer_cache"])
    assert result.exit_code == 0, result.output
    assert result.output.count("identical") == 8 and "DIFFERS" not in result.output


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
