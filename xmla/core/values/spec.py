"""What a plan knows about an array: shape, dtype, strides, alignment. Never its values, nor its device."""

from dataclasses import dataclass
from math import gcd, prod

import ml_dtypes
import numpy as np

# dtype name (the same in NumPy, PyTorch and JAX) → (NumPy dtype, name in a Triton signature). Kernels take e4m3 as
# bytes: Triton has the type only for architectures that convert it (`lang.numbers.converts_e4m3`).
DTYPES: dict[str, tuple[np.dtype, str]] = {
    "float64": (np.dtype(np.float64), "fp64"),
    "float32": (np.dtype(np.float32), "fp32"),
    "float16": (np.dtype(np.float16), "fp16"),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), "bf16"),
    "float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), "u8"),
    "int32": (np.dtype(np.int32), "i32"),
    "int64": (np.dtype(np.int64), "i64"),
    "int8": (np.dtype(np.int8), "i8"),
    "uint8": (np.dtype(np.uint8), "u8"),
}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense array of `shape`."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def alignment_of(address: int) -> int:
    """The largest power of two up to 16 that an address is a multiple of."""
    return gcd(address, 16)


class StandIn(str):
    """The name of an array whose pointer a kernel gets, and never reads, in place of one that is not given."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, dtype, strides in elements (None: row-major) and alignment of one array."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    alignment: int = 16  # of the first element, in bytes, as `alignment_of` has it

    def stride(self, axis: int) -> int:
        """Distance in elements between neighbours along `axis`.

        Along an axis with one element, or over rows without any, no kernel depends on the stride, and frameworks leave
        any value there. It is then the stride of a dense array, so that one kernel serves all.
        """
        axis %= len(self.shape)
        if self.strides is None or 0 in self.shape[axis + 1 :]:
            return row_major(self.shape)[axis]
        if self.shape[axis] == 1:
            return self.stride(axis + 1) * self.shape[axis + 1] if axis + 1 < len(self.shape) else 1
        return self.strides[axis]

    def has_stride(self, axis: int, stride: int) -> bool:
        """Whether neighbours along `axis`, if there are any, are `stride` elements apart."""
        actual = (self.strides or row_major(self.shape))[axis]
        return bool(actual == stride) or self.shape[axis] < 2 or 0 in self.shape

    @property
    def is_dense(self) -> bool:
        return all(self.has_stride(axis, stride) for axis, stride in enumerate(row_major(self.shape)))

    @property
    def span(self) -> int:
        """Bytes from the first to past the last element, 0 without elements."""
        if self.strides is None:
            return self.nbytes
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.itemsize

    def overlaps(self, address: int, other: "Spec", other_address: int) -> bool:
        """Whether arrays at these addresses have a byte in common."""
        return np.shares_memory(self._bytes_at(address), other._bytes_at(other_address))

    def _bytes_at(self, address: int) -> np.ndarray:
        """An array of bytes at an address, which need not be the host's: none is read."""
        steps = [stride * self.itemsize for stride in self.strides or row_major(self.shape)]
        shape, strides = (*self.shape, self.itemsize), (*steps, 1)
        facts = {"version": 3, "typestr": "|u1", "data": (address, True), "shape": shape, "strides": strides}
        return np.asarray(type("Bytes", (), {"__array_interface__": facts})())

    def on_multiples(self, unit: int, axes: tuple[int, ...]) -> bool:
        """Whether every element at an index of these axes starts on a multiple of `unit` bytes."""
        steps = (self.alignment, *(self.stride(axis) * self.itemsize for axis in axes))
        return all(step % unit == 0 for step in steps)

    def vector(self, *sizes: int) -> int:
        """The elements of 16 bytes if all `sizes`, such as strides, are multiples of so many, else 1.

        A constant of kernels that take these as runtime sizes (`multiple` in core/lang/offsets.py).
        """
        elements = 16 // self.itemsize
        return elements if all(size % elements == 0 for size in sizes) else 1

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][0].itemsize

    @property
    def nbytes(self) -> int:
        return prod(reversed(self.shape), start=self.itemsize)  # of a trace mostly one step: the first axis varies

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> "Spec":
        # NumPy leaves zeros for the strides of an array without elements.
        strides = tuple(step // array.itemsize for step in array.strides) if array.size else None
        return cls(array.shape, array.dtype.name, strides, alignment_of(array.ctypes.data))
