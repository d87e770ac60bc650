"""Compiles every kernel configuration that the planner emits for one device and prints a JSON line each.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python -m tools.compile_plans 90 [--hash] [--as 100] [--but FILE [--some I/N]] [--digests]
--hash      Each line has the SHA-256 of the kernel's instructions, for tools/same_code.py.
--as ARCH   Takes the PTX of kernels that are planned for ARCH too from there and assembles it. One kernel of each name
            is compiled besides, and its PTX compared.
--but FILE  Leaves out the kernels whose digests FILE has, but for a sample. The first line has all digests.
--some I/N  Of each function that FILE has not, one kernel: of every N-th function, from the I-th, and of those for ARCH
            alone. The I of different architectures share the functions among them.
--digests   The digests alone: nothing is compiled.
`python -m tools.support_matrix` makes docs/support.md of these lines for every architecture.
"""

import argparse
import ast
import functools
import hashlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from xmla.core.compile import Specialization, compiled, specialize
from xmla.core.errors import UnsupportedError
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V4, V32, V41, V41_FP4
from xmla.core.op import Op, plan_call
from xmla.core.ops.attention.sparse_mla.plan import PortableAttention
from xmla.core.ops.attention.sparse_mla.sources import ROWS_OF_SOURCES
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device, Spec

Specs = dict[str, Spec]
SAMPLE = 3  # kernels compiled again though their digest is known
DEVICES = {device.arch: device for device in KNOWN_DEVICES}


@dataclass(frozen=True)
class Planned:
    """A call that the planner took, or refused with `reason`."""

    op: str
    case: str
    form: str
    specs: Specs
    plan: Plan | None
    reason: str = ""


def form_of(op: Op, specs: Specs, attrs: dict[str, object]) -> str:
    """The formats of the caches that a call reads: what support may depend on beside op and architecture."""
    read = [name for name in op.pools if name in specs and name not in ROWS_OF_SOURCES]
    forms = [f"{specs[name].dtype} {specs[name].shape[-1]}" for name in read]
    named = [str(value) for name, value in attrs.items() if name.endswith("format") and value is not None]
    scales = specs.get("key_scales")
    if scales and (specs["keys"].dtype, scales.dtype) == ("float8_e4m3fn", "int32"):  # which rows are told by
        named.append("fp8_ue8m0")
    return ", ".join([" + ".join(forms), *named])


@functools.cache
def of_cases(op: Op) -> tuple[tuple[str, Specs, dict[str, object]], ...]:
    made = ((case, case.make(np.random.default_rng(0))) for case in op.cases)
    return tuple(
        (case.name, {n: Spec.of_numpy(a) for n, a in arrays.items()}, dict(case.attrs)) for case, arrays in made
    )


def of_serving(tokens: int, heads: int, k: int) -> Iterator[tuple[str, str, Specs, dict[str, object]]]:
    """The ops at a serving engine's sizes: 64 requests, 64K keys, pages of 64."""
    name = f"t{tokens}-h{heads}-k{k}"
    q8, weights = Spec((tokens, 64, 128), "float8_e4m3fn"), Spec((tokens, 64), "float32")
    lengths, slots = Spec((tokens,), "int32"), Spec((tokens, k), "int32")
    q, sink = Spec((tokens, heads, 576), "bfloat16"), Spec((heads,), "float32")
    table = Spec((64, 1024), "int32")
    indexer = Spec((65536, 64, 132), "uint8")
    paged = {"q8": q8, "weights": weights, "cache": indexer, "block_table": table, "lengths": lengths}
    yield "indexer_logits_paged", name, paged, {}
    for columns in (65536, 131072):
        logits = Spec((tokens, columns), "float32")
        yield "select_topk", f"{name}-n{columns}", {"logits": logits, "ends": lengths}, {"k": k}
    for kind, cache in (("fp8", Spec((65536, 64, 656), "uint8")), ("plain", Spec((65536, 1, 576), "bfloat16"))):
        specs = {"q": q, "cache": cache, "slots": slots, "lengths": lengths, "sink": sink}
        yield "sparse_mla", f"{name}-{kind}", specs, {"softmax_scale": 0.1}


