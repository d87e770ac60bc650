"""What `xmla bench` compares its cases with before it times them, where no peer is installed."""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import isgeneratorfunction
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from kit import to_torch

from tools import on_gpus
from xmla import interop, torch_api
from xmla.bench import (
    baselines,
    cases,
    host,
    problems,
    run,
    timing,
    timing_jax,
)
from xmla.bench.benchmark import Benchmark, with_implementation
from xmla.bench.cases import attention, blocks, movement, selection, training
from xmla.bench.errors import attention_error, gradient_error, indexer_loss_error, sampled, step_error
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import PLAIN, V4, V32, MlaLayout
from xmla.core.ops.cases import indexer_pool, mla_pool
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS
from xmla.torch_api._arrays import spec_of

TOLERANCE = next(field.default for field in fields(Benchmark) if field.name == "tolerance")
PAGES, PAGE, SCALE = 6, 16, 0.07


def test_the_cases_of_every_op_are_found_by_name() -> None:
    assert cases.CASES.keys() <= registry().keys()
    for place in chain(*cases.CASES.values()):
        module, _, name = place.partition(".")
        assert isgeneratorfunction(getattr(import_module(f"xmla.bench.cases.{module}"), name)), place
    assert [*cases.cases_of("sparse_mla_paged")] == []


MOVEMENT = {
    "latents_case": (70,), "keys_case": (70,), "queries_case": (5,), "read_latents_case": (70,),
    "read_keys_case": (70,), "slots_case": (2, 6, 20, 320), "attention_case": (3, 5, 2), "candidates_case": (3, 5, 40),
    "expanded_case": (3, 6, 4, 100), "windows_case": (2, 6, 80, 320),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVEMENT)
