"""FlashMLA's correctness shapes for V4 decode at its own tolerances; and its two documented hazards absent.

Shapes, data and tolerances as in test_flash_mla.py. Entries that no index refers to are NaN, among them those behind
valid indices past a row's length.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_flash_mla import DECODE_LSE, DECODE_OUT, MAIN, attention, check, make_sink, padded

from xmla import torch_api
from xmla.core.formats.mla import V4
from xmla.core.values import cdiv

pytestmark = pytest.mark.gpu

SCALE = 512**-0.55
# Each of the main shapes beside another one as the second source, every one of them once.
EXTRA = [MAIN[(3 * place + 1) % len(MAIN)] for place in range(len(MAIN))]


@dataclass
class Source:
    """A cache, slots into it, a length per request, and the entries that are attended to, of which alone are no NaN."""

    cache: torch.Tensor  # [P, R, 584]
    slots: torch.Tensor  # [T, K]
    lengths: torch.Tensor  # [T]
    rows: torch.Tensor  # [P·R, 512] float32

    def attended(self) -> torch.Tensor:
        """Slots, and −1 where there is no key."""
        place = torch.arange(self.slots.shape[1], device="cuda")
        ok = (place < self.lengths[:, None]) & (self.slots >= 0) & (self.slots < len(self.rows))
        return torch.where(ok, self.slots, -1)


def empty_pool(pages: int, entries: int) -> torch.Tensor:
    """NaN everywhere, pages as FlashMLA wants them: on multiples of 576 bytes, here one multiple further apart."""
    page_bytes = (cdiv(entries * V4.row, V4.page_multiple) + 1) * V4.page_multiple
    pool = torch.full((pages, page_bytes), 255, device="cuda", dtype=torch.uint8)
    return pool[:, : entries * V4.row].view(pages, entries, V4.row)


def fill(cache: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Write keys at the slots `used`; all entries as float32."""
    values = (torch.randn(len(used), 512, device="cuda") / 10).clamp(-1, 1).bfloat16()
    torch_api.write_mla_cache(values[:, : V4.latent].contiguous(), values[:, V4.latent :].contiguous(), used, cache)
    every = torch.arange(cache.shape[0] * cache.shape[1], device="cuda", dtype=torch.int32)
    return torch_api.read_mla_cache(cache, every, dtype="float32")


def source(shape: tuple[int, int, int], requests: int, s_q: int, lengths: torch.Tensor | None = None) -> Source:
    s_k, topk, page = shape
    tokens = requests * s_q
    pages = cdiv(requests * s_k, page)
    order = torch.randperm(pages * page, device="cuda", dtype=torch.int32)[: requests * s_k].view(requests, s_k)
    picks = torch.rand(tokens, max(s_k, topk), device="cuda").argsort(1)[:, :topk]
    owner = torch.arange(tokens, device="cuda") // s_q
    slots = torch.where(picks < s_k, order[owner[:, None], picks.clamp(max=s_k - 1)], -1).to(torch.int32)
    if lengths is None:
        lengths = torch.full((requests,), topk, device="cuda", dtype=torch.int32)
    made = Source(empty_pool(pages, page), slots, lengths.repeat_interleave(s_q), torch.empty(pages * page, 0))
    made.rows = fill(made.cache, made.attended()[made.attended() >= 0].unique())
    return made


