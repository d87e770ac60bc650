"""Properties of the ops over every format, page size, stride and length, against the reference."""

from dataclasses import replace

import hypothesis.strategies as st
import kit
import numpy as np
import pytest
import torch
from hypothesis import given

from xmla import torch_api
from xmla.core.formats.mla import MLA_LAYOUTS, VALUE_DIMS, MlaLayout
from xmla.core.ops.cases import mla_pool, normal
from xmla.core.registry import registry
from xmla.core.values import Spec

layouts = st.sampled_from(MLA_LAYOUTS)
page_sizes = st.sampled_from([1, 2, 3, 53, 64])
seeds = st.integers(0, 2**32 - 1)


def pool_of(rng: np.random.Generator, layout: MlaLayout, entries: int, used: np.ndarray, pages: int) -> np.ndarray:
    return mla_pool(rng, layout, pages, entries, used, layout.alignment * int(rng.integers(0, 9)))


@given(layouts, page_sizes, st.integers(1, 9), st.sampled_from(["scale", "amax"]), seeds)
def test_write_then_read(device: str, layout: MlaLayout, entries: int, tokens: int, floor: str, seed: int) -> None:
    """Bytes and rows are the reference's; a read of them gives what their writer rounded to."""
    rng = np.random.default_rng(seed)
    pages = -(-tokens // entries) + 1
    slots = rng.permutation(pages * entries + 2)[:tokens].astype(np.int32) - 1
    entry = (normal(rng, tokens, layout.dims, dtype=np.dtype(np.float32)) * np.exp2(rng.integers(-20, 9))).astype(
        np.float32
    )
    inputs = {
        "latent": entry[:, : layout.latent], "rope": entry[:, layout.latent :], "slots": slots,
        "cache": pool_of(rng, layout, entries, np.empty(0, np.int64), pages),
    }  # fmt: skip
    write, read = registry()["write_mla_cache"], registry()["read_mla_cache"]
    attrs = {"cache_format": layout.name, "scale_floor": floor}
    arguments = kit.torch_inputs(write, inputs, device)
    torch_api.write_mla_cache(*arguments, **attrs)
    cache, where = arguments[3], kit.to_torch(slots, device)
    rows = torch_api.read_mla_cache(cache, where, cache_format=layout.name, dtype="float32")
    write.reference(**inputs, **attrs)
    kit.assert_bits_equal("cache", cache, inputs["cache"])
    (want,) = read.reference(inputs["cache"], slots, cache_format=layout.name, dtype="float32")
    kit.assert_bits_equal("rows", rows, want)


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.name)
def test_a_step_over_each_format_has_the_bits_of_its_ops(layout: MlaLayout, device: str) -> None:
    """Writes and attention in one call; cases of the op have one format."""
    torch.manual_seed(0)
    pages, entries, keys = 6, 8, 48
    dtype = torch.uint8 if layout.packed else torch.bfloat16
    caches = torch.zeros(pages, entries, layout.row, dtype=dtype), torch.zeros(pages, entries, 132, dtype=torch.uint8)
    mla, indexer = (cache.to(device) for cache in caches)
    table = torch.randperm(pages, device=device).int().view(2, 3)
    lengths = torch.tensor([20, 13], dtype=torch.int32, device=device)

    def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randn(shape, device=device) for shape in shapes]

    latent, rope, index_k = drawn((keys, layout.latent), (keys, layout.rope), (keys, 128))
    slots = torch.arange(keys, dtype=torch.int32, device=device)
    torch_api.write_mla_cache(latent, rope, slots, mla, cache_format=layout.name)
    torch_api.write_indexer_cache(index_k, slots, indexer)
    new = drawn((2, layout.latent), (2, layout.rope), (2, 128))
    place = (lengths - 1).long()
    written = (table.gather(1, (place // entries)[:, None])[:, 0] * entries + place % entries).int()
    q, index_q, weights = drawn((2, 4, layout.dims), (2, 4, 128), (2, 4))
    attended = q.bfloat16(), index_q, weights
    attrs = {"k": 6, "softmax_scale": 0.1, "mla_cache_format": layout.name}
    apart = mla.clone(), indexer.clone()
    found = torch_api.dsa_step(*new, written, *attended, mla, indexer, table, lengths, **attrs)
    torch_api.write_mla_cache(*new[:2], written, apart[0], cache_format=layout.name)
    torch_api.write_indexer_cache(new[2], written, apart[1])
    want = torch_api.dsa_attention(*attended, *apart, table, lengths, **attrs)
    for name, got, wanted in zip(("out", "lse", "indices", "mla", "indexer"), (*found, mla, indexer), (*want, *apart),
                                 strict=True):  # fmt: skip
        kit.assert_bits_equal(name, got, wanted)


@given(st.data(), page_sizes, page_sizes, st.integers(1, 40), st.integers(0, 40), st.booleans(), seeds)
def test_attention_over_two_sources(
    device: str, data: st.DataObject, entries: int, others: int, keys: int, extra_keys: int, with_lengths: bool,
    seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    layout = data.draw(layouts)
    partners = [other for other in MLA_LAYOUTS if (other.dims, other.tail) == (layout.dims, layout.tail)]
    extra = data.draw(st.sampled_from(partners)) if extra_keys else None
    tokens, heads = 2, int(rng.integers(1, 20))
    inputs = {"q": normal(rng, tokens, heads, layout.dims)}
    attrs = {"softmax_scale": 0.05, "cache_format": layout.name}
    largest = 1.0  # of the values: with few keys an average of magnitudes, Σ p |v|, may come near it
    for prefix, source, size, count in (("", layout, entries, keys), ("extra_", extra, others, extra_keys)):
        if source is None:
            continue
        pages = 2 * -(-count // size) + 1
        slots = rng.integers(-1, pages * size + 1, (tokens, count)).astype(np.int32)
        lengths = rng.integers(-1, count + 2, tokens).astype(np.int32)
        seen = np.arange(count) < (lengths[:, None] if with_lengths else count)
        used = slots[seen & (slots >= 0) & (slots < pages * size)]
        cache = pool_of(rng, source, size, used, pages)
        rows = registry()["read_mla_cache"].reference(
            cache=cache, slots=used, cache_format=source.name, dtype="float32"
        )
        largest = max(largest, float(np.abs(rows[0][:, :VALUE_DIMS]).max(initial=0)))
        inputs |= {f"{prefix}cache": cache, f"{prefix}slots": slots}
        if with_lengths:
            inputs[f"{prefix}lengths"] = lengths
        attrs[f"{prefix}cache_format"] = source.name
    op = registry()["sparse_mla"]
    got = torch_api.sparse_mla(*kit.torch_inputs(op, inputs, device), **attrs)
    want = op.reference(**inputs, **attrs)
    for (name, reference), value in zip(kit.results(op, want), got, strict=True):
        assert not np.isnan(reference).any()
        bound = op.outputs[name].agreement
        if name == "out":
            bound = replace(bound, absolute=largest * bound.absolute)
        kit.assert_close(name, value, reference, bound)
    assert Spec.of_numpy(inputs["cache"]).shape[2] == layout.row
