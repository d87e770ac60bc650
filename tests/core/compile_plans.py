"""Compiles every kernel configuration that the planner emits for one device and prints a JSON line each.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python tests/core/compile_plans.py 90 [--hash]
With --hash each line has the SHA-256 of the kernel's instructions, for tests/core/same_code.py.
`python tests/core/support_matrix.py` makes docs/support.md of these lines for every architecture.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import triton
from triton.backends.nvidia.compiler import get_ptxas

from xmla.core.compile import compiled, specialize
from xmla.core.device import KNOWN_DEVICES, LIMITED_DEVICES, Device
from xmla.core.errors import UnsupportedError
from xmla.core.layout import NVFP4, PLAIN, PLAIN_V4, V4, V32, V41, V41_FP4
from xmla.core.op import Op, plan_call, registry
from xmla.core.plan import Launch, Plan
from xmla.core.spec import Spec

Specs = dict[str, Spec]
DEVICES = {device.arch: device for device in (*KNOWN_DEVICES, *LIMITED_DEVICES)}


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
    """The formats of a call's caches: what support may depend on beside op and architecture."""
    forms = [f"{specs[name].dtype} {specs[name].shape[-1]}" for name in op.pools if name in specs]
    named = [str(value) for name, value in attrs.items() if name.endswith("format") and value is not None]
    return ", ".join([" + ".join(forms), *named])


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


def of_two_sources() -> Iterator[tuple[str, str, Specs, dict[str, object]]]:
    """Attention over two sources with all heads: the most that a tile's registers and shared memory hold.

    Those of one format are what Hopper's Gluon kernel takes.
    """
    tokens, heads, k = 64, 128, 512
    slots, lengths = Spec((tokens, k), "int32"), Spec((tokens,), "int32")
    turned = {"cos_sin": Spec((65536, 64), "float32"), "positions": lengths}
    both = ((V4, V4, turned), (PLAIN, PLAIN, {}), (PLAIN_V4, PLAIN_V4, turned))
    mixed = ((V32, NVFP4, {}), (PLAIN, NVFP4, {}), (V4, V41_FP4, turned), (V41, V41_FP4, turned))
    for first, second, more in (*mixed, *both):
        caches = [Spec((4096, 64, row.row), "uint8" if row.packed else "bfloat16") for row in (first, second)]
        specs = {"q": Spec((tokens, heads, first.dims), "bfloat16"), "cache": caches[0], "slots": slots}
        extra = {"extra_cache": caches[1], "extra_slots": slots, "extra_lengths": lengths}
        name = f"h{heads}-{first.name}+{second.name}"
        formats = {"cache_format": first.name, "extra_cache_format": second.name}
        yield "sparse_mla", name, specs | {"lengths": lengths} | extra | more, {"softmax_scale": 0.1, **formats}


def planned(name: str, case: str, specs: Specs, given: dict[str, object], device: Device, by: str | None) -> Planned:
    op = registry()[name]
    attrs = op.defaults | given
    arguments = tuple(specs.get(argument) for argument in op.tensors)
    form = form_of(op, specs, attrs) + (f", {by}" if by else "")
    try:
        plan, _ = plan_call(op, arguments, tuple(attrs[attr.name] for attr in op.attrs), device, by)
    except UnsupportedError as error:
        return Planned(name, case, form, specs, None, str(error))
    return Planned(name, case, form, specs, plan)


def plans(device: Device) -> Iterator[Planned]:
    """Every op's cases and serving sizes by the best kernels; cases by those that are chosen by name."""
    ops = registry()
    calls = [(name, *call) for name, op in ops.items() for call in of_cases(op)]
    for tokens, heads, k in ((64, 128, 2048), (128, 16, 512), (2048, 32, 1024), (64, 8, 8192)):
        calls += of_serving(tokens, heads, k)
    calls += of_two_sources()
    for call in calls:
        yield planned(*call, device, None)
    for name, op in ops.items():
        for implementation in op.implementations if len(op.implementations) > 1 else ():
            for call in of_cases(op):
                yield planned(name, *call, device, implementation)


def machine_code(cubin: bytes, hashed: bool) -> dict[str, object]:
    """Registers of a thread, bytes that they spill to local memory, and if `hashed` the SHA-256 of the instructions.

    Spilled is the stack if an instruction stores there: LLVM may leave an array on it that nothing uses. All are None
    where this Triton was packed without cuobjdump.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return dict.fromkeys(("registers", "spilled_bytes", "sass"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dump(what: str) -> str:
            return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout

        usage = dump("--dump-resource-usage")
        registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", usage))) for what in ("REG", "STACK"))
        # Disassembling takes a third as long as compiling.
        sass = dump("--dump-sass") if stack or hashed else ""
    code = "\n".join(re.findall(r"/\*[0-9a-f]{4}\*/.*", sass))
    return {
        "registers": registers,
        "spilled_bytes": stack if re.search(r"\bSTL\b", sass) else 0,
        "sass": hashlib.sha256(code.encode()).hexdigest() if hashed else None,
    }


def serialized(ptx: str) -> str | None:
    """What ptxas says if it makes each `wgmma` wait for the last one, or ignores `setmaxnreg`; else None."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Potential Performance Loss.*", said.stdout + said.stderr)
    return found and found[0]


def report(call: Planned, launch: Launch, plan: Plan, device: Device, hashed: bool) -> dict[str, object]:
    kernel = compiled(specialize(launch, plan, call.specs), device.arch)
    ptx = kernel.asm["ptx"]
    return {
        "op": call.op,
        "form": call.form,
        "case": call.case,
        "kernel": launch.name,
        "triton": triton.__version__,
        "ptx": float(re.findall(r"^\.version (\S+)", ptx, re.MULTILINE)[0]),
        "block_h": dict(launch.constexprs).get("BLOCK_H", 0),
        "shared": kernel.metadata.shared,
        "tensor_memory": kernel.metadata.tmem_size,
        "cubin_bytes": len(kernel.asm["cubin"]),
        # Triton turns a kernel that does not fit tensor memory into one that only traps.
        "trap": "trap;" in ptx,
        **machine_code(kernel.asm["cubin"], hashed),
        "serialized": serialized(ptx) if device.arch == 90 and "wgmma" in ptx else None,
        # Bytes of each copy to shared memory. cp.async takes 4, 8 or 16.
        "copies": sorted({int(size, 0) for size in re.findall(r"cp\.async\.c[ag][^;]*\], (0x[0-9a-f]+|\d+)", ptx)}),
        "mma": [name for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync") if name in ptx],
    }


def main() -> None:
    device, hashed = DEVICES[int(sys.argv[1])], "--hash" in sys.argv
    seen: dict[object, dict[str, object]] = {}
    for call in plans(device):
        if call.plan is None:
            print(json.dumps({"op": call.op, "form": call.form, "case": call.case, "refused": call.reason}))
            continue
        for launch in call.plan.launches:
            key = specialize(launch, call.plan, call.specs)
            if key not in seen:
                seen[key] = report(call, launch, call.plan, device, hashed)
            print(json.dumps(seen[key] | {"op": call.op, "form": call.form, "case": call.case}), flush=True)


if __name__ == "__main__":
    main()
