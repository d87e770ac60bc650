"""Several GPUs under torch.distributed: context parallel over pages, tensor parallel over heads.

The groups and their collectives are the engine's own (`DeviceMesh`; NCCL, or gloo on the CPU) and can be captured in a
CUDA graph.

A fault raises an error that names the op, on every rank and within the group's timeout. An error of the communication
backend, for instance because a rank died, is raised again with op, dtype and shape before it (NCCL's watchdog ends the
process instead). Backends do not detect ranks with different shapes: they hang, end the process or continue with wrong
bytes. Therefore, before the first exchange of a shape, the ranks compare its description over a gloo group of the same
ranks, unless the exchange is captured or compiled. That takes about a millisecond between two processes of one host,
and 2 µs of host time in every later exchange. It does not detect ranks that confuse shapes which all of them have
exchanged before: TORCH_DISTRIBUTED_DEBUG=DETAIL compares at every call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xmla import torch_api
from xmla.core.errors import ArgumentError
from xmla.core.parallel import LOGITS_BYTES, Ownership, check_rows, heads_of, parts, query_format

# torch 2.13 gave it another name.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@lru_cache
def _control_group(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A gloo group of the same ranks and timeout: a rank that waits there mistakes no bytes for other ranks' data."""
    timeout = group._get_backend(device).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)


@lru_cache(maxsize=1 << 14)
def _agree(group: dist.ProcessGroup, device: torch.device, what: str, got: str) -> None:
    """Refuse an exchange whose description differs between ranks; memoised."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (what, got), group=_control_group(group, device))
    for rank, other in zip(dist.get_process_group_ranks(group), said, strict=True):
        if other != (what, got):
            raise ArgumentError(
                f"{what} of {got} on rank {dist.get_rank()}, expected the same on every rank: "
                f"rank {rank} has {other[0]} of {other[1]}"
            )


@contextmanager
def _exchange(what: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    """Around a collective: compare its description on all ranks, and name the op in the backend's error."""
    got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    try:
        if not torch.compiler.is_compiling() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            _agree(group, tensor.device, what, got)
        yield
    except RuntimeError as error:  # DistBackendError and its kin
        raise type(error)(f"{what} of {got} on rank {dist.get_rank()}: {error}") from error


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ArgumentError(f"mesh has {mesh.ndim} axes, expected 1, such as mesh['context']")


@dataclass(frozen=True)
class Batch:
    """The requests of a step on one rank: built once per step, used by every layer."""

    block_table: torch.Tensor  # [B, M] i32, negative if another rank owns the page
    own_table: torch.Tensor  # [B, ·] i32, only the pages of this rank, then −1
    own_lengths: torch.Tensor  # [T] i32, keys of this rank visible to each token
    request_ids: torch.Tensor | None  # [T] i32


