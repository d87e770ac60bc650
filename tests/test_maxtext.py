"""What stands in MaxText's place, called as MaxText calls it, without MaxText; tests/maxtext_layer runs its layer."""

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmla import ArgumentError, UnsupportedError, maxtext

BATCH, COUNT, HEADS, INDEXER_HEADS, DIM, LATENT, ROPE, TOPK = 2, 9, 3, 4, 32, 448, 64, 3
COEFF = 0.7
# Two documents and padding, the newest token of which is no token; and one document.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, -1], [1] * COUNT])
FOUR_TOKENS = 4 * COUNT * 4  # at a time; the last part is one token
# Roundings of probabilities and results to bfloat16.
ROUNDINGS = 2.0**-7
# Float32 roundings inside of a loss of order 1, a few of them.
LOSS = 2.0**-16

pytestmark = pytest.mark.usefixtures("device")


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (BATCH, COUNT, *shape)).astype(dtype)


@pytest.fixture
def op() -> Any:
    """MaxText's `AttentionOp`, as far as it is asked."""
    return SimpleNamespace(mesh=SimpleNamespace(size=1))


@pytest.fixture
def indexed() -> maxtext._Indexed:
    ranges = maxtext._ranges(jnp.asarray(SEGMENTS), BATCH, COUNT)
    q, k = normal(0, INDEXER_HEADS, DIM), normal(1, DIM)
    return maxtext._Indexed(q, k, normal(2, INDEXER_HEADS, dtype=jnp.float32) * DIM**-0.5, *ranges, TOPK)


@pytest.fixture
def attended() -> tuple[jax.Array, jax.Array]:
    """query and key."""
    return normal(3, HEADS, LATENT + ROPE) * 0.05, normal(4, 1, LATENT + ROPE)


def seen() -> np.ndarray:
    """[B, S, S]: MaxText's mask."""
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None]
    return same & (SEGMENTS[:, None] >= 0) & np.tri(COUNT, dtype=bool)


def scores(indexed: maxtext._Indexed) -> np.ndarray:
    """[B, S, S] float64, −inf where nothing is seen."""
    q, k, weights = (np.asarray(x, np.float64) for x in (indexed.q, indexed.k, indexed.weights))
    found = np.einsum("btis,bti->bts", np.maximum(np.einsum("btid,bsd->btis", q, k), 0), weights)
    return np.where(seen(), found, -math.inf)


