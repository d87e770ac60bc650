"""What both modules share: the package that is stood in for, and conversions of arguments."""

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from xmla.core.call import CalledAs
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS
from xmla.torch_api._arrays import spec_of

INT32 = torch.iinfo(torch.int32)


class NotReplacedError(UnsupportedError):
    """A call that is left to the package."""


class Published:
    """A package that a module here stands in for.

    Attributes:
        name: What it is called.
        module: It, or None.
        absence: Why it is None.
    """

    def __init__(self, *names: str) -> None:
        """The first of `names` that can be imported."""
        self.name, self.module, self.absence = names[0], None, ""
        for name in names:
            try:
                self.module = import_module(name)
                return
            except Exception as error:  # one that is installed for other hardware raises anything
                self.absence = self.absence or f"{name} cannot be imported ({type(error).__name__}: {error})"

    def attribute(self, name: str) -> Any:
        """An attribute of the package."""
        if self.module is None:
            raise AttributeError(f"xmla.compat.{self.name} has no attribute {name!r}, and {self.absence}")
        return getattr(self.module, name)

    def otherwise[**P, R](
        self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: calls that raise NotReplacedError are the package's, with the caller's arguments.

        Args:
            replace: Gives, from the package and these arguments, those that the package gets.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            @wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> R:
                try:
                    return function(*args, **kwargs)
                except NotReplacedError as error:
                    if self.module is None:
                        raise UnsupportedError(f"{error}, and {self.absence}") from None
                arguments = (args, kwargs) if replace is None else replace(self.module, args, kwargs)
                return getattr(self.module, function.__name__)(*arguments[0], **arguments[1])

            return call

        return decorate


def check_axes(
    here: str, required: Mapping[str, tuple[object, str]], optional: Mapping[str, tuple[object, str]] | None = None
) -> None:  # fmt: skip
    """Refuse an argument whose axes are not those of its string, "B S H D": a letter is one size, a number itself.

    The ops see arguments that are flattened already, by names of their own.

    Args:
        required: Arguments by name, each with its axes.
        optional: More of them, which may be None.
    """
    sizes: dict[str, tuple[int, str]] = {}
    present = {name: pair for name, pair in (optional or {}).items() if pair[0] is not None}
    for name, (tensor, axes) in {**required, **present}.items():
        labels = axes.split()
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{here}: {name} is {type(tensor).__name__}, expected torch.Tensor")
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ArgumentError(f"{here}: {name} has no strides, expected a strided tensor")
        if tensor.dim() != len(labels):
            raise ArgumentError(f"{here}: {name} rank is {tensor.dim()}, expected {len(labels)} ({', '.join(labels)})")
        for axis, (label, size) in enumerate(zip(labels, tensor.shape, strict=True)):
            if label.isdecimal():
                if size != int(label):
                    raise ArgumentError(f"{here}: {name} axis {axis} is {size}, expected {label}")
                continue
            expected, first = sizes.setdefault(label, (size, name))
            if size != expected:
                raise ArgumentError(
                    f"{here}: {name} axis {label} (axis {axis}) is {size}, expected {expected}, as {first}"
                )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one whose last axis is strided: the ops take every other stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def as_int32(here: str, name: str, integers: torch.Tensor) -> torch.Tensor:
    """The argument `name` of `here` in int32, as ops take it; what int32 does not hold stays out of every range."""
    dtype = integers.dtype
    if dtype == torch.int32:
        return dense(integers)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ArgumentError(f"{here}: {name} dtype is {str(dtype).removeprefix('torch.')}, expected int32 or int64")
    return dense(integers.clamp(INT32.min, INT32.max).to(torch.int32))


def serve(
    here: str, name: str, names: Mapping[str, str], *tensors: torch.Tensor | None, out: Any = None, **attrs: Any
) -> Any:
    """A call of the op `name`, which refuses what is wrong under the names that callers of `here` know.

    Args:
        names: The arguments of `here`, by the op's names of them; others have one name.
    """
    try:
        return getattr(TORCH_OPS, name)(*tensors, out=out, **attrs)
    except (ArgumentError, UnsupportedError):
        op = registry()[name]
        specs = {n: None if t is None else spec_of(t) for n, t in zip(op.tensors, tensors, strict=False)}
        try:
            op.bind(specs, op.attributes(**attrs), None, CalledAs(here, names))
        except (ArgumentError, UnsupportedError) as error:
            raise error from None
        raise
