"""The main job on a real client agrees, and a broken one is noticed."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from xmla import torch_api
from xmla.cli import app, client, client_v4, demo_v4
from xmla.core.op import registry

# transformers warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("default")


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.mark.usefixtures("device")
def test_demo_agrees(tmp_path: Any) -> None:
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


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mistake", [wrong_scale, wrong_selection])
def test_demo_notices_a_mistake(mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "dsa_attention", mistake(torch_api.dsa_attention))
    result = demo()
    assert result.exit_code == 1, result.output
    assert "DISAGREES" in result.output


def test_the_model_has_deepseeks_geometry() -> None:
    config = client.build("cpu").config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128)


@pytest.mark.usefixtures("device")
def test_v4_demo_agrees(tmp_path: Any) -> None:
    result = demo("--model", "deepseek_v4", "--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = {figure["name"] for figure in figures}
    assert {"attention, plain rows", "attention, as shipped", "attention, definition", "selection, as shipped",
            "torch = JAX: results", "torch = JAX: compressor entries", "entries, definition"} <= names  # fmt: skip
    assert all(figure["ok"] for figure in figures)


def without_sink(arguments: dict[str, Any]) -> None:
    arguments["sink"] = None


def without_inverse_rope(arguments: dict[str, Any]) -> None:
    arguments["cos_sin"] = arguments["positions"] = None


def without_entries(arguments: dict[str, Any]) -> None:
    if arguments["extra_lengths"] is not None:
        arguments["extra_lengths"] = torch.zeros_like(arguments["extra_lengths"])


def wrong_place(arguments: dict[str, Any]) -> None:
    arguments["positions"] = arguments["positions"] + 1


@cache
def few_tokens(device: str) -> tuple[Any, torch.Tensor, client_v4.Run, client_v4.Run]:
    """The model, a few tokens, most of which ratio 4 compresses, and both runs over them."""
    model, tokens = client_v4.build(device), torch.arange(14, device=device)
    shipped = client_v4.run_as_shipped(model, tokens, 12)
    return model, tokens, shipped, client_v4.run_replaced(model, tokens, 12, packed=False, picks=shipped.indices)


@pytest.mark.parametrize(
    ("op", "mistake"),
    [("sparse_mla", without_sink), ("sparse_mla", without_inverse_rope), ("sparse_mla", without_entries),
     ("compress_kv", wrong_place)],
)  # fmt: skip
def test_v4_demo_notices_a_mistake(
    op: str, mistake: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_v4, "PROMPT", 12)
    right, names = getattr(torch_api, op), list(registry()[op].tensors)

    def wrong(*tensors: Any, **attrs: Any) -> Any:
        arguments = dict.fromkeys(names) | dict(zip(names, tensors, strict=False))
        mistake(arguments)
        return right(*arguments.values(), **attrs)

    model, tokens, shipped, right_run = few_tokens(device)
    assert all(figure["ok"] for figure in demo_v4.against_model(right_run, shipped, "plain rows"))
    monkeypatch.setattr(torch_api, op, wrong)
    wrong_run = client_v4.run_replaced(model, tokens, 12, packed=False, picks=shipped.indices)
    assert not all(figure["ok"] for figure in demo_v4.against_model(wrong_run, shipped, "plain rows"))


def test_the_v4_model_has_deepseeks_geometry() -> None:
    config = client_v4.build("cpu").config
    assert (config.head_dim, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128)
    assert config.sliding_window == 128 and sorted(config.compress_rates.values()) == [4, 128]
    assert config.rope_parameters["compress"]["rope_type"] == "yarn"
