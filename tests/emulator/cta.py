"""A CTA: its shared memory, mbarriers, asynchronous copies and products, and the partitions of its warps.

Partitions are threads of which one runs at a time. Which one goes on after an mbarrier was waited for or arrived at is
drawn, and so is when the arrivals of copies and commits come. What must not depend on that is checked in any case, by
vector clocks: each partition has an actor for what its warps do themselves, one for its asynchronous copies and one for
its products (wgmma, tcgen05), and each access of shared or tensor memory is a step of one. A clock has the last step of
each actor that is known to have happened: arrivals hand it over, waits take it. An access beside one that is not known
is a `Fault`: a read before a copy has landed, a write to what a product may still read. So a copy's bytes can be in
place from the start, and a product can be computed when it is issued. Products of tcgen05 follow each other, and a
commit hands over the last of them, nothing that the warps have done.

A second clock has the steps before the last proxy fence, for products read shared memory by the asynchronous proxy.
Warps of one partition are taken for ordered: the compiler puts barriers between their accesses of shared memory.

A program of several CTAs, a cluster, is one `Cta` whose shared memory is that of all. What is stored is the own part of
each CTA. A load whose layout divides an array otherwise than its memory is, reads the parts of others: all CTAs have to
meet, at a barrier of the cluster, between that and what is written there before and after.
"""

import sys
import threading
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

from emulator.tensors import NUMPY, Tensor, tensor

MOST_PARTITIONS = 4
WARPS, COPIES, PRODUCTS = range(3)  # kinds of actors
ACTORS = 3 * MOST_PARTITIONS
NEVER = 2**30  # the step of a write that nobody made
BYTES = 256 << 10
GRANULE = 4  # bytes of which accesses are known together; of tensor memory the rows of a column are
COLUMNS = 4096  # of tensor memory in each of the buffers and tensors of a program
FOLDER = str(Path(__file__).parent)


class Fault(Exception):
    """What would be undefined, or not end, on a GPU."""


class _Stopped(BaseException):
    """Ends the other partitions after a fault in one."""


def place() -> str:
    """The line of the kernel that is running."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def divisions(layout: Any) -> list[list[int]]:
    """How a layout divides a tensor among CTAs: the axis that each bit of a CTA's number is of."""
    if isinstance(layout, gl.SliceLayout):
        return [[*vector[: layout.dim], *vector[layout.dim + 1 :]] for vector in divisions(layout.parent)]
    return list(getattr(layout, "cga_layout", None) or ())


@cache
def bases(layout: Any, shape: tuple[int, ...]) -> Any:
    """A layout as Triton's linear layout."""
    if isinstance(layout, gl.DistributedLinearLayout | gl.SharedLinearLayout):
        return layout
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    module = builder.create_module()
    module.set_attr("ttg.num-warps", builder.get_int32_attr(4))
    module.set_attr("ttg.num-ctas", builder.get_int32_attr(2 ** len(divisions(layout))))
    return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def combinations(vectors: Sequence[Sequence[int]], shape: tuple[int, ...]) -> np.ndarray:
    """The flat index that each number has in a linear layout; `vectors` are those of the number's bits."""
    steps = [int(x) for x in np.cumprod([1, *shape[:0:-1]])[::-1]]
    flat = np.zeros(1, np.int64)
    for vector in vectors:
        flat = np.concatenate([flat, flat ^ sum(v * step for v, step in zip(vector, steps, strict=True))])
    return flat


