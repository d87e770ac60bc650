"""What is timed: ops at serving size, each beside peers, ceilings or itself at another size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.core.formats.mla import V4, V32
from xmla.core.plan import cdiv

SCALE = 0.1352  # softmax scale of DeepSeek-V3.2
L2_BYTES = 60 << 20
CHECKED_ROWS = 4
LOGITS_TOLERANCE = 3e-3  # DeepGEMM's own bound, 1 − 2Σab/Σ(a²+b²) < 5e-6, as a relative norm


@dataclass(frozen=True)
class Benchmark:
    """One case: `ours` and `peers` are functions of an input set; flops and bytes are a call's, as the model counts.

    `check` gives the error of `ours(0)` against something that shares no kernel with it, `peer_checks` those of peers
    against the same.
    """

    op: str
    case: str
    ours: Callable[[int], Any]
    check: Callable[[], float]
    peers: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0
    sets: int = 1
    tolerance: float = 1e-2
    bound: str = "copy"
    peer_checks: Mapping[str, Callable[[], float]] = field(default_factory=dict)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def sampled(rows: int) -> range:
    """A few rows of so many, the first among them."""
    return range(0, rows, max(1, rows // CHECKED_ROWS))


# A cache, its slots [T, K], and how many of a row count [T], or None for all.
Source = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def attention_error(
    out: torch.Tensor, q: torch.Tensor, sources: Sequence[Source], scale: float, sink: torch.Tensor | None = None
) -> float:
    """The worst relative error of sampled rows of `out` against softmax attention in float64 over the same entries."""
    errors = []
    for row in sampled(len(q)):
        entries = []
        for cache, slots, lengths in sources:
            chosen = slots[row] if lengths is None else slots[row, : int(lengths[row])]
            entries.append(torch_api.read_mla_cache(cache, chosen[chosen >= 0].contiguous(), dtype="float32"))
        keys = torch.cat(entries).double()
        scores = q[row].double() @ keys.T * scale
        shares = (scores if sink is None else torch.cat([scores, sink.double()[:, None]], 1)).softmax(1)
        errors.append(relative_error(out[row], shares[:, : len(keys)] @ keys[:, :512]))
    return float(np.max(errors))  # NaN stays, unlike in max()


def step_error(arguments: Sequence[torch.Tensor], k: int, scale: float) -> float:
    """The worst error of sampled rows of `dsa_attention`: of attention over its selection, and the share of it missed.

    What it should select follows from the formula in float32 over the stored keys, with the query rounded to e4m3.
    """
    q, index_q, index_weights, mla, indexer, table, lengths = arguments
    out, _, indices = torch_api.dsa_attention(*arguments, k=k, softmax_scale=scale)
    page = mla.shape[1]
    slots = torch.where(indices < 0, -1, table.gather(1, indices.clamp(min=0).long() // page) * page + indices % page)
    errors = [attention_error(out, q, [(mla, slots.to(torch.int32), None)], scale)]
    q8, weights = torch_api.quantize_indexer_query(index_q, index_weights)
    for row in sampled(len(q)):
        place = torch.arange(int(lengths[row]), device=q.device)
        k8, scales = torch_api.read_indexer_cache(indexer, table[row, place // page] * page + place % page)
        logits = (q8[row].float() @ k8.float().T).relu().T @ weights[row] * scales
        wanted = logits.topk(min(k, len(logits)))[1]
        errors.append(1 - float(torch.isin(wanted, indices[row]).double().mean()))
    return float(np.max(errors))


def rotation(bytes_a_set: float) -> int:
    """Input sets that together pass twice the L2 cache."""
    return max(2, min(8, int(2 * L2_BYTES // max(bytes_a_set, 1)) + 1))


def decode() -> Iterator[Benchmark]:
    """Decode over the fp8 cache: FlashMLA's benchmark shapes, keys drawn from 32768 of each request's own."""
    pool = problems.latent_pool(128 * 32768)
    peer = baselines.flash_mla()
    shapes = [(b, 128, s_q) for b in (1, 2, 4, 8, 16, 64, 128) for s_q in (1, 2)]
    shapes += [(b, h, 1) for b in (1, 64, 128) for h in (16, 32, 64)]
    for requests, heads, s_q in shapes:
        tokens, k = requests * s_q, 2048
        sets = rotation(tokens * k * 656)
        q = torch.randn(sets, tokens, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.3
        owner = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(s_q)[:, None] * 32768
        slots = [problems.chosen_keys(tokens, 32768, k) + owner for _ in range(sets)]

        def ours(i: int, q: Any = q, slots: Any = slots) -> torch.Tensor:
            return torch_api.sparse_mla(q[i], pool, slots[i], softmax_scale=SCALE)[0]

        def invariant(i: int, q: Any = q, slots: Any = slots) -> torch.Tensor:
            return torch_api.sparse_mla(q[i], pool, slots[i], softmax_scale=SCALE, batch_invariant=True)[0]

        peers: dict[str, Callable[[int], Any]] = {"itself with batch_invariant": invariant}
        check = lambda ours=ours, q=q, slots=slots: attention_error(ours(0), q[0], [(pool, slots[0], None)], SCALE)
        if peer is not None:
            calls = [baselines.flash_mla_decode(q[i], pool, slots[i], requests, SCALE) for i in range(sets)]
            peers = {"FlashMLA": lambda i, calls=calls: calls[i](), **peers}
            check = lambda ours=ours, calls=calls: relative_error(ours(0), calls[0]())
        yield Benchmark(
            "sparse_mla", f"decode b={requests} h={heads} s_q={s_q} k={k}", ours, check, peers,
            2 * tokens * heads * k * (576 + 512), tokens * k * 656, sets, bound="bf16",
        )  # fmt: skip


# Heads, compressed entries per token, their page size and whether they have lengths: FlashMLA's benchmark of V4 decode,
# 128 keys of the window in pages of 256 beside them. V4-Flash and V4-Pro, layers of ratio 4 and of ratio 128.
MODEL1 = (
    ("M1-1", 64, 512, 64, False),
    ("M1-2", 128, 1024, 64, False),
    ("M1-3", 64, 1024, 2, True),
    ("M1-4", 128, 1024, 2, True),
)


def decode_v4() -> Iterator[Benchmark]:
    """V4 decode over two sources with a sink: keys drawn from 16384 of each request's own in either."""
    peer = baselines.flash_mla()
    most, keys, window, s_q, scale = 128, 16384, 128, 2, 512**-0.5
    pool = problems.latent_pool(most * keys, 256, V4)
    for name, heads, extra_k, extra_page, with_lengths in MODEL1:
        extra_pool = problems.latent_pool(most * keys, extra_page, V4)
        for requests in (2, 64, most):
            tokens = requests * s_q
            sets = rotation(tokens * (window + extra_k) * V4.row)
            q = torch.randn(sets, tokens, heads, 512, device="cuda", dtype=torch.bfloat16) * 0.3
            sink = torch.randn(heads, device="cuda")
            owner = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(s_q)[:, None] * keys
            slots, extra = (
                [problems.chosen_keys(tokens, keys, k) + owner for _ in range(sets)] for k in (window, extra_k)
            )
            lengths = None
            if with_lengths:
                lengths = torch.randint(extra_k + 1, (requests,), device="cuda", dtype=torch.int32)
                lengths = lengths.repeat_interleave(s_q)
            attended = tokens * (window + extra_k) if lengths is None else tokens * window + int(lengths.sum())
            second = [(extra_pool, extra[i], lengths) for i in range(sets)]

            def ours(i: int, q: Any = q, slots: Any = slots, sink: Any = sink, second: Any = second) -> torch.Tensor:
                return torch_api.sparse_mla(q[i], pool, slots[i], None, sink, *second[i], softmax_scale=scale)[0]

            def check(
                ours: Any = ours, q: Any = q, slots: Any = slots, sink: Any = sink, second: Any = second
            ) -> float:
                return attention_error(ours(0), q[0], [(pool, slots[0], None), second[0]], scale, sink)

            peers = {}
            if peer is not None:
                calls = [
                    baselines.flash_mla_decode(q[i], pool, slots[i], requests, scale, sink, *second[i])
                    for i in range(sets)
                ]
                peers = {"FlashMLA": lambda i, calls=calls: calls[i]()}
                check = lambda ours=ours, calls=calls: relative_error(ours(0), calls[0]())
            case = f"{name} b={requests} h={heads} s_q={s_q} k={window}+{extra_k} pages 256, {extra_page}"
            flops = 2 * heads * attended * (512 + 512)
            yield Benchmark(
                "sparse_mla", case, ours, check, peers, flops, attended * V4.row, sets, bound="bf16",
            )  # fmt: skip


