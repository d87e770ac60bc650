"""Arrays cross between the frameworks without a copy."""

import jax
import jax.numpy as jnp
import pytest
import torch

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


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_what_jax_would_copy_is_refused(dtype: str, device: str) -> None:
    tensor = torch.zeros(4, device=device, dtype=getattr(torch, dtype))
    with pytest.raises(ArgumentError, match=f"to_jax: tensor dtype is {dtype}, expected at most 32 bits without jax_"):
        interop.to_jax(tensor)
