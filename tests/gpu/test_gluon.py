"""The Gluon attention kernels for Hopper, against the reference and the portable kernels."""

import jax
import kit
import numpy as np
import pytest
import torch
from garbage import garbage_inputs
from hopper import ON_HOPPER, supported
from hypothesis import given, settings

from xmla import jax_api, torch_api
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.registry import registry
from xmla.core.values import H200

pytestmark = ON_HOPPER

OP = registry()["sparse_mla"]


CASES = [case for case in OP.cases if supported(OP, kit.make(case), case.attrs)]
by_case = pytest.mark.parametrize("case", CASES, ids=kit.case_id)


def attend(inputs: dict[str, np.ndarray], attrs: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_api.sparse_mla(*kit.torch_inputs(OP, inputs, "cuda"), **attrs, implementation="gluon")


def agrees(inputs: dict[str, np.ndarray], case: Case) -> None:
    got = attend(kit.copies(inputs), dict(case.attrs))
    with np.errstate(invalid="ignore"):
        want = OP.reference(**inputs, **kit.attributes(OP, case))
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, OP.outputs[name].agreement)


@by_case
def test_agrees_with_the_reference(case: Case) -> None:
    agrees(kit.make(case), case)


@pytest.mark.parametrize("layout", [V4, PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("heads", [3, 64, 128])
@pytest.mark.parametrize(("keys", "extra"), [(1, 1), (1, 130), (63, 64), (64, 1), (64, 64), (65, 63), (129, 128)])
def test_tile_edges_of_two_sources(keys: int, extra: int, heads: int, layout: MlaLayout) -> None:
    """Lengths of 0, below it and past the capacity, in one source, the other and both; a row without a valid slot."""
    case = make_case(
        4, heads, keys, 64, layout, with_lengths=True, with_sink=True, extra=(layout, extra, 2),
        rotate=layout.rope_in_value,
    )  # fmt: skip
    agrees(kit.make(case), case)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128, 129, 191, 193, 256, 300])
def test_tile_edges_of_plain_rows(keys: int) -> None:
    case = make_case(5, 70, keys, 7, PLAIN, with_lengths=True, empty_lse="+inf")
    agrees(kit.make(case), case)


@pytest.mark.parametrize("heads", [2, 5, 16, 17, 70])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128, 129, 191, 193, 300])
@pytest.mark.parametrize("layout", [V32, NVFP4], ids=lambda layout: layout.name)
def test_tile_edges_of_v32_and_nvfp4(keys: int, heads: int, layout: MlaLayout) -> None:
    case = make_case(5, heads, keys, 7, layout, with_lengths=True, with_sink=True, lse_sink=keys % 2 == 0)
    agrees(kit.make(case), case)


@pytest.mark.parametrize("layout", [V4, PLAIN_V4], ids=lambda layout: layout.name)
def test_when_every_multiprocessor_has_several_programs(layout: MlaLayout) -> None:
    case = make_case(300, 128, 130, 64, layout, with_lengths=True, with_sink=True, extra=(layout, 100, 64), rotate=True)
    agrees(kit.make(case), case)


# Up to 512 tokens are computed in the order of their lengths, also where each has two splits.
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "splits"),
    [
        (600, 16, 330, 1),
        (150, 16, 330, 1),
        (300, 128, 330, 1),
        (67, 128, 330, 1),
        (67, 128, 1600, 2),
        (512, 16, 330, 1),
        (513, 16, 330, 1),
    ],
)
def test_when_every_multiprocessor_has_several_programs_of_v32(tokens: int, heads: int, keys: int, splits: int) -> None:
    # A pool so large that no plan unpacks its entries first.
    case = make_case(tokens, heads, keys, 3500, V32, with_lengths=True, with_sink=True, padding=16)
    assert len(kit.plan_of(OP, case, H200).launches) == splits  # two splits' results are combined by another launch
    agrees(kit.make(case), case)