def of_two_sources(tokens: int) -> Iterator[tuple[str, str, Specs, dict[str, object]]]:
    """Attention over two sources with all heads: the most that a tile's registers and shared memory hold.

    Those of one format are what Hopper's Gluon kernel takes.
    """
    heads, k = 128, 512
    slots, lengths = Spec((tokens, k), "int32"), Spec((tokens,), "int32")
    turned = {"cos_sin": Spec((65536, 64), "float32"), "positions": lengths}
    both = ((V4, V4, turned), (PLAIN, PLAIN, {}), (PLAIN_V4, PLAIN_V4, turned))
    mixed = ((V32, NVFP4, {}), (PLAIN, NVFP4, {}), (V4, V41_FP4, turned), (V41, V41_FP4, turned))
    for first, second, more in (*mixed, *both):
        caches = [Spec((4096, 64, row.row), "uint8" if row.packed else "bfloat16") for row in (first, second)]
        specs = {"q": Spec((tokens, heads, first.dims), "bfloat16"), "cache": caches[0], "slots": slots}
        extra = {"extra_cache": caches[1], "extra_slots": slots, "extra_lengths": lengths}
        name = f"t{tokens}-h{heads}-{first.name}+{second.name}"
        formats = {"cache_format": first.name, "extra_cache_format": second.name}
        yield "sparse_mla", name, specs | {"lengths": lengths} | extra | more, {"softmax_scale": 0.1, **formats}


def planned(name: str, case: str, specs: Specs, given: dict[str, object], device: Device, by: str | None) -> Planned:
    op = registry()[name]
    attrs = op.attributes(**given)
    arguments = tuple(specs.get(argument) for argument in op.tensors)
    form = ", ".join(filter(None, (form_of(op, specs, attrs._asdict()), by)))
    try:
        plan, _ = plan_call(op, arguments, attrs, device, by)
    except UnsupportedError as error:
        return Planned(name, case, form, specs, None, str(error))
    return Planned(name, case, form, specs, plan)


def plans(device: Device) -> Iterator[Planned]:
    """Every op's cases and serving sizes by the best kernels; cases by those that are chosen by name."""
    ops = registry()
    calls = [(name, *call) for name, op in ops.items() for call in of_cases(op)]
    # Of 320 tokens Hopper's attention takes those with most keys first.
    sizes = ((64, 128, 2048), (128, 16, 512), (320, 16, 512), (320, 128, 512), (2048, 32, 1024), (64, 8, 8192))
    for tokens, heads, k in sizes:
        calls += of_serving(tokens, heads, k)
    for tokens in (64, 320):
        calls += of_two_sources(tokens)
    for call in calls:
        yield planned(*call, device, None)
    for name, op in ops.items():
        for implementation in op.choices if len(op.implementations) > 1 else ():
            for call in of_cases(op):
                yield planned(name, *call, device, implementation)


def instructions(cubin: bytes) -> str | None:
    """The SHA-256 of a kernel's instructions; None where this Triton was packed without cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([str(tool), "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    return hashlib.sha256("\n".join(re.findall(r"/\*[0-9a-f]{4}\*/.*", sass)).encode()).hexdigest()


@dataclass(frozen=True)
class Built:
    """A kernel's PTX and cubin, and what `ptxas -v` said of it."""

    ptx: str
    cubin: bytes
    said: str
    shared: int
    tensor_memory: int


def build(specialization: Specialization, arch: int, source_arch: int) -> Built:
    """The kernel for `arch`, from its PTX for `source_arch`."""
    with redirect_stdout(io.StringIO()) as log:  # Triton prints there, unless it has the kernel in its cache
        kernel = compiled(specialization, source_arch)
    ptx, cubin = re.sub(r"\.target sm_\d+", f".target sm_{arch}", kernel.asm["ptx"]), kernel.asm["cubin"]
    if arch != source_arch or "registers" not in log.getvalue():
        backend = make_backend(GPUTarget("cuda", arch, 32))
        with redirect_stdout(io.StringIO()) as log:
            cubin = backend.make_cubin(ptx, {}, backend.parse_options(specialization.options()), arch)
    return Built(ptx, cubin, log.getvalue(), kernel.metadata.shared, kernel.metadata.tmem_size)


