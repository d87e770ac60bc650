"""The main job on a real client agrees, and a broken one is noticed."""

import json
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from typer.testing import CliRunner

from xmla import torch_api
from xmla.command import app
from xmla.core import versions
from xmla.core.registry import registry
from xmla.demo import curves, deepseek_v4, deepseek_v32, glm5_next, shell
from xmla.demo.comparisons import against_model
from xmla.demo.curves import JOINT, WARM_UP
from xmla.demo.passes import Run, run_as_shipped

# transformers warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("default")


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


def agreeing(file: Path, *arguments: str) -> tuple[Any, list[dict[str, Any]]]:
    """A demo's run and its figures, all of which keep their bounds."""
    result = demo(*arguments, "--out", str(file))
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert all(figure["ok"] for figure in figures)
    return result, figures


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_demo_agrees(tmp_path: Path) -> None:
    result, figures = agreeing(tmp_path / "figures.json")
    names = {figure["name"] for figure in figures}
    assert {
        "selection, same caches",
        "attention, plain rows",
        "attention, as shipped",
        "logits, same caches",
        "torch = JAX: out",
    } <= names
    told = result.output.splitlines()
    subjects = [line.split(":")[0] for line in told if ":" in line]
    assert subjects[:3] == ["model", "replaced", "text"]
    parts = deepseek_v32.PARTS + torch.cuda.is_available()
    assert subjects[3 : 4 + parts] == [*["now"] * parts, "Agrees"], "parts in words, where no bar is drawn"
    assert f"Agrees: {len(figures)} of {len(figures)} figures keep their bounds" in told
    assert re.search(r"([1-9]\d*) of \1 results identical bit for bit", result.output)
    [share] = re.findall(r"for (\d+)% with plain rows", result.output)
    assert int(share) >= 95, "random weights leave the best tokens nearly as likely: 124 of 128 on one GPU"
    assert "layer 0, prefill" not in result.output, "the table is for --details"


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
@pytest.mark.parametrize("mistake", [None, wrong_scale, wrong_selection])
def test_demo_notices_a_mistake(mistake: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer tokens, though more than are selected; without one it agrees there too."""
    monkeypatch.setattr(deepseek_v32, "PROMPT", 40)
    monkeypatch.setattr(shell, "DECODED", 2)
    if mistake is not None:
        monkeypatch.setattr(torch_api, "dsa_attention", mistake(torch_api.dsa_attention))
    result = demo(*(["--details"] if mistake is None else []))
    assert result.exit_code == (mistake is not None), result.output
    assert ("DISAGREES" in result.output) == (mistake is not None)
    # All figures by --details; of a run that disagrees the figures that do are shown at once.
    assert ("│ ok" in result.output) == (mistake is None) and "prefill" in result.output


def test_the_model_has_deepseeks_geometry() -> None:
    config = deepseek_v32.build("cpu").config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128)


def test_parity_notices_one_bit(device: str) -> None:
    """A result or a cache that differs from JAX's in its last bit."""
    run = deepseek_v32.run_replaced(deepseek_v32.build(device), torch.arange(14, device=device), 12)
    assert [figure["name"] for figure in deepseek_v32.parity(run) if not figure["ok"]] == []
    for name, tensor in (
        ("torch = JAX: lse", run.layers[0].steps[0][-1].results[1]),
        ("torch = JAX: cache bytes", run.layers[0].pools["mla"].pages),
        ("torch = JAX: cache bytes", run.layers[0].pools["indexer"].pages),
    ):
        first = tensor.view(torch.uint8).flatten()[:1]
        first ^= 1
        assert [figure["name"] for figure in deepseek_v32.parity(run) if not figure["ok"]] == [name]
        first ^= 1


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_v4_demo_agrees(tmp_path: Path) -> None:
    _, figures = agreeing(tmp_path / "figures.json", "--model", "deepseek_v4")
    names = {figure["name"] for figure in figures}
    assert {"attention, plain rows", "attention, as shipped", "attention, reference", "selection, as shipped",
            "torch = JAX: results", "torch = JAX: compressor entries", "entries, reference"} <= names  # fmt: skip


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
def few_tokens(device: str) -> tuple[Any, torch.Tensor, Run, Run]:
    """The model, a few tokens, most of which ratio 4 compresses, and both runs over them."""
    model, tokens = deepseek_v4.build(device), torch.arange(14, device=device)
    shipped = run_as_shipped(model, tokens, 12)
    return model, tokens, shipped, deepseek_v4.run_replaced(model, tokens, 12, packed=False, selected=shipped.indices)


def figures_of(run: Run, shipped: Run) -> list[dict[str, Any]]:
    return [*against_model(run, shipped, "plain rows", deepseek_v4.PLACES, deepseek_v4.BOUNDS)]


def with_mistake(op: str, mistake: Callable[..., Any]) -> Callable[..., Any]:
    """The op, called with arguments that `mistake` has changed."""
    right, names = getattr(torch_api, op), list(registry()[op].tensors)

    def wrong(*tensors: Any, **attrs: Any) -> Any:
        arguments = dict.fromkeys(names) | dict(zip(names, tensors, strict=False))
        mistake(arguments)
        return right(*arguments.values(), **attrs)

    return wrong


@pytest.mark.parametrize(
    ("op", "mistake"),
    [("sparse_mla", without_sink), ("sparse_mla", without_inverse_rope), ("sparse_mla", without_entries),
     ("compress_kv", wrong_place)],
)  # fmt: skip
def test_v4_demo_notices_a_mistake(
    op: str, mistake: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, shipped, right_run = few_tokens(device)
    assert all(figure["ok"] for figure in figures_of(right_run, shipped))
    monkeypatch.setattr(torch_api, op, with_mistake(op, mistake))
    wrong_run = deepseek_v4.run_replaced(model, tokens, 12, packed=False, selected=shipped.indices)
    assert not all(figure["ok"] for figure in figures_of(wrong_run, shipped))


def test_the_v4_model_has_deepseeks_geometry() -> None:
    config = deepseek_v4.build("cpu").config
    assert (config.head_dim, config.qk_rope_head_dim, config.index_head_dim) == (512, 64, 128)
    assert config.sliding_window == 128 and sorted(config.compress_rates.values()) == [4, 128]
    assert config.rope_parameters["compress"]["rope_type"] == "yarn"


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@kit.needs_glm
def test_glm_demo_agrees(tmp_path: Path) -> None:
    _, figures = agreeing(tmp_path / "figures.json", "--model", "glm5_next")
    places = {(figure["name"], figure["where"]) for figure in figures}
    assert places >= {
        ("selection, as shipped", "layer 1, full"), ("selection, reference", "layer 1, full"),
        ("attention, plain rows", "layer 2, shared, decode"), ("attention, as shipped", "layer 2, shared, decode"),
        ("keys, reference", "layer 1, full"), ("torch = JAX: results", "layer 2, shared, decode"),
        ("torch = JAX: keys", "layer 1, full"),
    }  # fmt: skip


def without_gates(arguments: dict[str, Any]) -> None:
    arguments["gates"] = torch.zeros_like(arguments["gates"])


def newest_last(arguments: dict[str, Any]) -> None:
    """One token more than there is: another pool is the incomplete one."""
    arguments["lengths"] = arguments["lengths"] + 1


def half_the_slots(arguments: dict[str, Any]) -> None:
    arguments["lengths"] = arguments["lengths"] // 2


@cache
def few_glm_tokens(device: str) -> tuple[Any, torch.Tensor, Run]:
    """The model, tokens of which most pools are left out, and the model's run over them."""
    model, tokens = glm5_next.build(device), torch.arange(47, device=device)
    return model, tokens, run_as_shipped(model, tokens, 45)


@kit.needs_glm
@pytest.mark.parametrize(
    ("op", "mistake"),
    [(None, None), ("pool_keys", without_gates), ("expand_blocks", newest_last), ("sparse_mla", half_the_slots)],
)
def test_glm_demo_notices_a_mistake(
    op: str | None, mistake: Callable[..., Any] | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, shipped = few_glm_tokens(device)
    if op is not None and mistake is not None:
        monkeypatch.setattr(torch_api, op, with_mistake(op, mistake))
    run = glm5_next.run_replaced(model, tokens, 45, packed=True)
    figures = [*against_model(run, shipped, "as shipped", glm5_next.PLACES, glm5_next.BOUNDS)]
    assert all(figure["ok"] for figure in figures) == (mistake is None), figures


@kit.needs_glm
def test_the_glm_model_has_its_geometry() -> None:
    config = glm5_next.build("cpu").config.get_text_config()
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim) == (512, 0, 128)
    assert config.index_kpool == 4 and config.index_kpool_always_select_tail


def train_little(
    monkeypatch: pytest.MonkeyPatch, device: str, tokens: int, warm_up: int, joint: int, *options: str
) -> Any:
    monkeypatch.setitem(curves.SIZES, device, curves.Sizes(2, tokens, 4, {WARM_UP: warm_up, JOINT: joint}))
    return demo("--train", *options)


@pytest.mark.slow
def test_training_agrees(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("figures.json", "curves.png")]
    result = train_little(monkeypatch, device, 12, 3, 2, "--out", str(files[0]), "--picture", str(files[1]))
    assert result.exit_code == 0, result.output
    figures = json.loads(files[0].read_text())
    found = {(figure["name"], figure["where"]) for figure in figures if figure["ok"]}
    assert len(found) == len(figures)
    assert found >= {
        ("second run, first 2 steps", "warm-up"), ("second run, first 2 steps", "joint"),
        ("gradient", "warm-up, indexer"), ("gradient", "joint, indexer"), ("gradient", "joint, rest"),
        ("curve of the loss", "joint"), ("curve of the KL", "warm-up"), ("curve of the KL", "joint"),
        ("selection", "layer 1, first step"), ("KL, last step / first", "warm-up"),
        ("overlap gained", "up to the end of warm-up"), ("overlap gained", "up to the end of joint"),
    }  # fmt: skip
    assert f"Agrees: {len(figures)} of {len(figures)} figures keep their bounds" in result.output.splitlines()
    assert files[1].read_bytes().startswith(b"\x89PNG")


class Larger(torch.autograd.Function):
    """A tensor whose gradient is too large by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.factor * gradient, None


def wrong_rows(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, cache, slots, **attrs: attend(q, Larger.apply(cache, 1.1), slots, **attrs)


def wrong_indexer(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, *others, **attrs: loss(q, Larger.apply(k, 1.5), *others, **attrs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "mistake", "where"),
    [("sparse_mla", wrong_rows, "joint, rest"), ("indexer_loss", wrong_indexer, "warm-up, indexer")],
)
def test_training_notices_a_wrong_gradient(
    op: str, mistake: Callable[..., Any], where: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step of a stage, and nothing is wrong with the rest."""
    monkeypatch.setattr(curves, "REPEATED", 1)
    monkeypatch.setattr(torch_api, op, mistake(getattr(torch_api, op)))
    result = train_little(monkeypatch, device, 8, 1, 1, "--out", str(tmp_path / "figures.json"))
    assert result.exit_code == 1 and "DISAGREES" in result.output, result.output
    wrong = {(f["name"], f["where"]) for f in json.loads((tmp_path / "figures.json").read_text()) if not f["ok"]}
    assert ("gradient", where) in wrong
    assert not {name for name, _ in wrong} & {"second run, first 1 steps", "selection"}


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--picture", "a.png"), "demo: --picture is given without --train, expected with it: it is of curves"),
     (("--train", "--model", "deepseek_v4"), "demo: --train of --model deepseek_v4, supported is deepseek_v32")],
)  # fmt: skip
def test_what_is_not_trained_is_refused(options: tuple[str, ...], message: str) -> None:
    assert str(demo(*options).exception) == message


def test_a_model_younger_than_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "5.17.0")
    message = "demo: transformers 5.17.0 is too old for glm5_next: pip install 'xmla-kernels[demo]'"
    assert str(demo("--model", "glm5_next").exception) == message


@pytest.mark.parametrize("model", [deepseek_v32, deepseek_v4], ids=lambda model: model.__name__)
def test_a_pass_as_shipped_warns_of_nothing(model: Any, device: str) -> None:
    """transformers renames arguments; the demo's story has no warnings of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        run = run_as_shipped(model.build(device), torch.arange(1, 9, device=device), 6)
    assert len(run.logits) == 8
