"""What Gluon kernels call, and how a kernel's Python source is run: with these names in place of Gluon's.

A function of Gluon runs as Python: its globals are those of its module, where other such functions are bound likewise,
constants are bare values, and `gl`, `tl`, `mbarrier`, … are the objects of this file.
"""

import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, blackwell, hopper
from triton.language.extra import cuda
from triton.runtime.jit import ConstexprFunction

from emulator import ptx
from emulator.cta import (
    WARPS,
    Barrier,
    Barriers,
    Cta,
    Fault,
    Memory,
    Product,
    Shared,
    TensorMemory,
    Words,
    bases,
    combinations,
    place,
)
from emulator.tensors import NUMPY, Tensor, layout_of, tensor, unified
from xmla.core.lang.gluon import async_copy, cluster
from xmla.core.plan import Launch


@dataclass
class _Running:
    """The CTA that runs, and the arrays of its launch."""

    cta: Cta
    memory: Memory


_running: _Running
_DTYPES = {numpy: dtype for dtype, numpy in NUMPY.items()}


def _partition() -> Any:
    return _running.cta.partition


# Values.


def arange(start: int, end: int, layout: Any) -> Tensor:
    return Tensor(np.arange(start, end), gl.int32, layout)


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    value = np.asarray(value.data if isinstance(value, Tensor) else value)
    return Tensor(np.full(shape, value.astype(NUMPY[dtype])), dtype, layout)


def zeros(shape: Sequence[int], dtype: Any, layout: Any) -> Tensor:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Tensor) -> Tensor:
    return Tensor(np.zeros_like(x.data), x.dtype)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    if isinstance(x, Tensor) and x.dtype.is_ptr():
        return Tensor(np.where(tensor(condition).data, x.data, y.data), x.dtype)
    x, y = unified(x, y)
    return Tensor(np.where(tensor(condition).data, x.data, y.data), x.dtype, layout_of(x, y))


def _extreme(integers: Any, floats: Any) -> Callable[[Any, Any], Tensor]:
    """The minimum or maximum of two numbers; the number, if the other one is NaN."""

    def of_two(a: Any, b: Any) -> Tensor:
        x, y = unified(a, b)
        return Tensor((floats if x.dtype.is_floating() else integers)(x.data, y.data), x.dtype)

    return of_two


def _reduction(integers: Any, floats: Any) -> Callable[[Tensor, int], Tensor]:
    def over(x: Tensor, axis: int) -> Tensor:
        function = floats if x.dtype.is_floating() else integers
        return Tensor(function.reduce(x.data, axis=axis, dtype=x.data.dtype), x.dtype)

    return over


