"""NeMo AutoModel's own layers of GLM-5 and DeepSeek-V4, forward and backward, by their dense code and by the adapters.

`make trainers` installs it and runs this on the CPU.
"""

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("nemo_automodel") is None:
    pytest.skip("needs NeMo AutoModel: make trainers", allow_module_level=True)

import automodel_glm
import automodel_v4
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v3.rope_utils import freqs_cis_from_position_ids, precompute_freqs_cis
from nemo_automodel.components.models.deepseek_v4 import layers as v4
from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config
from nemo_automodel.components.models.glm_moe_dsa import layers as glm
from small_transformers import assert_as_near, distance
from transformers import GlmMoeDsaConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # AutoModel's own
LENGTHS = (14, 19)  # of documents
TOKENS = sum(LENGTHS)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tilelang_indexer_topk", "tilelang_sparse_attention", "is_dsa_kernel_available", "should_use_tilelang")
    for module, replaced in ((glm, names), (v4, ("dsv4_sparse_attention", "dsv4_indexer_scores"))):
        for name in replaced:
            monkeypatch.setattr(module, name, getattr(module, name))  # and back again
    automodel_glm.install()
    automodel_v4.install()


def backend(attention: str) -> BackendConfig:
    return BackendConfig(attn=attention, linear="torch", rms_norm="torch_fp32", rope_fusion=False)


def glm_layer(device: str, topk: int = 64, **how: Any) -> Any:
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        hidden_size=64, num_attention_heads=4, q_lora_rank=32, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, index_n_heads=4, index_head_dim=128, index_topk=topk,
    )  # fmt: skip
    config.torch_dtype = "bfloat16"
    layer = glm.GlmMoeDsaMLA(config, backend("tilelang"), **how).to(device)
    layer.init_weights(torch.device(device), init_std=0.1)
    return layer


