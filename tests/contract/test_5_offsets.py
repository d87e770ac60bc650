"""Clause 5: 64-bit offsets for every page and row product."""

import mmap
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import EVERYTHING, HAS_GPU
from garbage import DEVICE, OPS

from tools import far_strides, kept
from xmla import UnsupportedError, torch_api
from xmla.core.call import LARGEST_SIZE
from xmla.core.formats.indexer import INDEXER_LAYOUTS, IndexerLayout
from xmla.core.formats.mla import MLA_LAYOUTS, MlaLayout
from xmla.core.formats.parts import entry_of
from xmla.core.models.calls import Call
from xmla.core.op import Case, Op
from xmla.core.values import H200, Spec
from xmla.torch_api._all_ops import TORCH_OPS

# Two workers have all of these tests: each takes a sixth of an H200's memory.
pytestmark = pytest.mark.xdist_group("device memory")

# Bytes of memory to lay arrays out in, and from where: 2**31 elements of 4 bytes on both sides of it, so that an offset
# of 32 bits that wrapped round stays inside.
SPACE = 24 << 30
ORIGIN = 2**31  # elements
FAREST = 2**31 - 2**21  # the largest stride; some are runtime sizes


@pytest.fixture(scope="module")
def space() -> Iterator[torch.Tensor]:
    """Memory to lay arrays out in; on the CPU it is backed only where it is touched."""
    if HAS_GPU:
        yield torch.empty(SPACE, dtype=torch.uint8, device=DEVICE)
    else:
        unreserved = 0x4000  # Linux' MAP_NORESERVE, which Python names from 3.13 on
        mapped = mmap.mmap(-1, SPACE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
        yield torch.frombuffer(mapped, dtype=torch.uint8)


def spread(tensor: torch.Tensor, axis: int, space: torch.Tensor) -> torch.Tensor:
    """A copy whose neighbours along `axis` lie as far apart as `space` allows; the other axes are dense."""
    raw = space.view(tensor.dtype)
    shape = list(tensor.shape)
    count = shape.pop(axis)
    dense = torch.empty(shape, device="meta")
    step = min((raw.numel() - ORIGIN - dense.numel()) // (count - 1), FAREST) // 256 * 256
    strides = list(dense.stride())
    strides.insert(axis, step)
    far = raw.as_strided(tensor.shape, strides, ORIGIN)
    far.copy_(tensor)
    return far


def chosen(op: Op) -> list[str | None]:
    """The kernels that a call gets by itself, and the portable ones if those are others."""
    return [None, "triton"] if HAS_GPU and len(op.implementations) > 1 else [None]


SPREAD = [
    pytest.param(op, name, axis, by, marks=[pytest.mark.xdist_group("second half")] if axis else [])
    for op in OPS.values()
    for name, tensor in op.tensors.items()
    for axis, label in enumerate(tensor.names[:-1])
    if label not in far_strides.ENTRIES
    for by in chosen(op)
]


def case_with(op: Op, argument: str, axis: int) -> Case:
    """A case in which `argument` is long enough along `axis` for the last index times the stride to pass 2**31."""
    sizes = {c.name: kit.make(c)[argument].shape[axis] for c in op.cases if argument in kit.make(c)}
    long = next((name for name, size in sizes.items() if size > 2), max(sizes, key=lambda name: sizes[name]))
    return next(c for c in op.cases if c.name == long)


def named(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("op", "argument", "axis", "by"), SPREAD, ids=named)
def test_neighbours_far_apart(space: torch.Tensor, op: Op, argument: str, axis: int, by: str | None) -> None:
    """Each axis of each argument in turn with its neighbours far apart, pages too: the bits of the dense call."""
    case = case_with(op, argument, axis)
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    # Slots of 64 bits would widen what they are multiplied by.
    inputs = {name: array.astype(np.int32) if array.dtype == np.int64 else array for name, array in inputs.items()}
    for name, tensor in op.tensors.items():
        if name in inputs and tensor.index_of == op.tensors[argument].names[axis] and not op.mutates:
            index, size = inputs[name], inputs[argument].shape[axis]
            index[(index >= 0) & (index < size / 2)] = size - 1  # the farthest
    where = None
    if op.partial:
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    calls = []
    for far in (False, True):
        arguments = dict(zip(op.tensors, kit.torch_inputs(op, kit.copies(inputs), DEVICE), strict=True))
        if far:
            arguments[argument] = spread(arguments[argument], axis, space)
        call = getattr(TORCH_OPS, op.name)
        results = kit.as_tuple(call(*arguments.values(), **case.attrs, implementation=by))
        calls.append([*results, *(arguments[name] for name in op.mutates)])
    for near, far in zip(*calls, strict=True):
        kit.assert_bits_equal(op.name, far, near, where)


def page_of_many(space: torch.Tensor, row: int, dtype: torch.dtype) -> torch.Tensor:
    """One page of as many entries [1, R, row] as `space` holds, 2**31 slots at most."""
    raw = space.view(dtype)[ORIGIN:]
    entries = min(raw.numel() // row, FAREST) // 64 * 64
    return raw[: entries * row].view(1, entries, row)


def far_slots(pool: torch.Tensor, count: int) -> torch.Tensor:
    """int32 slots from the first to the last entry of a pool, none twice."""
    total = pool.shape[0] * pool.shape[1]
    places = np.linspace(0, total - 1, count).astype(np.int32)
    return torch.from_numpy(np.random.default_rng(0).permutation(places)).to(DEVICE)


def stored(pool: torch.Tensor, slots: torch.Tensor, data: int) -> torch.Tensor:
    """The bytes or elements of entries, by torch's own offsets: a page has the `data` of all, then their footers."""
    entries, row = pool.shape[1:]
    page, offset = slots.long() // entries, slots.long() % entries
    first = page * entries * row
    footer = first + entries * data + offset * (row - data)
    parts = ((first + offset * data, data), (footer, row - data))
    return torch.cat([pool.view(-1)[at[:, None] + torch.arange(n, device=DEVICE)] for at, n in parts], dim=1)


def written(layout: MlaLayout) -> np.ndarray:
    """Which elements of an entry are no padding within its data: nobody writes that."""
    parts = entry_of(layout).parts if layout.packed else (("dims", layout.row),)
    data = np.concatenate([np.full(count, part != "pad") for part, count in parts])
    return np.concatenate([data, np.ones(layout.row - layout.data, bool)])


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=named)
def test_a_page_of_very_many_entries(space: torch.Tensor, layout: MlaLayout) -> None:
    """Entries of one page, past 2**31 elements: written, read, converted and attended to as on pages of one."""
    count, dtype = 21, torch.uint8 if layout.packed else torch.bfloat16
    pool = page_of_many(space, layout.row, dtype)
    slots, near = far_slots(pool, count), torch.arange(count, device=DEVICE, dtype=torch.int32)
    assert int(slots.max()) * layout.data > 2**32

    def small() -> torch.Tensor:
        return torch.zeros(count, 1, layout.row, dtype=dtype, device=DEVICE)

    rng = np.random.default_rng(0)
    values = kit.to_torch(rng.standard_normal((count, layout.dims)).astype(ml_dtypes.bfloat16), DEVICE)
    keys = values[:, : layout.latent].contiguous(), values[:, layout.latent :].contiguous()
    known, source = {"cache_format": layout.name}, {"source_format": layout.name, "cache_format": layout.name}
    dense, back, again = small(), small(), small()
    torch_api.write_mla_cache(*keys, slots, pool, **known)
    torch_api.write_mla_cache(*keys, near, dense, **known)
    want = torch_api.read_mla_cache(dense, near, **known)
    entries, where = stored(pool, slots, layout.data), np.broadcast_to(written(layout), (count, layout.row))
    kit.assert_bits_equal("entries", entries, stored(dense, near, layout.data), where)
    kit.assert_bits_equal("rows", torch_api.read_mla_cache(pool, slots, **known), want)

    torch_api.convert_mla_cache(pool, slots, near, back, **source)
    torch_api.convert_mla_cache(dense, near, near, again, **source)
    kit.assert_bits_equal("converted from", stored(back, near, layout.data), stored(again, near, layout.data), where)
    turned = slots.flip(0).contiguous()
    torch_api.convert_mla_cache(dense, near, turned, pool, **source)
    kit.assert_bits_equal("converted to", torch_api.read_mla_cache(pool, turned, **known), want)

    for heads, by in product((4, 17), chosen(OPS["sparse_mla"])):
        q = kit.to_torch(rng.standard_normal((2, heads, layout.dims)).astype(ml_dtypes.bfloat16), DEVICE)
        attrs = {"softmax_scale": 0.05, **known, "implementation": by}
        extra = {"extra_cache_format": layout.name}
        far_row, near_row = (s.expand(2, -1).contiguous() for s in (turned, near))
        calls = [torch_api.sparse_mla(q, c, s, **attrs) for c, s in ((pool, far_row), (dense, near_row))]
        for cache, row in ((pool, far_row), (dense, near_row)):
            given = {"extra_cache": cache, "extra_slots": row}
            calls.append(torch_api.sparse_mla(q, dense, near_row, **given, **attrs, **extra))
        for got, expected in (calls[:2], calls[2:]):
            for name, far, same in zip(("out", "lse"), got, expected, strict=True):
                if HAS_GPU:  # pages of another size are another kernel's, which may add in another order
                    kit.assert_close(name, far, kit.as_numpy(same), OPS["sparse_mla"].outputs[name].agreement)
                else:
                    kit.assert_bits_equal(name, far, same)


@pytest.mark.parametrize("layout", INDEXER_LAYOUTS, ids=named)
def test_a_page_of_very_many_indexer_keys(space: torch.Tensor, layout: IndexerLayout) -> None:
    count = 37
    pool = page_of_many(space, layout.row, torch.uint8)
    slots, near = far_slots(pool, count), torch.arange(count, device=DEVICE, dtype=torch.int32)
    assert int(slots.max()) * layout.value_bytes > 2**32
    dense, back, again = (torch.zeros(count, 1, layout.row, dtype=torch.uint8, device=DEVICE) for _ in range(3))
    values = np.random.default_rng(0).standard_normal((count, layout.dim)).astype(ml_dtypes.bfloat16)
    keys, form = kit.to_torch(values, DEVICE), {"cache_format": layout.format}
    torch_api.write_indexer_cache(keys, slots, pool, **form)
    torch_api.write_indexer_cache(keys, near, dense, **form)
    kit.assert_bits_equal("entries", stored(pool, slots, layout.value_bytes), stored(dense, near, layout.value_bytes))
    want = torch_api.read_indexer_cache(dense, near, **form)
    for got, expected in zip(torch_api.read_indexer_cache(pool, slots, **form), want, strict=True):
        kit.assert_bits_equal("keys", got, expected)

    both = {"source_format": layout.format, **form}
    TORCH_OPS.convert_indexer_cache(pool, slots, near, back, **both)
    TORCH_OPS.convert_indexer_cache(dense, near, near, again, **both)
    kit.assert_bits_equal("converted from", back, again)
    turned = slots.flip(0).contiguous()
    TORCH_OPS.convert_indexer_cache(dense, near, turned, pool, **both)
    want = torch_api.read_indexer_cache(again, near, **form)
    for got, expected in zip(torch_api.read_indexer_cache(pool, turned, **form), want, strict=True):
        kit.assert_bits_equal("converted to", got, expected)


def test_a_page_of_very_many_states(space: torch.Tensor) -> None:
    """A request's last tokens on one page of states: the entry that its first ones give."""
    dim, ratio, tokens = 512, 4, 8
    rng = np.random.default_rng(0)
    kv, score, ape, angle = (
        torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32)).to(DEVICE)
        for rows, width in ((tokens, 2 * dim), (tokens, 2 * dim), (ratio, 2 * dim), (1, 64))
    )
    far = page_of_many(space, 4 * dim, torch.float32)
    results = []
    for state in (torch.zeros(1, tokens, 4 * dim, device=DEVICE), far):
        first = state.shape[1] - tokens
        assert first == 0 or first * 4 * dim > 2**31
        # The second of the two entries: its window is all of the tokens.
        last = state.shape[1] // ratio - 1
        cache = torch.zeros(1, last + 1, 584, dtype=torch.uint8, device=DEVICE)
        table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        positions = torch.arange(first, first + tokens, device=DEVICE, dtype=torch.int32)
        cos_sin = angle.expand(state.shape[1], -1)
        norm = torch.ones(dim, device=DEVICE)
        torch_api.compress_kv(kv, score, ape, norm, cos_sin, positions, state, table, cache, table)
        entry = torch_api.read_mla_cache(cache, torch.tensor([last], dtype=torch.int32, device=DEVICE))
        results.append((entry, state[0, first:]))
    (near_entry, near_states), (far_entry, far_states) = results
    assert near_entry.any()
    kit.assert_bits_equal("entry", far_entry, near_entry)
    kit.assert_bits_equal("states", far_states, near_states)


