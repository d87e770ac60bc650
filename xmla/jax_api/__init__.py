"""The ops for JAX, same names, arguments and bits as `xmla.torch_api`.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  implementation: None, the best tested kernels; "triton", the portable kernels (on the CPU in Triton's interpreter,
    behind `jax.pure_callback`); "gluon", kernels for one architecture; "reference", NumPy in float64 behind
    `jax.pure_callback`. None selects the first of the op's implementations that serves the call, but for those that
    the op's docstring, which lists what each serves, has by their name alone: they have not run on the part.
NumPy arrays keep their dtype: JAX's truncation of 64-bit arrays to 32 bits does not apply to them.

All ops work under `jax.jit` and `jax.shard_map` and can be lowered ahead of time. Under `jax.vmap` over any axis a call
has more rows; with a batch axis on a cache each element has its own. A batch axis on what all rows share, such as a
sink, is refused, as is `split_batch`, which has no tokens. A call with sums over tokens, as derivatives have, is made
for one element after the other. Reverse mode (`jax.grad`,
`jax.vjp`) differentiates the arguments that an op's docstring names, once; everything else raises. The results of a
call that is differentiated are named `<op>_<result>` for the policies of `jax.checkpoint`.

An op that updates a cache takes it as an array and returns the new one, in place under `jit` with a donated argument,
or as a `jax.Ref` (`jax.new_ref`), which it updates in place. A jitted step that is called once per token takes donated
arrays: JAX calls a jitted function with Refs among its arguments by Python, at a cost for each Ref; Refs in a loop
inside one jitted function cost the host nothing. The caches of many layers are one array [L · P, R, ROW], whose pages
follow one another: a part of a stack is updated, too, but XLA copies it before. Ops that read a cache also take a Ref
and read it without a copy; `ref[...]` may copy the pool.

On a GPU a call is one custom call of XLA, `xmla_launch`, of a library that is built once per machine and needs a C++
compiler. A program that has been compiled names kernels of this process: one that is serialised is an export.

Several GPUs: `jit` of arrays with a NamedSharding keeps tokens (axis T) and heads (H) sharded as they are, through one
op or many, with one mesh in the program. Each device computes its own part, nothing is exchanged, and every other axis
is replicated. Also replicated are all axes of ops that update a cache, and everything in an export and with
`implementation="reference"`. An export over an AbstractMesh needs a `shard_map` around the ops. With
`batch_invariant=True` a part of the heads has the same bits as in a call with all heads. `xmla.jax_api.parallel`
divides requests by pages.

Importing this module needs neither a GPU nor PyTorch. To plan and lower for a GPU that is not present, use
`xmla.core.values.assume_device`; `jax.export.export(..., disabled_checks=EXPORT_CHECKS)` then serialises for it.
"""

from typing import TYPE_CHECKING

from xmla import _frameworks

if _frameworks.missing("jax"):
    raise ImportError(_frameworks.needed("jax"))

from jax import export as _export

from xmla.core import registry as _registry
from xmla.jax_api._functions import *  # noqa: F403
from xmla.jax_api._functions import __all__ as __all__

# Tells jax.export that the custom call of the kernels is stable.
EXPORT_CHECKS = (_export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi"),)

if not TYPE_CHECKING:  # with it a type checker would accept every name

    def __getattr__(name):
        raise AttributeError(_registry.no_attribute(__name__, name))
