"""Lowers ops through jax-triton for one architecture and compares its kernels with Triton's own compilation.

A script of its own, for a process without the interpreter; no GPU is needed.
    JAX_PLATFORMS=cpu JAX_TRITON_DUMP_DIR=… python tests/lower_for_cuda.py 90 OP …
Prints a JSON line per op: its custom calls, for each launch the SHA-256 of the PTX that both front-ends have, or, where
theirs differ, of the cubin that either runs, and how many kernels JAX asked for that a warm-up for torch had not
compiled.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jax
import numpy as np
from export_for_cuda import export, exported_case
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from xmla.core.call import plan_call
from xmla.core.compile import compiled, compiles, specialize
from xmla.core.device import KNOWN_DEVICES, Device
from xmla.core.op import Case, Op
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.spec import Spec

CUSTOM_CALL = "triton_kernel_call_ffi"
DUMPS = Path(os.environ["JAX_TRITON_DUMP_DIR"])


@cache
def assemble(ptx: str, arch: int) -> str:
    """SHA-256 of the cubin that Triton's ptxas makes of `ptx`."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, f"--gpu-name={sm_arch_from_capability(arch)}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return hashlib.sha256(target.read_bytes()).hexdigest()


def forget(plan: Plan) -> None:
    """Have jax-triton make and dump the kernels of `plan` although another op's may have been the same."""
    for launch in plan.launches:
        vars(launch.kernel).get("_jT_kernel_cache", {}).clear()
    for folder in DUMPS.iterdir():
        shutil.rmtree(folder)


def dumped() -> dict[str, list[str]]:
    """PTX by kernel name of what jax-triton compiled since `forget`."""
    found: dict[str, list[str]] = {}
    for file in sorted(DUMPS.glob("*/*.ptx")):
        found.setdefault(file.stem, []).append(file.read_text())
    return found


def lower(name: str, op: Op, case: Case, device: Device, implementation: str | None = None) -> dict[str, object]:
    inputs = {name: np.ascontiguousarray(array) for name, array in case.make(np.random.default_rng(0)).items()}
    given = [name for name in op.tensors if name in inputs]
    # JAX has no 64-bit integers by default.
    specs = {name: Spec(inputs[name].shape, jax.dtypes.canonicalize_dtype(inputs[name].dtype).name) for name in given}
    attrs = op.attributes(**case.attrs)
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), attrs, device, implementation)
    forget(plan)

    by_triton: dict[str, set[str]] = {}
    for launch in plan.launches:
        kernel = compiled(specialize(launch, plan, specs), device.arch)
        by_triton.setdefault(launch.name, set()).add(kernel.asm["ptx"])
    before = len(compiles())
    exported = export(op, case, {name: inputs[name] for name in given}, device, implementation)
    restored = jax.export.deserialize(exported.serialize())
    by_jax = dumped()

    def codes(name: str, texts: Iterable[str]) -> list[str]:
        both = by_triton.get(name, set()).intersection(by_jax.get(name, ()))
        return sorted(
            hashlib.sha256(ptx.encode()).hexdigest() if ptx in both else assemble(ptx, device.arch) for ptx in texts
        )

    return {
        "op": name,
        "more": len(compiles()) - before,
        "custom_calls": exported.mlir_module().count(CUSTOM_CALL),
        "launches": len(plan.launches),
        "restored": restored.mlir_module() == exported.mlir_module() and restored.platforms == ("cuda",),
        "jax": {name: codes(name, texts) for name, texts in by_jax.items()},
        "triton": {name: codes(name, texts) for name, texts in by_triton.items()},
    }


def main() -> None:
    device = next(d for d in KNOWN_DEVICES if d.arch == int(sys.argv[1]))
    calls = [(name, registry()[name], exported_case(registry()[name])[0], None) for name in sys.argv[2:]]
    if device.arch == 90:
        for name, beginning, implementation in (
            ("sparse_mla triton", "t1-h128", "triton"),
            ("sparse_mla in parts", "t90-", None),
            ("indexer_topk in parts", "parts", None),
        ):
            op = registry()[name.split()[0]]
            case = next(case for case in op.cases if case.name.startswith(beginning))
            calls.append((name, op, case, implementation))
    for name, op, case, implementation in calls:
        print(json.dumps(lower(name, op, case, device, implementation)), flush=True)


if __name__ == "__main__":
    main()
