"""GLM-5.3-Flash's selection of pools against that of transformers' glm5_next, on one set of weights."""

from dataclasses import replace

import kit
import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from xmla import ModelConfigGlmFlash, ModelConfigMistralLarge4, torch_api
from xmla.core.values import H200

LENGTH, PAGE = 43, 8


@kit.needs_glm
@pytest.mark.parametrize("pool", [4, 16])
def test_the_pools_and_tails_that_transformers_selects(pool: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # with many heads, so that no logits are 0 and tie
    config = Glm5NextTextConfig(
        hidden_size=64, index_n_heads=16, index_head_dim=128, index_topk=2 * pool, index_kpool=pool, q_lora_rank=32,
    )  # fmt: skip
    indexer = Glm5NextTextIndexer(config, 0).float()
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.normal_(std=0.3)
    hidden, residual = torch.randn(1, LENGTH, 64), torch.randn(1, LENGTH, 32)
    pooled_states = indexer.get_pooled_states

    def as_stored(packed_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, *rest = pooled_states(packed_states)
        return kit.as_stored(keys[0], device)[None], *rest

    monkeypatch.setattr(indexer, "get_pooled_states", as_stored)
    with torch.no_grad():
        q = indexer.wq_b(residual).view(LENGTH, 16, 128)
        q8 = q.to(torch.float8_e4m3fn)  # exact in both
        indexer.wq_b.register_forward_hook(lambda *_: q8.float().view(1, LENGTH, -1))
        want = indexer(hidden, residual, torch.ones(1, LENGTH, dtype=torch.bool), None)[0]
        keys = indexer.k_norm(indexer.wk(hidden))[0]
        gates = torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate)[0]
        weights = indexer.weights_proj(hidden)[0].float() * 16**-0.5 * 128**-0.5

    count = -(-LENGTH // PAGE)
    state = torch.full((count, PAGE, 256), torch.nan, device=device)
    cache = torch.full((count, PAGE, 132), 255, dtype=torch.uint8, device=device)
    table = torch.randperm(count, dtype=torch.int32, device=device)[None]
    for first, end in ((0, 17), (17, 18), (18, LENGTH)):  # a prompt in chunks, and a decoded token
        rows, positions = slice(first, end), torch.arange(first, end, dtype=torch.int32, device=device)
        part = [x[rows].to(device) for x in (keys, gates)]
        ape = indexer.index_kpool_compress_ape.detach().to(device)
        torch_api.pool_keys(*part, ape, positions, state, table, cache, table)
    lengths = torch.arange(1, LENGTH + 1, dtype=torch.int32, device=device)
    ids = torch.zeros(LENGTH, dtype=torch.int32, device=device)
    pools = torch_api.indexer_topk_paged(q8.to(device), weights.to(device), cache, table, lengths // pool, ids, k=2)
    indices = torch_api.expand_blocks(pools, lengths, granularity=pool)
    assert indices.shape == want.shape
    for mine, theirs in zip(indices.cpu(), want, strict=True):
        assert sorted(mine[mine >= 0].tolist()) == sorted(theirs[theirs >= 0].tolist())


def test_rows_of_512_plain_dims(device: str) -> None:
    """vLLM's rows by default: all dims are the key, and the value, of entries without roped dims."""
    torch.manual_seed(0)
    entries = torch.randn(2 * PAGE, 512, device=device).bfloat16()
    slots = torch.randperm(2 * PAGE, dtype=torch.int32, device=device)
    cache = torch.full((2, PAGE, 512), torch.nan, dtype=torch.bfloat16, device=device)
    torch_api.write_mla_cache(*(part.contiguous() for part in entries.split([448, 64], dim=1)), slots, cache)
    assert torch.equal(cache.view(-1, 512)[slots], entries)
    q = torch.randn(2, 8, 512, device=device).bfloat16()
    out, _ = torch_api.sparse_mla(q, cache, slots.expand(2, -1).contiguous(), softmax_scale=256**-0.5)
    logits = torch.einsum("thd,nd->thn", q.float(), entries.float()) * 256**-0.5
    want = torch.einsum("thn,nd->thd", logits.softmax(-1), entries.float())
    assert (out.float() - want).abs().max() <= 2**-7 * want.abs().max()


def test_plans_of_rows_of_512_plain_dims() -> None:
    """Also in Mistral-Large-4's layers without rope; on Hopper by the kernels that other plain rows have."""
    for config in (
        ModelConfigGlmFlash(cache_format="plain_v4"), ModelConfigMistralLarge4(nope_format="plain_v4"),
    ):  # fmt: skip
        config = replace(config, batches=(2,), max_lens=(4096,), prefill_tokens=(64,), next_n=(1,))
        kernels = {kernel.kernel.__name__ for kernel in config.specializations(H200)}
        assert "sparse_mla_sm90_kernel" in kernels and "sparse_mla_kernel" not in kernels