def code(ptx: str) -> str:
    """PTX without what names source files: a cached kernel may come from another copy of the tree."""
    return re.sub(r"^\s*\.(file|loc)\b.*\n", "", ptx.partition("\t.section")[0], flags=re.MULTILINE)


def report(specialization: Specialization, arch: int, source_arch: int) -> dict[str, object]:
    built = build(specialization, arch, source_arch)
    ptx = built.ptx

    def most(what: str) -> int:
        return max(int(found) for found in re.findall(what, built.said))

    # A stack that nothing is stored to is no spill: LLVM may leave an array there that nothing uses.
    spills = most(r"(\d+) bytes spill stores") or "st.local" in ptx
    # What ptxas says if it makes each `wgmma` wait for the last one, or ignores `setmaxnreg`.
    serialized = re.search(r"Potential Performance Loss.*", built.said)
    return {
        "kernel": specialization.kernel.__name__,
        "triton": triton.__version__,
        "ptx": float(re.findall(r"^\.version (\S+)", ptx, re.MULTILINE)[0]),
        "block_h": specialization.constants.get("BLOCK_H", 0),
        "shared": built.shared,
        "tensor_memory": built.tensor_memory,
        "cubin_bytes": len(built.cubin),
        # Triton turns a kernel that does not fit tensor memory into one that only traps.
        "trap": "trap;" in ptx,
        "registers": most(r"Used (\d+) registers"),
        "spilled_bytes": most(r"(\d+) bytes stack frame") if spills else 0,
        "serialized": serialized and serialized[0],
        # Bytes of each copy to shared memory. cp.async takes 4, 8 or 16.
        "copies": sorted({int(size, 0) for size in COPY.findall(ptx)}),
        "ldmatrix": "ldmatrix" in ptx,
        "copied_bytes": copied_bytes(ptx, specialization),
        "tile_bytes": tile_bytes(specialization),
        "mma": [name for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx],
        "reused_barriers": reused_barriers(ptx),
        "joined_pairs": joined_pairs(ptx),
        # Whether keys of logits may be copied before earlier launches have ended, and whether they are.
        "keys_early": specialization.constants.get("KEYS_EARLY"),
        "copies_early": bool(COPY.search(ptx.partition("griddepcontrol.wait")[0])),
    }


COPY = re.compile(r"cp\.async\.c[ag][^;]*\], (0x[0-9a-f]+|\d+)")


def copied_bytes(ptx: str, specialization: Specialization) -> int:
    """Bytes that all copies to shared memory in the code move if each runs once."""
    return 32 * specialization.num_warps * sum(int(size, 0) for size in COPY.findall(ptx))


def tile_bytes(specialization: Specialization) -> int:
    """Bytes of the quantised dims of a tile of packed latent entries; 0 where there is none or they are not copied.

    Those are entries between multiples of 16 bytes, and a second cache's of V4 in pages of two.
    """
    C = dict(specialization.constexprs).get("C")
    if not isinstance(C, PortableAttention) or not C.LAYOUT.packed:
        return 0
    strides = [C.LAYOUT.data, *(pages.PAGE_STRIDE for pages in (C.SOURCE, C.EXTRA) if pages is not None)]
    if specialization.unaligned or any(stride % 16 for stride in strides) or (C.EXTRA and C.EXTRA.PAGE_SIZE == 2):
        return 0
    return C.BLOCK_N * C.LAYOUT.quantized * C.LAYOUT.value_bits // 8


