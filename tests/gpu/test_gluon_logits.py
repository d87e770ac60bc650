"""The Gluon kernels for Hopper that compute logits: the portable kernels' bits, and the reference's values."""

from collections.abc import Iterator

import jax
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from garbage import garbage_inputs
from hopper import ON_HOPPER, supported
from hypothesis import given, settings

from xmla import torch_api
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case, Op
from xmla.core.ops.blocks.indexer_block_logits.cases import with_blocks
from xmla.core.ops.blocks.indexer_block_logits.reference import positions_of
from xmla.core.ops.cases import POISON
from xmla.core.ops.indexer.indexer_logits.cases import make_case as ragged_case
from xmla.core.ops.indexer.indexer_logits_paged.cases import make_case
from xmla.core.registry import registry
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

pytestmark = ON_HOPPER

RAGGED, PAGED = (registry()[name] for name in ("indexer_logits", "indexer_logits_paged"))
UNWRITTEN = 7.0
Arrays = dict[str, np.ndarray]


CASES = [(op, case) for op in (RAGGED, PAGED) for case in op.cases if supported(op, kit.make(case), dict(case.attrs))]
by_case = pytest.mark.parametrize(("op", "case"), CASES, ids=kit.case_id)


def logits(op: Op, inputs: Arrays, attrs: dict[str, object], implementation: str = "gluon") -> torch.Tensor:
    arguments = kit.torch_inputs(op, kit.copies(inputs), "cuda")
    function = getattr(TORCH_OPS, op.name)
    spec = function.plan(*arguments, **attrs).buffers["logits"]
    out = torch.full(spec.shape, UNWRITTEN, dtype=getattr(torch, spec.dtype), device="cuda")
    function(*arguments, **attrs, implementation=implementation, out=out)
    return out


def magnitudes(inputs: Arrays) -> Arrays:
    """The inputs with every value's sign cleared."""
    inputs = {name: array if array.dtype.kind in "iu" else abs(array) for name, array in inputs.items()}
    if "cache" in inputs:
        cache = np.ascontiguousarray(inputs["cache"])
        layout = IndexerLayout(inputs["q8"].shape[2])
        slots = np.arange(cache.shape[0] * cache.shape[1])
        values, scales = layout.gather(cache, slots)
        inputs["cache"] = np.empty_like(cache)
        layout.scatter(inputs["cache"], slots, abs(values), abs(scales))
    return inputs


@np.errstate(all="ignore")
def agrees(op: Op, inputs: Arrays, attrs: dict[str, object]) -> torch.Tensor:
    """The portable kernel's bits, unwritten elements included, and the reference's values.

    Products are added with 13 fraction bits of the largest: a bound is some of these of Σ |weight| Σ |q · key| · scale,
    since terms of either sign may leave a logit of any size.
    """
    got = logits(op, inputs, attrs)
    kit.assert_bits_equal("logits", got, logits(op, inputs, attrs, "triton"))
    want = np.asarray(op.reference(**inputs, **attrs)[0], np.float64)
    size = np.asarray(op.reference(**magnitudes(inputs), **attrs)[0], np.float64)
    found = kit.as_numpy(got).astype(np.float64)
    finite = np.isfinite(want)
    # In the reference of the paged op NaN is a value or marks an element that is not written.
    left = np.isnan(want) & (found == UNWRITTEN) if op is PAGED else False
    assert np.array_equal(np.where(left, np.nan, found)[~finite], want[~finite], equal_nan=True)
    error = abs(found - want)[finite]
    rounding = 2**-9 if got.dtype == torch.bfloat16 else 0.0
    assert (error <= 2**-11 * size[finite] + rounding * abs(found[finite])).all(), f"off by {error.max()}"
    return got


@by_case
def test_agrees_with_the_reference(op: Op, case: Case) -> None:
    agrees(op, kit.make(case), kit.attributes(op, case))


