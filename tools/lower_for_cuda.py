"""Lowers ops through jax-triton for one architecture and compares its kernels with Triton's own compilation.

A script of its own, for a process without the interpreter; no GPU is needed.
    JAX_PLATFORMS=cpu JAX_TRITON_DUMP_DIR=… python -m tools.lower_for_cuda 90 [OP …] [--but DIGESTS]
The first JSON line has a digest of each op's kernels. Then comes a line for each op that is named, or whose digest the
file DIGESTS has not: its custom calls, for each launch the SHA-256 of the PTX that both front-ends have, or, where
theirs differ, of the cubin that either runs, and how many kernels JAX asked for that a warm-up for torch had not
compiled.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from tools.compile_plans import digest, identity
from tools.export_for_cuda import export, exported_case
from xmla.core.compile import compiled, compiles, specialize
from xmla.core.op import Case, Op, plan_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device, Spec

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


@dataclass(frozen=True)
class Lowered:
    """A case of an op that both front-ends compile for a device."""

    name: str
    op: Op
    case: Case
    device: Device
    implementation: str | None = None

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        made = self.case.make(np.random.default_rng(0))
        return {name: np.ascontiguousarray(made[name]) for name in self.op.tensors if name in made}

    @property
    def specs(self) -> dict[str, Spec]:
        """JAX has no 64-bit integers by default."""
        return {
            name: Spec(array.shape, jax.dtypes.canonicalize_dtype(array.dtype).name)
            for name, array in self.inputs.items()
        }

    @property
    def plan(self) -> Plan:
        specs, attrs = self.specs, self.op.attributes(**self.case.attrs)
        given = tuple(specs.get(name) for name in self.op.tensors)
        return plan_call(self.op, given, attrs, self.device, self.implementation)[0]

    def digest(self) -> str:
        plan, specs = self.plan, self.specs
        kernels = (identity(specialize(launch, plan, specs), self.device.arch) for launch in plan.launches)
        return digest(Path(__file__).read_text(), jax.__version__, version("jax-triton"), *kernels)

    def lower(self) -> dict[str, object]:
        plan, arch = self.plan, self.device.arch
        forget(plan)
        by_triton: dict[str, set[str]] = {}
        for launch in plan.launches:
            kernel = compiled(specialize(launch, plan, self.specs), arch)
            by_triton.setdefault(launch.name, set()).add(kernel.asm["ptx"])
        before = len(compiles())
        exported = export(self.op, self.case, self.inputs, self.device, self.implementation)
        restored = jax.export.deserialize(exported.serialize())
        by_jax = dumped()

        def codes(name: str, texts: Iterable[str]) -> list[str]:
            both = by_triton.get(name, set()).intersection(by_jax.get(name, ()))
            return sorted(
                hashlib.sha256(ptx.encode()).hexdigest() if ptx in both else assemble(ptx, arch) for ptx in texts
            )

        return {
            "op": self.name,
            "more": len(compiles()) - before,
            "custom_calls": exported.mlir_module().count(CUSTOM_CALL),
            "launches": len(plan.launches),
            "restored": restored.mlir_module() == exported.mlir_module() and restored.platforms == ("cuda",),
            "jax": {name: codes(name, texts) for name, texts in by_jax.items()},
            "triton": {name: codes(name, texts) for name, texts in by_triton.items()},
        }


def calls(device: Device) -> Iterator[Lowered]:
    for name, op in registry().items():
        yield Lowered(name, op, exported_case(op)[0], device)
    if device.arch == 90:
        for name, beginning, implementation in (
            ("sparse_mla triton", "t1-h128", "triton"),
            ("sparse_mla in parts", "t90-", None),
            ("indexer_topk in parts", "parts", None),
        ):
            op = registry()[name.split()[0]]
            case = next(case for case in op.cases if case.name.startswith(beginning))
            yield Lowered(name, op, case, device, implementation)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--but", type=Path)
    given = parser.parse_args()
    device = next(d for d in KNOWN_DEVICES if d.arch == given.arch)
    all_calls = [*calls(device)]
    now = {call.name: call.digest() for call in all_calls}
    print(json.dumps({"digests": now}))
    before = json.loads(given.but.read_text()) if given.but and given.but.exists() else {}
    for call in all_calls:
        if call.name in given.ops or before.get(call.name) != now[call.name]:
            print(json.dumps(call.lower()), flush=True)


if __name__ == "__main__":
    main()