@pytest.mark.gpu
@pytest.mark.parametrize("by", [None, "triton"])
def test_logits_over_a_page_of_very_many_keys(space: torch.Tensor, by: str | None) -> None:
    """All keys are zero but a few past 2**31 bytes: their logits, and the largest of them, by position."""
    count, entries, k = 100, 40 << 20, 8
    pool = space[ORIGIN : ORIGIN + entries * 132].view(1, entries, 132)
    pool.zero_()
    rng = np.random.default_rng(0)
    slots = (2**31 // 128 + np.sort(rng.choice(entries - 2**31 // 128, count, replace=False))).astype(np.int32)
    keys = kit.to_torch(rng.standard_normal((count, 128)).astype(ml_dtypes.bfloat16), DEVICE)
    small = torch.zeros(1, 128, 132, dtype=torch.uint8, device=DEVICE)
    far, near = torch.from_numpy(slots).to(DEVICE), torch.arange(count, device=DEVICE, dtype=torch.int32)
    torch_api.write_indexer_cache(keys, far, pool)
    torch_api.write_indexer_cache(keys, near, small)
    q8 = kit.to_torch(rng.standard_normal((1, 64, 128)).astype(ml_dtypes.float8_e4m3fn), DEVICE)
    weights = torch.from_numpy(rng.uniform(0.5, 1.0, (1, 64)).astype(np.float32)).to(DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)

    def of(cache: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        logits = torch_api.indexer_logits_paged(q8, weights, cache, table, lengths, implementation=by)
        return logits[0], torch_api.indexer_topk_paged(q8, weights, cache, table, lengths, k=k, workspace_bytes=1 << 24)

    far_logits, best = of(pool, entries)
    near_logits, want = of(small, count)
    kit.assert_bits_equal("logits", far_logits[far.long()], near_logits[:count])
    kit.assert_bits_equal("indices", best, far[want.long()])


@pytest.mark.slow
def test_no_product_of_32_bits_is_a_far_offset(record_property: Callable[[str, object], None]) -> None:
    """Every op's kernels, strides near 2**31 along each axis and as many entries per page: none can wrap round."""
    digests, lines = kept.changed("far_strides", Path(far_strides.__file__), *["--all"] * (EVERYTHING or kept.MATRIX))
    record_property(kept.OLD, kept.old("far_strides", digests))
    kernels = [line for line in lines if "kernel" in line]
    assert not [line for line in kernels if line.get("wrong")]
    assert {line["op"] for line in kernels if line["far"] == "strides"} == set(OPS)
    assert {line["op"] for line in kernels if line["far"] == "entries"} >= {op.name for op in OPS.values() if op.pools}
    found = {line["kernel"] for line in kernels}
    assert {"sparse_mla_kernel", "indexer_logits_kernel", "indexer_logits_paged_kernel"} <= found
    assert {"sparse_mla_sm90_kernel", "indexer_logits_sm90_kernel", "indexer_logits_paged_sm90_kernel"} <= found
    assert {"sparse_mla_sm100_kernel", "indexer_logits_paged_sm100_kernel", "sparse_mla_sm120_kernel"} <= found
    kept.keep("far_strides", digests)


@pytest.mark.parametrize(
    ("multiplied", "wrong"),
    [
        ("%p = arith.muli %pid, %c65536_i32 : i32", True),  # a stride
        ("%p = arith.muli %pid, %c64_i32 : i32", False),  # tiles
        ("%p = arith.muli %pid, %row_stride : i32", True),
        ("%p = arith.muli %pid, %next_n : i32", False),
        ("%p = arith.muli %head, %c65536_i32 : i32", False),
        ("%p = arith.muli %head, %c2147483647_i32 : i32", True),
        ("%p = arith.muli %entry, %c64_i32 : i32", False),
        ("%p = arith.muli %entry, %c656_i32 : i32", True),
        ("%p = arith.muli %masked, %c8192_i32 : i32", False),
        ("%p = arith.muli %masked, %c16777216_i32 : i32", True),
        ("%p = arith.muli %wide, %c4_i64 : i64", False),
    ],
)
def test_which_products_are_wrong(multiplied: str, wrong: bool) -> None:
    """What the check says of a product in the IR: of a head below 128, an entry of 4000000, a byte, any program."""
    text = """module {
  tt.func public @kernel(%out: !tt.ptr<f32> loc(#loc), %row_stride: i32 loc(#loc), %next_n: i32 loc(#loc)) {
    %pid = tt.get_program_id x : i32 loc(#loc1)
    %head = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32> loc(#loc1)
    %size = arith.constant 4000000 : i32 loc(#loc1)
    %entry = arith.remsi %row_stride, %size : i32 loc(#loc1)
    %mask = arith.constant 255 : i32 loc(#loc1)
    %masked = arith.andi %row_stride, %mask : i32 loc(#loc1)
    %wide = arith.extsi %pid : i32 to i64 loc(#loc1)
    VALUES
    PRODUCT loc(#loc1)
  }
}
#loc = loc("/ops/some/kernels.py":1:1)
#loc1 = loc("/ops/some/kernels.py":7:3)
"""
    constants = [int(found) for found in re.findall(r"%c(\d+)_", multiplied)]
    bits = "i64" if "i64" in multiplied else "i32"
    values = "\n".join(f"%c{n}_{bits} = arith.constant {n} : {bits} loc(#loc1)" for n in constants)
    found = list(far_strides.wrapping(text.replace("VALUES", values).replace("PRODUCT", multiplied)))
    assert found == [f"{multiplied} at some/kernels.py:7"] * wrong


def test_a_stride_past_31_bits_is_refused() -> None:
    for stride in (2**33, LARGEST_SIZE + 1):
        logits, ends = Spec((2, 64), "float32", (stride, 1)), Spec((2,), "int32")
        with pytest.raises(
            UnsupportedError,
            match=f"select_topk: row_stride of topk_cluster_sm90_kernel is {stride}, supported: sizes and strides",
        ):
            Call("select_topk", {"logits": logits, "ends": ends}, {"k": 8}).plan(H200)


def test_positions_past_31_bits_are_refused() -> None:
    """Sizes that fit by themselves, and together do not: a block table's keys, slots of two sources."""
    query = {"q8": Spec((2, 64, 128), "float8_e4m3fn"), "weights": Spec((2, 64), "float32")}
    pages = {"cache": Spec((1, 1 << 16, 132), "uint8"), "block_table": Spec((2, 1 << 15), "int32")}
    paged = query | pages | {"lengths": Spec((2,), "int32")}
    for op, attrs in (("indexer_topk_paged", {"k": 8}), ("indexer_logits_paged", {})):
        with pytest.raises(UnsupportedError, match=rf"of {op}_\w*kernel is {2**31}, supported: sizes and strides"):
            Call(op, paged, attrs).plan(H200)
    assert Call("indexer_logits_paged", paged, {"max_len": 4096}).plan(H200).launches

    slots, rows = Spec((1, 1 << 30), "int32"), Spec((8, 64, 576), "bfloat16")
    two = {"q": Spec((1, 16, 576), "bfloat16"), "cache": rows, "slots": slots}
    two |= {"extra_cache": rows, "extra_slots": slots}
    with pytest.raises(UnsupportedError, match=rf"sparse_mla: slots K \+ EXTRA_K is {2**31}, supported: up to "):
        Call("sparse_mla", two, {"softmax_scale": 1.0}).plan(H200)


def test_offsets_past_two_and_four_gigabytes() -> None:
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
