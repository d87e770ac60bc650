"""Several GPUs in JAX: context parallel over pages, tensor parallel over heads, with JAX's shardings and collectives.

`ContextParallel` is used inside `jax.shard_map`, where each device sees its own pools and block table.
`tensor_parallel_attention` takes whole arrays, with any NamedSharding under `jit` or without one. Arrays that are
already sharded over tokens or heads need neither: `jit` of the ops themselves keeps their sharding.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xmla import jax_api
from xmla.core.errors import ArgumentError
from xmla.core.parallel import LOGITS_BYTES, Ownership, check_rows, heads_of, parts, query_format


class Batch(NamedTuple):
    """The requests of a step on one rank: built once per step, used by every layer."""

    block_table: jax.Array  # [B, M] i32, negative if another rank owns the page
    own_table: jax.Array  # [B, ·] i32, only the pages of this rank
    own_lengths: jax.Array  # [T] i32, keys of this rank visible to each token
    request_ids: jax.Array | None  # [T] i32


@dataclass(frozen=True)
class ContextParallel:
    """Sparse attention over requests whose pages are divided over the devices of a mesh axis.

    Inside `jax.shard_map` every device has the queries of all tokens and its own pages of both caches, under its own
    page ids. Its block table holds these ids at the pages' places in the request and is negative elsewhere. `map_slots`
    and the write ops need nothing else: positions of other ranks become −1. The keys selected are exactly those that
    one GPU selects.

    Attributes:
        axis_name: The mesh axis; its devices in order are the owners.
        ownership: Which rank owns which page.
    """

    axis_name: str
    ownership: Ownership

    def _rank(self) -> jax.Array:
        self.ownership.check_ranks(jax.lax.axis_size(self.axis_name), f"mesh axis {self.axis_name!r}")
        return jax.lax.axis_index(self.axis_name)

    def batch(self, block_table: jax.Array, lengths: jax.Array, request_ids: jax.Array | None = None) -> Batch:
        """The `Batch` of a step, from the whole lengths [T] and this device's block table [B, M]."""
        rank, ownership = self._rank(), self.ownership
        column = jnp.arange(ownership.own_width(block_table.shape[1]), dtype=jnp.int32)
        page = Ownership(ownership.ranks, 1, ownership.block_pages).position(column, rank)
        table = jnp.take(block_table, page, axis=1, mode="fill", fill_value=-1)
        return Batch(block_table, table, ownership.count(lengths, rank).astype(jnp.int32), request_ids)

    def select(
        self, index_q: jax.Array, index_weights: jax.Array, indexer_cache: jax.Array | jax.Ref, batch: Batch, *,
        k: int, index_scale: float | None = None, workspace_bytes: int = LOGITS_BYTES,
    ) -> jax.Array:  # fmt: skip
        """The k keys of each token with the largest logits over all ranks: positions [T, K] within its request.

        Positions are ascending, −1 padded. Steps: local logits, local top-k, one all-gather of the candidates,
        `merge_topk`. Logits are stored for as many tokens at a time as fit workspace_bytes, and at least one.
        """
        self.ownership.check_pool("indexer_cache", indexer_cache.shape[1])
        ids, (requests, width) = batch.request_ids, batch.block_table.shape
        check_rows(len(index_q), requests, width, len(batch.own_lengths), None if ids is None else len(ids))
        form = query_format(indexer_cache.shape[2], index_q.shape[2])
        q8, weights = jax_api.quantize_indexer_query(index_q, index_weights, scale=index_scale, format=form)
        tokens, requests = len(q8), len(batch.own_table)
        columns = batch.own_table.shape[1] * self.ownership.page_size
        stored = parts(tokens, columns, workspace_bytes)
        if len(stored) > 1 and ids is None:
            ids = jnp.arange(tokens, dtype=jnp.int32) // (tokens // requests)
        candidates = []
        for rows in stored:
            lengths = batch.own_lengths[rows]
            logits = jax_api.indexer_logits_paged(
                q8[rows], weights[rows], indexer_cache, batch.own_table, lengths, None if ids is None else ids[rows]
            )
            places = jax_api.select_topk(logits, lengths, k=k)
            values = jnp.take_along_axis(logits, jnp.maximum(places, 0), axis=1)
            candidates.append((values, self.ownership.position(places, self._rank())))
        values, indices = (jnp.concatenate(part) for part in zip(*candidates, strict=True))
        sent = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), indices])
        gathered = jax.lax.all_gather(sent, self.axis_name)
        values = jax.lax.bitcast_convert_type(gathered[:, 0], jnp.float32)
        return jax_api.merge_topk(values, gathered[:, 1], k=k)[1]

    def merge(
        self, out: jax.Array, lse: jax.Array, sink: jax.Array | None = None, *, scatter_heads: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over all ranks' keys, from each rank's own out [T, H, L] and lse [T, H] computed without a sink.

        With scatter_heads each rank gets its own H / W heads, as a tensor-parallel output projection takes them, and
        receives 1 / W of the bytes. sink [H] still covers all heads.

        Raises:
            ArgumentError: With scatter_heads, H is not a multiple of the ranks.
        """
        heads = heads_of(out.shape[1], self.ownership.ranks) if scatter_heads else out.shape[1]

        def exchange(x: jax.Array) -> jax.Array:
            sent = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")  # XLA widens floats on the CPU
            if scatter_heads:
                by_rank = sent.reshape(x.shape[0], -1, heads, *x.shape[2:])  # [T, W, H / W, …]
                got = jax.lax.all_to_all(by_rank, self.axis_name, split_axis=1, concat_axis=0)
            else:
                got = jax.lax.all_gather(sent, self.axis_name)
            return jax.lax.bitcast_convert_type(got, x.dtype)

        if sink is not None and scatter_heads:
            sink = jax.lax.dynamic_slice_in_dim(sink, self._rank() * heads, heads)
        return jax_api.merge_attention(exchange(out), exchange(lse), sink)

    def dsa_attention(
        self, q: jax.Array, index_q: jax.Array, index_weights: jax.Array, mla_cache: jax.Array | jax.Ref,
        indexer_cache: jax.Array | jax.Ref, batch: Batch, sink: jax.Array | None = None, *, k: int,
        softmax_scale: float, index_scale: float | None = None, mla_cache_format: str | None = None,
        workspace_bytes: int = LOGITS_BYTES, scatter_heads: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """`dsa_attention` over all ranks' keys: out [T, H, L], lse [T, H], indices [T, K] (the same on every rank).

        The steps are `select`, `map_slots`, `sparse_mla` and `merge`; callers with other caches can compose them.
        """
        self.ownership.check_pool("mla_cache", mla_cache.shape[1])
        indices = self.select(
            index_q, index_weights, indexer_cache, batch, k=k, index_scale=index_scale, workspace_bytes=workspace_bytes
        )
        # A rank attends to its own keys only: they come first in a row.
        slots, counts = jax_api.map_slots(
            indices, batch.block_table, batch.request_ids, page_size=self.ownership.page_size, compact=True
        )
        out, lse = jax_api.sparse_mla(
            q, mla_cache, slots, counts, softmax_scale=softmax_scale, cache_format=mla_cache_format
        )
        return *self.merge(out, lse, sink, scatter_heads=scatter_heads), indices


def tensor_parallel_attention(
    q: jax.Array, index_q: jax.Array, index_weights: jax.Array, mla_cache: jax.Array, indexer_cache: jax.Array,
    block_table: jax.Array, lengths: jax.Array, request_ids: jax.Array | None = None, sink: jax.Array | None = None, *,
    mesh: Mesh, axis_name: str, k: int, softmax_scale: float, index_scale: float | None = None,
    mla_cache_format: str | None = None, workspace_bytes: int = 1 << 29, batch_invariant: bool = False,
    implementation: Literal["triton", "gluon", "reference"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """`dsa_attention` with the heads of q and sink divided evenly over a mesh axis; everything else is replicated.

    out and lse are sharded over their heads. With `batch_invariant=True` every head has the bits that it has on one
    GPU.

    Raises:
        ArgumentError: The number of heads is not a multiple of the ranks; otherwise as `dsa_attention`.
    """
    if axis_name not in mesh.shape:
        raise ArgumentError(f"tensor parallel: axis_name is {axis_name!r}, expected one of {tuple(mesh.shape)}")
    heads_of(q.shape[1], mesh.shape[axis_name])
    heads = P(None, axis_name)
    attend = partial(
        jax_api.dsa_attention, k=k, softmax_scale=softmax_scale, index_scale=index_scale,
        mla_cache_format=mla_cache_format, workspace_bytes=workspace_bytes, batch_invariant=batch_invariant,
        implementation=implementation,
    )  # fmt: skip
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, *[P()] * 7, P(axis_name)), out_specs=(heads, heads, P()), check_vma=False
    )
    return mapped(q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, request_ids, sink)