# Format, heads, keys per token and keys there are: FlashMLA's benchmark of prefill.
PREFILL = (
    (V32, 128, 2048, 8192),
    (V32, 128, 2048, 32768),
    (V32, 128, 2048, 131072),
    (V32, 64, 2048, 32768),
    (V4, 64, 512, 32768),
    (V4, 128, 1024, 32768),
)


def prefill() -> Iterator[Benchmark]:
    """Prefill of 4096 tokens, over plain bf16 rows and straight from the fp8 pages."""
    peer = baselines.flash_mla()
    for layout, heads, k, keys in PREFILL:
        tokens, scale = 4096, SCALE if layout == V32 else layout.dims**-0.5
        q = torch.randn(tokens, heads, layout.dims, device="cuda", dtype=torch.bfloat16) * 0.3
        slots = problems.chosen_keys(tokens, keys, k)
        pool = problems.latent_pool(keys, layout=layout)
        every = torch.arange(keys, device="cuda", dtype=torch.int32)
        rows = torch_api.read_mla_cache(pool, every)
        flops = 2 * tokens * heads * k * (layout.dims + 512)
        call = None if peer is None else baselines.flash_mla_prefill(q, rows, slots, scale)
        peers = {} if call is None else {"FlashMLA on bf16 rows": lambda i, call=call: call()}
        for kind, cache in (("bf16 rows", rows[:, None]), ("fp8 pages", pool)):

            def ours(i: int, q: Any = q, cache: Any = cache, slots: Any = slots, scale: Any = scale) -> torch.Tensor:
                return torch_api.sparse_mla(q, cache, slots, softmax_scale=scale)[0]

            def check(
                ours: Any = ours, call: Any = call, q: Any = q, source: Any = (cache, slots, None), scale: Any = scale
            ) -> float:
                if call is None:
                    return attention_error(ours(0), q, [source], scale)
                return relative_error(ours(0), call())

            version = "" if layout == V32 else f"{layout.name} "
            case = f"prefill {kind} {version}s_q={tokens} h={heads} k={k} s_kv={keys}"
            yield Benchmark("sparse_mla", case, ours, check, peers, flops, tokens * k * layout.row, bound="bf16")


