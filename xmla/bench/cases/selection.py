"""Selection of keys: top-k of stored logits, and logits and selection in one op."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.bench.cases.logits import DIMS, HEADS
from xmla.torch_api._all_ops import TORCH_OPS

K = 2048
ROWS, COLUMNS = (1, 4, 8, 16, 64, 512, 2048, 8192), (8192, 32768, 65536, 131072, 1 << 20)
MOST_LOGITS = 1 << 30
# Of engines, where they are installed: the same elements, in any order.
ENGINES = {
    "SGLang topk_v2": baselines.sglang_topk, "DeepSelect": baselines.deep_select, "vLLM": baselines.vllm_topk,
}  # fmt: skip


def mismatch_share(got: torch.Tensor, want: torch.Tensor) -> float:
    """The share of indices that differ."""
    return float((got != want).float().mean())


def of_an_indexer(rows: int, columns: int) -> torch.Tensor:
    """Logits of random queries over one sequence's keys."""
    logits = torch.empty(rows, columns, device=problems.DEVICE)
    k8, scales = problems.e4m3(columns, DIMS), torch.rand(columns, device=problems.DEVICE) + 0.1
    for part in logits.split(1024):
        q8, weights = problems.e4m3(len(part), HEADS, DIMS), torch.randn(len(part), HEADS, device=problems.DEVICE)
        ends = torch.full((len(part),), columns, device=problems.DEVICE, dtype=torch.int32)
        part.copy_(torch_api.indexer_logits(q8, weights, k8, scales, torch.zeros_like(ends), ends))
    return logits


def normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=problems.DEVICE)


def uniform(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, device=problems.DEVICE)


# What rows hold: where a search by a sample or by coarse bins of values can go wrong, or take another way.
KINDS: Mapping[str, Callable[[int, int], torch.Tensor]] = {
    "normal": normal,
    "uniform": uniform,
    "N(100, 1)": lambda *shape: normal(*shape).add_(100),
    "constant": lambda *shape: torch.ones(shape, device=problems.DEVICE),
    "ascending": lambda rows, columns: normal(1, columns).sort()[0].repeat(rows, 1),
    "in one bin of float16": lambda *shape: uniform(*shape).mul_(2**-10).add_(1),
    "of an indexer": of_an_indexer,
}


def wrong_rows(logits: torch.Tensor, selected: torch.Tensor) -> float:
    """The share of rows whose selected columns are not as many distinct ones, with no other element above their least.

    Of elements that equal the k-th any may be selected.
    """
    there = (selected >= 0) & (selected < logits.shape[1])
    columns = selected.long().where(there, 0).sort(1)[0]
    values = logits.gather(1, columns)
    least = values.amin(1, keepdim=True)
    above = torch.cat([(part > bound).sum(1) for part, bound in zip(logits.split(256), least.split(256), strict=True)])
    right = there.all(1) & (columns.diff() > 0).all(1) & (above == (values > least).sum(1))
    return int((~right).sum()) / len(right)