def selected(scores: np.ndarray) -> np.ndarray:
    """[B, S, S]: the first TOPK of equals."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1)
    return (ranks < TOPK) & (scores > -math.inf)


def softmax(x: np.ndarray, where: np.ndarray) -> np.ndarray:
    x = np.where(where, x, -math.inf)
    grown = np.exp(x - np.where(where.any(-1), x.max(-1), 0)[..., None])
    return grown / np.maximum(grown.sum(-1, keepdims=True), 1e-300)


def probabilities(attended: tuple[jax.Array, jax.Array], where: np.ndarray) -> np.ndarray:
    """[B, H, S, S] over the keys `where`."""
    query, key = (np.asarray(x, np.float64) for x in attended)
    return softmax(np.einsum("bthd,bsd->bhts", query, key[:, :, 0]), where[:, None])


def test_attention_is_over_the_selected_keys(
    op: Any, indexed: maxtext._Indexed, attended: tuple[jax.Array, jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maxtext, "SCRATCH", FOUR_TOKENS)
    value = attended[1][..., :LATENT]
    got = maxtext._attention(lambda *_: pytest.fail("MaxText's own"))(op, *attended, value, indexer_mask=indexed)
    chosen = selected(scores(indexed))
    want = np.einsum("bhts,bsc->bthc", probabilities(attended, chosen), np.asarray(value[:, :, 0], np.float64))
    assert got.shape == (BATCH, COUNT, HEADS, LATENT) and (chosen.sum(-1) == TOPK).any()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=ROUNDINGS * np.abs(want).max())
    assert not got[0, -1].any()  # a token without keys


@pytest.mark.parametrize("sparse, scratch", [(True, maxtext.SCRATCH), (False, FOUR_TOKENS)])
def test_the_loss_is_maxtexts_formula(
    op: Any, indexed: maxtext._Indexed, attended: tuple[jax.Array, jax.Array], sparse: bool, scratch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(maxtext, "SCRATCH", scratch)
    layer = SimpleNamespace(attention_op=op)
    got = maxtext._calculate_indexer_loss(layer, indexed, *attended, None, indexed, sparse, COEFF)
    index = scores(indexed)
    keys = selected(index) if sparse else seen()
    target = probabilities(attended, keys).sum(1)
    target /= target.sum(-1, keepdims=True) + 1e-8
    apart = target * (np.log(target + 1e-8) - np.log(softmax(index, keys) + 1e-8))
    assert float(got) == pytest.approx(COEFF * apart.sum(-1).mean(), rel=LOSS)


def test_all_keys_are_selected_of_fewer_tokens_than_topk(
    op: Any, indexed: maxtext._Indexed, attended: tuple[jax.Array, jax.Array]
) -> None:
    indexed.topk = COUNT
    out = indexed.attend(op, *attended)[1]
    rows = np.asarray(attended[1][:, :, 0, :512], np.float64)
    want = np.einsum("bhts,bsc->bthc", probabilities(attended, seen()), rows)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=ROUNDINGS * np.abs(want).max())
    with pytest.raises(UnsupportedError, match=r"loss of 9 tokens with indexer_topk=9.*more tokens"):
        maxtext._calculate_indexer_loss(
            SimpleNamespace(attention_op=op), indexed, *attended, None, indexed, True, COEFF
        )


def test_a_tokens_keys_are_its_segments_up_to_itself() -> None:
    starts, ends = maxtext._ranges(jnp.asarray(SEGMENTS), BATCH, COUNT)
    keys = np.arange(COUNT)
    np.testing.assert_array_equal((starts[..., None] <= keys) & (keys < ends[..., None]), seen())
    starts, ends = maxtext._ranges(None, BATCH, COUNT)
    np.testing.assert_array_equal((starts[..., None] <= keys) & (keys < ends[..., None]), [np.tri(COUNT)] * BATCH)


SERVED = {name: values[0] for name, values in maxtext.SERVED.items()} | {
    "use_indexer": True, "num_query_heads": 128, "indexer_n_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "option, value",
    [
        ("use_mla_absorbed_mqa", False),
        ("dtype", jnp.dtype(jnp.float32)),
        ("indexer_head_dim", 48),
        ("indexer_mask_exact_topk", False),
        ("indexer_use_approx_top_k", True),
        ("attn_logits_soft_cap", 30.0),
        ("use_qk_clip", True),
        ("moba", True),
        ("use_batch_split_schedule", True),
        ("num_query_heads", 129),
        ("indexer_n_heads", 65),
        ("kv_lora_rank", 256),
        ("qk_rope_head_dim", 32),
    ],
)
def test_what_is_not_served_is_refused_by_name(option: str, value: Any) -> None:
    made = []

    def init(self: object, config: object) -> None:
        made.append(config)

    dense, served = SimpleNamespace(use_indexer=False), SimpleNamespace(**SERVED)
    refused = SimpleNamespace(config=SimpleNamespace(**SERVED | {option: value}))
    with pytest.raises(UnsupportedError, match=f"{option}={value} .*given, supported: "):
        maxtext._with_check(init)(None, refused.config)
    with pytest.raises(UnsupportedError, match=f"{option}={value} .*given, supported: "):
        maxtext._index(refused, *[normal(0, 4)] * 3)  # made before `install`
    for config in (dense, served):
        maxtext._with_check(init)(None, config)
    assert made == [dense, served]


def test_other_modes_than_training_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="model_mode=prefill is given, supported: train"):
        maxtext._index(None, *[normal(0, 4)] * 3, model_mode="prefill")


@pytest.mark.parametrize("over, name", [((None, "context", None), "length"), (("fsdp", None, "tensor"), "heads")])
def test_divided_tokens_or_heads_are_refused(over: tuple[str | None, ...], name: str) -> None:
    op = SimpleNamespace(mesh=SimpleNamespace(size=2), _logical_to_mesh_axes=lambda _: over)
    with pytest.raises(UnsupportedError, match=f"activation_{name} is divided over .*supported: activation_batch"):
        maxtext._on_each_device(op, lambda x: x, normal(0))


def test_gradients_of_keys_in_any_order(
    op: Any, indexed: maxtext._Indexed, attended: tuple[jax.Array, jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option that a second `install` sets; gradients agree with those in a fixed unit up to roundings."""
    monkeypatch.setattr(maxtext, "_options", dict(maxtext._options))
    monkeypatch.setattr(maxtext, "_originals", {(object, "a method"): len})
    attend, asked = maxtext.xj.sparse_mla, []

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return attend(*args, **options)

    monkeypatch.setattr(maxtext.xj, "sparse_mla", noted)

    def total(query: jax.Array, key: jax.Array) -> jax.Array:
        return (replace(indexed).attend(op, query, key)[1].astype(jnp.float32) ** 2).sum()

    found = []
    for deterministic in (False, True):
        maxtext.install(deterministic=deterministic)
        found.append(jax.grad(total, (0, 1))(*attended))
    assert asked == [False, True]
    for name, got, want in zip(("query", "key"), *found, strict=True):
        want = np.asarray(want, np.float64)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=ROUNDINGS * np.abs(want).max(), err_msg=name)


def test_a_machine_without_maxtext_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "maxtext.layers.attention_mla", None)
    with pytest.raises(UnsupportedError, match=r"no MaxText with sparse attention, such as 0\.2\.5"):
        maxtext.install()
    assert not maxtext._originals


