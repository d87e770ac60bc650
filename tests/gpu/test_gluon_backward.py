"""The Gluon kernel of attention's derivative for Hopper, against the reference and by its bits."""

from dataclasses import replace

import kit
import numpy as np
import pytest
import torch
from hopper import ON_HOPPER, supported

from xmla import torch_api
from xmla.core.formats.mla import PLAIN, PLAIN_V4, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.attention.sparse_mla.backward.cases import backward_of, duplicates, with_large_gradients
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.registry import registry
from xmla.core.values import GRADIENT, cosine_difference
from xmla.torch_api._all_ops import TORCH_OPS

pytestmark = ON_HOPPER

OP = registry()["sparse_mla_backward"]
CASES = [case for case in OP.cases if supported(OP, kit.make(case), case.attrs)]


def differentiate(inputs: dict[str, np.ndarray], case: Case) -> tuple[torch.Tensor, ...]:
    return TORCH_OPS.sparse_mla_backward(*kit.torch_inputs(OP, inputs, "cuda"), **case.attrs, implementation="gluon")


@pytest.mark.parametrize("case", CASES, ids=kit.case_id)
def test_agrees_with_the_reference(case: Case) -> None:
    inputs = kit.make(case)
    got = differentiate(kit.copies(inputs), case)
    want = OP.reference(**inputs, **kit.attributes(OP, case))
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, OP.outputs[name].agreement)


def agrees_by_norm(case: Case, deterministic: bool) -> None:
    """The error of a row against the row: an element of many heads' summands may be small beside their roundings."""
    case, inputs = replace(case, attrs={**case.attrs, "deterministic": deterministic}), kit.make(case)
    got = differentiate(kit.copies(inputs), case)
    want = OP.reference(**inputs, **kit.attributes(OP, case))
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        error = np.linalg.norm(kit.as_numpy(result).astype(np.float64) - value, axis=-1)
        assert (error <= 2**-7 * np.linalg.norm(value, axis=-1) + 2**-7).all(), name


@pytest.mark.parametrize("layout", [PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [1, 17, 63, 64, 65, 128])
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 65, 97, 200])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tile_edges(deterministic: bool, keys: int, heads: int, layout: MlaLayout) -> None:
    """Lengths of 0, below it and past the capacity; a row without a valid slot."""
    case = make_case(4, heads, keys, 7, layout, with_lengths=True, with_sink=True, lse_sink=keys % 2 == 0)
    agrees_by_norm(backward_of(case, with_dlse=True), deterministic)


