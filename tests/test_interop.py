"""Arrays cross between the frameworks without a copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P
from torch._subclasses.fake_tensor import FakeTensorMode

from xmla import ArgumentError, interop

DTYPES = ["float32", "bfloat16", "float16", "uint8", "int32", "float8_e4m3fn"]


def pointer(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_to_jax_shares_memory(dtype: str, device: str) -> None:
    tensor = (torch.arange(24, device=device).view(4, 6) % 16).to(getattr(torch, dtype))  # e4m3 holds integers to 16
    array = interop.to_jax(tensor)
    assert pointer(array) == tensor.data_ptr()
    assert array.shape == (4, 6) and array.dtype == jnp.dtype(dtype)
    assert jnp.array_equal(array.astype(jnp.float32), jnp.arange(24).reshape(4, 6) % 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_to_torch_shares_memory(dtype: str) -> None:
    array = (jnp.arange(24).reshape(4, 6) % 16).astype(dtype)
    tensor = interop.to_torch(array)
    assert tensor.data_ptr() == pointer(array)
    assert tensor.dtype == getattr(torch, dtype)
    assert torch.equal(tensor.float().cpu(), torch.arange(24.0).view(4, 6) % 16)


def test_there_and_back_is_the_same_memory(device: str) -> None:
    tensor = torch.randn(8, 3, device=device)
    assert interop.to_torch(interop.to_jax(tensor)).data_ptr() == tensor.data_ptr()


def test_a_strided_tensor_is_refused(device: str) -> None:
    with pytest.raises(ArgumentError, match=r"to_jax: tensor strides is \(1, 6\), expected contiguous"):
        interop.to_jax(torch.zeros(4, 6, device=device).T)


@pytest.mark.gpu
def test_a_tensor_of_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    tensor = torch.arange(6.0, device="cuda:0")
    with torch.cuda.device(1):
        assert pointer(interop.to_jax(tensor)) == tensor.data_ptr()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_what_jax_would_copy_is_refused(dtype: str, device: str) -> None:
    tensor = torch.zeros(4, device=device, dtype=getattr(torch, dtype))
    with pytest.raises(ArgumentError, match=f"to_jax: tensor dtype is {dtype}, expected at most 32 bits without jax_"):
        interop.to_jax(tensor)


OF_JAX = [name for name in dir(jnp) if re.fullmatch(r"bool|u?int\d+|b?float\d+(_e\w+)?|complex\d+", name)]
EVERY = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dtypes that torch is about to add or to drop
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_every_dtype_shares_memory_or_is_refused(dtype: torch.dtype, device: str) -> None:
    """In both directions; none arrives as another one."""
    try:
        tensor = torch.zeros(4, 64, dtype=torch.uint8, device=device).view(dtype)
    except RuntimeError as error:
        pytest.skip(f"torch makes no such tensor of bytes: {error}")
    name = str(dtype).removeprefix("torch.")
    try:
        array = interop.to_jax(tensor)
    except ArgumentError as error:
        assert name not in DTYPES and f"{name}" in str(error)
        return
    assert pointer(array) == tensor.data_ptr() and array.dtype.name == name
    back = interop.to_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == dtype and back.shape == tensor.shape


@pytest.mark.parametrize("dtype", OF_JAX)
def test_every_dtype_of_jax_shares_memory_or_is_refused(dtype: str) -> None:
    with jax.enable_x64(True):
        try:
            array = jnp.zeros((4, 64), dtype)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            assert "serialize" in str(error) or "verifier errors" in str(error)
            pytest.skip(f"JAX makes no {dtype} on this device")
    try:
        tensor = interop.to_torch(array)
    except ArgumentError as error:
        assert dtype not in DTYPES and f"to_torch: array dtype is {array.dtype}, expected " in str(error)
        return
    assert tensor.data_ptr() == pointer(array) and str(tensor.dtype) == f"torch.{array.dtype}"


@pytest.mark.parametrize("offset", [0, 1, 4, 16, 32, 48, 63, 64, 128, 256])
def test_a_tensor_at_any_address_shares_memory_or_is_refused(offset: int, device: str) -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8, device=device)[offset:]
    multiple = {"cpu": 64, "cuda": 16}[device]
    if past := tensor.data_ptr() % multiple:
        with pytest.raises(ArgumentError) as refused:
            interop.to_jax(tensor)
        message = f"to_jax: tensor starts {past} bytes past a multiple of {multiple}, expected a multiple"
        assert str(refused.value) == message
        return
    array = interop.to_jax(tensor)
    assert pointer(array) == tensor.data_ptr()
    tensor[0] = 7
    if device == "cuda":
        torch.cuda.synchronize()
    assert int(array[0]) == 7, "JAX does not see what torch wrote"


def test_shapes_at_the_edge(device: str) -> None:
    for tensor in (
        torch.ones((), device=device),
        torch.ones(0, 4, device=device),
        torch.ones(1, 8, device=device)[:, :1],
    ):
        array = interop.to_jax(tensor)
        assert array.shape == tensor.shape and (not array.size or pointer(array) == tensor.data_ptr())
        assert interop.to_torch(array).shape == tensor.shape


def test_what_is_no_dense_tensor_is_refused(device: str) -> None:
    ones = torch.ones(4, 4, device=device)
    lazy = "to_jax: tensor is a lazy negation or conjugate, expected one resolved in memory"
    for tensor, message in (
        (torch._neg_view(ones), lazy),
        (torch.ones(4, dtype=torch.complex64, device=device).conj(), lazy),
        (torch.ones(4, dtype=torch.complex64, device=device).conj().imag, lazy),
        (ones.to_sparse(), "to_jax: tensor layout is torch.sparse_coo, expected torch.strided"),
        (ones[:1].expand(4, 4), r"to_jax: tensor strides is \(0, 1\), expected contiguous"),
        (ones[:, :2], r"to_jax: tensor strides is \(4, 1\), expected contiguous"),
        (torch.ones(4, device="meta"), "to_jax: tensor is float32 on meta, expected what DLPack hands to JAX: "),
        (jnp.ones(4), "to_jax: tensor is ArrayImpl, expected torch.Tensor"),
        (np.ones(4), "to_jax: tensor is ndarray, expected torch.Tensor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            interop.to_jax(tensor)
    traced = "to_jax: tensor is one of a trace or a transformation, expected one with values"
    with FakeTensorMode():
        fake = torch.ones(64, device=device)
    with pytest.raises(ArgumentError, match=traced):
        interop.to_jax(fake)
    with pytest.raises(ArgumentError, match=traced):
        torch.func.vmap(interop.to_jax)(ones)
    needs_grad = ones.clone().requires_grad_()
    assert pointer(interop.to_jax(needs_grad)) == needs_grad.data_ptr()


def test_what_is_no_array_of_one_device_is_refused() -> None:
    deleted = jnp.ones(4)
    deleted.delete()
    for array, message in (
        (deleted, "to_torch: array is deleted, as one that was donated, expected a live one"),
        (np.ones(4), "to_torch: array is ndarray, expected a jax.Array with values"),
        (torch.ones(4), "to_torch: array is Tensor, expected a jax.Array with values"),
        (jax.new_ref(jnp.ones(4)), "to_torch: array is .*, expected a jax.Array with values"),
        (jax.random.key(0), "to_torch: array dtype is key<fry>, expected what DLPack hands to torch: "),
    ):
        with pytest.raises(ArgumentError, match=message):
            interop.to_torch(array)
    with pytest.raises(ArgumentError, match=r"to_torch: array is DynamicJaxprTracer, expected a jax\.Array with"):
        jax.jit(interop.to_torch)(jnp.ones(4))
    devices = jax.devices()
    if len(devices) > 1:
        spread = jax.device_put(jnp.ones(4), jax.NamedSharding(jax.make_mesh((2,), "x", devices=devices[:2]), P()))
        with pytest.raises(ArgumentError, match="to_torch: array is on 2 devices, expected one"):
            interop.to_torch(spread)


def test_an_array_with_a_layout_of_its_own_keeps_its_values() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.device_put(jnp.arange(24.0).reshape(4, 6), Format(Layout((1, 0)), device))
    tensor = interop.to_torch(array)
    assert tensor.data_ptr() == pointer(array)
    assert torch.equal(tensor.cpu(), torch.arange(24.0).view(4, 6))


def test_only_pinned_memory_is_taken_to_the_device() -> None:
    expected = "expected a dense torch.Tensor on the CPU"
    for wrong, message in (
        (np.zeros(3), f"pinned is ndarray, {expected}"),
        (torch.zeros(3, device="meta"), f"pinned is on meta, {expected}"),
        (torch.zeros(3).to_sparse(), f"pinned is sparse, {expected}"),
        (torch.zeros(3), "pinned is pageable memory, expected pinned memory (pin_memory=True)"),
    ):
        with pytest.raises(ArgumentError) as refused:
            interop.on_device(wrong)
        assert str(refused.value) == f"on_device: {message}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_pinned_memory_is_the_devices_too(dtype: str) -> None:
    pinned = (torch.arange(24).view(4, 6) % 16).to(getattr(torch, dtype)).pin_memory()
    tensor = interop.on_device(pinned)
    assert tensor.is_cuda and tensor.dtype == pinned.dtype and tensor.data_ptr() == pinned.data_ptr()
    assert torch.equal(tensor.float().cpu(), torch.arange(24.0).view(4, 6) % 16)
    tensor.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    assert not pinned.float().any()
    with pytest.raises(ArgumentError, match=r"on_device: pinned strides is \(1, 6\), expected contiguous"):
        interop.on_device(pinned.T)
