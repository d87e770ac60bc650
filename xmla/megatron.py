"""DeepSeek sparse attention of Megatron-Core by xmla's ops: a module for `dsa_kernel_backend`.

    xmla.megatron.install()                          once, before Megatron parses arguments or makes a config
    TransformerConfig(dsa_kernel_backend="xmla", …)  or --dsa-kernel-backend xmla

    with xmla.megatron.replay(model, layers): …        attends to the keys that a rollout selected

A script that trains runs as it is after `python -m xmla.megatron SCRIPT ARGUMENTS…`, which calls `install` first.

The four `run_fused_*` are the hooks that Megatron calls, by these names. Each computes what Megatron's unfused code
computes, or returns None, and Megatron's code runs instead. The contract is that of megatron-core 0.19.2 and of
github.com/NVIDIA/Megatron-LM at d98e8a64dd, in megatron/core/transformer/experimental_attention_variant: the calls in
dsa.py and dsa_kernels.py, the loss in dsa.py and dsa_indexer_loss.py, the ranges of keys in dsa_masking.py.

Axes: S tokens and N keys of each of B sequences (B = 1 if documents are packed), H heads of this rank, I indexer heads,
K = min(index_topk, N). A token sees the keys [starts, ends) of its sequence, which holds causality, packed documents
and the places of a context-parallel rank's tokens among all keys.
"""

import runpy
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from xmla._frameworks import missing, needed

if missing("torch"):
    raise ImportError(needed("torch"))

import torch
import torch.distributed as dist

from xmla import torch_api as xt
from xmla._selections import check_arrays, check_form, check_layers, check_rows
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import KEY_DIMS, VALUE_DIMS

Tensor = torch.Tensor

NAME = "xmla"
HALVES = (torch.bfloat16, torch.float16)
# What the ops take; a hook declines before it has computed anything.
MAX_INDEXER_HEADS = 64
MAX_HEADS = 128
# Arrays of tokens by keys are made for as many tokens at a time as fit so many bytes, and at least one.
SCRATCH = 1 << 29
# Factor of losses and gradients until they are multiplied by the number of tokens: an average's gradients are mostly 0
# in float16. Constant, since `indexer_loss` compiles kernels for each coeff.
UNIT = 2.0**12

_options: dict[str, Any] = {"deterministic": True}  # options of every call of `sparse_mla` that has gradients


def install(*, deterministic: bool = True) -> None:
    """Make "xmla" a value of `dsa_kernel_backend`, in configs and on the command line; a second call, the option.

    Args:
        deterministic: False adds the gradients of attention's keys as they come, which is faster. They differ from run
            to run, within the bound of `sparse_mla`; all else keeps its bits.

    Raises:
        UnsupportedError: Megatron-Core is not installed, or older than its hooks (0.19).
    """
    try:
        kernels = import_module("megatron.core.transformer.experimental_attention_variant.dsa_kernels")
        utils: Any = import_module("megatron.core.utils")
        config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
        modules, names = kernels._BACKEND_MODULE_NAME_BY_BACKEND, utils._VALID_DSA_KERNEL_BACKENDS
        field = config.__dataclass_fields__["dsa_kernel_backend"]
    except (ImportError, AttributeError, KeyError) as error:
        message = f"xmla.megatron: no Megatron-Core with hooks for sparse attention, such as 0.19.2: {error}"
        raise UnsupportedError(message) from error
    if NAME not in modules:
        modules[NAME] = __name__
        utils._VALID_DSA_KERNEL_BACKENDS = (*names, NAME)
        literal: Any = Literal
        field.type = literal[(*get_args(field.type), NAME)]  # the choices on the command line
    _options["deterministic"] = deterministic