def misordered(logits: torch.Tensor, selected: torch.Tensor) -> float:
    """The share of indices that are not those of a stable sort, ascending, in a few of the rows."""
    some = max(1, (1 << 24) // logits.shape[1])
    first = logits[:some].sort(dim=1, descending=True, stable=True)[1][:, : selected.shape[1]]
    return mismatch_share(selected[:some].long(), first.sort(1)[0])


def topk_case(rows: int, columns: int, kind: str = "normal") -> Benchmark:
    sets = rotation(rows * columns * 4)
    logits = [KINDS[kind](rows, columns) for _ in range(sets)]
    ends = torch.full((rows,), columns, device=problems.DEVICE, dtype=torch.int32)
    inputs = [(each, ends) for each in logits]

    def call(ops: Any, logits: Any, ends: Any) -> Any:
        return ops.select_topk(logits, ends, k=K)

    def check() -> float:
        selected = call(TORCH_OPS, *inputs[0])
        return max(wrong_rows(logits[0], selected), misordered(logits[0], selected))

    def torch_topk(i: int) -> torch.Tensor:
        return torch.topk(logits[i], K, sorted=False)[1]

    def by(engine: Callable[..., Callable[[], torch.Tensor]]) -> Callable[[int], torch.Tensor]:
        prepared = cache(lambda i: engine(logits[i], ends, K))
        return lambda i: prepared(i)()

    peers = {"torch.topk": torch_topk, **{name: by(engine) for name, engine in ENGINES.items()}}
    return Benchmark(
        op="select_topk",
        case=f"{rows} × {columns} k={K}" + (f", {kind}" if kind != "normal" else ""),
        call=call,
        inputs=inputs,
        check=check,
        peers=peers,
        peer_checks={name: partial(lambda peer: wrong_rows(logits[0], peer(0)), peer) for name, peer in peers.items()},
        bytes=rows * columns * 4,
        tolerance=0.0,
        by_jax=kind == "normal",
    )


def topk() -> Iterator[Benchmark]:
    """Rows of each kind; a peer's error is the share of its rows that are wrong."""
    for kind in KINDS:
        for rows, columns in product(ROWS, COLUMNS):
            if rows * columns <= MOST_LOGITS:
                yield topk_case(rows, columns, kind)


WIDEST = 131072
PAGED = ((1, 1, 65536), (1, 1, WIDEST), (64, 1, 65536), (64, 1, WIDEST), (64, 4, 65536))


def paged_case(pool: torch.Tensor, requests: int, next_n: int, keys: int) -> Benchmark:
    tokens = requests * next_n
    q8, weights = problems.e4m3(tokens, HEADS, DIMS), torch.randn(tokens, HEADS, device=problems.DEVICE)
    tables = problems.shuffled(problems.block_table(requests, keys), rotation(requests * keys * 132))
    lengths = torch.full((tokens,), keys, device=problems.DEVICE, dtype=torch.int32)
    inputs = [(q8, weights, pool, table, lengths) for table in tables]

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_topk_paged(*arrays, k=K)

    def apart(i: int) -> torch.Tensor:
        return torch_api.select_topk(torch_api.indexer_logits_paged(*inputs[i]), lengths, k=K)

    return Benchmark(
        op="indexer_topk_paged",
        case=f"b={requests} next_n={next_n} keys={keys} k={K}",
        call=call,
        inputs=inputs,
        check=lambda: mismatch_share(call(TORCH_OPS, *inputs[0]), apart(0)),
        peers={"its ops apart": apart},
        flops=2 * tokens * keys * HEADS * DIMS,
        bytes=requests * keys * 132,
    )


def paged() -> Iterator[Benchmark]:
    """Logits and selection of a decode step, beside the two ops apart."""
    pool = problems.indexer_pool(64 * WIDEST)
    for requests, next_n, keys in PAGED:
        yield paged_case(pool, requests, next_n, keys)


def bounded_case(tokens: int, keys: int, mib: int) -> Benchmark:
    q8, weights = problems.e4m3(tokens, HEADS, DIMS), torch.randn(tokens, HEADS, device=problems.DEVICE)
    k8, scales = problems.e4m3(keys, DIMS), torch.rand(keys, device=problems.DEVICE) + 0.1
    starts, ends = problems.causal(tokens, keys)
    arguments = q8, weights, k8, scales, starts, ends

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_topk(*arrays, k=K, workspace_bytes=mib << 20)

    def stored(_: int) -> torch.Tensor:
        return torch_api.select_topk(torch_api.indexer_logits(*arguments), ends, starts, k=K)

    return Benchmark(
        op="indexer_topk",
        case=f"i={HEADS} s_q={tokens} s_kv={keys} k={K} in {mib} MiB",
        call=call,
        inputs=[arguments],
        check=lambda: mismatch_share(call(TORCH_OPS, *arguments), stored(0)),
        peers={"stored logits": stored},
        flops=2 * int(ends.sum()) * HEADS * DIMS,
        bound="fp8",
        tolerance=1e-3,
    )


def bounded() -> Iterator[Benchmark]:
    """Prefill selection within 64 MiB and 512 MiB, beside the ops that store all logits (32 GiB at 8192 × 1M)."""
    for tokens, keys, mib in ((2048, 65536, 64), (2048, 65536, 512), (8192, 1 << 20, 64), (8192, 1 << 20, 512)):
        yield bounded_case(tokens, keys, mib)


PLACES, OWN, SETS = 2 * K, K // 4, 8  # of each selection some are its own, so that they are given up between two calls


def resolved_case(requests: int, next_n: int, keys: int) -> Benchmark:
    tokens, places = requests * next_n, next_n * PLACES
    shape = {"device": problems.DEVICE, "dtype": torch.int32}
    entries = torch.stack([torch.randperm(keys, **shape)[: next_n * (K - OWN + SETS * OWN)] for _ in range(requests)])
    shared, *own = entries.split([next_n * (K - OWN), *[next_n * OWN] * SETS], dim=1)
    held = torch.full((requests, places), -1, **shape)
    slots = torch.randperm(requests * places, **shape).view(requests, places)
    inputs = [(torch.cat([shared, part], 1).view(tokens, K), held, slots) for part in own]

    def call(ops: Any, indices: Any, held: Any, slots: Any) -> Any:
        results = ops.resolve_slots(indices, held, slots, num_entries=keys)
        return results if len(results) > 4 else (*results, held, slots)  # PyTorch updates them in place

    def check() -> float:
        """Against the definition, from the list that all other selections leave."""
        for others in inputs[1:]:
            call(TORCH_OPS, *others)
        copies = [array.clone() for array in inputs[0]]
        want = torch_api.resolve_slots(*copies, num_entries=keys, implementation="reference")
        return max(map(mismatch_share, call(TORCH_OPS, *inputs[0]), (*want, *copies[1:])))

    return Benchmark(
        op="resolve_slots",
        case=f"b={requests} next_n={next_n} k={K} places={places} of {keys}",
        call=call,
        inputs=inputs,
        updates=(1, 2),
        check=check,
        bytes=4 * (4 * tokens * K + 4 * requests * places + requests),
    )


def resolved() -> Iterator[Benchmark]:
    """Steps that find three quarters of what they select in the pool."""
    for requests, next_n in ((1, 1), (64, 1), (256, 1), (64, 4)):
        yield resolved_case(requests, next_n, WIDEST)
