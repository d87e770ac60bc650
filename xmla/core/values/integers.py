"""Arithmetic of sizes; of a trace's each function is one step."""

from collections.abc import Iterable

from xmla.core.values.sizes import step


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is typed for kernels."""
    if type(a) is type(b) is int:
        return -(-a // b)
    return step("-(-{} // {})", lambda a, b: -(-a // b), a, b)


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least n."""
    return step("-(-{} // {}) * {}", lambda n, unit, _: -(-n // unit) * unit, n, unit, unit)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n ≥ 1."""
    return step("1 << ({} - 1).bit_length()", lambda n: 1 << (n - 1).bit_length(), n)


def log2_of(n: int) -> int:
    """The binary logarithm of n, rounded up; 0 of n < 2."""
    return larger(n - 1, 0).bit_length()


def smaller(a: int, b: int) -> int:
    """The smaller number, without the answer which one it is, which `min` takes."""
    return step("min({}, {})", min, a, b)


def larger(a: int, b: int) -> int:
    """The larger number, without the answer which one it is, which `max` takes."""
    return step("max({}, {})", max, a, b)


def up_to(most: int, n: int, value: int, other: int) -> int:
    """One value for an n of at most `most` and another for more, without the answer whether it is, which `if` takes."""
    form = "({} if {} <= {} else {})"
    return step(form, lambda value, n, most, other: value if n <= most else other, value, n, most, other)


def largest(numbers: Iterable[int]) -> int:
    """The largest of some numbers, or 0, in one step."""
    numbers = 0, *numbers
    return step(f"max({', '.join(['{}'] * len(numbers))})", max, *numbers)