def _scan(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
    values = np.moveaxis(x.data, axis, 0)
    so_far = Tensor(values[0], x.dtype)
    yield so_far
    for value in values[1:]:
        so_far = combine(so_far, Tensor(value, x.dtype))
        yield so_far


def reduce(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    *_, last = _scan(x, axis, combine)
    return last


def associative_scan(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return Tensor(np.stack([part.data for part in _scan(x, axis, combine)], axis), x.dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return Tensor(a.data.astype(np.float64) * b.data + c.data, a.dtype)


def cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


# Shapes.


def expand_dims(x: Tensor, axis: int) -> Tensor:
    return Tensor(np.expand_dims(x.data, axis), x.dtype)


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    shape = np.broadcast_shapes(a.shape, b.shape)
    return Tensor(np.broadcast_to(a.data, shape), a.dtype), Tensor(np.broadcast_to(b.data, shape), b.dtype)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return Tensor(x.data.reshape(shape), x.dtype)


def join(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(np.stack([a.data, b.data], -1), a.dtype)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return Tensor(x.data[..., 0], x.dtype), Tensor(x.data[..., 1], x.dtype)


def unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


# Global memory.


def load(pointer: Tensor, mask: Any = None, other: Any = None) -> Tensor:
    dtype = pointer.dtype.element_ty
    numpy = NUMPY[dtype]
    shape = np.broadcast_shapes(pointer.shape, () if mask is None else tensor(mask).shape)
    wanted = np.broadcast_to(True if mask is None else tensor(mask).data, shape)
    result = np.full((*shape, numpy.itemsize), 0xFF, np.uint8).view(numpy)[..., 0]
    if other is not None:
        result[...] = tensor(other).data.astype(numpy)
    if wanted.any():
        array, index = _running.memory.at(np.broadcast_to(pointer.data, shape)[wanted], numpy)
        result[wanted] = array[index]
    return Tensor(result, dtype, pointer.layout)


def store(pointer: Tensor, value: Any, mask: Any = None) -> None:
    dtype = pointer.dtype.element_ty
    value = tensor(value).to(dtype)
    shape = np.broadcast_shapes(pointer.shape, value.shape, () if mask is None else tensor(mask).shape)
    wanted = np.broadcast_to(True if mask is None else tensor(mask).data, shape)
    if wanted.any():
        array, index = _running.memory.at(np.broadcast_to(pointer.data, shape)[wanted], NUMPY[dtype])
        array[index] = np.broadcast_to(value.data, shape)[wanted]


def async_load(smem: Shared, pointer: Tensor, mask: Any = None) -> None:
    zero = Tensor(0, pointer.dtype.element_ty)
    _partition().load_async(smem, np.broadcast_to(load(pointer, mask, zero).data, smem.shape))


# Shared memory, barriers, products.


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    return _running.cta.allocate(dtype, shape, layout)


def allocate_mbarrier(batch: int | None = None) -> Barrier | Barriers:
    return Barrier() if batch is None else Barriers(batch)


def arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        _partition().arrive(barrier, count)


def arrive_by_copies(barrier: Barrier, increment_count: bool = True) -> None:
    if increment_count:
        raise NotImplementedError("arrivals of copies that a barrier does not count")
    _partition().arrive_by_copies(barrier)


def warpgroup_mma(
    a: Any, b: Shared, acc: Tensor | Product, *, use_acc: Any = True, is_async: bool = False
) -> Tensor | Product:
    product = _partition().multiply(a, b, acc, bool(use_acc))
    return product if is_async else _partition().wait_products(0, [product])[0]


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Product]) -> Any:
    results = _partition().wait_products(outstanding, deps)
    return results if len(results) > 1 else results[0]


def allocate_tensor_memory(dtype: Any, shape: Sequence[int], layout: Any) -> TensorMemory:
    return _running.cta.allocate_tensor(dtype, shape)


def tcgen05_mma(
    a: Shared, b: Shared, acc: TensorMemory, *, use_acc: Any = True, mbarriers: Sequence[Barrier] | None = None
) -> None:
    if mbarriers is None:
        raise NotImplementedError("products of tcgen05 that the partition waits for")
    _partition().multiply_in_order(a, b, acc, bool(use_acc))
    for barrier in mbarriers:
        _partition().commit_products(barrier)


def tcgen05_commit(barrier: Barrier) -> None:
    _partition().commit_products(barrier)


def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return Tensor(acc.data + a.data.astype(np.float32) @ b.data.astype(np.float32), gl.float32, acc.layout)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    tensors = [tensor(x) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in tensors))
    bits = [np.broadcast_to(x.data, shape).view(f"u{x.data.itemsize}") for x in tensors]
    outputs = sum(constraint.startswith("=") for constraint in constraints.split(","))
    if pack > 1:  # adjacent registers of a thread
        layout = next(x.layout for x in tensors if x.layout is not None)
        linear = bases(layout, shape)
        vectors = [*linear.reg_bases, *linear.lane_bases, *linear.warp_bases]
        threads = combinations(vectors, shape).reshape(-1, pack)
        bits = [element for x in bits for element in x.reshape(-1)[threads].T]
        results = ptx.run(asm, outputs, bits, _running.memory.add)
        if outputs < pack:
            return None  # nobody asks for what several elements give
        elements = np.empty(shape, NUMPY[dtype])
        elements.reshape(-1)[threads.T] = [x.view(NUMPY[dtype]) for x in results]
        return Tensor(elements, dtype, layout)
    results = ptx.run(asm, outputs, bits, _running.memory.add)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    values = tuple(Tensor(x.view(NUMPY[kind]), kind) for x, kind in zip(results, dtypes, strict=True))
    return values if isinstance(dtype, tuple) else values[0]


def inline_asm(
    asm: Any, constraints: Sequence[str], args: Sequence[Any], results: Sequence[Any], is_pure: bool
) -> None:
    """PTX of whole threads, whose operands are all registers that a thread has of a tensor; without results."""
    if results:
        raise NotImplementedError("results of PTX of whole threads")
    threads = np.zeros(32 * _partition().warps, np.int64)
    groups: list[list[np.ndarray]] = []
    for arg in args:
        if isinstance(arg, Shared):
            groups.append([threads.astype(np.uint32) + np.uint32(arg.address)])
            continue
        bits = tensor(arg).data
        bits = bits.view(f"u{bits.itemsize}")
        if bits.ndim:
            linear = bases(tensor(arg).layout, bits.shape)
            vectors = [*linear.reg_bases, *linear.lane_bases, *linear.warp_bases]
            groups.append(list(bits.reshape(-1)[combinations(vectors, bits.shape)].reshape(threads.size, -1).T))
        else:
            groups.append([np.broadcast_to(bits, threads.shape)])
    names = iter(range(sum(map(len, groups))))
    shared = [arg for arg in args if isinstance(arg, Shared)]
    step = _partition().step(WARPS)
    for each in shared:
        _running.cta.write(each, *step)
    text = asm((), tuple(tuple(f"${next(names)}" for _ in group) for group in groups))
    ptx.run(text, 0, [bits for group in groups for bits in group], _running.memory.add, Words(_running.cta, shared))


# Control.


def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise Fault(f"{place()}: {message}")


def scalars(*bounds: Any, disable_licm: bool = False) -> Iterator[Tensor]:
    """`range` over 32-bit integers."""
    return (Tensor(i, gl.int32) for i in range(*bounds))


def program_id(axis: int) -> Tensor:
    return Tensor(_running.cta.program, gl.int32)


def num_programs(axis: int) -> Tensor:
    return Tensor(_running.cta.programs, gl.int32)


def warp_specialize(functions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    _running.cta.specialize(functions, warps)


def barrier_of_cluster(relaxed: bool = False) -> None:
    """A barrier of the cluster, after a fence of its own if it is relaxed."""
    if not relaxed:
        _running.cta.fenced = True
    _running.cta.meet()


def barrier(cluster: bool = False) -> None:
    """A barrier of a cluster; that of one CTA does nothing, since warps are in order."""
    _running.cta.meetings += cluster


def nothing(*_: Any) -> None:
    pass


_FUNCTIONS = (
    allocate_shared_memory, arange, associative_scan, broadcast, cdiv, expand_dims, fma, full, inline_asm,
    inline_asm_elementwise, join, load, num_programs, program_id, reduce, reshape, split, static_assert, store,
    warp_specialize, where, zeros, zeros_like,
)  # fmt: skip
_SAME = {name: it for name, it in vars(gl).items() if name.endswith("Layout") or isinstance(it, gl.dtype)}
_GREATER, _LESS = (np.maximum, np.fmax), (np.minimum, np.fmin)
_GL = types.SimpleNamespace(
    **_SAME, **{function.__name__: function for function in _FUNCTIONS}, pointer_type=gl.pointer_type,
    constexpr=lambda x: x, to_tensor=tensor, abs=lambda x: Tensor(np.abs(x.data), x.dtype),
    exp2=lambda x: Tensor(np.exp2(x.data), x.dtype), log2=lambda x: Tensor(np.log2(x.data), x.dtype),
    maximum=_extreme(*_GREATER), max=_reduction(*_GREATER), minimum=_extreme(*_LESS), min=_reduction(*_LESS),
    sum=_reduction(np.add, np.add), permute=Tensor.permute, convert_layout=unchanged, multiple_of=unchanged,
    max_contiguous=unchanged, max_constancy=unchanged, barrier=barrier, static_range=range, range=scalars,
)  # fmt: skip
_MBARRIER = types.SimpleNamespace(
    allocate_mbarrier=allocate_mbarrier, init=lambda barrier, count: barrier.init(count), arrive=arrive,
    wait=lambda barrier, phase: _partition().wait(barrier, int(tensor(phase).data)),
)  # fmt: skip
_ASYNC_COPY = types.SimpleNamespace(
    async_load=async_load, mbarrier_arrive=arrive_by_copies, commit_group=lambda: _partition().commit_group(),
    wait_group=lambda outstanding=0: _partition().wait_group(outstanding),
)  # fmt: skip
_BLACKWELL = types.SimpleNamespace(
    allocate_tensor_memory=allocate_tensor_memory, tcgen05_mma=tcgen05_mma, tcgen05_commit=tcgen05_commit,
    TensorMemoryLayout=blackwell.TensorMemoryLayout,
)  # fmt: skip
_CLUSTER = types.SimpleNamespace(barrier=barrier_of_cluster)
_IN_PLACE_OF = {
    id(original): ours
    for original, ours in (
        (gl, _GL), (tl, _GL), (hopper.mbarrier, _MBARRIER), (async_copy, _ASYNC_COPY),
        (hopper.fence_async_shared, lambda: _partition().fence()), (hopper.warpgroup_mma, warpgroup_mma),
        (hopper.warpgroup_mma_wait, warpgroup_mma_wait), (ampere.mma_v2, mma_v2), (cuda.gdc_wait, nothing),
        (blackwell, _BLACKWELL), (cuda.gdc_launch_dependents, nothing), (cluster, _CLUSTER),
    )
}  # fmt: skip


class Program:
    """Modules of kernels bound to this language. `edits` are replacements in the text of modules, by name.

    What other modules have imported of an edited one are its functions as edited, but its constants as they were.
    """

    def __init__(self, edits: Mapping[str, tuple[str, str]] = types.MappingProxyType({})) -> None:
        self.originals = {module: _edited(module, *edit) for module, edit in edits.items()}
        self.modules: dict[str, dict[str, Any]] = {}

    def _module(self, module: str) -> dict[str, Any]:
        if module not in self.modules:
            originals = self.originals.setdefault(module, vars(import_module(module)))
            bound = self.modules[module] = {}  # before its functions ask for it
            bound |= {name: self._bind(value) for name, value in originals.items()} | {"range": scalars}
        return self.modules[module]

    def _bind(self, value: Any) -> Any:
        if id(value) in _IN_PLACE_OF:
            return _IN_PLACE_OF[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, ConstexprFunction):
            return value.fn
        return self.function(value) if isinstance(value, GluonJITFunction) else value

    def function(self, kernel: GluonJITFunction) -> Callable[..., Any]:
        """A function of Gluon as one of Python."""
        module, name = kernel.fn.__module__, kernel.fn.__name__
        bound = self._module(module)
        original = self.originals[module][name]
        function = getattr(original, "fn", original)
        defaults = tuple(map(self._bind, function.__defaults__ or ()))
        return types.FunctionType(function.__code__, bound, name, defaults)

    def run(self, launch: Launch, arrays: Mapping[str, np.ndarray], seed: int = 0) -> None:
        """Run a launch's programs one after the other."""
        global _running
        function = self.function(launch.kernel)
        memory = Memory(list(arrays.values()))
        pointers = {
            pointer: Tensor(arrays[name].ctypes.data, gl.pointer_type(_DTYPES[arrays[name].dtype]))
            for pointer, name in launch.pointers.items()
        }
        sizes = {name: Tensor(value, gl.int32) for name, value in launch.sizes.items()}
        programs, rng = prod(launch.grid), np.random.default_rng(seed)
        for program in range(programs):
            cta = Cta(program, programs, launch.num_warps, rng, launch.num_ctas)
            _running = _Running(cta, memory)
            with np.errstate(all="ignore"):
                function(**pointers, **sizes, **launch.constexprs)
            cta.partition.end(cta.partition.clocks[0])


def _edited(module: str, before: str, after: str) -> dict[str, Any]:
    """The names of a module after an edit of its text."""
    path = import_module(module).__file__
    text = Path(path).read_text()
    if text.count(before) != 1:
        raise ValueError(f"{module} has {text.count(before)} times: {before}")
    text = text.replace(before, after)
    file = f"edited {path}"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # where Gluon looks for its source
    names = {"__name__": module, "__file__": file}
    exec(compile(text, file, "exec"), names)
    return names
