"""Private functions of torch, each with a public replacement for releases that lack it.

Both behave the same; the private one costs less host time. `FALLBACKS` lists the functions that this release lacks, and
a warning at import names them.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

FALLBACKS: list[str] = []


def _attribute(path: str, fallback: Any) -> Any:
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
empty_strided_cpu = _attribute("_C._dynamo.guards._empty_strided_cpu", _empty_strided_on("cpu"))
empty_strided_cuda = _attribute("_C._dynamo.guards._empty_strided_cuda", _empty_strided_on("cuda"))
current_device = _attribute("_C._cuda_getDevice", torch.cuda.current_device)
current_stream = _attribute(
    "_C._cuda_getCurrentRawStream", lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream
)
# The public one looks whether it is given a tensor or several.
increment_version = _attribute("_C._increment_version", torch.autograd.graph.increment_version)
# Without it a forked process gets the driver's own message.
is_in_bad_fork = _attribute("cuda._is_in_bad_fork", lambda: False)
FakeTensor: Any = _attribute("_subclasses.fake_tensor.FakeTensor", ())  # isinstance(x, ()) is False

_guards = _attribute("_C._dynamo.guards.TensorGuards", None)


def comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Whether other tensors have dtypes, shapes, strides, devices and dispatch keys of these; None if torch cannot."""
    return _guards and _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


_modes = _attribute("_C._len_torch_dispatch_stack", None)
_functorch_level = _attribute("_C._functorch.maybe_current_level", None)
_sees_dispatch = None not in (_modes, _functorch_level)


def dispatches() -> bool:
    """Whether a mode, a functorch transformation or forward-mode AD may see a call; True if torch does not say."""
    if not _sees_dispatch or _modes() != 0 or _functorch_level() is not None:
        return True
    return getattr(forward_ad, "_current_level", 0) >= 0  # `forward_mode`, a third of the time


def forward_mode() -> bool:
    """Whether a level of forward-mode AD is open; True if torch cannot tell."""
    return getattr(forward_ad, "_current_level", 0) >= 0


# TorchScript then takes a function for its op, where it would compile the function's text, which it cannot.
script_as = _attribute("jit._builtins._register_builtin", lambda function, op: None)

BACKENDS = ("CPU", "CUDA")
_after_views = _attribute("_C._after_ADInplaceOrView_keyset", None)
_after_autograd = _attribute("_C._after_autograd_keyset", None)
_below_autograd = _attribute("_C._AutoDispatchBelowAutograd", None)
# Without them ops have no autograd kernel: only the public functions refuse a call that is differentiated.
AUTOGRAD = all(each is not None for each in (_after_views, _after_autograd, _below_autograd))


# An autograd function inside of an autograd kernel: torch.func chose the level before the dispatcher called the kernel.
# Without these torch.func refuses the derivative.
_single_level = _attribute("autograd.function._SingleLevelFunction", None)
_allow_single_level = _attribute("_functorch.autograd_function.enable_single_level_autograd_function", nullcontext)
Function: Any = _single_level or torch.autograd.Function
# Compiled autograd asks every function of a graph for its key, which `_single_level` lacks.
compiled_autograd_key = _attribute("autograd.Function._compiled_autograd_key", None)


def apply(function: Any, *args: Any) -> Any:
    """A call of a subclass of `Function` by an autograd kernel."""
    with _allow_single_level():
        return function.apply(*args)


def below_autograd(keyset: Any, overload: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Dispatch a call to the kernels below autograd."""
    if (keyset & _after_views).highestPriorityTypeId().name in BACKENDS:
        return kernel(*args, **kwargs)  # directly: a redispatch costs as much as a launch
    with _below_autograd():
        return overload.redispatch(keyset & _after_autograd, *args, **kwargs)


if FALLBACKS:
    logging.getLogger("xmla").warning("torch %s lacks %s: eager calls take longer", torch.__version__, FALLBACKS)