def test_another_release_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def __call__(self, x: int) -> int:
            return x

        def calculate_indexer_loss(self, x: int) -> int:
            return x

    module, op = ModuleType("attention_mla"), ModuleType("attention_op")
    monkeypatch.setattr(module, "MLA", Layer, raising=False)
    monkeypatch.setattr(module, "Indexer", Layer, raising=False)
    monkeypatch.setattr(op, "AttentionOp", Layer, raising=False)
    monkeypatch.setitem(sys.modules, "maxtext", ModuleType("maxtext"))
    monkeypatch.setitem(sys.modules, "maxtext.layers", ModuleType("layers"))
    monkeypatch.setitem(sys.modules, "maxtext.layers.attention_mla", module)
    monkeypatch.setitem(sys.modules, "maxtext.layers.attention_op", op)
    own = dict(vars(Layer))
    with pytest.raises(UnsupportedError, match=r"Layer.calculate_indexer_loss takes self, x, supported: self, index"):
        maxtext.install()
    assert dict(vars(Layer)) == own and not maxtext._originals


def rows_of(indexed: maxtext._Indexed) -> np.ndarray:
    """[B, S, TOPK] int32: what the indexer selects, counted from each token's first key."""
    chosen = maxtext._select(indexed.q, indexed.k, indexed.weights, indexed.starts, indexed.ends, TOPK)
    return np.array(jnp.where(chosen < 0, -1, chosen - indexed.starts[..., None]))


def test_a_replayed_selection_is_attended_to(
    op: Any, indexed: maxtext._Indexed, attended: tuple[jax.Array, jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same one has the bits of the indexer's, loss included; another one its own keys."""
    layer = SimpleNamespace(attention_op=op)
    again, other = (replace(indexed, rows=jnp.asarray(rows_of(indexed))) for _ in range(2))
    monkeypatch.setattr(maxtext, "SCRATCH", FOUR_TOKENS)
    own = [
        *indexed.attend(op, *attended),
        maxtext._calculate_indexer_loss(layer, indexed, *attended, None, indexed, True, 1),
    ]
    newest = np.minimum(np.asarray(indexed.ends - indexed.starts)[..., None], TOPK)
    place, count = np.arange(TOPK), np.asarray(indexed.ends - indexed.starts)[..., None]
    other.rows = jnp.asarray(np.where(place < newest, count - newest + place, -1), jnp.int32)
    maxtext.check_selections({0: np.asarray(other.rows), 1: rows_of(indexed)}, SEGMENTS)
    monkeypatch.setattr(maxtext, "_select", lambda *_: pytest.fail("selected"))
    got = [*again.attend(op, *attended), maxtext._calculate_indexer_loss(layer, again, *attended, None, again, True, 1)]
    assert all(np.array_equal(*pair) for pair in zip(own, got, strict=True))
    keys = np.arange(COUNT)
    chosen = seen() & (keys > np.arange(COUNT)[:, None] - TOPK)
    want = np.einsum(
        "bhts,bsc->bthc", probabilities(attended, chosen), np.asarray(attended[1][:, :, 0, :512], np.float64)
    )
    for other.batch_invariant in (False, True):
        other.attended = None
        out = other.attend(op, *attended)[1]
        np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=ROUNDINGS * np.abs(want).max())


def test_selections_that_do_not_fit_are_refused(indexed: maxtext._Indexed, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(indexed)
    for place, key, told in (
        ((0, 5, 0), 1, "layer 3, sequence 0, token 5 has keys out of order, or twice"),
        ((0, 5, 1), 3, "token 5 has keys that it does not see: 2 keys up to 3, expected 2 below 2"),
        ((1, 7), -1, "sequence 1, token 7 has another number of keys: 0 keys up to -1, expected 3 below 8"),
    ):
        wrong = rows.copy()
        wrong[place] = key
        with pytest.raises(ArgumentError, match=f"selections: .*{told}"):
            maxtext.check_selections({3: wrong}, SEGMENTS)
    rows[1, -1] = -1  # the last token of a segment
    maxtext.check_selections({3: rows}, SEGMENTS)
    with pytest.raises(UnsupportedError, match=r"a replay needs xmla's layers"), maxtext.replay({3: rows}):
        pass
    monkeypatch.setitem(maxtext._originals, (int, "name"), int)
    told = "0 layers were traced, expected 1, as many as have some"
    with pytest.raises(ArgumentError, match=told), maxtext.replay({3: rows}):
        pass
    told = "given for 1 layers, expected those of each that selects"
    with pytest.raises(ArgumentError, match=told), maxtext.replay({3: rows}):
        assert maxtext._replay is not None
        assert maxtext._replay.next((BATCH, COUNT), TOPK) is rows
        maxtext._replay.next((BATCH, COUNT), TOPK)
    for shape, topk, told in (
        ((BATCH, 8), TOPK, r"layer 3 has \[batch, tokens\] \(2, 9\), expected \(2, 8\)"),
        ((BATCH, COUNT), 4, r"layer 3 has shape \(2, 9, 3\), expected \[batch, tokens, 4\]"),
    ):
        with pytest.raises(ArgumentError, match=told), maxtext.replay({3: rows}):
            assert maxtext._replay is not None
            maxtext._replay.next(shape, topk)
    with pytest.raises(UnsupportedError, match="a replay is open"), maxtext.replay({3: rows}), maxtext.replay({}):
        pass
