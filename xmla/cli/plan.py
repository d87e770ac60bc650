"""`xmla plan` and `xmla supports`: what would run, asked without running it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from xmla._warmup import present_device
from xmla.core.device import KNOWN_DEVICES, LIMITED_DEVICES, Device, find_device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.models.base import Model
from xmla.core.models.v4 import ModelConfigV4
from xmla.core.models.v32 import ModelConfig
from xmla.core.support import supports

MODELS: dict[str, Callable[..., Model]] = {
    "deepseek_v32": ModelConfig,
    "deepseek_v4": ModelConfigV4,
    "glm_moe_dsa": partial(ModelConfig, heads=64, index_heads=32, softmax_scale=256**-0.5, shared_selection=True),
}


def configure(
    model: str, batches: list[int] | None, max_lens: list[int] | None, next_n: list[int] | None,
    prefill: list[int] | None, mixed: bool = False, ranks: int = 1, **sizes: float | None,
) -> Model:  # fmt: skip
    """A model with these sizes; lists that are not given are one typical value each, without prefill.

    Raises:
        ArgumentError: The model is not served by several ranks.
    """
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if ranks > 1:
        if MODELS[model] is ModelConfigV4:
            raise ArgumentError(f"ranks is {ranks}, expected 1 for {model}")
        given["ranks"] = ranks
    return MODELS[model](
        mixed=mixed, batches=tuple(batches or [64]), max_lens=tuple(max_lens or [65536]), next_n=tuple(next_n or [1]),
        prefill_tokens=tuple(prefill or []), **given,
    )  # fmt: skip


def present_or_known(name: str | None) -> Device:
    """The device of that name; without one the GPU present, else the H200."""
    if name is not None:
        return find_device(name)
    try:
        return present_device()[0]
    except UnsupportedError:
        return find_device("H200")


def show_plan(config: Model, device_name: str | None) -> None:
    """Print each step's launches, workspace and roofline with requests of the full length, and what the caches take.

    Below a step: which implementation each op takes, and why none that is better.
    """
    device = present_or_known(device_name)
    console = Console()
    for name, calls in config.steps():
        table = Table("op", "launch", "programs", "warps", "workspace", "≥ µs", title=f"{name}, on {device.name}")
        for call in calls:
            plan = call.plan(device)
            seconds = call.estimate(device)
            told = call.op, f"{plan.workspace_bytes:,} B", "" if seconds is None else f"{seconds * 1e6:.1f}"
            for index, launch in enumerate(plan.active):
                op, space, least = told if index == 0 else ("", "", "")
                table.add_row(op, launch.name, str(launch.grid[0]), str(launch.num_warps), space, least)
        console.print(table)
        for choice in dict.fromkeys(choice for call in calls for choice in call.plan(device).choices):
            console.print(f"{choice}", soft_wrap=True)
    for name, spec in config.caches().items():
        entry, page = spec.shape[2] * spec.itemsize, spec.stride(0) * spec.itemsize
        console.print(f"{name}: {entry} bytes per entry and layer, {page:,} per page of {spec.shape[1]}")
    if isinstance(config, ModelConfig) and config.ranks > 1:
        console.print(f"{config.ranks} ranks share each request's pages; received per rank, step and layer:")
        for name, parts in config.exchanged():
            shown = ", ".join(f"{what} {count:,} B" for what, count in parts.items())
            console.print(f"  {name}: {sum(parts.values()):,} B ({shown})", soft_wrap=True)
    console.print(f"{len(config.specializations(device))} kernels in all")


def show_support(op: str, sizes: list[str], devices: list[str] | None = None) -> bool:
    """Print the answer for every known device, or those whose names contain one of `devices`; True if one is yes.

    Raises:
        ArgumentError: There is no such op, axis or device, or a size is none.
    """
    axes = {}
    for size in sizes:
        name, _, value = size.partition("=")
        if not value.isdecimal():
            raise ArgumentError(f"size is {size!r}, expected AXIS=NUMBER")
        axes[name] = int(value)
    known = (*KNOWN_DEVICES, *LIMITED_DEVICES)
    named = {part: [device for device in known if part.lower() in device.name.lower()] for part in devices or [""]}
    for part, found in named.items():
        if not found:
            names = ", ".join(device.name for device in known)
            raise ArgumentError(f"device is {part!r}, expected a part of one of the names: {names}")
    table = Table("device", "compute capability", "", "implementation", "why not")
    answers = []
    for device in known:
        if any(device in found for found in named.values()):
            answer = supports(op, device, **axes)
            answers.append(answer.ok)
            table.add_row(
                device.name,
                f"{device.arch / 10}",
                "yes" if answer.ok else "[red]no",
                answer.implementation,
                answer.reason,
            )
    Console(width=160).print(table)
    return any(answers)
