"""Ops that move bytes and compute next to nothing: each beside a copy of as many."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.benchmark import Arrays, Benchmark, rotation
from xmla.bench.errors import relative_error
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.core.values import cdiv

PAGE = 64
TOKENS = (64, 8192, 32768)  # a decode step, and prefills
REFERENCES = (64, 4096)  # tokens that have thousands of numbers each
K, CONTEXT = 2048, 32768
HEADS, DIMS = 64, 128  # of the indexer
HALF_A_STEP = 2**-4  # of e4m3, at most
EXACT = 0.0


def moved(
    op: str, case: str, inputs: Sequence[Arrays], bytes: int, error: Callable[[Any], float], tolerance: float,
    **attributes: Any,
) -> Benchmark:  # fmt: skip
    """A case of an op that takes arrays and makes others."""

    def call(ops: Any, *arrays: Any) -> Any:
        return getattr(ops, op)(*arrays, **attributes)

    return Benchmark(
        op=op, case=case, call=call, inputs=inputs, check=lambda: error(call(torch_api, *inputs[0])), bytes=bytes,
        tolerance=tolerance,
    )  # fmt: skip


def written(
    op: str, case: str, inputs: Sequence[Arrays], bytes: int, error: Callable[[torch.Tensor], float], tolerance: float
) -> Benchmark:
    """A case of an op that writes entries into its last array."""
    place = len(inputs[0]) - 1

    def call(ops: Any, *arrays: Any) -> Any:
        updated = getattr(ops, op)(*arrays)
        return [arrays[place] if updated is None else updated]  # PyTorch updates it in place

    return Benchmark(
        op=op, case=case, call=call, inputs=inputs, check=lambda: error(*call(torch_api, *inputs[0])), bytes=bytes,
        updates=(place,), tolerance=tolerance,
    )  # fmt: skip


def slots_of(sets: int, tokens: int, entries: int) -> list[torch.Tensor]:
    """Slots [T] of distinct entries in random order, for each set."""
    return [
        torch.randperm(entries, device=problems.DEVICE)[:tokens].to(torch.int32).contiguous() for _ in range(sets)
    ]  # fmt: skip


def latents(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Entries of 656 bytes in float32, read in plain torch: four scales of 128 values each, then roped dims."""
    entries = cache[slots.long() // PAGE, slots.long() % PAGE]
    values, scales = entries[:, :512].view(torch.float8_e4m3fn), entries[:, 512:528].contiguous().view(torch.float32)
    rope = entries[:, 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(values.float().view(-1, 4, 128) * scales[..., None]).flatten(1), rope.float()], 1)


