"""DeepSeek sparse attention of MaxText by xmla's ops, in training.

    xmla.maxtext.install()         once, before a step is traced
    with xmla.maxtext.replay(…):   around a forward pass that attends to a rollout's selections
    use_mla_absorbed_mqa=True      in MaxText's configuration, beside those of a model with an indexer

MaxText's layer hands its attention a mask of tokens by keys that its indexer made from scores of tokens by keys. Three
of its methods, by which these arrays are made and read, are replaced; projections, norms, rotation and the layer's own
`MLA.__call__` stay. In the place of mask and scores the layer carries an `_Indexed`, from which attention over the
selected keys and the indexer's loss follow. The contract is that of maxtext 0.2.5: layers/attention_mla.py and
layers/attention_op.py.

Axes: B sequences of S tokens, which are the keys too, H heads, I indexer heads, K = min(indexer_topk, S). A token sees
the keys [starts, ends) of its sequence: those of its segment up to itself.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from xmla._frameworks import missing, needed

if missing("jax"):
    raise ImportError(needed("jax"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from xmla import jax_api as xj
from xmla._selections import check_form, check_rows
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import KEY_DIMS, VALUE_DIMS

Array = jax.Array

# MaxText's options with which its layer computes something else, and the values that are served.
SERVED: dict[str, tuple[Any, ...]] = {
    "use_mla_absorbed_mqa": (True,),  # attention over latents, which xmla's is
    "dtype": (jnp.dtype(jnp.bfloat16),),
    "indexer_head_dim": INDEXER_DIMS,
    "indexer_mask_exact_topk": (True,),
    "indexer_use_approx_top_k": (False,),
    "attn_logits_soft_cap": (None, 0.0),
    "use_qk_clip": (False,),
    "moba": (False,),
    "use_batch_split_schedule": (False,),  # a layer of its own, without an indexer
}
MAX_HEADS = {"num_query_heads": 128, "indexer_n_heads": 64}
# Arrays of tokens by keys are made for as many tokens at a time as fit so many bytes, and at least one.
SCRATCH = 1 << 29

_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_options: dict[str, Any] = {"deterministic": True}  # options of every call of `sparse_mla` that has gradients


def install(*, deterministic: bool = True) -> None:
    """Let MaxText's layers with an indexer train by xmla. A second call changes the option alone.

    A step that was traced before keeps what it was traced with.

    Args:
        deterministic: False adds the gradients of attention's keys as they come, which is faster. They differ from run
            to run, within the bound of `sparse_mla`; all else keeps its bits.

    Raises:
        UnsupportedError: MaxText is not installed, or its layer's methods take other arguments than those of 0.2.5.
    """
    if _originals:
        _options["deterministic"] = deterministic
        return
    try:
        layers = import_module("maxtext.layers.attention_mla")
        attention_op = import_module("maxtext.layers.attention_op").AttentionOp
        replaced = {
            (layers.MLA, "__init__"): _with_check(layers.MLA.__init__),
            (layers.MLA, "calculate_indexer_loss"): _calculate_indexer_loss,
            (layers.Indexer, "__call__"): _index,
            (attention_op, "__call__"): _attention(attention_op.__call__),
        }
    except (ImportError, AttributeError) as error:
        message = f"xmla.maxtext: no MaxText with sparse attention, such as 0.2.5: {error}"
        raise UnsupportedError(message) from error
    for (owner, name), function in replaced.items():
        theirs, ours = inspect.signature(getattr(owner, name)), inspect.signature(function)
        if list(theirs.parameters) != list(ours.parameters):
            raise UnsupportedError(
                f"xmla.maxtext: {owner.__name__}.{name} takes {', '.join(theirs.parameters)}, "
                f"supported: {', '.join(ours.parameters)}, as in maxtext 0.2.5"
            )
    _options["deterministic"] = deterministic
    for (owner, name), function in replaced.items():
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, function)


def uninstall() -> None:
    """Give MaxText its own methods back. A step that was traced before keeps xmla's."""
    while _originals:
        (owner, name), function = _originals.popitem()
        setattr(owner, name, function)


