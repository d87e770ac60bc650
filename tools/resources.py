"""What serving calls take of GPUs that are not here: one table of the compiled kernels beside each part's roofline.

python -m tools.resources [TEXT]           (calls whose names contain it; a few minutes without)
A line is a call's kernel of most programs: its registers and spilled bytes, the programs that an SM holds, the share of
the SMs' places that its waves fill, and the products that it computes for each that the call needs (of mma.sync, by the
instructions of a tile; 16 heads fill a product, so that fewer need more). `predicted` is the roofline's time with so
many products and that share. It is a bound still: of what a kernel waits for it knows nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Annotated

import typer
from triton import knobs

from tools.compile_plans import build
from xmla.core.call import Problem
from xmla.core.compile import Specialization
from xmla.core.formats.mla import V4
from xmla.core.models.calls import Call
from xmla.core.plan import Launch
from xmla.core.plan.roofline import LAUNCH_SECONDS, seconds_of
from xmla.core.registry import registry
from xmla.core.values import B200, B300, GB10, PEAKS, RTX_PRO_6000, Device, Peaks, Spec, cdiv

# NVIDIA's white paper of the RTX Blackwell architecture: 1792 GB/s; dense products summed in float32.
RTX_5090 = replace(RTX_PRO_6000, name="NVIDIA GeForce RTX 5090", num_sms=170)
PARTS = {
    RTX_PRO_6000: PEAKS[RTX_PRO_6000.name], RTX_5090: Peaks(1.792e12, 209.5e12, 419e12), GB10: PEAKS[GB10.name],
    B200: PEAKS[B200.name], B300: PEAKS[B300.name],
}  # fmt: skip
REGISTERS = 65536  # of an SM
# Bytes of shared memory of an SM, of which each program reserves 1 KB, its warps and its programs, by the bytes that a
# program may have (CUDA programming guide).
SMS = {99 << 10: (100 << 10, 48, 24), 163 << 10: (164 << 10, 64, 32), 227 << 10: (228 << 10, 64, 32)}
PRODUCT = re.compile(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)")


def programs_a_sm(device: Device, shared: int, warps: int, registers: int) -> int:
    """Programs with so many bytes, warps, and registers a thread that an SM holds."""
    most_bytes, most_warps, most = SMS[device.smem_bytes]
    of_warp = cdiv(max(registers, 1) * 32, 256) * 256
    return min(most_bytes // (shared + 1024), most_warps // warps, REGISTERS // (of_warp * warps), most)


def calls() -> Iterator[tuple[str, Call, int | None]]:
    """Name, call, and keys of a request."""
    scale = {"softmax_scale": 0.1}
    pages, rows = Spec((1 << 15, 64, 656), "uint8"), Spec((1 << 20, 1, 576), "bfloat16")
    shapes = [("decode", tokens, heads) for tokens, heads in ((1, 128), (8, 128), (64, 16), (64, 64), (64, 128))]
    for what, tokens, heads in [*shapes, ("prefill", 1024, 128)]:
        q, slots = Spec((tokens, heads, 576), "bfloat16"), Spec((tokens, 2048), "int32")
        for kind, cache in (("pages", pages), ("rows", rows)):
            name = f"V3.2 {what} {kind} t={tokens} h={heads}"
            yield name, Call("sparse_mla", {"q": q, "cache": cache, "slots": slots}, scale), None
    entries = Spec((1 << 14, 64, V4.row), "uint8", (V4.page_stride(64), V4.row, 1))
    for tokens, heads, k in ((1, 64, 512), (64, 64, 512), (64, 128, 1024)):
        specs = {"q": Spec((tokens, heads, 512), "bfloat16"), "cache": entries, "slots": Spec((tokens, 128), "int32")}
        extra = {"extra_cache": entries, "extra_slots": Spec((tokens, k), "int32")}
        yield f"V4 decode t={tokens} h={heads} k=128+{k}", Call("sparse_mla", specs | extra, scale), None
    for keys, row in (("fp8", 132), ("mxfp4", 68)):
        for next_n in (1, 2):
            tokens = 64 * next_n
            query = {"q8": Spec((tokens, 64, 128), "float8_e4m3fn"), "weights": Spec((tokens, 64), "float32")}
            cache = {"cache": Spec((1 << 16, 64, row), "uint8"), "block_table": Spec((64, 1024), "int32")}
            paged = query | cache | {"lengths": Spec((tokens,), "int32")}
            yield f"logits {keys} b=64 next_n={next_n}", Call("indexer_logits_paged", paged, {}), 65536
    ends, columns = Spec((2048,), "int32"), Spec((65536, 128), "float8_e4m3fn")
    query = {"q8": Spec((2048, 64, 128), "float8_e4m3fn"), "weights": Spec((2048, 64), "float32")}
    ragged = query | {"keys": columns, "key_scales": Spec((65536,), "float32"), "starts": ends, "ends": ends}
    yield "logits fp8 prefill 2048 × 65536", Call("indexer_logits", ragged, {}), None


def needed(problem: Problem, values: dict[str, object]) -> float | None:
    """Operations of a tile that the call needs; None for a kernel whose tile is not known."""
    if problem.op == "sparse_mla":
        layout = problem.formats["cache"]
        return 2.0 * min(values["BLOCK_H"], problem["H"]) * values.get("BLOCK_N", 32) * (layout.dims + 512)  # type: ignore[type-var, operator]
    return 2.0 * values["GROUP"] * problem["I"] * values["BLOCK_N"] * problem["D"]  # type: ignore[operator]


def main(text: Annotated[str, typer.Argument(help="Calls whose name contains this.")] = "") -> None:
    """Print a line for each call on each GPU that is not here."""
    if knobs.runtime.interpret:
        raise typer.BadParameter("TRITON_INTERPRET is set: unset it, kernels are compiled")
    knobs.nvidia.dump_ptxas_log = True
    head = "part", "call", "kernel", "registers", "spills", "programs an SM", "waves filled", "products", "roofline, µs"
    print(f"| {' | '.join((*head, 'predicted'))} |", "|---" * 10 + "|", sep="\n")
    for name, call, keys in calls():
        if text in name:
            for device, peaks in PARTS.items():
                print(f"| {device.name} | {name} | {line(call, keys, device, peaks)} |", flush=True)


def line(call: Call, keys: float | None, device: Device, peaks: Peaks) -> str:
    op, plan = registry()[call.op], call.plan(device)
    problem = op.bind(call.specs, op.attributes(**call.attrs))
    made: list[tuple[Launch, Specialization]] = list(zip(plan.active, call.specializations(device), strict=True))
    launch, specialization = max(made, key=lambda pair: prod(pair[0].grid) * pair[0].num_warps)
    if len(made) > 1:  # the combination of splits has more programs, of next to no work
        launch, specialization = made[0]
    built = build(specialization, device.arch, device.arch)
    registers = int(re.findall(r"Used (\d+) registers", built.said)[-1])
    spilled = int(re.findall(r"(\d+) bytes spill stores", built.said)[-1])
    programs = programs_a_sm(device, built.shared, launch.num_warps, registers)
    places, count = device.num_sms * max(programs, 1), prod(launch.grid)
    filled = count / (cdiv(count, places) * places)
    computed = sum(2.0 * prod(map(int, sizes)) for sizes in PRODUCT.findall(built.ptx)) * launch.num_warps
    least = needed(problem, specialization.constants) if computed else None
    redundant = computed / least if least else 1.0
    work = op.work(problem, keys)
    scaled = replace(work, bf16_flops=work.bf16_flops * redundant, fp8_flops=work.fp8_flops * redundant)
    launches = len(plan.active) * LAUNCH_SECONDS
    predicted = seconds_of(scaled, peaks) / filled + launches
    shown = f"{redundant:.2f}" if least else "tensor memory"
    return (
        f"`{launch.name}` | {registers} | {spilled} | {programs} | {filled:.2f} | {shown} | "
        f"{(seconds_of(work, peaks) + launches) * 1e6:.0f} | {predicted * 1e6:.0f}"
    )


if __name__ == "__main__":
    typer.run(main)