def test_what_moves_bytes_is_compared_with_torch(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes of the interpreter. Other results are noticed, and no more bytes count than the call has."""
    monkeypatch.setattr(problems, "DEVICE", device)
    torch.manual_seed(0)
    benchmark = getattr(movement, name)(*MOVEMENT[name])
    assert benchmark.check() <= benchmark.tolerance
    op, bound = registry()[benchmark.op], []
    right = getattr(torch_api, benchmark.op)

    def wrong(*arrays: torch.Tensor, **attributes: Any) -> Any:
        specs = {name: spec_of(array) for name, array in zip(op.tensors, arrays, strict=False)}
        bound.append(op.bind(specs, op.attributes(**attributes)))
        results = right(*arrays, **attributes)
        if results is None:
            arrays[-1].zero_()
            return None
        every = results if isinstance(results, tuple) else (results,)
        other = tuple(each.view(torch.uint8).flip(-1).view(each.dtype) for each in every)
        return other if isinstance(results, tuple) else other[0]

    monkeypatch.setattr(torch_api, benchmark.op, wrong)
    assert not benchmark.check() <= benchmark.tolerance
    assert 0 < benchmark.bytes <= op.work(bound[0], None).bytes


def test_layers_of_one_selection_are_compared(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes of the interpreter, beside the formula; slots that each layer finds give the same."""
    monkeypatch.setattr(problems, "DEVICE", device)
    for name, size in (("KEYS", 128), ("K", 24), ("SHARED", 2), ("SHARED_HEADS", 3)):
        monkeypatch.setattr(attention, name, size)
    torch.manual_seed(0)
    pools = [problems.latent_pool(2 * 128) for _ in range(2)]
    benchmark = attention.shared_case(pools, problems.block_table(2, 128), 2)
    assert benchmark.check() <= benchmark.tolerance
    (in_each,) = benchmark.peers.values()
    for one, (other,) in zip(benchmark.ours(1), in_each(1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", selection.KINDS)
def test_selections_of_every_kind_of_row_are_compared(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes of the interpreter. What differs from the definition is noticed; of a peer, what is no selection."""
    monkeypatch.setattr(problems, "DEVICE", device)
    monkeypatch.setattr(selection, "K", 16)
    monkeypatch.setattr(selection, "ENGINES", {})
    torch.manual_seed(0)
    benchmark = selection.topk_case(3, 70, kind)
    assert benchmark.check() == 0 and benchmark.by_jax == (kind == "normal")
    assert {name: check() for name, check in benchmark.peer_checks.items()} == {"torch.topk": 0.0}
    right = TORCH_OPS.select_topk
    monkeypatch.setattr(TORCH_OPS, "select_topk", lambda *arrays, k: right(*arrays, k=k).flip(1))
    assert benchmark.check() > benchmark.tolerance


def test_wrong_rows_are_counted() -> None:
    """One with an element above what was selected, a column twice, columns outside of the row; not other ties."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0]]).repeat(6, 1)
    selected = [[0, 2], [3, 0], [0, 1], [0, 0], [0, -1], [0, 4]]
    assert selection.wrong_rows(logits, torch.tensor(selected, dtype=torch.int32)) == 4 / 6


def test_every_case_is_compared() -> None:
    (check,) = [field for field in fields(Benchmark) if field.name == "check"]
    assert check.default is check.default_factory is MISSING


def test_a_few_rows_are_sampled() -> None:
    assert list(sampled(1)) == [0] and list(sampled(3)) == [0, 1, 2]
    assert 4 <= len(sampled(4096)) <= 5 and sampled(4096)[0] == 0


@pytest.mark.gpu
def test_a_capture_outlives_what_other_threads_do() -> None:
    """As JAX's do in a run of both frameworks."""
    x, event = torch.zeros(8, device="cuda"), torch.cuda.Event()
    event.record()
    with ThreadPoolExecutor(1) as thread:

        def call(_: int) -> None:
            x.add_(1)
            thread.submit(event.query).result()  # it spoils a capture of the default mode

        assert timing.measure({"addition": call}, 1)["addition"].median > 0


@pytest.mark.parametrize("fails", ["nowhere", "when it is compared", "when it is timed"])
def test_a_run_outlives_a_peer(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(_: int) -> None:
        if fails == "when it is timed":
            raise RuntimeError("of\n no use")

    def compared() -> float:
        if fails == "when it is compared":
            raise RuntimeError("of\n no use")
        return 0.02

    def measured(variants: dict[str, Any], sets: int) -> dict[str, timing.Timing]:
        for call in variants.values():
            call(0)
        return {name: timing.Timing(2.0 + 2.0 * (name != "xmla"), 1.0, 5.0) for name in variants}

    def case() -> Any:
        yield Benchmark(
            op="an op", case="a case", call=lambda _: None, inputs=[()], check=lambda: 0.0, peers={"cuDNN": peer},
            peer_checks={"cuDNN": compared}, flops=1.0, bytes=1.0,
        )  # fmt: skip

    monkeypatch.setattr(run, "cases_of", lambda _: case())
    monkeypatch.setattr(timing, "measure", measured)
    monkeypatch.setattr(baselines, "rates", lambda limits: {"copy_bytes_per_s": 1e12})
    (line,) = run.time_cases(["an op"], {"copy": None}, False)  # type: ignore[dict-item]
    assert line["us"]["xmla"] == [2.0, 1.0, 5.0]
    if fails == "nowhere":
        assert line["ratio_to_peer"] == {"cuDNN": 2.0} and "failed_peers" not in line
        assert line["wrong_peers"] == ["cuDNN"]
        assert list(run.table_of([line], {}).columns[6].cells) == ["2.0 cuDNN, which is WRONG"]
    else:
        assert line["ratio_to_peer"] == {} and line["failed_peers"] == {"cuDNN": "RuntimeError: of no use"}
        assert "cuDNN failed" in list(run.table_of([line], {}).columns[6].cells)
    assert ("relative_error_of_peer" in line) == (fails != "when it is compared")


def test_an_implementation_is_timed_beside_the_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compared with it; cases that it does not serve are left out."""
    slots = torch.tensor([3, 40, 17], dtype=torch.int32, device=device)
    benchmark = Benchmark(
        op="read_mla_cache", case="three entries", call=lambda ops, *arrays: ops.read_mla_cache(*arrays),
        inputs=[(pool(V32, device), slots)], check=lambda: 0.0, flops=1.0, bytes=1.0,
    )  # fmt: skip

    def measured(variants: dict[str, Any], sets: int) -> dict[str, timing.Timing]:
        return {name: timing.Timing(2.0 + 2.0 * (name != "xmla"), 1.0, 5.0) for name in variants}

    monkeypatch.setattr(run, "cases_of", lambda _: [benchmark])
    monkeypatch.setattr(timing, "measure", measured)
    monkeypatch.setattr(baselines, "rates", lambda limits: {"copy_bytes_per_s": 1e12})

    def lines(implementation: str) -> list[run.Line]:
        return [*run.time_cases([benchmark.op], {"copy": None}, False, implementation)]  # type: ignore[dict-item]

    (line,) = lines("reference")
    assert line["case"] == "three entries, reference" and line["ratio_to_peer"] == {"the default": 2.0}
    assert lines("gluon_sm100") == []
    monkeypatch.setattr(
        TORCH_OPS, "read_mla_cache", lambda *_, implementation=None: torch.ones(2) * bool(implementation)
    )
    assert with_implementation(benchmark, "reference").check() > benchmark.tolerance and lines("reference")[0]["wrong"]


def written_and_read(device: str) -> Benchmark:
    """Two sets of inputs: a call writes entries and reads them together with others."""
    torch.manual_seed(0)
    # A copy: JAX takes memory of the CPU that starts on 64 bytes, as PyTorch allocates it.
    cache, slots = pool(V32, device).clone(), torch.tensor([3, 40, 17], dtype=torch.int32, device=device)

    def call(ops: Any, latent: Any, rope: Any, slots: Any, cache: Any) -> Any:
        written = ops.write_mla_cache(latent, rope, slots, cache)
        cache = cache if written is None else written
        return ops.read_mla_cache(cache, slots - 1), cache

    latent, rope = (torch.randn(2, 3, dims, device=device).bfloat16() for dims in (512, 64))
    inputs = [(latent[i], rope[i], slots, cache) for i in range(2)]
    return Benchmark(op="an op", case="a case", call=call, inputs=inputs, check=lambda: 0.0, updates=(3,))


def test_jax_makes_a_cases_calls(device: str) -> None:
    """On copies of what they update, one after the other in a program, with the bits that PyTorch has."""
    benchmark = written_and_read(device)
    case = timing_jax.Case(benchmark)
    before = benchmark.inputs[0][3]
    assert before is not None
    unwritten = before.clone()
    results = case.program(3)()
    assert torch.equal(before, unwritten) and len(results) == 3 + 1
    by_torch = [benchmark.ours(index % 2) for index in range(3)]
    for (read, _), found in zip(by_torch, results[:3], strict=True):
        assert timing_jax.same_bits(benchmark, read, [found])
    assert timing_jax.same_bits(benchmark, by_torch[-1][1], results[3:])
    assert not timing_jax.same_bits(benchmark, unwritten, results[3:])
    assert not timing_jax.same_bits(benchmark, by_torch[0], [results[0]])
    assert timing_jax.same_bits(benchmark, benchmark.ours(0), case.program(1)())


def test_elements_that_an_op_leaves_are_not_compared(device: str) -> None:
    arrays = torch.tensor([[1.0, 2.0, torch.nan]], device=device)
    benchmark = Benchmark(
        op="an op", case="a case", call=lambda ops, x: x, inputs=[(arrays,)], check=lambda: 0.0,
        written=lambda result: result[:, :2],
    )  # fmt: skip
    other = interop.to_jax(torch.tensor([[1.0, 2.0, 3.0]], device=device))
    assert timing_jax.same_bits(benchmark, arrays, [other])
    assert not timing_jax.same_bits(benchmark, arrays, [other + 1])


def test_other_bits_and_failures_by_jax_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = Benchmark(
        op="an op", case="a case", call=lambda _: None, inputs=[()], check=lambda: 0.0, flops=1.0, bytes=1.0
    )
    found = {"us": [3.0, 1.0, 5.0], "host_us": 4.0, "waited_us": 9.0, "same_bits": False}
    monkeypatch.setattr(timing, "measure", lambda *_: {"xmla": timing.Timing(2.0, 1.0, 5.0)})
    monkeypatch.setattr(timing_jax, "beside_torch", lambda *_: {"torch": {}, "jax": found})
    monkeypatch.setattr(baselines, "rates", lambda limits: {"copy_bytes_per_s": 1e12})
    line = run.time_case(benchmark, {"copy": None}, True)  # type: ignore[dict-item]
    assert line["wrong"] and line["jax"] == found
    assert "OTHER BITS" in next(iter(run.table_of([line], {}).columns[9].cells))
    monkeypatch.setitem(found, "same_bits", True)
    line = run.time_case(benchmark, {"copy": None}, True)  # type: ignore[dict-item]
    assert "wrong" not in line and list(run.table_of([line], {}).columns[9].cells) == ["3.0"]

    def fails(*_: object) -> None:
        raise RuntimeError("of\n no use")

    monkeypatch.setattr(timing_jax, "beside_torch", fails)
    line = run.time_case(benchmark, {"copy": None}, True)  # type: ignore[dict-item]
    assert line["wrong"] and "FAILED: RuntimeError: of no use" in next(iter(run.table_of([line], {}).columns[9].cells))


def pool(layout: MlaLayout, device: str) -> torch.Tensor:
    return to_torch(mla_pool(np.random.default_rng(0), layout, PAGES, PAGE, np.arange(PAGES * PAGE)), device)


def chosen(count: int, device: str, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return to_torch(np.stack([rng.permutation(PAGES * PAGE)[:count] for _ in range(3)]).astype(np.int32), device)


@pytest.mark.parametrize("layouts", [(V32,), (PLAIN,), (V4, V4)], ids=lambda found: "+".join(x.name for x in found))
def test_wrong_attention_is_noticed(layouts: tuple[MlaLayout, ...], device: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 8, layouts[0].dims, device=device).bfloat16()
    sink = torch.randn(8, device=device)
    lengths = torch.tensor([20, 5, 0], dtype=torch.int32, device=device)
    sources: list[Any] = [(pool(layouts[0], device), chosen(30, device, 1), None)]
    sources += [(pool(layout, device), chosen(20, device, 2), lengths) for layout in layouts[1:]]
    extra = sources[1] if len(sources) > 1 else ()
    right, _ = torch_api.sparse_mla(q, *sources[0][:2], None, sink, *extra, softmax_scale=SCALE)
    assert attention_error(right, q, sources, SCALE, sink) < TOLERANCE
    wrong = [
        torch_api.sparse_mla(q, *sources[0][:2], None, sink, *extra, softmax_scale=SCALE * 1.2)[0],
        torch_api.sparse_mla(q, *sources[0][:2], None, None, *extra, softmax_scale=SCALE)[0],
        torch_api.sparse_mla(q, sources[0][0], sources[0][1].roll(1, 0), None, sink, *extra, softmax_scale=SCALE)[0],
    ]
    if extra:
        wrong.append(torch_api.sparse_mla(q, *sources[0][:2], None, sink, softmax_scale=SCALE)[0])
    for out in (*wrong, right * torch.nan):
        assert not attention_error(out, q, sources, SCALE, sink) <= TOLERANCE


def test_a_wrong_step_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    indexer = indexer_pool(np.random.default_rng(0), IndexerLayout(128), PAGES, PAGE, np.arange(PAGES * PAGE))
    arguments = (
        torch.randn(2, 8, 576, device=device).bfloat16(), torch.randn(2, 4, 128, device=device).bfloat16(),
        torch.randn(2, 4, device=device), pool(V32, device), to_torch(indexer, device),
        torch.tensor([[4, 0, 5], [3, 1, 2]], dtype=torch.int32, device=device),
        torch.tensor([48, 11], dtype=torch.int32, device=device),
    )  # fmt: skip
    real = torch_api.dsa_attention
    assert step_error(arguments, 16, SCALE) < TOLERANCE

    def selects_another(*tensors: Any, **attrs: Any) -> Any:
        out, lse, indices = real(*tensors[:2], -tensors[2], *tensors[3:], **attrs)
        return out, lse, indices

    def attends_wrongly(*tensors: Any, softmax_scale: float, **attrs: Any) -> Any:
        return real(*tensors, softmax_scale=softmax_scale * 1.5, **attrs)

    for wrong in (selects_another, attends_wrongly):
        monkeypatch.setattr(torch_api, "dsa_attention", wrong)
        assert not step_error(arguments, 16, SCALE) <= TOLERANCE


def test_cudnns_derivative_is_called_as_published(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the signature of nvidia-cudnn-frontend 1.32, which takes contiguous arrays."""
    torch.manual_seed(0)
    q, dout = (torch.randn(6, 4, dims, device=device).bfloat16() for dims in (576, 512))
    rows = torch.randn(8, 1, 576, device=device).bfloat16()
    slots = torch.stack([torch.randperm(8, device=device)[:5] for _ in range(6)]).int()
    out, lse = torch_api.sparse_mla(q, rows, slots, softmax_scale=SCALE)
    arguments = q, rows, slots, out, lse, dout

    def wrapper(
        q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor,
        attn_sink: torch.Tensor, topk_idxs: torch.Tensor, softmax_scale: float | None = None,
        topk_length: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        assert kv.shape == (8, 576) and attn_sink.shape == (4,) and topk_idxs.dtype == torch.int32
        assert all(tensor.is_contiguous() for tensor in (q, kv, out, dout, lse, attn_sink, topk_idxs))
        dq, drows, *_ = TORCH_OPS.sparse_mla_backward(
            q, kv[:, None], topk_idxs, out, lse, dout, softmax_scale=softmax_scale
        )
        return {"dq": dq, "dkv": drows[:, 0], "d_sink": torch.zeros_like(attn_sink)}

    frontend = SimpleNamespace(DSA=SimpleNamespace(sparse_attention_backward_wrapper=wrapper))
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    found = baselines.cudnn_backward(*arguments, SCALE)()
    assert gradient_error(found, arguments, SCALE) < TOLERANCE
    dq, drows = found
    for wrong in ((dq * 1.1, drows), (dq, drows.roll(1, 0)), (dq, drows * torch.nan)):
        assert not gradient_error(wrong, arguments, SCALE) <= TOLERANCE


@pytest.mark.parametrize("selected", [None, 4])
def test_a_wrong_gradient_of_the_indexers_loss_is_noticed(
    selected: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(problems, "DEVICE", device)
    case = training.indexer_loss_case(6, 10, selected, heads=3, index_heads=2)
    assert 0 < case.check() < case.tolerance
    loss, dindex_q, dindex_k, dweights = case.ours(0)
    *arguments, _, indices = case.inputs[0]
    assert indexer_loss_error(case.ours(0), arguments, indices, 576**-0.5) == case.check()
    for wrong in (dindex_q * 1.1, dindex_q.roll(1, 1), dindex_q * torch.nan):
        assert (
            not indexer_loss_error((loss, wrong, dindex_k, dweights), arguments, indices, 576**-0.5) <= case.tolerance
        )
    for wrong in (dweights * 1.1, dweights.roll(1, 1), dweights * torch.nan):
        assert (
            not indexer_loss_error((loss, dindex_q, dindex_k, wrong), arguments, indices, 576**-0.5) <= case.tolerance
        )


def test_a_selection_for_training_is_that_of_the_formula(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose scores are stored for some tokens at a time."""
    torch.manual_seed(0)
    monkeypatch.setattr(problems, "DEVICE", device)
    monkeypatch.setattr(training, "SELECTED", 5)
    monkeypatch.setattr(training, "SCORES_BYTES", 3 * 4 * 12)
    case = training.indexer_case(8, 12)
    assert [part.shape for part in case.ours(0)] == [(3, 5), (3, 5), (2, 5)] and case.check() == 0
    real = torch_api.select_topk
    monkeypatch.setattr(TORCH_OPS, "select_topk", lambda scores, ends, k: real(-scores, ends, k=k))
    assert not case.check() <= case.tolerance


@pytest.mark.parametrize(
    "cases",
    [blocks.sources, blocks.within, blocks.ragged_sources, blocks.ragged_within],
    ids=["sources", "within", "ragged sources", "ragged within"],
)
def test_selections_in_blocks_are_those_of_torch(
    cases: Callable[[], Iterator[Benchmark]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are a peer's, which has the logits of all keys."""
    torch.manual_seed(0)
    monkeypatch.setattr(problems, "DEVICE", device)
    monkeypatch.setattr(blocks, "BLOCKS", 20)
    monkeypatch.setattr(blocks, "K", 12)
    monkeypatch.setattr(blocks, "PAGED", ((9, 256),))
    monkeypatch.setattr(blocks, "RAGGED", ((9, 256),))

    def masked(logits: torch.Tensor, _: torch.Tensor, inside: torch.Tensor, size: int, select: Any) -> Any:
        def call() -> torch.Tensor:
            keep = torch.zeros(len(logits), logits.shape[1] // size, dtype=torch.bool, device=device)
            keep.scatter_(1, inside.long(), True)
            logits[~keep.repeat_interleave(size, 1)] = -torch.inf
            return select()

        return call

    monkeypatch.setattr(baselines, "vllm_blocks", lambda logits, ends, *_: lambda: blocks.best_blocks(logits, ends))
    monkeypatch.setattr(baselines, "vllm_in_blocks", masked)
    for name in ("vllm_topk", "vllm_topk_of_prefill"):
        monkeypatch.setattr(baselines, name, lambda logits, _, k: lambda: logits.topk(k).indices)
    (found,) = cases()
    assert found.check() == 0 and [check() for check in found.peer_checks.values()] == [0]
    selected = found.ours(0)
    assert len(selected) == 9 and (selected >= 0).all()
    monkeypatch.setattr(TORCH_OPS, found.op, lambda *_, **__: selected.flip(0))
    assert not found.check() <= found.tolerance


def test_a_peers_package_leaves_tritons_functions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's puts a function of its own in the place of one that other peers' kernels call."""

    def of_sglang(name: str) -> SimpleNamespace:
        triton.next_power_of_2 = lambda n: n
        return SimpleNamespace(topk_transform_ragged_v2=lambda *_, **__: None)

    own = triton.next_power_of_2
    monkeypatch.setattr(triton, "next_power_of_2", own)  # as it was, whatever happens here
    monkeypatch.setattr(baselines, "import_module", of_sglang)
    baselines.sglang_topk(torch.zeros(513, 4), torch.ones(513, dtype=torch.int32), 2)()
    assert triton.next_power_of_2 is own


def test_evidence_has_the_exit_status_of_each_part(tmp_path: Path) -> None:
    out = tmp_path / "new"
    told = "import os, sys; print('all passed in', os.getcwd(), 'by', sys.prefix)"
    assert on_gpus.record(out, "test", "right", "a commit", [sys.executable, "-c", told])
    assert not on_gpus.record(out, "test", "wrong", "a commit", [sys.executable, "-c", "raise SystemExit(3)"])
    lines = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    assert [(line["exit_code"], line["last_lines"], line["commit"]) for line in lines] == [
        (0, ["all passed in . by PYTHON"], "a commit"),
        (3, [], "a commit"),
    ]


def test_collections_of_garbage_are_timed() -> None:
    with host.collections() as pauses:
        gc.collect()
        gc.collect()
    callbacks = len(gc.callbacks)
    with host.collections():
        assert len(gc.callbacks) == callbacks + 1
    assert len(gc.callbacks) == callbacks and len(pauses) == 2 and all(0 < pause < 60 for pause in pauses)