@dataclass(slots=True)
class _Replay:
    """A rollout's selections, by Megatron's numbers of layers, and which of these is computed."""

    layers: dict[int, Tensor]
    topk: int
    batch_invariant: bool
    layer: int = 0  # none
    used: bool = False
    checked: bool = False

    def begin(self, module: Any, _: Any) -> None:
        self.layer, self.used = module.layer_number, False

    def end(self, module: Any, _: Any, output: Any) -> None:
        layer, self.layer = self.layer, 0
        if module.indexer is not None and output is not None and not self.used:
            raise UnsupportedError(
                f"xmla.megatron: layer {layer} attended by Megatron's own code, expected to the selections given; "
                'supported: dsa_kernel_backend="xmla" and keys that are a range'
            )

    def rows(self, q: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """The layer's rows [B, S, K] as positions among the keys. The first layer checks those of all."""
        tokens, batch = q.shape[:2]
        if not self.checked:
            counts = (ends - starts).expand(batch, tokens)
            for number, rows in self.layers.items():
                check_form(number - 1, rows, self.topk, (batch, tokens))
                seen = counts.to(rows.device)
                check_rows(number - 1, rows, seen, torch.zeros_like(seen, dtype=torch.bool))
            self.checked = True
        self.used = True
        rows = self.layers[self.layer].to(q.device)
        return torch.where(rows < 0, -1, rows + starts[:, None])


_replay: _Replay | None = None  # while one is open


def _replayed() -> _Replay | None:
    """The open replay, while a layer of its model is computed."""
    return _replay if _replay is not None and _replay.layer else None


@contextmanager
def replay(
    model: torch.nn.Module, layers: Mapping[int, Tensor], *, batch_invariant: bool = False
) -> Generator[None, None, None]:
    """Have a model's layers attend to the keys that a rollout selected, instead of selecting keys, while it is open.

        with xmla.megatron.replay(model, layers):
            loss = model(…)

    Open it around a micro-batch's forward pass, and around its backward pass too if that computes layers again.

    Args:
        model: Megatron's, or this rank's part of one.
        layers: [B, S, dsa_indexer_topk] int32 of each layer that selects keys, counted from 0, for the tokens that this
            rank computes: a token's keys in ascending order, counted from the first that it sees, and −1 behind the
            last. A row of nothing but −1 is that of a token that attends to nothing, such as padding. There may be
            layers of other pipeline stages. Those on the host are copied when their layer runs.
        batch_invariant: Attend as `sparse_mla` with `batch_invariant`, like an engine with VLLM_BATCH_INVARIANT=1.

    Raises:
        ArgumentError: A layer that selects has none, or one that does not has some; when the first layer runs, another
            dtype or shape, or a token's keys are not those of a selection.
        UnsupportedError: Another replay is open; when a layer ran, it attended by Megatron's own code.
    """
    global _replay
    if _replay is not None:
        raise UnsupportedError("xmla.megatron: a replay is open, supported: one at a time")
    attentions: list[Any] = [each for each in model.modules() if type(each).__name__ == "DSAttention"]
    modules: dict[int, Any] = {each.layer_number - 1: each for each in attentions}
    selecting = {number: module for number, module in modules.items() if module.indexer is not None}
    if not selecting:
        raise ArgumentError(f"replay: model is {type(model).__name__}, expected one with layers that select keys")
    check_layers(layers.keys() & modules.keys(), selecting)
    topk = next(iter(selecting.values())).index_topk
    ours = {number: layers[number] for number in selecting}
    check_arrays(ours, Tensor)
    opened = _Replay({number + 1: rows for number, rows in ours.items()}, topk, batch_invariant)
    handles = [each.register_forward_pre_hook(opened.begin) for each in modules.values()]
    handles += [each.register_forward_hook(opened.end, always_call=True) for each in modules.values()]
    _replay = opened
    try:
        yield
    finally:
        _replay = None
        for handle in handles:
            handle.remove()


def run_fused_qk_topk(
    q: Tensor, k: Tensor, weights: Tensor, index_topk: int, starts: Tensor, ends: Tensor, block_size: int,
    use_relu: bool = True, use_local_indexer_varlen: bool = False, single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0, local_packed_cp_query_start: int = 0, local_packed_cp_query_len: int | None = None,
    packed_seq_params: object = None, cp_size: int = 1,
) -> tuple[Tensor, None] | None:  # fmt: skip
    """The keys that the indexer selects.

        scores[s,b,n] = Σ_i weights[s,b,i] · relu(q[s,b,i] · k[n,b])        for starts[s] ≤ n < ends[s]

    Args:
        q: [S, B, I, D] bfloat16 or float16, 1 ≤ I ≤ 64, D = 32, 64 or 128.
        k: [N, B, D], dtype of q.
        weights: [S, B, I], with all factors of the scores.
        index_topk: K, if there are so many keys.
        starts, ends: [S] int32.
        use_relu: True.
        block_size, cp_size, packed_seq_params and the rest: Not read. They help kernels to skip keys that the ranges
            exclude; chunks are as large as memory allows.

    Returns:
        indices: [B, S, K] int32, ascending, −1 behind a token's last key. Of equal scores the first keys are taken.
        None: No lengths, since −1 tells them.

    Falls back (None) without ReLU, without tokens or keys, and for other dtypes, D or more heads.
    """
    if _replayed() is None and (not use_relu or not _is_indexer(q, k)):
        return None
    return _chosen(q, k, weights, index_topk, starts, ends), None


def run_fused_qk_topk_with_loss(
    q: Tensor, k: Tensor, weights: Tensor, index_topk: int, starts: Tensor, ends: Tensor, block_size: int,
    query: Tensor, key: Tensor, softmax_scale: float, loss_coeff: float, pg_collection: object,
    query_valid_rows: Tensor | None = None, calculate_per_token_loss: bool = False, use_relu: bool = True,
    config: object = None, use_local_indexer_varlen: bool = False, single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0, local_packed_cp_query_start: int = 0, local_packed_cp_query_len: int | None = None,
    packed_seq_params: object = None, cp_size: int = 1,
) -> tuple[Tensor, None, Tensor] | None:  # fmt: skip
    """The selected keys, and the indexer's loss over them: "sparse loss".

        target[t]     = Σ_h softmax(softmax_scale · query[t,h] · key)  over the selected keys, summed over the ranks of
                        pg_collection.tp, divided by its sum
        prediction[t] = softmax(scores[t])                             over the same keys
        loss          = loss_coeff · mean_t Σ target · (ln max(target, 1e-10) − ln prediction)

    Attention's side is constant.

    Args:
        q, k, weights, index_topk, starts, ends: As in `run_fused_qk_topk`.
        query: [S, B, H, L+E] bfloat16 or float16, H ≤ 128, L+E = 576 or 512.
        key: [N, B, 1, L+E], dtype of query.
        pg_collection: Its tp is the group whose ranks share the heads. They must select the same keys, as they do from
            the same q, k and weights.
        query_valid_rows: [B, S], [1, S] or [S] bool. The others are padding and not part of the mean.
        calculate_per_token_loss: The sum instead of the mean.
        config and the rest: Not read.

    Returns:
        indices, None: As in `run_fused_qk_topk`, of padding too.
        loss: [] float32, with gradients of q, k and weights.

    Falls back (None) where `run_fused_qk_topk` does, for keys with heads, and for other dtypes or sizes of query.

    Attention's lse is computed here, by an attention whose result is discarded.
    """
    if not use_relu or not _is_indexer(q, k) or not _is_absorbed(query, key):
        return None
    indices = _chosen(q, k, weights, index_topk, starts, ends)
    slots = _slots(indices)
    with torch.no_grad():
        _, lse = _attend(query, key, slots, softmax_scale)
    loss = _Loss.of(q, softmax_scale, loss_coeff, pg_collection, query_valid_rows, calculate_per_token_loss)
    return indices, None, loss.over_selected(q, k, weights, query, key, lse, slots)


def run_fused_absorbed_sparse_attention(
    query: Tensor, key: Tensor, topk_indices: Tensor, softmax_scale: float, v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Attention over selected keys, without the projection of values; `sparse_mla` with its derivative.

        out[s,b,h] = Σ_n softmax(softmax_scale · query[s,b,h] · key[n,b]) · key[n,b,:v_channels]      n selected

    Args:
        query: [S, B, H, L+E] bfloat16 or float16, H ≤ 128, L+E = 576 or 512.
        key: [N, B, 1, L+E], dtype of query.
        topk_indices: [B, S, K] int32 or int64, no key twice; −1 is no key.
        v_channels: L ≤ 512.
        topk_length: [B, S], how many indices count, the leftmost.

    Returns:
        out: [S, B, H, L], dtype of query; 0 for a token without keys. Gradients of query and key.

    Falls back (None) for keys with heads, and for other dtypes or sizes.
    """
    if not _is_absorbed(query, key) or v_channels > VALUE_DIMS:
        return None
    lengths = None if topk_length is None else topk_length.T.flatten().int()
    out, _ = _attend(query, key, _slots(topk_indices), softmax_scale, lengths)
    return out[..., :v_channels]


def run_fused_dsa_attention(
    *, config: object, query: Tensor, key: Tensor, value: Tensor | None, up_v_weight: Tensor | None,
    q_indexer: Tensor, k_indexer: Tensor, indexer_weights: Tensor, indexer_topk: int, softmax_scale: float,
    loss_coeff: float, sparse_loss: bool, calculate_per_token_loss: bool, absorbed_mla: bool, cp_size: int,
    attn_mask_type: object, packed_seq_params: object, varlen_starts: Tensor | None, varlen_ends: Tensor | None,
    key_positions: Tensor | None, query_valid_rows: Tensor | None, varlen_is_plain_causal: bool = False,
    use_relu: bool, use_local_indexer_varlen: bool = False, single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0, local_packed_cp_query_start: int = 0, local_packed_cp_query_len: int | None = None,
    pg_collection: object = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The whole layer between its projections: selection, attention over the selected keys, the indexer's loss.

    Args:
        query, key: As in `run_fused_absorbed_sparse_attention`.
        up_v_weight: [H, V, L], dtype of query, from a head's latent to its values.
        q_indexer, k_indexer, indexer_weights, indexer_topk: q, k, weights, index_topk of `run_fused_qk_topk`.
        loss_coeff: 0: no loss.
        sparse_loss: The loss is over the selected keys; False: over all keys of a token's range, "dense loss", with
            attention's probabilities over these.
        varlen_starts, varlen_ends: [S] integer, starts and ends.
        query_valid_rows, calculate_per_token_loss, pg_collection: As in `run_fused_qk_topk_with_loss`.
        config and the rest: Not read.

    Returns:
        output: [S, B, H·V], dtype of query, with gradients of query, key and up_v_weight.
        loss: [] float32, as in `run_fused_qk_topk_with_loss`; 0 if loss_coeff is.

    Falls back (None) where the other hooks do, and if the layer has explicit values, or if its keys are not a range
    (`key_positions`, or a mask instead of `varlen_starts` and `varlen_ends`). Megatron then calls the other hooks.

    Memory: the dense loss is computed without an array of S · N elements, too. With tensor parallelism it makes such
    arrays for a part of the tokens at a time, to add them up over the ranks.
    """
    if not absorbed_mla or value is not None or up_v_weight is None:
        return None
    if varlen_starts is None or varlen_ends is None or key_positions is not None:
        return None
    indexer = q_indexer, k_indexer, indexer_weights
    if not use_relu or not _is_indexer(q_indexer, k_indexer):
        return None
    if not _is_absorbed(query, key) or up_v_weight.shape[2] > VALUE_DIMS:
        return None
    starts, ends = varlen_starts.int(), varlen_ends.int()
    slots = _slots(_chosen(*indexer, indexer_topk, starts, ends))
    out, lse = _attend(query, key, slots, softmax_scale)
    output = torch.einsum("sbhc,hdc->sbhd", out[..., : up_v_weight.shape[2]], up_v_weight).flatten(2)
    if not loss_coeff:
        return output, torch.zeros((), dtype=torch.float32, device=query.device)
    loss = _Loss.of(q_indexer, softmax_scale, loss_coeff, pg_collection, query_valid_rows, calculate_per_token_loss)
    if sparse_loss:
        return output, loss.over_selected(*indexer, query, key, lse, slots)
    return output, loss.over_ranges(*indexer, query, key, starts, ends)


def _is_indexer(q: Tensor, k: Tensor) -> bool:
    return (
        q.numel() > 0 and k.numel() > 0 and q.dtype in HALVES and k.dtype == q.dtype
        and q.shape[2] <= MAX_INDEXER_HEADS and q.shape[3] in INDEXER_DIMS
    )  # fmt: skip


def _is_absorbed(query: Tensor, key: Tensor) -> bool:
    return (
        query.dtype in HALVES and key.dtype == query.dtype and key.shape[2] == 1
        and query.shape[2] <= MAX_HEADS and query.shape[3] in KEY_DIMS
    )  # fmt: skip


def _parts(tokens: int, keys: int) -> Iterator[slice]:
    step = max(SCRATCH // (4 * keys), 1)
    return (slice(first, first + step) for first in range(0, tokens, step))


def _chosen(q: Tensor, k: Tensor, weights: Tensor, topk: int, starts: Tensor, ends: Tensor) -> Tensor:
    """Positions [B, S, K] among the keys, replayed or selected."""
    if (replayed := _replayed()) is not None:
        return replayed.rows(q, starts, ends)
    return _select(q, k, weights, topk, starts, ends)


@torch.no_grad()
def _select(q: Tensor, k: Tensor, weights: Tensor, topk: int, starts: Tensor, ends: Tensor) -> Tensor:
    """[B, S, K] int32, positions among the N keys of a sequence."""
    (tokens, batch), keys, weights = q.shape[:2], len(k), weights.float()
    indices = torch.empty((batch, tokens, min(topk, keys)), dtype=torch.int32, device=q.device)
    for b in range(batch):
        for part in _parts(tokens, keys):
            scores = xt.indexer_scores(q[part, b], k[:, b], weights[part, b], ends[part], starts[part])
            chosen = xt.select_topk(scores, ends[part], starts[part], k=indices.shape[2])  # behind the start
            indices[b, part] = torch.where(chosen >= 0, chosen + starts[part, None], -1)
    return indices


def _slots(indices: Tensor) -> Tensor:
    """Rows [S·B, K] int32 of flattened keys [N, B], from positions [B, S, K]. What is no position is no row."""
    batch = len(indices)
    slots = indices * batch + torch.arange(batch, device=indices.device)[:, None, None]
    return slots.transpose(0, 1).flatten(0, 1).int()


def _attend(
    query: Tensor, key: Tensor, slots: Tensor, softmax_scale: float, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [S, B, H, 512] and lse [S·B, H]."""
    rows = query.flatten(0, 1), key.flatten(0, 1)
    replayed = _replayed()
    invariant = replayed is not None and replayed.batch_invariant
    out, lse = xt.sparse_mla(*rows, slots, lengths, softmax_scale=softmax_scale, batch_invariant=invariant, **_options)
    return out.unflatten(0, query.shape[:2]), lse


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients were computed with it. Of all that they were computed from, nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, loss: Tensor, dq: Tensor, dk: Tensor, dweights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(dq, dk, dweights)
        return loss

    @staticmethod
    def backward(ctx: Any, *dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradient * dloss[0] for gradient in ctx.saved_tensors), None, None, None, None


@dataclass(frozen=True, slots=True)
class _Loss:
    """The indexer's loss, of any tensors."""

    softmax_scale: float
    coeff: float
    group: Any  # the ranks that share attention's heads, None if it is one
    valid: Tensor | None  # [S, B] bool
    counted: Tensor | int  # of how many tokens it is the mean; 1: the sum

    @classmethod
    def of(
        cls, q: Tensor, softmax_scale: float, coeff: float, pg_collection: object, valid_rows: Tensor | None,
        summed: bool,
    ) -> "_Loss":  # fmt: skip
        """A loss by Megatron's arguments."""
        tokens, batch = q.shape[:2]
        group = getattr(pg_collection, "tp", None)
        valid = None if valid_rows is None else valid_rows.bool().expand(batch, -1).T
        counted = 1 if summed else tokens * batch if valid is None else valid.sum().clamp_min(1)
        return cls(softmax_scale, coeff, None if group is None or group.size() == 1 else group, valid, counted)

    def over_selected(
        self, q: Tensor, k: Tensor, weights: Tensor, query: Tensor, key: Tensor, lse: Tensor, slots: Tensor
    ) -> Tensor:
        """The loss over the keys `slots` [S·B, K], from attention's lse [S·B, H] over them."""
        if self.valid is not None:
            slots = slots.masked_fill(~self.valid.flatten()[:, None], -1)
        with torch.no_grad():
            loss, *gradients = self._average(
                q.flatten(0, 1), k.flatten(0, 1), weights.flatten(0, 1).float(), query.flatten(0, 1),
                key.flatten(0, 2), lse, slots,
            )  # fmt: skip
        shaped = (each.view_as(array) for each, array in zip(gradients, (q, k, weights), strict=True))
        return self._reduce(len(slots), q, k, weights, loss, *shaped)

    def over_ranges(
        self, q: Tensor, k: Tensor, weights: Tensor, query: Tensor, key: Tensor, starts: Tensor, ends: Tensor
    ) -> Tensor:
        """The loss over the keys [starts, ends) [S] of each sequence."""
        averages = []
        with torch.no_grad():
            for b in range(q.shape[1]):
                valid_ends = ends if self.valid is None else torch.where(self.valid[:, b], ends, starts)
                arrays = q[:, b], k[:, b], weights[:, b].float(), query[:, b], key[:, b, 0]
                averages.append(self._average_of_sequence(*arrays, starts, valid_ends))
        losses, *gradients = zip(*averages, strict=True)
        stacked = (torch.stack(each, 1) for each in gradients)
        return self._reduce(len(q), q, k, weights, torch.stack(losses).sum(0), *stacked)

    def _average_of_sequence(
        self, q: Tensor, k: Tensor, weights: Tensor, query: Tensor, rows: Tensor, starts: Tensor, ends: Tensor
    ) -> tuple[Tensor, ...]:
        """`_average` over all keys of the ranges; attention's lse over them, and targets of several ranks, in parts."""
        scale, parts = self.softmax_scale, [*_parts(len(q), len(k))]
        seen, counts = starts[:, None], ends - starts
        keys = torch.arange(len(k), dtype=torch.int32, device=k.device)
        lse = torch.cat([
            xt.sparse_mla(query[part], rows[:, None], seen[part] + keys, counts[part], softmax_scale=scale)[1]
            for part in parts
        ])  # fmt: skip
        if self.group is None:
            arrays = q, k, weights, query, rows, lse, ends, starts
            return xt.indexer_loss(*arrays, softmax_scale=scale, coeff=self.coeff * UNIT)
        loss, dk = (torch.zeros(shape, dtype=torch.float32, device=k.device) for shape in ((1,), k.shape))
        dq, dweights = torch.empty_like(q), torch.empty_like(weights)
        for part in parts:
            arrays = q[part], k, weights[part], query[part], rows, lse[part]
            average = self._average(*arrays, seen[part] + keys, ends[part], starts[part])
            share = len(q[part]) / len(q)
            loss, dk = loss + average[0] * share, dk + average[2] * share
            dq[part], dweights[part] = average[1] * share, average[3] * share
        return loss, dq, dk.to(k.dtype), dweights

    def _average(
        self, q: Tensor, k: Tensor, weights: Tensor, query: Tensor, rows: Tensor, lse: Tensor, indices: Tensor,
        ends: Tensor | None = None, starts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`indexer_loss` over the keys of indices, UNIT times: the average over tokens [1] and its gradients."""
        scale, coeff, bounds = self.softmax_scale, self.coeff * UNIT, (ends, starts, indices)
        if self.group is None:
            return xt.indexer_loss(q, k, weights, query, rows, lse, *bounds, softmax_scale=scale, coeff=coeff)
        target = xt.indexer_target(query, rows, lse, indices, ends, starts, softmax_scale=scale)
        dist.all_reduce(target, group=self.group)
        return xt.indexer_loss(q, k, weights, None, None, None, *bounds, target, coeff=coeff)

    def _reduce(self, tokens: int, q: Tensor, k: Tensor, weights: Tensor, loss: Tensor, *gradients: Tensor) -> Tensor:
        """The loss from an average over so many tokens."""
        average = _WithGradients.apply(q, k, weights.float(), loss[0], *gradients)
        return average * (tokens / UNIT / self.counted)


def main() -> None:
    """Run a script of Megatron's as Python does, after `install`."""
    import_module("xmla.megatron").install()  # not this module, whose name is now another
    _, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
