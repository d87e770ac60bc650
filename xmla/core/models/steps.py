"""Sizes of engines' steps at which plans differ, and calls that their plugins have alike: of the lists of kernels."""

from xmla.core.device import Device
from xmla.core.models.base import Call
from xmla.core.models.memory import SPLIT_TOKENS
from xmla.core.spec import Spec

STEP = 8  # between numbers of tokens of which plans differ by how many waves programs fill


def token_counts(device: Device, most: int) -> list[int]:
    """Numbers of tokens at which plans are made: all of which a few waves of programs are, then every STEP-th."""
    few, split = 2 * device.num_sms + 2, min(most, SPLIT_TOKENS) + 1
    numbers = {*range(1, min(few, most + 1)), *range(few, split, STEP), *powers_of_2(most), most}
    return sorted(numbers)


def full_waves(device: Device, most: int) -> list[int]:
    """Numbers of tokens at which selections are planned: those that 1, 2, 4, … programs for each fit the GPU."""
    programs = 2 * device.num_sms
    full = {programs // n for n in powers_of_2(programs)}
    return sorted({n for n in {*full, *(n + 1 for n in full), *powers_of_2(most)} if n <= most})


def powers_of_2(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def around_powers_of_2(most: int) -> list[int]:
    """Sizes at which selections are planned: powers of two, what exceeds them, and the most."""
    return sorted({min(n + more, most) for n in powers_of_2(2 * most) for more in (0, 1)})


def map_call(k: int, page: int, *, compact: bool = False) -> Call:
    """That of `map_slots`, whose kernel is the same for any number of tokens and any table."""
    shapes = {"indices": (1, k), "block_table": (1, 1), "request_ids": (1,)}
    specs = {name: Spec(shape, "int32") for name, shape in shapes.items()}
    return Call("map_slots", specs, {"page_size": page, "compact": compact})