def ragged_logits() -> Iterator[Benchmark]:
    for heads in (64, 32):
        for tokens, keys in ((2048, 8192), (2048, 65536), (8192, 65536)):
            q8 = problems.e4m3(tokens, heads, 128)
            weights = torch.randn(tokens, heads, device="cuda")
            k8 = problems.e4m3(keys, 128)
            scales = torch.rand(keys, device="cuda") + 0.1
            starts = torch.zeros(tokens, device="cuda", dtype=torch.int32)
            ends = torch.arange(keys - tokens + 1, keys + 1, device="cuda", dtype=torch.int32)

            def ours(i: int, args: Any = (q8, weights, k8, scales, starts, ends)) -> torch.Tensor:
                return torch_api.indexer_logits(*args)

            def check(args: Any = (q8, weights, k8, scales, starts, ends)) -> float:
                got = torch_api.indexer_logits(*args)[:64]
                dots = torch.einsum("tid,nd->tin", args[0][:64].float(), args[2].float()).relu()
                want = torch.einsum("tin,ti->tn", dots, args[1][:64]) * args[3]
                valid = torch.arange(want.shape[1], device="cuda") < args[5][:64, None]
                return relative_error(got[valid], want[valid])

            pairs = int(ends.sum())
            yield Benchmark(
                "indexer_logits", f"i={heads} s_q={tokens} s_kv={keys} causal", ours, check, {},
                2 * pairs * heads * 128, tokens * keys * 4, 1, LOGITS_TOLERANCE, "fp8",
            )  # fmt: skip


