"""Inside a serving engine: tokens that differ per request, graphs, piecewise compilation, threads, shared pages."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.passes.split_module import split_module

from xmla import ArgumentError, jax_api, torch_api
from xmla.core.op import plan_call
from xmla.core.registry import registry

OPS = registry()
HEADS, INDEX_HEADS, K, PAGE = 4, 4, 24, 16


class Engine:
    """Two paged caches with requests of the given contexts, and a decode step over them."""

    def __init__(self, contexts: list[int], capacity: int, device: str, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        requests, pages = len(contexts), -(-capacity // PAGE)
        order = torch.randperm(requests * pages, generator=self.generator, device=device)
        self.block_table = order.to(torch.int32).view(requests, pages)
        self.mla_cache = torch.full((requests * pages, PAGE, 656), 255, dtype=torch.uint8, device=device)
        self.indexer_cache = torch.full((requests * pages, PAGE, 132), 255, dtype=torch.uint8, device=device)
        for request, context in enumerate(contexts):
            self.store(torch.full((context,), request), torch.arange(context))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).bfloat16()

    def slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        indices, ids = (x.to(self.device, torch.int32) for x in (position, request))
        return torch_api.map_slots(indices[:, None], self.block_table, ids, page_size=PAGE)[0][:, 0]

    def store(self, request: torch.Tensor, position: torch.Tensor) -> None:
        slots = self.slots(request, position)
        torch_api.write_mla_cache(self.normal(len(slots), 512), self.normal(len(slots), 64), slots, self.mla_cache)
        torch_api.write_indexer_cache(self.normal(len(slots), 128), slots, self.indexer_cache)

    def queries(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = torch.randn(tokens, INDEX_HEADS, generator=self.generator, device=self.device)
        return self.normal(tokens, HEADS, 576), self.normal(tokens, INDEX_HEADS, 128), weights

    def attend(self, queries: Any, lengths: torch.Tensor, ids: torch.Tensor | None = None, **attrs: Any) -> Any:
        caches = (self.mla_cache, self.indexer_cache, self.block_table)
        return torch_api.dsa_attention(*queries, *caches, lengths, ids, k=K, softmax_scale=0.1, **attrs)


def int32(values: Any, device: str) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


# Speculative decoding: any number of new tokens, uniform or mixed.


@pytest.mark.parametrize("next_n", range(1, 9))
def test_next_n_gives_what_single_tokens_give(next_n: int, device: str) -> None:
    """next_n tokens per request, as it is, equal the same tokens one by one with request ids, bit for bit."""
    contexts = [40, 9, 75]
    engine = Engine(contexts, 80, device)
    lengths = int32([[max(0, c - next_n + 1 + j) for j in range(next_n)] for c in contexts], device).flatten()
    queries = engine.queries(len(contexts) * next_n)
    ids = int32(np.repeat(np.arange(len(contexts)), next_n), device)
    together = engine.attend(queries, lengths, batch_invariant=True)
    apart = engine.attend(queries, lengths, ids, batch_invariant=True)
    for name, a, b in zip(("out", "lse", "indices"), together, apart, strict=True):
        kit.assert_bits_equal(name, a, b)


def test_mixed_batch_through_split_batch(device: str) -> None:
    """Requests with 1, 3 and 2 new tokens and two padding rows: split_batch tells whose each is and what it sees."""
    contexts, new = [40, 9, 75], [1, 3, 2]
    engine = Engine(contexts, 80, device)
    starts = int32(np.concatenate([[0], np.cumsum(new)]), device)
    counts, ids, lengths = torch_api.split_batch(starts, int32(contexts, device), num_tokens=8, decode_threshold=3)
    assert counts.tolist() == [3, 0, 8, 0] and ids.tolist() == [0, 1, 1, 1, 2, 2, -1, -1]
    assert lengths.tolist() == [40, 7, 8, 9, 74, 75, 0, 0]
    queries = engine.queries(8)
    out, lse, indices = engine.attend(queries, lengths, ids, batch_invariant=True)
    for token in range(8):
        alone = engine.attend(
            [q[token : token + 1] for q in queries], lengths[token : token + 1], ids[token : token + 1],
            batch_invariant=True,
        )  # fmt: skip
        for name, a, b in zip(("out", "lse", "indices"), (out, lse, indices), alone, strict=True):
            kit.assert_bits_equal(name, a[token : token + 1], b)
    assert not out[6:].any() and lse[6:].isneginf().all() and (indices[6:] == -1).all()


def published_split(
    new: list[int], threshold: int, uniform: bool, short_as_decode: bool, prompt: list[bool], tokens: int
) -> tuple[int, int, int, int]:
    """The rules of split_decodes_and_prefills, in its own order (facts, section 5.1)."""
    requests = len(new)
    if max(new) <= threshold and (not uniform or threshold <= 1) and short_as_decode:
        return requests, 0, tokens, 0
    if new[0] > threshold:
        return 0, requests, 0, tokens
    if uniform:
        if all(n in (new[0], 0) for n in new):
            return requests, 0, tokens, 0
        prefill = [n != new[0] for n in new]
    else:
        prefill = [n > threshold for n in new]
    if not short_as_decode:
        prefill = [a or b for a, b in zip(prefill, prompt, strict=True)]
    if not any(prefill):
        return requests, 0, tokens, 0
    first = prefill.index(True)
    return first, requests - first, sum(new[:first]), tokens - sum(new[:first])


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(1, 5), st.booleans(), st.booleans(),
    st.integers(0, 3), st.data(),
)  # fmt: skip
def test_split_batch_is_the_published_policy(
    new: list[int], threshold: int, uniform: bool, short_as_decode: bool, padding: int, data: st.DataObject
) -> None:
    prompt = data.draw(st.lists(st.booleans(), min_size=len(new), max_size=len(new)))
    padded = new + [0] * padding * uniform
    prompt += [False] * (len(padded) - len(new))
    tokens = len(padded) * new[0] if uniform and all(n == new[0] for n in new) else sum(padded)
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    has_context = None if short_as_decode else np.array([not p for p in prompt], np.int32)
    lengths = np.array(padded, np.int32)
    got, _, _ = OPS["split_batch"].reference(
        starts, lengths, has_context, num_tokens=tokens, decode_threshold=threshold, require_uniform=uniform
    )
    assert tuple(got.tolist()) == published_split(padded, threshold, uniform, short_as_decode, prompt, tokens)


# Graphs and compilation.


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
def test_full_graph_of_a_step_replays_other_batches(mixed: bool) -> None:
    """Captured at one size, replayed with fewer requests, other lengths, block tables and caches: bits of eager."""
    contexts, next_n = [300, 40, 200, 90], 2
    engine = Engine(contexts, 512, "cuda")
    tokens = len(contexts) * next_n
    latent, rope, index_k = (engine.normal(tokens, width) for width in (512, 64, 128))
    queries = engine.queries(tokens)
    slots, lengths = torch.full((tokens,), -1, device="cuda", dtype=torch.int32), int32([0] * tokens, "cuda")
    ids = int32([-1] * tokens, "cuda") if mixed else None

    def step() -> Any:
        torch_api.write_mla_cache(latent, rope, slots, engine.mla_cache)
        torch_api.write_indexer_cache(index_k, slots, engine.indexer_cache)
        return engine.attend(queries, lengths, ids)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads
        captured = step()
    for used, seed in ((4, 1), (2, 2), (3, 3)):
        generator = torch.Generator("cuda").manual_seed(seed)
        engine.block_table.copy_(engine.block_table[torch.randperm(4, generator=generator, device="cuda")].clone())
        position = int32([[c + seed * next_n + j for j in range(next_n)] for c in contexts], "cuda")
        position[used:] = -1  # padding rows: no slot, length 0
        request = torch.arange(4, device="cuda").repeat_interleave(next_n)
        slots.copy_(engine.slots(request, position.flatten()))
        lengths.copy_(position.flatten() + 1)
        if ids is not None:
            ids.copy_(torch.where(position.flatten() >= 0, request, -1))
        for tensor in (latent, rope, index_k, *queries):
            tensor.normal_(generator=generator)
        before = engine.mla_cache.clone(), engine.indexer_cache.clone()
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        after = engine.mla_cache.clone(), engine.indexer_cache.clone()
        engine.mla_cache.copy_(before[0])
        engine.indexer_cache.copy_(before[1])
        eager = step()
        for name, a, b in zip(("out", "lse", "indices"), replayed, eager, strict=True):
            kit.assert_bits_equal(name, a, b)
        for name, a, b in zip(("mla", "indexer"), after, (engine.mla_cache, engine.indexer_cache), strict=True):
            kit.assert_bits_equal(name, a, b)
        assert not replayed[0][used * next_n :].any()


def piecewise(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
    """Split at xmla's ops, as engines split at attention; the pieces between them run as they are."""
    part, parts, splitting = 0, {}, set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if "xmla" in str(node.target):
            part += 1
            splitting.add(part)
            parts[node] = part
            part += 1
        else:
            parts[node] = part
    pieces.append(len(splitting))
    return split_module(graph, None, lambda node: parts[node], keep_original_order=True)