def reused_barriers(ptx: str) -> list[int]:
    """Where in shared memory a store with a constant address hits an mbarrier; −1 for one whose place is not found.

    An mbarrier that nothing uses leaves its memory to values that warps hand over. Its initialisation is not ordered
    with stores of such, and may come last. (PTX has `mbarrier.inval` for memory that is used otherwise.)
    """
    known = dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx), 0)
    for sum_, register, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx):
        if register in known:
            known[sum_] = known[register] + int(offset)
    barriers = {known.get(register, -1) for register in re.findall(r"mbarrier\.init\S* \[(\S+)\]", ptx)}
    stored = set()
    pattern = r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[(global_smem|%r\d+)(?:\+(\d+))?\]"
    for words, bits, register, offset in re.findall(pattern, ptx):
        if register == "global_smem" or register in known:
            first = known.get(register, 0) + int(offset or 0)
            stored.update(range(first, first + int(words or 1) * int(bits) // 8))
    return sorted(place for place in barriers if place < 0 or stored.intersection(range(place, place + 8)))


def joined_pairs(ptx: str) -> list[str]:
    """Words of a pair of 8-bit floats, as `cvt` makes it, and of what is computed from it.

    ptxas 12 loses such a pair: it reads what a register happens to hold (benchmarks/log/triton.md).
    """
    sources: dict[str, set[str]] = {}
    joined = []
    for opcode, operands in re.findall(r"^[\s{]*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+([^;]*);", ptx, re.MULTILINE):
        written = operands[: operands.index("}")] if operands.startswith("{") else operands.partition(",")[0]
        targets, read = (re.findall(r"%\w+", text) for text in (written, operands[len(written) :]))
        if re.match(r"cvt\.rn\.satfinite\S*\.e[45]m[23]x2", opcode):
            sources[targets[0]] = {targets[0]}
            continue
        if opcode == "mov.b32" and len(read) == 2 and any(a in sources.get(b, ()) for a, b in (read, read[::-1])):
            joined.append(f"{opcode} {operands}")
        if not opcode.startswith("st"):
            sources |= {each: set[str]().union(*(sources.get(name, ()) for name in read)) for each in targets}
    return joined


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def source(function: Any) -> str:
    """A digest of a jitted function, and of the functions, classes and values that it names, of xmla.

    Comments, docstrings and the places of lines and files change no instruction, and count in Triton's own `cache_key`.
    What is named of Triton follows from its version.
    """
    kind = f"{type(function).__name__}, noinline={bool(getattr(function, 'noinline', False))}"
    return digest(kind, body(getattr(function, "fn", function)))


@functools.cache
def body(python: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(python))).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.ClassDef)
    tree.decorator_list = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    module = vars(sys.modules[python.__module__])
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & module.keys() - {python.__name__}
    return digest(ast.unparse(tree), *(f"{name}: {meaning(module[name])}" for name in sorted(names)))


def meaning(value: Any) -> str:
    """What a name in a kernel stands for."""
    if isinstance(value, tl.constexpr | int | float | str | tuple):
        return repr(value)
    python = getattr(value, "fn", value)
    place = f"{getattr(python, '__module__', '')}.{python.__name__}".removeprefix(".")
    if not place.startswith("xmla."):
        return place
    if inspect.isfunction(python) or inspect.isclass(python):
        return source(value)
    raise TypeError(f"{place}: kernels name functions, classes and values, so that their digests follow them")


def identity(kernel: Specialization, arch: int) -> str:
    """All that a kernel's code for `arch` follows from: its source and what it is compiled for."""
    derived = [text for _, value in kernel.constexprs for text in properties(value)]
    return digest(triton.__version__, str(arch), source(kernel.kernel), str(kernel), *sorted(derived))


def properties(value: Any) -> Iterator[str]:
    """What follows from a constant that is an object, and from the objects in it: kernels read that too."""
    if is_dataclass(value):
        for name, attribute in inspect.getmembers_static(type(value)):
            if isinstance(attribute, property):
                yield f"{name}={getattr(value, name)!r}"
        for field in fields(value):
            yield from properties(getattr(value, field.name))


