"""Sizes of steps at which plans differ, of the lists of kernels that models and engines' plugins have."""

from xmla.core.values import Device, cdiv

# No plan divides the keys of more tokens, on any known device.
SPLIT_TOKENS = 2048
STEP = 8  # between numbers of tokens of which plans differ by how many waves programs fill


def token_counts(device: Device, most: int) -> list[int]:
    """Numbers of tokens at which plans are made: all of which a few waves of programs are, then every STEP-th."""
    few, split = 2 * device.num_sms + 2, min(most, SPLIT_TOKENS) + 1
    numbers = {*range(1, min(few, most + 1)), *range(few, split, STEP), *powers_of_2(most), most}
    return sorted(numbers - {0})


def full_waves(device: Device, most: int) -> list[int]:
    """Numbers of tokens at which selections are planned: those that 1, 2, 4, … programs for each fill the GPU.

    Or just do not, or more than fill it, and numbers between these.
    """
    programs = 2 * device.num_sms
    full = {count for n in powers_of_2(programs) for count in (programs // n, cdiv(programs, n))}
    near = {count + more for count in full for more in (-1, 0, 1)} | {3 * count // 4 for count in full}
    return sorted({n for n in {*near, *powers_of_2(most), most} if 0 < n <= most})


def powers_of_2(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def around_powers_of_2(most: int, *more: int) -> list[int]:
    """Sizes at which selections are planned: powers of two, what exceeds them by 1 or by `more`, and the most."""
    return sorted({min(n + by, most) for n in powers_of_2(2 * most) for by in (0, 1, *more)})
