"""The demo's model in Flax NNX: transformers' tokens, one program for all steps, its training, no PyTorch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from started import run, short_demo
from test_demo import demo

from xmla import jax_api as xj
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.demo import curves, deepseek_v32, trained
from xmla.demo.curves import JOINT, WARM_UP, against_shipped, texts_of
from xmla.demo.in_jax import decoding, training
from xmla.demo.in_jax.model import Config, Model, load, rope_angles
from xmla.demo.in_jax.serving import PAGE_SIZE, Caches, Requests, decode, prefill
from xmla.demo.passes import run_as_shipped

# transformers warns of its own deprecations.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("device")]

PROMPT = 11


def weights_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.float().cpu().numpy() for name, value in module.state_dict().items()}


def test_tokens_are_those_of_transformers_and_of_the_torch_demo(device: str) -> None:
    """Greedy ones of one request, from the weights of the demo's model; others only where the two best all but tie."""
    shipped = deepseek_v32.build(device, index_topk=8)
    model = load(shipped.config.to_dict(), weights_of(shipped))
    prompt = np.arange(3, 3 + PROMPT, dtype=np.int32)
    start = jnp.array([64], jnp.int32), jnp.zeros(1), jax.random.key(0)
    first, *rest = prefill(model, prompt[None], Caches.empty(model.config, 1, 64), *start)
    tokens, *_ = decode(model, *rest, jax.random.split(jax.random.key(1), 5))
    text = torch.tensor([*prompt, *first, *tokens[0]], dtype=torch.long, device=device)
    for compute in (run_as_shipped, deepseek_v32.run_replaced):
        best = compute(shipped, text, PROMPT).logits[PROMPT - 1 : -1].float().topk(2)
        same = best.indices[:, 0] == text[PROMPT:]
        tied = best.values[:, 0] - best.values[:, 1] < 0.1  # a sixth of the logits' standard deviation
        assert (same | tied).all() and same.sum() >= 3, (best, text)


@cache
@pytest.mark.parametrize("position", [1, 2046, 32767])
def test_angles_are_those_of_transformers(position: int, device: str) -> None:
    shipped = deepseek_v32.build(device).model.rotary_emb
    ours = rope_angles(jnp.array([position]), 64, shipped.config.rope_parameters["rope_theta"])
    theirs = shipped(torch.zeros(1, device=device), torch.tensor([[position]], device=device))
    for mine, each in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine[0], each[0, 0, :32].cpu(), atol=2**-24 * position + 1e-6)


@cache
def small() -> Model:
    return Model(Config(index_topk=8), nnx.Rngs(0))


def begin(end: int = 64, eos: int = -1) -> tuple[jax.Array, Requests, Caches]:
    """Three requests, the last of which is none, after their prefill; `end` is the first one's."""
    return jax.tree.map(jnp.copy, _begun(end, eos))  # steps consume the caches


@cache
def _begun(end: int, eos: int) -> tuple[jax.Array, Requests, Caches]:
    prompts = np.full((3, PROMPT), -1, np.int32)
    prompts[0], prompts[1, :4] = np.arange(PROMPT), np.arange(4) + 40
    ends, temperature = jnp.array([end, 64, 64], jnp.int32), jnp.array([0.0, 1.0, 0.0])
    return prefill(small(), prompts, Caches.empty(small().config, 3, 64), ends, temperature, jax.random.key(2), eos=eos)


KEYS = jax.random.split(jax.random.key(3), 4)


def bits(caches: Caches) -> list[np.ndarray]:
    return [np.asarray(pool) for pool in (caches.mla, caches.indexer)]


def test_steps_in_one_program_are_those_one_by_one() -> None:
    """Tokens, what would decode next, and both caches; drawn tokens too."""
    _, *rest = begin()
    tokens, *after = decode(small(), *rest, KEYS)
    _, *rest = begin()
    for step in range(len(KEYS)):
        token, *rest = decode(small(), *rest, KEYS[step : step + 1])
        assert (token[:, 0] == tokens[:, step]).all()
    jax.tree.map(np.testing.assert_array_equal, after, rest)
    assert (tokens[:2] >= 0).all() and (tokens[2] == -1).all()