def both(
    q: torch.Tensor, sources: list[Source], sink: torch.Tensor | None, with_lengths: bool, **attrs: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Ours, and float64 attention over the entries of all sources as one list."""
    given: list[torch.Tensor | None] = []
    for part in sources:
        given += [part.cache, padded(part.slots), part.lengths if with_lengths else None]
    ours = torch_api.sparse_mla(q, *given[:3], sink, *given[3:], softmax_scale=SCALE, **attrs)
    rows = torch.cat([part.rows for part in sources])
    starts = [0, len(sources[0].rows)]
    merged = [torch.where(part.attended() >= 0, part.attended() + start, -1)
              for part, start in zip(sources, starts, strict=False)]  # fmt: skip
    slots = torch.cat(merged, dim=1)
    everything = torch.full((len(q),), slots.shape[1], device="cuda")
    no_sink = torch.full((q.shape[1],), -math.inf, device="cuda")
    want = attention(q, rows, slots, everything, no_sink if sink is None else sink, SCALE)
    return ours, want


def flash_mla(q: torch.Tensor, sources: list[Source], sink: torch.Tensor | None, requests: int) -> Any:
    """FlashMLA on the same arguments, with both lengths."""
    package = pytest.importorskip("flash_mla", reason="FlashMLA's wheel is not installed")
    schedule, _ = package.get_mla_metadata()
    a_request = lambda t: t.view(requests, -1, *t.shape[1:])
    more = {}
    if len(sources) > 1:
        more = {
            "extra_k_cache": sources[1].cache.unsqueeze(2), "extra_indices_in_kvcache": a_request(sources[1].slots),
            "extra_topk_length": a_request(sources[1].lengths)[:, 0].contiguous(),
        }  # fmt: skip
    out, lse = package.flash_mla_with_kvcache(
        a_request(q.contiguous()), sources[0].cache.unsqueeze(2), None, None, 512, schedule, softmax_scale=SCALE,
        is_fp8_kvcache=True, indices=a_request(sources[0].slots), attn_sink=sink, use_legacy=True,
        topk_length=a_request(sources[0].lengths)[:, 0].contiguous(), **more,
    )  # fmt: skip
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def query(tokens: int, heads: int) -> torch.Tensor:
    return padded(torch.randn(tokens, heads, 512, device="cuda").clamp(-1, 1).bfloat16())


def random_lengths(requests: int, topk: int) -> torch.Tensor:
    return torch.randint(0, topk + 1, (requests,), device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("requests", [4, 74, 321])
@pytest.mark.parametrize(("main", "extra"), zip(MAIN, EXTRA, strict=True))
def test_two_sources(
    main: tuple[int, int, int], extra: tuple[int, int, int], requests: int, s_q: int, heads: int, with_lengths: bool,
    implementation: str,
) -> None:  # fmt: skip
    torch.manual_seed(sum(main) + sum(extra) + requests + s_q + heads)
    sources = []
    for shape in (main, extra):
        lengths = random_lengths(requests, shape[1]) if with_lengths else None
        sources.append(source(shape, requests, s_q, lengths))
    got, want = both(
        query(requests * s_q, heads), sources, make_sink(heads), with_lengths, implementation=implementation
    )
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("requests", [4, 321])
@pytest.mark.parametrize("shape", MAIN)
def test_one_source(shape: tuple[int, int, int], requests: int, heads: int, implementation: str) -> None:
    torch.manual_seed(sum(shape) + requests + heads)
    made = [source(shape, requests, 3, random_lengths(requests, shape[1]))]
    got, want = both(query(requests * 3, heads), made, make_sink(heads), True, implementation=implementation)
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("implementation", ["triton", "gluon"])
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("shape", [(512, 64, 61), (650, 576, 53)])
@pytest.mark.parametrize("corner", ["all invalid", "zero lengths"])
def test_corners(
    corner: str, shape: tuple[int, int, int], heads: int, with_sink: bool, with_extra: bool, implementation: str
) -> None:
    torch.manual_seed(0)
    requests, s_q = 74, 3
    sources = []
    for _ in range(1 + with_extra):
        some = torch.where(torch.rand(requests, device="cuda") < 0.5, 0, random_lengths(requests, shape[1]))
        sources.append(source(shape, requests, s_q, some.to(torch.int32) if corner == "zero lengths" else None))
        if corner == "all invalid":
            sources[-1].slots[:] = -1
    sink = make_sink(heads) if with_sink else None
    got, want = both(query(requests * s_q, heads), sources, sink, True, implementation=implementation)
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)
    if corner == "all invalid":
        assert not got[0].any() and (got[1] == -math.inf).all()


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("requests", [2, 74])
def test_flash_mla_passes_the_same_comparison(requests: int, heads: int, with_extra: bool) -> None:
    """Both lengths, sinks and page sizes of V4's layers; past a length FlashMLA gets no key that is NaN."""
    torch.manual_seed(0)
    shapes = [(16384, 128, 256), (1024, 512, 64)][: 1 + with_extra]
    sources = [source(shape, requests, 2, random_lengths(requests, shape[1])) for shape in shapes]
    for part in sources:
        part.slots = part.attended().contiguous()
    q, sink = query(requests * 2, heads), make_sink(heads)
    ours, want = both(q, sources, sink, with_lengths=True, empty_lse="+inf")
    want[1][want[1] == -math.inf] = math.inf
    for name, got in (("FlashMLA", flash_mla(q, sources, sink, requests)), ("xmla", ours)):
        check(f"{name} out", got[0], want[0], DECODE_OUT)
        check(f"{name} lse", got[1], want[1], DECODE_LSE)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_broken_key_behind_a_valid_slot_past_the_length(heads: int) -> None:
    """FlashMLA's documented hazard: a key of NaN that a valid index past the length names may reach the result."""
    torch.manual_seed(0)
    requests, s_q = 8, 2
    sources = [source((512, 64, 64), requests, s_q, random_lengths(requests, 64)) for _ in range(2)]
    q, sink = query(requests * s_q, heads), make_sink(heads)
    for part in sources:
        broken = part.rows.isnan().all(1).nonzero().squeeze(1).to(torch.int32)
        past = torch.arange(part.slots.shape[1], device="cuda") >= part.lengths[:, None]
        assert past.any() and len(broken) > 64
        part.slots[past] = broken[torch.randint(len(broken), (int(past.sum()),), device="cuda")]
    got, want = both(q, sources, sink, with_lengths=True)
    check("out", got[0], want[0], DECODE_OUT)
    check("lse", got[1], want[1], DECODE_LSE)


class _Property(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device."""

    _fields_ = (("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("metadata", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8))  # fmt: skip


class _Memory:
    """Three granules of addresses of which the middle one is mapped to nothing."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device = torch.cuda.current_device()
        prop = _Property(1, 0, (ctypes.c_int * 2)(1, device), None, (ctypes.c_ubyte * 8)())
        granule = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(prop), ctypes.c_int(0))
        self.granule = granule.value
        base = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(base), self._size(3), self._size(0), ctypes.c_uint64(0),
                   ctypes.c_uint64(0))  # fmt: skip
        self.base, self.handles = base.value, {}
        access = (ctypes.c_int * 3)(1, device, 3)  # the device may read and write
        for place in (0, 2):
            handle = ctypes.c_uint64()
            address = ctypes.c_uint64(self.base + place * self.granule)
            self._call("cuMemCreate", ctypes.byref(handle), self._size(1), ctypes.byref(prop), ctypes.c_uint64(0))
            self._call("cuMemMap", address, self._size(1), self._size(0), handle, ctypes.c_uint64(0))
            self._call("cuMemSetAccess", address, self._size(1), ctypes.byref(access), ctypes.c_size_t(1))
            self.handles[place] = handle
        self.__cuda_array_interface__ = {
            "shape": (3 * self.granule,), "typestr": "|u1", "data": (self.base, False), "version": 3,
        }  # fmt: skip

    def _size(self, granules: int) -> ctypes.c_size_t:
        return ctypes.c_size_t(granules * self.granule)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self.driver, name)(*arguments)
        assert error == 0, f"{name}: CUDA error {error}"

    def release(self) -> None:
        torch.cuda.synchronize()
        for place, handle in self.handles.items():
            self._call("cuMemUnmap", ctypes.c_uint64(self.base + place * self.granule), self._size(1))
            self._call("cuMemRelease", handle)
        self._call("cuMemAddressFree", ctypes.c_uint64(self.base), self._size(3))


