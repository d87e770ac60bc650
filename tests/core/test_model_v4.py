"""ModelConfigV4 lists the kernels that serving DeepSeek-V4 launches."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV4Config

from xmla import ArgumentError, ModelConfigV4
from xmla.core.compile import Specialization
from xmla.core.models.calls import Call
from xmla.core.registry import registry
from xmla.core.values import H200
from xmla.demo import deepseek_v4
from xmla.torch_api._arrays import spec_of

SMALL = ModelConfigV4(
    heads=8, index_heads=16, index_dim=64, k=64, next_n=(1, 2, 3), mixed=True, batches=tuple(range(1, 9)),
    max_lens=(512, 4096), prefill_tokens=(64, 256),
)  # fmt: skip


def code(specializations: list[Specialization]) -> set[tuple[object, ...]]:
    """What of them does not depend on the dtypes of a model's weights."""
    return {(s.kernel.__name__, frozenset(s.constexprs), s.num_warps, s.num_stages) for s in specializations}


def test_a_decoding_model_calls_nothing_else(device: str) -> None:
    """The decode steps of a small model over its own caches, planned for an H200."""
    torch.manual_seed(0)
    model = deepseek_v4.build(device)
    run = deepseek_v4.run_replaced(model, torch.arange(14, device=device), 12, packed=False)
    scale = float(model.model.layers[0].self_attn.scaling)
    config = ModelConfigV4(
        heads=4, index_heads=4, k=16, cache_format="plain_v4", extra_format="plain_v4", page_size=deepseek_v4.PAGE,
        entry_pages=(deepseek_v4.ENTRY_PAGE[4], deepseek_v4.ENTRY_PAGE[128]), state_page=deepseek_v4.STATE_PAGE,
        softmax_scale=scale, dtype="float16", batches=(1,), max_lens=(26, 256), prefill_tokens=(),
    )  # fmt: skip
    listed, called = code(config.specializations(H200)), set()
    for layer in run.layers:
        for step in layer.steps[1:]:
            for call in step:
                op = registry()[call.op]
                specs = {n: spec_of(t) for n, t in zip(op.tensors, call.tensors, strict=False) if t is not None}
                plan = Call(call.op, specs, call.attrs).plan(H200)
                called |= {(k.name, frozenset(k.constexpr_values), k.num_warps, k.num_stages) for k in plan.active}
    assert len(called) > 10
    assert called <= listed


def test_the_models_own_sizes() -> None:
    """As in config.json of DeepSeek-V4-Pro, of which transformers' defaults, those of Flash, are half."""
    config = ModelConfigV4()
    assert (config.heads, config.index_heads, config.index_dim, config.k, config.window) == (128, 64, 128, 1024, 128)
    assert config.softmax_scale == 512**-0.5
    flash = DeepseekV4Config()
    assert (flash.num_attention_heads, flash.index_topk) == (config.heads // 2, config.k // 2)
    assert (flash.index_n_heads, flash.index_head_dim, flash.head_dim) == (config.index_heads, config.index_dim, 512)


def test_an_unknown_format() -> None:
    with pytest.raises(ArgumentError, match="a cache's format is 'v32', expected one of v4, v41, "):
        list(replace(SMALL, cache_format="v32").steps())
