"""Whether kernels add up in another order where arrays do not start on 16 bytes; a script, since kernels compile only
where Triton was imported without TRITON_INTERPRET.

    python -m tools.alignment OP … [--but ANSWERS]
Prints a JSON line for each op named, of the portable kernels of its smallest and its largest case: for wgmma's
architecture, and for one of mma.sync those of ops whose kernels all add up alike there. The first line has all answers,
with digests of what they follow from; those that stand in the file ANSWERS are not asked again.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tools.compile_plans import digest, identity
from tools.far_strides import source_ir
from xmla.core.compile import Specialization, specialize
from xmla.core.errors import ArgumentError
from xmla.core.op import Case, Op, plan_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device, Spec

Specs = dict[str, Spec]
Answer = dict[str, Any]
ARCHITECTURES = (90, 120)


def aligned(case: Case) -> Specs:
    inputs = case.make(np.random.default_rng(0))
    return {name: replace(Spec.of_numpy(array), alignment=16) for name, array in inputs.items()}


def apart(op: Op, specs: Specs, name: str) -> Specs:
    """The specs with another alignment of `name`: what its dtype, or what is widest in a pool, allows."""
    least = 4 if name in op.pools else specs[name].itemsize
    return specs | {name: replace(specs[name], alignment=min(least, 16))}


def plan_of(op: Op, case: Case, specs: Specs, device: Device, implementation: str | None = None) -> Plan | None:
    """None for a call that is refused."""
    attrs = op.attributes(**case.attrs)
    try:
        return plan_call(op, tuple(specs.get(name) for name in op.tensors), attrs, device, implementation)[0]
    except ArgumentError:
        return None


@cache
def tiled(specialization: Specialization, arch: int) -> str:
    """The IR of a kernel with sums once its tiles have layouts; what follows costs most and keeps their order."""
    module, backend, options = source_ir(specialization, arch)
    metadata: dict[str, object] = {}
    module = backend.make_ttir(module, metadata, options, arch)
    if not order(str(module)):
        return ""
    return str(backend.make_ttgir(module, metadata, options, arch))


def order(ttgir: str) -> list[str]:
    """The layouts of what float additions and products of registers take: they tell what is added to what, and when.

    Maxima and integers have no order, and products of shared memory one that their instruction fixes.
    """
    named = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reductions = re.findall(r"tt\.reduce.*?\}\) : .*?$", ttgir, re.DOTALL | re.MULTILINE)
    found = [text.rpartition("}) :")[2] for text in reductions if "arith.addf" in text]
    found += [text.partition(" : ")[2] for text in re.findall(r"tt\.dot\b.*", ttgir)]
    return [re.sub(r"#\w+", lambda name: named.get(name[0], name[0]), text).partition(" loc(")[0] for text in found]


def launches_of(op: Op, device: Device) -> list[tuple[Specialization, Specialization]]:
    """The kernels of two of an op's cases with arrays on 16 bytes, and with each where it may lie.

    The smallest, and the largest: where a tile has no more elements than threads, each has one, wherever arrays start.
    """
    cases = sorted(op.cases, key=lambda case: sum(array.size for array in case.make(np.random.default_rng(0)).values()))
    pairs = []
    for case in (cases[0], cases[-1]):
        specs = aligned(case)
        moved = specs
        for name in specs:
            moved = apart(op, moved, name)
        kernels = []
        for given in (specs, moved):
            plan = plan_of(op, case, given, device, "triton")
            kernels.append([specialize(launch, plan, given) for launch in plan.launches])
        pairs += zip(*kernels, strict=True)
    return pairs


def answers(arch: int, names: list[str], before: dict[str, Answer]) -> Iterator[tuple[str, Answer]]:
    """How many kernels of each op have sums, and whether their order is the same at both alignments."""
    device = next(device for device in KNOWN_DEVICES if device.arch == arch)
    for name in names:
        launches = launches_of(registry()[name], device)
        made = digest(Path(__file__).read_text(), *(identity(kernel, arch) for pair in launches for kernel in pair))
        answer = before.get(f"{name} sm_{arch}")
        if answer is None or answer["digest"] != made:
            orders = [[order(tiled(kernel, arch)) for kernel in pair] for pair in launches]
            sums = sum(bool(first) for first, _ in orders)
            answer = {"digest": made, "sums": sums, "same": all(first == second for first, second in orders)}
        yield name, answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--but", type=Path)
    given = parser.parse_args()
    before = json.loads(given.but.read_text()) if given.but and given.but.exists() else {}
    names, found = given.ops, {}
    for arch in ARCHITECTURES:
        of_arch = dict(answers(arch, names, before))
        names = [name for name in names if of_arch[name]["same"]]
        found |= {f"{name} sm_{arch}": answer for name, answer in of_arch.items()}
    print(json.dumps({"digests": found}))
    for key, answer in found.items():
        name, _, arch = key.partition(" sm_")
        print(json.dumps({"op": name, "arch": int(arch)} | answer))


if __name__ == "__main__":
    main()
