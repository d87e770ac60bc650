"""What the plugin makes of vLLM's metadata, without vLLM; tests/vllm_engine runs its engine."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EVERYTHING
from listed import PLANNED, any_size, unlisted

from xmla import UnsupportedError, layouts
from xmla import torch_api as xt
from xmla.core.call import whole_vectors
from xmla.core.config import settings
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32
from xmla.core.models import memory
from xmla.core.models.calls import Call, specializations
from xmla.core.ops.attention.sparse_mla import unpack
from xmla.core.parallel import Ownership
from xmla.core.registry import registry
from xmla.core.values import Device, Spec, find_device
from xmla.torch_api._arrays import spec_of
from xmla.vllm import adapters, indexer, pools, projection, refusals, shards, warmup, without_e4m3
from xmla.vllm.gathered import Gathered, Pages, once_with_prefills
from xmla.vllm.refusals import key_format, refuse, unserved, unused
from xmla.vllm.shards import Shards

PAGE, K, HEADS, DIM, SCRATCH = 8, 8, 2, 128, 1 << 20
MXFP4_ROW = IndexerLayout(DIM, "mxfp4").row


def ints(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(lengths: list[int], device: str, row: int = DIM + 4) -> tuple[torch.Tensor, torch.Tensor]:
    """An indexer cache and the block table of requests of these lengths, whose pages are mixed."""
    generator = torch.Generator().manual_seed(len(lengths))
    need = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(need) + 2, generator=generator)[: sum(need)].int().split(need)
    table = torch.full((len(lengths), max(need)), -1, dtype=torch.int32)
    cache = torch.zeros(sum(need) + 2, PAGE, row, dtype=torch.uint8, device=device)
    for request, pages in enumerate(order):
        table[request, : len(pages)] = pages
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: lengths[request]]
        xt.write_indexer_cache(torch.randn(len(slots), DIM, generator=generator).to(device), slots.to(device), cache)
    return cache, table.to(device)


def query(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    heads, weights = (torch.randn(tokens, *shape, generator=generator) for shape in ((HEADS, DIM), (HEADS,)))
    return xt.quantize_indexer_query(heads.to(device), weights.to(device))


def selected(
    step: Any, cache: torch.Tensor, tokens: int, device: str, ratio: int = 1, shards: Shards | None = None,
    share: Any = None, blocks: indexer.Blocks | None = None, form: str | None = None,
) -> np.ndarray:  # fmt: skip
    found = torch.full((tokens, K), -7, dtype=torch.int32, device=device)
    layout = IndexerLayout(DIM, form or ("fp8" if cache.shape[2] == DIM + 4 else "mxfp4"))
    values, scales = (getattr(torch, name) for name in layout.dtypes)
    with torch.device(device):
        keys, key_scales = torch.empty(256, layout.value_bytes, dtype=values), torch.empty(256, dtype=scales)
        buffers = keys, key_scales, torch.empty(SCRATCH, dtype=torch.uint8)
    indexer.select(step, *query(tokens, device), cache, found, buffers, ratio, shards, share, blocks)
    return found.cpu().numpy()


def wanted(visible: list[tuple[int, int]], cache: torch.Tensor, table: torch.Tensor, device: str) -> np.ndarray:
    """The reference's selection, from each token's request and visible keys."""
    requests, lengths = (ints(*values, device=device) for values in zip(*visible, strict=True))
    call = cache, table, lengths, requests
    return xt.indexer_topk_paged(*query(len(visible), device), *call, k=K, implementation="reference").cpu().numpy()


def visible(lengths: list[int], new: list[int]) -> list[tuple[int, int]]:
    """Request and visible keys of each request's last `new` tokens."""
    return [(r, keys - n + 1 + j) for r, (keys, n) in enumerate(zip(lengths, new, strict=True)) for j in range(n)]


def decodes(seq_lens: list[list[int]], new: list[int], table: torch.Tensor, device: str) -> SimpleNamespace:
    decode = SimpleNamespace(
        block_table=table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        decode_lens=ints(*new, device=device),
    )
    lengths = ints(*(row[-1] for row in seq_lens), device=device)
    return SimpleNamespace(
        num_decodes=len(new), num_decode_tokens=sum(new), num_prefills=0, decode=decode, seq_lens=lengths
    )  # fmt: skip


@pytest.mark.parametrize("next_n", [1, 2, 8])
def test_decodes_of_equally_many_tokens(next_n: int, device: str) -> None:
    lengths = [20, 9, 31]
    cache, table = make(lengths, device)
    seq_lens = [[keys - next_n + 1 + j for j in range(next_n)] for keys in lengths]
    tokens = visible(lengths, [next_n] * 3)
    got = selected(decodes(seq_lens, [next_n] * 3, table, device), cache, len(tokens), device)
    assert np.array_equal(got, wanted(tokens, cache, table, device))


@pytest.mark.parametrize("new", [[3, 1, 2], [1, 0, 3], [8, 1, 0]])
def test_decodes_of_different_numbers_of_tokens(new: list[int], device: str) -> None:
    """Drafts that end early, and padding requests without tokens: a row of lengths ends with the request's own."""
    lengths = [20, 9, 31]
    cache, table = make(lengths, device)
    seq_lens = [[keys - max(new) + 1 + j for j in range(max(new))] for keys in lengths]
    tokens = visible(lengths, new)
    got = selected(decodes(seq_lens, new, table, device), cache, len(tokens), device)
    assert np.array_equal(got, wanted(tokens, cache, table, device))


