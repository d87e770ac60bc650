"""Hy4's layers, with a sink for each head, and Mistral-Large-4's, with latents of other layers, by xmla's ops.

On one set of weights with transformers' own layers, whose rotation and projections are the engine's: the same keys are
selected, and attention is the same up to the rounding of rows and queries to float16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import kit
import pytest
import torch

from xmla import ArgumentError, model_config, torch_api
from xmla.core.values import H200

LENGTH, PAGE, K, HIDDEN = 29, 8, 6, 64
ROUNDING = 2e-3  # of the largest element: float16 rows and queries, 2**-11 each, a few of them added up
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 32, "v_head_dim": 16,
    "index_topk": K, "index_n_heads": 16, "attn_implementation": "eager",
}  # fmt: skip


def random(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.float().parameters():
            parameter.normal_(std=0.2)
    return module


@dataclass
class Stored:
    """What layers store of the whole prompt, as xmla's caches round it, in the place of transformers' cache."""

    device: str
    latents: dict[int, torch.Tensor] = field(default_factory=dict)  # of a layer [N, 512 or 576]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # of a layer's indexer [N, 128], not rounded

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self.latents[layer] = torch.cat([latent, rope], dim=-1)[0, 0].half()
        return latent.half().float(), rope.half().float()

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys[layer] = keys[0]
        return kit.as_stored(keys[0], self.device)[None]


@contextmanager
def caught(module: torch.nn.Module, results: list[torch.Tensor]) -> Iterator[None]:
    """What a projection of a layer gets as its input."""
    hook = module.register_forward_pre_hook(lambda _, inputs: results.append(inputs[0][0]))
    yield
    hook.remove()


@dataclass
class Pages:
    """A pool of one request, with its pages in another order."""

    device: str
    table: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        count = -(-LENGTH // PAGE)
        self.table = torch.randperm(count, dtype=torch.int32, device=self.device)[None]
        self.lengths = torch.arange(1, LENGTH + 1, dtype=torch.int32, device=self.device)

    def slots(self) -> torch.Tensor:
        positions = torch.arange(LENGTH, dtype=torch.int32, device=self.device)[None]
        return torch_api.map_slots(positions, self.table, page_size=PAGE)[0][0]

    def write(self, rows: torch.Tensor) -> torch.Tensor:
        """Latent entries as plain rows."""
        cache = torch.full((self.table.numel(), PAGE, rows.shape[1]), torch.nan, dtype=rows.dtype, device=self.device)
        dims = (512, 64) if rows.shape[1] == 576 else (448, 64)
        latent, rope = rows.to(self.device).split(dims, dim=1)
        torch_api.write_mla_cache(latent.contiguous(), rope.contiguous(), self.slots(), cache)
        return cache

    def write_keys(self, keys: torch.Tensor) -> torch.Tensor:
        cache = torch.full((self.table.numel(), PAGE, 132), 255, dtype=torch.uint8, device=self.device)
        torch_api.write_indexer_cache(keys.to(self.device), self.slots(), cache)
        return cache


def absorbed(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, nope + rope] in the latents' dims, in float16, and the up-projection of latents to values."""
    up_key, up_value = module.kv_b_proj.weight.view(module.num_heads, -1, 512).split(
        [module.qk_nope_head_dim, module.v_head_dim], dim=1
    )
    nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    return torch.cat([torch.einsum("thn,hnl->thl", nope, up_key), rope], dim=-1).half(), up_value


def check(
    selected: torch.Tensor, out: torch.Tensor, up_value: torch.Tensor, theirs: torch.Tensor, attended: torch.Tensor
) -> None:
    """The keys of each token, and attention's output [T, H, V], flat."""
    for row, (mine, keys) in enumerate(zip(selected.cpu(), theirs, strict=True)):
        assert mine[mine >= 0].tolist() == sorted(key for key in keys.tolist() if key <= row)
    values = torch.einsum("thl,hvl->thv", out.cpu().float(), up_value).flatten(1)
    assert (values - attended).abs().max() <= ROUNDING * attended.abs().max()


@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (1024, 64)])
def test_other_latents_are_refused(latent: int, rope: int, device: str) -> None:
    """A.X-K2-Light's, and those of dots3's windows."""
    row = latent + rope
    q, cache = (torch.zeros(2, 4, row, dtype=torch.bfloat16, device=device) for _ in range(2))
    slots = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(ArgumentError, match=rf"sparse_mla: cache axis ROW \(axis 2\) of bfloat16 is {row}, expected "):
        torch_api.sparse_mla(q, cache, slots, softmax_scale=1.0)
    parts = q[:, 0].split([latent, rope], dim=1)
    with pytest.raises(ArgumentError, match=rf"write_mla_cache: cache axis ROW .* is {row}, expected .* 576 elements"):
        torch_api.write_mla_cache(*parts, slots[:, 0], cache)


@kit.needs_glm
def test_what_plans_are_for_is_what_transformers_builds() -> None:
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
    from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig

    models = (
        ("glm_moe_dsa", GlmMoeDsaConfig()), ("hy_v4", HYV4Config()), ("mistral_large4", MistralLarge4TextConfig()),
    )  # fmt: skip
    for name, theirs in models:
        mine = model_config(theirs, batches=(2,), max_lens=(4096,), next_n=(1,), prefill_tokens=(64,))
        assert mine.softmax_scale == theirs.qk_head_dim**-0.5
        calls = [call for _, calls in mine.steps() for call in calls]
        dims = {call.specs["q"].shape[2] for call in calls if call.op in ("dsa_attention", "sparse_mla")}
        assert dims == ({512, 576} if name == "mistral_large4" else {576})
        assert all(("sink" in call.specs) == (name == "hy_v4") for call in calls if "sparse_mla" in call.op)
        assert mine.specializations(H200)


