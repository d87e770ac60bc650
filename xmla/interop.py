"""Pass arrays between the frameworks through DLPack, and memory of the host to a GPU, without a copy.

The two arrays share memory: a write in place by one framework is visible in the other. What would be copied or read as
other values is refused. Neither call waits for the device. Finish the writer's work first (`torch.cuda.synchronize()`,
`jax.block_until_ready`) unless DLPack's stream exchange already orders it.
"""

from typing import TYPE_CHECKING

from xmla._frameworks import install
from xmla.core.errors import ArgumentError

if TYPE_CHECKING:
    import jax
    import torch

# Where JAX's buffers start, in bytes. Of others it makes copies on the CPU, and its programs refuse them on a GPU.
ALIGNMENT = {"cpu": 64, "cuda": 16}


def to_jax(tensor: "torch.Tensor") -> "jax.Array":
    """The torch tensor's memory as a jax.Array. JAX arrays are dense, so the tensor must be contiguous.

    Raises:
        ImportError: JAX is not installed.
        ArgumentError: The tensor is no dense one in memory (not contiguous, sparse, a lazy negation or conjugate, or
            of a trace or a transformation); its numbers have 64 bits, which JAX would copy to 32; it does not start on
            a multiple of 64 bytes on the CPU or of 16 on a GPU; or its dtype or device has no place in DLPack or JAX.
    """
    try:
        import jax
    except ImportError as error:
        raise ImportError(f"to_jax needs jax: {install('jax')}") from error
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"to_jax: tensor is {type(tensor).__name__}, expected torch.Tensor")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"to_jax: tensor layout is {tensor.layout}, expected torch.strided")
    if not _has_memory(tensor):
        raise ArgumentError("to_jax: tensor is one of a trace or a transformation, expected one with values")
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError("to_jax: tensor is a lazy negation or conjugate, expected one resolved in memory")
    if not tensor.is_contiguous():
        raise ArgumentError(f"to_jax: tensor strides is {tensor.stride()}, expected contiguous")
    name = str(tensor.dtype).removeprefix("torch.")
    wide = (torch.int64, torch.uint64, torch.float64, torch.complex128)
    if tensor.dtype in wide and not jax.config.jax_enable_x64:
        raise ArgumentError(f"to_jax: tensor dtype is {name}, expected at most 32 bits without jax_enable_x64")
    multiple = ALIGNMENT.get(tensor.device.type, 1)
    if tensor.numel() and (past := tensor.data_ptr() % multiple):
        raise ArgumentError(f"to_jax: tensor starts {past} bytes past a multiple of {multiple}, expected a multiple")
    try:
        with torch.cuda.device_of(tensor):
            jax.devices()  # JAX makes another GPU current as it starts
        with torch.cuda.device_of(tensor):  # torch exports from the current GPU alone
            array = jax.dlpack.from_dlpack(tensor.detach())
    except (BufferError, RuntimeError, ValueError) as error:
        expected = f"what DLPack hands to JAX: {error}"
        raise ArgumentError(f"to_jax: tensor is {name} on {tensor.device}, expected {expected}") from error
    if array.dtype.name != name:
        raise ArgumentError(f"to_jax: tensor dtype is {name}, expected one of JAX, which takes it for {array.dtype}")
    if array.size and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise ArgumentError("to_jax: tensor would be copied, expected memory that JAX can share")
    return array


def _has_memory(tensor: "torch.Tensor") -> bool:
    """False of FakeTensors and of what a transformation of torch.func passes."""
    from xmla.torch_api._private import FakeTensor

    if isinstance(tensor, FakeTensor):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def to_torch(array: "jax.Array") -> "torch.Tensor":
    """The jax.Array's memory as a torch tensor. Write to it only if JAX no longer uses the array.

    Raises:
        ImportError: torch is not installed.
        ArgumentError: The array is traced, deleted, spread over several devices, or of a dtype that DLPack or torch has
            not.
    """
    import jax

    try:
        import torch
    except ImportError as error:
        raise ImportError(f"to_torch needs torch: {install('torch')}") from error
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise ArgumentError(f"to_torch: array is {type(array).__name__}, expected a jax.Array with values")
    if array.is_deleted():
        raise ArgumentError("to_torch: array is deleted, as one that was donated, expected a live one")
    if len(array.devices()) > 1:
        raise ArgumentError(f"to_torch: array is on {len(array.devices())} devices, expected one")
    try:
        tensor = torch.from_dlpack(array)
    except (BufferError, RuntimeError) as error:
        expected = f"what DLPack hands to torch: {error}"
        raise ArgumentError(f"to_torch: array dtype is {array.dtype}, expected {expected}") from error
    if str(tensor.dtype) != f"torch.{array.dtype}":
        raise ArgumentError(
            f"to_torch: array dtype is {array.dtype}, expected one of torch, which takes it for {tensor.dtype}"
        )
    if array.size and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise ArgumentError("to_torch: array would be copied, expected memory that torch can share")
    return tensor


def on_device(pinned: "torch.Tensor") -> "torch.Tensor":
    """The memory of a pinned CPU tensor as a tensor of the current GPU, whose kernels read and write it where it is.

    So a cache may be larger than the device's memory: an op takes it as any cache, at the speed of the host's bus. The
    result does not keep the memory: keep `pinned` for as long.

    Raises:
        ArgumentError: The tensor is no dense one in pinned memory.
    """
    import torch

    if not isinstance(pinned, torch.Tensor):
        got = type(pinned).__name__
    elif pinned.layout != torch.strided:
        got = str(pinned.layout).removeprefix("torch.").partition("_")[0]
    else:
        got = "" if pinned.device.type == "cpu" else f"on {pinned.device}"
    if got:
        raise ArgumentError(f"on_device: pinned is {got}, expected a dense torch.Tensor on the CPU")
    if not pinned.is_pinned():
        raise ArgumentError("on_device: pinned is pageable memory, expected pinned memory (pin_memory=True)")
    if not pinned.is_contiguous():
        raise ArgumentError(f"on_device: pinned strides is {pinned.stride()}, expected contiguous")
    facts = {"version": 3, "typestr": "|u1", "data": (pinned.data_ptr(), False), "shape": (pinned.nbytes,)}
    memory = type("Memory", (), {"__cuda_array_interface__": facts})()
    return torch.as_tensor(memory, device="cuda").view(pinned.dtype).view(pinned.shape)