def keys(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the indexer's cache and their scales, read in plain torch: a page's scales follow its values."""
    pages, place = cache.flatten(1), slots.long()
    values = pages[:, : PAGE * DIMS].reshape(-1, DIMS)[place].view(torch.float8_e4m3fn)
    return values, pages[:, PAGE * DIMS :].contiguous().view(torch.float32).flatten()[place]


def latents_case(tokens: int) -> Benchmark:
    bytes = tokens * (576 * 2 + V32.row + 4)
    sets = rotation(bytes)
    latent, rope = problems.bfloat16(sets, tokens, 512), problems.bfloat16(sets, tokens, 64)
    cache = torch.zeros(cdiv(2 * tokens, PAGE), PAGE, V32.row, dtype=torch.uint8, device=problems.DEVICE)
    slots = slots_of(sets, tokens, 2 * tokens)

    def error(cache: torch.Tensor) -> float:
        return relative_error(latents(cache, slots[0]), torch.cat([latent[0], rope[0]], 1))

    inputs = [(latent[i], rope[i], slots[i], cache) for i in range(sets)]
    return written("write_mla_cache", f"tokens={tokens}", inputs, bytes, error, HALF_A_STEP)


def written_latents() -> Iterator[Benchmark]:
    yield from map(latents_case, TOKENS)


def keys_case(tokens: int) -> Benchmark:
    row = IndexerLayout(DIMS).row
    bytes = tokens * (DIMS * 2 + row + 4)
    sets = rotation(bytes)
    rows, slots = problems.bfloat16(sets, tokens, DIMS), slots_of(sets, tokens, 2 * tokens)
    cache = torch.zeros(cdiv(2 * tokens, PAGE), PAGE, row, dtype=torch.uint8, device=problems.DEVICE)

    def error(cache: torch.Tensor) -> float:
        values, scales = keys(cache, slots[0])
        return relative_error(values.float() * scales[:, None], rows[0])

    inputs = [(rows[i], slots[i], cache) for i in range(sets)]
    return written("write_indexer_cache", f"tokens={tokens}", inputs, bytes, error, HALF_A_STEP)


def written_keys() -> Iterator[Benchmark]:
    yield from map(keys_case, TOKENS)


def queries_case(tokens: int) -> Benchmark:
    bytes = tokens * HEADS * (DIMS * 3 + 8)
    sets = rotation(bytes)
    q, weights = problems.bfloat16(sets, tokens, HEADS, DIMS), torch.rand(sets, tokens, HEADS, device=problems.DEVICE)
    weights += 0.5

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        values, folded = results
        return relative_error(values.float() * (folded / weights[0])[..., None], q[0])

    inputs = [(q[i], weights[i]) for i in range(sets)]
    return moved("quantize_indexer_query", f"tokens={tokens}", inputs, bytes, error, HALF_A_STEP, scale=1.0)


def queries() -> Iterator[Benchmark]:
    yield from map(queries_case, TOKENS)


def read_latents_case(count: int) -> Benchmark:
    bytes = count * (V32.row + 576 * 2 + 4)
    sets, cache = rotation(bytes), problems.latent_pool(2 * count)
    slots = slots_of(sets, count, 2 * count)

    def error(rows: torch.Tensor) -> float:
        return relative_error(rows, latents(cache, slots[0]).bfloat16())

    inputs = [(cache, each) for each in slots]
    return moved("read_mla_cache", f"entries={count}", inputs, bytes, error, EXACT)


def read_latents() -> Iterator[Benchmark]:
    yield from map(read_latents_case, TOKENS)


def read_keys_case(count: int) -> Benchmark:
    bytes = count * (2 * IndexerLayout(DIMS).row + 4)
    sets, cache = rotation(bytes), problems.indexer_pool(2 * count)
    slots = slots_of(sets, count, 2 * count)

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        (values, scales), (expected, expected_scales) = results, keys(cache, slots[0])
        return relative_error(values.float() * scales[:, None], expected.float() * expected_scales[:, None])

    inputs = [(cache, each) for each in slots]
    return moved("read_indexer_cache", f"entries={count}", inputs, bytes, error, EXACT)


def read_keys() -> Iterator[Benchmark]:
    yield from map(read_keys_case, TOKENS)


def slots_case(requests: int, tokens: int, k: int, context: int) -> Benchmark:
    bytes = tokens * (2 * k + 1) * 4
    sets = rotation(bytes)
    table = problems.block_table(requests, context)
    indices = torch.randint(context, (sets, tokens, k), device=problems.DEVICE, dtype=torch.int32)

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        chosen = indices[0].view(requests, -1).long()
        expected = table.gather(1, chosen // PAGE).view(tokens, k) * PAGE + indices[0] % PAGE
        return float((results[0] != expected).sum() + (results[1] != k).sum())

    inputs = [(each, table) for each in indices]
    case = f"b={requests} tokens={tokens} k={k} context={context}"
    return moved("map_slots", case, inputs, bytes, error, EXACT, page_size=PAGE)


def mapped() -> Iterator[Benchmark]:
    for requests, tokens in ((1, 1), (64, 64), (1, 4096)):
        yield slots_case(requests, tokens, K, CONTEXT)


def attention_case(parts: int, tokens: int, heads: int) -> Benchmark:
    bytes = tokens * heads * ((parts + 1) * (512 * 2 + 4))
    sets = rotation(bytes)
    outs = problems.bfloat16(sets, parts, tokens, heads, 512)
    lses = torch.randn(sets, parts, tokens, heads, device=problems.DEVICE)

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        some = slice(16)  # in float64 all would take too much memory
        shares = lses[0, :, some].double().softmax(0)[..., None]
        return relative_error(results[0][some], (shares * outs[0, :, some].double()).sum(0))

    inputs = [(outs[i], lses[i]) for i in range(sets)]
    return moved("merge_attention", f"parts={parts} tokens={tokens} h={heads}", inputs, bytes, error, 2**-7)


def merged_attention() -> Iterator[Benchmark]:
    for tokens in REFERENCES:
        for parts in (2, 8):
            yield attention_case(parts, tokens, 128)


def candidates_case(parts: int, tokens: int, k: int) -> Benchmark:
    bytes = tokens * k * 8 * (parts + 1)
    sets = rotation(bytes)
    values = torch.randn(sets, parts, tokens, k, device=problems.DEVICE)
    # Each part has columns of its own, ascending, as selections have them.
    indices = (torch.arange(parts * k, device=problems.DEVICE, dtype=torch.int32) * 3).view(parts, 1, k)
    indices = indices.expand(parts, tokens, k).contiguous()

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        every = values[0].transpose(0, 1).reshape(tokens, -1)
        expected = every.topk(k, sorted=False)[1].sort(1)[0] * 3
        return float((results[1] != expected).any(1).float().mean())

    inputs = [(each, indices) for each in values]
    # Of rows whose k-th value occurs twice torch takes another.
    return moved("merge_topk", f"parts={parts} tokens={tokens} k={k}", inputs, bytes, error, 0.02, k=k)


def merged_candidates() -> Iterator[Benchmark]:
    for tokens in REFERENCES:
        for parts in (2, 8):
            yield candidates_case(parts, tokens, K)


def expanded_case(tokens: int, blocks: int, granularity: int, context: int) -> Benchmark:
    columns = blocks * granularity + granularity - 1
    bytes = tokens * (blocks + columns + 1) * 4
    sets = rotation(bytes)
    lengths = torch.full((tokens,), context - 1, device=problems.DEVICE, dtype=torch.int32)
    complete = (context - 1) // granularity
    chosen = torch.randint(complete, (sets, tokens, blocks), device=problems.DEVICE, dtype=torch.int32)

    def error(indices: torch.Tensor) -> float:
        place = torch.arange(granularity, device=problems.DEVICE, dtype=torch.int32)
        tail = (complete * granularity + place[:-1]).expand(tokens, -1)
        expected = torch.cat([(chosen[0][..., None] * granularity + place).flatten(1), tail], 1)
        return float((indices != expected).sum())

    inputs = [(each, lengths) for each in chosen]
    case = f"tokens={tokens} blocks={blocks} of {granularity}"
    return moved("expand_blocks", case, inputs, bytes, error, EXACT, granularity=granularity)


def expanded() -> Iterator[Benchmark]:
    for tokens in REFERENCES:
        yield expanded_case(tokens, 512, 4, CONTEXT)


def windows_case(requests: int, tokens: int, window: int, context: int) -> Benchmark:
    bytes = tokens * (window + 2) * 4
    sets = rotation(bytes)
    tables = problems.shuffled(problems.block_table(requests, context), sets)
    lengths = torch.arange(context - tokens // requests, context, device=problems.DEVICE, dtype=torch.int32) + 1
    lengths = lengths.repeat(requests)

    def error(results: tuple[torch.Tensor, torch.Tensor]) -> float:
        place = (lengths[:, None] - window + torch.arange(window, device=problems.DEVICE)).view(requests, -1).long()
        expected = tables[0].gather(1, place // PAGE) * PAGE + place.int() % PAGE
        return float((results[0] != expected.view(tokens, window)).sum() + (results[1] != window).sum())

    inputs = [(table, lengths) for table in tables]
    case = f"b={requests} tokens={tokens} window={window}"
    return moved("window_slots", case, inputs, bytes, error, EXACT, window=window, page_size=PAGE)


def windows() -> Iterator[Benchmark]:
    for requests, tokens in ((64, 64), (1, 8192), (1, 32768)):
        yield windows_case(requests, tokens, 128, CONTEXT + tokens)