def agrees_by_norm(inputs: dict[str, np.ndarray], case: Case) -> None:
    """The error of a head's result against the result, not each dim's: dims of very different sizes share one."""
    with np.errstate(invalid="ignore"):
        want = [np.asarray(x, np.float64) for x in OP.reference(**inputs, **kit.attributes(OP, case))]
    got = [kit.as_numpy(x).astype(np.float64) for x in attend(kit.copies(inputs), dict(case.attrs))]
    error = np.linalg.norm(got[0] - want[0], axis=-1)
    assert (error <= 2**-8 * np.linalg.norm(want[0], axis=-1)).all(), error.max()
    assert np.allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [V32, NVFP4, V4], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("heads", "keys", "page"), [(128, 330, 64), (17, 65, 2), (64, 130, 61)])
def test_entries_that_are_unpacked_first(heads: int, keys: int, page: int, layout: MlaLayout) -> None:
    case = make_case(300, heads, keys, page, layout, with_lengths=True, padding=16)
    agrees_by_norm(kit.make(case), case)


@pytest.mark.parametrize(("spread", "rope"), [(4, 0), (2, 18), (2, -18), (40, 20)])
def test_scales_far_apart_in_v4(spread: int, rope: int) -> None:
    """Tiles of an entry up to 2**±spread apart, roped dims at 2**rope of one: what float16 alone could not hold."""
    case = make_case(4, 64, 200, 64, V4, with_sink=True, extra=(V4, 130, 64))
    inputs, rng = kit.make(case), np.random.default_rng(1)
    for name in ("cache", "extra_cache"):
        count = inputs[name].shape[0] * inputs[name].shape[1]
        factors = np.exp2(rng.integers(-spread, spread + 1, (count, 7))).repeat(64, axis=1)
        latent, roped = rng.standard_normal((count, 448)) * factors, rng.standard_normal((count, 64)) * 2.0**rope
        V4.scatter(inputs[name], np.arange(count), latent, roped)
    inputs["q"] = (inputs["q"].astype(np.float32) * 2.0 ** -max(spread, rope)).astype(inputs["q"].dtype)
    inputs["sink"][:2] = 0.0
    agrees_by_norm(inputs, case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(("spread", "rope"), [(4, 0), (2, 18), (2, -18), (40, 20)])
def test_scales_far_apart_in_v32(spread: int, rope: int, heads: int) -> None:
    case = make_case(4, heads, 200, 64, V32)
    inputs, rng = kit.make(case), np.random.default_rng(1)
    count = inputs["cache"].shape[0] * inputs["cache"].shape[1]
    factors = np.exp2(rng.integers(-spread, spread + 1, (count, 4))).repeat(128, axis=1)
    latent, roped = rng.standard_normal((count, 512)) * factors, rng.standard_normal((count, 64)) * 2.0**rope
    V32.scatter(inputs["cache"], np.arange(count), latent, roped)
    inputs["q"] = (inputs["q"].astype(np.float32) * 2.0 ** -max(spread, rope)).astype(inputs["q"].dtype)
    agrees_by_norm(inputs, case)


@pytest.mark.parametrize("layout", [PLAIN, PLAIN_V4, V4, V32, NVFP4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("rise", [2.0, 5.0, 9.0, -9.0])
def test_scores_that_rise_from_tile_to_tile(rise: float, layout: MlaLayout) -> None:
    """By `rise` in base 2: what they are taken relative to is raised in some tiles, in all, in the first alone."""
    case = make_case(3, 64, 640, 64, layout)
    inputs, rng = kit.make(case), np.random.default_rng(1)
    count = inputs["cache"].shape[0] * inputs["cache"].shape[1]
    latent, roped = rng.standard_normal((count, layout.latent)), rng.standard_normal((count, layout.rope))
    latent[:, 0] = rise / (4 * case.attrs["softmax_scale"] * np.log2(np.e)) * np.arange(count) / 64
    layout.scatter(inputs["cache"], np.arange(count), latent, roped)
    inputs["q"] = (inputs["q"].astype(np.float32) / 8).astype(inputs["q"].dtype)
    inputs["q"][..., 0] = 4
    inputs["slots"] = np.tile(np.arange(640, dtype=np.int32), (3, 1))
    agrees_by_norm(inputs, case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(("first", "byte", "count"), [(5, 0x7F, 1), (516, 0xFF, 4), (528, 0xFF, 2)])
def test_a_key_that_is_nan_in_v32(first: int, byte: int, count: int, heads: int) -> None:
    """A value, a scale, a roped dim."""
    case = make_case(4, heads, 100, 64, V32)
    inputs = kit.make(case)
    cache = inputs["cache"]
    page, entry = divmod(int(inputs["slots"][0][inputs["slots"][0] >= 0][0]), cache.shape[1])
    cache[page, entry, first : first + count] = byte
    got = attend(kit.copies(inputs), dict(case.attrs))
    assert got[0][0].isnan().all() and got[1][0].isnan().all()


@pytest.mark.parametrize("byte", [323, 256])
def test_a_key_that_is_nan_in_nvfp4(byte: int) -> None:
    """A scale, a roped dim: e2m1 has no NaN."""
    case = make_case(4, 64, 100, 64, NVFP4)
    inputs = kit.make(case)
    cache = inputs["cache"]
    page, entry = divmod(int(inputs["slots"][0][inputs["slots"][0] >= 0][0]), cache.shape[1])
    cache[page, entry, byte] = 0x7F
    got = attend(kit.copies(inputs), dict(case.attrs))
    assert got[0][0].isnan().any() and got[1][0].isnan().all()


@pytest.mark.parametrize(("place", "byte"), [("value", 0x7F), ("scale", 0xFF), ("rope", 0xFF)])
def test_a_key_that_is_nan_in_v4(place: str, byte: int) -> None:
    case = make_case(4, 64, 100, 64, V4)
    inputs = kit.make(case)
    cache = inputs["cache"]
    page, entry = divmod(int(inputs["slots"][0][inputs["slots"][0] >= 0][0]), cache.shape[1])
    first = {"value": entry * 576 + 5, "scale": cache.shape[1] * 576 + entry * 8 + 3, "rope": entry * 576 + 448}[place]
    cache[page].reshape(-1)[first : first + 2] = byte
    got = attend(kit.copies(inputs), dict(case.attrs))
    assert got[0][0].isnan().all() and got[1][0].isnan().all()


@given(garbage_inputs(OP).filter(lambda drawn: supported(OP, *drawn)))
@settings(max_examples=30)
def test_garbage_integers_give_the_reference(drawn: tuple[dict[str, np.ndarray], dict[str, object]]) -> None:
    inputs, attrs = drawn
    got = attend(inputs, attrs)
    with np.errstate(all="ignore"):
        want = OP.reference(**inputs, **attrs)
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, OP.outputs[name].agreement)


@by_case
def test_jax_gives_the_same_bits(case: Case) -> None:
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    ours = attend(inputs, dict(case.attrs))
    step = jax.jit(lambda *arrays: jax_api.sparse_mla(*arrays, **case.attrs, implementation="gluon"))
    for name, a, b in zip(OP.outputs, ours, step(*kit.jax_inputs(OP, inputs)), strict=True):
        kit.assert_bits_equal(name, a, b)


@pytest.mark.parametrize(
    "case",
    [next(c for c in CASES if kind in c.name) for kind in ("v32", "v4+v4")] + [make_case(9, 16, 700, 64, V32)],
    ids=kit.case_id,
)
def test_repeated_calls_and_graph_replays_give_the_same_bits(case: Case) -> None:
    inputs = kit.torch_inputs(OP, kit.make(case), "cuda")
    attrs = dict(case.attrs)
    want = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
    for _ in range(20):
        again = torch_api.sparse_mla(*inputs, **attrs, implementation="gluon")
        graph.replay()
        for name, a, b, c in zip(OP.outputs, want, again, captured, strict=True):
            kit.assert_bits_equal(name, a, b)
            kit.assert_bits_equal(name, a, c)