def paged_logits() -> Iterator[Benchmark]:
    pool = problems.indexer_pool(64 * 65536)
    for requests, next_n, keys in (
        (64, 1, 8192), (64, 2, 8192), (64, 4, 8192), (64, 1, 65536), (64, 2, 65536), (64, 4, 65536), (1, 1, 65536),
        (4, 1, 65536),
    ):  # fmt: skip
        tokens = requests * next_n
        q8 = problems.e4m3(tokens, 64, 128)
        weights = torch.randn(tokens, 64, device="cuda")
        table = problems.block_table(requests, 65536)
        lengths = torch.full((tokens,), keys, device="cuda", dtype=torch.int32)
        read = requests * keys * 132
        sets = rotation(read)
        tables = [table[torch.randperm(requests, device="cuda")].contiguous() for _ in range(sets)]

        def ours(i: int, q8: Any = q8, weights: Any = weights, tables: Any = tables, lengths: Any = lengths) -> Any:
            return torch_api.indexer_logits_paged(q8, weights, pool, tables[i], lengths)

        def check(
            ours: Any = ours, q8: Any = q8, weights: Any = weights, table: Any = tables[0], n: int = keys
        ) -> float:
            got = ours(0)[0, :n]
            place = torch.arange(n, device="cuda")
            slots = table[0, place // 64] * 64 + place % 64
            k8, scales = torch_api.read_indexer_cache(pool, slots)
            want = (q8[0].float() @ k8.float().T).relu().T @ weights[0] * scales
            return relative_error(got, want)

        yield Benchmark(
            "indexer_logits_paged", f"b={requests} next_n={next_n} keys={keys}", ours, check, {},
            2 * tokens * keys * 64 * 128, read + tokens * keys * 4, sets, LOGITS_TOLERANCE,
        )  # fmt: skip


def topk() -> Iterator[Benchmark]:
    few = ((rows, columns) for columns in (32768, 131072, 1048576) for rows in (1, 8))
    for rows, columns in (*few, (64, 65536), (2048, 65536), (8192, 32768)):
        sets = rotation(rows * columns * 4)
        logits = torch.randn(sets, rows, columns, device="cuda")
        ends = torch.full((rows,), columns, device="cuda", dtype=torch.int32)

        def ours(i: int, logits: Any = logits, ends: Any = ends) -> torch.Tensor:
            return torch_api.select_topk(logits[i], ends, k=2048)

        def torch_topk(i: int, logits: Any = logits) -> torch.Tensor:
            return torch.topk(logits[i], 2048, sorted=False)[1]

        def check(ours: Any = ours, peer: Any = torch_topk, rows: int = rows) -> float:
            return float((ours(0).sort(1)[0] != peer(0).sort(1)[0]).sum() > rows)  # ties may differ

        yield Benchmark(
            "select_topk", f"{rows} × {columns} k=2048", ours, check, {"torch.topk": torch_topk}, 0.0,
            rows * columns * 4, sets,
        )  # fmt: skip


def paged_selection() -> Iterator[Benchmark]:
    """Logits and selection of a decode step, beside the two ops apart."""
    widest = 131072
    pool = problems.indexer_pool(64 * widest)
    for requests, next_n, keys in ((1, 1, 65536), (1, 1, widest), (64, 1, 65536), (64, 1, widest), (64, 4, 65536)):
        tokens = requests * next_n
        q8, weights = problems.e4m3(tokens, 64, 128), torch.randn(tokens, 64, device="cuda")
        table = problems.block_table(requests, keys)
        lengths = torch.full((tokens,), keys, device="cuda", dtype=torch.int32)
        sets = rotation(requests * keys * 132)
        tables = [table[torch.randperm(requests, device="cuda")].contiguous() for _ in range(sets)]

        def ours(
            i: int, q8: Any = q8, weights: Any = weights, tables: Any = tables, lengths: Any = lengths
        ) -> torch.Tensor:
            return torch_api.indexer_topk_paged(q8, weights, pool, tables[i], lengths, k=2048)

        def apart(
            i: int, q8: Any = q8, weights: Any = weights, tables: Any = tables, lengths: Any = lengths
        ) -> torch.Tensor:
            logits = torch_api.indexer_logits_paged(q8, weights, pool, tables[i], lengths)
            return torch_api.select_topk(logits, lengths, k=2048)

        yield Benchmark(
            "indexer_topk_paged", f"b={requests} next_n={next_n} keys={keys} k=2048", ours,
            lambda ours=ours, apart=apart: float((ours(0) != apart(0)).float().mean()), {"its ops apart": apart},
            2 * tokens * keys * 64 * 128, requests * keys * 132, sets,
        )  # fmt: skip


def whole_step() -> Iterator[Benchmark]:
    mla, indexer = problems.latent_pool(64 * 32768), problems.indexer_pool(64 * 32768)
    for requests in (1, 64):
        arguments = (
            torch.randn(requests, 128, 576, device="cuda", dtype=torch.bfloat16) * 0.3,
            torch.randn(requests, 64, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(requests, 64, device="cuda"),
            mla,
            indexer,
            problems.block_table(64, 32768)[:requests].contiguous(),
            torch.full((requests,), 32768, device="cuda", dtype=torch.int32),
        )

        def ours(i: int, arguments: Any = arguments) -> torch.Tensor:
            return torch_api.dsa_attention(*arguments, k=2048, softmax_scale=SCALE)[0]

        read = requests * (32768 * 132 + 2048 * 656)
        check = lambda arguments=arguments: step_error(arguments, 2048, SCALE)
        yield Benchmark("dsa_attention", f"b={requests} h=128 context=32768 k=2048", ours, check, bytes=read)


def capacity() -> Iterator[Benchmark]:
    """A decode step at 28K keys with block tables made for 1M and for 32K: time follows the keys."""
    context, narrow, wide = 28672, 32768, 1 << 20
    mla, indexer = problems.latent_pool(64 * narrow), problems.indexer_pool(64 * narrow)
    for requests in (1, 64):
        queries = (
            torch.randn(requests, 128, 576, device="cuda", dtype=torch.bfloat16) * 0.3,
            torch.randn(requests, 64, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(requests, 64, device="cuda"),
        )
        short = problems.block_table(64, narrow)[:requests].contiguous()
        long = torch.full((requests, wide // 64), -1, device="cuda", dtype=torch.int32)
        long[:, : short.shape[1]] = short
        lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)

        def step(
            table: torch.Tensor, queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = queries,
            lengths: torch.Tensor = lengths,
        ) -> torch.Tensor:  # fmt: skip
            return torch_api.dsa_attention(*queries, mla, indexer, table, lengths, k=2048, softmax_scale=SCALE)[0]

        yield Benchmark(
            "dsa_attention", f"b={requests} h=128 context={context} max_len={wide}",
            lambda i, step=step, long=long: step(long),
            lambda rest=(*queries, mla, indexer, long, lengths): step_error(rest, 2048, SCALE),
            {f"itself at max_len={narrow}": lambda i, step=step, short=short: step(short)},
            bytes=requests * (context * 132 + 2048 * 656),
        )  # fmt: skip


def bounded_selection() -> Iterator[Benchmark]:
    """Prefill selection within 64 MiB and 512 MiB, beside the ops that store all logits (32 GiB at 8192 × 1M)."""
    for tokens, keys, mib in ((2048, 65536, 64), (2048, 65536, 512), (8192, 1 << 20, 64), (8192, 1 << 20, 512)):
        rows = (problems.e4m3(tokens, 64, 128), torch.randn(tokens, 64, device="cuda"))
        columns = (problems.e4m3(keys, 128), torch.rand(keys, device="cuda") + 0.1)
        starts = torch.zeros(tokens, device="cuda", dtype=torch.int32)
        ends = torch.arange(keys - tokens + 1, keys + 1, device="cuda", dtype=torch.int32)

        def ours(i: int, args: Any = (*rows, *columns, starts, ends), mib: int = mib) -> torch.Tensor:
            return torch_api.indexer_topk(*args, k=2048, workspace_bytes=mib << 20)

        def stored(i: int, args: Any = (*rows, *columns, starts, ends)) -> torch.Tensor:
            return torch_api.select_topk(torch_api.indexer_logits(*args), args[5], args[4], k=2048)

        def check(ours: Any = ours, stored: Any = stored) -> float:
            return float((ours(0) != stored(0)).float().mean())

        yield Benchmark(
            "indexer_topk", f"i=64 s_q={tokens} s_kv={keys} k=2048 in {mib} MiB", ours, check,
            {"stored logits": stored}, 2 * int(ends.sum()) * 64 * 128, tolerance=1e-3, bound="fp8",
        )  # fmt: skip


def compression() -> Iterator[Benchmark]:
    """V4's compressors: decode steps in which every request completes an entry, and a prefill."""
    context = 8192
    for name, dim, series, ratio in (("ratio 4", 512, 2, 4), ("ratio 128", 512, 1, 128), ("indexer", 128, 2, 4)):
        width, page = series * dim, 2 if ratio == 128 else 64
        for requests, new in ((1, 1), (64, 1), (256, 1), (1, context)):
            tokens, owned = requests * new, cdiv(series * ratio - 1 + new, 8)
            emitted = requests * max(new // ratio, 1)
            row = V4.row if dim == 512 else dim + 4
            moved = tokens * width * 2 * (2 + 4) + emitted * (series * ratio * dim * 2 * 4 + row)
            sets = rotation(moved)
            kv, score = (torch.randn(sets, tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            rings = torch.randperm(requests * owned, device="cuda", dtype=torch.int32).view(requests, owned)
            entries = requests * context // ratio
            cache = problems.latent_pool(entries, page, V4) if dim == 512 else problems.indexer_pool(entries, page)
            fixed = (
                torch.randn(ratio, width, device="cuda"),
                torch.rand(dim, device="cuda") + 0.5,
                torch.randn(context, 64, device="cuda"),
                torch.arange(context - new, context, device="cuda", dtype=torch.int32).repeat(requests),
                torch.randn(requests * owned, 8, 2 * width, device="cuda"),
                rings[:, torch.arange(context // 8, device="cuda") % owned].contiguous(),
                cache,
                problems.block_table(requests, context // ratio, page),
            )

            def ours(i: int, kv: Any = kv, score: Any = score, fixed: Any = fixed) -> None:
                torch_api.compress_kv(kv[i], score[i], *fixed)

            def check(ours: Any = ours, fixed: Any = fixed, series: int = series, ratio: int = ratio) -> float:
                ours(0)
                _, weight, cos_sin, positions, state, state_table, cache, table = fixed
                window = positions[-1] + 1 - torch.arange(series * ratio, 0, -1, device="cuda")
                rows = state[state_table[-1, window // 8].long(), window % 8].view(series, ratio, 2, series, -1)
                kv, score = torch.cat([rows[group, :, :, group] for group in range(series)]).double().unbind(1)
                pooled = (score.softmax(0) * kv).sum(0)
                want = pooled / (pooled.square().mean() + 1e-6).sqrt() * weight
                cos, sin = cos_sin[positions[-1] + 1 - ratio].double().view(2, -1)
                even, odd = want[-64::2].clone(), want[-63::2].clone()
                want[-64::2], want[-63::2] = even * cos - odd * sin, even * sin + odd * cos
                entry = positions[-1] // ratio
                slot = (table[-1, entry // cache.shape[1]] * cache.shape[1] + entry % cache.shape[1])[None]
                if len(weight) == 512:
                    return relative_error(torch_api.read_mla_cache(cache, slot, dtype="float32")[0], want)
                values, scales = torch_api.read_indexer_cache(cache, slot)
                return relative_error(values[0].float() * scales[0], want)

            case = f"{name} b={requests} tokens={tokens}"
            # Half a step of e4m3, 2**-4 at most.
            yield Benchmark("compress_kv", case, ours, check, {}, 0.0, moved, sets, 2**-4)


# Heads, dims, keys per token, tokens: fewer heads; then the shapes of cuDNN's backward of sparse attention (V4-Flash,
# V4-Pro, GLM, V3.2). With the most tokens sums exceed the L2 cache, and the last case has more than 2**31 numbers.
TRAINING = (
    (16, 576, 2048, 4096), (32, 576, 2048, 4096),
    *((*shape, tokens) for tokens in (4096, 8192, 32768)
      for shape in ((64, 512, 640), (128, 512, 1152), (64, 576, 2048), (128, 576, 2048))),
)  # fmt: skip


def training() -> Iterator[Benchmark]:
    """Attention's derivative, over as many plain rows as tokens."""
    for heads, dims, k, tokens in TRAINING:
        scale = dims**-0.5
        q, dout = (torch.randn(tokens, heads, d, device="cuda", dtype=torch.bfloat16) for d in (dims, 512))
        rows = torch.randn(tokens, 1, dims, device="cuda", dtype=torch.bfloat16)
        slots = problems.chosen_keys(tokens, tokens, k)
        out, lse = torch_api.sparse_mla(q, rows, slots, softmax_scale=scale)
        arguments = q, rows, slots, out, lse, dout

        def ours(_: int, arguments: Any = arguments, scale: Any = scale) -> tuple[torch.Tensor, ...]:
            return torch_api.sparse_mla_backward(*arguments, softmax_scale=scale)

        def check(ours: Any = ours, arguments: Any = arguments, scale: Any = scale) -> float:
            return gradient_error(ours(0), arguments, scale)

        peers: dict[str, Callable[[int], Any]] = {}
        peer_checks: dict[str, Callable[[], float]] = {}
        if baselines.cudnn():
            call = baselines.cudnn_backward(*arguments, scale)
            peers["cuDNN"] = lambda _, call=call: call()
            peer_checks["cuDNN"] = lambda call=call, a=arguments, scale=scale: gradient_error(call(), a, scale)
        flops = 2 * tokens * heads * k * (3 * dims + 2 * 512)
        moved = tokens * k * dims * 2
        yield Benchmark(
            "sparse_mla_backward", f"h={heads} {dims}/512 k={k} s={tokens}", ours, check, peers, flops, moved, 1,
            bound="bf16", peer_checks=peer_checks,
        )  # fmt: skip


def gradient_error(found: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor], scale: float) -> float:
    """The worst relative error of sampled rows of dq, and of sampled rows of the keys' gradient, in float64."""
    q, rows, slots, out, lse, dout = arguments

    def of_scores(tokens: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """p and ds of tokens [N] and keys of each [N, K, L+E], [N, H, K]."""
        upstream = dout[tokens].double()
        p = (scale * q[tokens].double() @ keys.mT - lse[tokens].double()[:, :, None]).exp()
        delta = (out[tokens].double() * upstream).sum(-1, keepdim=True)
        return p, scale * p * (upstream @ keys[..., :512].mT - delta)

    dq, drows, *_ = found
    errors = []
    for token in sampled(len(q)):
        keys = rows[slots[token].long(), 0].double()
        _, ds = of_scores(torch.tensor([token], device=q.device), keys[None])
        errors.append(relative_error(dq[token], (ds @ keys)[0]))
    for entry in sampled(len(rows)):
        tokens = (slots == entry).any(1).nonzero()[:, 0]
        p, ds = (x[..., 0] for x in of_scores(tokens, rows[entry].double().expand(len(tokens), 1, -1)))
        want = torch.einsum("th,thd->d", ds, q[tokens].double())
        want[:512] += torch.einsum("th,thd->d", p, dout[tokens].double())
        errors.append(relative_error(drows[entry, 0], want))
    return float(np.max(errors))


BENCHMARKS: Mapping[str, tuple[Callable[[], Iterator[Benchmark]], ...]] = {
    "sparse_mla": (decode, decode_v4, prefill),
    "sparse_mla_backward": (training,),
    "indexer_logits": (ragged_logits,),
    "indexer_logits_paged": (paged_logits,),
    "select_topk": (topk,),
    "indexer_topk": (bounded_selection,),
    "indexer_topk_paged": (paged_selection,),
    "compress_kv": (compression,),
    "dsa_attention": (whole_step, capacity),
}
