"""Compiled kernels: what identifies one, and the only place that asks Triton for them.

Both front-ends take their kernels from here, so they share Triton's cache on disk and run the same machine code.
"""

import logging
import struct
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from xmla.core.config import settings
from xmla.core.errors import CompileError, UnsupportedError
from xmla.core.plan import Kernel, Launch, Plan, constants_by_name
from xmla.core.values import DTYPES, Spec

log = logging.getLogger("xmla")

_compiling: ContextVar[bool] = ContextVar("xmla_compiling", default=False)


@dataclass(frozen=True, slots=True)
class Specialization:
    """Everything that the compiler sees of a launch: equal specialisations run the same machine code.

    Attributes:
        types: Triton's type of each runtime parameter, by name.
        constexprs: Values of the other parameters, in the kernel's order.
        unaligned: Pointers that count as not 16-byte aligned; every other pointer is. Runtime sizes are arbitrary.
    """

    kernel: Kernel
    types: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Hashable], ...]
    num_warps: int
    num_stages: int
    num_ctas: int = 1
    max_registers: int | None = None
    unaligned: frozenset[str] = frozenset()

    @property
    def op(self) -> str:
        """The op whose folder has the kernel."""
        return self.kernel.__module__.removeprefix("xmla.core.ops.").split(".")[:2][-1]

    @property
    def constants(self) -> dict[str, Hashable]:
        """The values of `constexprs`, those of objects too, by name."""
        return constants_by_name(self.constexprs)

    def __str__(self) -> str:
        types = [f"{name}: {kind}{', unaligned' * (name in self.unaligned)}" for name, kind in self.types]
        values = [f"{name}={value}" for name, value in self.constants.items()]
        options = [f"num_warps={self.num_warps}", f"num_stages={self.num_stages}"]
        if self.num_ctas > 1:
            options.append(f"num_ctas={self.num_ctas}")
        if self.max_registers is not None:
            options.append(f"max_registers={self.max_registers}")
        return f"{self.kernel.__name__}({', '.join([*types, *values, *options])})"

    def facts(self) -> dict[str, Hashable]:
        """What distinguishes kernels of one function, by name."""
        types = {name: f"{kind}{', unaligned' * (name in self.unaligned)}" for name, kind in self.types}
        return {**types, **self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages,
                "num_ctas": self.num_ctas, "max_registers": self.max_registers}  # fmt: skip

    def options(self) -> dict[str, Hashable]:
        """The compiler's options, under its own names."""
        options: dict[str, Hashable] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["enable_fp_fusion"] = True  # spelled out: defaults differ between versions
        if self.num_ctas > 1:
            options["num_ctas"] = self.num_ctas
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def begins_anywhere(name: str, spec: Spec) -> bool:
    """Whether slices of an argument, as those of some of a step's tokens, seldom begin on 16 bytes.

    These are integers whose rows are no whole vectors, and tables, of which kernels read single entries whatever their
    width is.
    """
    integers = spec.dtype in ("int32", "int64") and len(spec.shape) > 0
    return integers and (name.endswith("table") or spec.stride(0) * spec.itemsize % 16 > 0)


