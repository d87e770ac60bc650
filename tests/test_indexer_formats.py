"""The indexer's caches over formats, page sizes, strides and lengths: round trips, and against the reference."""

import hypothesis.strategies as st
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from hypothesis import given, settings

from xmla import ArgumentError, torch_api
from xmla.core.formats.indexer import INDEXER_DIMS, INDEXER_LAYOUTS, IndexerLayout, of_ue8m0_words
from xmla.core.op import Case, Op
from xmla.core.ops.cases import block_tables, empty_pages, slots_of
from xmla.core.registry import registry
from xmla.core.values import LOGITS
from xmla.torch_api._all_ops import TORCH_OPS

DEVICE = "cuda" if HAS_GPU else "cpu"
OF_128 = [layout for layout in INDEXER_LAYOUTS if layout.dim == 128]  # one of every format
BF16 = np.dtype(ml_dtypes.bfloat16)


class Pool:
    """Random keys of a batch in a paged cache whose other bytes are NaN, written by `write_indexer_cache`."""

    def __init__(self, layout: IndexerLayout, entries: int, padding: int, lengths: list[int], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.layout, self.lengths = layout, np.array(lengths)
        pages = int(sum(-(-self.lengths // entries))) + 2
        width = max(1, -(-max(lengths) // entries)) + 1
        self.table = block_tables(self.rng, self.lengths, entries, pages, width)
        self.slots = slots_of(self.table, self.lengths, entries).astype(np.int64)
        keys = self.rng.standard_normal((len(self.slots), layout.dim)).astype(BF16)
        self.keys = (keys * np.exp2(self.rng.integers(-6, 6, (len(keys), 1)))).astype(BF16)
        self.array = empty_pages(pages, entries, layout.row, np.dtype(np.uint8), 4 * padding)
        self.cache = kit.to_torch(self.array, DEVICE)
        self.form = {"cache_format": layout.format}
        torch_api.write_indexer_cache(self.tensor(self.keys), self.tensor(self.slots), self.cache, **self.form)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return kit.to_torch(np.ascontiguousarray(array), DEVICE)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    return Pool(
        draw(st.sampled_from(INDEXER_LAYOUTS)), draw(st.sampled_from([1, 2, 16, 53, 64, 256])),
        draw(st.integers(0, 40)), draw(st.lists(st.integers(0, 150), min_size=1, max_size=3).filter(any)),
        draw(st.integers(0, 99)),
    )  # fmt: skip


@given(pools())
def test_write_then_read(pool: Pool) -> None:
    """Bytes are the reference's, unwritten bytes are untouched, reads return what was stored."""
    want = empty_pages(*pool.array.shape, np.dtype(np.uint8))
    registry()["write_indexer_cache"].reference(pool.keys, pool.slots, want, **pool.form)
    kit.assert_bits_equal("cache", pool.cache, want)
    order = pool.rng.permutation(len(pool.slots))
    keys, scales = torch_api.read_indexer_cache(pool.cache, pool.tensor(pool.slots[order]), **pool.form)
    values, factors = pool.layout.quantize(pool.keys[order])
    kit.assert_bits_equal("keys", keys, values)
    kit.assert_bits_equal("key_scales", scales, factors)
    # Half a step: of e4m3's three bits, or of e2m1's one, under scales that leave at least half of the range.
    exact, factor = pool.layout.operands(values, factors)
    error = np.abs(exact * factor[:, None] - pool.keys[order].astype(np.float64)).max(axis=1)
    largest = np.abs(pool.keys[order].astype(np.float64)).max(axis=1)
    assert (error <= largest * (2**-4 if pool.layout.values == "e4m3" else 2 / 6)).all()


@given(pools(), st.integers(1, 3), st.sampled_from([3, 16, 64]))
@settings(max_examples=20)
def test_logits_of_pages_and_of_gathered_keys(pool: Pool, next_n: int, heads: int) -> None:
    """Both are the reference's on the stored keys."""
    layout, tokens = pool.layout, len(pool.lengths) * next_n
    q8, weights = torch_api.quantize_indexer_query(
        pool.tensor(pool.rng.standard_normal((tokens, heads, layout.dim)).astype(BF16)),
        pool.tensor(pool.rng.standard_normal((tokens, heads)).astype(np.float32)),
        format=layout.query_format,
    )
    lengths = np.maximum(pool.lengths[:, None] - np.arange(next_n)[::-1], 0).astype(np.int32).reshape(-1)
    paged = torch_api.indexer_logits_paged(
        q8, weights, pool.cache, pool.tensor(pool.table), pool.tensor(lengths), **pool.form
    )
    arrays = (*map(kit.as_numpy, (q8, weights, pool.cache)), pool.table, lengths)
    (want,) = registry()["indexer_logits_paged"].reference(*arrays, **pool.form)
    kit.assert_close("logits", paged, want, LOGITS, ~np.isnan(want))

    keys, scales = torch_api.read_indexer_cache(pool.cache, pool.tensor(pool.slots), **pool.form)
    firsts = np.repeat(np.cumsum(pool.lengths) - pool.lengths, next_n).astype(np.int32)
    starts, ends = pool.tensor(firsts), pool.tensor((firsts + lengths).astype(np.int32))
    ragged = kit.as_numpy(torch_api.indexer_logits(q8, weights, keys, scales, starts, ends))
    # The bound is of an array: a row of one key may cancel, of products whose sums Hopper truncates.
    rows = list(enumerate(zip(firsts, lengths, strict=True)))
    got = np.concatenate([ragged[token, first : first + length] for token, (first, length) in rows])
    kit.assert_close("ragged", got, np.concatenate([want[token, :length] for token, (_, length) in rows]), LOGITS)


@pytest.mark.parametrize("layout", INDEXER_LAYOUTS, ids=lambda layout: f"{layout.format}-{layout.dim}")
def test_logits_of_keys_before_rounding(layout: IndexerLayout) -> None:
    """DeepGEMM's own bounds against what was not quantised, 1e-3 (fp8) and 2e-2 (fp4), over 16 tokens of 600 keys."""
    pool = Pool(layout, 64, 0, [600], seed=0)
    index_q = pool.rng.standard_normal((16, 64, layout.dim)).astype(BF16)
    weights = np.abs(pool.rng.standard_normal((16, 64))).astype(np.float32)
    arguments = pool.tensor(index_q), pool.tensor(weights)
    q8, folded = torch_api.quantize_indexer_query(*arguments, scale=1.0, format=layout.query_format)
    lengths = pool.tensor(np.full(16, 600, np.int32))
    logits = torch_api.indexer_logits_paged(
        q8, folded, pool.cache, pool.tensor(pool.table), lengths, max_len=600, **pool.form
    )
    dots = np.maximum(np.einsum("tid,nd->tni", index_q.astype(np.float64), pool.keys.astype(np.float64)), 0)
    exact = np.einsum("tni,ti->tn", dots, weights.astype(np.float64))
    got = kit.as_numpy(logits).astype(np.float64)
    difference = 1 - 2 * (got * exact).sum() / (got * got + exact * exact).sum()
    assert difference < (1e-3 if layout.values == "e4m3" else 2e-2), difference


@pytest.mark.parametrize("dim", INDEXER_DIMS)
def test_mxfp4_products_are_exact(dim: int) -> None:
    """Scales 2**±30 beside one another, queries that see one block alone: none is lost in another's range."""
    rng = np.random.default_rng(dim)
    layout, keys = IndexerLayout(dim, "mxfp4"), 200
    packed = rng.integers(0, 256, (keys, layout.value_bytes), np.uint8)
    scale_bytes = np.full((keys, 4), 127, np.uint8)
    scale_bytes[:, : dim // 32] = rng.integers(97, 158, (keys, dim // 32))
    scales = scale_bytes.view(np.int32)[:, 0]
    for block in range(dim // 32):
        q8 = np.zeros((2, 16, dim), ml_dtypes.float8_e4m3fn)
        q8[..., 32 * block : 32 * block + 32] = rng.integers(-3, 4, (2, 16, 32))
        weights = rng.integers(-2, 3, (2, 16)).astype(np.float32)
        starts, ends = np.zeros(2, np.int32), np.full(2, keys, np.int32)
        arrays = (q8, weights, packed, scales, starts, ends)
        got = torch_api.indexer_logits(*(kit.to_torch(a, DEVICE) for a in arrays))
        (want,) = registry()["indexer_logits"].reference(*arrays)
        assert want.any() and np.array_equal(kit.as_numpy(got), want.astype(np.float32))


def test_where_no_slot_is_valid_nothing_is_written(device: str) -> None:
    """By kernel and reference, in every format."""
    keys, slots = torch.ones(5, 128, device=device), torch.full((5,), -1, dtype=torch.int32, device=device)
    for layout in OF_128:
        cache = torch.full((3, 16, layout.row), 7, dtype=torch.uint8, device=device)
        for implementation in (None, "reference"):
            torch_api.write_indexer_cache(keys, slots, cache, cache_format=layout.format, implementation=implementation)
            assert bool((cache == 7).all())


def test_a_nan_key_ranks_last(device: str) -> None:
    """In every format a key with one NaN element is NaN, is picked last, and harms no other."""
    for layout in OF_128:
        keys, form = torch.ones(40, 128, device=device), {"cache_format": layout.format}
        keys[7, 50] = torch.nan
        cache = torch.zeros(3, 16, layout.row, dtype=torch.uint8, device=device)
        slots = torch.arange(40, dtype=torch.int32, device=device)
        torch_api.write_indexer_cache(keys, slots, cache, **form)
        index_q, negative = torch.ones(1, 4, 128, device=device), -torch.ones(1, 4, device=device)
        q8, weights = torch_api.quantize_indexer_query(index_q, negative)
        table = torch.arange(3, dtype=torch.int32, device=device)[None]
        lengths = torch.full((1,), 40, dtype=torch.int32, device=device)
        logits = torch_api.indexer_logits_paged(q8, weights, cache, table, lengths, **form)[0, :40]
        assert torch.isnan(logits).nonzero().tolist() == [[7]]
        picked = torch_api.indexer_topk_paged(q8, weights, cache, table, lengths, k=39, **form)
        assert picked[0].tolist() == [n for n in range(40) if n != 7]


def test_a_step_over_mxfp4(device: str) -> None:
    """dsa_attention's indices over an MXFP4 cache are its parts', with queries in the cache's format."""
    rng = np.random.default_rng(1)
    op = registry()["dsa_attention"]
    case = next(c for c in op.cases if c.name.startswith("mxfp4"))
    inputs = {name: kit.to_torch(array, device) for name, array in case.make(rng).items()}
    _, _, indices = torch_api.dsa_attention(*(inputs.get(n) for n in op.tensors), **case.attrs)
    q8, weights = torch_api.quantize_indexer_query(inputs["index_q"], inputs["index_weights"], format="mxfp4")
    assert q8.dtype == torch.bfloat16
    parts = (q8, weights, inputs["indexer_cache"], inputs["block_table"], inputs["lengths"])
    assert torch.equal(indices, torch_api.indexer_topk_paged(*parts, k=case.attrs["k"]))


def test_an_ambiguous_row_is_refused(device: str) -> None:
    cache = torch.zeros(2, 4, 68, dtype=torch.uint8, device=device)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ArgumentError, match="cache_format value is None"):
        torch_api.read_indexer_cache(cache, slots)
    fp8, mxfp4 = (torch_api.read_indexer_cache(cache, slots, cache_format=form) for form in ("fp8", "mxfp4"))
    assert [t.shape[1:] for t in (fp8[0], mxfp4[0])] == [(64,), (64,)]
    assert (fp8[0].dtype, fp8[1].dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (mxfp4[0].dtype, mxfp4[1].dtype) == (torch.uint8, torch.int32)


READ_UE8M0 = [
    (op, case)
    for op in registry().values()
    for case in op.cases
    if {"cache_format": "fp8_ue8m0", "indexer_cache_format": "fp8_ue8m0"}.items() & case.attrs.items()
    and op.outputs
    and not op.mutates
]


@pytest.mark.parametrize(("op", "case"), READ_UE8M0, ids=kit.case_id)
def test_ue8m0_scales_have_the_bits_of_the_floats_they_stand_for(op: Op, case: Case, device: str) -> None:
    """Of every op that reads such a cache: over the same keys with float32 scales it gives the same."""
    arrays = case.make(np.random.default_rng(0))
    name = next(n for n, tensor in op.tensors.items() if case.attrs.get(tensor.format_attribute) == "fp8_ue8m0")
    pool, attribute = arrays[name], op.tensors[name].format_attribute
    ue8m0, fp8, every = IndexerLayout(128, "fp8_ue8m0"), IndexerLayout(128), np.arange(pool.shape[0] * pool.shape[1])
    values, words = ue8m0.gather(pool, every)
    floats = empty_pages(*pool.shape, pool.dtype)
    fp8.scatter(floats, every, values, of_ue8m0_words(words).astype(np.float32))
    calls = ({name: pool}, case.attrs), ({name: floats}, {**case.attrs, attribute: None})
    both = [
        kit.as_tuple(getattr(TORCH_OPS, op.name)(*kit.torch_inputs(op, arrays | other, device), **attrs))
        for other, attrs in calls
    ]
    where = kit.written(op, op.reference(**arrays, **kit.attributes(op, case)))
    for result, got, want in zip(op.outputs, *both, strict=True):
        if result == "key_scales":
            scales = np.where(kit.as_numpy(got) == 0, 0, of_ue8m0_words(kit.as_numpy(got)))  # 0: of no slot
            kit.assert_bits_equal(result, scales.astype(np.float32), want)
        else:
            kit.assert_bits_equal(result, got, want, where if result == "logits" else None)


def test_a_scale_whose_four_bytes_differ_makes_its_key_nan(device: str) -> None:
    """By pages and by rows, as the references say, whichever byte differs."""
    layout, form = IndexerLayout(128, "fp8_ue8m0"), {"cache_format": "fp8_ue8m0"}
    cache = np.zeros((1, 16, layout.row), np.uint8)
    table = np.zeros((1, 1), np.int32)
    layout.scatter(cache, np.arange(16), *layout.quantize(np.ones((16, 128), np.float32)))
    cache.reshape(-1)[16 * 128 :].reshape(16, 4)[[3, 5, 7, 9], [0, 1, 2, 3]] ^= 128
    arrays = [kit.to_torch(array, device) for array in (cache, table, np.arange(16, dtype=np.int32))]
    q8, weights = torch_api.quantize_indexer_query(
        torch.ones(1, 4, 128, device=device), torch.ones(1, 4, device=device)
    )
    lengths = torch.full((1,), 16, dtype=torch.int32, device=device)
    paged = torch_api.indexer_logits_paged(q8, weights, *arrays[:2], lengths, **form)
    keys, scales = torch_api.read_indexer_cache(arrays[0], arrays[2], **form)
    ragged = torch_api.indexer_logits(q8, weights, keys, scales, 0 * lengths, lengths)
    for logits in (paged, ragged):
        assert torch.isnan(logits[0]).nonzero()[:, 0].tolist() == [3, 5, 7, 9]
        assert len(logits[0, ~torch.isnan(logits[0])].unique()) == 1


def test_queries_and_keys_are_transformed_alike(device: str) -> None:
    """A Hadamard transform of both selects the same keys but for rounding; of the queries alone others."""
    torch.manual_seed(0)
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) / 2**0.5
    keys, q, weights = torch.randn(2048, 128), torch.randn(4, 8, 128), torch.rand(4, 8)

    def selected(q: torch.Tensor, keys: torch.Tensor) -> list[set[int]]:
        cache = torch.zeros(32, 64, 132, dtype=torch.uint8, device=device)
        torch_api.write_indexer_cache(keys.to(device), torch.arange(2048, dtype=torch.int32, device=device), cache)
        table = torch.arange(32, dtype=torch.int32, device=device)[None]
        lengths = torch.full((4,), 2048, dtype=torch.int32, device=device)
        query = torch_api.quantize_indexer_query(q.to(device), weights.to(device))
        return [{*row} for row in torch_api.indexer_topk_paged(*query, cache, table, lengths, k=128).tolist()]

    want = selected(q, keys)
    shares = [
        sum(len(one & other) for one, other in zip(want, selected(q @ matrix, with_keys), strict=True)) / (4 * 128)
        for with_keys in (keys @ matrix, keys)
    ]
    assert shares[0] > 0.9 and shares[1] < 0.3, shares
