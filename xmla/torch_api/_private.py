"""What torch does not export, and the public way that takes its place where a release lacks it.

Each name here behaves the same either way; the private one costs less host time. `FALLBACKS` names those that this
release lacks, as a warning at import does.
"""

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

FALLBACKS: list[str] = []


def _found(path: str, fallback: Any) -> Any:
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        FALLBACKS.append(f"torch.{path}")
        return fallback


def _empty_strided_on(device: str) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty_strided


# Inductor's allocator: the same memory as torch.empty_strided in half of its time.
empty_strided_cpu = _found("_C._dynamo.guards._empty_strided_cpu", _empty_strided_on("cpu"))
empty_strided_cuda = _found("_C._dynamo.guards._empty_strided_cuda", _empty_strided_on("cuda"))
current_device = _found("_C._cuda_getDevice", torch.cuda.current_device)
# Without it the driver's own message is what a forked process gets.
is_in_bad_fork = _found("cuda._is_in_bad_fork", lambda: False)
FakeTensor: Any = _found("_subclasses.fake_tensor.FakeTensor", ())  # isinstance(x, ()) is False

_modes = _found("_C._len_torch_dispatch_stack", None)
_functorch_level = _found("_C._functorch.maybe_current_level", None)
_sees_dispatch = None not in (_modes, _functorch_level)


def dispatches() -> bool:
    """Whether a mode or a functorch transformation may want to see a call; True where torch does not tell."""
    return not _sees_dispatch or _modes() != 0 or _functorch_level() is not None


if FALLBACKS:
    logging.getLogger("xmla").warning("torch %s lacks %s: eager calls take longer", torch.__version__, FALLBACKS)
