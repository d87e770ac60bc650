"""Compiles one kernel of attention for an architecture of which no device is known, and prints a JSON line.

A script of its own, as compile_plans.py: kernels compile only where TRITON_INTERPRET was not set.
    python -m tools.compile_unknown 110
"""

import json
import sys

import numpy as np

from xmla.core.compile import compiled, specialize
from xmla.core.op import plan_call
from xmla.core.registry import registry
from xmla.core.values import Device, Spec

if __name__ == "__main__":
    op, arch = registry()["sparse_mla"], int(sys.argv[1])
    case = op.cases[0]
    specs = {name: Spec.of_numpy(array) for name, array in case.make(np.random.default_rng(0)).items()}
    arguments = tuple(specs.get(name) for name in op.tensors), op.attributes(**case.attrs)
    plan, _ = plan_call(op, *arguments, Device.of("unknown", arch, 148))
    kernel = compiled(specialize(plan.launches[0], plan, specs), arch)
    print(json.dumps({"shared": kernel.metadata.shared, "ptx": kernel.asm["ptx"]}))
