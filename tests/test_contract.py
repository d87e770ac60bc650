"""The safety contract, a section a clause. Inputs are arbitrary bytes; what may not be read is NaN, what may not be
written is a canary."""

import mmap

import hypothesis.strategies as st
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from xmla import torch_api
from xmla.core.op import Op, registry

DEVICE = "cuda" if HAS_GPU else "cpu"
OPS = registry()
GARBAGE = st.one_of(st.integers(-2, 200), st.sampled_from([-(2**31), -(2**31) + 1, 2**31 - 1, 2**30, -1]))
INTEGERS = {"slots", "indices", "lengths", "starts", "ends", "block_table", "request_ids"}


@st.composite
def garbage_inputs(draw: st.DrawFn, op: Op) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """A case of `op` whose integers are arbitrary and whose caches hold arbitrary bytes."""
    case = draw(st.sampled_from([c for c in op.cases if sum(a.size for a in kit.make(c).values()) < 400_000]))
    inputs = kit.make(case, seed=draw(st.integers(0, 3)))
    for name in INTEGERS & set(inputs):
        array = inputs[name]
        if op.mutates and name == "slots":  # valid slots are distinct
            chosen = draw(st.lists(GARBAGE, min_size=array.size, max_size=array.size, unique=True))
            inputs[name] = np.array(chosen).astype(array.dtype)
        else:
            inputs[name] = draw(hnp.arrays(array.dtype, array.shape, elements=GARBAGE))
    return inputs, kit.attributes(op, case)


def run(op: Op, inputs: dict[str, np.ndarray], attrs: dict[str, object]) -> tuple[object, ...]:
    arguments = kit.torch_inputs(op, inputs, DEVICE)
    got = kit.as_tuple(getattr(torch_api, op.name)(*arguments, **attrs))
    return got or tuple(arguments[list(op.tensors).index(name)] for name in op.mutates)


# 1, 2, 3: terminates, clamps lengths, skips invalid indices, touches nothing else.


@pytest.mark.parametrize("name", sorted(OPS))
def test_clauses_1_to_3_garbage_integers_give_the_definition(name: str) -> None:
    """Every call returns, agrees with the definition and writes nothing beside its outputs."""
    op = OPS[name]

    @given(garbage_inputs(op))
    @settings(max_examples=12)
    def check(drawn: tuple[dict[str, np.ndarray], dict[str, object]]) -> None:
        inputs, attrs = drawn
        guarded = {n: kit.guarded(a) for n, a in inputs.items()}
        got = run(op, {n: a for n, (a, _) in guarded.items()}, attrs)
        with np.errstate(all="ignore"):
            want = op.reference(**inputs, **attrs)
        if op.mutates:
            kit.assert_bits_equal(name, got[0], inputs[op.mutates[0]])
        for (label, value), result in zip(kit.results(op, want), got, strict=False):
            if name != "dsa_attention":  # garbage keys are legitimately NaN there; its parts are compared
                kit.assert_close(label, result, value, kit.tolerance_of(op, label), kit.written(op, value))
        for array, buffer in guarded.values():
            margin = np.ones(len(buffer), bool)
            if array.size:
                first = array.ctypes.data - buffer.ctypes.data
                margin[first : first + kit._span(array) * array.itemsize] = False
            assert (buffer[margin] == kit.CANARY).all()

    check()


@pytest.mark.parametrize("name", sorted(n for n in OPS if OPS[n].outputs))
def test_clause_3_nothing_is_written_beside_the_results(name: str) -> None:
    op = OPS[name]
    for case in op.cases:
        arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
        function = getattr(torch_api, name)
        plain = kit.as_tuple(function(*arguments, **case.attrs))
        buffers = [
            torch.full((t.numel() * t.itemsize + 512,), kit.CANARY, dtype=torch.uint8, device=DEVICE) for t in plain
        ]
        out = tuple(b[256:-256].view(t.dtype).view(t.shape) for b, t in zip(buffers, plain, strict=True))
        function(*arguments, **case.attrs, out=out if len(out) > 1 else out[0])
        for buffer in buffers:
            assert (buffer[:256] == kit.CANARY).all() and (buffer[-256:] == kit.CANARY).all()


# 4: memory no valid index refers to cannot influence a result; empty rows are defined.


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF], ids=["zeros", "nan", "all ones"])
@pytest.mark.parametrize("name", ["sparse_mla", "read_mla_cache", "read_indexer_cache", "indexer_logits_paged"])
def test_clause_4_unreferenced_memory_does_not_matter(name: str, byte: int) -> None:
    """The cases' caches are NaN wherever nothing refers to; any other bytes there give the same bits."""
    op = OPS[name]
    for case in op.cases:
        inputs = kit.make(case)
        if inputs["cache"].dtype != np.uint8:
            continue
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case))) if name.endswith("paged") else None
        want = run(op, inputs, case.attrs)
        other = kit.make(case)
        cache = other["cache"]
        entries = (cache == 0xFF).all(axis=2) if name != "indexer_logits_paged" else None
        if entries is not None:
            cache[entries] = byte
        for a, b in zip(run(op, other, case.attrs), want, strict=True):
            kit.assert_bits_equal(name, a, b, where)
        assert entries is None or entries.any()


def test_clause_4_empty_rows() -> None:
    op = OPS["sparse_mla"]
    inputs = kit.make(op.cases[1])
    inputs["slots"][:] = -1
    for empty, value in (("-inf", -np.inf), ("+inf", np.inf)):
        out, lse = run(op, inputs, {"softmax_scale": 1.0, "empty_lse": empty})
        assert not kit.as_numpy(out).view(np.uint16).any() and (kit.as_numpy(lse) == value).all()


