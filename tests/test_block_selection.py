"""Selections of blocks of keys: that they are the selections over all keys, and that a call's parts do not show."""

from functools import partial

import kit
import numpy as np
import pytest
import torch

from xmla import torch_api
from xmla.core.errors import UnsupportedError
from xmla.core.ops.indexer.indexer_topk.cases import make_case as ragged
from xmla.core.ops.indexer.indexer_topk_paged.cases import make_case as paged
from xmla.core.registry import registry
from xmla.core.values import H200, KNOWN_DEVICES, Device, assume_device
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
LAYOUTS = ("fp8", "mxfp4")


def inputs_of(name: str, arrays: dict[str, np.ndarray], device: str) -> list[torch.Tensor | None]:
    return kit.torch_inputs(OPS[name], arrays, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("granularity", "newest"), [(8, 1), (4, 3), (64, 0)])
def test_keys_selected_in_the_best_blocks_are_those_of_the_whole_context(
    granularity: int, newest: int, layout: str, device: str
) -> None:
    """Logits tie often and some are NaN; the query that selected the blocks selects in them."""
    k = 20
    arrays = kit.make(paged("", (530, 9, 211), 61, k, next_n=2, layout=layout))
    call = inputs_of("indexer_topk_paged", arrays, device)
    blocks = torch_api.indexer_blocks_paged(*call, k=k + newest, granularity=granularity, newest=newest)
    within = torch_api.indexer_block_topk_paged(*call[:5], blocks, call[5], k=k, granularity=granularity)
    kit.assert_bits_equal("indices", within, torch_api.indexer_topk_paged(*call, k=k))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_selected_in_the_best_blocks_are_those_of_the_whole_range(layout: str, device: str) -> None:
    arrays = kit.make(ragged("", 7, 4, 430, 20, layout=layout))
    call = inputs_of("indexer_topk", arrays, device)
    blocks = torch_api.indexer_blocks(*call, k=21, granularity=8)
    within = torch_api.indexer_block_topk(*call, blocks, k=20, granularity=8)
    kit.assert_bits_equal("indices", within, torch_api.indexer_topk(*call, k=20))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_blocks_select_nothing_of_no_keys(layout: str, device: str) -> None:
    arrays = kit.make(ragged("", 3, 4, 40, 20, layout=layout))
    none = kit.with_axis(OPS["indexer_topk"], arrays, "N", 0)
    blocks = torch.zeros((3, 0), dtype=torch.int32, device=device)
    for call in (arrays, none):
        got = torch_api.indexer_block_topk(*inputs_of("indexer_topk", call, device), blocks, k=20, granularity=8)
        assert (got == -1).all()