def dense(layer: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The layer by AutoModel's own code."""
    own = copy.deepcopy(layer).to(dtype)
    for module in own.modules():
        if hasattr(module, "backend"):
            module.backend = backend("sdpa")
    own.attn_func = glm.initialize_attn_module_and_func("sdpa", 4, 96, 32, own.softmax_scale)[1]
    return own


def angles(positions: torch.Tensor) -> torch.Tensor:
    freqs = precompute_freqs_cis(64, 128, 10000.0, None).to(positions.device)
    return freqs_cis_from_position_ids(positions[None], freqs)[0]


def documents(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [T, 64], angles and the sums of lengths."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, 64, device=device).bfloat16()
    positions = torch.cat([torch.arange(each, device=device) for each in LENGTHS])
    sums = torch.tensor([0, LENGTHS[0], TOKENS], dtype=torch.int32, device=device)
    return x, angles(positions), sums


def test_outputs_and_gradients_of_glm_are_automodels(installed: None, device: str) -> None:
    """Packed documents beside each of them alone, with all keys selected."""
    layer = glm_layer(device)
    exact, own = dense(layer, torch.float32), dense(layer)
    x, freqs, sums = documents(device)
    out = layer(x, freqs, cu_seqlens=sums)
    results = [out]
    for each in (exact, own):
        parts = [
            each(part[None].to(each.o_proj.weight.dtype), angle[None])[0]
            for part, angle in zip(x.split(LENGTHS), freqs.split(LENGTHS), strict=True)
        ]
        results.append(torch.cat(parts))
    for result in results:
        result.float().square().sum().backward()
    assert_as_near(layer, exact, own)
    errors = [distance(each.float(), results[1], torch.ones_like(results[1]).bool()) for each in (out, results[2])]
    assert errors[0] < 1.5 * errors[1] + 0.005
    assert layer.kv_b_proj.weight.grad.any() and layer.indexer.wk.weight.grad is None


def test_selected_keys_are_automodels(installed: None, device: str) -> None:
    """Of packed documents, in coordinates of the pack, and where a rank has some of the queries."""
    layer = glm_layer(device, topk=8)
    x, freqs, sums = documents(device)
    residual = layer.q_a_layernorm(layer.q_a_proj(x))
    found = layer.indexer(x, residual, freqs, cu_seqlens=sums)
    assert found.shape == (TOKENS, 1, 8) and found.dtype == torch.int32
    own, first = dense(layer).indexer, 0
    shares = []
    for length in LENGTHS:
        part = slice(first, first + length)
        theirs = own(x[None, part], residual[None, part], freqs[None, part])[0]
        for token in range(length):
            keys = set(found[first + token, 0].tolist()) - {-1}
            expected = {first + int(key) for key in theirs[token] if key <= token}
            assert len(keys) == min(token + 1, 8) and all(first <= key <= first + token for key in keys)
            shares.append(len(keys & expected) / len(keys))
        first += length
    assert sum(shares) / len(shares) > 0.99, "but for ties: scores of heads that are all negative are 0"
    q, k, weights = (torch.randn(TOKENS, *shape, device=device) for shape in ((4, 128), (128,), (4,)))
    q, k = q.bfloat16(), k.bfloat16()
    whole = automodel_glm.select(q, k, weights, sums, 8)
    some = torch.arange(1, TOKENS, 3, device=device)
    assert torch.equal(automodel_glm.select(q[some], k, weights[some], sums, 8, query_indices=some), whole[some])


def test_padding_between_documents_is_selected_by_nobody(installed: None, device: str) -> None:
    torch.manual_seed(2)
    q, k, weights = (torch.randn(24, *shape, device=device) for shape in ((4, 128), (128,), (4,)))
    sums, padded = (torch.tensor(each, dtype=torch.int32, device=device) for each in ((0, 5, 15), (0, 8, 24)))
    found = automodel_glm.select(q.bfloat16(), k.bfloat16(), weights, sums, 64, cu_seqlens_padded=padded)[:, 0]
    for rows, keys in ((found[:8], range(5)), (found[8:], range(8, 18))):
        assert set(rows.flatten().tolist()) == {-1, *keys}


def test_attention_at_a_selection_that_layers_share(installed: None, device: str) -> None:
    layer = glm_layer(device, topk=8, skip_topk=True)
    exact, own = dense(layer, torch.float32), dense(layer)
    torch.manual_seed(3)
    x, freqs = torch.randn(TOKENS, 64, device=device).bfloat16(), angles(torch.arange(TOKENS, device=device))
    rows = torch.stack([torch.randperm(token + 1)[:8].repeat(8)[:8] for token in range(TOKENS)]).to(device)
    first = torch.arange(8, device=device) <= torch.arange(TOKENS, device=device)[:, None]
    selected = torch.where(first, rows, -1).int()[:, None]
    theirs = [
        each(x[None].to(each.o_proj.weight.dtype), freqs[None], prev_topk_indices=rows[None]) for each in (exact, own)
    ]
    for result in (layer(x, freqs, prev_topk_indices=selected), *theirs):
        result.float().square().sum().backward()
    assert_as_near(layer, exact, own)


def v4_layer(device: str, ratio: int, topk: int) -> Any:
    torch.manual_seed(0)
    config = DeepseekV4Config(
        hidden_size=64, num_attention_heads=4, head_dim=512, qk_rope_head_dim=64, q_lora_rank=32, o_lora_rank=32,
        o_groups=2, compress_ratios=[ratio], sliding_window=8, index_head_dim=128, index_n_heads=4, index_topk=topk,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)  # as AutoModel does for projections
    try:
        layer = v4.DeepseekV4Attention(config, 0, backend("tilelang")).to(device)
    finally:
        torch.set_default_dtype(torch.float32)
    layer.init_weights(torch.device(device), init_std=0.1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "sinks" in name or "ape" in name:
                parameter.normal_()
    return layer


def run_v4(layer: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1], device=x.device)[None].expand(len(x), -1)
    rotations = [
        v4.DeepseekV4RotaryEmbedding(rope_theta=theta, head_dim=512, partial_rotary_factor=64 / 512).to(x.device)
        for theta in (10000.0, 160000.0)
    ]
    back = positions[0, :, None] - positions[0]
    seen = (back >= 0) & (back < 8)
    mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
    mask = mask.expand(len(x), 1, -1, -1)
    embeddings = [rotation(x, positions) for rotation in rotations]
    out, _ = layer(x, embeddings[0], mask, embeddings[1], rotations[1], position_ids=positions)
    return out


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_outputs_and_gradients_of_v4_are_automodels(ratio: int, installed: None, device: str) -> None:
    """Of two sequences, a window alone, with an indexer that selects all entries, and with entries without one."""
    layer = v4_layer(device, ratio, 64)
    own = copy.deepcopy(layer)
    for module in own.modules():
        if hasattr(module, "backend"):
            module.backend = backend("eager")
    exact = copy.deepcopy(own).float()
    torch.manual_seed(1)
    x = torch.randn(2, 27, 64, device=device).bfloat16()
    results = [run_v4(layer, x), run_v4(exact, x.float()), run_v4(own, x)]
    for result in results:
        result.float().square().sum().backward()
    assert_as_near(layer, exact, own)
    errors = [distance(each.float(), results[1], torch.ones_like(results[1]).bool()) for each in results[::2]]
    assert errors[0] < 1.5 * errors[1] + 0.005


def test_entries_that_v4s_indexer_selects_are_automodels(installed: None, device: str) -> None:
    layer = v4_layer(device, 4, 3)
    chosen: list[torch.Tensor] = []
    layer.compressor.indexer.register_forward_hook(lambda module, args, result: chosen.append(result))
    torch.manual_seed(1)
    x = torch.randn(2, 40, 64, device=device).bfloat16()
    for attention in ("tilelang", "eager"):
        for module in layer.modules():
            if hasattr(module, "backend"):
                module.backend = backend(attention)
        run_v4(layer, x)
    complete = (torch.arange(40, device=device) + 1) // 4
    ours, theirs = (
        torch.zeros(2, 40, 10, dtype=torch.bool, device=device).scatter(2, each, True)
        & (torch.arange(10, device=device) < complete[:, None])
        for each in chosen
    )
    assert (ours == theirs).float().mean() > 0.99, "but for ties: scores of heads that are all negative are 0"