pieces: list[int] = []


@pytest.mark.floors
def test_piecewise_compilation_keeps_the_order_of_mutations(device: str) -> None:
    """torch.compile with the ops as splitting points: out-variants and cache writes stay where they stand."""
    engine = Engine([40, 9], 64, device)
    lengths, queries = int32([41, 10], device), engine.queries(2)
    slots = engine.slots(torch.arange(2), torch.tensor([40, 9]))
    latent, rope, index_k = engine.normal(2, 512), engine.normal(2, 64), engine.normal(2, 128)
    caches = (engine.mla_cache, engine.indexer_cache)
    attend = torch.ops.xmla.dsa_attention.out

    def layer(latent: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        torch.ops.xmla.write_mla_cache(latent * 2, rope, slots, caches[0])
        torch.ops.xmla.write_indexer_cache(index_k, slots, caches[1])
        attend(
            *queries, *caches, engine.block_table, lengths, k=K, softmax_scale=0.1, out_out=out, out_lse=lse,
            out_indices=indices,
        )  # fmt: skip
        first = out.float() + 1
        torch.ops.xmla.write_mla_cache(latent * 3, rope, slots, caches[0])
        return first * 2

    def buffers() -> list[torch.Tensor]:
        return [
            torch.zeros(2, HEADS, 512, dtype=torch.bfloat16, device=device), torch.zeros(2, HEADS, device=device),
            torch.zeros(2, K, dtype=torch.int32, device=device),
        ]  # fmt: skip

    want_out, got_out = buffers(), buffers()
    saved = [cache.clone() for cache in caches]
    want = layer(latent, *want_out)
    after = [cache.clone() for cache in caches]
    for cache, old in zip(caches, saved, strict=True):
        cache.copy_(old)
    torch._dynamo.reset()
    pieces.clear()
    got = torch.compile(layer, backend=piecewise, fullgraph=True)(latent, *got_out)
    assert pieces == [4], "each op is a splitting point"
    kit.assert_bits_equal("result", got, want)
    for name, a, b in zip(("out", "lse", "indices"), got_out, want_out, strict=True):
        kit.assert_bits_equal(name, a, b)
    for name, a, b in zip(("mla", "indexer"), caches, after, strict=True):
        kit.assert_bits_equal(name, a, b)


def test_jax_step_traces_once_for_any_batch_content(device: str) -> None:
    engine = Engine([40, 9], 64, device)
    traces = []

    @jax.jit
    def step(queries: Any, mla_cache: jax.Array, indexer_cache: jax.Array, table: jax.Array, lengths: jax.Array) -> Any:
        traces.append(1)
        return jax_api.dsa_attention(*queries, mla_cache, indexer_cache, table, lengths, k=K, softmax_scale=0.1)

    caches = [jnp.asarray(kit.as_numpy(t)) for t in (engine.mla_cache, engine.indexer_cache, engine.block_table)]
    for lengths in ([40, 9], [3, 0], [0, 9]):
        queries = engine.queries(2)
        theirs = step([jnp.asarray(kit.as_numpy(q)) for q in queries], *caches, jnp.array(lengths, jnp.int32))
        ours = engine.attend(queries, int32(lengths, device))
        for name, a, b in zip(("out", "lse", "indices"), ours, theirs, strict=True):
            kit.assert_bits_equal(name, a, b)
    assert len(traces) == 1


COMMAND_BUFFERS = """
import os, sys
os.environ["XLA_FLAGS"] = sys.argv[1]
sys.path.insert(0, "tests/shared")
import jax, kit, numpy as np
from xmla import jax_api
from xmla.core.registry import registry
op = registry()["dsa_attention"]
case = op.cases[1]
step = jax.jit(lambda *arrays: jax_api.dsa_attention(*arrays, **case.attrs))
for seed in (0, 1, 0):
    out, lse, indices = step(*kit.jax_inputs(op, kit.make(case, seed)))
    print(np.asarray(out).view(np.uint16).sum(), np.asarray(lse).view(np.uint32).sum(), np.asarray(indices).sum())
"""


@pytest.mark.gpu
def test_jax_command_buffers_give_the_same_bits() -> None:
    """XLA records the step's launches into CUDA graphs, or not: the bits stay."""
    flags = (
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
        "--xla_gpu_enable_command_buffer=",
    )
    runs = [
        subprocess.run([sys.executable, "-c", COMMAND_BUFFERS, flag], capture_output=True, text=True, check=False)
        for flag in flags
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    first, second, third = runs[0].stdout.splitlines()
    assert runs[0].stdout == runs[1].stdout and first == third != second


# Memory.


def test_workspace_of_the_caller(device: str) -> None:
    """`plan` tells the bytes; the op works in exactly those, and says what it misses."""
    engine = Engine([40, 9], 64, device)
    lengths, queries = int32([40, 9], device), engine.queries(2)
    arguments = (*queries, engine.mla_cache, engine.indexer_cache, engine.block_table, lengths)
    attrs = {"k": K, "softmax_scale": 0.1}
    want = torch_api.dsa_attention(*arguments, **attrs)
    needed = torch_api.dsa_attention.plan(*arguments, **attrs).workspace_bytes
    assert needed > 0
    room = torch.full((needed + 512,), 0x5A, dtype=torch.uint8, device=device)
    out = tuple(torch.empty_like(tensor) for tensor in want)
    torch_api.dsa_attention(*arguments, **attrs, out=out, workspace=room[256 : 256 + needed])
    for name, a, b in zip(("out", "lse", "indices"), out, want, strict=True):
        kit.assert_bits_equal(name, a, b)
    assert (room[:256] == 0x5A).all() and (room[256 + needed :] == 0x5A).all()
    short = f"dsa_attention: workspace axis 0 is {needed - 1}, expected at least {needed} bytes"
    with pytest.raises(ArgumentError, match=short):
        torch_api.dsa_attention(*arguments, **attrs, out=out, workspace=room[: needed - 1])
    with pytest.raises(ArgumentError, match="workspace is given, expected none without out"):
        torch_api.dsa_attention(*arguments, **attrs, workspace=room)
    with pytest.raises(ArgumentError, match=r"workspace is float32 of shape \(8,\), expected uint8"):
        torch_api.dsa_attention(*arguments, **attrs, out=out, workspace=torch.zeros(8, device=device))


def test_selection_over_a_million_keys_stays_within_its_bound() -> None:
    """8192 rows × 1M keys: the plan's memory is exact, needs no GPU to know, and keeps to 64 MiB."""
    from xmla.core.models.calls import Call
    from xmla.core.values import KNOWN_DEVICES, Spec

    tokens, keys, bound = 8192, 1 << 20, 64 << 20
    rows = Spec((tokens,), "int32")
    specs = {
        "q8": Spec((tokens, 64, 128), "float8_e4m3fn"), "weights": Spec((tokens, 64), "float32"),
        "keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32"),
        "starts": rows, "ends": rows,
    }  # fmt: skip
    for device in KNOWN_DEVICES:
        plan = Call("indexer_topk", specs, {"k": 2048, "workspace_bytes": bound}).plan(device)
        assert 0 < plan.workspace_bytes <= bound
        assert all(spec.nbytes <= bound for name, spec in plan.buffers.items() if name != "indices")


# Concurrency.


def test_threads_plan_and_launch_at_once(device: str) -> None:
    engine = Engine([40, 9], 64, device)
    batches = [(int32(lengths, device), engine.queries(2)) for lengths in ([40, 9], [17, 3], [1, 0], [33, 8])]
    want = [engine.attend(queries, lengths) for lengths, queries in batches]
    torch_api._prepared.call_cache.clear()
    got: list[Any] = [None] * len(batches)
    start = threading.Barrier(len(batches))

    def work(index: int) -> None:
        lengths, queries = batches[index]
        start.wait()
        for _ in range(2):
            got[index] = engine.attend(queries, lengths)
        if device == "cuda":
            torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        kit.assert_bits_equal("out", a[0], b[0])
        kit.assert_bits_equal("indices", a[2], b[2])


def calls_of_sizes(api: Any, zeros: Callable[..., Any], sizes: Iterable[int]) -> None:
    """Calls of no rows, which launch nothing: two of each size, and one of a size that all threads call."""
    for size in sizes:
        for columns in (size, 3, size):
            ends, pool = zeros((0,), "int32"), zeros((columns, 1, 132), "uint8")
            api.select_topk(zeros((0, columns), "float32"), ends, k=1)
            api.map_slots(zeros((0, columns), "int32"), zeros((0, 1), "int32"), page_size=64)
            api.write_indexer_cache(zeros((0, 128), "bfloat16"), ends, pool)


@pytest.mark.parametrize(("api", "rounds"), [("torch", 60), ("jax", 3)])
def test_threads_share_what_the_process_keeps(
    api: str, rounds: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of new and of old sizes from threads that interrupt each other everywhere, with room for four of them."""
    few = lru_cache(maxsize=4)(plan_call.__wrapped__)
    monkeypatch.setattr(jax_api._run, "plan_call", few)
    monkeypatch.setattr(jax_api._ops, "plan_call", few)
    monkeypatch.setattr(torch_api._prepared, "call_cache", torch_api._prepared.CallCache())
    for bound in ("MOST", "MOST_KINDS", "FAMILIES"):
        monkeypatch.setattr(torch_api._prepared.CallCache, bound, 4)
    front_end, zeros = {
        "torch": (torch_api, lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)),
        "jax": (jax_api, jnp.zeros),
    }[api]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            own = [range(100 + thread, 100 + thread + 4 * rounds, 4) for thread in range(4)]
            [*threads.map(partial(calls_of_sizes, front_end, zeros), own)]
    finally:
        sys.setswitchinterval(interval)
    if api == "jax":
        assert few.cache_info().currsize == 4
    else:
        cache = torch_api._prepared.call_cache
        # Threads that see one call too many at once each drop one.
        assert 0 < len(cache.prepared) <= 4 and 0 < len(cache.kinds) <= 4
        assert all(kind.count <= 4 for kind in cache.kinds.values())
        assert all(len(calls) <= cache.RECENT for calls in cache.recent.values())


@pytest.mark.gpu
def test_two_streams_give_what_one_gives() -> None:
    engine = Engine([300, 40, 200], 512, "cuda")
    batches = [(int32(lengths, "cuda"), engine.queries(3)) for lengths in ([300, 40, 200], [17, 3, 90])]
    want = [engine.attend(queries, lengths) for lengths, queries in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(20):
        got = []
        for stream, (lengths, queries) in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                got.append(engine.attend(queries, lengths))
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            for name, x, y in zip(("out", "lse", "indices"), a, b, strict=True):
                kit.assert_bits_equal(name, x, y)


def test_shared_pages_and_reused_pages(device: str) -> None:
    """Two requests share their first pages; a page that changes hands shows the new owner's keys alone."""
    engine = Engine([32, 20], 64, device)
    engine.block_table[1, :2] = engine.block_table[0, :2]  # the prefix of 32 keys
    lengths, queries = int32([32, 32], device), engine.queries(2)
    same = [torch.cat([q[:1], q[:1]]) for q in queries]
    out, _, indices = engine.attend(same, lengths, batch_invariant=True)
    kit.assert_bits_equal("out", out[:1], out[1:])
    kit.assert_bits_equal("indices", indices[:1], indices[1:])

    before = engine.mla_cache.clone()
    engine.store(torch.tensor([1]), torch.tensor([33]))  # behind the prefix, on a page of its own
    changed = (engine.mla_cache != before).any(-1).nonzero().tolist()
    assert changed == [[int(engine.block_table[1, 2]), 1]], "a write touched another slot"
    again, _, _ = engine.attend(same, lengths, batch_invariant=True)
    kit.assert_bits_equal("prefix", again, out)

    freed = int(engine.block_table[1, 2])
    engine.block_table[1, 2] = -1
    engine.block_table[0, 2] = freed
    engine.mla_cache[freed], engine.indexer_cache[freed] = 255, 255  # NaN: what the former owner left
    engine.store(torch.tensor([0, 0, 0]), torch.tensor([32, 33, 34]))
    longer, _, chosen = engine.attend(queries, int32([35, 32], device), batch_invariant=True)
    assert longer.isfinite().all() and chosen[0].max() < 35
