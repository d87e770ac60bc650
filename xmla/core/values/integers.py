"""Arithmetic of sizes."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is typed for kernels."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n ≥ 1."""
    return 1 << (n - 1).bit_length()


def log2_of(n: int) -> int:
    """The binary logarithm of n, rounded up; 0 of n < 2."""
    return max(n - 1, 0).bit_length()