@cache
def offsets(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The place of each element in shared memory, in elements; axes before the layout's are of buffers in order."""
    if isinstance(layout, gl.SharedLinearLayout):
        rank = len(layout.offset_bases[0])
    else:
        rank = layout.rank if hasattr(layout, "rank") else len(layout.order)
    inner = shape[len(shape) - rank :]
    vectors = divisions(layout)  # the parts of a cluster's CTAs are one behind the other
    if np.prod(inner) > 2 ** len(vectors):
        linear = bases(layout, inner)
        vectors = [*linear.offset_bases, *linear.block_bases]
    flat = combinations(vectors, inner)
    places = np.empty(len(flat), np.int64)
    places[flat] = np.arange(len(flat))
    outer = shape[: len(shape) - len(inner)]
    starts = np.arange(np.prod(outer, dtype=np.int64)) * len(flat)
    return (starts[:, None] + places).reshape(shape)


class Shared:
    """A descriptor of shared memory: `elements` are the places of its elements, in elements from the start."""

    def __init__(self, cta: "Cta", dtype: Any, elements: np.ndarray, layout: Any) -> None:
        self.cta, self.dtype, self.elements, self.layout = cta, dtype, elements, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    def _view(self, elements: np.ndarray) -> "Shared":
        return Shared(self.cta, self.dtype, elements, self.layout)

    def index(self, i: Any) -> "Shared":
        i = int(tensor(i).data)
        if not 0 <= i < self.shape[0]:
            raise Fault(f"{place()}: index {i} of {self.shape[0]} buffers")
        return self._view(self.elements[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(self.elements.take(range(start, start + length), dim))

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._view(self.elements.transpose(order))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return self._view(self.elements.reshape(shape))

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        ours, theirs = NUMPY[self.dtype].itemsize, NUMPY[dtype].itemsize
        first = int(self.elements.min()) * ours
        places = offsets(layout, tuple(shape))
        if (places.max() + 1) * theirs > (int(self.elements.max()) + 1) * ours - first or first % theirs:
            raise Fault(f"{place()}: {dtype}{list(shape)} in the place of {self.dtype}{list(self.shape)}")
        return Shared(self.cta, dtype, places + first // theirs, layout)

    @property
    def granules(self) -> Any:
        """The granules that the elements touch, as an index."""
        size = NUMPY[self.dtype].itemsize
        first, last = int(self.elements.min()) * size, (int(self.elements.max()) + 1) * size
        if last - first == self.elements.size * size:
            return slice(first // GRANULE, -(-last // GRANULE))
        return np.unique(self.elements * size // GRANULE)

    @property
    def values(self) -> np.ndarray:
        return self.cta.memory.view(NUMPY[self.dtype])[self.elements]

    def put(self, values: np.ndarray) -> None:
        self.cta.memory.view(NUMPY[self.dtype])[self.elements] = values

    def load(self, layout: Any) -> Tensor:
        me = self.cta.partition
        self.cta.read(self, *me.step(WARPS))
        if divisions(layout) != divisions(self.layout):
            self.cta.read_of_others(self)
        return Tensor(self.values, self.dtype, layout)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Fault(f"{place()}: {value.dtype}{value.shape} stored to {self.dtype}{self.shape}")
        me = self.cta.partition
        self.cta.write(self, *me.step(WARPS))
        self.put(value.data)

    def _keep_alive(self) -> None:
        """Memory is not used twice here."""

    def scatter(self, values: Tensor, indices: Tensor, axis: int) -> None:
        if self.elements.ndim > 1:
            raise NotImplementedError("values scattered along one of several axes")
        if values.shape != indices.shape or values.dtype != self.dtype:
            raise Fault(f"{place()}: {values.dtype}{values.shape} scattered by {indices.shape} to {self.dtype}")
        outside = (indices.data < 0) | (indices.data >= len(self.elements))
        if outside.any():
            raise Fault(f"{place()}: element {indices.data[outside][0]} of {len(self.elements)} is scattered to")
        self.cta.write(self, *self.cta.partition.step(WARPS))
        self.cta.memory.view(NUMPY[self.dtype])[self.elements[indices.data]] = values.data

    def gather(self, indices: Tensor, axis: int) -> Tensor:
        self.cta.read(self, *self.cta.partition.step(WARPS))
        return Tensor(self.cta.memory.view(NUMPY[self.dtype])[self._at(indices, axis, True)], self.dtype)

    def atomic_scatter_add(self, values: Tensor, indices: Tensor, axis: int, mask: Tensor | None = None) -> None:
        self._combine(np.add, values, indices, axis, mask)

    def atomic_scatter_max(self, values: Tensor, indices: Tensor, axis: int, mask: Tensor | None = None) -> None:
        self._combine(np.maximum, values, indices, axis, mask)

    def atomic_scatter_or(self, values: Tensor, indices: Tensor, axis: int, mask: Tensor | None = None) -> None:
        self._combine(np.bitwise_or, values, indices, axis, mask)

    def _combine(self, operation: np.ufunc, values: Tensor, indices: Tensor, axis: int, mask: Tensor | None) -> None:
        """Combine elements with values, in any order; nobody asks for what they were."""
        step = self.cta.partition.step(WARPS)
        self.cta.read(self, *step)
        self.cta.write(self, *step)
        wanted = np.ones(indices.shape, bool) if mask is None else mask.data
        where = self._at(indices, axis, wanted)[wanted]
        operation.at(self.cta.memory.view(NUMPY[self.dtype]), where, values.data[wanted])

    def _at(self, indices: Tensor, axis: int, wanted: Any) -> np.ndarray:
        """The places of elements along an axis; those that are not wanted are any."""
        count = self.shape[axis]
        outside = ((indices.data < 0) | (indices.data >= count)) & wanted
        if outside.any():
            raise Fault(f"{place()}: element {indices.data[outside][0]} of {count}")
        where = list(np.indices(indices.shape, sparse=True))
        where[axis] = np.clip(indices.data, 0, count - 1)
        return self.elements[tuple(where)]

    @property
    def address(self) -> int:
        return int(self.elements.min()) * NUMPY[self.dtype].itemsize


class Words:
    """The shared memory that a piece of PTX is given: 32-bit words of the descriptors among its operands."""

    def __init__(self, cta: "Cta", given: Sequence[Shared]) -> None:
        self.cta, self.given, self.memory = cta, given, cta.memory.view(np.uint32)

    def fence(self) -> None:
        self.cta.fenced = True

    def _check(self, addresses: np.ndarray) -> np.ndarray:
        inside = np.zeros(addresses.shape, bool)
        for each in self.given:
            inside |= (addresses >= each.address) & (
                addresses < each.address + each.elements.size * NUMPY[each.dtype].itemsize
            )
        if not inside.all() or (addresses % 4).any():
            raise Fault(f"{place()}: PTX accesses shared memory that it is not given")
        return addresses // 4

    def put(self, addresses: np.ndarray, words: np.ndarray) -> None:
        self.memory[self._check(addresses)] = words

    def add(self, addresses: np.ndarray, words: np.ndarray) -> np.ndarray:
        old = np.empty_like(words)
        for i, (at, word) in enumerate(zip(self._check(addresses), words, strict=True)):
            old[i], self.memory[at] = self.memory[at], self.memory[at] + word
        return old


class TensorMemory:
    """A descriptor of tensor memory: a view of its values, and the granules of its columns."""

    def __init__(self, cta: "Cta", dtype: Any, values: np.ndarray, granules: np.ndarray) -> None:
        self.cta, self.dtype, self.values, self.columns = cta, dtype, values, granules

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def granules(self) -> np.ndarray:
        return self.columns.reshape(-1)

    def index(self, i: Any) -> "TensorMemory":
        i = int(tensor(i).data)
        if not 0 <= i < self.shape[0]:
            raise Fault(f"{place()}: index {i} of {self.shape[0]} buffers")
        return TensorMemory(self.cta, self.dtype, self.values[i], self.columns[i])

    def slice(self, start: int, length: int) -> "TensorMemory":
        part = slice(start, start + length)
        if start + length > self.shape[-1]:
            raise Fault(f"{place()}: columns to {start + length} of {self.shape[-1]}")
        return TensorMemory(self.cta, self.dtype, self.values[..., part], self.columns[..., part])

    def load(self, layout: Any) -> Tensor:
        self.cta.read(self, *self.cta.partition.step(WARPS))
        return Tensor(self.values.copy(), self.dtype)

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Fault(f"{place()}: {value.dtype}{value.shape} stored to {self.dtype}{self.shape}")
        self.cta.write(self, *self.cta.partition.step(WARPS))
        self.values[...] = value.data


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = 0
        self.phase = 0  # phases that are complete
        self.arriving = np.zeros((2, ACTORS), np.int64)  # clock and fenced clock of this phase's arrivals
        self.arrived = np.zeros((2, ACTORS), np.int64)  # of complete phases'

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int, clocks: np.ndarray) -> None:
        if not 0 < count <= self.pending:
            raise Fault(f"{place()}: {count} arrivals at a barrier that waits for {self.pending} of {self.count}")
        self.arriving = np.maximum(self.arriving, clocks)
        self.pending -= count
        if self.pending == 0:
            self.arrived = np.maximum(self.arrived, self.arriving)
            self.pending = self.count
            self.phase += 1

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Barriers:
    def __init__(self, batch: int) -> None:
        self.barriers = [Barrier() for _ in range(batch)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[tensor(i).data]


class Product:
    """The accumulator of an asynchronous product: to be waited for."""

    type = Tensor.type

    def __init__(self, result: Tensor, number: int) -> None:
        self.result, self.number = result, number


class Partition:
    """Warps that run one function: their clocks, copies and products."""

    def __init__(self, cta: "Cta", index: int, warps: int) -> None:
        self.cta, self.index, self.warps = cta, index, warps
        self.clocks = np.zeros((2, ACTORS), np.int64)  # steps that are known, and those of them before a fence
        self.groups: list[int] = []  # the last copy of each group
        self.counts = [0, 0, 0]  # steps of each kind of actor
        # How a thread waits for its turn.
        self.turn = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.waits_at = ""
        self.done = False
        self.error: BaseException | None = None

    def actor(self, kind: int) -> int:
        return 3 * self.index + kind

    def step(self, kind: int) -> tuple[int, int]:
        """The next step of one of the actors."""
        self.counts[kind] += 1
        if kind == WARPS:
            self.clocks[0, self.actor(WARPS)] = self.counts[WARPS]
        self.cta.places[self.actor(kind), self.counts[kind]] = place()
        return self.actor(kind), self.counts[kind]

    def know(self, kind: int, count: int) -> None:
        """Know the copies or products up to one."""
        actor = self.actor(kind)
        self.clocks[0, actor] = max(self.clocks[0, actor], count)

    def fence(self) -> None:
        self.clocks[1] = self.clocks[0]

    def load_async(self, smem: Shared, values: np.ndarray) -> None:
        self.cta.write(smem, *self.step(COPIES))
        smem.put(values)

    def commit_group(self) -> None:
        self.groups.append(self.counts[COPIES])

    def wait_group(self, outstanding: int) -> None:
        if len(self.groups) > outstanding:
            self.know(COPIES, self.groups[len(self.groups) - 1 - outstanding])

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.arrive(count, self.clocks)
        self.cta.yield_(None)

    def arrive_by_copies(self, barrier: Barrier) -> None:
        """An arrival of each thread once its copies so far have landed. What the thread has stored it does not tell."""
        clocks = np.zeros((2, ACTORS), np.int64)
        clocks[0, self.actor(COPIES)] = self.counts[COPIES]
        self.cta.arrivals.append(lambda: barrier.arrive(32 * self.warps, clocks))

    def wait(self, barrier: Barrier, parity: int) -> None:
        if barrier.count == 0:
            raise Fault(f"{place()}: waits for a barrier that is not initialised")
        self.cta.yield_(lambda: barrier.passed(parity))
        self.clocks = np.maximum(self.clocks, barrier.arrived)

    def multiply(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> Product:
        step = self.step(PRODUCTS)
        for operand in (a, b):
            if isinstance(operand, Shared):
                self.cta.read(operand, *step, by_proxy=True)
        left = (a.values if isinstance(a, Shared) else a.data).astype(np.float32)
        acc = acc.result if isinstance(acc, Product) else acc
        product = left @ b.values.astype(np.float32)
        return Product(Tensor(acc.data + product if use_acc else product, gl.float32, acc.layout), step[1])

    def multiply_in_order(self, a: Shared, b: Shared, acc: TensorMemory, use_acc: bool) -> None:
        """A product of tcgen05, which adds to what those before it have left in tensor memory."""
        step = self.step(PRODUCTS)
        for operand in (a, b):
            self.cta.read(operand, *step, by_proxy=True)
        if use_acc:
            self.cta.read(acc, *step, in_order=True)
        self.cta.write(acc, *step, in_order=True)
        product = a.values.astype(np.float32) @ b.values.astype(np.float32)
        acc.values[...] = acc.values + product if use_acc else product

    def commit_products(self, barrier: Barrier) -> None:
        """An arrival once the products so far have ended. What the warps have done it does not tell."""
        clocks = np.zeros((2, ACTORS), np.int64)
        clocks[0, self.actor(PRODUCTS)] = self.counts[PRODUCTS]
        self.cta.arrivals.append(lambda: barrier.arrive(1, clocks))

    def wait_products(self, outstanding: int, products: Sequence[Product]) -> tuple[Tensor, ...]:
        done = self.counts[PRODUCTS] - outstanding
        self.know(PRODUCTS, done)
        for product in products:
            if product.number > done:
                raise Fault(f"{place()}: the product of {self.cta.places[self.actor(PRODUCTS), product.number]} "
                            f"may still be under way with {outstanding} outstanding")  # fmt: skip
        return tuple(product.result for product in products)

    def end(self, clock: np.ndarray) -> None:
        """A CTA that has ended gives its shared memory back: of what is under way, nobody may be ignorant."""
        for kind, what in ((COPIES, "copy"), (PRODUCTS, "product")):
            if self.counts[kind] > clock[self.actor(kind)]:
                started = self.cta.places[self.actor(kind), self.counts[kind]]
                raise Fault(f"nothing waits for the {what} of {started}")


class Cta:
    """One program of a launch. `rng` draws the order of its partitions."""

    def __init__(self, program: int, programs: int, warps: int, rng: np.random.Generator, ctas: int = 1) -> None:
        self.program, self.programs, self.rng, self.ctas = program, programs, rng, ctas
        self.memory = np.full(BYTES * ctas, 0xFF, np.uint8)  # NaN in every float dtype
        self.end = 0
        self.columns = 0
        granules = BYTES * ctas // GRANULE + COLUMNS
        self.written_by = np.zeros(granules, np.int64)
        self.written_at = np.full(granules, NEVER, np.int64)
        self.read_at = np.zeros((ACTORS, granules), np.int32)
        self.meetings = 1  # of all CTAs of a cluster
        self.fenced = False  # whether what was written is there for the cluster, once all meet
        self.written_since = np.zeros(granules, np.int32)  # which meeting
        self.read_by_others_since = np.zeros(granules, np.int32)
        self.places: dict[tuple[int, int], str] = {}
        self.arrivals: list[Callable[[], None]] = []  # of copies, not yet delivered
        self.partition = Partition(self, 0, warps)  # the one that runs
        self.back: threading.Semaphore | None = None  # given by a partition that waits, once there are several
        self.stopped = False

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        size = NUMPY[dtype].itemsize
        places = offsets(layout, tuple(shape))
        first, self.end = self.end, self.end + -(-places.size * size // 1024) * 1024
        return Shared(self, dtype, places + first // size, layout)

    def allocate_tensor(self, dtype: Any, shape: Sequence[int]) -> TensorMemory:
        values = np.full((*shape, NUMPY[dtype].itemsize), 0xFF, np.uint8).view(NUMPY[dtype])[..., 0]
        of_rows = (*shape[:-2], shape[-1])
        first = BYTES * self.ctas // GRANULE + self.columns
        self.columns += int(np.prod(of_rows))
        return TensorMemory(self, dtype, values, np.arange(first, first + int(np.prod(of_rows))).reshape(of_rows))

    def _refuse(self, what: str, actor: int, step: int) -> None:
        other = self.places.get((actor, step))
        raise Fault(f"{place()}: {what} of {other}" if other else f"{place()}: reads what nobody has written")

    def _clocks(self, actor: int, step: int, in_order: bool) -> np.ndarray:
        """The partition's; an actor whose steps follow each other knows its own."""
        clocks = self.partition.clocks
        if in_order:
            clocks = clocks.copy()
            clocks[:, actor] = step
        return clocks

    def read(
        self, memory: Shared | TensorMemory, actor: int, step: int, by_proxy: bool = False, in_order: bool = False
    ) -> None:
        granules = memory.granules
        by, at = self.written_by[granules], self.written_at[granules]
        faults = "reads beside the write", "has no fence after the write"
        for clock, what in zip(self._clocks(actor, step, in_order), faults, strict=True):
            wrong = at > clock[by]
            if wrong.any():
                first = int(wrong.argmax())
                self._refuse(what, int(by[first]), int(at[first]))
            if not by_proxy:
                break
        self.read_at[actor, granules] = step

    def write(self, memory: Shared | TensorMemory, actor: int, step: int, in_order: bool = False) -> None:
        granules, clock = memory.granules, self._clocks(actor, step, in_order)[0]
        by, at = self.written_by[granules], self.written_at[granules]
        wrong = (at > clock[by]) & (at != NEVER)
        if wrong.any():
            first = int(wrong.argmax())
            self._refuse("writes beside the write", int(by[first]), int(at[first]))
        reads = self.read_at[:, granules]
        wrong = reads > clock[:, None]
        if wrong.any():
            reader, first = divmod(int(wrong.argmax()), wrong.shape[1])
            self._refuse("writes beside the read", reader, int(reads[reader, first]))
        if (self.read_by_others_since[granules] == self.meetings).any():
            raise Fault(f"{place()}: writes beside a read of other CTAs")
        self.fenced = False
        self.written_by[granules], self.written_at[granules] = actor, step
        self.written_since[granules] = self.meetings

    def meet(self) -> None:
        """A barrier of the cluster that orders nothing itself."""
        if not self.fenced:
            raise Fault(f"{place()}: CTAs meet without a fence after what they have written")
        self.meetings += 1

    def read_of_others(self, memory: Shared) -> None:
        """A read of the parts of other CTAs, beside that of one's own."""
        if (self.written_since[memory.granules] == self.meetings).any():
            raise Fault(f"{place()}: reads beside a write of other CTAs")
        self.read_by_others_since[memory.granules] = self.meetings

    def yield_(self, until: Callable[[], bool] | None) -> None:
        """Let other partitions run, at least until `until` holds."""
        if self.back is None:
            self._deliver()
            if until is not None and not until():
                raise Fault(f"{place()}: waits for ever")
            return
        me = self.partition
        me.until, me.waits_at = until, place()
        self.back.release()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped

    def _deliver(self) -> None:
        while self.arrivals:
            self.arrivals.pop(0)()

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: Sequence[int]) -> None:
        """Run functions beside each other; the first in this partition."""
        first = self.partition
        partitions = [first, *(Partition(self, 1 + i, count) for i, count in enumerate(warps))]
        self.back = threading.Semaphore(0)
        for partition, (function, arguments) in zip(partitions, functions, strict=True):
            partition.clocks = first.clocks.copy()
            threading.Thread(target=self._run, args=(partition, function, arguments), daemon=True).start()
        try:
            self._take_turns(partitions)
        finally:
            self.stopped = True
            for partition in partitions:
                if not partition.done:
                    partition.turn.release()
            self.back, self.partition = None, first
        first.clocks = np.maximum.reduce([partition.clocks for partition in partitions])
        for partition in partitions[1:]:
            partition.end(first.clocks[0])

    def _take_turns(self, partitions: Sequence[Partition]) -> None:
        while live := [partition for partition in partitions if not partition.done]:
            ready = [partition for partition in live if partition.until is None or partition.until()]
            choice = int(self.rng.integers(len(ready) + len(self.arrivals))) if ready or self.arrivals else -1
            if choice < 0:
                raise Fault("all wait for ever: " + ", ".join(partition.waits_at for partition in live))
            if choice >= len(ready):
                self.arrivals.pop(choice - len(ready))()
                continue
            self.partition = ready[choice]
            self.partition.turn.release()
            self.back.acquire()
            if self.partition.error is not None:
                raise self.partition.error

    def _run(self, partition: Partition, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        partition.turn.acquire()
        try:
            if not self.stopped:
                with np.errstate(all="ignore"):
                    function(*arguments)
        except _Stopped:
            pass
        except BaseException as error:  # raised again by the thread that waits for this one
            partition.error = error
        partition.done = True
        back = self.back
        if back is not None:
            back.release()


class Memory:
    """The arrays of a launch by their addresses."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        spans: dict[int, np.ndarray] = {}
        for array in arrays:
            if array.size:
                last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
                span = np.lib.stride_tricks.as_strided(array.view(np.uint8), (last + array.itemsize,), (1,))
                if len(spans.get(array.ctypes.data, ())) < len(span):
                    spans[array.ctypes.data] = span
        self.starts = sorted(spans)
        self.spans = [spans[start] for start in self.starts]
        self.views: dict[tuple[int, int, np.dtype], np.ndarray] = {}

    def at(self, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """A view of the array that has these addresses, and their indices in it."""
        low, high = int(addresses.min()), int(addresses.max()) + dtype.itemsize
        which = bisect(self.starts, low) - 1
        if which < 0 or high > self.starts[which] + len(self.spans[which]):
            raise Fault(f"{place()}: addresses outside of the arrays")
        if (addresses % dtype.itemsize).any():
            raise Fault(f"{place()}: addresses between multiples of {dtype.itemsize} bytes")
        start = self.starts[which]
        shift = -start % dtype.itemsize
        key = which, shift, dtype
        if key not in self.views:
            span = self.spans[which][shift:]
            self.views[key] = span[: len(span) // dtype.itemsize * dtype.itemsize].view(dtype)
        return self.views[key], (addresses - start - shift) // dtype.itemsize

    def add(self, addresses: np.ndarray, values: np.ndarray) -> None:
        if addresses.size:
            array, index = self.at(addresses, values.dtype)
            np.add.at(array, index, values)
