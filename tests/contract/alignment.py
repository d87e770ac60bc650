"""Whether kernels add up in another order where arrays do not start on 16 bytes; a script, since kernels compile only
where Triton was imported without TRITON_INTERPRET.

python alignment.py OP …      Prints a JSON line a portable kernel of the smallest case of each op named: for wgmma's
architecture, and for one of mma.sync those of ops whose kernels all add up alike there.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache

import kit
from far_strides import source_ir

from xmla.core.call import plan_call
from xmla.core.compile import Specialization, specialize
from xmla.core.device import KNOWN_DEVICES, Device
from xmla.core.errors import ArgumentError
from xmla.core.op import Case, Op
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.spec import Spec

Specs = dict[str, Spec]
ARCHITECTURES = (90, 120)


def aligned(case: Case) -> Specs:
    return {name: replace(Spec.of_numpy(array), alignment=16) for name, array in kit.make(case).items()}


def apart(op: Op, specs: Specs, name: str) -> Specs:
    """The same but for `name`, which starts where its dtype, or what is widest in a pool, allows."""
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


def print_kernels(arch: int, names: list[str]) -> set[str]:
    """The ops of which a kernel adds up in another order."""
    device = next(device for device in KNOWN_DEVICES if device.arch == arch)
    dependent = set()
    for op in map(registry().__getitem__, names):
        case = min(op.cases, key=lambda case: sum(array.size for array in kit.make(case).values()))
        specs = aligned(case)
        moved = specs
        for name in specs:
            moved = apart(op, moved, name)
        plans = [plan_of(op, case, given, device, "triton") for given in (specs, moved)]
        for launches in zip(*(plan.launches for plan in plans), strict=True):
            orders = [
                order(tiled(specialize(launch, plan, given), arch))
                for launch, plan, given in zip(launches, plans, (specs, moved), strict=True)
            ]
            kernel = {"op": op.name, "arch": arch, "sums": len(orders[0]), "same": orders[0] == orders[1]}
            print(json.dumps(kernel | {"kernel": launches[0].name}), flush=True)
            if not kernel["same"]:
                dependent.add(op.name)
    return dependent


def main(names: list[str]) -> None:
    for arch in ARCHITECTURES:
        dependent = print_kernels(arch, names)
        names = [name for name in names if name not in dependent]


if __name__ == "__main__":
    main(sys.argv[1:])
