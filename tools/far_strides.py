"""Reads from every kernel's IR whether a product of 32 bits can be an offset that does not fit them; JSON lines.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python -m tools.far_strides [--all] [--but DIGESTS]
Each op's cases are planned with strides near 2**31 on every axis that may have one, and with pages of as many entries.
Of each op's kernels those are read that have a type, format or condition which none before had, with --all every one.
Functions whose digest stands in the file DIGESTS are planned and not read; all digests are in the first line.
Kernels go through Triton's front-end, no further, with those numbers as constants. Then the range of an integer follows
from constants, remainders, masks and `arange`; sizes, program ids and what is loaded may be any number of 32 bits. A
sum or product of 32 bits that can pass them is wrong
- where constants alone bound what it is made of: an index of a head or a part, an entry within its page;
- where a factor is larger than any tile, as strides and rows are;
- where a factor is a size of the call that does not count tokens or keys, as strides and columns do not;
- in `xmla.core.lang.offsets`, whatever the factors.
What is left are tiles and their tokens and keys, counted: there are no more of these than `op.LARGEST_SIZE` and a bit.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonJITFunction

from tools.compile_plans import DEVICES, Planned, Specs, digest, digests, of_cases, planned
from xmla.core.compile import Specialization, source_of, specialize
from xmla.core.op import Op
from xmla.core.registry import registry

ARCH = 90
OTHERS = (100, 120)
FAR = 2**31 - 2**21  # a stride, or the entries of a page
AMPLE = 2**40  # bytes of a workspace, where the case's is too small for so many entries
TILE = 256  # the most tokens or keys of one
# Sizes of the call: tokens of a request and of a chain, keys of a split and of a program.
COUNTS = {"next_n", "chain_tokens", "split_keys", "chunk"}
# Entries of a page are dense; one page of FAR of them is a whole pool.
ENTRIES = {"R", "EXTRA_R", "SOURCE_R", "STATE_R"}
PAGES = {"P", "EXTRA_P", "SOURCE_P", "STATE_P", "M", "STATE_M"}

DEFINITION = re.compile(r"\s*%([\w:]+) = \"?([\w.]+)\"? ?(.*)")
BITS = re.compile(r"[<x ]i(\d+)\b(?!.*[<x ]i\d+\b)")  # of the last integer type of a line
SAME = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "ttg.convert_layout", "arith.extsi"}


@dataclass(frozen=True)
class Range:
    """Integers low … high.

    Attributes:
        free: Something other than constants decides which of them.
        stride: It is a runtime size that counts neither tokens nor keys.
    """

    low: int
    high: int
    free: bool = False
    stride: bool = False

    @property
    def size(self) -> int:
        return max(abs(self.low), abs(self.high))


def any_of(bits: int, stride: bool = False) -> Range:
    return Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, True, stride)


def spread(a: Range, b: Range, combine: Callable[[int, int], int]) -> Range:
    ends = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(ends), max(ends), a.free or b.free)


def remainder(a: Range, b: Range) -> Range:
    """Bounded by what is divided by, whatever is divided."""
    most = b.size - 1
    return Range(0 if a.low >= 0 else -most, most, b.free)


def quotient(a: Range, b: Range) -> Range:
    by = max(b.low, 1)
    return Range(-(-a.low // by) if a.low < 0 else a.low // by, a.high // by, a.free or b.free)


def masked(a: Range, b: Range) -> Range:
    """Bounded by a mask that is not negative, whatever is masked."""
    masks = [mask for mask in (a, b) if mask.low >= 0]
    if not masks:
        return any_of(64)
    least = min(masks, key=lambda mask: mask.high)
    return Range(0, least.high, least.free)


ARITHMETIC: dict[str, Callable[[Range, Range], Range]] = {
    "arith.addi": lambda a, b: spread(a, b, lambda x, y: x + y),
    "arith.subi": lambda a, b: spread(a, b, lambda x, y: x - y),
    "arith.muli": lambda a, b: spread(a, b, lambda x, y: x * y),
    "arith.minsi": lambda a, b: Range(min(a.low, b.low), min(a.high, b.high), a.free or b.free),
    "arith.maxsi": lambda a, b: Range(max(a.low, b.low), max(a.high, b.high), a.free or b.free),
    "arith.remsi": remainder,
    "arith.divsi": quotient,
    "arith.andi": masked,
}


def places(text: str) -> dict[str, str]:
    """Where locations of the IR are in the source: file and line, then those of the callers."""
    defined = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    @cache
    def place(location: str) -> str:
        if file := re.match(r'"([^"]*)":(\d+)', location):
            return f"{Path(file[1]).parent.name}/{Path(file[1]).name}:{file[2]}"
        return " < ".join(place(defined[inner]) for inner in re.findall(r"#loc\d*", location) if inner in defined)

    return {name: place(location) for name, location in defined.items()}


def wrapping(text: str) -> Iterator[str]:
    """What of a kernel's IR can pass 32 bits and must not, and where that is in the source."""
    where = places(text)
    arguments = re.findall(r"%(\w+): i32", re.search(r"tt\.func public .*", text)[0])
    known = {name: any_of(32, stride=name not in COUNTS) for name in arguments}
    captured: list[Range] = []
    for line in text[text.index("tt.func public") :].splitlines()[1:]:
        regions = re.findall(r"%(\w+)(?: =|:)", line)  # their arguments, or a result
        known = {name: value for name, value in known.items() if name not in regions}
        if partitions := re.match(r"\s*ttg\.warp_specialize\((.*?)\)", line):
            captured = [known.get(name, any_of(32)) for name in re.findall(r"%(\w+)", partitions[1])]
        elif re.match(r"\s*partition\d+\(", line):
            known |= zip(regions, captured, strict=True)
        elif loop := re.match(r".*scf\.for %(\w+) = %(\S+) to %(\S+) step ", line):
            first, end = (known.get(name, any_of(32)) for name in loop.groups()[1:])
            known[loop[1]] = Range(first.low, end.high - 1, first.free or end.free)
        if (found := DEFINITION.match(line)) is None:
            continue
        name, operation, rest = found.groups()
        names = re.findall(r"%([\w#]+)", rest)
        if operation == "arith.constant" and (value := re.match(r"(?:dense<)?(-?\d+)>? :", rest)):
            known[name] = Range(int(value[1]), int(value[1]))
        elif operation == "tt.make_range" and (ends := re.match(r".*end = (\d+).*start = (\d+)", rest)):
            known[name] = Range(int(ends[2]), int(ends[1]) - 1)
        elif operation == "tt.get_program_id":
            known[name] = Range(0, 2**31 - 1, True)
        elif operation in SAME and names[0] in known:
            known[name] = known[names[0]]
        elif operation in ARITHMETIC and (bits := BITS.search(line)):
            width = int(bits[1])
            a, b = (known.get(operand, any_of(width)) for operand in names)
            result = ARITHMETIC[operation](a, b)
            if -(2 ** (width - 1)) <= result.low and result.high < 2 ** (width - 1):
                known[name] = result
            elif width == 32:
                expression, _, location = line.strip().rpartition(" loc(")
                place = where[location.rstrip(")")]
                large = any(x.low == x.high and x.size > TILE for x in (a, b))
                strided = large or a.stride or b.stride or place.startswith("core/lang/offsets.py")
                if not result.free or (operation == "arith.muli" and strided):
                    yield f"{expression} at {place}"


