"""Pass arrays between the frameworks in both directions through DLPack, without a copy.

The two arrays share memory: a write in place by one framework is visible in the other. Neither call waits for the
device. Finish the writer's work first (`torch.cuda.synchronize()`, `jax.block_until_ready`) unless DLPack's stream
exchange already orders it.
"""

from typing import TYPE_CHECKING

from xmla.core.errors import ArgumentError

if TYPE_CHECKING:
    import jax
    import torch


def to_jax(tensor: "torch.Tensor") -> "jax.Array":
    """The torch tensor's memory as a jax.Array. JAX arrays are dense, so the tensor must be contiguous.

    Raises:
        ArgumentError: The tensor is not contiguous, or has 64 bits and JAX would copy it to 32.
    """
    import jax
    import torch

    if not tensor.is_contiguous():
        raise ArgumentError(f"to_jax: tensor strides is {tensor.stride()}, expected contiguous")
    if tensor.dtype in (torch.int64, torch.uint64, torch.float64) and not jax.config.jax_enable_x64:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ArgumentError(f"to_jax: tensor dtype is {name}, expected at most 32 bits without jax_enable_x64")
    with torch.cuda.device_of(tensor):
        jax.devices()  # JAX makes another GPU current as it starts
    with torch.cuda.device_of(tensor):  # torch exports from the current GPU alone
        return jax.dlpack.from_dlpack(tensor.detach())


def to_torch(array: "jax.Array") -> "torch.Tensor":
    """The jax.Array's memory as a torch tensor. Write to it only if JAX no longer uses the array."""
    import torch

    return torch.from_dlpack(array)