@pytest.mark.parametrize("axis", ["T", "K"])
def test_clause_4_empty_axes(axis: str) -> None:
    """No tokens or no keys: no launch reads anything, results are empty or those of empty rows."""
    tokens, keys = (0, 8) if axis == "T" else (3, 0)
    q = torch.zeros(tokens, 16, 576, device=DEVICE, dtype=torch.bfloat16)
    cache = torch.full((2, 64, 656), 255, device=DEVICE, dtype=torch.uint8)
    slots = torch.zeros(tokens, keys, device=DEVICE, dtype=torch.int32)
    out, lse = torch_api.sparse_mla(q, cache, slots, softmax_scale=1.0)
    assert out.shape == (tokens, 16, 512) and not out.any() and (lse == -torch.inf).all()
    ends = torch.full((tokens,), keys, device=DEVICE, dtype=torch.int32)
    assert (torch_api.select_topk(torch.zeros(tokens, keys, device=DEVICE), ends, k=4) <= 3).all()
    table = torch.zeros(1, 2, device=DEVICE, dtype=torch.int32)
    mapped, counts = torch_api.map_slots(slots, table, page_size=64)
    assert mapped.shape == (tokens, keys) and counts.shape == (tokens,) and not counts.any()


# 5: 64-bit offsets.


def test_clause_5_offsets_past_two_and_four_gigabytes() -> None:
    """A pool whose pages lie 2**30 bytes apart, six of them, backed by memory only where it is touched."""
    stride, pages, entries = 1 << 30, 6, 4
    if HAS_GPU:
        pool = torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE)
    else:
        pool = torch.frombuffer(mmap.mmap(-1, pages * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    cache = pool.as_strided((pages, entries, 656), (stride, 656, 1))
    rng = np.random.default_rng(0)
    values = kit.to_torch(rng.standard_normal((pages * entries, 576)).astype(ml_dtypes.bfloat16), DEVICE)
    slots = torch.arange(pages * entries, device=DEVICE, dtype=torch.int32)
    torch_api.write_mla_cache(values[:, :512].contiguous(), values[:, 512:].contiguous(), slots, cache)
    rows = torch_api.read_mla_cache(cache, slots)
    assert torch.equal(rows[:, 512:], values[:, 512:]) and float((rows - values).abs().max()) < 0.3

    indexer = pool.as_strided((pages, entries, 132), (stride, 132, 1), storage_offset=1 << 20)
    keys = values[:, :128].contiguous()
    torch_api.write_indexer_cache(keys, slots, indexer)
    q8, scales = torch_api.read_indexer_cache(indexer, slots)
    assert float((q8.float() * scales[:, None] - keys.float()).abs().max()) < 0.3
    far, near = slots[None].contiguous(), torch.arange(pages * entries, device=DEVICE, dtype=torch.int32)[None]
    q = values[:1, None].expand(1, 16, 576).contiguous()
    out, _ = torch_api.sparse_mla(q, cache, far, softmax_scale=0.05)
    dense, _ = torch_api.sparse_mla(q, rows[:, None], near, softmax_scale=0.05)
    kit.assert_bits_equal("out", out, dense)


# 6 and 7: same inputs, same bits; a row does not depend on its batch if batch_invariant is set.


@pytest.mark.parametrize("name", sorted(OPS))
def test_clause_7_repeated_calls_give_the_same_bits(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    where = None
    if name == "indexer_logits_paged":
        inputs = kit.make(case)
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    first = [kit.as_numpy(r).copy() for r in run(op, kit.make(case), case.attrs)]
    for _ in range(20 if HAS_GPU else 2):
        for a, b in zip(run(op, kit.make(case), case.attrs), first, strict=True):
            kit.assert_bits_equal(name, a, b, where)


@given(st.permutations(range(5)), st.integers(1, 5))
@settings(max_examples=6)
def test_clause_7_batch_invariant_rows(order: list[int], kept: int) -> None:
    """Permuted, or a part alone: each row keeps its bits."""
    op = OPS["sparse_mla"]
    case = next(c for c in op.cases if c.name.startswith("t5"))
    inputs = kit.make(case)
    whole = run(op, inputs, case.attrs)
    chosen = order[:kept]
    part = {n: a[chosen] if op.tensors[n].names[0] == "T" else a for n, a in inputs.items()}
    for a, b in zip(run(op, part, case.attrs), whole, strict=True):
        kit.assert_bits_equal("row", a, kit.as_numpy(b)[chosen])


# 6: only the plan's buffers are allocated, and no value is read on the host.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", sorted(OPS))
def test_clause_6_allocates_the_plan_and_nothing_else(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
    function = getattr(torch_api, name)
    function(*arguments, **case.attrs)
    torch.cuda.synchronize()
    plan = function.plan(*arguments, **case.attrs)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")  # a host read of a device value would raise
    try:
        function(*arguments, **case.attrs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == len(plan.results) + (plan.workspace_bytes > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.outputs))
def test_clause_6_allocates_nothing_with_out_and_workspace(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
    function = getattr(torch_api, name)
    want = kit.as_tuple(function(*arguments, **case.attrs))
    out = tuple(torch.zeros_like(tensor) for tensor in want)
    workspace = torch.empty(function.plan(*arguments, **case.attrs).workspace_bytes, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    function(*arguments, **case.attrs, out=out if len(out) > 1 else out[0], workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