def test_another_query_selects_as_a_mask_over_the_whole_context_would(device: str) -> None:
    """What engines do without these ops: all logits, −inf outside the candidate blocks, and the largest of them."""
    k, granularity = 25, 8
    arrays = kit.make(paged("", (470, 70), 2, k, next_n=2))
    source = inputs_of("indexer_topk_paged", arrays, device)
    other = kit.make(paged("", (470, 70), 2, k, next_n=2), seed=1)
    consumer = [*inputs_of("indexer_topk_paged", {**arrays, "q8": other["q8"]}, device)]
    blocks = torch_api.indexer_blocks_paged(*source, k=10, granularity=granularity)
    got = torch_api.indexer_block_topk_paged(*consumer[:5], blocks, None, k=k, granularity=granularity)

    (logits,) = OPS["indexer_logits_paged"].reference(**{**arrays, "q8": other["q8"]})
    for row, length in enumerate(arrays["lengths"]):
        listed = blocks[row][blocks[row] >= 0].cpu().numpy()
        allowed = np.isin(np.arange(length) // granularity, listed)
        positions = np.flatnonzero(allowed)
        picked = OPS["select_topk"].reference(
            logits[row : row + 1, positions].astype(np.float32), np.array([len(positions)]), k=k
        )[0][0]
        kit.assert_bits_equal("indices", got[row][got[row] >= 0], positions[picked[picked >= 0]].astype(np.int32))


@pytest.mark.parametrize("name", ["indexer_blocks", "indexer_blocks_paged", "indexer_block_topk",
                                  "indexer_block_topk_paged"])  # fmt: skip
def test_parts_do_not_show(name: str, device: str) -> None:
    """The bits of a call are those of the call that has all the memory it wants."""
    op = OPS[name]
    case = next(case for case in op.cases if "workspace_bytes" in case.attrs)
    call = kit.torch_inputs(op, kit.make(case), device)
    own = kit.as_tuple(getattr(TORCH_OPS, name)(*call, **case.attrs))
    whole = kit.as_tuple(getattr(TORCH_OPS, name)(*call, **{**case.attrs, "workspace_bytes": 1 << 29}))
    kit.assert_bits_equal("indices", own[0], whole[0])


def test_what_does_not_fit_one_token_is_refused(device: str) -> None:
    for name in ("indexer_blocks", "indexer_blocks_paged", "indexer_block_topk", "indexer_block_topk_paged"):
        op = OPS[name]
        call = kit.torch_inputs(op, kit.make(op.cases[0]), device)
        with pytest.raises(UnsupportedError) as caught:
            getattr(TORCH_OPS, name)(*call, **{**op.cases[0].attrs, "workspace_bytes": 100})
        assert str(caught.value).startswith(f"{name}: workspace_bytes value is 100, supported: at least ")
        least = int(str(caught.value).split("at least ")[1].split()[0])
        getattr(TORCH_OPS, name)(*call, **{**op.cases[0].attrs, "workspace_bytes": least})


@pytest.mark.parametrize("name", ["indexer_blocks_paged", "indexer_block_topk_paged"])
def test_what_does_not_fit_too_many_parts_is_refused(name: str) -> None:
    """Of more tokens than there may be parts: a part has several, and the error says how much they need."""
    tokens, blocks = 16173, 2048
    integers, rows = partial(torch.empty, dtype=torch.int32, device="meta"), (tokens, 32)
    call = [
        torch.empty(*rows, 128, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(rows, device="meta"),
        torch.empty(8, 64, 132, dtype=torch.uint8, device="meta"), integers(1, 1024), integers(tokens),
    ]  # fmt: skip
    if name == "indexer_block_topk_paged":
        call.append(integers(tokens, blocks))
    plan = partial(getattr(torch_api, name).plan, *call, k=512, granularity=8)
    with assume_device(H200):
        with pytest.raises(UnsupportedError, match="supported: at least ") as caught:
            plan(workspace_bytes=1 << 20)
        least = int(str(caught.value).split("at least ")[1].split()[0])
        assert 1 << 20 < plan(workspace_bytes=least).workspace_bytes <= least


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_a_few_tokens_fit_where_one_does(device: Device) -> None:
    """Fewer than a program has, over so many keys that what the selection needs beside their logits is no rounding."""
    tokens, keys = 18, 924_000
    e4m3, bounds = torch.float8_e4m3fn, torch.empty(tokens, dtype=torch.int32, device="meta")
    call = (
        torch.empty(tokens, 32, 128, dtype=e4m3, device="meta"), torch.empty(tokens, 32, device="meta"),
        torch.empty(keys, 128, dtype=e4m3, device="meta"), torch.empty(keys, device="meta"), bounds, bounds,
    )  # fmt: skip
    with assume_device(device):
        plan = partial(torch_api.indexer_blocks.plan, *call, k=2048, granularity=8)
        for room in (4 * tokens * keys, 4 * tokens * keys // 2):
            assert plan(workspace_bytes=room).workspace_bytes <= room


def logits_of(q8: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T, N] in float64 of queries [T, I, D] and keys [N, D], −inf at and past each token's length."""
    logits = (torch.einsum("tid,nd->tin", q8.double(), keys).relu() * weights.double()[..., None]).sum(1)
    return logits.masked_fill(torch.arange(len(keys)) >= lengths[:, None], -torch.inf)


def largest(logits: torch.Tensor, k: int) -> list[list[int]]:
    """The indices of a row's k largest logits but for −inf, of equal ones the first, ascending."""
    picked = (part[:, :k] for part in logits.sort(descending=True, stable=True))
    return [sorted(index[value > -torch.inf].tolist()) for value, index in zip(*picked, strict=True)]


def test_layers_of_v41_that_own_and_share_entries_keys_blocks_and_selections(device: str) -> None:
    """Layer 0 owns entries and keys (kv_source_layer_ids) and keeps blocks; layer 1 selects within them; layer 2 not.

    All attend to their own window and to layer 0's entries, at ratio 2, in the order of calls of `ModelConfigV41`.
    """
    torch.manual_seed(0)
    tokens, ratio, page, granularity, k, window, heads = 46, 2, 4, 4, 5, 6, 3
    latents, positions = torch.randn(tokens // ratio, 512).bfloat16(), torch.arange(tokens, dtype=torch.int32)
    lengths = positions + 1
    project = torch.randn(512, 128) * 512**-0.5
    count, each = -(-len(latents) // page), -(-tokens // page)
    table, of_window = (torch.randperm(size, dtype=torch.int32, device=device)[None] for size in (count, each))
    entries = torch.full((count, page, 512), torch.nan, dtype=torch.bfloat16, device=device)
    index_keys = torch.full((count, page, 132), 255, dtype=torch.uint8, device=device)
    order = torch.arange(len(latents), dtype=torch.int32, device=device)[None]
    slots = torch_api.map_slots(order, table, page_size=page)[0][0]
    on = lambda x: x.to(device)
    parts = (on(part).contiguous() for part in latents.split([448, 64], dim=1))
    torch_api.write_mla_cache(*parts, slots, entries)
    torch_api.write_indexer_cache(on(latents.float() @ project), slots, index_keys)
    values, scales = torch_api.read_indexer_cache(index_keys, slots, cache_format="fp8")
    keys = (values.double() * scales.double()[:, None]).cpu()

    seen, sink = lengths // ratio, torch.randn(heads)
    blocks, selected, want = None, None, []
    for layer in range(3):
        if layer < 2:
            query = torch.randn(tokens, 2, 128), torch.rand(tokens, 2)
            q8, weights = torch_api.quantize_indexer_query(*map(on, query))
            logits = logits_of(q8.cpu(), weights.cpu(), keys, seen)
        scored = q8, weights, index_keys, table, on(seen)
        if layer == 0:
            selected = torch_api.indexer_topk_paged(*scored, k=k)
            blocks = torch_api.indexer_blocks_paged(*scored, k=3, granularity=granularity)
            want = largest(logits, k)
            of_blocks = torch.nn.functional.pad(logits, (0, -logits.shape[1] % granularity), value=-torch.inf)
            best = of_blocks.unflatten(1, (-1, granularity)).amax(2)
            newest = (seen - 1) // granularity
            best[newest >= 0, newest[newest >= 0]] = torch.inf
            kept = largest(best, 3)
            assert [row[row >= 0].tolist() for row in blocks.cpu()] == kept
        elif layer == 1:
            selected = torch_api.indexer_block_topk_paged(*scored, blocks, k=k, granularity=granularity)
            inside = torch.zeros(logits.shape, dtype=torch.bool)
            for row, listed in enumerate(kept):
                inside[row] = torch.isin(torch.arange(logits.shape[1]) // granularity, torch.tensor(listed))
            want = largest(logits.masked_fill(~inside, -torch.inf), k)
        assert [row[row >= 0].tolist() for row in selected.cpu()] == want

        q, own = torch.randn(tokens, heads, 512).bfloat16() / 8, torch.randn(tokens, 512).bfloat16()
        cache = torch.full((each, page, 512), torch.nan, dtype=torch.bfloat16, device=device)
        places = torch_api.map_slots(on(positions)[None], of_window, page_size=page)[0][0]
        torch_api.write_mla_cache(*(on(x).contiguous() for x in own.split([448, 64], dim=1)), places, cache)
        near, counts = torch_api.window_slots(of_window, on(lengths), window=window, page_size=page)
        extra, extra_counts = torch_api.map_slots(selected, table, None, on(seen), page_size=page, compact=True)
        out, _ = torch_api.sparse_mla(
            on(q), cache, near, counts, on(sink), entries, extra, extra_counts, softmax_scale=0.3
        )
        for token in range(tokens):
            rows = torch.cat([own[max(0, token + 1 - window) : token + 1], latents[want[token]]]).double()
            scores = torch.cat([q[token].double() @ rows.mT * 0.3, sink.double()[:, None]], dim=1).softmax(1)
            assert (out[token].cpu().double() - scores[:, :-1] @ rows).abs().max() < 2e-2


def test_a_pooled_selection_and_its_tail_are_slots(device: str) -> None:
    """GLM-5.3-Flash's step: pools, their tokens, the tail, and the slots of all, the valid ones first."""
    lengths = torch.tensor([11, 3], dtype=torch.int32, device=device)
    pools = torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32, device=device)  # of two complete ones, and of none
    indices = torch_api.expand_blocks(pools, lengths, granularity=4)
    table = torch.tensor([[3, 0, 7], [5, 1, 2]], dtype=torch.int32, device=device)
    slots, counts = torch_api.map_slots(indices, table, None, lengths, page_size=4, compact=True)
    assert slots[:, :8].tolist() == [[12, 13, 14, 15, 28, 29, 30, -1], [20, 21, 22, -1, -1, -1, -1, -1]]
    assert counts.tolist() == [7, 3]
