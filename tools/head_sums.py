"""Reads from the IR of every kernel that adds weighted heads what it adds up at once; a JSON line each.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python -m tools.head_sums
The ops' cases are planned for the architectures of mma.sync, and for those with tensor memory, of which kernels of
MXFP4 keys and of many heads are read. There warps and lanes divide the heads of a tile as the compiler likes, which
follows the tile. A reduction of more than two summands then adds them in an order of the tile's.
"""

import json
import re

from tools.compile_plans import DEVICES, of_cases
from tools.far_strides import source_ir
from xmla.core.compile import Specialization, specialize
from xmla.core.op import plan_call
from xmla.core.registry import registry

ARCHITECTURES = (80, 89, 100, 103, 120)
REDUCTION = re.compile(r'"tt\.reduce"\(.*?\}\) : .*?$', re.DOTALL | re.MULTILINE)
OPERAND = re.compile(r"axis = (\d+).*: \(tensor<([\dx]+)xf32", re.DOTALL)


def of_heads(arch: int) -> dict[str, Specialization]:
    """A kernel of each tile that adds heads, by its name and tile."""
    kernels = {}
    for op in registry().values():
        for _, specs, attrs in of_cases(op):
            arrays = tuple(specs.get(name) for name in op.tensors)
            plan, _ = plan_call(op, arrays, op.attributes(**attrs), DEVICES[arch])
            for launch in plan.active:
                kernel = specialize(launch, plan, specs)
                if kernel.constants.get("KEYS.RUN"):
                    tile = ("KEYS.FORMAT", "QUERY.BLOCK_I", "INDEXER.BLOCK_I", "GROUP", "BLOCK_N")
                    sizes = " ".join(f"{name}={kernel.constants.get(name)}" for name in tile)
                    kernels[f"{kernel.kernel.__name__} {sizes}"] = kernel
    return kernels


def main() -> None:
    for arch in ARCHITECTURES:
        for name, kernel in of_heads(arch).items():
            module, backend, options = source_ir(kernel, arch)
            text = str(backend.make_ttir(module, {}, options, arch))
            sums = [OPERAND.search(reduction) for reduction in REDUCTION.findall(text) if "arith.addf" in reduction]
            summands = [int(operand[2].split("x")[int(operand[1])]) for operand in sums]
            print(json.dumps({"arch": arch, "kernel": name, "summands": summands}), flush=True)


if __name__ == "__main__":
    main()