@pytest.mark.parametrize("new", [[2, 2, 2], [3, 1, 2]])
def test_decodes_over_keys_of_four_tokens(new: list[int], device: str) -> None:
    """V4's metadata has lengths in keys, and the requests' own in tokens."""
    tokens, most = [83, 38, 124], max(new)
    cache, table = make([n // 4 for n in tokens], device)
    seq_lens = [[max(0, n - most + 1 + j) // 4 for j in range(most)] for n in tokens]
    step = decodes(seq_lens, new, table, device)
    step.seq_lens = ints(*tokens, device=device)
    seen = [(request, keys // 4) for request, keys in visible(tokens, new)]
    assert np.array_equal(selected(step, cache, len(seen), device, 4), wanted(seen, cache, table, device))


def test_a_prefill_without_a_key_selects_none(device: str) -> None:
    """No chunk has it: less than 4 tokens."""
    cache, table = make([8], device)
    step = decodes([[8]], [1], table, device)
    step.num_prefills, step.num_prefill_tokens, step.prefill = 1, 3, SimpleNamespace(chunks=[])
    got = selected(step, cache, 4, device, 4)
    assert np.array_equal(got[:1], wanted([(0, 8)], cache, table, device))
    assert (got[1:] == -1).all()


def test_decodes_that_vllm_made_a_request_of_each_token(device: str) -> None:
    lengths, new = [20, 9], [3, 2]
    cache, table = make(lengths, device)
    tokens = visible(lengths, new)
    expanded = table[ints(*(request for request, _ in tokens), device=device).long()]
    step = decodes([[keys] for _, keys in tokens], [1] * 5, expanded, device)
    assert np.array_equal(selected(step, cache, 5, device), wanted(tokens, cache, table, device))
    # As of a graph for more tokens than the device admits.
    padded = decodes([[keys] for _, keys in tokens] + [[0]], [1] * 6, torch.cat((expanded, expanded[:1])), device)
    got = selected(padded, cache, 6, device)
    assert np.array_equal(got, wanted([*tokens, (1, 0)], cache, table, device)) and (got[5:] == -1).all()


def mixed(device: str, beyond: int = 0, row: int = DIM + 4) -> tuple[SimpleNamespace, torch.Tensor, np.ndarray]:
    """A decode and two prefills of 13 tokens, in parts of one gather; their cache, and what each token selects.

    The host's sum of lengths is `beyond` more than the device's.
    """
    lengths, new = [20, 30, 13], [1, 9, 4]
    cache, table = make(lengths, device, row)
    tokens = visible(lengths, new)
    starts = [0, *np.cumsum(lengths[1:])]

    def chunk(first: int, last: int, skip: bool) -> SimpleNamespace:
        """Tokens `first` to `last` of the step, over the keys of both prefills."""
        limits = [(starts[r - 1], starts[r - 1] + keys) for r, keys in tokens[first:last]]
        begins, ends = (ints(*map(int, side), device=device) for side in zip(*limits, strict=True))
        return SimpleNamespace(
            token_start=first, token_end=last, skip_kv_gather=skip, block_table=table[1:],
            local_cu_seq_lens=ints(*map(int, starts), device=device), max_local_total_seq_lens=int(starts[-1]) + beyond,
            cu_seqlen_ks=begins, cu_seqlen_ke=ends,
        )  # fmt: skip

    step = decodes([[20]], [1], table[:1], device)
    step.num_prefill_tokens = len(tokens) - 1
    step.num_prefills, step.prefill = 2, SimpleNamespace(chunks=[chunk(1, 7, False), chunk(7, 14, True)])
    step.max_seq_len = 30
    return step, cache, wanted(tokens, cache, table, device)


@pytest.mark.parametrize("beyond", [0, 5])
def test_a_prefill_behind_decodes_in_parts_of_one_gather(beyond: int, device: str) -> None:
    """Keys beyond the last request are no one's."""
    step, cache, want = mixed(device, beyond)
    assert np.array_equal(selected(step, cache, 14, device), want)


def test_keys_in_mxfp4(device: str) -> None:
    """In pages of 68 bytes a key, and gathered; the selection is another than that of keys in e4m3."""
    step, cache, want = mixed(device, row=MXFP4_ROW)
    assert np.array_equal(selected(step, cache, 14, device), want)
    _, _, of_e4m3 = mixed(device)
    assert 0.7 < np.mean([len({*a} & {*b}) / K for a, b in zip(want, of_e4m3, strict=True)]) < 1


def with_ue8m0(cache: torch.Tensor) -> torch.Tensor:
    """The keys as vLLM's own writers store them on sm_100."""
    return layouts.convert(cache, "indexer_fp8_ue8m0_d128", source_format="indexer_fp8_d128")


@pytest.mark.parametrize("blocks", [False, True])
def test_keys_whose_scales_are_ue8m0(blocks: bool, device: str) -> None:
    """The buffer for gathered scales tells: the selection is that of float32 scales."""
    step, cache, want = mixed(device)
    found = torch.full((2, 14, 12), -7, dtype=torch.int32, device=device)
    others = [{"blocks": indexer.Blocks(each, 2, source=True)} if blocks else {} for each in found]
    assert np.array_equal(selected(step, cache, 14, device, **others[0]), want)
    assert np.array_equal(selected(step, with_ue8m0(cache), 14, device, **others[1], form="fp8_ue8m0"), want)
    assert torch.equal(*found)


@pytest.mark.parametrize("sizes", [(13,), (4, 9), (1, 11, 1), (6, 2, 5)])
def test_ranks_that_share_rows_of_prefills(sizes: tuple[int, ...], device: str) -> None:
    """Each scores its own, of one part of the gather or two; decodes are every rank's. They are those of one rank."""
    step, cache, want = mixed(device)
    exchanged: list[int] = []
    for rank, size in enumerate(sizes):
        start = step.num_decode_tokens + sum(sizes[:rank])

        def narrow(chunk: Any, start: int = start, stop: int = start + size) -> Any:
            first, last = max(chunk.token_start, start), min(chunk.token_end, stop)
            rows = slice(first - chunk.token_start, last - chunk.token_start)
            return (first, last, chunk.cu_seqlen_ks[rows], chunk.cu_seqlen_ke[rows]) if first < last else None

        share = SimpleNamespace(narrow=narrow, exchange_topk=lambda found, width: exchanged.append(width))
        got = selected(step, cache, 14, device, share=share)
        assert np.array_equal(got[:1], want[:1])
        own = np.arange(14) - start
        assert np.array_equal(got[(own >= 0) & (own < size)], want[(own >= 0) & (own < size)])
        assert (got[(np.arange(14) >= 1) & ((own < 0) | (own >= size))] == -7).all()
    assert exchanged == [K] * len(sizes)


@pytest.mark.parametrize(("ranks", "interleave", "form"), [(2, 1, "fp8"), (2, 4, "fp8_ue8m0"), (3, 1, "fp8")])
@pytest.mark.parametrize("new", [[1, 1, 1], [3, 1, 2]])
def test_ranks_select_what_one_selects(
    ranks: int, interleave: int, form: str, new: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, and a prefill of which a rank may have no key; two tokens are exchanged at a time."""
    monkeypatch.setattr(shards, "ROWS", 2)
    lengths = [20, 9, 31, 6, 18]
    whole, table = make(lengths, device)
    tokens = visible(lengths, [*new, 6, 10])
    ownership, decoded = Ownership(ranks, interleave), sum(new)
    sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]

    def select(rank: int, gather: Any) -> np.ndarray:
        def count(keys: int) -> int:
            return int(ownership.count(keys, rank))

        cache, own_table = part(whole, table, lengths, ownership, rank)
        most = max(new)
        local = [[count(n - most + 1 + j) for j in range(most)] for n in lengths[:3]]
        step = decodes(local, new, own_table[:3], device)
        step.seq_lens = ints(*lengths, device=device)
        step.num_prefills, step.num_prefill_tokens = 2, 16
        starts = [0, count(lengths[3]), count(lengths[3]) + count(lengths[4])]
        limits = [(starts[r - 3], starts[r - 3] + count(keys)) for r, keys in tokens[decoded:]]
        begins, ends = (ints(*side, device=device) for side in zip(*limits, strict=True))
        chunk = SimpleNamespace(
            token_start=decoded, token_end=len(tokens), skip_kv_gather=False, block_table=own_table[3:],
            local_cu_seq_lens=ints(*starts, device=device), cu_seqlen_ks=begins, cu_seqlen_ke=ends,
            max_local_total_seq_lens=max(sum(int(ownership.count(n, r)) for n in lengths[3:]) for r in range(ranks)),
        )  # fmt: skip
        step.prefill = SimpleNamespace(chunks=[chunk])
        cache = cache if form == "fp8" else with_ue8m0(cache)
        return selected(step, cache, len(tokens), device, shards=Shards(ownership, rank, gather), form=form)

    def keep(rank: int) -> Any:
        return lambda own: sent[rank].append(own) or own.expand(ranks, *own.shape[1:])

    for rank in range(ranks):
        select(rank, keep(rank))
    for rank in range(ranks):
        exchanges = map(torch.cat, zip(*sent, strict=True))
        got = select(rank, lambda own, exchanges=exchanges: next(exchanges))
        assert np.array_equal(got, wanted(tokens, whole, table, device))
    assert len(sent[0]) == -(-decoded // 2) + 8


def part(
    whole: torch.Tensor, table: torch.Tensor, lengths: list[int], ownership: Ownership, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's cache and block table: its keys of each request, in order."""
    need = [-(-int(ownership.count(n, rank)) // PAGE) for n in lengths]
    ends = [0, *map(int, np.cumsum(need))]
    cache, own = torch.zeros_like(whole[: ends[-1] + 1]), torch.full_like(table[:, : max(need) + 1], -1)
    for request, (first, last) in enumerate(pairwise(ends)):
        own[request, : last - first] = torch.arange(first, last)
        positions = torch.arange(lengths[request], device=whole.device)
        positions = positions[ownership.owner(positions) == rank]
        slots = table[request, positions // PAGE] * PAGE + positions % PAGE
        keys, scales = xt.read_indexer_cache(whole, slots)
        places = first * PAGE + torch.arange(len(slots), device=whole.device)
        xt.write_indexer_cache(keys.float() * scales[:, None], places, cache)
    return cache, own


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (3, 4)])
def test_places_among_own_keys(ranks: int, interleave: int, device: str) -> None:
    """Each position is one rank's, and its place leads back to it."""
    positions = torch.arange(-1, 40, device=device, dtype=torch.int32)
    ownership = Ownership(ranks, interleave)
    found = torch.stack([Shards(ownership, rank, lambda own: own).own(positions) for rank in range(ranks)])
    assert (found >= 0).sum(0).tolist() == [0, *[1] * 40]
    back = [torch.where(own >= 0, ownership.position(own, rank), -1) for rank, own in enumerate(found)]
    assert torch.equal(torch.stack(back).amax(0), positions)


def in_blocks(step: Any, tokens: list[tuple[int, int]], cache: torch.Tensor, table: torch.Tensor, device: str) -> None:
    """V4.1's source layer selects 12 blocks of 2 keys, and keys of all; a layer after it keys of the blocks it has."""
    called = *query(len(tokens), device), cache, table
    requests, lengths = (ints(*values, device=device) for values in zip(*tokens, strict=True))
    found = torch.full((len(tokens), 12), -7, dtype=torch.int32, device=device)
    of_source = selected(step, cache, len(tokens), device, blocks=indexer.Blocks(found, 2, source=True))
    assert np.array_equal(of_source, wanted(tokens, cache, table, device))
    reference = {"granularity": 2, "implementation": "reference"}
    assert torch.equal(found, xt.indexer_blocks_paged(*called, lengths, requests, k=12, **reference))

    columns = torch.arange(12, dtype=torch.int32, device=device)
    within = torch.where((found + columns[:, None].T + len(tokens)) % 3 > 0, found, -1)
    want = xt.indexer_block_topk_paged(*called, lengths, within, requests, k=K, **reference)
    got = selected(step, cache, len(tokens), device, blocks=indexer.Blocks(within, 2, source=False))
    assert np.array_equal(got, want.cpu().numpy()) and not np.array_equal(got, of_source)


@pytest.mark.parametrize("row", [DIM + 4, MXFP4_ROW])
@pytest.mark.parametrize("new", [[2, 2, 2], [3, 1, 2]])
def test_decodes_within_blocks(new: list[int], row: int, device: str) -> None:
    lengths = [20, 9, 31]
    cache, table = make(lengths, device, row)
    seq_lens = [[keys - max(new) + 1 + j for j in range(max(new))] for keys in lengths]
    in_blocks(decodes(seq_lens, new, table, device), visible(lengths, new), cache, table, device)


@pytest.mark.parametrize("row", [DIM + 4, MXFP4_ROW])
def test_prefills_within_blocks(row: int, device: str) -> None:
    step, cache, _ = mixed(device, row=row)
    _, table = make([20, 30, 13], device)
    in_blocks(step, visible([20, 30, 13], [1, 9, 4]), cache, table, device)


@pytest.mark.parametrize("source", [False, True])
def test_prefills_whose_keys_are_all_in_blocks(source: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of 30 keys is outside of 16 blocks of 2: no layer finds blocks for them, and none looks at any."""
    step, cache, want = mixed(device)
    found = torch.full((len(want), 16), -7, dtype=torch.int32, device=device)
    found[: step.num_decode_tokens] = torch.arange(16, dtype=torch.int32, device=device)
    for op in ("indexer_blocks", "indexer_block_topk"):
        monkeypatch.delattr(xt, op)
    got = selected(step, cache, len(want), device, blocks=indexer.Blocks(found, 2, source))
    assert np.array_equal(got, want)
    assert (found[step.num_decode_tokens :] == -7).all()


# What a call of the indexer's op asks for, as it is served.
INDEXED = {
    "q_scale": None, "use_pcp": False, "quant_block_size": DIM, "head_dim": DIM, "topk_tokens": K,
    "topk_indices_buffer": torch.empty(1, K, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "told"),
    [(8, "a selection of 8 keys in 8 blocks"), (10, "blocks of a number that is no multiple of 4: 10")],
)
def test_blocks_that_do_not_hold_the_selection_are_refused(blocks: int, told: str) -> None:
    def unserved(count: int) -> dict[str, bool]:
        buffers = torch.empty(1, K, dtype=torch.int32), torch.empty(1, count, dtype=torch.int32)
        call = INDEXED | {"topk_indices_buffer": buffers[0]}
        found = {"candidate_blocks": buffers[1], "candidate_block_size": 8, "candidate_write": True}
        return indexer.unserved(call, "DEEPSEEK_V41_INDEXER", indexer.Blocks.of(found))

    refuse(unserved(12))
    assert indexer.Blocks.of({}) is None and indexer.Blocks.of({"candidate_blocks": None}) is None
    with pytest.raises(UnsupportedError) as raised:
        refuse(unserved(blocks))
    message = f"xmla.vllm: not served: {told}; without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("changed", "backend", "told"),
    [
        ({}, "DEEPSEEK_V42_INDEXER", "the indexer of DEEPSEEK_V42_INDEXER"),
        ({"q_scale": torch.ones(1, 4)}, "DEEPSEEK_V4_INDEXER", "queries of the indexer in MXFP4"),
        (
            {"q_scale": torch.ones(1, 4), "use_pcp": True},
            "DEEPSEEK_V32_INDEXER",
            "queries of the indexer in MXFP4, prefill context parallelism",
        ),
        ({"quant_block_size": 64}, "DEEPSEEK_V32_INDEXER", "keys with a scale for every 64 of 128 dims"),
        ({"topk_tokens": 4}, "DEEPSEEK_V32_INDEXER", "4 keys in a buffer for 8"),
    ],
)
def test_what_is_not_served_is_refused(changed: dict[str, Any], backend: str, told: str) -> None:
    served = INDEXED
    for known in ("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER"):
        refuse(indexer.unserved(served, known))
    with pytest.raises(UnsupportedError) as raised:
        refuse(indexer.unserved(served | changed, backend))
    message = f"xmla.vllm: not served: {told}; without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
    assert str(raised.value) == message


@pytest.mark.parametrize("pool", [4, 16])
def test_pools_that_the_border_of_two_chunks_divides(pool: int, device: str) -> None:
    """A request goes on within a pool, whose first tokens its ring has, and another begins behind it."""
    size, (first, last), begun = 2 * pool, (pool + 3, 3 * pool + 2), 2 * pool + 1
    values = torch.randn(2, last, 128, device=device).bfloat16()
    ring = torch.full((3, 2, size, 128), torch.nan, dtype=torch.bfloat16, device=device)
    for position in range(first - pool, first):
        ring[2, 1, position % size] = values[0, position]
    chunk = torch.cat((values[0, first:], values[1, :begun]))
    positions = torch.cat((torch.arange(first, last), torch.arange(begun))).to(device)
    blocks = torch.tensor([2] * (last - first) + [1] * begun, device=device)
    found = pools.Pools.of(positions, blocks * size + positions % size, size, pool).values(chunk, ring, 1)
    complete = [i for i, position in enumerate(positions.tolist()) if position % pool == pool - 1]
    assert len(complete) == 4
    for i in complete:
        request, end = 2 - int(blocks[i]), int(positions[i]) + 1
        assert torch.equal(found[i], values[request, end - pool : end])


def test_what_steps_of_decodes_need_is_made_in_every_layer() -> None:
    """Their graph is captured after a run over the same metadata, and would have what that run made."""
    numbers = iter(range(5))
    for prefills, values in ((1, [0, 0, 1]), (0, [2, 3, 4])):
        step = SimpleNamespace(num_prefills=prefills)
        names = "a", "a", "b"
        assert [once_with_prefills(step, name, lambda: next(numbers)) for name in names] == values


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with e4m3."""
    monkeypatch.setattr(refusals, "has_e4m3", lambda: True)


GLM = {"model_type": "glm5_next_text", "index_topk": 2048, "index_kpool": 4}


def configured(
    model: dict[str, Any] | None = None, architecture: str = "DeepseekV32ForCausalLM", transfers: Any = None,
    cache: str = "auto", drafts: str | None = None, **changed: Any,
) -> SimpleNamespace:  # fmt: skip
    """What the plugin reads of vLLM's configuration of an engine for DeepSeek-V3.2, with its drafts' cache dtype."""
    found = {
        "indexer_kv_dtype": "auto", "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1,
        "use_ubatching": False, "backend": None,
    }  # fmt: skip
    found |= changed
    part = SimpleNamespace(**found)
    text = SimpleNamespace(**({"model_type": "deepseek_v32", "index_topk": 2048} if model is None else model))
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, architecture=architecture), attention_config=part,
        parallel_config=part, kernel_config=part, kv_transfer_config=transfers,
        cache_config=SimpleNamespace(cache_dtype=cache),
        speculative_config=SimpleNamespace(kv_cache_dtype=drafts) if drafts else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            configured({"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 64}),
            "keys of the indexer of 64 dims",
        ),
        (configured(GLM, decode_context_parallel_size=2), "decode context parallelism of pooled keys"),
        (configured({"model_type": "deepseek_v41", "index_topk": 512}, indexer_sparse_logits=True),
         "logits of DeepSeek-V4.1's blocks alone (indexer_sparse_logits)"),
        (configured({"model_type": "deepseek_v41", "index_topk": 512},
                    backend=SimpleNamespace(name="FLASHMLA_MEGA_ATTN_DSV41")), "FLASHMLA_MEGA_ATTN_DSV41"),
        (configured({"model_type": "deepseek_v4", "index_topk": 512}, cache="nvfp4_ds_mla"),
         "nvfp4_ds_mla of DeepSeek-V4"),
        (configured({"model_type": "deepseek_v41", "index_topk": 512}, cache="nvfp4_ds_mla",
                    backend=SimpleNamespace(name="FLASHMLA_SPARSE_DSV41")),
         "nvfp4_ds_mla of DeepSeek-V4.1 on this GPU with vLLM's own attention"),
        (configured(drafts="nvfp4_ds_mla"), "nvfp4_ds_mla for the caches of drafts alone, or of all but drafts"),
        (configured(cache="nvfp4_ds_mla", drafts="fp8"),
         "nvfp4_ds_mla for the caches of drafts alone, or of all but drafts"),
        (configured({"model_type": "deepseek_v4", "index_topk": 512}, hisparse_config=SimpleNamespace()), "HiSparse"),
        (configured(GLM, indexer_kv_dtype="mxfp4"), "MXFP4 keys of pools"),
        (configured({"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 64}, indexer_kv_dtype="mxfp4"),
         "keys of the indexer of 64 dims"),
        (configured(prefill_context_parallel_size=2, use_ubatching=True),
         "prefill context parallelism, two micro-batches at once"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("hopper")
def test_a_configuration_that_is_not_served_is_refused(config: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is known before weights are loaded, and whatever backend of attention is named."""
    monkeypatch.setattr(refusals, "version", lambda _: "0.33.0")
    monkeypatch.setattr(refusals, "key_format", lambda: "fp8")
    refuse(unserved(configured(cache="nvfp4_ds_mla")))
    refuse(unserved(configured(cache="nvfp4_ds_mla", drafts="nvfp4_ds_mla")))
    refuse(unserved(configured(cache="fp8", drafts="auto")))
    refuse(unserved(configured(cache="nvfp4_ds_mla", indexer_kv_dtype="mxfp4")))
    for model in (*({"model_type": kind, "index_topk": 512} for kind in ("deepseek_v4", "deepseek_v41", "glm")), None):
        refuse(unserved(configured(model)))
    refuse(unserved(configured(GLM)))
    refuse(unserved(configured({"model_type": "glm", "index_topk": 512, "index_head_dim": 128})))
    for model in ({"model_type": "llama"}, {"model_type": "glm", "index_topk": None, "index_kpool": 4}):
        assert unserved(configured(model, use_ubatching=True)) == {}
    with pytest.raises(UnsupportedError) as raised:
        refuse(unserved(config))
    message = f"xmla.vllm: not served: {told}; without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
    assert str(raised.value) == message


@pytest.mark.usefixtures("hopper")
def test_what_is_not_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XMLA_SELECTIONS_GIB asks for it, and nowhere else."""
    v4 = {"model_type": "deepseek_v4", "index_topk": 512}
    refused = {
        " of DeepSeek-V4": configured(v4), " of pooled keys": configured(GLM),
        " with decode context parallelism": configured(decode_context_parallel_size=2),
        " with kv_transfer_config": configured(transfers=SimpleNamespace()),
    }  # fmt: skip
    monkeypatch.setattr(refusals, "version", lambda _: "0.33.0")
    for config in refused.values():
        refuse(unserved(config))
    monkeypatch.setattr(settings, "selections_gib", 1.0)
    refuse(unserved(configured()))
    for told, config in refused.items():
        with pytest.raises(UnsupportedError, match=rf"recorded selections \(XMLA_SELECTIONS_GIB\){told}; without"):
            refuse(unserved(config))
    monkeypatch.setattr(refusals, "version", lambda _: "0.32.1")
    with pytest.raises(UnsupportedError, match=r"recorded selections \(XMLA_SELECTIONS_GIB\) before vLLM 0\.33; "):
        refuse(unserved(configured()))


def test_entries_of_fp4_are_served_since_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "version", lambda _: "0.32.1")
    with pytest.raises(UnsupportedError, match=r"^xmla.vllm: not served: nvfp4_ds_mla before vLLM 0.33; "):
        refuse(unserved(configured(cache="nvfp4_ds_mla")))


@pytest.mark.parametrize("asked", [{"indexer_kv_dtype": "mxfp4"}, {"use_fp4_indexer_cache": True}])
def test_keys_in_mxfp4_are_served_since_a_release(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "version", lambda _: "0.32.1")
    message = r"^xmla.vllm: not served: MXFP4 keys of the indexer before vLLM 0.33; "
    with pytest.raises(UnsupportedError, match=message):
        refuse(unserved(configured(**asked)))


@pytest.mark.usefixtures("hopper")
def test_the_same_bits_in_any_batch_are_refused_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's prefills take dense attention by the longest of them; of some models vLLM computes parts by the step."""
    dense, sparse = ({"sparse_mla_force_mqa": force} for force in (False, True))
    v4, v41 = ({"model_type": f"deepseek_{name}", "index_topk": 512} for name in ("v4", "v41"))
    for off in ("0", ""):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", off)
        refuse(unserved(configured(v41, **dense)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(refusals, "version", lambda _: "0.33.0")
    for config in (
        configured(**sparse),
        configured(v4, **dense),
        configured(architecture="HYV4ForCausalLM", **sparse),
    ):
        refuse(unserved(config))
    for config, told in (
        (configured(**dense), " without sparse_mla_force_mqa"),
        (configured(v4, moe_backend="deep_gemm_mega_moe", **dense), " with moe_backend=deep_gemm_mega_moe"),
        (configured(v41, **sparse), " of DeepSeek-V4.1, whose last layers vLLM computes for .*"),
        (configured(GLM, **sparse), " of GLM-5.3-Flash, whose linear attention vLLM has not in this mode"),
    ):
        with pytest.raises(UnsupportedError, match=f"not served: VLLM_BATCH_INVARIANT=1{told};"):
            refuse(unserved(config))
    monkeypatch.setattr(refusals, "version", lambda _: "0.32.1")
    with pytest.raises(UnsupportedError, match=r"not served: VLLM_BATCH_INVARIANT=1 before vLLM 0\.33;"):
        refuse(unserved(configured(**sparse)))


def test_pooled_keys_are_refused_where_vllm_cannot_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(refusals, "has_e4m3", lambda there=there: there)
        refuse(unserved(configured()))
        if there:
            refuse(unserved(configured(GLM)))
    with pytest.raises(UnsupportedError, match="not served: pooled keys on a GPU without e4m3;"):
        refuse(unserved(configured(GLM)))


def test_an_architecture_that_nobody_has_tried_is_refused() -> None:
    """Dots3-Note's attention is its own, beside xmla's indexer; a later release's may be anything."""
    for architecture in ("Dots3NoteForCausalLM", "LaterForCausalLM"):
        with pytest.raises(UnsupportedError, match=f"not served: the architecture {architecture};"):
            refuse(unserved(configured(architecture=architecture)))
    assert unserved(configured({"model_type": "llama"}, "LlamaForCausalLM")) == {}


@pytest.mark.parametrize("scales", ["float32", "UE8M0", None])
def test_caches_travel_where_vllms_own_are_alike(scales: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_100 vLLM's writers store UE8M0 bytes, and xmla's too, but V4.1's entries are others' there."""
    utils, deep_gemm = ModuleType("vllm.utils"), ModuleType("vllm.utils.deep_gemm")
    if scales is not None:
        vars(deep_gemm)["mqa_logits_use_mx_scales"] = lambda: scales == "UE8M0"
    vars(utils)["deep_gemm"] = deep_gemm
    for module in (ModuleType("vllm"), utils, deep_gemm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert key_format() == ("fp8_ue8m0" if scales == "UE8M0" else "fp8")
    refuse(unserved(configured(transfers="connector")))
    v41 = {"model_type": "deepseek_v41", "index_topk": 512}
    refuse(unserved(configured(v41)))
    if scales != "UE8M0":
        refuse(unserved(configured(v41, transfers="connector")))
        return
    with pytest.raises(UnsupportedError, match=r"not served: kv_transfer_config of DeepSeek-V4\.1 on this GPU, where"):
        refuse(unserved(configured(v41, transfers="connector")))


def test_an_option_without_effect_is_named() -> None:
    assert unused(configured()) is None and unused(configured(sparse_indexer_topk_backend="auto")) is None
    assert unused(configured({"model_type": "llama"}, sparse_indexer_topk_backend="torch")) is None
    assert unused(configured(sparse_indexer_topk_backend="torch")) == "sparse_indexer_topk_backend=torch"


@pytest.mark.parametrize(("heads", "tokens"), [(128, 2048), (64, 512), (32, 300)])
def test_scratch_memory_of_steps_with_gathered_prefills(heads: int, tokens: int) -> None:
    """Rows of the prefills' entries lie before what each call needs, the decodes' splits or rows among it."""
    device, keys = find_device("H200"), 2048
    reserved = memory.scratch_v32(heads, keys, tokens, device, gathers=True)
    assert reserved < memory.gathered_bytes(keys, tokens) + (1 << 25)

    def needed(layout: Any, tokens: int, pages: int) -> int:
        return memory.attention(layout, heads, keys, tokens, pages).plan(device).workspace_bytes

    split = dequantised = 0
    for decodes in range(min(tokens, 130)):
        rows = memory.gathered_bytes(keys, tokens - decodes)
        assert rows + needed(PLAIN, tokens - decodes, memory.LARGE_POOL) <= reserved
        small = max(1, decodes * keys // (memory.MIN_REFERENCES * memory.PAGE))
        for pages in (memory.LARGE_POOL, small) if decodes else ():
            own = needed(V32, decodes, pages)
            assert rows + own <= reserved, (decodes, pages)
            split += pages == memory.LARGE_POOL and own > 0
            dequantised += pages < memory.LARGE_POOL and own > 0
    assert split > 10 and dequantised > 10


@PLANNED
def test_scratch_memory_of_many_tokens_with_a_million_keys(device: Any) -> None:
    """V4's layers that keep every 128th token attend to 8192 entries, whose splits up to two thousand tokens have.

    Rows of the entries that prefills gather lie before those of a call.
    """
    widths, tokens = (128, 512, 2048, 8192) if EVERYTHING else (128, 8192), 8192
    reserved, with_rows = (memory.scratch_v4(64, 128, widths, tokens, device, rows) for rows in (0, 8 * tokens))
    counts = [1, 57, 482, 1100, 1122, 1189, 1249, 1847, 1964, *range(2049, 4200, 61), tokens]
    found = {
        (count, width): memory.attention(V4, 64, 128, count, memory.LARGE_POOL, width).plan(device).workspace_bytes
        for count in counts for width in widths
    }  # fmt: skip
    assert max(found.values()) <= reserved <= with_rows
    for count, width in found:
        attend = memory.attention(PLAIN_V4, 64, 128, count, memory.LARGE_POOL, width)
        assert 8 * count * 1024 + attend.plan(device).workspace_bytes <= with_rows
    assert not any(needed for (count, _), needed in found.items() if count > memory.SPLIT_TOKENS)


@PLANNED
@pytest.mark.parametrize(("keys", "width"), [(128, 8192), (128, 512), (2048, 0), (128, 0)])
def test_scratch_memory_of_the_same_bits_in_any_batch(keys: int, width: int, device: Any) -> None:
    """Each token has as many splits however many there are, so that a call has as many tokens as the memory is for."""
    layout, least, tokens = (V4 if width or keys == 128 else V32), 1 << 24, 4096

    def attend(count: int) -> Any:
        call = memory.attention(layout, 64, keys, count, memory.LARGE_POOL, width)
        return replace(call, attrs={**call.attrs, "batch_invariant": True})

    reserved, at_once = memory.divide(least, memory.invariant_scratch([attend(1)], device), tokens)
    assert reserved >= least and 0 < at_once <= tokens and (at_once == tokens or at_once % 4 == 0)
    assert attend(at_once).plan(device).workspace_bytes <= reserved
    assert (at_once == tokens) == (keys + width <= 512)


def test_rows_are_gathered_where_the_op_unpacks_pools() -> None:
    assert memory.MIN_REFERENCES == unpack.MIN_REFERENCES


def test_gathered_pages(device: str) -> None:
    """Two prefills behind a decode, of 3 and 2 pages, of the first only the last two; the page that both have twice."""
    table = ints(0, 0, 0, 0, 9, 4, 7, 0, 3, 7, 0, 0, device=device).view(3, 4)
    requests, first, last = ints(0, 0, 1, device=device), np.array([1, 0]), np.array([3, 2])
    assert Pages.of(requests, 1, first, last, page=4, most=15) is None
    pages = Pages.of(requests, 1, first, last, page=4, most=16)
    assert pages is not None and pages.table.tolist() == [[0, 1], [2, 3]] and pages.shifts.tolist() == [-4, 8]
    ids = [4, 7, 3, 7]
    slots = pages.slots(table, 4)
    assert slots.dtype == torch.int32 and slots.tolist() == [4 * page + offset for page in ids for offset in range(4)]
    assert pages.slots(table + 1, 4).tolist() == (slots + 4).tolist()  # of another table
    halves = torch.stack((2 * table, 2 * table + 1), dim=2).flatten(1)  # and in pages of half the size
    assert torch.equal(pages.slots(halves, 2), slots)
    # Of each token the position and the two before; those before the first page are nobody's.
    windows = pages.windows(ints(4, 11, 1, device=device), 3)
    assert windows.dtype == torch.int32 and windows[1].tolist() == [7, 6, 5]
    assert windows[0, 0] == 0 and windows[2, :2].tolist() == [9, 8]
    assert all(part.data_ptr() % 16 == 0 for part in (pages.table, pages.rows, pages.positions, pages.shifts))

    cache = torch.randn(10, 4, 512, device=device).bfloat16()
    scratch = torch.zeros(16 * 1024 + 32, dtype=torch.uint8, device=device)
    pool, rest = Gathered(pages, slots).read(cache, 512, scratch)
    assert torch.equal(pool, cache[ids]) and rest.numel() == 32


SIZES = warmup.Sizes(
    tokens=8192, requests=512, new=3, max_len=163840, keys=40 * 163840, scratch=512 << 20, ranks=1, block=64,
    key_format="fp8",
)  # fmt: skip
FEW = replace(SIZES, tokens=512, requests=16, new=4, scratch=8 << 20)  # few tokens' logits are more than the scratch
UE8M0 = replace(FEW, key_format="fp8_ue8m0")
MXFP4 = replace(FEW, key_format="mxfp4")
INDEX_POOL = Spec((40000, 64, 132), "uint8")
MXFP4_POOL = Spec((40000, 64, MXFP4_ROW), "uint8")


@PLANNED
@pytest.mark.parametrize("sizes", [SIZES, FEW, UE8M0, MXFP4], ids=["many", "few", "UE8M0", "MXFP4"])
def test_warmup_of_selections(sizes: warmup.Sizes, device: Device) -> None:
    """Calls of any size that a step may have launch kernels of the list."""
    rng, topk = np.random.default_rng(0), {"k": 2048, "workspace_bytes": sizes.scratch}
    layout = IndexerLayout(128, sizes.key_format)
    pool, (values, scales) = MXFP4_POOL if sizes is MXFP4 else INDEX_POOL, layout.dtypes
    found = specializations(warmup.select_calls(pool, 64, 2048, 1, sizes, device), device)

    def query(tokens: int) -> dict[str, Spec]:
        rows = {name: Spec((tokens,), "int32") for name in ("starts", "ends")}
        return {"q8": Spec((tokens, 64, 128), "float8_e4m3fn"), "weights": Spec((tokens, 64), "float32")} | rows

    def prefill() -> Call:
        tokens = any_size(rng, sizes.tokens)
        keys = any_size(rng, min(sizes.keys, sizes.scratch // (4 * tokens)))
        gathered = {"keys": Spec((keys, layout.value_bytes), values), "key_scales": Spec((keys,), scales)}
        return Call("indexer_topk", query(tokens) | gathered, topk)

    def decode() -> Call:
        requests, new = any_size(rng, sizes.requests), int(rng.integers(1, sizes.new + 1))
        tokens, ragged = requests * new, rng.random() < 0.5
        if ragged:  # requests of different numbers of tokens
            tokens = int(rng.integers(requests, tokens + 1))
        elif rng.random() < 0.3:  # as vLLM passes drafted tokens that its kernels do not take together
            requests *= new
        specs = query(tokens)
        rows = {"lengths": specs.pop("starts"), "request_ids": specs.pop("ends")}
        if not ragged and rng.random() < 0.5:
            del rows["request_ids"]
        pages = {"cache": pool, "block_table": Spec((requests, 2560), "int32")}
        return Call("indexer_topk_paged", specs | rows | pages, topk | {"cache_format": sizes.key_format})

    for make in (prefill, decode):
        missing = unlisted(device, found, make)
        assert not missing, missing[0]
    assert len(found) < 140


@PLANNED
def test_warmup_of_selections_in_blocks(device: Device) -> None:
    """Those of V4.1's source layer, at any size of a step; the layers after it launch some of them."""
    rng, k, most = np.random.default_rng(3), 512, 2048
    sizes = SIZES if EVERYTHING else replace(SIZES, requests=64)
    blocks = indexer.Blocks(torch.empty(1, most), 8, source=True)
    found = specializations(warmup.select_calls(INDEX_POOL, 32, k, 1, sizes, device, blocks, written=True), device)
    after = replace(blocks, source=False)
    of_others = specializations(warmup.select_calls(INDEX_POOL, 32, k, 1, sizes, device, after, written=True), device)
    assert set(of_others) < set(found)

    def call(name: str, specs: dict[str, Spec]) -> Call:
        attrs = {"granularity": 8, "workspace_bytes": blocks.scratch(SIZES.scratch)}
        if rng.random() < 0.5:
            return Call(f"indexer_blocks{name}", specs, attrs | {"k": most})
        within = {"blocks": Spec((specs["q8"].shape[0], most), "int32")}
        return Call(f"indexer_block_topk{name}", specs | within, attrs | {"k": k})

    def query(tokens: int) -> dict[str, Spec]:
        return {"q8": Spec((tokens, 32, 128), "float8_e4m3fn"), "weights": Spec((tokens, 32), "float32")}

    def prefill() -> Call:
        tokens = any_size(rng, SIZES.tokens)
        keys = any_size(rng, min(SIZES.keys, SIZES.scratch // (4 * tokens)))
        gathered = {"keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32")}
        rows = {name: Spec((tokens,), "int32") for name in ("starts", "ends")}
        return call("", query(tokens) | gathered | rows)

    def decode() -> Call:
        requests, new = any_size(rng, sizes.requests), int(rng.integers(1, 4))
        rows = {name: Spec((requests * new,), "int32") for name in ("lengths", "request_ids")}
        if rng.random() < 0.5:
            del rows["request_ids"]
        pages = {"cache": INDEX_POOL, "block_table": Spec((requests, 2560), "int32")}
        return call("_paged", query(requests * new) | pages | rows)

    def wide() -> Call:
        """Blocks that are whole vectors, a few more than a cluster of CTAs selects from on Hopper."""
        gathered = {"keys": Spec((8 * 131076, 128), "float8_e4m3fn"), "key_scales": Spec((8 * 131076,), "float32")}
        return call("", query(2) | gathered | {name: Spec((2,), "int32") for name in ("starts", "ends")})

    for make in (prefill, decode, wide):
        missing = unlisted(device, found, make)
        assert not missing, missing[0]


def test_width_of_tables() -> None:
    """As vLLM's `get_block_table_width`: blocks of a rank, to a multiple of 128 tokens, each of several pages."""
    widths = {
        (16300, 64, 1): 256, (16300, 256, 1): 256, (16300, 64, 8): 32, (163840, 64, 1): 2560, (100, 32, 1): 2,
    }  # fmt: skip
    for (max_len, block, ranks), width in widths.items():
        assert replace(SIZES, max_len=max_len, block=block, ranks=ranks).width(64) == width


@PLANNED
def test_warmup_of_a_table_that_is_longer_than_a_request(device: Device) -> None:
    """Where it has as many keys as a power of two, and a request fewer, selections have more segments."""
    sizes = replace(SIZES, max_len=16300)
    found = {*specializations(warmup.select_calls(INDEX_POOL, 64, 2048, 1, sizes, device), device)}
    for count in (1, 4, 32):
        specs = {
            "q8": Spec((count, 64, 128), "float8_e4m3fn"), "weights": Spec((count, 64), "float32"), "cache": INDEX_POOL,
            "block_table": Spec((count, 256), "int32"), "lengths": Spec((count,), "int32"),
        }  # fmt: skip
        call = Call("indexer_topk_paged", specs, {"k": 2048, "workspace_bytes": SIZES.scratch})
        assert found.issuperset(call.specializations(device)), call


@PLANNED
@pytest.mark.parametrize(
    ("heads", "invariant", "page", "sinks"),
    [(16, False, 64, False), (128, False, 128, False), (128, True, 64, False), (64, False, 64, True)],
)
def test_warmup_of_attention(heads: int, invariant: bool, page: int, sinks: bool, device: Device) -> None:
    rng = np.random.default_rng(heads)
    impl = SimpleNamespace(
        query_heads=heads, topk_indices_buffer=torch.empty(1, 2048), scale=0.1, invariant=invariant,
        gathers=device.arch == 90 and not invariant, layouts=(V32, PLAIN), compact=False,
        sinks=torch.empty(heads) if sinks else None, q_lora_rank=1536,
    )  # fmt: skip
    pool, rows = (memory.pool(layout, 40000, page) for layout in (V32, PLAIN))
    found = specializations(warmup.attend_calls(impl, pool, SIZES, device), device)

    def write() -> Call:
        """Roped dims that vLLM has rotated in the rows of its projection, or copied."""
        tokens = any_size(rng, SIZES.tokens)
        rope = Spec((tokens, 64), "bfloat16", (1536 + 576, 1) if rng.random() < 0.5 else None)
        specs = {"latent": Spec((tokens, 512), "bfloat16"), "rope": rope, "slots": Spec((tokens,), "int64")}
        return Call("write_mla_cache", specs | {"cache": pool}, {"scale_floor": "amax"})

    missing = unlisted(device, found, write)
    assert not missing, missing[0]

    def attend() -> Call:
        q = Spec((any_size(rng, SIZES.tokens), heads, PLAIN.dims), "bfloat16")
        gathered = Spec((any_size(rng, 8000), *rows.shape[1:]), rows.dtype)
        cache = gathered if impl.gathers and rng.random() < 0.5 else pool
        attrs = {"softmax_scale": 0.1, "batch_invariant": invariant}
        sink = {"sink": Spec((heads,), "float32")} if sinks else {}
        return Call("sparse_mla", memory.arguments(q, cache, 2048) | sink, attrs)

    missing = unlisted(device, found, attend)
    assert not missing, missing[0]

    window, entries = (Spec((40000, rows, 584), "uint8", (47808, 584, 1)) for rows in (64, 2))
    widths = (128, 512, 2048, 8192)
    of_drafter = 192  # slots of a token of DSpark, whose layers have the window alone
    for extra, held, slots in ((entries, widths, 128), (None, (0,), 128), (None, (0,), of_drafter)):
        layer = SimpleNamespace(
            padded_heads=heads, window_slots=slots, scale=0.1, compress_ratio=128, entry_widths=lambda held=held: held,
            gathers=impl.gathers, formats=(V4, V4), invariant=invariant,
        )  # fmt: skip
        found = specializations(warmup.attend_calls_v4(layer, window, extra, SIZES, device), device)

        def attend_v4(extra: Spec | None = extra, held: tuple[int, ...] = held, slots: int = slots) -> Call:
            q = Spec((any_size(rng, SIZES.tokens), heads, PLAIN_V4.dims), "bfloat16")
            pools = window, extra
            if impl.gathers and rng.random() < 0.5:
                pools = [pool and Spec((any_size(rng, 8000), pool.shape[1], 512), "bfloat16") for pool in pools]
            specs = memory.arguments(q, pools[0], slots, pools[1], int(rng.choice(held)))
            specs["sink"] = Spec((heads,), "float32")
            if extra is not None:
                specs["extra_lengths"] = specs["lengths"]
            return Call("sparse_mla", specs, {"softmax_scale": 0.1, "batch_invariant": invariant})

        missing = unlisted(device, found, attend_v4)
        assert not missing, missing[0]


@PLANNED
def test_warmup_of_ranks_that_share_keys(device: Device) -> None:
    rng, sizes = np.random.default_rng(2), replace(SIZES, ranks=8)
    found = specializations(warmup.select_calls(INDEX_POOL, 64, 2048, 1, sizes, device), device)

    def select() -> Call:
        columns = 64 * any_size(rng, 30000)
        tokens = any_size(rng, shards.at_once(columns, sizes.scratch))
        rows = {name: Spec((tokens,), "int32") for name in ("ends", "starts")}
        return Call("select_topk", {"logits": Spec((tokens, columns), "float32")} | rows, {"k": 2048})

    missing = unlisted(device, found, select)
    assert not missing, missing[0]


@pytest.mark.parametrize("columns", [64, 640 * 64, 2560 * 64, 40000 * 64])
def test_calls_of_parts_start_on_whole_vectors(columns: int) -> None:
    """Kernels are compiled for integers of tokens that do; ranks exchange as many tokens at a time as fit."""
    most = shards.at_once(columns, SIZES.scratch)
    assert 0 < most <= shards.ROWS and most % 4 == 0 and replace(SIZES, ranks=8).at_once(columns) == most
    assert 4 * columns * most <= SIZES.scratch < 4 * columns * (most + 4) or most == shards.ROWS
    assert [whole_vectors(tokens) for tokens in (3, 4, 26)] == [3, 4, 24]


def test_warmup_of_every_place_of_rows() -> None:
    """Requests' rows of a table whose width is no multiple of 4 do not start on 16 bytes."""
    kernels = warmup.map_call(64, 64).with_unaligned().specializations(find_device("H200"))
    assert [kernel.unaligned for kernel in kernels] == [frozenset(), {"block_table_ptr", "request_ids_ptr"}]


def quantize(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as e4m3, and a power of two for each block of so many rows and columns."""
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = (blocks.abs().amax((1, 3)) / 448).log2().ceil().exp2()
    quantized = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return quantized.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (1, 32), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_weights_of_the_output_that_a_checkpoint_has_in_e4m3(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Scales of blocks, of rows of MXFP8, and one for all; as float32, UE8M0 and its bytes."""
    weight = torch.randn(64, 128)
    quantized, scales = quantize(weight, rows, columns)
    want = (quantized.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).bfloat16()
    stored = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype == torch.uint8 else scales.to(dtype)
    assert torch.equal(projection.dequantize(quantized, stored), want)
    assert (want.float() - weight).abs().max() < 2**-4 * weight.abs().max()
    if scales.numel() == 1:
        assert torch.equal(projection.dequantize(quantized, stored.view([])), want)


def test_output_projected_in_groups() -> None:
    """Beside complex numbers in float64: pairs of each head's last dims, turned back, and a product for each group."""
    tokens, groups, heads, dim, rope, rank = 5, 2, 3, 12, 8, 6
    o, weight = torch.randn(tokens, groups * heads, dim), torch.randn(groups, rank, heads * dim)
    angles = torch.rand(9, rope // 2) * 6
    positions = torch.tensor([3, 0, 8, 8, 1])
    turned = torch.view_as_complex(o[..., -rope:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = (
        turned
        * torch.polar(torch.ones_like(angles[positions], dtype=torch.float64), -angles[positions].double())[:, None]
    )
    whole = torch.cat((o[..., :-rope].double(), torch.view_as_real(turned).flatten(-2)), dim=-1)
    want = torch.einsum("tgd,grd->tgr", whole.reshape(tokens, groups, -1), weight.double()).flatten(1)
    found = projection.project(o, positions, torch.cat((angles.cos(), angles.sin()), dim=1), weight)
    assert torch.allclose(found.double(), want, rtol=1e-5, atol=1e-5)


AWQ = SimpleNamespace(get_name=lambda: "awq")


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({"quant_config": AWQ}, "fewer bits by awq"),
        ({"weight": torch.zeros(1, dtype=torch.int8), "quant_config": None}, "torch.int8"),
    ],
)
def test_output_with_weights_of_other_formats_is_refused(layer: dict[str, Any], told: str) -> None:
    told = f"DeepSeek-V4's output projection with weights of {told} where there is no DeepGEMM"
    with pytest.raises(UnsupportedError, match=f"^xmla.vllm: not served: {told}; "):
        projection.keep_plain(SimpleNamespace(**layer))


def test_output_with_weights_in_bfloat16_keeps_them() -> None:
    layer = SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16))
    projection.keep_plain(layer)
    assert not hasattr(layer, "quant_method")


def test_output_with_weights_that_would_be_quantized_keeps_them() -> None:
    def quantize(layer: Any) -> None:
        layer.weight = layer.weight.to(torch.float8_e4m3fn)

    method = SimpleNamespace(process_weights_after_loading=quantize)
    layer = SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16), quant_method=method)
    projection.keep_plain(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.layers.0.self_attn.kv_b_proj", "kv_b_proj"), ("model.layers.1.attn.wo_a", "wo_a"),
        ("model.layers.1.attn.compressor.wkv", "compressor.wkv"),
        ("model.layers.1.attn.indexer.compressor.wgate", "compressor.wgate"),
    ],
)  # fmt: skip
def test_an_adapter_that_would_be_left_out_is_refused(name: str, told: str) -> None:
    """By the manager of a worker's adapters, and by those that derive from it; others are handed on."""
    loaded = SimpleNamespace(loras=dict.fromkeys(("model.layers.0.self_attn.q_b_proj", "model.layers.1.attn.wkv")))
    manager = type("Manager", (), {"_load_adapter": lambda self, request: request})
    own = type("Own", (adapters.refuse_unread(manager),), {})()
    assert own._load_adapter(loaded) is loaded
    loaded.loras[name] = None
    message = rf"^xmla\.vllm: not served: an adapter \(LoRA\) of {told}, whose modules vLLM's layers do not call; "
    with pytest.raises(UnsupportedError, match=message):
        own._load_adapter(loaded)


@pytest.mark.parametrize("packed", [True, False])
def test_what_vllm_would_quantize_is_compiled(packed: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on an A100, for which vLLM's kernels have no e4m3; the profile run has no slots, and writes nothing."""
    a100, made = find_device("A100"), []
    ops = {name: getattr(xt, name) for name in ("write_mla_cache", "write_indexer_cache", "quantize_indexer_query")}
    for name, op in ops.items():

        def noted(*args: Any, name: str = name, op: Any = op, **attrs: Any) -> Any:
            specs = map(spec_of, args)
            made.append(Call(name, dict(zip(registry()[name].tensors, specs, strict=True)), attrs))
            return op(*args, **attrs)

        monkeypatch.setattr(xt, name, noted)
    with torch.device(device):
        tokens, heads = 3, 8
        positions, cos_sin = torch.tensor([4, 0, 9]), torch.rand(10, 64)
        cache = torch.zeros(2, 64, 656, dtype=torch.uint8) if packed else torch.zeros(2, 64, 576).bfloat16()
        row = 132 if packed else MXFP4_ROW
        keys, selected = torch.zeros(2, 64, row, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.int32)
        q_c, kv_c, k_pe, index_k = (torch.randn(tokens, dims).bfloat16() for dims in (96, 512, 64, 128))
        arguments = (
            positions, q_c, torch.ones(96), 1e-6, kv_c, torch.ones(512), 1e-6, k_pe, cos_sin, index_k, torch.ones(128),
            torch.zeros(128), 1e-6, cos_sin, selected,
        )  # fmt: skip
        queries = without_e4m3.fused_norm_rope(*arguments)
        assert not made and selected.eq(-1).sum() == tokens * 8
        slots = torch.tensor([70, -1, 5])
        again = without_e4m3.fused_norm_rope(
            *arguments, slot_mapping=slots, indexer_k_cache=keys, mla_kv_cache=cache, has_indexer=True
        )
        assert torch.equal(again, queries) and cache.any(2).nonzero().tolist() == [[0, 5], [1, 6]]
        values = keys.flatten(1)[:, : 64 * (row - 4)].reshape(2, 64, row - 4)
        assert values.any(2).nonzero().tolist() == [[0, 5], [1, 6]]
        weights, index_q = (
            torch.randn(tokens, 128 + heads).bfloat16()[:, 128:],
            torch.randn(tokens, heads, 128).bfloat16(),
        )
        scales = 128**-0.5, heads**-0.5
        latents = torch.randn(tokens, 4, 512), torch.ones(1)
        of_layer = (
            positions,
            torch.randn(tokens, 4, 64).bfloat16(),
            cos_sin,
            index_q,
            cos_sin,
            *latents,
            weights,
            *scales,
        )
        q8, folded, rope = without_e4m3.fused_q(*of_layer, quantize_mqa=False)
        assert (q8.dtype, folded.dtype, rope.dtype) == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
        shared = without_e4m3.fused_q(*of_layer, has_indexer=False, quantize_mqa=False)
        assert shared[:2] == (None, None) and torch.equal(shared[2], rope)
        without_e4m3.fused_indexer_q_rope_quant(positions, index_q, cos_sin, weights, *scales, is_neox=True)
        groups, of_groups = without_e4m3.per_token_group_quant_fp8(index_q.view(-1, 128), 128, use_ue8m0=True)
        assert groups.shape == (tokens * heads, 128) and of_groups.shape == (tokens * heads, 1)

    impl = SimpleNamespace(
        query_heads=heads, topk_indices_buffer=torch.empty(1, 2048), scale=0.1, invariant=False, gathers=False,
        layouts=(V32, PLAIN), compact=False, sinks=None, q_lora_rank=96,
    )  # fmt: skip
    listed = [*warmup.attend_calls(impl, spec_of(cache), FEW, a100), *warmup.quantize_calls(spec_of(keys), heads)]
    found = {*specializations(listed, a100)}
    assert len(made) == 5 and all(found.issuperset(call.specializations(a100)) for call in made)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"group_size": 64, "use_ue8m0": True}, "scales of 64 in 128 dims"),
        ({"group_size": 128}, "scales that are no powers of two"),
        ({"group_size": 128, "use_ue8m0": True, "column_major_scales": True}, "scales that are no powers of two"),
    ],
)
def test_other_scales_are_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^xmla.vllm: not served: {told}; "):
        without_e4m3.per_token_group_quant_fp8(torch.zeros(2, 128), **asked)
