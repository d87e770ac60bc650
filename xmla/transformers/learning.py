"""The loss that trains the indexers of a model: `model(…, indexer_loss=IndexerLoss())`."""

from typing import Any, NamedTuple

import torch

from xmla import torch_api as xt
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.values import Attr
from xmla.transformers.masks import Visible
from xmla.transformers.selection import Projected

# Factor of losses and gradients until they are multiplied by the number of tokens: an average's gradients are mostly 0
# in float16. Constant, since `indexer_loss` compiles kernels for each coeff.
UNIT = 2.0**12


class Pools(NamedTuple):
    """Selected keys of an indexer that are pools of tokens."""

    slots: torch.Tensor  # [B·S, K] int32, −1 anywhere, of keys [B·P, D]
    size: int  # tokens of a pool


class _Selection(NamedTuple):
    """What an indexer made of a layer's tokens, for the layer's attention."""

    projected: Projected
    seen: Visible
    real: torch.Tensor  # [B, S] bool, which tokens are no padding
    pools: Pools | None


class IndexerLoss:
    """The loss of a model's indexers in one forward pass, which trains them and nothing else.

        losses = IndexerLoss()
        out = model(tokens, labels=tokens, use_cache=False, indexer_loss=losses)
        losses.added_to(out.loss).backward()

    A layer's is KL(attention's probabilities, summed over heads ‖ softmax of the indexer's scores) over the keys that
    each token selects, the mean over tokens that are no padding. Attention and what the indexer reads are constants
    in it. Layers that share a selection have none. DeepSeek-V4's indexers score entries, and GLM-5.3-Flash's pools, of
    which a probability is the sum of its tokens'.

    Args:
        dense: Attend to all keys that a token sees, as in the indexer's warm-up, instead of the selected ones.

    Attributes:
        layers: Of each layer that has an indexer, by its number, the loss [] float32, without a gradient.
    """

    # No dataclass: FSDP copies those that it finds among a module's arguments.
    def __init__(self, dense: bool = False) -> None:
        self.dense = Attr("dense", bool, False, None).plain("IndexerLoss", dense)
        self.layers: dict[int, torch.Tensor] = {}
        self._real: dict[int, torch.Tensor] = {}
        self._selections: dict[int, _Selection] = {}
        self._added = False
        self._gradient: torch.Tensor | None = None  # of each layer's loss

    def added_to(self, loss: torch.Tensor, coeff: float = 1.0) -> torch.Tensor:
        """A loss of the pass's results plus `coeff` times the sum of the layers'. Call it once.

        Raises:
            ArgumentError: It is no scalar tensor, no layer had a loss, or it is the second call.
        """
        if not isinstance(loss, torch.Tensor):
            raise ArgumentError(
                f"IndexerLoss.added_to: loss is {type(loss).__name__}, expected torch.Tensor, which model(…, labels=…) "
                "gives"
            )
        coeff = Attr("coeff", float, False, None).plain("IndexerLoss.added_to", coeff)
        if loss.numel() != 1:
            raise ArgumentError(f"IndexerLoss.added_to: loss has shape {tuple(loss.shape)}, expected one number")
        if not self.layers:
            raise ArgumentError(
                "IndexerLoss.added_to: no layer has a loss, expected after model(…, indexer_loss=…) of a model that "
                'attends by "xmla"'
            )
        if self._added:
            raise ArgumentError("IndexerLoss.added_to: called twice, expected a new IndexerLoss for each pass")
        self._added = True
        layers = torch.stack([each.to(loss.device) for each in self.layers.values()]).sum()
        return _Total.apply(loss, coeff * layers, coeff, self)

    def begin(self, layer: int, real: torch.Tensor) -> None:
        """Note which tokens [B, S] of a layer are no padding, before its indexer is called.

        Raises:
            ArgumentError: The pass is not the first one.
        """
        if layer in self.layers and self._gradient is None:  # there is one in a backward pass that computes it again
            raise ArgumentError("indexer_loss: given to two passes, expected a new IndexerLoss for each")
        self._real[layer] = real

    def keep(self, layer: int, projected: Projected, seen: Visible, pools: Pools | None = None) -> None:
        """Note what a layer's indexer made, of which the layer's attention makes the loss."""
        self._selections[layer] = _Selection(projected, seen, self._real.pop(layer), pools)

    def refuse(self, cache: Any) -> None:
        """Raise UnsupportedError if there is a cache, of which groups of tokens would be."""
        if cache is not None:
            raise UnsupportedError(
                f"indexer_loss: a {type(cache).__name__} is given, supported: none; pass use_cache=False"
            )

    @torch.compiler.disable  # the object is changed, and its gradient comes by another way than the graph's
    def joined(
        self, module: Any, out: torch.Tensor, query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor,
        lse: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """A layer's `out`, with whose gradient that of the layer's loss is computed.

        Args:
            out: The layer's result.
            query, rows, slots: Arguments of its `sparse_mla`, of tokens [B·S] and rows [B·N, 1, ·]: of the rows that
                its indexer selects. Of pools the slots of their tokens come first, pool after pool.
            lse: Its result, with sinks and other rows.
            scaling: Factor of its scores.
        """
        if query.shape[1] != module.num_heads:
            raise UnsupportedError(
                f"indexer_loss: this rank has {query.shape[1]} of {module.num_heads} heads, supported: all"
            )
        kept = self._selections.pop(module.layer_idx)
        if kept.projected.keys.shape[1]:
            tokens = kept.real.sum().clamp(min=1)
            loss = self._average(kept, query, rows, slots, lse, scaling) * (kept.real.numel() / UNIT / tokens)
        else:  # no group of tokens is complete
            loss = torch.zeros((), device=out.device)
        self.layers.setdefault(module.layer_idx, loss.detach())
        return _Joined.apply(out, loss, self)

    def _average(
        self, kept: _Selection, query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, lse: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """UNIT times the sum of the tokens' losses, divided by all tokens."""
        projected, seen, real, pools = kept
        index_q, index_k, weights = (each.flatten(0, 1) for each in projected)
        attended = query.detach(), rows.detach()[:, 0], lse.detach()
        padding = ~real.flatten()[:, None]
        if pools is not None:
            indices = pools.slots.masked_fill(padding, -1)
            members = slots[:, : indices.shape[1] * pools.size]
            target = xt.indexer_target(*attended, members, softmax_scale=scaling)
            target = target.unflatten(1, (-1, pools.size)).sum(2)
            return xt.indexer_loss(index_q, index_k, weights, indices=indices, target=target, coeff=UNIT)[0][0]
        starts = ends = indices = None
        if self.dense and seen.order is None:  # ranges, of which no table is read
            count = projected.keys.shape[1]
            first = torch.arange(len(real), dtype=torch.int32, device=real.device)[:, None] * count
            bounds = seen.starts, torch.where(real, seen.ends, seen.starts)
            starts, ends = ((each + first).flatten() for each in bounds)
        else:
            indices = slots.masked_fill(padding, -1)
        return xt.indexer_loss(
            index_q, index_k, weights, *attended, ends, starts, indices, softmax_scale=scaling, coeff=UNIT
        )[0][0]


class _Total(torch.autograd.Function):
    """A sum, in whose backward the layers' gradient is noted: all layers' `_Joined` are behind it.

    A layer's loss is thus no tensor of its own beside the layer's result, which is all that FSDP and checkpoints see.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, layers: torch.Tensor, coeff: float, losses: IndexerLoss) -> torch.Tensor:
        ctx.coeff, ctx.losses = coeff, losses
        return loss + layers

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.losses._gradient = ctx.coeff * gradient[0].sum().float()
        return gradient[0], None, None, None


class _Joined(torch.autograd.Function):
    """A layer's result, in whose backward that of the layer's loss is begun."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, losses: IndexerLoss) -> torch.Tensor:
        ctx.losses, ctx.device = losses, loss.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.losses._gradient is None:
            raise ArgumentError("indexer_loss: the backward pass is of another loss than IndexerLoss.added_to gives")
        return gradient[0], ctx.losses._gradient.to(ctx.device), None