def _with_check(init: Callable[..., None]) -> Callable[..., None]:
    """`MLA.__init__` for the configurations that are served, and for layers without an indexer."""

    @wraps(init)
    def checked(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.use_indexer:
            _check_config(config)
        init(self, config, *args, **kwargs)

    return checked


def _check_config(config: Any) -> None:
    """Check that the options of `config` have values that are served.

    Raises:
        UnsupportedError: One has another.
    """
    for name, served in SERVED.items():
        value = getattr(config, name)
        if value not in served:
            values = " or ".join(map(str, served))
            raise UnsupportedError(f"xmla.maxtext: {name}={value} is given, supported: {values}")
    for name, most in MAX_HEADS.items():
        if getattr(config, name) > most:
            raise UnsupportedError(f"xmla.maxtext: {name}={getattr(config, name)} is given, supported: at most {most}")
    latent, roped = config.kv_lora_rank, config.qk_rope_head_dim
    if latent > VALUE_DIMS or latent + roped not in KEY_DIMS:
        raise UnsupportedError(
            f"xmla.maxtext: kv_lora_rank={latent} and qk_rope_head_dim={roped} are given, supported: at most "
            f"{VALUE_DIMS}, together {' or '.join(map(str, KEY_DIMS))}"
        )


@dataclass(slots=True)
class _Indexed:
    """What MaxText's mask and scores follow from; attention too, which the loss asks for before the layer does."""

    q: Array  # [B, S, I, D]
    k: Array  # [B, S, D], dtype of q
    weights: Array  # [B, S, I] float32, with all factors of the scores
    starts: Array  # [B, S] int32
    ends: Array  # [B, S] int32
    topk: int
    rows: Array | None = None  # [B, S, topk] int32, a rollout's selection, counted from starts
    batch_invariant: bool = False
    attended: tuple[Array, Array, Array] | None = None

    def attend(self, op: Any, query: Array, key: Array) -> tuple[Array, Array, Array]:
        """The selected keys [B, S, K], and attention over them: out [B, S, H, 512] and lse [B, S, H]."""
        if self.attended is None:

            def attend(
                q: Array, k: Array, weights: Array, starts: Array, ends: Array, query: Array, key: Array, *rows: Array
            ) -> tuple[Array, Array, Array]:  # fmt: skip
                if rows:
                    chosen = jnp.where(rows[0] < 0, -1, rows[0] + starts[..., None])
                else:
                    chosen = _select(q, k, weights, starts, ends, self.topk)
                return chosen, *_attend(query, key, chosen, self.batch_invariant)

            indexer = jax.lax.stop_gradient((self.q, self.k, self.weights))
            rows = () if self.rows is None else (self.rows,)
            self.attended = _on_each_device(op, attend, *indexer, self.starts, self.ends, query, key, *rows)
        return self.attended


@dataclass(slots=True)
class _Replay:
    """A rollout's selections, in the order of their layers, and how many layers were traced with them."""

    layers: list[tuple[int, Any]]
    batch_invariant: bool
    traced: int = 0

    def next(self, shape: tuple[int, int], topk: int) -> Any:
        """Rows of the next layer that is traced."""
        self.traced += 1
        if self.traced > len(self.layers):
            raise ArgumentError(f"selections: given for {len(self.layers)} layers, expected those of each that selects")
        layer, rows = self.layers[self.traced - 1]
        check_form(layer, rows, topk, shape)
        return rows


_replay: _Replay | None = None  # while one is open


@contextmanager
def replay(layers: Mapping[int, Any], *, batch_invariant: bool = False) -> Generator[None, None, None]:
    """Have the layers that are traced while it is open attend to the keys that a rollout selected.

        def loss(parameters, batch, layers):
            with xmla.maxtext.replay(layers):
                …                               the model's forward pass

    Layers take the rows in their order, so that each is traced by itself: `scan_layers=False`. Values are not looked
    at; `check_selections` does so, before a step.

    Args:
        layers: Arrays [B, S, indexer_topk] int32 of each layer, by its number: a token's keys in ascending order,
            counted from the first that it sees, and −1 behind the last.
        batch_invariant: Attend as `sparse_mla` with `batch_invariant`, like an engine with VLLM_BATCH_INVARIANT=1.

    Raises:
        ArgumentError: Rows of another dtype or shape, or of more or fewer layers than were traced.
        UnsupportedError: Another replay is open; MaxText's own layers are installed.
    """
    global _replay
    if not _originals:
        raise UnsupportedError("xmla.maxtext: a replay needs xmla's layers; install them by xmla.maxtext.install()")
    if _replay is not None:
        raise UnsupportedError("xmla.maxtext: a replay is open, supported: one at a time")
    _replay = opened = _Replay(sorted(layers.items()), batch_invariant)
    try:
        yield
    finally:
        _replay = None
    if opened.traced != len(opened.layers):
        raise ArgumentError(
            f"selections: {opened.traced} layers were traced, expected {len(opened.layers)}, as many as have some; "
            "supported: scan_layers=False"
        )


def check_selections(layers: Mapping[int, Any], segments: Array | np.ndarray | None = None) -> None:
    """Check what `replay` takes, in the host's memory.

    Args:
        layers: As of `replay`, arrays of NumPy or JAX.
        segments: [B, S], the batch's decoder_segment_ids. Padding, and the last token of a segment, may have rows of −1
            alone, and attend to nothing.

    Raises:
        ArgumentError: A token has a key that it does not see, keys out of order, or too few.
    """
    for layer, array in layers.items():
        rows = np.asarray(array)
        check_form(layer, rows, rows.shape[-1])
        ids = None if segments is None else jnp.asarray(segments)
        starts, ends = (np.asarray(each) for each in _ranges(ids, *rows.shape[:2]))
        needed = np.zeros(starts.shape, bool)
        needed[:, :-1] = (starts[:, 1:] == starts[:, :-1]) & (ends[:, 1:] > starts[:, 1:])
        check_rows(layer, rows, ends - starts, needed)


def _index(
    self: Any, inputs_q: Array, low_rank_q: Array, inputs_kv: Array, inputs_positions: Array | None = None,
    attention_mask: Array | None = None, decoder_segment_ids: Array | None = None, previous_chunk: Any = None,
    kv_cache: Any = None, model_mode: str = "train",
) -> tuple[_Indexed, None, _Indexed]:  # fmt: skip
    """Stands for `Indexer.__call__`: its projections, and the ranges of keys that attention_mask tells.

    Args:
        inputs_q, inputs_kv: [B, S, EMBED], the same.
        low_rank_q: [B, S, Q_LORA].
        inputs_positions: [B, S].
        decoder_segment_ids: [B, S]. A segment is a run of equal ids, −1 a token without keys.
        attention_mask and the rest: Not read.

    Raises:
        UnsupportedError: model_mode is not "train"; an option is not served.
    """
    if model_mode != "train":
        raise UnsupportedError(f"xmla.maxtext: model_mode={model_mode} is given, supported: train")
    _check_config(self.config)  # the layer may have been made before `install`
    tokens, latents, keys = jax.lax.stop_gradient((inputs_q, low_rank_q, inputs_kv))
    batch, count, _ = tokens.shape
    q = self.wq_b(latents).reshape(batch, count, self.n_heads, self.head_dim)
    q = self.apply_partial_rope(q, inputs_positions=inputs_positions)
    k = self.k_norm(self.wk(keys))[:, :, None]
    k = self.apply_partial_rope(k, inputs_positions=inputs_positions)[:, :, 0]
    weights = self.weights_proj(tokens) * (self.n_heads**-0.5) * self.softmax_scale
    ranges = _ranges(decoder_segment_ids, batch, count)
    # MaxText's keys are float32 if its weights are.
    indexed = _Indexed(q, k.astype(q.dtype), weights.astype(jnp.float32), *ranges, self.indexer_topk)
    if _replay is not None:
        indexed.rows = _replay.next((batch, count), self.indexer_topk)
        indexed.batch_invariant = _replay.batch_invariant
    return indexed, None, indexed


def _calculate_indexer_loss(
    self: Any, indexer_score: _Indexed, query: Array, key: Array, attention_mask: Array | None,
    indexer_mask: _Indexed, sparse_loss: bool, scaling_factor: float,
) -> Array:  # fmt: skip
    """Stands for `MLA.calculate_indexer_loss`: the loss over the selected keys, or over all that a token sees.

        target[t]     = Σ_h softmax(query[t,h] · key)       over these keys, divided by its sum
        prediction[t] = softmax(scores[t])                  over the same keys
        loss          = scaling_factor · mean_t Σ target · (ln max(target, 1e-10) − ln prediction)

    Args:
        query: [B, S, H, L+E], scaled.
        key: [B, S, 1, L+E].
        attention_mask, indexer_mask: Not read.

    Returns:
        loss: [] float32, with gradients of the indexer's projections. Padding tokens are part of the mean.

    Raises:
        UnsupportedError: The indexer has nothing to learn, because it selects all S keys.
    """
    indexed, topk = indexer_score, indexer_score.topk
    if query.shape[1] <= topk:
        raise UnsupportedError(
            f"xmla.maxtext: an indexer's loss of {query.shape[1]} tokens with indexer_topk={topk} is asked for, "
            "supported: more tokens than indexer_topk"
        )

    def loss(
        q: Array, k: Array, weights: Array, starts: Array, ends: Array, query: Array, key: Array, indices: Array,
        lse: Array,
    ) -> Array:  # fmt: skip
        lse = lse if sparse_loss else _lse_of_ranges(query, key, starts, ends)
        first = _first_rows(*starts.shape)
        result, *_ = xj.indexer_loss(
            *map(_flat, (q, k, weights, query, key[:, :, 0], lse, ends + first, starts + first)),
            indices=_slots(indices) if sparse_loss else None, softmax_scale=1.0, coeff=float(scaling_factor),
        )  # fmt: skip
        return result

    indices, _, lse = indexed.attend(self.attention_op, query, key)
    arrays = indexed.q, indexed.k, indexed.weights, indexed.starts, indexed.ends
    constant = jax.lax.stop_gradient((query, key, indices, lse))
    return _on_each_device(self.attention_op, loss, *arrays, *constant).mean()


def _attention(call: Callable[..., Array]) -> Callable[..., Array]:
    """`AttentionOp.__call__`, but over the selected keys where it gets an `_Indexed`."""

    @wraps(call)
    def attention(self: Any, query: Array, key: Array, value: Array, *args: Any, **kwargs: Any) -> Array:
        indexed = kwargs.get("indexer_mask")
        if not isinstance(indexed, _Indexed):
            return call(self, query, key, value, *args, **kwargs)
        return indexed.attend(self, query, key)[1][..., : value.shape[-1]]

    return attention


def _on_each_device(op: Any, function: Callable[..., Any], *arrays: Array) -> Any:
    """`function` of arrays whose first axis is B, of each device's own sequences.

    Raises:
        UnsupportedError: Tokens of a sequence or heads are divided among devices.
    """
    if op.mesh.size == 1:
        return function(*arrays)
    axes = "activation_batch_attn", "activation_length", "activation_heads"
    batch, *others = op._logical_to_mesh_axes(axes)
    for name, over in zip(axes[1:], others, strict=True):
        if over is not None:
            raise UnsupportedError(f"xmla.maxtext: {name} is divided over {over}, supported: {axes[0]} alone")
    return jax.shard_map(function, mesh=op.mesh, in_specs=P(batch), out_specs=P(batch))(*arrays)


def _ranges(segments: Array | None, batch: int, count: int) -> tuple[Array, Array]:
    """The keys of each token, [starts, ends) of its sequence: [B, S] int32."""
    places = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    if segments is None:
        return jnp.zeros_like(places), places + 1
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = jax.lax.cummax(jnp.where(first, places, 0), axis=1)
    return starts, jnp.where(segments < 0, starts, places + 1)


def _flat(array: Array) -> Array:
    """[B, S, …] as [B·S, …]."""
    return array.reshape(-1, *array.shape[2:])


def _first_rows(batch: int, count: int) -> Array:
    """Where each sequence begins among the keys [B, S] flattened: [B, 1] int32."""
    return count * jnp.arange(batch, dtype=jnp.int32)[:, None]


def _slots(indices: Array) -> Array:
    """Rows [B·S, K] of flattened keys [B, S], from positions [B, S, K]. What is no position is no row."""
    return _flat(jnp.where(indices < 0, -1, indices + _first_rows(*indices.shape[:2])[..., None]))


def _of_sequences(function: Callable[..., Array], keys: Array, *arrays: Array) -> Array:
    """`function(keys[b], …)` of some tokens of one sequence at a time, one after the other; arrays are [B, S, …]."""
    count = arrays[0].shape[1]
    parts = -(-4 * count * keys.shape[1] // SCRATCH)
    step = -(-count // parts)

    def cut(array: Array) -> Array:  # a token that is added has no keys, and its results are dropped
        padded = jnp.pad(array, ((0, parts * step - count), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(parts, step, *array.shape[1:])

    def sequence(each: tuple[Array, ...]) -> Array:
        own_keys, *rest = each
        results = jax.lax.map(lambda part: function(own_keys, *part), tuple(map(cut, rest)))
        return results.reshape(parts * step, *results.shape[2:])[:count]

    return jax.lax.map(sequence, (keys, *arrays))


def _select(q: Array, k: Array, weights: Array, starts: Array, ends: Array, topk: int) -> Array:
    """[B, S, K] int32, positions among the keys of a sequence, ascending, −1 behind a token's last key."""
    count = q.shape[1]
    if count <= topk:
        places = starts[..., None] + jnp.arange(count, dtype=jnp.int32)
        return jnp.where(places < ends[..., None], places, -1)

    def select(k: Array, q: Array, weights: Array, starts: Array, ends: Array) -> Array:
        chosen = xj.select_topk(xj.indexer_scores(q, k, weights, ends, starts), ends, starts, k=topk)
        return jnp.where(chosen < 0, -1, chosen + starts[:, None])  # behind the start

    return _of_sequences(select, k, q, weights, starts, ends)


def _attend(query: Array, key: Array, indices: Array, batch_invariant: bool) -> tuple[Array, Array]:
    """out [B, S, H, 512] and lse [B, S, H]; queries are scaled."""
    out, lse = xj.sparse_mla(
        _flat(query), _flat(key), _slots(indices), softmax_scale=1.0, batch_invariant=batch_invariant, **_options
    )
    return out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])


def _lse_of_ranges(query: Array, key: Array, starts: Array, ends: Array) -> Array:
    """Attention's lse [B, S, H] over all keys that a token sees."""

    def attend(rows: Array, query: Array, starts: Array, ends: Array) -> Array:
        slots = starts[:, None] + jnp.arange(len(rows), dtype=jnp.int32)
        return xj.sparse_mla(query, rows, slots, ends - starts, softmax_scale=1.0)[1]

    return _of_sequences(attend, key, query, starts, ends)