@pytest.mark.parametrize("how", ["length", "eos"])
def test_an_ended_request_writes_nothing_while_others_go_on(how: str) -> None:
    _, *rest = begin()
    tokens, *_ = decode(small(), *rest, KEYS)
    eos = int(tokens[0, 1]) if how == "eos" else -1
    kept = np.asarray(tokens).copy()
    for row in kept:  # what comes after a token that ends a request
        if (ends := np.flatnonzero(row == eos)).size and eos >= 0:
            row[ends[0] + 1 :] = -1
    if how == "length":
        kept[0, 2:] = -1
    options: dict[str, Any] = {"eos": eos} if how == "eos" else {}
    _, *rest = begin(end=64 if how == "eos" else PROMPT + 3, **options)
    _, *rest = decode(small(), *rest, KEYS[:2], **options)
    assert rest[0].position[0] == -1 and rest[0].position[1] >= 0
    own, before = np.asarray(rest[1].block_table[0]), bits(rest[1])
    more, _, caches = decode(small(), *rest, KEYS[2:], **options)
    assert (np.asarray(more) == kept[:, 2:]).all() and (more[1] >= 0).any()
    layers = np.arange(small().config.num_hidden_layers)[:, None] * caches.block_table.size
    pages = (layers + own).ravel()
    for pool, earlier in zip(bits(caches), before, strict=True):
        assert (pool[pages] == earlier[pages]).all(), "the ended request's"
        assert (pool != earlier).any()


def test_a_request_ends_with_its_pages() -> None:
    _, requests, _ = begin(end=1000)
    assert requests.end.tolist() == [64, 64, 64]
    last = replace(requests, position=jnp.array([62, 4, -1], jnp.int32))
    _, after, _ = decode(small(), last, begin()[2], KEYS[:1])
    assert after.position.tolist() == [-1, 5, -1]


@pytest.mark.slow
def test_training_is_that_of_transformers(device: str) -> None:
    """Its gradients, curves and selection, from its weights, at the bounds of `xmla demo --train`."""
    sizes = curves.Sizes(2, 8, 3, {WARM_UP: 2, JOINT: 2})
    shipped, rounded = (trained.build_sharp(device, sizes.topk) for _ in range(2))
    model = load(shipped.config.to_dict(), weights_of(shipped), dtype=jnp.float32)
    by_torch = partial(trained.train, batch=torch.tensor(texts_of(sizes), device=device))
    figures = []
    for stage, steps in sizes.steps.items():
        ours = training.train(model, stage, steps, batch=texts_of(sizes))
        ours.gradients = dict(in_one(ours.gradients))
        # As shipped it attends to the keys that JAX selected: trainings that each select their own part at the first
        # two that all but tie.
        exact, half = by_torch(shipped, stage, steps, over=ours), by_torch(rounded, stage, steps, over=ours, half=True)
        assert set(exact.gradients) == set(ours.gradients)
        figures += against_shipped(stage, ours, exact, half)
    assert all(figure["ok"] for figure in figures), figures


@pytest.mark.slow
def test_training_at_a_rollouts_selection(device: str) -> None:
    """Its keys are those that decoding steps selected over the caches; its own selection given back has its bits."""
    model = Model(Config(index_topk=3, dtype=jnp.float32), nnx.Rngs(0))
    batch = jax.random.randint(jax.random.key(3), (2, 9), 0, 256)
    tokens, texts = batch[:, :-1], len(batch)
    caches, found = Caches.empty(model.config, texts, tokens.shape[1]), []
    pages, table = len(caches.mla) // model.config.num_hidden_layers, caches.block_table
    firsts = jnp.arange(model.config.num_hidden_layers, dtype=jnp.int32) * pages
    for first, last in ((0, 5), (5, 6), (6, 8)):
        positions = jnp.broadcast_to(jnp.arange(first, last, dtype=jnp.int32), (texts, last - first)).reshape(-1)
        slots = xj.map_slots(positions.reshape(texts, -1), table, page_size=PAGE_SIZE)[0].reshape(-1)

        def attend(
            pools: tuple[jax.Array, jax.Array], start: Any, p: Any, slots: Any = slots, positions: Any = positions
        ) -> Any:
            out, _, indices, *written = xj.dsa_step(
                p.latent, p.k_rope, p.index_k, slots + start * PAGE_SIZE, p.query.astype(jnp.bfloat16), p.index_q,
                p.index_weights, *pools, table + start, positions + 1, k=model.config.index_topk,
                softmax_scale=model.config.softmax_scale,
            )  # fmt: skip
            return out, (tuple(written), indices)

        pools = caches.mla, caches.indexer
        _, pools, indices = model(tokens[:, first:last].reshape(-1), positions, attend, pools, firsts)
        caches = replace(caches, mla=pools[0], indexer=pools[1])
        found.append(indices.reshape(len(firsts), texts, last - first, -1))
    rollout = jnp.concatenate(found, axis=2).reshape(len(firsts), tokens.size, -1)

    def step(selected: Any) -> Any:
        attention = partial(training.attend, model.config, texts, False)
        loss = partial(training.loss_of, batch=batch, attend=attention, selected=selected)
        return nnx.grad(loss, has_aux=True)(model)

    own, replayed = step(None), step(rollout)
    again = step(own[1][1].selected)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(replayed[1][1].selected, rollout)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(replayed), strict=True))


