"""The ops for PyTorch: functions, and `torch.ops.xmla.*` with fakes and out-variants.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  out: Preallocated results, a tensor or a tuple of them, dense and of the right shape and dtype; they are returned.
    An op that has none, because it updates an argument in place, takes neither `out` nor `workspace`.
  workspace: With `out`, a dense uint8 tensor of at least `<op>.plan(...).workspace_bytes` as scratch memory, so that
    the call allocates nothing.
  implementation: None, the best tested kernels; "triton", the portable kernels (interpreted for CPU tensors under
    TRITON_INTERPRET=1); "gluon", kernels for one architecture; "reference", NumPy in float64 (copies to the host).
    None selects the first of the op's implementations that serves the call, but for those that the op's docstring,
    which lists what each serves, has by their name alone: they have not run on the part.
An op's docstring names the arguments that have a gradient, which autograd, `torch.func` and compiled code compute
alike, once: a second derivative raises. An argument is differentiated if it requires grad while grad mode is on, or
if it has a tangent. If it has no gradient, or a tangent, or `out` is given, the call raises UnsupportedError, in eager
mode, in compiled code (as the cause of dynamo's own error) and under `torch.func`. A model that only runs inference
calls the ops under `torch.no_grad()` or `torch.inference_mode()`.

The docstring of each function is the op's. A call reads no values, waits for nothing and allocates only the plan's
buffers, on the current stream.

`<op>.plan` takes the same arguments and returns the call's plan without running it.
`torch.ops.xmla.<op>` is the same op without `out` and `workspace`. `torch.ops.xmla.<op>.out` takes the results as
trailing keyword arguments and writes them. Ops that update a cache in place (`write_*`) have one overload, which
declares the mutation. `torch.ops.xmla` has more ops than there are functions here: derivatives, and steps of others.
"""

from typing import TYPE_CHECKING

from xmla import _frameworks

if _frameworks.missing("torch"):
    raise ImportError(_frameworks.needed("torch"))

from xmla.core import registry as _registry
from xmla.torch_api import _all_ops  # noqa: F401, defines every op in torch.ops.xmla
from xmla.torch_api._functions import *  # noqa: F403
from xmla.torch_api._functions import __all__ as __all__

if not TYPE_CHECKING:  # with it a type checker would accept every name

    def __getattr__(name):
        raise AttributeError(_registry.no_attribute(__name__, name))