@pytest.mark.parametrize("heads", [16, 128])
def test_only_what_is_referred_to_has_to_be_mapped(heads: int) -> None:
    """FlashMLA's other documented hazard: every byte of its pool must be there. Here a third of the pool is not."""
    torch.manual_seed(0)
    memory = _Memory()
    flat = torch.as_tensor(memory, device="cuda")
    entries = 64
    cache = flat.as_strided((3, entries, V4.row), (memory.granule, V4.row, 1))
    slots = torch.cat([torch.randperm(entries, device="cuda"), torch.randperm(entries, device="cuda") + 2 * entries])
    slots = torch.stack([slots, slots.roll(17), torch.where(slots % 3 == 0, -1, slots)]).to(torch.int32)
    lengths = torch.tensor([128, 90, 77], device="cuda", dtype=torch.int32)
    slots[1, 90:] = entries  # in the hole, past the length
    used = slots[0]
    values = torch.randn(len(used), 512, device="cuda").bfloat16()
    copy = empty_pool(3, entries)
    for pool in (cache, copy):
        torch_api.write_mla_cache(values[:, : V4.latent].contiguous(), values[:, V4.latent :].contiguous(), used, pool)
    q, sink = query(3, heads), make_sink(heads)
    got = torch_api.sparse_mla(q, cache, slots, lengths, sink, cache, slots, lengths, softmax_scale=SCALE)
    want = torch_api.sparse_mla(q, copy, slots, lengths, sink, copy, slots, lengths, softmax_scale=SCALE)
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    memory.release()
