"""`xmla plan` and `xmla supports`: what would run, asked without running it."""

import json
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
from xmla.core.support import checked_on, supports
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


def facts_of_plan(config: Model, device: Device) -> dict[str, Any]:
    """Each step's launches, workspace and roofline with requests of the full length, and what the caches take."""
    steps = []
    for name, calls in config.steps():
        of_calls = []
        for call in calls:
            plan, seconds = call.plan(device), call.estimate(device)
            launches = [
                {"kernel": each.name, "programs": each.grid[0], "warps": each.num_warps} for each in plan.active
            ]
            least = None if seconds is None else seconds * 1e6
            of_calls.append({
                "op": call.op, "alternative": call.alternative, "workspace_bytes": plan.workspace_bytes,
                "least_us": least, "launches": launches, "remarks": [*plan.remarks],
            })  # fmt: skip
        steps.append({"step": name, "calls": of_calls})
    caches = {
        name: {"bytes_per_entry": spec.shape[2] * spec.itemsize, "bytes_per_page": spec.stride(0) * spec.itemsize,
               "entries_per_page": spec.shape[1]}
        for name, spec in config.caches().items()
    }  # fmt: skip
    facts: dict[str, Any] = {"device": device.name, "steps": steps, "caches": caches}
    if isinstance(config, ModelConfig) and config.ranks > 1:
        facts |= {"ranks": config.ranks, "received_bytes": dict(config.exchanged())}
    return facts | {"kernels": len(config.specializations(device))}


def show_plan(config: Model, device_name: str | None, as_json: bool = False) -> None:
    """Print what a model's steps launch, as tables or as JSON.

    Below a step: which implementation each op takes, and why none that is better; what is left out, since nothing reads
    it.
    """
    console = Console()
    device = present_or_known(device_name, Console(stderr=True) if as_json else console)
    facts = facts_of_plan(config, device)
    if as_json:
        print(json.dumps(facts))
        return
    for step in facts["steps"]:
        table = Table(
            "op, and its launches", "programs", "warps", "workspace", "≥ µs", title=f"{step['step']}, on {device.name}",
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column in table.columns[1:]:
            column.justify = "right"
        for call in step["calls"]:
            least = "" if call["least_us"] is None else f"{call['least_us']:.1f}"
            name = f"or {call['op']}" if call["alternative"] else call["op"]
            table.add_row(name, "", "", f"{call['workspace_bytes']:,} B", least)
            for launch in call["launches"]:
                table.add_row(f"  {launch['kernel']}", str(launch["programs"]), str(launch["warps"]))
        console.print(table)
        for remark in dict.fromkeys(remark for call in step["calls"] for remark in call["remarks"]):
            console.print(remark, soft_wrap=True)
    for name, cache in facts["caches"].items():
        page = f"{cache['bytes_per_page']:,} per page of {cache['entries_per_page']}"
        console.print(f"{name}: {cache['bytes_per_entry']} bytes per entry and layer that has it, {page}")
    if "ranks" in facts:
        console.print(f"{facts['ranks']} ranks share each request's pages; received per rank, step and layer:")
        for name, parts in facts["received_bytes"].items():
            counts = ", ".join(f"{what} {count:,} B" for what, count in parts.items())
            console.print(f"  {name}: {sum(parts.values()):,} B ({counts})", soft_wrap=True)
    console.print(
        f"{facts['kernels']} kernels serve these steps, since some launches have variants for other lengths or pool "
        "sizes; `xmla warmup` compiles them", soft_wrap=True,
    )  # fmt: skip


def support_of_model(config: Model, device: Device) -> dict[str, Any]:
    """Whether the steps of a model run on a device, each op by which kernels, and if not why."""
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
    return {
        "device": device.name, "compute_capability": device.arch / 10, "ok": not refused,
        "implementations": {op: [*names] for op, names in choices.items()}, "reasons": [*refused],
        "checked": "" if refused else checked_on(device),
    }  # fmt: skip


def show_model_support(config: Model, devices: list[str] | None = None, as_json: bool = False) -> bool:
    """Print for every known device, or for `devices`, whether the steps run, and each op by what; True if on one.

    Raises:
        ArgumentError: There is no such device.
    """
    answers = [support_of_model(config, device) for device in _named(devices)]
    if as_json:
        print(json.dumps({"model": str(config), "devices": answers}))
    else:
        table = Table("device", "compute capability", "", "implementations, where an op has several", "checked")
        for answer in answers:
            kernels = "; ".join(f"{op} by {' or '.join(names)}" for op, names in answer["implementations"].items())
            table.add_row(*_first_cells(answer), kernels, answer["checked"])
        _show(str(config), table, [reason for answer in answers for reason in answer["reasons"]])
    return any(answer["ok"] for answer in answers)


def show_support(op: str, words: list[str], devices: list[str] | None = None, as_json: bool = False) -> bool:
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
    support = {device: supports(op, device, **asked) for device in _named(devices)}
    call = next(iter(support.values())).call
    answers = [
        {
            "device": device.name, "compute_capability": device.arch / 10, "ok": answer.ok,
            "implementation": answer.implementation, "reason": answer.reason, "checked": answer.checked,
        }
        for device, answer in support.items()
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"op": op, "call": call, "devices": answers}))
    else:
        table = Table("device", "compute capability", "", "implementation", "checked")
        for answer in answers:
            table.add_row(*_first_cells(answer), answer["implementation"], answer["checked"])
        _show(f"{op}: {call}", table, [answer["reason"] for answer in answers if not answer["ok"]])
    return any(support.values())


def _named(devices: list[str] | None) -> list[Device]:
    return [*map(find_device, devices)] if devices else [*KNOWN_DEVICES]


def _first_cells(answer: dict[str, Any]) -> tuple[str, str, str]:
    return answer["device"], str(answer["compute_capability"]), "yes" if answer["ok"] else "[red]no"


def _show(question: str, table: Table, reasons: list[str]) -> None:
    console = Console()
    console.print(question, soft_wrap=True, markup=False)
    console.print(table)
    for reason in dict.fromkeys(reasons):
        console.print(reason, soft_wrap=True, markup=False)
