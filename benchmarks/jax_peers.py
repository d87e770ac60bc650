"""What else computes sparse attention in JAX on a GPU, beside xmla on the same arrays, in one run.

    python -m benchmarks.jax_peers --out benchmarks/results/h200/jax_peers.jsonl

- attention over selected rows as it is written in `jax.numpy`, a gather and a softmax, and its derivative;
- tokamax's `sparse_mla` and `lightning_indexer`, whose implementations for a GPU are XLA's;
- jax-linear-attention's `index_topk`, in Mosaic for Hopper, beside `indexer_scores` and `select_topk`, and the
  derivative of the indexer's loss at given targets, beside `indexer_loss`. Its attention takes no rows of 576 dims.

Times are of the GPU, medians of rounds in turns. A peer that is not installed or fails has its reason instead.
"""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from xmla import jax_api as xj
from xmla.bench.provenance import provenance
from xmla.bench.run import in_one_line
from xmla.bench.timing_jax import queued

ROUNDS = 5
CALLS = 16  # in a program of decodes
SCALE = 576**-0.5
PAGE = 64
Array = Any


@dataclass(frozen=True)
class Peer:
    """A function of arrays and another that computes the same; `agree` compares their results.

    A program makes `calls` of them, so that the host is ahead of the GPU.
    """

    case: str
    calls: int
    name: str
    ours: Callable[..., Any]
    arrays: tuple[Array, ...]
    theirs: Callable[..., Any]
    their_arrays: tuple[Array, ...]
    agree: Callable[[Any, Any], float] | None = None


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def distance(ours: Array, theirs: Array) -> float:
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def other_keys(ours: Array, theirs: Array) -> float:
    """The share of selected keys that the other has not."""
    pairs = zip(np.asarray(ours), np.asarray(theirs), strict=True)
    shares = [1 - len(np.intersect1d(a[a >= 0], b[b >= 0])) / max((a >= 0).sum(), 1) for a, b in pairs]
    return float(np.mean(shares))


def gathered(q: Array, rows: Array, slots: Array) -> Array:
    """Attention over selected rows [N, 576], in `jax.numpy`."""
    keys = rows[slots]
    scores = jnp.einsum("thd,tkd->thk", q, keys, preferred_element_type=jnp.float32) * SCALE
    return jnp.einsum("thk,tkd->thd", jax.nn.softmax(scores).astype(q.dtype), keys[..., :512])


def rows_gradient(attend: Callable[..., Array]) -> Callable[..., Array]:
    """The gradient of the rows, and of the queries with it, of a sum of squares of attention's results."""

    def loss(q: Array, rows: Array, slots: Array) -> Array:
        return (attend(q, rows, slots).astype(jnp.float32) ** 2).sum()

    def gradients(q: Array, rows: Array, slots: Array) -> Array:
        dq, drows = jax.grad(loss, (0, 1))(q, rows, slots)
        return jnp.concatenate([drows, dq[:, 0]])

    return gradients


def by_xmla(q: Array, rows: Array, slots: Array) -> Array:
    return xj.sparse_mla(q, rows[:, None], slots, softmax_scale=SCALE)[0]


def by_gather() -> Iterator[Peer]:
    rng = np.random.default_rng(0)
    for tokens, keys in ((64, 32768), (1024, 32768)):
        q, rows = normal(rng, tokens, 128, 576), normal(rng, keys, 576)
        slots = jnp.asarray(np.stack([rng.permutation(keys)[:2048] for _ in range(tokens)]), jnp.int32)
        yield Peer(
            f"attention, {tokens} tokens of 128 heads, 2048 of {keys} bf16 rows",
            CALLS if tokens < 1024 else 1, "gather and softmax in jax.numpy",
            by_xmla, (q, rows, slots), gathered, (q, rows, slots), distance,
        )  # fmt: skip
        yield Peer(
            f"attention and its derivative, {tokens} tokens of 128 heads, 2048 of {keys} bf16 rows",
            1, "gather and softmax in jax.numpy",
            rows_gradient(by_xmla), (q, rows, slots), rows_gradient(gathered), (q, rows, slots), distance,
        )  # fmt: skip


