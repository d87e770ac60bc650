"""Fuzzes every op of the registry against its reference (make fuzz SECONDS=60).

python -m tools.fuzz [--seconds N] [--cases N] [--op NAME]      many cases, in parallel, under a watchdog
python -m tools.fuzz --rerun OP/CASE/SEED                       one of them

A fuzz case is one of an op's cases with integers, floats and cache bytes replaced: limits of int32, NaN, infinities,
0xFF, arbitrary bits. Axes are cut to odd sizes, which leaves gaps between rows, or to none, or stored in another order
with more space between neighbours, factors are negated, and an array may start beside a multiple of 16 bytes, or be a
tensor of another kind: the negative of its memory, a subclass. All arrays of a call, its results and
workspace too, lie in one buffer between guards, and every byte of it that the call has no business with is compared.

The comparison leaves no room: cases draw their values from `Dyadic`, so that sums of products do not round and
selections are beyond doubt, ties included. Replaced ("wild") floats round and overflow as they like; of ops that
compute with them, a row is compared where the reference is the same with them, without them and with NaN for them:
they stand in memory that the row does not refer to.
"""

import multiprocessing
import os
import queue
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, zip_longest
from math import ceil, floor, log2
from pathlib import Path
from typing import Annotated, Any

from tools.environment import HAS_GPU  # chooses the interpreter where there is no GPU

# isort: split
import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress

from tools.comparison import assert_close, assert_updated, guarded, must_differ
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.indexer import IndexerLayout, of_ue8m0_words
from xmla.core.formats.mla import MlaLayout
from xmla.core.op import Case, Op, plan_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import DTYPES, GRADIENT, H200, PROBABILITIES, Spec, Tolerance
from xmla.torch_api._all_ops import TORCH_OPS
from xmla.torch_api._arrays import device_of

DEVICE = "cuda" if HAS_GPU else "cpu"
MARGIN = 512  # bytes of guard between neighbours
GUARD = 1  # as int32: a page, a slot, a length that would do if it were read
LARGEST = 1 << 20  # elements of a case's inputs
BATCH = 100 if HAS_GPU else 1  # cases of one shape in flight together: compiling it takes seconds
SHAPES = 3  # of a case: as it is, and cut twice
BASES = 4  # sets of values of a case, to replace some of
# The most processor time of a batch once its kernels are compiled, and before. A process that waits for a kernel spins,
# and one that waits for a busy machine takes none.
HANG_SECONDS = 60
COMPILE_SECONDS = 300
MANY = 1000  # failures that end a run
# Sums whose terms may cancel, exactly for these values. What is left of terms that were rounded to 8 bits has no
# direction: errors so small, of terms of order 1, are compared element by element.
CANCELLING, ROUNDED = (GRADIENT, PROBABILITIES), 2.0**-9
AND_MORE = f" and {BATCH - 1} more" if BATCH > 1 else ""

INT32 = (-(2**31), -(2**31) + 1, -1, 0, 1, 2**30, 2**31 - 1)
FLOAT = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 6e-8, 448.0, 3e38, -3e38)
BYTE = (0x00, 0x7E, 0x7F, 0x80, 0xFE, 0xFF)
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda x: torch._neg_view(-x),
    "subclass": lambda x: x.as_subclass(Sub),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}
# Ops with one of these select by sums of products, which the reference rounds differently from the kernels.
HEAD_WEIGHTS = {"weights", "index_weights"}


class Sub(torch.Tensor):
    """A subclass that changes nothing."""