def as_compiled(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """A call's arguments, of which those that begin anywhere all do if one does: one kernel serves all combinations."""
    anywhere = {name for name, spec in specs.items() if begins_anywhere(name, spec)}
    if all(specs[name].alignment == 16 for name in anywhere):
        return {**specs}
    return {n: replace(spec, alignment=spec.itemsize) if n in anywhere else spec for n, spec in specs.items()}


def specialize(launch: Launch, plan: Plan, specs: Mapping[str, Spec]) -> Specialization:
    """The specialisation of one launch of `plan`; `specs` are the call's arguments by name."""
    arrays = {**specs, **plan.buffers}
    bound = {pointer: arrays[name] for pointer, name in launch.pointers.items()}
    types = {name: f"*{DTYPES[bound[name].dtype][1]}" if name in bound else "i32"
             for name in launch.kernel.arg_names if name not in launch.constexprs}  # fmt: skip
    unaligned = {pointer for pointer, spec in bound.items() if spec.alignment < 16}
    # One kernel serves them wherever each of them begins, instead of one for every combination.
    anywhere = {
        pointer for pointer, name in launch.pointers.items() if name in specs and begins_anywhere(name, specs[name])
    }
    if unaligned & anywhere:
        unaligned |= anywhere
    return Specialization(
        launch.kernel, tuple(types.items()), launch.constexpr_values, **launch.options, unaligned=frozenset(unaligned)
    )


@contextmanager
def compiling_allowed() -> Iterator[None]:
    """Inside, kernels may be compiled or loaded although XMLA_FORBID_JIT is set; `warmup` uses it."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def compiled(specialization: Specialization, arch: int, ordinal: int = 0) -> CompiledKernel:
    """The kernel for compute capability `arch` (times ten): from this process, Triton's cache on disk, or the compiler.

    Devices of one process need different `ordinal`s: the object is loaded onto the device that first runs it.

    Raises:
        UnsupportedError: This process has not compiled or loaded the kernel yet, and XMLA_FORBID_JIT is set.
        CompileError: The compiler failed, or the cache on disk cannot be written.
    """
    return _compiled(specialization, arch, ordinal)  # all positional: the cache distinguishes calls by their form


@cache
def _compiled(specialization: Specialization, arch: int, ordinal: int) -> CompiledKernel:
    in_a_call, late = not _compiling.get(), (arch, ordinal) in _warmed
    if in_a_call and settings.forbid_jit:
        raise UnsupportedError(f"XMLA_FORBID_JIT is set and no warm-up made ready, for sm_{arch}: {specialization}")
    if in_a_call and not late:
        _tell_of_warmup()
    start = time.perf_counter()
    kernel = _compile(specialization, arch)
    seconds = time.perf_counter() - start
    facts = {**specialization.facts(), "arch": arch, "GPU": ordinal}
    record = Compile(specialization, arch, ordinal, seconds, _news(specialization.kernel, facts))
    _compiles.append(record)
    _facts[specialization.kernel].append(facts)
    if in_a_call and late:
        log.warning("a call waited for a kernel that warm-up does not list: %s: %s", record, specialization)
    else:
        log.info("%s: %s", record, specialization)
    return kernel


_warmed: set[tuple[int, int]] = set()


def serving_begins(arch: int, ordinal: int) -> None:
    """Warm-up has made ready what it lists for this GPU: a kernel that a call compiles from now on is a warning."""
    _warmed.add((arch, ordinal))


@cache
def _tell_of_warmup() -> None:
    message = "a kernel is compiled at the first call that needs it, for some seconds, and kept in %s; "
    log.info(message + "`xmla warmup` or xmla.warmup(…) compiles a model's kernels before", _folder())


@dataclass(frozen=True, slots=True)
class Compile:
    """A kernel that this process compiled, or loaded from Triton's cache on disk, which takes milliseconds.

    Attributes:
        specialization: The kernel, and the types and values that it is compiled for.
        arch: The compute capability, times ten.
        ordinal: The number of the GPU that it is for.
        seconds: How long it took.
        news: Why it was needed: the names in which it differs from the nearest kernel of the same function that was
            there, with the values of that one and of this one. Empty if there was none.
    """

    specialization: Specialization
    arch: int
    ordinal: int
    seconds: float
    news: Mapping[str, tuple[Hashable, Hashable]]

    @property
    def op(self) -> str:
        """The op whose kernel it is."""
        return self.specialization.op

    @property
    def kernel(self) -> str:
        """The name of the kernel's function."""
        return self.specialization.kernel.__name__

    def __str__(self) -> str:
        def label(value: Hashable) -> Hashable:
            return getattr(value, "name", value)  # of a cache's layout

        news = [f"{name} is {label(here)}, was {label(there)}" for name, (there, here) in self.news.items()]
        why = "; ".join(news) or "its first kernel"
        return f"{self.seconds:.2f} s for sm_{self.arch} {self.op}: {self.kernel}, {why}"


_compiles: list[Compile] = []


def compiles() -> tuple[Compile, ...]:
    """What this process has compiled or loaded so far, in order, and why; printed, each is one line.

    Calls of both front-ends and `xmla.warmup` count. Interpreted kernels are not compiled, and XLA's compilation of a
    jitted function is not counted.
    """
    return tuple(_compiles)


# What was compiled so far of each function, in order, by name.
_facts: defaultdict[Kernel, list[dict[str, Hashable]]] = defaultdict(list)


def _news(kernel: Kernel, here: dict[str, Hashable]) -> dict[str, tuple[Hashable, Hashable]]:
    """The differences from the kernel of the same function that has the fewest; of two with as many the latest."""
    differences: list[dict[str, tuple[Hashable, Hashable]]] = []
    for there in reversed(_facts[kernel]):
        pairs = {name: (there.get(name), here.get(name)) for name in here | there}  # EXTRA, or EXTRA.PAGE_SIZE …
        differences.append({name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
    return min(differences, key=len, default={})


def source_of(specialization: Specialization) -> ASTSource:
    """The source that Triton's compiler takes."""
    kernel, constexprs = specialization.kernel, dict(specialization.constexprs)
    signature = dict(specialization.types) | dict.fromkeys(constexprs, "constexpr")
    positions = {name: (kernel.arg_names.index(name),) for name in signature}
    aligned = [n for n, kind in specialization.types if kind.startswith("*") and n not in specialization.unaligned]
    return (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={positions[name]: value for name, value in constexprs.items()},
        attrs={positions[name]: [["tt.divisibility", 16]] for name in aligned},
    )


def _compile(specialization: Specialization, arch: int) -> CompiledKernel:
    kernel = specialization.kernel
    options = specialization.options() | ptx_option(arch)
    try:
        return _load_or_compile(source_of(specialization), target_of(arch), options)
    except Exception as error:
        raise CompileError(
            f"{specialization.op}: {kernel.__name__} was not compiled for sm_{arch}: {reason_of(error)}"
        ) from error


def target_of(arch: int) -> GPUTarget:
    """What Triton compiles for."""
    return GPUTarget("cuda", arch, 32)


# This version covers every known device's architecture, and ptxas of CUDA 12.9 and later assembles it.
PTX_VERSION = 88
# The first versions that have younger ones. With an older one LLVM ends the process on sm_110.
YOUNGER_PTX_VERSIONS = {107: 94, 110: 90}


@cache
def ptx_option(arch: int) -> dict[str, Hashable]:
    """The oldest PTX: JAX assembles it with its own ptxas, and CUDA 13.0's refuses the 9.4 of Triton 3.9."""
    default = get_ptx_version_from_options(SimpleNamespace(ptx_version=None), arch)
    version = YOUNGER_PTX_VERSIONS.get(arch, PTX_VERSION)
    return {"ptx_version": version} if default > version else {}


def reason_of(error: BaseException) -> str:
    """The innermost cause in the first line; below it Triton's messages of the calls leading to it, outermost first.

    Of a file that cannot be written also where Triton's cache is.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    innermost = chain[-1]
    message = getattr(innermost, "error_message", None) or str(innermost).strip() or repr(innermost)
    kind = "" if isinstance(innermost, OSError) else f"{type(innermost).__name__}: "
    below = [text for text in (str(link).strip() for link in chain) if text and text != message]
    reason = "\n".join([f"{kind}{message}", *below])
    if isinstance(error, OSError):
        reason += f" (compiled kernels are kept in {_folder()}; TRITON_CACHE_DIR names another folder)"
    return reason


def _load_or_compile(source: ASTSource, target: GPUTarget, options: dict[str, Hashable]) -> CompiledKernel:
    """Let Triton load or compile; a kernel whose files in the cache are damaged is compiled again, and logged."""
    try:
        kernel = triton.compile(source, target=target, options=options)
        if is_whole(kernel.asm["cubin"]):
            return kernel
        damage = "its cubin ends early"
    except (ValueError, LookupError, TypeError, StopIteration) as error:  # what damaged metadata gives
        damage = repr(error)
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        kernel = triton.compile(source, target=target, options=options)
    log.warning("%s for sm_%d was damaged in %s and is compiled again: %s", source.name, target.arch, _folder(), damage)
    return kernel


def _folder() -> str:
    return knobs.cache.dir


def is_whole(cubin: bytes) -> bool:
    """Whether a 64-bit ELF file is as long as its header says."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        return False
    segments, sections, _, _, segment, segment_count, section, section_count = struct.unpack_from(
        "<QQIHHHHH", cubin, 32
    )
    return len(cubin) >= max(segments + segment * segment_count, sections + section * section_count)
