"""Lowers every op through jax-triton for one architecture and compares its kernels with Triton's own compilation.

A script of its own, for a process without the interpreter; no GPU is needed.
    JAX_PLATFORMS=cpu JAX_TRITON_DUMP_DIR=… python tests/lower_for_cuda.py 90
Prints a JSON line an op: its custom calls, and for each launch the SHA-256 of the cubin that either front-end runs.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from xmla import jax_api
from xmla.core.compile import compiled, specialize
from xmla.core.device import KNOWN_DEVICES, Device, assume_device
from xmla.core.op import Op, plan_call, registry
from xmla.core.plan import Plan
from xmla.core.spec import Spec

CUSTOM_CALL = "triton_kernel_call_ffi"
DUMPS = Path(os.environ["JAX_TRITON_DUMP_DIR"])


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


def lower(op: Op, device: Device, implementation: str | None = None) -> dict[str, object]:
    case = op.cases[min(1, len(op.cases) - 1)]
    if implementation is not None:  # the first case whose cache is packed
        case = next(c for c in op.cases if c.make(np.random.default_rng(0))["cache"].dtype == np.uint8)
    inputs = case.make(np.random.default_rng(0))
    arrays = [inputs[name] for name in op.tensors if name in inputs]
    names = [name for name in op.tensors if name in inputs]
    # JAX has no 64-bit integers by default.
    specs = {name: Spec(inputs[name].shape, jax.dtypes.canonicalize_dtype(inputs[name].dtype).name) for name in names}
    attrs = op.defaults | dict(case.attrs)
    values = tuple(attrs[attr.name] for attr in op.attrs)
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), values, device, implementation)
    forget(plan)

    def call(*given: jax.Array) -> object:
        by_name = dict(zip(names, given, strict=True))
        return getattr(jax_api, op.name)(
            *[by_name.get(name) for name in op.tensors], **case.attrs, implementation=implementation
        )

    with assume_device(device):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda"],
            disabled_checks=jax_api.EXPORT_CHECKS,
        )(*shapes)  # fmt: skip
    restored = jax.export.deserialize(exported.serialize())
    by_jax = {name: sorted(assemble(ptx, device.arch) for ptx in texts) for name, texts in dumped().items()}

    by_triton: dict[str, list[str]] = {}
    for launch in plan.launches:
        kernel = compiled(specialize(launch, plan, specs), device.arch)
        by_triton.setdefault(launch.name, []).append(assemble(kernel.asm["ptx"], device.arch))
    return {
        "op": op.name + (f" {implementation}" if implementation else ""),
        "custom_calls": exported.mlir_module().count(CUSTOM_CALL),
        "launches": len(plan.launches),
        "restored": restored.mlir_module() == exported.mlir_module() and restored.platforms == ("cuda",),
        "jax": by_jax,
        "triton": {name: sorted(hashes) for name, hashes in by_triton.items()},
    }


def main() -> None:
    device = next(d for d in KNOWN_DEVICES if d.arch == int(sys.argv[1]))
    for op in registry().values():
        print(json.dumps(lower(op, device)), flush=True)
    if device.arch == 90:
        print(json.dumps(lower(registry()["sparse_mla"], device, "triton")), flush=True)


if __name__ == "__main__":
    main()
