"""V4's compressor and its slots over any course of tokens: chunks, drafts, rings, page sizes."""

from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any

import hypothesis.strategies as st
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from compressor import compressed
from conftest import HAS_GPU
from hypothesis import given, settings

from xmla import torch_api
from xmla.core.formats import stored_values
from xmla.core.op import plan_call
from xmla.core.ops.cache.compress_kv.cases import angles
from xmla.core.registry import registry
from xmla.torch_api._prepared import plan_tensors

DEVICE = "cuda" if HAS_GPU else "cpu"
DIM, LENGTH = 32, 32  # small keys, so that many tokens are quick


def tensor(array: np.ndarray) -> torch.Tensor:
    return kit.to_torch(np.ascontiguousarray(array), DEVICE)


@dataclass
class Compressor:
    """One request's compressor of 32-dim keys: its projections of LENGTH tokens, its state and cache."""

    ratio: int
    series: int
    page: int
    state_page: int
    ring: int | None = None  # pages of the state's ring

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.ratio * 7 + self.page)
        width = self.series * DIM
        kv, score = (rng.standard_normal((LENGTH, width)).astype(ml_dtypes.bfloat16) for _ in range(2))
        self.kv, self.score = tensor(kv), tensor(score)
        self.ape = tensor(rng.standard_normal((self.ratio, width)).astype(np.float32))
        self.weight = tensor(rng.uniform(0.5, 1.5, DIM).astype(np.float32))
        self.angles = tensor(angles(LENGTH, 16))
        columns = -(-LENGTH // self.state_page)
        owned = min(self.ring or columns, columns)
        own = rng.permutation(owned + 1)[:owned]
        self.state_table = tensor(own[np.arange(columns) % owned][None].astype(np.int32))
        self.state = torch.full((owned + 1, self.state_page, 2 * width), torch.nan, device=DEVICE)
        pages = -(-(LENGTH // self.ratio) // self.page) + 1
        self.block_table = tensor(rng.permutation(pages)[None].astype(np.int32))
        self.cache = torch.full((pages, self.page, DIM + 4), 255, dtype=torch.uint8, device=DEVICE)

    def feed(self, first: int, end: int, noise: float = 0.0) -> None:
        """Tokens first … end − 1 in one call; with noise, drafts that are not the request's tokens."""
        chunk = slice(first, end)
        positions = torch.arange(first, end, device=DEVICE, dtype=torch.int32)
        torch_api.compress_kv(
            self.kv[chunk] + noise, self.score[chunk] * (1 + noise), self.ape, self.weight, self.angles, positions,
            self.state, self.state_table, self.cache, self.block_table,
        )  # fmt: skip

    def entries(self) -> torch.Tensor:
        """Bytes of the complete entries' values and scales, in order."""
        order = torch.arange(LENGTH // self.ratio, device=DEVICE, dtype=torch.int32)[None]
        slots, counts = torch_api.map_slots(order, self.block_table, page_size=self.page)
        assert int(counts) == order.shape[1]
        values, scales = torch_api.read_indexer_cache(self.cache, slots[0], cache_format="fp8")
        return torch.cat([values.view(torch.uint8), scales[:, None].view(torch.uint8)], dim=1)


GEOMETRY = st.fixed_dictionaries({
    "ratio": st.integers(1, 7), "series": st.sampled_from([1, 2]), "page": st.sampled_from([1, 3, 16]),
    "state_page": st.sampled_from([1, 4, 5]),
})  # fmt: skip


@given(GEOMETRY, st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=9))
@settings(max_examples=8)
def test_any_course_of_tokens_gives_the_same_entries(geometry: dict[str, Any], course: list[tuple[int, int]]) -> None:
    """All tokens at once, or some at a time each time with drafts behind them that are then replaced."""
    whole = Compressor(**geometry)
    whole.feed(0, LENGTH)
    pieces = Compressor(**geometry)
    first = 0
    for count, drafts in cycle(course):
        end = min(first + count, LENGTH)
        if drafts and end < LENGTH:
            pieces.feed(end, min(end + drafts, LENGTH), noise=2.0)
        pieces.feed(first, end)
        first = end
        if first == LENGTH:
            break
    kit.assert_bits_equal("entries", pieces.entries(), whole.entries())
    kit.assert_bits_equal("state", pieces.state, whole.state)


@given(GEOMETRY, st.integers(1, 9))
@settings(max_examples=8)
def test_the_smallest_ring_is_enough(geometry: dict[str, Any], step: int) -> None:
    """A ring of n positions serves calls of n − C·r + 1 tokens."""
    reach = geometry["series"] * geometry["ratio"] - 1
    pages = -(-(step + reach) // geometry["state_page"])
    step = pages * geometry["state_page"] - reach  # the most that those pages serve
    ring, whole = Compressor(**geometry, ring=pages), Compressor(**geometry)
    whole.feed(0, LENGTH)
    for first in range(0, LENGTH, step):
        ring.feed(first, min(first + step, LENGTH))
    kit.assert_bits_equal("entries", ring.entries(), whole.entries())


@given(GEOMETRY)
@settings(max_examples=8)
def test_entries_are_those_of_the_whole_sequence(geometry: dict[str, Any]) -> None:
    """Against the formulas, by whole groups."""
    made = Compressor(**geometry)
    made.feed(0, LENGTH)
    arrays = made.kv, made.score, made.ape, made.weight, made.angles
    want = compressed(*(array.double() for array in arrays))
    values, scales = made.entries().split([DIM, 4], dim=1)
    got = values.contiguous().view(torch.float8_e4m3fn).double() * scales.contiguous().view(torch.float32).double()
    # Half a step of e4m3: 2**-4 of a normal value, 2**-10 scales of a subnormal one; and float32's own rounding.
    bound = torch.maximum(want.abs() * 2**-4, scales.contiguous().view(torch.float32) * 2**-10) * 1.001
    assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_keys_behind_a_hadamard_transform_give_the_scores_of_keys_without(dim: int) -> None:
    """Against PyTorch's formulas. A query has the same products if it is transformed alike, and others if it is not."""
    torch.manual_seed(dim)
    tokens, ratio, page = 4 * 37, 4, 5
    matrix = torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=DEVICE).double(), matrix) / 2**0.5
    kv, score = (torch.randn(tokens, 2 * dim, device=DEVICE) for _ in range(2))
    ape, weight = torch.randn(ratio, 2 * dim, device=DEVICE), torch.rand(dim, device=DEVICE)
    cos_sin = tensor(angles(tokens, 16))
    positions, one = torch.arange(tokens, dtype=torch.int32, device=DEVICE), torch.zeros(1, 1, device=DEVICE).int()
    table = torch.arange(8, dtype=torch.int32, device=DEVICE)[None]

    def keys(hadamard: bool) -> torch.Tensor:
        state = torch.full((1, tokens, 4 * dim), torch.nan, device=DEVICE)
        cache = torch.full((8, page, dim + 4), 255, dtype=torch.uint8, device=DEVICE)
        torch_api.compress_kv(
            kv, score, ape, weight, cos_sin, positions, state, one, cache, table, cache_format="fp8",
            hadamard=hadamard,
        )  # fmt: skip
        slots = torch.arange(tokens // ratio, dtype=torch.int32, device=DEVICE)
        values, scales = torch_api.read_indexer_cache(cache, slots, cache_format="fp8")
        return values.double() * scales.double()[:, None]

    plain = compressed(*(x.double() for x in (kv, score, ape, weight, cos_sin)))
    got = keys(True)
    assert ((got - plain @ matrix).abs() <= (plain @ matrix).abs() * 2**-4 + 2e-3).all()
    query, distance = torch.randn(9, dim, dtype=torch.float64, device=DEVICE), torch.linalg.vector_norm
    want = query @ keys(False).T
    assert distance(query @ matrix @ got.T - want) < 0.06 * distance(want)
    assert distance(query @ got.T - want) > 0.9 * distance(want)


def test_entries_on_pages_that_there_are_not_are_left_out() -> None:
    compressor = Compressor(ratio=4, series=2, page=3, state_page=4)
    pages = len(compressor.cache)
    pool = torch.full((pages + 8, *compressor.cache.shape[1:]), 255, dtype=torch.uint8, device=DEVICE)
    compressor.cache = pool[:pages]
    compressor.block_table = tensor(np.array([[pages, -1, pages + 7, pages + 1]], np.int32))
    compressor.feed(0, LENGTH)
    assert (pool == 255).all()
    compressor.block_table[0, 1] = pages - 1
    compressor.feed(0, LENGTH)
    assert (pool[:, :, :DIM] != 255).any(2).nonzero().tolist() == [[pages - 1, entry] for entry in range(3)]


def test_an_entry_is_the_same_however_many_programs_pool_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long window's dims are divided among programs; of many tokens one program takes several, one after another."""
    ratio, groups, width = 40, 3, 512
    tokens, rng = ratio * groups, np.random.default_rng(2)
    kv, score = (tensor(rng.standard_normal((tokens, width)).astype(np.float32)) for _ in range(2))
    ape, weight = tensor(rng.standard_normal((ratio, width)).astype(np.float32)), torch.ones(width, device=DEVICE)
    state, table = torch.full((1, tokens, 2 * width), torch.nan, device=DEVICE), tensor(np.zeros((1, 1), np.int32))
    cos_sin = tensor(angles(tokens))
    op = registry()["compress_kv"]
    divided = set()

    def feed(rows: slice) -> torch.Tensor:
        positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)[rows]
        cache = torch.full((1, groups, 584), 255, dtype=torch.uint8, device=DEVICE)
        arrays = kv[rows], score[rows], ape, weight, cos_sin, positions, state, table, cache, table
        write = plan_tensors(op, (*arrays, None), op.attributes())[0].launches[1]
        divided.add((write.sizes["parts"], write.sizes["chunk"]))
        torch_api.compress_kv(*arrays)
        return cache

    monkeypatch.setattr(import_module("xmla.core.ops.cache.compress_kv.plan"), "ROWS", 9)
    plan_call.cache_clear()
    want = feed(slice(tokens))
    for group in range(groups):
        end = (group + 1) * ratio
        for few in (1, 2, 3):
            entry = feed(slice(end - few, end))
            for place in (
                slice(group * 576, group * 576 + 576),
                slice(groups * 576 + group * 8, groups * 576 + group * 8 + 8),
            ):
                kit.assert_bits_equal("entry", entry.reshape(-1)[place], want.reshape(-1)[place])
    feed(slice(0))  # no tokens
    plan_call.cache_clear()
    assert (1, 14) in divided and (4, 1) in divided, divided


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_latent_before_its_rotation(ratio: int) -> None:
    """DeepSeek-V4.1's compressor: no term of the place in a group, and at ratio 1 no gate.

    An angle of 0 leaves entries as they are, so that plain rows hold the latents: the indexer's keys are projected from
    them, and entries are these latents, rotated. A ring of two pages has those of one call.
    """
    torch.manual_seed(ratio)
    tokens, page = 14, 4
    kv, score = (torch.randn(tokens, 512, device=DEVICE) for _ in range(2))
    score = score * (ratio - 1)
    weight, ape = torch.rand(512, device=DEVICE) + 0.5, torch.zeros(ratio, 512, device=DEVICE)
    still = torch.cat([torch.ones(tokens, 32, device=DEVICE), torch.zeros(tokens, 32, device=DEVICE)], dim=1)
    state = torch.full((1, 8, 1024), torch.nan, device=DEVICE)
    one, ring = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.tensor([[1, 0, 1, 0]], device=DEVICE).int()
    latents = torch.full((2, page, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    made = []
    for first, end in ((0, 5), (5, 6), (6, 7), (7, 11), (11, tokens)):
        part, positions = slice(first, end), torch.arange(first, end, dtype=torch.int32, device=DEVICE)
        torch_api.compress_kv(
            kv[part], score[part], ape, weight, still, positions, state, one, latents, ring, cache_format="plain_v4"
        )
        entries = torch.arange(first // ratio, end // ratio, device=DEVICE)
        made.append(latents[ring[0, entries // page].long(), entries % page].float())
    groups = kv.double().view(-1, ratio, 512), score.double().view(-1, ratio, 512)
    pooled = (groups[1].softmax(1) * groups[0]).sum(1)
    want = pooled * (pooled.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    got = torch.cat(made).double()
    assert ((got - want).abs() <= want.abs() * 2**-8 * 1.001 + 1e-7).all()


@given(
    st.integers(1, 5), st.integers(1, 70), st.integers(1, 9), st.integers(1, 40),
    st.lists(st.integers(-3, 3000), min_size=4, max_size=4), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=15)
def test_window_slots_are_the_tail_of_all_slots(
    width: int, page: int, ratio: int, window: int, lengths: list[int], random: Any
) -> None:
    pages = list(range(2 * width))
    random.shuffle(pages)
    table = np.array(pages, np.int32).reshape(2, width)
    ids = np.array([0, 1, 1, 2], np.int32)
    slots, counts = torch_api.window_slots(
        tensor(table), tensor(np.array(lengths, np.int32)), tensor(ids), window=window, page_size=page, ratio=ratio
    )
    for token, length in enumerate(lengths):
        every = (table[ids[token] % 2][:, None] * page + np.arange(page)).reshape(-1)
        seen = every[: max(length, 0) // ratio][-window:] if ids[token] < 2 else every[:0]
        assert int(counts[token]) == len(seen)
        assert slots[token].tolist() == [*seen.tolist(), *[-1] * (window - len(seen))]


def test_counts_of_mapped_picks_are_lengths() -> None:
    """V4's ratio-4 layers: the slots of what the indexer picks come first, so that their number is a length."""
    rng = np.random.default_rng(0)
    logits = tensor(rng.standard_normal((6, 50)).astype(np.float32))
    visible = torch.tensor([50, 7, 0, 33, 1, -4], device=DEVICE, dtype=torch.int32)
    picks = torch_api.select_topk(logits, visible, k=16)
    slots, counts = torch_api.map_slots(picks, tensor(rng.permutation(12).reshape(3, 4).astype(np.int32)), page_size=16)
    assert counts.tolist() == [16, 7, 0, 16, 1, 0]
    assert torch.equal(slots >= 0, torch.arange(16, device=DEVICE) < counts[:, None])


def test_a_v4_page_byte_by_byte() -> None:
    """The entry stands where FlashMLA's tests/quant.py has it: 448 e4m3, 64 bf16; in the footer 7 UE8M0 and a zero."""
    rng = np.random.default_rng(1)
    state = torch.full((3, 4, 4 * 512), torch.nan, device=DEVICE)
    pool = torch.full((2, 3 * 576 + 3 * 8 + 40), 0xAA, dtype=torch.uint8, device=DEVICE)
    cache = pool[:, : 3 * 584].view(2, 3, 584)
    kv, score = (tensor(rng.standard_normal((8, 1024)).astype(np.float32)) for _ in range(2))
    index = lambda *values: torch.tensor([values], device=DEVICE, dtype=torch.int32)
    torch_api.compress_kv(
        kv, score, torch.zeros(4, 1024, device=DEVICE), torch.ones(512, device=DEVICE), tensor(angles(8)),
        index(*range(8))[0], state, index(2, 0), cache, index(1),
    )  # fmt: skip
    page = pool[1].cpu().numpy()
    assert (page[2 * 576 : 3 * 576] == 0xAA).all() and (page[3 * 576 + 16 :] == 0xAA).all()
    assert (pool[0] == 0xAA).all() and (page[3 * 576 + 7 : 3 * 576 + 16 : 8] == 0).all()
    for entry in range(2):
        row, exponents = page[entry * 576 : entry * 576 + 576], page[3 * 576 + entry * 8 : 3 * 576 + entry * 8 + 7]
        latent = row[:448].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(7, 64)
        values = np.concatenate([
            (latent * np.ldexp(1.0, exponents.astype(int) - 127)[:, None]).reshape(-1),
            row[448:].view(ml_dtypes.bfloat16).astype(np.float32),
        ])  # fmt: skip
        assert np.array_equal(values, stored_values(kit.as_numpy(cache), 512)[3 + entry])
        assert abs(float((values**2).mean()) - 1) < 0.05  # a normed vector with weights of one