def causal() -> torch.Tensor:
    return torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)


def without_rotation(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, LENGTH, dims), torch.zeros(1, LENGTH, dims)


@kit.needs_glm
@torch.no_grad()
def test_hy4(device: str) -> None:
    """A layer that selects, and one that attends to the same keys; each head has a sink."""
    from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention

    torch.manual_seed(0)
    config = HYV4Config(**SIZES, q_lora_rank=32, num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    hidden, cache, pages, selection = torch.randn(1, LENGTH, HIDDEN), Stored(device), Pages(device), None
    for layer in range(2):
        module = random(HYV4Attention(config, layer))
        queries, attended = [], []
        if module.indexer is not None:  # queries that e4m3 holds
            module.indexer.wq_b.register_forward_hook(lambda *args: args[2].to(torch.float8_e4m3fn).float())
            module.indexer.wq_b.register_forward_hook(lambda *args, queries=queries: queries.append(args[2][0]))
        with caught(module.o_proj, attended):
            _, _, theirs = module(hidden, without_rotation(64), causal(), cache, prev_topk_indices=selection)
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))[0].view(LENGTH, 4, -1)
        q, up_value = absorbed(module, query)
        rows, sink = pages.write(cache.latents[layer]), module.sinks.to(device)
        if module.indexer is not None:
            index_q = queries[0].view(LENGTH, 16, 128).to(device)
            weights, keys = module.indexer.weights_proj(hidden)[0].to(device), pages.write_keys(cache.keys[layer])
            out, _, mine = torch_api.dsa_attention(
                q.to(device), index_q, weights, rows, keys, pages.table, pages.lengths, None, sink, k=K,
                softmax_scale=float(module.scaling),
            )  # fmt: skip
        else:
            out, _ = torch_api.sparse_mla_paged(
                q.to(device), rows, mine, pages.table, pages.lengths, None, sink, softmax_scale=float(module.scaling)
            )
        gate = module.gate_proj(hidden)[0].sigmoid()
        check(mine, out, up_value, theirs[0], attended[0] / gate)
        selection = theirs


def pairs_apart(rope: torch.Tensor) -> torch.Tensor:
    """Roped dims as transformers' rotation of neighbours leaves them: the first of each pair, then the second."""
    return rope.unflatten(-1, (-1, 2)).mT.flatten(-2)


@kit.needs_glm
@torch.no_grad()
def test_mistral_large_4(device: str) -> None:
    """Layers with rope and without it that own their latents, then one of each that has those of the first.

    A layer without latents of its own selects by its own indexer's keys, or attends to the keys of the layer before.
    """
    from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig
    from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextAttention

    torch.manual_seed(0)
    config = MistralLarge4TextConfig(
        **SIZES, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], kv_source_layers=[0, 1, 0, 1],
        indexer_types=["full", "full", "full", "shared"],
    )  # fmt: skip
    hidden, cache, pages, selection = torch.randn(1, LENGTH, HIDDEN), Stored(device), Pages(device), None
    positions, shared, rows = torch.arange(LENGTH)[None], {}, {}
    for layer, source in enumerate(config.kv_source_layers):
        module = random(MistralLarge4TextAttention(config, layer))
        queries, attended = [], []
        if module.indexer is not None:
            module.indexer.softmax_scaling.register_forward_hook(lambda *args: args[2].to(torch.float8_e4m3fn).float())
            module.indexer.softmax_scaling.register_forward_hook(
                lambda *args, queries=queries: queries.append(args[2][0])
            )
        with caught(module.o_proj, attended):
            _, _, theirs = module(
                hidden, without_rotation(64), causal(), shared, positions, cache, prev_topk_indices=selection
            )
        query = module.q_proj(hidden).view(1, LENGTH, 4, -1).transpose(1, 2)
        query = module.softmax_scaling(query, positions, head_dim_first=True)[0].transpose(0, 1)
        if module.use_rope:
            query = torch.cat([query[..., :-64], pairs_apart(query[..., -64:])], dim=-1)
        q, up_value = absorbed(module, query)
        assert (layer in cache.latents) == (layer == source) and (layer in cache.keys) == (layer != 3)
        if layer == source:
            rows[layer] = pages.write(cache.latents[layer])
        if module.indexer is not None:
            weights, keys = module.indexer.weights_proj(hidden)[0].to(device), pages.write_keys(cache.keys[layer])
            if module.use_rope:
                queries[0][..., :64] = pairs_apart(queries[0][..., :64])
            out, _, mine = torch_api.dsa_attention(
                q.to(device), queries[0].to(device), weights, rows[source], keys, pages.table, pages.lengths, k=K,
                softmax_scale=float(module.scaling),
            )  # fmt: skip
        else:
            out, _ = torch_api.sparse_mla_paged(
                q.to(device), rows[source], mine, pages.table, pages.lengths, softmax_scale=float(module.scaling)
            )
        check(mine, out, up_value, theirs[0], attended[0])
        selection = theirs
