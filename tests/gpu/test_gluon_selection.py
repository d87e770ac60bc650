"""Hopper's selection of many rows: the portable kernels' indices, whatever the rows are."""

from collections.abc import Callable

import jax
import kit
import pytest
import torch
from hopper import NEEDS_INLINE_PTX, ON_HOPPER

from xmla import interop, jax_api, torch_api

pytestmark = [*ON_HOPPER, NEEDS_INLINE_PTX]

K, SMS = 2048, 132
Rows = Callable[[torch.Tensor], torch.Tensor]


def with_specials(x: torch.Tensor) -> torch.Tensor:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, -1e-45], device=x.device)
    return torch.where(torch.rand_like(x) < 0.6, special[torch.randint(0, 7, x.shape, device=x.device)], x)


def with_ties_at_the_bound(x: torch.Tensor) -> torch.Tensor:
    """Some 1500 above thousands that are equal, of which the k-th is one."""
    part = torch.rand_like(x) * x.shape[1]
    return torch.where(part < 1500, 2.0 + part, torch.where(part < 8000, 1.0, -1.0 - x.abs()))


def misleading(x: torch.Tensor) -> torch.Tensor:
    """The elements that a sample of one in 8 sees are the largest of every other row, the least of the rest."""
    block = torch.arange(x.shape[1] // 256, device=x.device)
    seen = (((block * 8 + block * 5 % 8) * 32)[:, None] + torch.arange(32, device=x.device)).ravel()
    x[::2, seen] += 1000
    x[1::2, seen] -= 1000
    return x


KINDS: dict[str, Rows] = {
    "normal": lambda x: x,
    "uniform": torch.rand_like,
    "far from zero": lambda x: x + 100,
    "constant": torch.ones_like,
    "ascending": lambda x: x.sort(1)[0],
    "descending": lambda x: x.sort(1, descending=True)[0],
    "one coarse bin": lambda x: 1 + torch.rand_like(x) * 2**-11,
    "ties": lambda x: (x * 4).round() / 4,
    "two values": lambda x: (torch.rand_like(x) < 0.05).float(),
    "ties at the bound": with_ties_at_the_bound,
    "specials": with_specials,
    "NaN but a few": lambda x: torch.where(torch.rand_like(x) < 0.99, float("nan"), x),
    "steep": lambda x: x.sign() * torch.exp(4 * x**2),
    "misleading": misleading,
    "recent ones": lambda x: x + torch.linspace(0, 6, x.shape[1], device=x.device),
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def rows_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(columns)
    torch.manual_seed(columns)
    return KINDS[kind](torch.randn(rows, columns, device="cuda", generator=generator))


def whole(logits: torch.Tensor) -> torch.Tensor:
    return torch.full(logits.shape[:1], logits.shape[1], device="cuda", dtype=torch.int32)


def agrees(logits: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor | None = None, k: int = K) -> torch.Tensor:
    """The portable kernels' indices, by the kernel that is asked for and by the one that the call takes of itself."""
    by_list = {"k": k, "implementation": "gluon_sm90"}
    plan = torch_api.select_topk.plan(logits, ends, starts, **by_list)
    assert [launch.name for launch in plan.launches] == ["topk_rows_sm90_kernel"]
    want = torch_api.select_topk(logits, ends, starts, k=k, implementation="triton")
    got = torch_api.select_topk(logits, ends, starts, **by_list)
    kit.assert_bits_equal("indices", got, want)
    kit.assert_bits_equal("indices", torch_api.select_topk(logits, ends, starts, k=k), want)
    return got


@by_kind
@pytest.mark.parametrize("columns", [2500, 33001, 65536, 131072])
def test_any_values_are_selected_exactly(kind: str, columns: int) -> None:
    """And as a stable sort does, which puts NaN first."""
    logits = rows_of(kind, SMS + 8 if columns <= 65536 else 8 * SMS + 1, columns)
    got = agrees(logits, whole(logits))
    few = torch.where(logits[:SMS] == 0, 0.0, logits[:SMS])
    if not few.isnan().any():
        order = torch.sort(few, dim=1, descending=True, stable=True)[1]
        kit.assert_bits_equal("indices", got[:SMS], order[:, :K].sort(1)[0].int())


def some_ranges(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends and starts of ranges: some are whole, empty, of k columns, or have bounds outside of the row."""
    generator = torch.Generator("cuda").manual_seed(1)
    starts, ends = (
        torch.randint(-5, columns + 5, (rows,), device="cuda", dtype=torch.int32, generator=generator) for _ in range(2)
    )
    ends[::3], starts[::6] = columns, 0
    ends[1], starts[1] = starts[1].clamp(0, columns - K - 1) + K, starts[1].clamp(0, columns - K - 1)
    ends[2], starts[2], ends[4], starts[4] = -(2**31), 2**31 - 1, 2**31 - 1, -(2**31)
    return ends, starts


@by_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_of_rows_that_begin_anywhere(kind: str, dtype: torch.dtype) -> None:
    """What is outside of a range is NaN, and rows are no multiple of 16 bytes apart."""
    rows, columns = SMS + 68, 33001
    ends, starts = some_ranges(rows, columns)
    column = torch.arange(columns, device="cuda")
    wide = torch.full((rows, columns + 2), float("nan"), device="cuda")
    outside = (column < starts[:, None]) | (column >= ends[:, None])
    wide[:, :columns] = torch.where(outside, float("nan"), rows_of(kind, rows, columns))
    logits = wide.to(dtype)[:, :columns]
    got = agrees(logits, ends, starts)
    length = (ends.clamp(0, columns) - starts.clamp(0, columns)).clamp(0, None)
    assert ((got >= 0).sum(1) == length.clamp(max=K)).all() and (got < length[:, None].clamp(min=1)).all()
    agrees(logits, ends)
    agrees(logits[1:, 1:], ends[1:])


@pytest.mark.parametrize("k", [1, 2, 31, 512, 1025, 2047])
def test_any_k(k: int) -> None:
    for columns in (4097, 33001):
        agrees(
            rows_of("ties", SMS + 1, columns), torch.full((SMS + 1,), columns, device="cuda", dtype=torch.int32), k=k
        )


@by_kind
def test_repeated_calls_and_graph_replays_give_the_same_indices(kind: str) -> None:
    """Though candidates come in another order each time."""
    logits = rows_of(kind, 4 * SMS, 16384)
    ends = whole(logits)
    want, captured = agrees(logits, ends), torch.zeros(len(logits), K, device="cuda", dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_api.select_topk(logits, ends, k=K, out=captured)
    for _ in range(20):
        graph.replay()
        kit.assert_bits_equal("indices", want, torch_api.select_topk(logits, ends, k=K))
        kit.assert_bits_equal("indices", want, captured)


def test_jax_gives_the_same_indices() -> None:
    logits = rows_of("ties at the bound", SMS + 8, 9001)
    ends, starts = some_ranges(*logits.shape)
    select = jax.jit(lambda *arrays: jax_api.select_topk(*arrays, k=K, implementation="gluon_sm90"))
    got = select(*map(kit.torch_to_jax, (logits, ends, starts)))
    kit.assert_bits_equal("indices", agrees(logits, ends, starts), interop.to_torch(got))


@pytest.mark.parametrize("workspace_bytes", [1 << 30, 24 << 20])
def test_a_prefill_of_the_indexer_selects_by_it(workspace_bytes: int) -> None:
    """Whole and in parts."""
    tokens, keys = 700, 12000
    q8 = torch.randn(tokens, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights, scales = torch.randn(tokens, 64, device="cuda"), torch.rand(keys, device="cuda") + 0.1
    ends = torch.arange(keys - tokens + 1, keys + 1, device="cuda", dtype=torch.int32)
    arrays = q8, weights, torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn), scales, 0 * ends, ends
    attrs = {"k": K, "workspace_bytes": workspace_bytes}
    plan = torch_api.indexer_topk.plan(*arrays, **attrs)
    names = {launch.name for launch in plan.launches}
    assert names == {"indexer_logits_sm90_kernel", "topk_rows_sm90_kernel"}
    want = torch_api.indexer_topk(*arrays, **attrs, implementation="triton")
    kit.assert_bits_equal("indices", torch_api.indexer_topk(*arrays, **attrs), want)
