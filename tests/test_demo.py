"""The main job on a real client agrees, and a broken one is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from xmla import torch_api
from xmla.cli import app, client

# transformers warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("default")


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


def test_demo_agrees(tmp_path: Any) -> None:
    import json

    result = demo("--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = {figure["name"] for figure in figures}
    assert {"selection, same caches", "attention, as shipped", "logits, same caches", "torch = JAX: out"} <= names
    assert all(figure["ok"] for figure in figures)
    assert "identical" in result.output and "DISAGREES" not in result.output


def wrong_scale(attend: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: torch.Tensor, softmax_scale: float, implementation: str | None = None, **attrs: Any) -> Any:
        wrong = softmax_scale if implementation == "reference" else softmax_scale * 1.5
        return attend(*arrays, softmax_scale=wrong, implementation=implementation, **attrs)

    return call


def wrong_selection(attend: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: torch.Tensor, implementation: str | None = None, **attrs: Any) -> Any:
        out, lse, indices = attend(*arrays, implementation=implementation, **attrs)
        return out, lse, indices if implementation == "reference" else (indices - 1).clamp(min=0)

    return call


@pytest.mark.parametrize("mistake", [wrong_scale, wrong_selection])
def test_demo_notices_a_mistake(mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "dsa_attention", mistake(torch_api.dsa_attention))
    result = demo()
    assert result.exit_code == 1, result.output
    assert "DISAGREES" in result.output


def test_the_model_has_deepseeks_geometry() -> None:
    config = client.build("cpu").config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128)