def source_ir(specialization: Specialization, arch: int) -> tuple[Any, Any, Any]:
    """A kernel's IR as Triton's front-end makes it, and the compiler's backend and options."""
    target = GPUTarget("cuda", arch, 32)
    source, backend = source_of(specialization), make_backend(target)
    options = backend.parse_options(specialization.options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    return source.make_ir(target, options, functions, backend.get_module_map(), context), backend, options


def front_end(specialization: Specialization) -> str:
    """A kernel's IR before any pass but inlining and folding of constants."""
    name = specialization.kernel.__name__
    module, _, _ = source_ir(specialization, 100 if name.endswith("_sm100_kernel") else ARCH)  # tensor memory
    manager = ir.pass_manager(module.context)
    is_gluon = isinstance(specialization.kernel, GluonJITFunction)
    (passes.gluon.add_inliner if is_gluon else passes.common.add_inliner)(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "front_end")
    return str(module)


def far_apart(op: Op, specs: Specs) -> Specs:
    """The call with FAR between neighbours along every axis that need not be dense."""
    strides = {}
    for name, spec in specs.items():
        labels = op.tensors[name].names
        dense = [axis for axis, label in enumerate(labels) if label in ENTRIES or axis == len(labels) - 1]
        strides[name] = tuple(prod(spec.shape[axis + 1 :]) if axis in dense else FAR for axis in range(len(labels)))
    return {name: replace(spec, strides=strides[name]) for name, spec in specs.items()}


def far_within(op: Op, specs: Specs) -> Specs:
    """The call with pools of one page of FAR entries."""
    sizes = dict.fromkeys(ENTRIES, FAR) | dict.fromkeys(PAGES, 1)
    shapes = {
        name: tuple(sizes.get(label, size) for label, size in zip(op.tensors[name].names, spec.shape, strict=True))
        for name, spec in specs.items()
    }
    return {name: replace(spec, shape=shapes[name], strides=None) for name, spec in specs.items()}


def calls() -> Iterator[tuple[Planned, str]]:
    for name, op in registry().items():
        for case, specs, attrs in of_cases(op):
            fars = {"strides": far_apart(op, specs)}
            if op.pools or "page_size" in attrs:
                fars["entries"] = far_within(op, specs)
            for kind, far in fars.items():
                if kind == "entries" and "page_size" in attrs:
                    attrs = attrs | {"page_size": FAR}
                for by in (None, *op.choices) if len(op.implementations) > 1 else (None,):
                    call = planned(name, case, far, attrs, DEVICES[ARCH], by)
                    if call.plan is None and kind == "entries" and "workspace_bytes" in op.defaults:
                        call = planned(name, case, far, attrs | {"workspace_bytes": AMPLE}, DEVICES[ARCH], by)
                    yield call, kind
                for arch in OTHERS:  # what it has that is not planned for ARCH
                    for each in op.implementations:
                        if each.name.endswith(f"sm{arch}"):
                            by = each.asked if each.by_name else None
                            yield planned(name, case, far, attrs, DEVICES[arch], by), kind


def flags(specialization: Specialization) -> set[object]:
    """What of a kernel's specialisation chooses among its branches: the types, formats and conditions."""
    return {(name, value) for name, value in specialization.facts().items() if type(value) is not int}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--but", type=Path)
    given = parser.parse_args()
    found = [*calls()]
    of_calls = [
        [] if call.plan is None else [specialize(launch, call.plan, call.specs) for launch in call.plan.launches]
        for call, _ in found
    ]
    check = Path(__file__).read_text()
    now = {name: digest(check, of_kernels) for name, of_kernels in digests(set(chain(*of_calls)), ARCH).items()}
    print(json.dumps({"digests": now}))
    before = json.loads(given.but.read_text()) if given.but and given.but.exists() else {}
    seen: set[Specialization] = set()
    met: dict[tuple[str, str], set[object]] = {}
    for (call, kind), kernels in zip(found, of_calls, strict=True):
        line = {"op": call.op, "case": call.case, "form": call.form, "far": kind}
        if call.plan is None:
            print(json.dumps(line | {"refused": call.reason}))
        for kernel in kernels:
            name = kernel.kernel.__name__
            known, its = met.setdefault((name, kind), set()), {call.op, *flags(kernel)}
            if kernel not in seen and (given.all or not its <= known):
                seen.add(kernel)
                known |= its
                read = {} if before.get(name) == now[name] else {"wrong": [*wrapping(front_end(kernel))]}
                print(json.dumps(line | {"kernel": name} | read), flush=True)


if __name__ == "__main__":
    main()