def in_one(gradients: dict[str, np.ndarray]) -> Any:
    """The gradients by transformers' names: its kv_b_proj has both up-projections."""
    for name, gradient in gradients.items():
        if name.endswith(".up_key"):
            both = np.concatenate([gradient, gradients[name.replace("up_key", "up_value")]], axis=1)
            yield name.replace("up_key", "kv_b_proj.weight"), both.reshape(-1, both.shape[-1])
        elif not name.endswith(".up_value"):
            yield name, gradient


def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo on fewer tokens."""
    monkeypatch.setattr(decoding, "PROMPTS", (36, 9, 4))
    monkeypatch.setattr(decoding, "DECODED", 4)


def agreeing(folder: Path, changes: Sequence[str], *options: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What a demo tells where PyTorch and transformers are not installed, and its figures, which keep their bounds."""
    words = ("-c", short_demo(*changes), "demo", "--framework", "jax", "--out", "figures.json", *options)
    done = run(folder, *words, without="torch transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((folder / "figures.json").read_text())
    assert all(figure["ok"] for figure in figures)
    return done.stdout.splitlines(), figures


@pytest.mark.slow
def test_demo_agrees(tmp_path: Path) -> None:
    decoding = "from xmla.demo.in_jax import decoding"
    told, figures = agreeing(tmp_path, [decoding, "decoding.PROMPTS, decoding.DECODED = (36, 9, 4), 4"])
    assert {(figure["name"], figure["where"]) for figure in figures} == {
        ("decode, tokens", ""), ("logits, same step", "prefill"), ("logits, same step", "decode"),
        ("logits, dense", "prefill"), ("logits, dense", "decode"),
    }  # fmt: skip
    assert f"Agrees: {len(figures)} of {len(figures)} figures keep their bounds" in told
    subjects = [line.split(":")[0] for line in told if ":" in line]
    assert subjects[:3] == ["model", "by xmla", "text"] and subjects[-2:] == [
        "decoded",
        "Every figure beside its bound",
    ]


def wrong_scale(step: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: jax.Array, softmax_scale: float, implementation: str | None, **attrs: Any) -> Any:
        wrong = softmax_scale if implementation == "reference" else softmax_scale * 1.5
        return step(*arrays, softmax_scale=wrong, implementation=implementation, **attrs)

    return call


def another_layers_pages(step: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: jax.Array, implementation: str | None, **attrs: Any) -> Any:
        table = 9 if implementation is None else None  # of block_table
        moved = [array - array.size if place == table else array for place, array in enumerate(arrays)]
        return step(*moved, implementation=implementation, **attrs)

    return call


@pytest.mark.parametrize("mistake", [wrong_scale, another_layers_pages])
def test_demo_notices_a_mistake(mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch)
    jax.clear_caches()  # of the steps that were traced without it
    monkeypatch.setattr(xj, "dsa_step", mistake(xj.dsa_step))
    result = demo("--framework", "jax")
    jax.clear_caches()
    assert result.exit_code == 1 and "DISAGREES" in result.output, result.output


@pytest.mark.slow
def test_training_demo_agrees(tmp_path: Path) -> None:
    """The loss of its last step is lower than that of the first, too."""
    sizes = "curves.Sizes(2, 8, 3, {curves.WARM_UP: 3, curves.JOINT: 2})"
    changes = ["from xmla.demo import curves", f"curves.SIZES['cpu'] = curves.SIZES['cuda'] = {sizes}"]
    told, figures = agreeing(tmp_path, changes, "--train", "--picture", "curves.png")
    places = {(figure["name"], figure["where"]) for figure in figures}
    assert {
        ("gradient", "joint, rest"),
        ("second run, first 2 steps", "joint"),
        ("KL, last step / first", "warm-up"),
    } <= places
    first, last = next(line for line in told if line.startswith("joint")).split()[7:10:2]
    assert float(last.strip(",")) < float(first)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 1},
         "load: first_k_dense_replace is 1 of 2 layers, supported is a dense MLP in every layer"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "load: rope_type is yarn, supported is default"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused(changes: dict[str, Any], message: str) -> None:
    settings = {
        "first_k_dense_replace": 2, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default"}, **changes
    }  # fmt: skip
    with pytest.raises(UnsupportedError) as refused:
        load(settings, {})
    assert str(refused.value) == message


def test_a_prompt_that_its_pages_do_not_hold_is_refused() -> None:
    caches, settings = Caches.empty(small().config, 1, 64), (jnp.array([70]), jnp.zeros(1), jax.random.key(0))
    with pytest.raises(ArgumentError) as refused:
        prefill(small(), jnp.zeros((1, 65), jnp.int32), caches, *settings)
    assert str(refused.value) == "prefill: prompts has 65 tokens of a request, expected at most 64: its pages"


def test_a_model_that_is_not_in_flax_is_refused() -> None:
    message = "demo: --framework jax of --model deepseek_v4, supported is deepseek_v32"
    assert str(demo("--framework", "jax", "--model", "deepseek_v4").exception) == message