class Dyadic(np.random.Generator):
    """Normals are −1, −½, 0, ½ or 1, uniform positive numbers powers of two: sums of products of them are exact."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return (self.integers(-2, 3, size) / 2).astype(dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        if low > 0:
            return np.exp2(self.integers(ceil(log2(low)), floor(log2(high)) + 1, size).astype(float))
        return self.integers(ceil(low), floor(high) + 1, size).astype(float)


@dataclass(frozen=True)
class Place:
    """Where an array lies in a buffer: bytes from the buffer's start, and what to see there."""

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]  # bytes

    @property
    def nbytes(self) -> int:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else last + self.dtype.itemsize

    def array(self, buffer: np.ndarray) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, buffer.data, self.first, self.strides)

    def tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        raw = buffer[self.first : self.first + self.nbytes].view(getattr(torch, self.dtype.name))
        return raw.as_strided(self.shape, [s // self.dtype.itemsize for s in self.strides])


@dataclass(frozen=True, eq=False, repr=False)
class Target:
    """What is fuzzed: an op's case, by the kernels chosen or by those of a name."""

    op: Op
    case: Case
    implementation: str | None = None

    def __repr__(self) -> str:
        return f"{self.op.name}{f'@{self.implementation}' if self.implementation else ''}/{self.case.name}"


@dataclass(frozen=True)
class Arena:
    """One buffer for all arrays of a call; `images` hold its bytes before the call, one for each set of values.

    `kinds`: of which of `KINDS` an argument is.
    """

    op: Op
    implementation: str | None
    attrs: Mapping[str, Any]
    inputs: Mapping[str, Place]
    results: Mapping[str, Place]
    workspace: Place
    images: tuple[np.ndarray, ...]
    kinds: Mapping[str, str]

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        return [KINDS[self.kinds[n]](tensors[n]) if n in self.kinds else tensors.get(n) for n in self.op.tensors]


@dataclass(frozen=True)
class Drawn:
    """A fuzz case: the bytes before the call, and the same without wild values."""

    seed: int
    wild: np.ndarray
    tame: np.ndarray


def targets(names: Iterable[str] = ()) -> list[Target]:
    """The cases of the ops `names`, or of all; on a GPU by each implementation that takes them."""
    found = []
    for op, case in [(each, case) for each in registry().values() for case in each.cases]:
        if names and op.name not in names:
            continue
        if not case.attrs.get("deterministic", True):  # what a sum that overflows on the way gives depends on the way
            continue
        inputs = case.make(np.random.default_rng(0))
        if sum(a.size for a in inputs.values()) >= LARGEST:
            continue
        named = op.choices if HAS_GPU and len(op.implementations) > 1 else (None,)
        found += [Target(op, case, name) for name in named if bind(op, inputs, attributes(op, case), name)]
    return found


def attributes(op: Op, case: Case) -> dict[str, Any]:
    """The case's; an optional factor that was left out is one that does not round."""
    given = {a.name: 0.5 for a in op.attrs if a.type is float and a.optional and case.attrs.get(a.name) is None}
    return op.defaults | dict(case.attrs) | given


def bind(op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any], by: str | None = None) -> Plan | None:
    """The plan of a call, or None if it is refused."""
    specs = {name: Spec.of_numpy(array) for name, array in arrays.items()}
    try:
        return op.plan(op.bind(specs, op.attributes(**attrs), by), H200)
    except (ArgumentError, UnsupportedError):
        return None


def cut(
    op: Op, arrays: dict[str, np.ndarray], attrs: Mapping[str, Any], by: str | None, rng: np.random.Generator
) -> None:
    """Leave out the end of some axes, where the op takes it: what remains is no longer dense."""
    plan = bind(op, arrays, attrs, by)
    constants = [launch.constants for launch in plan.launches] if plan is not None else []
    # A shorter page has values for scales: sums of several of MXFP4's or V4's round.
    summed = any(result.agreement for result in op.outputs.values())
    layouts = [value for named in constants for value in named.values() if isinstance(value, MlaLayout)]
    mxfp4 = any("mxfp4" in (named.get("FORMAT"), named.get("KEYS.FORMAT")) or named.get("MXFP4") for named in constants)
    far = mxfp4 or (summed and any(layout.footer for layout in layouts))
    for axis in sorted({label for tensor in op.tensors.values() for label in tensor.names}):
        if axis in ("R", "EXTRA_R") and far:
            continue
        place = [(name, op.tensors[name].names.index(axis)) for name in arrays if axis in op.tensors[name].names]
        size = arrays[place[0][0]].shape[place[0][1]] if place else 0
        if size > 1 and rng.random() < 0.6:
            # A sum over no indexer heads is 0, which kernels compute as weights of 0 times what keys give, NaN too.
            less = int(rng.integers(1, size)) if axis == "I" or rng.random() < 0.9 else 0
            shorter = {n: arrays[n][(slice(None),) * i + (slice(less),)] for n, i in place}
            if bind(op, arrays | shorter, attrs, by) is not None:
                arrays |= shorter


def restride(
    op: Op, arrays: dict[str, np.ndarray], attrs: Mapping[str, Any], by: str | None, rng: np.random.Generator
) -> None:
    """Store some arrays in another order of their axes, with space between neighbours, where the op takes it."""
    for name, array in arrays.items():
        if array.ndim == 1 or not array.size:
            continue
        *outer, row = array.shape
        order = rng.permutation(len(outer))
        space = [outer[axis] + rng.choice([0, 0, 1, 3]) for axis in order]
        whole = np.empty((*space, row + rng.choice([0, 0, 4, 16])), array.dtype)
        moved = whole.transpose(*np.argsort(order), -1)[tuple(map(slice, array.shape))]
        bits(moved)[...] = bits(array)
        if bind(op, arrays | {name: moved}, attrs, by) is not None:
            arrays[name] = moved


@lru_cache(maxsize=256)
def arena(target: Target, shape: int) -> Arena:
    """The call's arrays laid out for one of the case's shapes."""
    op, case = target.op, target.case
    attrs = attributes(op, case)
    rng = np.random.default_rng([zlib.crc32(str(target).encode()), shape])
    if shape:  # the root of a negative number, as of a mean square and `eps`, is nobody's call
        attrs |= {a.name: -attrs[a.name] for a in op.attrs if a.type is float and a.name != "eps"
                  and attrs[a.name] is not None and rng.random() < 0.3}  # fmt: skip
    sets = [case.make(Dyadic(np.random.PCG64(base))) for base in range(BASES)]
    sizes = rng.bit_generator.state
    for arrays in sets:
        if shape:
            rng.bit_generator.state = sizes  # the same cut in each
            cut(op, arrays, attrs, target.implementation, rng)
            restride(op, arrays, attrs, target.implementation, rng)
    shifted = None
    if shape == SHAPES - 1:
        # A scale read as float32 stands at a multiple of 4 bytes.
        beside = {n: guarded(a, max(a.itemsize, 4))[0] for n, a in sets[0].items()}
        taken = [n for n, a in beside.items() if bind(op, sets[0] | {n: a}, attrs, target.implementation) is not None]
        shifted = rng.choice(taken)
        sets[0][shifted] = beside[shifted]
    plan, _ = plan_call(
        op, tuple(Spec.of_numpy(sets[0][n]) if n in sets[0] else None for n in op.tensors), op.attributes(**attrs),
        device_of(torch.device(DEVICE)), target.implementation,
    )  # fmt: skip
    end = MARGIN

    def reserve(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None, shift: int = 0):
        nonlocal end
        dense = np.empty(shape, dtype).strides if strides is None else strides
        place = Place(end + shift, shape, dtype, dense)
        end = -(-(place.first + place.nbytes + MARGIN) // 256) * 256
        return place

    inputs = {
        n: reserve(a.shape, a.dtype, a.strides, max(a.itemsize, 4) if n == shifted else 0) for n, a in sets[0].items()
    }
    results = {n: reserve(plan.buffers[n].shape, DTYPES[plan.buffers[n].dtype][0]) for n in plan.results}
    workspace = reserve((plan.workspace_bytes,), np.dtype(np.uint8))
    images = tuple(np.full(end // 4, GUARD, np.int32).view(np.uint8) for _ in sets)
    for image, arrays in zip(images, sets, strict=True):
        workspace.array(image)[:] = 0xFF
        for name, array in arrays.items():
            bits(inputs[name].array(image))[...] = bits(array)
    kinds = {}
    if shape and rng.random() < 0.5:
        name, kind = rng.choice(list(inputs)), rng.choice(list(KINDS))
        if kind != "negated" or (name not in op.mutates and inputs[name].dtype.itemsize > 1):
            kinds[name] = kind
    return Arena(op, target.implementation, attrs, inputs, results, workspace, images, kinds)


def draw(laid: Arena, seed: int) -> Drawn:
    rng = np.random.default_rng([zlib.crc32(laid.op.name.encode()), seed])
    tame = laid.images[rng.integers(BASES)].copy()
    for name, place in laid.inputs.items():
        if is_index(laid.op, name, place.dtype):
            scramble(rng, place.array(tame), unique=must_differ(laid.op, name))
    answer(laid, tame)
    wild = tame
    if rng.random() < 0.6:
        wild = tame.copy()
        for name, place in laid.inputs.items():
            if not is_index(laid.op, name, place.dtype) and rng.integers(2):
                run_wild(rng, place.array(wild))
    return Drawn(seed, wild, tame)


def answer(laid: Arena, image: np.ndarray) -> None:
    """Give a derivative the results of the call that it is of: with those of other slots there are no probabilities."""
    op = next((op for op in registry().values() if op.derivative is laid.op), None)
    if op is None or not set(op.tensors) & set(laid.inputs):  # one that only scales the call's gradients has no inputs
        return
    inputs = {n: place.array(image) for n, place in laid.inputs.items() if n in op.tensors}
    attrs = {a.name: laid.attrs[a.name] for a in op.attrs if a.name in laid.attrs}
    with np.errstate(all="ignore"):
        values = op.reference(**inputs, **attrs)
    for name, value in zip(op.outputs, values, strict=True):
        if place := laid.inputs.get(f"forward_{name}"):
            place.array(image)[...] = value.astype(place.dtype)


def is_index(op: Op, name: str, dtype: np.dtype) -> bool:
    """Not bytes, nor words that hold MXFP4's scales."""
    return dtype.kind in "iu" and dtype.itemsize > 1 and "float32" not in op.tensors[name].dtypes


def scramble(rng: np.random.Generator, array: np.ndarray, unique: bool) -> None:
    """Replace some integers. With `unique`, as slots of a pool to be written are, no value but −1 stands twice."""
    replaced = rng.random(array.shape) < rng.choice([0.0, 0.05, 0.3, 1.0])
    small = rng.integers(-3, 200, array.shape)
    values = np.where(rng.random(array.shape) < 0.5, rng.choice(INT32, array.shape), small)
    array[replaced] = values.astype(array.dtype)[replaced]
    if unique and array.size:
        flat = array.reshape(-1)
        again = np.ones(flat.size, bool)
        again[np.unique(flat, return_index=True)[1]] = False
        array[...] = np.where(again, -1, flat).reshape(array.shape)


def run_wild(rng: np.random.Generator, array: np.ndarray) -> None:
    """Replace some floats or bytes by special values or by arbitrary bits."""
    if not array.size:
        return
    if array.dtype.kind in "iu":
        array = array.view(np.uint8)
    chosen = rng.random(array.shape) < rng.choice([0.002, 0.05, 1.0])
    if rng.integers(2):
        chosen &= rng.random((len(array),) + (1,) * (array.ndim - 1)) < 0.3  # some rows or pages only
    if array.itemsize == 1:
        values = rng.choice(BYTE, array.shape) if rng.integers(2) else rng.integers(0, 256, array.shape)
        array.view(np.uint8)[chosen] = values.astype(np.uint8)[chosen]
        words = array.view(np.uint8)
        if not array.shape[-1] % 4 and rng.integers(2):  # where scales may stand
            scales = rng.choice(FLOAT, (*array.shape[:-1], array.shape[-1] // 4)).astype(np.float32)
            here = np.repeat(rng.random(scales.shape) < 0.1, 4, axis=-1)
            words[here] = scales.view(np.uint8)[here]
    else:
        with np.errstate(over="ignore"):
            values = rng.choice(FLOAT, array.shape).astype(array.dtype)
        array[chosen] = values[chosen]


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def launch(laid: Arena, buffer: torch.Tensor) -> None:
    """The call on arrays that lie in `buffer`."""
    arguments = laid.arguments({name: place.tensor(buffer) for name, place in laid.inputs.items()})
    extra = {}
    if laid.results:
        results = tuple(place.tensor(buffer) for place in laid.results.values())
        extra["out"] = results if len(results) > 1 else results[0]
    if laid.workspace.nbytes and laid.results:  # without results of the caller's the call allocates its own
        extra["workspace"] = laid.workspace.tensor(buffer)
    getattr(TORCH_OPS, laid.op.name)(*arguments, **laid.attrs, **extra, implementation=laid.implementation)


def launch_apart(laid: Arena, buffer: torch.Tensor) -> None:
    """A call on arrays that are allocated each by itself, for tools that know where an allocation ends.

    The workspace is the call's own, and not initialised.
    """
    apart = {}
    for name, place in (laid.inputs | laid.results).items():
        alone = replace(place, first=0)
        apart[name] = alone.tensor(buffer[place.first : place.first + place.nbytes].clone())
    arguments = laid.arguments({name: apart[name] for name in laid.inputs})
    results = tuple(apart[name] for name in laid.results)
    out = {"out": results if len(results) > 1 else results[0]} if results else {}
    getattr(TORCH_OPS, laid.op.name)(*arguments, **laid.attrs, **out, implementation=laid.implementation)
    for name in (*laid.results, *laid.op.mutates):
        (laid.results | laid.inputs)[name].tensor(buffer).copy_(apart[name])


def define(laid: Arena, image: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The reference's results, and its inputs after the call."""
    copy = image.copy()
    inputs = {name: place.array(copy) for name, place in laid.inputs.items()}
    values = laid.op.reference(**inputs, **laid.attrs)
    return dict(zip(laid.results, map(np.asarray, values), strict=True)), inputs


def scores(laid: Arena, image: np.ndarray) -> np.ndarray | None:
    """Scores by which an op selects keys for its indexer, from the reference; None for other ops.

    Of a few blocks the same may be selected although a row refers to wild values, but their logits are not the same.
    """
    op = laid.op
    if "q8" not in op.tensors or "logits" in op.outputs:
        return None
    by = registry()["indexer_logits_paged" if "block_table" in op.tensors else "indexer_logits"]
    return by.reference(**{n: place.array(image.copy()) for n, place in laid.inputs.items() if n in by.tensors})[0]


def poisoned(laid: Arena, drawn: Drawn) -> np.ndarray:
    """The bytes before the call with NaN for each wild value."""
    image = drawn.tame.copy()
    for place in laid.inputs.values():
        wild, tame = bits(place.array(drawn.wild)), bits(place.array(drawn.tame))
        bits(place.array(image))[wild != tame] = np.iinfo(wild.dtype).max
    return image


def without_nan(laid: Arena, image: np.ndarray) -> np.ndarray:
    """The bytes with 1 for each NaN and infinity that the call may read to write it elsewhere."""
    copy = image.copy()
    for name, place in laid.inputs.items():
        array = place.array(copy)
        if array.itemsize == 1 and name not in laid.op.mutates:
            codes = array.view(np.uint8)
            codes[codes & 0x7F == 0x7F] = 0x38  # also as a byte of a scale
            if laid.attrs.get(f"{name}_format") == "fp8_ue8m0":
                one_scale_a_key(codes)
        elif array.dtype.kind not in "iu" and name not in laid.op.mutates:
            array[~np.isfinite(array)] = 1
    return copy


def one_scale_a_key(cache: np.ndarray) -> None:
    """Store 1 for each scale of keys "fp8_ue8m0" whose bytes differ, which is NaN."""
    layout = IndexerLayout(cache.shape[2] - 4, "fp8_ue8m0")
    slots = np.arange(cache.shape[0] * cache.shape[1])
    values, words = layout.gather(cache, slots)
    layout.scatter(cache, slots, values, np.where(np.isnan(of_ue8m0_words(words)), np.int32(0x7F7F7F7F), words))


def largest(array: np.ndarray) -> float:
    """The largest finite magnitude."""
    return np.abs(array[np.isfinite(array)]).max(initial=0)


@np.errstate(all="ignore")
def check(laid: Arena, drawn: Drawn, after: np.ndarray) -> None:
    """Raise AssertionError if the buffer `after` the call is not what the reference makes of `drawn`."""
    op = laid.op
    want, inputs = define(laid, drawn.wild)
    expected = drawn.wild.copy()
    for place in (*laid.results.values(), laid.workspace, *(laid.inputs[n] for n in op.mutates)):
        bits(place.array(expected))[...] = bits(place.array(after))
    for name in op.mutates:
        if op.updates[name] is not None:  # computed, so that bytes may differ by a rounding
            variants = (drawn.tame, poisoned(laid, drawn)) if drawn.wild is not drawn.tame else ()
            alike = [define(laid, variant)[1][name] for variant in variants]
            assert_updated(op, laid.attrs, inputs, name, laid.inputs[name].array(after), alike)
            continue
        got, value = laid.inputs[name].array(after).view(np.uint8), inputs[name].view(np.uint8)
        if (wrong := got != value).any():
            # A NaN has many bit patterns: words that come of one are left out.
            finite = define(laid, without_nan(laid, drawn.wild))[1][name].view(np.uint8)
            words = value.shape[-1] // 4
            of_nan = (value != finite)[..., : words * 4].reshape(*value.shape[:-1], words, 4).any(axis=-1)
            wrong[..., : words * 4] &= ~np.repeat(of_nan, 4, axis=-1)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.size} bytes are wrong"
    if not np.array_equal(after, expected):
        place = int(np.flatnonzero(after != expected)[0])
        near = [f"{n} + {place - p.first}" for n, p in laid.inputs.items() if p.first - MARGIN <= place]
        raise AssertionError(f"a byte beside the outputs was written: {near[-1]}")

    same = {}
    rounded = any(result.agreement for result in op.outputs.values())
    if drawn.wild is not drawn.tame and (HEAD_WEIGHTS & set(op.tensors) or rounded):
        by = scores(laid, drawn.wild)
        for image in (drawn.tame, poisoned(laid, drawn)):
            compared = [(want[name], variant) for name, variant in define(laid, image)[0].items()]
            if by is not None:
                compared.append((by, scores(laid, image)))
            for a, b in compared:
                rows = ((a == b) | ((a != a) & (b != b))).all(axis=tuple(range(1, a.ndim)))
                same[len(a)] = same.get(len(a), True) & rows
    for name, value in want.items():
        where = op.outputs[name].written(value)
        got = laid.results[name].array(after)
        if same and not same[len(value)].all():
            rows = same[len(value)]
            got, value, where = got[rows], value[rows], None if where is None else where[rows]
        agreement = op.outputs[name].agreement
        terms = 1.0  # that a gradient sums, in order of magnitude
        if agreement == GRADIENT and "dout" in laid.inputs:
            terms = max(terms, largest(laid.inputs["dout"].array(drawn.tame).astype(np.float64)))
            # With few valid slots an entry sums terms of order 1 of all heads: errors grow as the largest sum does.
            agreement = replace(agreement, absolute=agreement.absolute * terms + 2 * ROUNDED * largest(value))
        if isinstance(agreement, Tolerance):  # a probability, rounded, is a factor of a row, and there may be one row
            cancels = op.outputs[name].agreement in CANCELLING or not largest(value)  # a cosine says nothing of zeros
            agreement = replace(agreement, factor=np.inf)
            if cancels and largest(got.astype(np.float64) - value) < ROUNDED * terms:
                agreement = replace(agreement, cosine=np.inf, in_bfloat16=None)
        assert_close(name, got, value, agreement, where)


def run_batch(target: Target, seeds: Iterable[int], apart: bool = False) -> Iterator[tuple[str, str]]:
    """Run the cases `seeds`, which share a shape; each failure's name and message."""
    seeds = list(seeds)
    laid = arena(target, seeds[0] % SHAPES)
    drawn = [draw(laid, seed) for seed in seeds]
    buffers = torch.from_numpy(np.stack([d.wild for d in drawn])).to(DEVICE)
    for buffer in buffers:
        (launch_apart if apart else launch)(laid, buffer)
    for one, after in zip(drawn, buffers.cpu().numpy(), strict=True):
        try:
            check(laid, one, after)
        except AssertionError as error:
            yield f"{target}/{one.seed}", str(error)


def run_named(name: str) -> list[str]:
    """What is wrong with one case, named as a failure names it."""
    named, _, seed = name.rpartition("/")
    target = next(target for target in targets() if str(target) == named)
    return [message for _, message in run_batch(target, [int(seed)])]


def shapes_of(names: Iterable[str], first: int) -> list[tuple[Target, int]]:
    """A shape of each op, then another of each that has more; which ones come first depends on `first`."""
    rng = np.random.default_rng(first)
    by_op: dict[str, list[tuple[Target, int]]] = {}
    for target in targets(names):
        by_op.setdefault(target.op.name, []).extend((target, shape) for shape in range(SHAPES))
    for found in by_op.values():
        rng.shuffle(found)
    return [shape for of_each in zip_longest(*by_op.values()) for shape in of_each if shape is not None]


def seeds_of(shape: int, batch: int) -> list[int]:
    return [shape + SHAPES * (batch * BATCH + i) for i in range(BATCH)]


def work(names: list[str], first: int, begun: Any, state: Any, reports: Any) -> None:
    """The next batch that no worker has begun, without end: one of each shape, then another of each.

    `state` becomes [shape, batch, processor time before it, whether this worker has compiled the shape].
    """
    shapes = shapes_of(names, first)
    compiled: set[int] = set()
    while True:
        with begun.get_lock():
            turn, chosen = divmod(begun.value, len(shapes))
            begun.value += 1
        target, shape = shapes[chosen]
        seeds = seeds_of(shape, first + turn)
        state[:] = [chosen, first + turn, time.process_time(), chosen in compiled]
        try:
            found = list(run_batch(target, seeds))
        except Exception:  # what no call may raise, a fault of the GPU among it
            found = [(f"{target}/{seeds[0]}{AND_MORE}", traceback.format_exc(limit=-4))]
            reports.put((chosen, len(seeds), found))
            if DEVICE == "cuda":  # the context is lost; another process goes on
                return
        else:
            reports.put((chosen, len(seeds), found))
            compiled.add(chosen)


@dataclass
class Worker:
    process: Any
    state: Any


def processor_time(process: int) -> float:
    """Seconds that a process has run so far; 0 once it has ended."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): utime, stime


def fuzz(
    names: list[str], seconds: float, cases: int, workers: int, first: int
) -> tuple[Counter[int], dict[str, str], float]:
    """Cases run by shape, failures by name, and the seconds it took."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of each worker, for NumPy and torch: a worker's threads would spin
    context = multiprocessing.get_context("spawn")
    reports, begun = context.Queue(), context.Value("q", 0)
    shapes = shapes_of(names, first)

    def start() -> Worker:
        state = context.Array("d", [-1, 0, 0.0, 0], lock=False)
        process = context.Process(target=work, args=(names, first, begun, state, reports), daemon=True)
        process.start()
        return Worker(process, state)

    began = time.monotonic()
    pool = [start() for _ in range(workers)]
    done: Counter[int] = Counter()
    failures: dict[str, str] = {}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fuzzing", total=cases or seconds)
        while time.monotonic() - began < seconds and (not cases or done.total() < cases):
            try:
                chosen, number, found = reports.get(timeout=0.5)
            except queue.Empty:
                pass
            else:
                done[chosen] += number
                failures |= found
            bar.update(task, completed=done.total() if cases else time.monotonic() - began)
            for index, worker in enumerate(pool):
                chosen, batch, before, compiled = worker.state[:]
                limit = HANG_SECONDS if compiled else COMPILE_SECONDS
                hung = processor_time(worker.process.pid) - before > limit
                if hung and chosen >= 0:
                    target, shape = shapes[int(chosen)]
                    name = f"{target}/{seeds_of(shape, int(batch))[0]}{AND_MORE}"
                    failures[name] = f"did not end within {limit} s of processor time"
                if hung or not worker.process.is_alive():
                    worker.process.kill()
                    pool[index] = start()
            if len(failures) >= MANY:
                break
    for worker in pool:
        worker.process.kill()
    return done, failures, time.monotonic() - began


def fuzz_here(names: list[str], seconds: float, cases: int, first: int) -> tuple[Counter[int], dict[str, str], float]:
    """Fuzz in this process, arrays apart and without a watchdog: for compute-sanitizer, which is one itself."""
    began = time.monotonic()
    done: Counter[int] = Counter()
    failures: dict[str, str] = {}
    shapes = shapes_of(names, first)
    for batch in count(first):
        for place, (target, shape) in enumerate(shapes):
            if time.monotonic() - began >= seconds or (cases and done.total() >= cases):
                return done, failures, time.monotonic() - began
            failures |= run_batch(target, seeds_of(shape, batch)[:2], apart=True)
            done[place] += 2
    raise RuntimeError("count() ended")


def main(
    seconds: Annotated[float, typer.Option(help="Stop after so many seconds.")] = 60,
    cases: Annotated[int, typer.Option(help="Stop after so many cases; 0: when the time is over.")] = 0,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
    workers: Annotated[
        int, typer.Option(help="Processes; 0: in this one, two cases of each shape in turn, every array an allocation.")
    ] = os.cpu_count() or 1,
    first: Annotated[int, typer.Option(help="First batch of each shape: others are other cases.")] = 0,
    rerun: Annotated[str, typer.Option(help="Run this one case, in this process: OP/CASE/SEED.")] = "",
) -> None:
    """Fuzz; print what ran and what failed. Exit 1 if anything did."""
    console = Console(width=150, soft_wrap=True, markup=False, highlight=False)
    if rerun:
        messages = run_named(rerun)
        console.print("\n".join(messages) or "as defined")
        raise typer.Exit(code=int(bool(messages)))
    if workers:
        done, failures, took = fuzz(op or [], seconds, cases, workers, first)
    else:
        done, failures, took = fuzz_here(op or [], seconds, cases, first)
    for name, message in list(failures.items())[:20]:
        console.print(f"{name}: {message}")
    if failures:
        console.print("one of them again: python -m tools.fuzz --rerun OP/CASE/SEED")
    shapes = shapes_of(op or [], first)
    by_op: defaultdict[str, list[int]] = defaultdict(list)  # cases of each shape
    for place, (target, _) in enumerate(shapes):
        by_op[target.op.name].append(done[place])
    for name, numbers in sorted(by_op.items()):
        wrong = sum(failure.startswith((f"{name}/", f"{name}@")) for failure in failures)
        reached = len(numbers) - numbers.count(0)
        console.print(f"{name}: {sum(numbers)} cases of {reached} of {len(numbers)} shapes, {wrong} failures")
    rate = done.total() / took
    console.print(
        f"{done.total()} cases of {len(+done)} of {len(shapes)} shapes from batch {first} on, {len(failures)} "
        f"failures, {took:.0f} s, {rate:.0f} cases/s, {workers} processes on {DEVICE}"
    )
    raise typer.Exit(code=int(bool(failures)))


if __name__ == "__main__":
    typer.run(main)