def bytes_of_values(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Bytes none of which is a NaN in e4m3."""
    return (rng.integers(0, 0x70, shape) | (rng.integers(0, 2, shape) << 7)).astype(np.uint8)


def by_tokamax() -> Iterator[Peer]:
    from tokamax._src.ops.lightning_indexer.reference import lightning_indexer
    from tokamax._src.ops.sparse_mla.reference import sparse_ragged_paged_attention

    rng = np.random.default_rng(0)
    keys, k, heads = 32768, 512, 128
    for requests in (1, 8):
        pages = requests * keys // PAGE
        table = jnp.asarray(rng.permutation(pages).reshape(requests, -1), jnp.int32)
        starts = jnp.arange(requests + 1, dtype=jnp.int32)
        decodes = jnp.full(3, requests, jnp.int32)
        indices = np.stack([rng.permutation(keys)[:k] for _ in range(requests)]).astype(np.int32)
        q = normal(rng, requests, heads, 512)
        cache = jnp.asarray(bytes_of_values(rng, pages, PAGE, 584))
        slots = jnp.asarray(np.take_along_axis(np.asarray(table), indices // PAGE, 1) * PAGE + indices % PAGE)
        nope = jnp.asarray(rng.integers(0, 1 << 28, (pages, PAGE, 128)), jnp.int32)
        rope = jnp.asarray(rng.integers(0, 1 << 28, (pages, PAGE // 4, 128)), jnp.int32)
        none = jnp.zeros((requests, heads), jnp.float32)
        yield Peer(
            f"attention, {requests} decodes of {heads} heads, {k} of {keys} entries of V4, each by its own bytes",
            CALLS,
            "tokamax sparse_mla (XLA)",
            lambda q, cache, slots: xj.sparse_mla(q, cache, slots, softmax_scale=SCALE)[0], (q, cache, slots),
            lambda *a: sparse_ragged_paged_attention(*a, sm_scale=SCALE),
            (q, nope, rope, jnp.asarray(indices), table.reshape(-1), starts, decodes, none[0],
             jnp.zeros((requests, heads, 512), jnp.float32), none, none - 1e9),
        )  # fmt: skip
        index_q, weights = normal(rng, requests, 64, 128), normal(rng, requests, 64, dtype=jnp.float32)
        q8, scaled = xj.quantize_indexer_query(index_q, weights)
        index_keys = bytes_of_values(rng, pages, PAGE // 4, 4, 256)
        lengths = jnp.full(requests, keys, jnp.int32)
        ours = np.concatenate(
            [
                index_keys[..., :128].reshape(pages, -1),
                np.ones((pages, PAGE), np.float32).view(np.uint8).reshape(pages, -1),
            ],
            1,
        )
        yield Peer(
            f"logits and selection, {requests} decodes, 2048 of {keys} keys",
            CALLS, "tokamax lightning_indexer (XLA)",
            lambda q8, scaled, cache, table, lengths: xj.indexer_topk_paged(
                q8, scaled, cache, table, lengths, k=2048
            ),
            (q8, scaled, jnp.asarray(ours.reshape(pages, PAGE, 132)), table, lengths),
            lambda *a: lightning_indexer(*a, k=2048),
            (q8, scaled, jnp.asarray(np.where(np.arange(256) == 128, 127, index_keys).astype(np.uint8)), lengths,
             table.reshape(-1), starts, decodes),
            other_keys,
        )  # fmt: skip


def selection_and_target(rng: np.random.Generator, tokens: int, k: int) -> tuple[Array, Array]:
    """Keys of causal tokens [T, k] int32, −1 at the end, and a probability of each."""
    counts = np.minimum(np.arange(1, tokens + 1), k)
    first = np.arange(1, tokens + 1) - counts
    column = np.arange(k)
    indices = np.where(column < counts[:, None], first[:, None] + column, -1).astype(np.int32)
    target = np.where(indices >= 0, rng.random((tokens, k), np.float32), 0)
    return jnp.asarray(indices), jnp.asarray(target / target.sum(1, keepdims=True))


def loss_gradient(scores_of: Callable[..., Array]) -> Callable[..., Array]:
    """The queries' gradient, with those of keys and weights, of the loss of scores [T, k] that a function gives."""

    def gradients(q: Array, keys: Array, weights: Array, indices: Array, target: Array, values: Array) -> Array:
        def loss(q: Array, keys: Array, weights: Array) -> Array:
            chosen = jnp.where(indices >= 0, scores_of(q, keys, weights, indices, values), -jnp.inf)
            logs = jnp.where(indices >= 0, jax.nn.log_softmax(chosen), 0)
            return -(target * logs).sum() / len(q)

        dq, dkeys, dweights = jax.grad(loss, (0, 1, 2))(q, keys, weights)
        # So that XLA computes all three.
        return dq + 0 * (dkeys.sum() + dweights.sum()).astype(dq.dtype)

    return gradients


def by_jax_linear_attention() -> Iterator[Peer]:
    from jla.ops.mosaic_gpu.dsa import index_topk, selected_index_scores

    rng = np.random.default_rng(0)
    heads, k = 64, 2048
    for tokens in (4096, 16384):  # of which it compiles the second for minutes
        q, keys = normal(rng, tokens, heads, 128), normal(rng, tokens, 128)
        weights = normal(rng, tokens, heads, dtype=jnp.float32)
        ends = jnp.arange(1, tokens + 1, dtype=jnp.int32)

        def ours(q: Array, keys: Array, weights: Array, ends: Array) -> Array:
            return xj.select_topk(xj.indexer_scores(q, keys, weights, ends), ends, k=k)

        yield Peer(
            f"scores and selection, {tokens} causal tokens, 64 heads, {k} keys",
            1, "jax-linear-attention index_topk",
            ours, (q, keys, weights, ends),
            lambda q, keys, weights: index_topk(q, keys, weights, k, scale=1.0, method="radix")[0],
            (q[None], keys[None], weights[None]), other_keys,
        )  # fmt: skip
        indices, target = selection_and_target(rng, tokens, k)
        scores = xj.indexer_scores(q, keys, weights, indices=indices)
        yield Peer(
            f"the indexer's loss and its derivative, {tokens} causal tokens, 64 heads, {k} keys, of given targets",
            1, "jax-linear-attention selected_index_scores",
            lambda q, keys, weights, indices, target: xj.indexer_loss(
                q, keys, weights, indices=indices, target=target
            )[1],
            (q, keys, weights, indices, target),
            loss_gradient(
                lambda q, keys, weights, indices, scores: selected_index_scores(
                    q[None], keys[None], weights[None], indices[None], scores[None], indices[None] >= 0, scale=1.0
                )[0]
            ),
            (q, keys, weights, indices, target, scores), distance,
        )  # fmt: skip


KINDS = {"gather": by_gather, "tokamax": by_tokamax, "jax-linear-attention": by_jax_linear_attention}


def program(function: Callable[..., Any], arrays: Sequence[Array], calls: int) -> Callable[[], Any]:
    """A function that starts so many calls in one program, which share their largest array, the cache, alone.

    XLA makes once what several calls compute of the same arrays, such as the gathering of keys.
    """
    largest = max(range(len(arrays)), key=lambda place: arrays[place].nbytes)
    own = [[a if i == largest else jnp.array(a, copy=True) for i, a in enumerate(arrays)] for _ in range(calls)]
    jitted = jax.jit(lambda own: [function(*arrays) for arrays in own])
    return lambda: jitted(own)


def timed(peer: Peer) -> dict[str, Any]:
    programs = [program(peer.ours, peer.arrays, peer.calls), program(peer.theirs, peer.their_arrays, peer.calls)]
    results = [jax.block_until_ready(start())[0] for start in programs]
    measured = {} if peer.agree is None else {"difference": peer.agree(*results)}
    measures = [queued(start, 500.0) for start in programs]
    rounds = [[measure() / peer.calls for measure in measures] for _ in range(ROUNDS)]
    ours, theirs = map(statistics.median, zip(*rounds, strict=True))
    return measured | {
        "us": {"xmla": round(ours, 2), peer.name: round(theirs, 2)},
        "ratio_to_peer": {peer.name: round(theirs / ours, 3)},
    }


def lines(kinds: list[str]) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        try:
            for peer in KINDS[kind]():
                try:
                    yield {"case": peer.case} | timed(peer)
                except Exception as failure:  # a peer's own
                    yield {"case": peer.case, "failed_peers": {peer.name: in_one_line(failure)}}
        except ImportError as failure:
            yield {"case": kind, "failed_peers": {kind: in_one_line(failure)}}


def main(
    out: Annotated[Path, typer.Option(help="Append to this file.")],
    peers: Annotated[str, typer.Option(help="Of gather, tokamax and jax-linear-attention.")] = ",".join(KINDS),
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
) -> None:
    """Append a line of provenance and one a case, and print them."""
    head = provenance(shlex.join(["python", "-m", "benchmarks.jax_peers", *sys.argv[1:]]), commit)
    with out.open("a") as file:
        file.write(json.dumps(head) + "\n")
        for line in lines(peers.split(",")):
            print(json.dumps(line, ensure_ascii=False), flush=True)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()


if __name__ == "__main__":
    typer.run(main)
