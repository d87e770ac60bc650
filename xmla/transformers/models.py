"""The models of transformers that are served, and where xmla stands in their classes."""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.indexer import INDEXER_DIMS
from xmla.core.formats.mla import V32, VALUE_DIMS
from xmla.transformers import attention, entries, passes, pools
from xmla.transformers.asked import Asked, asked, asking
from xmla.transformers.attention import autocast, latents, of_16_bits
from xmla.transformers.cache import LatentCache
from xmla.transformers.learning import IndexerLoss
from xmla.transformers.masks import Seen, Visible, part, seen, visible
from xmla.transformers.replay import Selections
from xmla.transformers.selection import Keys, Projected, head_weights, select

NAME = "xmla"
A_TOKEN = ("hidden_states", "position_embeddings", "position_ids", "prev_topk_indices")  # of which a part has its own


def _rotate(module: nn.Module, interleaved: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The rotation of the file that defines a module's class."""
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    return getattr(sys.modules[type(module).__module__], name)


def _query(indexer: Any, x: torch.Tensor) -> torch.Tensor:
    return indexer.wq_b(x).unflatten(-1, (indexer.n_heads, indexer.head_dim))


def _project(
    indexer: Any, q: torch.Tensor, k: torch.Tensor, arguments: dict[str, Any], *, interleaved: bool = False,
    rope_last: bool = False,
) -> Projected:  # fmt: skip
    """Queries [B, S, I, D] and keys [B, S, D], of which some dims are rotated."""
    rope, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    k = k[:, :, None]
    (q_rest, q_rope), (k_rest, k_rope) = (
        each.split([rest, rope], -1) if rope_last else each.split([rope, rest], -1)[::-1] for each in (q, k)
    )
    q_rope, k_rope = _rotate(indexer, interleaved)(q_rope, k_rope, *arguments["position_embeddings"], unsqueeze_dim=2)
    q, k = (
        torch.cat([each_rest, each_rope] if rope_last else [each_rope, each_rest], -1)
        for each_rest, each_rope in ((q_rest, q_rope), (k_rest, k_rope))
    )
    return Projected(q, k[:, :, 0], head_weights(indexer, arguments["hidden_states"]))


def deepseek_v32(indexer: Any, arguments: dict[str, Any]) -> Projected:
    x = arguments["hidden_states"]
    return _project(indexer, _query(indexer, arguments["q_resid"]), indexer.k_norm(indexer.wk(x)), arguments)


def glm_moe_dsa(indexer: Any, arguments: dict[str, Any]) -> Projected:
    x = arguments["hidden_states"]
    q = _query(indexer, arguments["q_resid"])
    return _project(indexer, q, indexer.k_norm(indexer.wk(x)), arguments, interleaved=True)


def hy_v4(indexer: Any, arguments: dict[str, Any]) -> Projected:
    """The last dims are rotated; keys are normed in float32."""
    x = arguments["hidden_states"]
    k = indexer.k_norm(indexer.wk(x).to(indexer.k_norm.weight.dtype)).to(x.dtype)
    return _project(indexer, _query(indexer, arguments["q_resid"]), k, arguments, rope_last=True)


def mistral_large4(indexer: Any, arguments: dict[str, Any]) -> Projected:
    """Queries are of the hidden states and scaled by position; some layers rotate nothing."""
    x = arguments["hidden_states"]
    q, k = _query(indexer, indexer.q_input_norm(x)), indexer.k_norm(indexer.wk(x))
    q = indexer.softmax_scaling(q, arguments["position_ids"], head_dim_first=False)
    if indexer.use_rope:
        return _project(indexer, q, k, arguments, interleaved=True)
    return Projected(q, k, head_weights(indexer, x))


# Of each model type the file of its classes, how their names begin and how its indexer projects.
_CLASSES: dict[str, tuple[str, str, Callable[..., Projected]]] = {
    "deepseek_v32": ("deepseek_v32", "DeepseekV32", deepseek_v32),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa", glm_moe_dsa),
    "hy_v4": ("hy_v4", "HYV4", hy_v4),
    "mistral_large4_text": ("mistral_large4", "MistralLarge4Text", mistral_large4),
}
ENTRIES, POOLS = "deepseek_v4", "glm5_next_text"
SERVED = (*_CLASSES, ENTRIES, POOLS)
# The sizes that ops take, by a configuration's names.
_OF_LATENTS = {"kv_lora_rank": (VALUE_DIMS,), "index_head_dim": INDEXER_DIMS}
SIZES = {kind: {"qk_rope_head_dim": (V32.rope,), **_OF_LATENTS} for kind in _CLASSES}
SIZES |= {POOLS: _OF_LATENTS, ENTRIES: {"head_dim": (VALUE_DIMS,), "index_head_dim": INDEXER_DIMS}}


def mask(*sizes: Any, config: Any, **options: Any) -> torch.Tensor:
    """What layers of a served model get in place of a mask.

    Raises:
        UnsupportedError: It is not of `SERVED`.
    """
    if config.model_type not in SERVED:
        raise UnsupportedError(
            f"xmla.transformers: model_type is {config.model_type}, supported: {', '.join(SERVED)}; another "
            "attn_implementation serves it"
        )
    return (entries.window if config.model_type == ENTRIES else visible)(*sizes, **options)


def attend(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention of a layer, as transformers calls it."""
    of_kind = {ENTRIES: entries, POOLS: pools}.get(module.config.model_type, attention)
    return of_kind.attend(module, *args, **kwargs)


class _Layer(NamedTuple):
    """What the layers of a model have of their own.

    Attributes:
        part: The mask of some of a pass's queries, of the layer, the pass's arguments, the first and the last.
        cache: What makes the cache of a pass in parts that has none.
        seen: What the tokens of a pass may select, of the layer and the pass's arguments.
    """

    part: Callable[..., torch.Tensor]
    cache: Callable[..., Any]
    seen: Callable[..., Seen]


def serve() -> None:
    """Have the classes of each served model ask xmla, where their configuration names it."""
    for file, prefix, project in _CLASSES.values():
        module = _module(file)
        layer, indexer = getattr(module, f"{prefix}Attention"), getattr(module, f"{prefix}Indexer")
        layer.forward = _attention(layer.forward, _Layer(_part, LatentCache, seen))
        layer.expand_kv = _expand_kv(layer.expand_kv)
        indexer.forward = _indexer(indexer.forward, project)
        model = getattr(module, f"{prefix}Model")
        model.forward = passes.divided(model.forward, NAME, LatentCache)
    v4, glm = _module("deepseek_v4"), _module("glm5_next")
    layer = v4.DeepseekV4Attention
    layer.forward = _attention(layer.forward, _Layer(entries.part, DynamicCache, entries.seen))
    _instead(v4.DeepseekV4HCACompressor, "forward", entries.heavily)
    _instead(v4.DeepseekV4CSACompressor, "forward", entries.sparsely)
    _instead(v4.DeepseekV4Indexer, "forward", entries.index)
    v4.DeepseekV4Model.forward = passes.divided(v4.DeepseekV4Model.forward, NAME, DynamicCache)
    layer = glm.Glm5NextTextAttention
    layer.forward = _attention(layer.forward, _Layer(pools.part, LatentCache, pools.seen))
    layer.expand_kv = _expand_kv(layer.expand_kv)
    _instead(layer, "build_attention_mask_from_topk", pools.chosen)
    _instead(glm.Glm5NextTextIndexer, "forward", pools.index)
    glm.Glm5NextTextModel.forward = passes.divided(glm.Glm5NextTextModel.forward, NAME, LatentCache)


def _module(file: str) -> Any:
    return import_module(f"transformers.models.{file}.modeling_{file}")


def _instead(kind: Any, name: str, ours: Callable[..., Any]) -> None:
    """Have a class's method be ours where the configuration of its object names xmla."""
    own = getattr(kind, name)

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config if hasattr(self, "config") else self.rotary_emb.config
        return (ours if config._attn_implementation == NAME else own)(self, *args, **kwargs)

    setattr(kind, name, method)


def _part(layer: Any, whole: dict[str, Any], first: int, last: int) -> torch.Tensor:
    return part(whole["attention_mask"], whole["hidden_states"].shape[1], first, last)


def _indexer_of(layer: Any) -> Any:
    """The indexer of a layer, or None: DeepSeek-V4's is its compressor's."""
    return getattr(layer.compressor, "indexer", None) if hasattr(layer, "compressor") else layer.indexer


def _attention(own: Callable[..., Any], layer: _Layer) -> Callable[..., Any]:
    """A forward that knows the pass's `indexer_loss` and `selections`; of many queries in parts without gradients."""
    names = tuple(signature(own).parameters)[1:]

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = dict(zip(names, args, strict=False)) | kwargs
        if self.config._attn_implementation != NAME:
            _check_own(self.config, whole)
            return own(self, *args, **kwargs)
        _check_sizes(self.config)
        queries = whole["hidden_states"].shape[1]
        losses, selections = _options(self, layer, whole)
        selects = _indexer_of(self) is not None
        if losses is not None and selects:
            losses.begin(self.layer_idx, layer.seen(self, whole).real)

        def run(arguments: dict[str, Any], first: int, last: int) -> Any:
            chosen = None if selections is None or not selects else selections.of(self.layer_idx, first, last)
            if losses is None and chosen is None:
                return own(self, **arguments)
            with asking(Asked(losses, chosen)):
                return own(self, **arguments)

        if losses is not None or torch.is_grad_enabled() or queries <= passes.AT_ONCE:
            return run(whole, 0, queries)
        return _in_parts(self, layer, whole, run)

    return forward


def _check_sizes(config: Any) -> None:
    """Raise UnsupportedError where a model has keys of other sizes than ops take."""
    for name, served in SIZES[config.model_type].items():
        if getattr(config, name) not in served:
            raise UnsupportedError(
                f"xmla.transformers: {name} is {getattr(config, name)}, supported: {' or '.join(map(str, served))}"
            )


def _check_own(config: Any, whole: dict[str, Any]) -> None:
    """Raise UnsupportedError where another attention is given a `LatentCache` or `selections`."""
    latent = isinstance(whole.get("cache"), LatentCache)
    for name, there in (("LatentCache", latent), ("selections", whole.get("selections") is not None)):
        if there:
            raise UnsupportedError(f"{name}: the model attends by {config._attn_implementation!r}, supported: {NAME!r}")


def _options(module: Any, layer: _Layer, whole: dict[str, Any]) -> tuple[IndexerLoss | None, Selections | None]:
    """A pass's `indexer_loss` and `selections`.

    Raises:
        ArgumentError: One of them is something else, or does not fit the pass.
        UnsupportedError: The pass asks for attention's probabilities.
    """
    if whole.get("output_attentions"):
        raise UnsupportedError(
            "xmla.transformers: output_attentions is True, supported: False; attention's probabilities are not made, "
            'attn_implementation="eager" has them'
        )
    losses, selections = whole.get("indexer_loss"), whole.get("selections")
    for name, option, kind in (("indexer_loss", losses, IndexerLoss), ("selections", selections, Selections)):
        if option is not None and not isinstance(option, kind):
            raise ArgumentError(f"{name}: is {type(option).__name__}, expected {kind.__name__}")
    if selections is not None:
        if losses is not None and losses.dense:
            raise ArgumentError("selections: given with IndexerLoss(dense=True), which attends to all keys")
        if module.layer_idx == min(selections.layers):
            selections.check(module.layer_idx, layer.seen(module, whole), whole.get("cache"))
    return losses, selections


def _in_parts(module: Any, layer: _Layer, whole: dict[str, Any], run: Callable[..., Any]) -> tuple[Any, ...]:
    """What attention gives of a pass, by `run` of some of its queries at a time."""
    x = whole["hidden_states"]
    if whole.get("cache") is None:
        whole["cache"] = layer.cache(config=module.config)
    out, handed_on = torch.empty_like(x), []
    for each in passes.parts(x.shape[1]):
        a_token = {name: whole[name] for name in A_TOKEN if name in whole}
        some = whole | tree_map_only(torch.Tensor, lambda x, each=each: x[:, each], a_token)
        some["attention_mask"] = layer.part(module, whole, each.start, each.stop)
        out[:, each], _, *selection = run(some, each.start, each.stop)
        handed_on.append(selection)
    return out, None, *map(_joined, zip(*handed_on, strict=True))


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """The selection that a layer hands on, or None, of those of its parts, of which the first may have fewer keys."""
    chosen = [each for each in parts if each is not None]
    if not chosen:
        return None
    width = max(each.shape[-1] for each in chosen)
    return torch.cat([nn.functional.pad(each, (0, width - each.shape[-1]), value=-1) for each in chosen], 1)


def _expand_kv(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config._attn_implementation != NAME:
            return own(self, kv_nope, k_rot)
        rows = latents(kv_nope, k_rot)
        return rows, rows  # there are no values of their own

    return expand_kv


def _indexer(own: Callable[..., Any], project: Callable[..., Projected]) -> Callable[..., Any]:
    names = tuple(signature(own).parameters)[1:]

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.config._attn_implementation != NAME:
            return own(self, *args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        losses, selected = asked()
        cache = arguments.get("cache")
        if selected is not None and losses is None and cache is None:  # nobody reads what is projected
            ranges = Visible.of(arguments["attention_mask"], selected.shape[1], selected.shape[1])
            return ranges.places(selected.to(ranges.starts.device))
        read = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        with torch.set_grad_enabled(losses is not None and torch.is_grad_enabled()):
            query, keys, weights = project(self, read)
            projected = Projected(of_16_bits(query), autocast(keys), weights)
        keys = Keys(projected.keys.detach())
        if cache is not None:
            cached = cache.update_indexer(keys.values, self.layer_idx)
            keys = cached if isinstance(cached, Keys) else Keys(cached)
        queries, length = projected.query.shape[1], keys.values.shape[1]
        ranges = Visible.of(arguments["attention_mask"], queries, length)
        if losses is not None:
            if length != queries or isinstance(cache, LatentCache):  # whose rows of sequences are apart, or bytes
                raise UnsupportedError(
                    f"indexer_loss: {queries} tokens have {length} keys of a {type(cache).__name__}, supported: their "
                    "own; pass use_cache=False"
                )
            losses.keep(self.layer_idx, projected, ranges)
        if selected is not None:
            return ranges.places(selected.to(ranges.starts.device))
        with torch.no_grad():
            k = length if losses is not None and losses.dense else self.index_topk
            return select(projected.query, projected.weights, keys, ranges, k)

    return forward