@dataclass(frozen=True)
class ContextParallel:
    """Sparse attention over requests whose pages are divided over the ranks of a mesh.

    Every rank has the queries of all tokens and its own pages of both caches, under its own page ids. Its block table
    holds these ids at the pages' places in the request and is negative elsewhere. `map_slots` and the write ops need
    nothing else: positions of other ranks become −1. The keys selected are exactly those that one GPU selects.

    Attributes:
        mesh: One axis, such as mesh["context"]; its ranks in order are the owners.
        ownership: Which rank owns which page.
    """

    mesh: DeviceMesh
    ownership: Ownership
    rank: int = field(init=False)
    group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        _check_mesh(self.mesh)
        self.ownership.check_ranks(self.mesh.size(), "mesh")
        object.__setattr__(self, "rank", self.mesh.get_local_rank())
        object.__setattr__(self, "group", self.mesh.get_group())

    def batch(self, block_table: torch.Tensor, lengths: torch.Tensor, request_ids: torch.Tensor | None = None) -> Batch:
        """The `Batch` of a step, from the whole lengths [T] and this rank's block table [B, M]."""
        every = range(block_table.shape[1])
        pages = self.ownership.own_pages(len(every), self.rank)
        step = pages[1] - pages[0] if len(pages) > 1 else 1
        even = slice(pages[0], pages[-1] + 1, step) if pages else slice(0)
        # A slice if possible, which a CUDA graph can capture.
        own = block_table[:, even] if [*every[even]] == pages else block_table[:, pages]
        width = self.ownership.own_width(len(every))  # of every rank, so that all launch the same kernels
        own_table = torch.nn.functional.pad(own, (0, width - len(pages)), value=-1).contiguous()
        return Batch(block_table, own_table, self.ownership.count(lengths, self.rank).to(torch.int32), request_ids)

    def select(
        self, index_q: torch.Tensor, index_weights: torch.Tensor, indexer_cache: torch.Tensor, batch: Batch, *,
        k: int, index_scale: float | None = None, workspace_bytes: int = LOGITS_BYTES,
    ) -> torch.Tensor:  # fmt: skip
        """The k keys of each token with the largest logits over all ranks: positions [T, K] within its request.

        Positions are ascending, −1 padded. Steps: local logits, local top-k, one all-gather of the candidates,
        `merge_topk`. Logits are stored for as many tokens at a time as fit workspace_bytes, and at least one.
        """
        self.ownership.check_pool("indexer_cache", indexer_cache.shape[1])
        ids, (requests, width) = batch.request_ids, batch.block_table.shape
        check_rows(len(index_q), requests, width, len(batch.own_lengths), None if ids is None else len(ids))
        form = query_format(indexer_cache.shape[2], index_q.shape[2])
        q8, weights = torch_api.quantize_indexer_query(index_q, index_weights, scale=index_scale, format=form)
        tokens, requests = len(q8), len(batch.own_table)
        columns = batch.own_table.shape[1] * self.ownership.page_size
        stored = parts(tokens, columns, workspace_bytes)
        if len(stored) > 1 and ids is None:
            ids = torch.arange(tokens, device=q8.device, dtype=torch.int32) // (tokens // requests)
        sent = torch.empty((2, tokens, k), dtype=torch.int32, device=q8.device)
        for rows in stored:
            lengths = batch.own_lengths[rows]
            logits = torch_api.indexer_logits_paged(
                q8[rows], weights[rows], indexer_cache, batch.own_table, lengths, None if ids is None else ids[rows]
            )
            places = torch_api.select_topk(logits, lengths, k=k)
            torch.gather(logits, 1, places.clamp_min(0).long(), out=sent[0, rows].view(torch.float32))
            sent[1, rows] = self.ownership.position(places, self.rank)
        with _exchange("merge_topk: all_gather", sent, self.group):
            gathered = sent.new_empty((self.ownership.ranks, *sent.shape))
            all_gather(gathered.view(-1), sent.view(-1), group=self.group)
        _, indices = torch_api.merge_topk(gathered[:, 0].view(torch.float32), gathered[:, 1], k=k)
        return indices

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None = None, *, scatter_heads: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over all ranks' keys, from each rank's own out [T, H, L] and lse [T, H] computed without a sink.

        With scatter_heads each rank gets its own H / W heads, as a tensor-parallel output projection takes them, and
        receives 1 / W of the bytes. sink [H] still covers all heads.

        Raises:
            ArgumentError: lse is not that of out. With scatter_heads, H is not a multiple of the ranks.
        """
        ranks = self.ownership.ranks
        tokens, heads, latent = out.shape
        if lse.dtype != torch.float32 or lse.shape != (tokens, heads):
            got = f"{str(lse.dtype).removeprefix('torch.')}{list(lse.shape)}"
            raise ArgumentError(f"ContextParallel: lse is {got}, expected float32[{tokens}, {heads}], as out")
        parts = 1
        if scatter_heads:
            parts, heads = ranks, heads_of(heads, ranks)
            out = out.view(tokens, ranks, heads, latent).transpose(0, 1)
            lse = lse.view(tokens, ranks, heads).transpose(0, 1)
            sink = None if sink is None else sink[self.rank * heads : (self.rank + 1) * heads]
        if not tokens:  # an empty tensor cannot be viewed as bytes
            return out.new_empty((0, heads, latent)), lse.new_empty((0, heads))
        flat = [x.contiguous().view(torch.uint8).view(parts, x.nbytes // parts) for x in (out, lse)]
        sent = torch.cat(flat, dim=1)
        gathered = sent.new_empty((ranks, sent.shape[1]))
        if scatter_heads:
            with _exchange("merge_attention: all_to_all", out, self.group):
                dist.all_to_all_single(gathered.view(-1), sent.view(-1), group=self.group)
        else:
            with _exchange("merge_attention: all_gather", out, self.group):
                all_gather(gathered.view(-1), sent.view(-1), group=self.group)
        cut = flat[0].shape[1]
        outs = gathered[:, :cut].view(out.dtype).view(ranks, tokens, heads, latent)
        lses = gathered[:, cut:].view(torch.float32).view(ranks, tokens, heads)
        return torch_api.merge_attention(outs, lses, sink)

    def dsa_attention(
        self, q: torch.Tensor, index_q: torch.Tensor, index_weights: torch.Tensor, mla_cache: torch.Tensor,
        indexer_cache: torch.Tensor, batch: Batch, sink: torch.Tensor | None = None, *, k: int, softmax_scale: float,
        index_scale: float | None = None, mla_cache_format: str | None = None, workspace_bytes: int = LOGITS_BYTES,
        scatter_heads: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """`dsa_attention` over all ranks' keys: out [T, H, L], lse [T, H], indices [T, K] (the same on every rank).

        The steps are `select`, `map_slots`, `sparse_mla` and `merge`; callers with other caches can compose them.
        """
        self.ownership.check_pool("mla_cache", mla_cache.shape[1])
        indices = self.select(
            index_q, index_weights, indexer_cache, batch, k=k, index_scale=index_scale, workspace_bytes=workspace_bytes
        )
        # A rank attends to its own keys only: they come first in a row.
        slots, counts = torch_api.map_slots(
            indices, batch.block_table, batch.request_ids, page_size=self.ownership.page_size, compact=True
        )
        out, lse = torch_api.sparse_mla(
            q, mla_cache, slots, counts, softmax_scale=softmax_scale, cache_format=mla_cache_format
        )
        return *self.merge(out, lse, sink, scatter_heads=scatter_heads), indices


@dataclass(frozen=True)
class TensorParallel:
    """Heads divided evenly over the ranks of a mesh; caches and indexer are replicated.

    Attention needs no exchange. With `batch_invariant=True` a rank's heads have the bits that they have on one GPU.

    Attributes:
        mesh: One axis, such as mesh["tensor"].
    """

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        _check_mesh(self.mesh)

    def shard(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """This rank's heads of a tensor with all heads on `axis`, as a view.

        Raises:
            ArgumentError: The number of heads is not a multiple of the ranks.
        """
        heads = heads_of(tensor.shape[axis], self.mesh.size())
        return tensor.narrow(axis, self.mesh.get_local_rank() * heads, heads)

    def gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """All heads on `axis`, gathered from the ranks."""
        ranks = self.mesh.size()
        front = tensor.movedim(axis, 0).contiguous()
        gathered = front.new_empty((ranks * front.shape[0], *front.shape[1:]))
        group = self.mesh.get_group()
        with _exchange("tensor parallel: all_gather", front, group):
            all_gather(gathered.view(-1), front.view(-1), group=group)
        return gathered.movedim(0, axis)
