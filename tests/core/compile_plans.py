"""Compiles every kernel configuration that the planner emits for one device and prints a JSON line each.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python tests/core/compile_plans.py 90
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import triton

from xmla.core.compile import compiled, specialize
from xmla.core.device import KNOWN_DEVICES, Device
from xmla.core.op import Op, plan_call, registry
from xmla.core.plan import Launch, Plan
from xmla.core.spec import Spec

Specs = dict[str, Spec]


def of_cases(op: Op) -> Iterator[tuple[str, Specs, dict[str, object]]]:
    for case in op.cases:
        inputs = case.make(np.random.default_rng(0))
        yield case.name, {name: Spec.of_numpy(array) for name, array in inputs.items()}, dict(case.attrs)


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
    yield "select_topk", name, {"logits": Spec((tokens, 65536), "float32"), "ends": lengths}, {"k": k}
    for kind, cache in (("fp8", Spec((65536, 64, 656), "uint8")), ("plain", Spec((65536, 1, 576), "bfloat16"))):
        specs = {"q": q, "cache": cache, "slots": slots, "lengths": lengths, "sink": sink}
        yield "sparse_mla", f"{name}-{kind}", specs, {"softmax_scale": 0.1}


def gluon_plans(device: Device) -> Iterator[tuple[str, Specs, Plan]]:
    """What implementation="gluon" launches, on the architecture that it is written for."""
    if device.arch != 90:
        return
    op = registry()["sparse_mla"]
    for case, specs, attrs in of_cases(op):
        if specs["cache"].itemsize == 1:
            values = op.defaults | attrs
            arguments = tuple(specs.get(argument) for argument in op.tensors)
            plan, _ = plan_call(op, arguments, tuple(values[attr.name] for attr in op.attrs), device, "gluon")
            yield f"sparse_mla gluon {case}", specs, plan


def plans(device: Device) -> Iterator[tuple[str, Specs, Plan]]:
    ops = registry()
    calls = [(name, *call) for name, op in ops.items() for call in of_cases(op)]
    for tokens, heads, k in ((64, 128, 2048), (128, 16, 512), (2048, 32, 1024), (64, 8, 8192)):
        calls += of_serving(tokens, heads, k)
    for name, case, specs, given in calls:
        op = ops[name]
        attrs = op.defaults | given
        values = tuple(attrs[attr.name] for attr in op.attrs)
        plan, _ = plan_call(op, tuple(specs.get(argument) for argument in op.tensors), values, device)
        yield f"{name} {case}", specs, plan
    yield from gluon_plans(device)


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes of stack a thread, which is where registers spill; None where this Triton has no cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", shown)[1])


def report(case: str, launch: Launch, plan: Plan, specs: Specs, device: Device) -> dict[str, object]:
    kernel = compiled(specialize(launch, plan, specs), device.arch)
    ptx = kernel.asm["ptx"]
    return {
        "case": case,
        "kernel": launch.name,
        "block_h": dict(launch.constexprs).get("BLOCK_H", 0),
        "shared": kernel.metadata.shared,
        "tensor_memory": kernel.metadata.tmem_size,
        "cubin_bytes": len(kernel.asm["cubin"]),
        # Triton turns a kernel that does not fit tensor memory into one that only traps.
        "trap": "trap;" in ptx,
        "stack_bytes": stack_bytes(kernel.asm["cubin"]),
        "mma": [name for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx],
    }


def main() -> None:
    device = next(d for d in KNOWN_DEVICES if d.arch == int(sys.argv[1]))
    seen = set()
    for case, specs, plan in plans(device):
        for launch in plan.launches:
            key = specialize(launch, plan, specs)
            if key not in seen:
                seen.add(key)
                print(json.dumps(report(case, launch, plan, specs, device)), flush=True)


if __name__ == "__main__":
    main()
