"""Gradients of both front-ends where a Gluon kernel computes them, and a thousand reruns of the portable kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kit
import pytest
import torch
from hopper import ON_HOPPER
from torch.utils.checkpoint import checkpoint

from xmla import interop, jax_api, torch_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS

pytestmark = ON_HOPPER

OPS = registry()
SCALE = 0.0721688
Arrays = dict[str, Any]


@pytest.fixture
def given() -> Arrays:
    torch.manual_seed(3)
    q, cache = torch.randn(70, 48, 576, device="cuda"), torch.randn(9, 16, 576, device="cuda")
    slots = torch.randint(-1, 150, (70, 100), device="cuda", dtype=torch.int32)
    lengths = torch.randint(0, 120, (70,), device="cuda", dtype=torch.int32)
    arrays = {"q": q.bfloat16(), "cache": cache.bfloat16(), "slots": slots, "lengths": lengths}
    return arrays | {"sink": torch.randn(48, device="cuda")}


LEAVES = ("q", "cache", "sink")


def loss_of(given: Arrays, *leaves: Any, attend: Callable[..., Any] = torch_api.sparse_mla) -> Any:
    out, lse = attend(**given | dict(zip(LEAVES, leaves, strict=True)), softmax_scale=SCALE)
    wide = out.float() if isinstance(out, torch.Tensor) else out.astype(jnp.float32)
    return (wide * wide).sum() + (lse[:2] * 0.5).sum()


def of_the_op(given: Arrays) -> list[torch.Tensor]:
    """The gradients, by the op itself with what `loss_of` passes back to it."""
    out, lse = torch_api.sparse_mla(**given, softmax_scale=SCALE)
    dlse = torch.zeros_like(lse)
    dlse[:2] = 0.5
    others = {"forward_out": out, "forward_lse": lse, "dout": (2 * out.float()).bfloat16(), "dlse": dlse}
    launches = TORCH_OPS.sparse_mla_backward.plan(**given, **others, softmax_scale=SCALE).launches
    assert "sparse_mla_backward_sm90_kernel" in [launch.name for launch in launches]
    found = TORCH_OPS.sparse_mla_backward(**given, **others, softmax_scale=SCALE)
    by_name = dict(zip(OPS["sparse_mla_backward"].outputs, found, strict=True))
    return [by_name[f"d{name}"] for name in LEAVES]


def compiled(given: Arrays, *leaves: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(partial(loss_of, given), fullgraph=True, backend="aot_eager")(*leaves)


def checkpointed(given: Arrays, *leaves: torch.Tensor) -> Any:
    return checkpoint(partial(loss_of, given), *leaves, use_reentrant=False)


@pytest.mark.parametrize("way", [loss_of, compiled, checkpointed])
def test_torch_has_the_ops_bits(way: Callable[..., Any], given: Arrays) -> None:
    leaves = [given[name].clone().requires_grad_() for name in LEAVES]
    way(given, *leaves).backward()
    for name, leaf, want in zip(LEAVES, leaves, of_the_op(given), strict=True):
        assert bool(want.any())
        kit.assert_bits_equal(name, leaf.grad, want)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_jax_has_the_ops_bits(way: Callable[..., Any], given: Arrays) -> None:
    arrays = {name: interop.to_jax(tensor) for name, tensor in given.items()}
    loss = way(partial(loss_of, arrays, attend=jax_api.sparse_mla))
    found = jax.grad(loss, (0, 1, 2))(*[arrays[name] for name in LEAVES])
    for name, gradient, want in zip(LEAVES, found, of_the_op(given), strict=True):
        kit.assert_bits_equal(name, interop.to_torch(gradient), want)


RERUN = [
    (op, max((case for case in op.cases if case.attrs.get("deterministic", True)),
             key=lambda case: sum(array.size for array in kit.make(case).values())))
    for op in (OPS["sparse_mla_backward"], OPS["indexer_scores_backward"], OPS["indexer_loss"])
]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), RERUN, ids=kit.case_id)
def test_a_thousand_calls_of_portable_kernels_have_the_same_bits(op: Op, case: Case) -> None:
    tensors = kit.torch_inputs(op, kit.make(case), "cuda")
    # Sixteen times the tokens, which add to the same entries.
    first = next(iter(op.tensors.values())).names[0]
    repeated = [n for n, tensor in op.tensors.items() if tensor.names[0] == first]
    many = [
        torch.cat([tensor] * 16) if name in repeated and tensor is not None else tensor
        for name, tensor in zip(op.tensors, tensors, strict=True)
    ]
    attrs = {name: value for name, value in case.attrs.items() if name != "workspace_bytes"}
    call = partial(getattr(TORCH_OPS, op.name), *many, **attrs, implementation="triton")
    want = call()
    assert all(bool(array.any()) for array in want if array.numel())
    for _ in range(1000):
        for name, array, expected in zip(op.outputs, call(), want, strict=True):
            kit.assert_bits_equal(name, array, expected)