def ragged(tokens: int, heads: int, keys: int, dim: int) -> Arrays:
    """Rows that want all keys."""
    rng = np.random.default_rng([tokens, heads, keys, dim])
    return {
        "q8": rng.standard_normal((tokens, heads, dim), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "weights": rng.standard_normal((tokens, heads), np.float32),
        "keys": rng.standard_normal((keys, dim), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "key_scales": rng.random(keys, np.float32) + np.float32(0.1),
        "starts": np.zeros(tokens, np.int32),
        "ends": np.full(tokens, keys, np.int32),
    }


def rows_of(inputs: Arrays, kind: str) -> Arrays:
    """The inputs with ranges of a kind."""
    rng, tokens, keys = np.random.default_rng(1), len(inputs["q8"]), len(inputs["keys"])
    if kind == "causal":
        inputs["ends"] = np.arange(keys - tokens + 1, keys + 1, dtype=np.int32)
    elif kind == "apart":  # requests one after another, some of them empty
        inputs["starts"] = (np.arange(tokens, dtype=np.int32) // 3 * keys // tokens * 3).astype(np.int32)
        inputs["ends"] = inputs["starts"] + rng.integers(0, keys // tokens + 2, tokens, dtype=np.int32)
    elif kind == "anything":
        inputs["starts"] = rng.integers(-5, keys + 5, tokens, dtype=np.int32)
        inputs["ends"] = rng.integers(-5, keys + 5, tokens, dtype=np.int32)
    return inputs


@pytest.mark.parametrize("rows", ["all", "causal", "apart", "anything"])
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "dim"),
    [(1, 64, 1, 128), (2, 64, 127, 128), (3, 64, 129, 128), (5, 32, 300, 64), (33, 40, 4097, 128), (17, 128, 700, 128),
     (9, 3, 1030, 32), (70, 64, 2050, 128), (20, 16, 1025, 64), (257, 64, 9000, 128)],
)  # fmt: skip
def test_tile_edges(tokens: int, heads: int, keys: int, dim: int, rows: str) -> None:
    inputs = rows_of(ragged(tokens, heads, keys, dim), rows)
    agrees(RAGGED, inputs, {})


def test_keys_that_no_row_wants_may_be_nan() -> None:
    inputs = ragged(40, 64, 3000, 128)
    inputs["starts"][:], inputs["ends"][:] = 700, 2001
    for name in ("keys", "key_scales"):
        inputs[name][:700] = inputs[name][2001:] = np.nan
    assert not agrees(RAGGED, inputs, {}).isnan().any()
    inputs["keys"][1000, 5] = np.nan
    got = logits(RAGGED, inputs, {})
    assert got[:, 1000].isnan().all() and got.isnan().sum() == 40


@pytest.mark.parametrize("rows", ["causal", "apart"])
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "dim"),
    [(5, 32, 300, 64), (33, 40, 4097, 128), (20, 16, 1025, 32), (257, 64, 9000, 128)],
)
def test_whole_ranges_have_the_bits_of_tokens_own_blocks(
    tokens: int, heads: int, keys: int, dim: int, rows: str
) -> None:
    """Of blocks in any order, some listed twice; keys in none of them are NaN."""
    inputs = rows_of(ragged(tokens, heads, keys, dim), rows)
    *_, starts, ends = inputs.values()
    rng, granularity = np.random.default_rng(2), 8
    inputs["blocks"] = rng.integers(-1, keys // granularity + 1, (tokens, keys // granularity // 2 + 1), dtype=np.int32)
    position = positions_of(inputs["blocks"], np.maximum(ends - starts, 0), granularity)
    unread = ~np.isin(np.arange(keys), (starts[:, None] + position)[position >= 0])
    inputs["keys"].view(np.uint8)[unread] = POISON
    inputs["key_scales"][unread] = np.nan
    arguments = kit.torch_inputs(registry()["indexer_block_topk"], inputs, "cuda")
    attrs = {"k": 40, "granularity": granularity}
    over_ranges = torch_api.indexer_block_topk(*arguments, **attrs, implementation="gluon")
    within = torch_api.indexer_block_topk(*arguments, **attrs, implementation="triton")
    kit.assert_bits_equal("indices", over_ranges, within)


def cases_of_blocks() -> Iterator[tuple[Op, Case]]:
    """Cases of the ops, and longer ones: blocks in any order, listed twice, without keys, of a number beside tiles."""
    names = ("indexer_block_logits", "indexer_block_logits_paged")
    of_rows, of_pages = (registry()[name] for name in names)
    for op in (of_rows, of_pages):
        yield from ((op, case) for case in op.cases if supported(op, kit.make(case), dict(case.attrs)))
    for granularity, blocks, heads, dim in ((8, 600, 32, 128), (8, 2048, 64, 128), (16, 37, 128, 64), (128, 20, 5, 32)):
        for twice in (False, True):
            pages = make_case((5000, 40, 900, 4097), 40, next_n=3, heads=heads, dim=dim, shuffled=twice)
            yield of_pages, with_blocks(pages, blocks, granularity, twice)
            yield of_rows, with_blocks(ragged_case(70, heads, 5000, dim=dim), blocks, granularity, twice)


@pytest.mark.parametrize(("op", "case"), cases_of_blocks(), ids=kit.case_id)
def test_logits_in_blocks_have_the_portable_bits(op: Op, case: Case) -> None:
    arguments = kit.torch_inputs(op, kit.make(case), "cuda")
    got, want = (getattr(TORCH_OPS, op.name)(*arguments, **case.attrs, implementation=by) for by in ("gluon", "triton"))
    for name, mine, other in zip(op.outputs, got, want, strict=True):
        kit.assert_bits_equal(name, mine, other)


@pytest.mark.parametrize("rows", ["all", "causal", "apart", "anything"])
@pytest.mark.parametrize(("granularity", "newest"), [(8, 1), (4, 0), (64, 2)])
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "dim"),
    [(5, 32, 300, 64), (33, 40, 4097, 128), (20, 16, 1025, 32), (257, 64, 9000, 128)],
)
def test_blocks_are_those_of_stored_logits(
    tokens: int, heads: int, keys: int, dim: int, granularity: int, newest: int, rows: str
) -> None:
    """Some keys are NaN, some blocks of nothing else."""
    inputs = rows_of(ragged(tokens, heads, keys, dim), rows)
    inputs["key_scales"][::7] = inputs["key_scales"][keys // 3 : keys // 2] = np.nan
    arguments = kit.torch_inputs(registry()["indexer_blocks"], inputs, "cuda")
    attrs = {"k": keys // granularity // 3 + 1, "granularity": granularity, "newest": newest}
    maxima = torch_api.indexer_blocks(*arguments, **attrs, implementation="gluon")
    kit.assert_bits_equal("indices", maxima, torch_api.indexer_blocks(*arguments, **attrs, implementation="triton"))


@pytest.mark.parametrize("heads", [3, 16, 32, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("entries", [64, 192])
@pytest.mark.parametrize("contexts", [(1, 63, 64, 65), (127, 0, 128, 129, 191, 320), (3000, 700)])
def test_tile_edges_of_pages(contexts: tuple[int, ...], entries: int, next_n: int, heads: int) -> None:
    """What no length reaches is NaN in the pool; pages are shuffled."""
    case = make_case(contexts, entries, next_n=next_n, heads=heads, padding=132 * 4)
    agrees(PAGED, kit.make(case), {"max_len": None})


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("max_len", [None, 100, 129])
def test_pages_that_are_not_there(dim: int, max_len: int | None) -> None:
    case = make_case((500, 64, 300), 64, next_n=2, dim=dim)
    inputs = kit.make(case)
    pages = inputs["cache"].shape[0]
    inputs["block_table"][0, [0, 3, 4]] = [-1, pages, -(2**31)]
    inputs["block_table"][2, 1] = 2**31 - 1
    agrees(PAGED, inputs, {"max_len": max_len})
    inputs["request_ids"] = np.array([2, 0, 3, -1, 1, 2**31 - 1], np.int32)
    agrees(PAGED, inputs, {"max_len": max_len})


def test_when_every_multiprocessor_has_several_programs() -> None:
    rng = np.random.default_rng(0)
    for next_n in (1, 2, 4):
        case = make_case(tuple(rng.integers(1, 6000, 40)), 64, next_n=next_n)
        agrees(PAGED, kit.make(case), {"max_len": None})


@pytest.mark.parametrize("op", [RAGGED, PAGED], ids=kit.case_id)
def test_garbage_integers_give_the_reference(op: Op) -> None:
    @given(garbage_inputs(op).filter(lambda drawn: supported(op, *drawn)))
    @settings(max_examples=30)
    def check(drawn: tuple[Arrays, dict[str, object]]) -> None:
        agrees(op, *drawn)

    check()


@by_case
def test_jax_gives_the_same_bits(op: Op, case: Case) -> None:
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    attrs = kit.attributes(op, case)
    step = jax.jit(lambda *arrays: getattr(JAX_OPS, op.name)(*arrays, **attrs, implementation="gluon"))
    where = kit.written(op, op.reference(**inputs, **attrs))
    kit.assert_bits_equal("logits", logits(op, inputs, attrs), step(*kit.jax_inputs(op, inputs)), where)


@pytest.mark.parametrize("op", [RAGGED, PAGED], ids=kit.case_id)
def test_repeated_calls_and_graph_replays_give_the_same_bits(op: Op) -> None:
    arrays = ragged(257, 64, 9000, 128) if op is RAGGED else kit.make(make_case((3000, 70, 900), 64, next_n=4))
    inputs = kit.torch_inputs(op, arrays, "cuda")
    function = getattr(TORCH_OPS, op.name)
    want = logits(op, arrays, {})
    again, captured = torch.full_like(want, UNWRITTEN), torch.full_like(want, UNWRITTEN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*inputs, implementation="gluon", out=captured)
    for _ in range(20):
        function(*inputs, implementation="gluon", out=again)
        graph.replay()
        kit.assert_bits_equal("logits", want, again)
        kit.assert_bits_equal("logits", want, captured)