def digests(kernels: Iterable[Specialization], arch: int) -> dict[str, str]:
    """A digest of each function of kernels: of all that is compiled of it."""
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        found.setdefault(kernel.kernel.__name__, []).append(identity(kernel, arch))
    return {name: digest(*sorted(found[name])) for name in sorted(found)}


def sample(kernels: Iterable[Specialization], arch: int) -> list[Specialization]:
    """A few, others for each architecture and after each change of them."""
    return sorted(kernels, key=lambda kernel: identity(kernel, arch))[:SAMPLE]


def specializations(call: Planned) -> list[Specialization]:
    assert call.plan is not None
    return [specialize(launch, call.plan, call.specs) for launch in call.plan.launches]


def all_of(calls: Iterable[Planned]) -> list[Specialization]:
    """Every kernel of the calls, once each."""
    return list(dict.fromkeys(s for call in calls if call.plan is not None for s in specializations(call)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int, choices=DEVICES)
    parser.add_argument("--hash", action="store_true")
    parser.add_argument("--as", dest="source", type=int, choices=DEVICES)
    parser.add_argument("--but", type=Path)
    parser.add_argument("--some")
    parser.add_argument("--digests", action="store_true")
    given = parser.parse_args()
    knobs.nvidia.dump_ptxas_log = True
    calls = list(plans(DEVICES[given.arch]))
    kernels = all_of(calls)
    chosen = set(kernels)
    if given.digests:
        print(json.dumps({"digests": digests(chosen, given.arch)}))
        return
    theirs = set(all_of(plans(DEVICES[given.source]))) if given.source else set()
    if given.but:
        now = digests(chosen, given.arch)
        print(json.dumps({"digests": now}))
        before = json.loads(given.but.read_text()) if given.but.exists() else {}
        same = [kernel for kernel in chosen if before.get(kernel.kernel.__name__) == now[kernel.kernel.__name__]]
        others = chosen.difference(same)
        if given.some:  # the last one, which is the other architecture's, too, if any is
            first, step = map(int, given.some.split("/"))
            names = {name for name in now if f"_sm{given.arch}_" in name} | {*[*now][first::step]}
            ordered = sorted(others, key=lambda kernel: (kernel in theirs, identity(kernel, given.arch)))
            one_each = {kernel.kernel.__name__: kernel for kernel in ordered}
            others = [kernel for name, kernel in one_each.items() if name in names]
        chosen = {*others, *sample(same, given.arch)}
    shared = chosen & theirs
    compared = {kernel.kernel.__name__: kernel for kernel in shared}.values()

    def tell(place: int) -> dict[str, object]:
        kernel = kernels[place]
        told = report(kernel, given.arch, given.source if kernel in shared else given.arch)
        if given.hash:
            told["sass"] = instructions(compiled(kernel, given.arch).asm["cubin"])
        if kernel in compared:
            ours, theirs = (code(build(kernel, given.arch, arch).ptx) for arch in (given.arch, given.source))
            told["same_ptx"] = ours == theirs
        return told

    kernels = [kernel for kernel in kernels if kernel in chosen]
    made = dict(zip(kernels, in_processes(tell, len(kernels)), strict=True))
    for call in calls:
        names = {"op": call.op, "form": call.form, "case": call.case}
        if call.plan is None:
            print(json.dumps(names | {"refused": call.reason}))
            continue
        for kernel in specializations(call):
            print(json.dumps(names | made.get(kernel, {"kernel": kernel.kernel.__name__, "left_out": True})))


def in_processes[Answer](tell: Callable[[int], Answer], count: int) -> list[Answer]:
    """`tell` of each number below `count`, on a quarter of the cores: a suite's other workers have the rest.

    Kernels cannot be sent to a process, so that each is forked with all of them.
    """
    global _tell
    _tell = tell
    with ProcessPoolExecutor(max(len(os.sched_getaffinity(0)) // 4, 1), get_context("fork")) as pool:
        return list(pool.map(_told, range(count)))


_tell: Callable[[int], Any]


def _told(place: int) -> Any:
    return _tell(place)


if __name__ == "__main__":
    main()