@pytest.mark.parametrize("layout", [PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("tokens", [1, 8, 15, 40])
def test_tokens_with_few_heads_that_add_together(tokens: int, heads: int, layout: MlaLayout) -> None:
    """A token has the bits that it has alone, whatever is in those beside it."""
    case = backward_of(make_case(tokens, heads, 1100, 7, layout, with_lengths=True))
    agrees_by_norm(case, True)
    inputs = kit.make(case)
    together = differentiate(kit.copies(inputs), case)[0]
    token, own = tokens - 1, {name for name, tensor in OP.tensors.items() if tensor.axes.split()[0] == "T"}
    alone = {name: array[token:] if name in own else array for name, array in inputs.items()}
    kit.assert_bits_equal("dq", differentiate(alone, case)[0], together[token:])
    for name in ("q", "dout"):
        inputs[name][:token] = np.nan
    kit.assert_bits_equal("dq", differentiate(inputs, case)[0][token:], together[token:])


@pytest.mark.parametrize("deterministic", [True, False])
def test_when_every_multiprocessor_has_several_programs(deterministic: bool) -> None:
    agrees_by_norm(backward_of(make_case(300, 128, 130, 64, PLAIN, with_lengths=True)), deterministic)


@pytest.mark.parametrize("keys", [200, 3000])
def test_duplicates_in_any_order_of_slots(keys: int) -> None:
    """Thousands of summands of one entry, with high parts and without, some of which cancel out."""
    case = with_large_gradients(backward_of(duplicates(keys)))
    inputs = kit.make(case)
    found = differentiate(kit.copies(inputs), case)[1]
    want = OP.reference(**inputs, **kit.attributes(OP, case))[1].reshape(-1, 576)[3]  # most slots name entry 3
    got = found.float().cpu().numpy().reshape(-1, 576)[3]
    for first in (0, 1):  # dims that cancel out, and those that do not
        assert cosine_difference(got[first:512:2], want[first:512:2]) <= GRADIENT.cosine
    rng = np.random.default_rng(1)
    for slots, length in zip(inputs["slots"], inputs["lengths"], strict=True):
        slots[:length] = rng.permutation(slots[:length])
    kit.assert_bits_equal("dcache", differentiate(inputs, case)[1], found)


@pytest.mark.parametrize("deterministic", [True, False])
def test_another_calls_lse_is_nan_not_garbage(deterministic: bool) -> None:
    case = replace(OP.cases[0], attrs={**OP.cases[0].attrs, "deterministic": deterministic})
    inputs = kit.make(case)
    inputs["forward_lse"] = inputs["forward_lse"] - 5
    dcache = differentiate(inputs, case)[1]
    want = OP.reference(**inputs, **kit.attributes(OP, case))[1]
    assert np.isnan(want).any() and np.array_equal(dcache.isnan().cpu().numpy(), np.isnan(want))


@pytest.mark.parametrize("layout", [PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
def test_a_thousand_calls_have_the_same_bits(layout: MlaLayout) -> None:
    """While programs of many tokens add to the same entries, high parts among them."""
    torch.manual_seed(0)
    tokens, heads, keys, entries = 300, 128, 512, 512
    q, cache = (torch.randn(*shape, layout.dims, device="cuda").bfloat16() for shape in ((tokens, heads), (entries, 1)))
    sizes = torch.logspace(-4, 4, tokens, device="cuda")[:, None, None]
    dout = (torch.randn(tokens, heads, 512, device="cuda") * sizes).bfloat16()
    slots = torch.randint(0, entries, (tokens, keys), device="cuda", dtype=torch.int32)
    out, lse = torch_api.sparse_mla(q, cache, slots, softmax_scale=0.0721688)
    first: tuple[torch.Tensor, ...] = ()
    for _ in range(1000):
        found = TORCH_OPS.sparse_mla_backward(
            q, cache, slots, out, lse, dout, softmax_scale=0.0721688, implementation="gluon"
        )
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    assert all(torch.isfinite(array).all() for array in first) and first[1].any()


@pytest.mark.parametrize("layout", [PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("keys", [200, 3000])
def test_runs_in_any_order_are_within_the_stated_bound(keys: int, layout: MlaLayout) -> None:
    """Thousands of summands of an entry, some of which cancel out; the gradients of queries have the same bits."""
    torch.manual_seed(0)
    tokens, heads, entries = 300, 128, 64
    q, cache = (torch.randn(*shape, layout.dims, device="cuda").bfloat16() for shape in ((tokens, heads), (entries, 1)))
    dout = torch.randn(tokens, heads, 512, device="cuda")
    slots = torch.randint(0, entries, (tokens, keys), device="cuda", dtype=torch.int32)
    q[1:150:2], slots[1:150:2], dout[1:150:2] = q[:150:2], slots[:150:2], -1024 * dout[:150:2]
    dout[:150:2] *= 1024
    out, lse = torch_api.sparse_mla(q, cache, slots, softmax_scale=0.0721688)
    given = q, cache, slots, out, lse, dout.bfloat16()

    def derive(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dq, dcache, *_ = TORCH_OPS.sparse_mla_backward(
            *given, softmax_scale=0.0721688, deterministic=False, implementation="gluon"
        )
        return dq, dcache.double()

    # A token's summands of an entry are two, of blocks of heads, once for each slot that names it.
    summands = torch.zeros(entries, 1, layout.dims, device="cuda", dtype=torch.float64)
    for token in range(tokens):
        row = slice(token, token + 1)
        for block in (slice(0, 64), slice(64, 128)):
            of_q, of_out, of_lse, of_dout = (x[row, block].contiguous() for x in (q, out, lse, given[5]))
            summands += derive(of_q, cache, slots[row], of_out, of_lse, of_dout)[1].abs()
    count = 2 * slots.flatten().bincount(minlength=entries)[:, None, None]
    bound = 2 * count * (2.0**-23 * 1.01 * summands + 2.0**-126)
    first, *others = (derive(*given) for _ in range(10))
    apart = [(found[1] - first[1]).abs() for found in others]
    for (dq, dcache), difference in zip(others, apart, strict=True):
        kit.assert_bits_equal("dq", dq, first[0])
        assert (difference <= bound + 2.0**-7 * torch.maximum(dcache.abs(), first[1].abs())).all()
    assert any(difference.any() for difference in apart), "sums have an order"
