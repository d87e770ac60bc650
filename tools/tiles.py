"""The launches that serving calls take on each known GPU, in tools/tiles.txt: a change of a plan shows there.

python -m tools.tiles        (writes the file; seconds)
A line is what parts plan alike: a kernel's programs, its tile, warps and stages, its most registers a thread if the
plan bounds them, and the splits of the keys. Most of these parts are not where tests run, and nothing else would tell
that a tile which was chosen for one is another now. `[triton]` is the portable kernels' plan where it is not the
default.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from tools.resources import calls
from xmla.core.models.calls import Call
from xmla.core.plan import Launch
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device

FILE = Path(__file__).with_suffix(".txt")
TILE = ("BLOCK_H", "BLOCK_N", "BLOCK_T", "GROUP")


def short(launch: Launch) -> str:
    tile = [f"{name} {launch.constants[name]}" for name in TILE if name in launch.constants]
    words = [f"{launch.name} × {prod(launch.grid)}", *tile, f"{launch.size}", f"{launch.num_stages} stages"]
    if launch.max_registers is not None:
        words.append(f"{launch.max_registers} registers")
    if launch.sizes.get("num_splits", 1) > 1:
        words.append(f"{launch.sizes['num_splits']} splits")
    return ", ".join(words)


def planned(call: Call, device: Device, implementation: str | None) -> str:
    op = registry()[call.op]
    problem = op.bind(call.specs, op.attributes(**call.attrs), implementation)
    return "; ".join(short(launch) for launch in op.plan(problem, device).active)


def lines() -> Iterator[str]:
    for name, call, _ in calls():
        yield name
        parts: dict[str, list[str]] = {}
        for device in KNOWN_DEVICES:
            default, portable = (planned(call, device, by) for by in (None, "triton"))
            parts.setdefault(default, []).append(device.name.removeprefix("NVIDIA "))
            if portable != default:
                parts.setdefault(f"[triton] {portable}", []).append(device.name.removeprefix("NVIDIA "))
        yield from (f"    {', '.join(names)}: {plan}" for plan, names in parts.items())


def text() -> str:
    return "".join(f"{line}\n" for line in lines())


if __name__ == "__main__":
    FILE.write_text(text())
