"""`xmla plan` and `xmla supports`: what would run, asked without running it."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from xmla._warmup import present_device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.models.base import Model
from xmla.core.models.checkpoint import model_config
from xmla.core.models.v32 import ModelConfig
from xmla.core.registry import registry
from xmla.core.support import supports
from xmla.core.values import KNOWN_DEVICES, Device, find_device

ARGUMENTS = {name for op in registry().values() for name in op.tensors}
TYPICAL = {"batches": (64,), "max_lens": (65536,), "next_n": (1,), "prefill_tokens": ()}


def typical(model: str, tensor_parallel: int = 1, **sizes: Any) -> Model:
    """A model with these sizes; lists that are not given, or None, are one typical value each, without prefill."""
    return configure(model, tensor_parallel, **TYPICAL | {name: n for name, n in sizes.items() if n is not None})


def configure(model: str, tensor_parallel: int = 1, **sizes: Any) -> Model:
    """A model with these sizes; those that are not given, or None, are its own."""
    return model_config(
        model, tensor_parallel=tensor_parallel, **{name: size for name, size in sizes.items() if size is not None}
    )


def present_or_known(name: str | None, console: Console) -> Device:
    """The device of that name; without one the GPU present, else the H200, which a line tells."""
    if name is not None:
        return find_device(name)
    try:
        return present_device()[0]
    except UnsupportedError:
        assumed = find_device("H200")
        console.print(f"no GPU is present: planned for {assumed.name}; --device names another", soft_wrap=True)
        return assumed


def show_plan(config: Model, device_name: str | None) -> None:
    """Print each step's launches, workspace and roofline with requests of the full length, and what the caches take.

    Below a step: which implementation each op takes, and why none that is better; what is left out, since nothing reads
    it.
    """
    console = Console()
    device = present_or_known(device_name, console)
    for name, calls in config.steps():
        table = Table(
            "op, and its launches", "programs", "warps", "workspace", "≥ µs", title=f"{name}, on {device.name}",
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column in table.columns[1:]:
            column.justify = "right"
        for call in calls:
            plan, seconds = call.plan(device), call.estimate(device)
            least = "" if seconds is None else f"{seconds * 1e6:.1f}"
            table.add_row(
                f"or {call.op}" if call.alternative else call.op, "", "", f"{plan.workspace_bytes:,} B", least
            )
            for launch in plan.active:
                table.add_row(f"  {launch.name}", str(launch.grid[0]), str(launch.num_warps))
        console.print(table)
        for remark in dict.fromkeys(remark for call in calls for remark in call.plan(device).remarks):
            console.print(remark, soft_wrap=True)
    for name, spec in config.caches().items():
        entry, page = spec.shape[2] * spec.itemsize, spec.stride(0) * spec.itemsize
        console.print(f"{name}: {entry} bytes per entry and layer that has it, {page:,} per page of {spec.shape[1]}")
    if isinstance(config, ModelConfig) and config.ranks > 1:
        console.print(f"{config.ranks} ranks share each request's pages; received per rank, step and layer:")
        for name, parts in config.exchanged():
            counts = ", ".join(f"{what} {count:,} B" for what, count in parts.items())
            console.print(f"  {name}: {sum(parts.values()):,} B ({counts})", soft_wrap=True)
    count = len(config.specializations(device))
    console.print(
        f"{count} kernels are compiled for these steps, ahead by `xmla warmup`: some launches need variants for other "
        "lengths or pool sizes", soft_wrap=True,
    )  # fmt: skip


def show_model_support(config: Model, devices: list[str] | None = None) -> bool:
    """Print for every known device, or for `devices`, whether the steps run, and each op by what; True if on one.

    Raises:
        ArgumentError: There is no such device.
    """
    console, refusals, served = Console(), dict[str, None](), False
    table = Table("device", "compute capability", "", "implementations, where an op has several")
    for device in map(find_device, devices) if devices else KNOWN_DEVICES:
        choices, refused = dict[str, dict[str, None]](), dict[str, None]()
        for step, calls in config.steps():
            for call in calls:
                try:
                    plan = call.plan(device)
                except (ArgumentError, UnsupportedError) as error:
                    refused[f"{step}: {error}"] = None
                    continue
                for choice in plan.choices:
                    choices.setdefault(choice.op, {})[choice.implementation] = None
        kernels = "; ".join(f"{op} by {' or '.join(names)}" for op, names in choices.items())
        table.add_row(device.name, f"{device.arch / 10}", "[red]no" if refused else "yes", kernels)
        refusals |= refused
        served |= not refused
    console.print(f"{config}", soft_wrap=True, markup=False)
    console.print(table)
    for refusal in refusals:
        console.print(refusal, soft_wrap=True, markup=False)
    return served


def show_support(op: str, words: list[str], devices: list[str] | None = None) -> bool:
    """Print the answer for every known device, or for `devices`; True if one is yes.

    Raises:
        ArgumentError: There is no such op, axis, argument, format or device, or a size is none.
    """
    asked: dict[str, int | str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not value or value.isdecimal() != (name not in ARGUMENTS):
            raise ArgumentError(f"asked is {word!r}, expected AXIS=NUMBER, such as H=16, or ARGUMENT=FORMAT or =DTYPE")
        if name in asked:
            raise ArgumentError(f"asked is {word!r} after {name}={asked[name]}, expected each name once")
        asked[name] = int(value) if value.isdecimal() else value
    answers = {d: supports(op, d, **asked) for d in map(find_device, devices or [])}
    answers = answers or {d: supports(op, d, **asked) for d in KNOWN_DEVICES}
    table = Table("device", "compute capability", "", "implementation")
    for device, answer in answers.items():
        table.add_row(device.name, f"{device.arch / 10}", "yes" if answer.ok else "[red]no", answer.implementation)
    console = Console()
    console.print(f"{op}: {next(iter(answers.values())).call}", soft_wrap=True, markup=False)
    console.print(table)
    for reason in dict.fromkeys(answer.reason for answer in answers.values() if not answer.ok):
        console.print(reason, soft_wrap=True, markup=False)
    return any(answers.values())
