"""`xmla.layouts`: a pool's format told from its bytes, and pools converted as wholes, in every kind of array."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest
import torch

from xmla import ArgumentError, layouts
from xmla.core.formats import stored_values
from xmla.core.formats.indexer import INDEXER_DIMS, INDEXER_LAYOUTS, IndexerLayout
from xmla.core.formats.mla import (
    MLA_LAYOUTS,
    NOPE,
    PLAIN_V4,
    V4,
    V32,
    V41,
    V41_FOOTER,
    V41_FP4,
    V41_FP4_FOOTER,
    MlaLayout,
)
from xmla.core.formats.parts import entry_of
from xmla.core.ops.cases import indexer_pool, mla_pool

CANNOT_BE_READ = "pool cannot be read, expected an array with values: "

PACKED = [layout for layout in MLA_LAYOUTS if layout.packed]
KINDS = {"numpy": lambda pool, device: pool, "torch": kit.to_torch, "jax": lambda pool, device: jnp.asarray(pool)}


def pool_of(layout: MlaLayout, pages: int = 3, entries: int = 16, padding: int = 0) -> np.ndarray:
    """A pool in which a part of the entries is written and the rest is zero or NaN."""
    rng = np.random.default_rng(0)
    used = rng.permutation(pages * entries)[: pages * entries // 2]
    return mla_pool(rng, layout, pages, entries, used, padding)


@pytest.mark.parametrize("layout", PACKED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("entries", [2, 61])
def test_inspect_names_what_a_writer_stored(layout: MlaLayout, entries: int, device: str) -> None:
    found = layouts.inspect(kit.to_torch(pool_of(layout, pages=32, entries=entries, padding=16), device))
    assert found.format == layout.name, found.reason
    assert found.power_of_two is (True if layout.scale == "float32" else None)


@pytest.mark.parametrize("layout", INDEXER_LAYOUTS, ids=lambda layout: layout.name)
def test_inspect_names_indexer_keys(layout: IndexerLayout) -> None:
    """Also where rows of two formats have as many bytes."""
    rng = np.random.default_rng(0)
    pool = indexer_pool(rng, layout, 3, 16, rng.permutation(48)[:24], padding=8)
    found = layouts.inspect(pool)
    assert (found.format, found.power_of_two) == (layout.name, None), found.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", [("fp8", "mxfp4"), ("mxfp4", "fp8")], ids="-to-".join)
@pytest.mark.parametrize("dim", INDEXER_DIMS)
def test_convert_indexer_keys(dim: int, forms: tuple[str, str], kind: str, device: str) -> None:
    source, target = (IndexerLayout(dim, form) for form in forms)
    every = np.arange(48)
    pool = indexer_pool(np.random.default_rng(0), source, 3, 16, every)
    got = kit.as_numpy(layouts.convert(KINDS[kind](pool, device), target.name))
    want = np.zeros((3, 16, target.row), np.uint8)
    values, factors = source.operands(*source.gather(pool, every))
    target.scatter(want, every, *target.quantize((values * factors[:, None]).astype(np.float32)))
    kit.assert_bits_equal("pool", got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_whose_scale_is_four_ue8m0_bytes(kind: str, device: str) -> None:
    """Keys with float32 scales differ in the footers alone. Where the four bytes differ a key is NaN."""
    every, fp8, ue8m0 = np.arange(48), IndexerLayout(128), IndexerLayout(128, "fp8_ue8m0")
    keys = np.random.default_rng(0).standard_normal((48, 128), np.float32) * np.exp2(np.arange(-24, 24)[:, None])
    pool, theirs = (np.zeros((3, 16, 132), np.uint8) for _ in range(2))
    values, scales = fp8.quantize(keys.astype(np.float32))
    fp8.scatter(pool, every, values, scales)
    stored = np.repeat(((scales.view(np.int32) >> 23) & 255).astype(np.uint8)[:, None], 4, axis=1)
    fp8.scatter(theirs, every, values, stored.view(np.float32)[:, 0])

    found = layouts.inspect(KINDS[kind](theirs, device))
    assert (found.format, found.power_of_two) == (ue8m0.name, None), found.reason
    assert layouts.inspect(pool).format == layouts.inspect(np.zeros_like(pool)).format == fp8.name
    as_floats, as_bytes = (
        kit.as_numpy(layouts.convert(KINDS[kind](each, device), layout.name))
        for each, layout in ((theirs, fp8), (pool, ue8m0))
    )
    for got, form in ((as_floats, None), (as_bytes, "fp8_ue8m0"), (theirs, "fp8_ue8m0")):
        kit.assert_bits_equal("keys", stored_values(got, 128, form), stored_values(pool, 128))
    stored[7, 3] += 1
    fp8.scatter(theirs, every, values, stored.view(np.float32)[:, 0])
    read, _ = fp8.gather(kit.as_numpy(layouts.convert(KINDS[kind](theirs, device), fp8.name)), every)
    assert (np.isnan(read.astype(np.float32)).all(axis=1).nonzero()[0] == [7]).all()


def test_inspect_tells_scales_that_are_no_powers_of_two() -> None:
    pool = pool_of(V32)
    pool[0, :, 512:516] = np.frombuffer(np.float32(0.3).tobytes(), np.uint8)
    assert layouts.inspect(pool).power_of_two is False


@pytest.mark.parametrize("entries", [2, 3, 33, 64])
@pytest.mark.parametrize("layout", [V41, V41_FOOTER, V41_FP4, V41_FP4_FOOTER], ids=lambda layout: layout.name)
def test_inspect_never_takes_released_entries_for_older_ones(layout: MlaLayout, entries: int) -> None:
    """Whichever entries are written: a page's last one has its scales in the same place in both, and tells nothing."""
    named = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        used = rng.permutation(3 * entries)[: rng.integers(1, 3 * entries + 1)]
        found = layouts.inspect(mla_pool(rng, layout, 3, entries, used))
        assert found.format in (layout.name, None), found.reason
        named += found.format is not None
    assert named >= 20


def test_inspect_does_not_choose_between_equal_bytes() -> None:
    """Pages of one entry are the same in both."""
    released = pool_of(V41, entries=1)
    assert np.array_equal(released, pool_of(V41_FOOTER, entries=1))
    found = layouts.inspect(released)
    assert found.format is None
    usual = "1 of 1 entries have usual scales"
    assert found.reason.startswith(f"v41: {usual}; v41_footer: {usual};")
    with pytest.raises(ArgumentError, match=f"source_format is None, expected a name, because v41: {usual}"):
        layouts.convert(released, "v4")


def test_inspect_does_not_guess() -> None:
    assert layouts.inspect(np.zeros((2, 4, 528), np.uint8)) == layouts.Inspection(
        None, None, "; ".join(f"{name}: nothing is written in the pages read" for name in ("v41", "v41_footer", "nope"))
    )
    unknown = layouts.inspect(np.zeros((2, 4, 600), np.uint8)).reason
    assert unknown.startswith("no format has rows of 600 bytes; known are 656, 584, ")
    garbage = np.random.default_rng(0).integers(0, 256, (2, 64, 656), np.uint8)
    found = layouts.inspect(garbage)
    assert found.format is None and found.reason.startswith("v32: ")
    with pytest.raises(ArgumentError, match="pool is list, expected a torch, JAX or NumPy array"):
        layouts.inspect(garbage.tolist())
    with pytest.raises(ArgumentError, match=r"pool rank is 2, expected 3 \(P, R, ROW\)"):
        layouts.inspect(np.zeros((2, 656), np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_answers_for_every_dtype(kind: str, device: str) -> None:
    """A dtype that no op takes is the reason, whatever the rows."""
    dtypes = ["bool", "int16", "uint16", "int32", "float32", "float8_e5m2", "bfloat16", "float16", "int8", "uint8"]
    for dtype in dtypes + ["int64", "uint64", "float64", "complex64"] * (kind != "jax"):
        for row in (132, 512, 576, 656):
            array = np.zeros((2, 4, row), getattr(ml_dtypes, dtype, dtype))
            pool = (
                torch.zeros(2, 4, row, dtype=getattr(torch, dtype), device=device)
                if kind == "torch"
                else KINDS[kind](array, device)
            )
            found = layouts.inspect(pool)
            named = (
                {576: "plain", 512: "plain_v4"} if dtype.endswith("float16") else {656: "v32", 132: "indexer_fp8_d128"}
            )
            wanted = named.get(row) if dtype in ("bfloat16", "float16", "int8", "uint8") else None
            assert found.format == wanted, found.reason
            if dtype not in ("bfloat16", "float16", "int8", "uint8"):
                assert found.reason.startswith(f"no format has elements of {dtype}; known are uint8 or int8 or ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("layout", [*MLA_LAYOUTS, *INDEXER_LAYOUTS], ids=lambda layout: layout.name)
def test_inspect_a_pool_without_entries(
    layout: MlaLayout | IndexerLayout, shape: tuple[int, int], kind: str, device: str
) -> None:
    """As one in which nothing is written: plain rows are told by their size, packed ones are not told."""
    dtype = np.dtype(np.uint8 if layout.packed else ml_dtypes.bfloat16)
    pool = KINDS[kind](np.zeros((*shape, layout.row), dtype), device)
    found = layouts.inspect(pool)
    alike = [
        other
        for other in (*MLA_LAYOUTS, *(keys for keys in INDEXER_LAYOUTS if keys.inferred))
        if (other.row, other.packed) == (layout.row, layout.packed)
    ]
    assert found.format == (alike[0].name if len(alike) == 1 else None), found.reason
    if layout.packed:
        assert f"{layout.name}: nothing is written in the pages read" in found.reason
    got = kit.as_numpy(layouts.convert(pool, layout.name, source_format=layout.name))
    assert got.shape == (*shape, layout.row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("source", "target"),
    [(V4, V41_FP4), (NOPE, PLAIN_V4), (PLAIN_V4, V41), (V41_FOOTER, V41), (V41_FP4_FOOTER, V41_FP4), (V41, V41_FOOTER)],
    ids=lambda x: x.name,
)
def test_convert(source: MlaLayout, target: MlaLayout, kind: str, device: str) -> None:
    """Each entry of the new pool is the old one's, read exactly and rounded once."""
    pool = pool_of(source)
    got = kit.as_numpy(layouts.convert(KINDS[kind](pool, device), target.name))
    every = np.arange(pool.shape[0] * pool.shape[1])
    want = np.zeros((*pool.shape[:2], target.row), got.dtype)
    rows = source.gather(pool, every)
    target.scatter(want, every, rows[:, : target.latent], rows[:, target.latent :])
    assert np.isnan(rows).any() and not np.isnan(rows).all()
    kit.assert_entries_equal("pool", target, got, want)


def test_convert_allocates_pages_as_the_format_wants_them(device: str) -> None:
    converted = layouts.convert(kit.to_torch(pool_of(PLAIN_V4, entries=64), device), "v4")
    assert converted.stride() == (37440, 584, 1)  # 64 · 584 rounded up to a multiple of 576 (FlashMLA tests/quant.py)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda: torch.zeros(2, 4, 656, dtype=torch.uint8).to_sparse(), "pool layout is sparse_coo, expected strided"),
        (lambda: torch.zeros(2, 4, 656, dtype=torch.uint8, device="meta"), CANNOT_BE_READ),
        (lambda: deleted(jnp.zeros((2, 4, 656), jnp.uint8)), CANNOT_BE_READ),
    ],
    ids=["sparse", "meta", "deleted"],
)
def test_inspect_refuses_a_pool_without_values(pool: Callable[[], Any], message: str) -> None:
    for function in (layouts.inspect, lambda given: layouts.convert(given, "nvfp4")):
        with pytest.raises(ArgumentError, match=message):
            function(pool())


def test_inspect_refuses_a_traced_pool() -> None:
    with pytest.raises(ArgumentError, match=CANNOT_BE_READ):
        jax.jit(lambda pool: layouts.convert(pool, "nvfp4"))(jnp.zeros((2, 4, 656), jnp.uint8))


def deleted(array: jax.Array) -> jax.Array:
    array.delete()
    return array


def test_convert_refuses() -> None:
    with pytest.raises(ArgumentError, match="convert: cache_format is 'v5', expected one of v32, v4, v41"):
        layouts.convert(pool_of(V4), "v5")
    with pytest.raises(ArgumentError, match="source_format is None, expected a name, because v41: nothing is written"):
        layouts.convert(np.zeros((2, 4, 528), np.uint8), "v4")
    with pytest.raises(ArgumentError, match="cache format is 'v4', expected one with the dims of 'v32'"):
        layouts.convert(pool_of(V32), "v4")
    with pytest.raises(ArgumentError, match="cache_format is 'indexer_fp8_d64', expected one with the dims of 'v32'"):
        layouts.convert(pool_of(V32), "indexer_fp8_d64")
    with pytest.raises(ArgumentError, match="scale_floor is 'none', expected 'scale' or 'amax'"):
        layouts.convert(pool_of(V32), "nvfp4", scale_floor="none")


class UsersTensor(torch.Tensor):
    """A subclass as engines make for what a weight or a pool has besides."""


class UsersArray(np.ndarray):
    """A subclass of NumPy's array, as users make."""


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_pool_of_a_users_class(kind: str, device: str) -> None:
    """`inspect` and `convert` take it for the array that it is."""
    pool = pool_of(V32, pages=8, entries=4)
    users = kit.to_torch(pool, device).as_subclass(UsersTensor) if kind == "torch" else pool.view(UsersArray)
    assert layouts.inspect(users).format == layouts.inspect(pool).format == "v32"
    got = layouts.convert(users, "plain", source_format="v32")
    assert isinstance(got, torch.Tensor if kind == "torch" else np.ndarray)
    want = layouts.convert(pool, "plain", source_format="v32")
    undefined = np.isnan(want.astype(np.float32))  # a GPU's NaN has other bits
    kit.assert_bits_equal("pool", got, want, ~undefined)
    assert np.isnan(kit.as_numpy(got).astype(np.float32)[undefined]).all()


@pytest.mark.parametrize("layout", [*MLA_LAYOUTS, *INDEXER_LAYOUTS], ids=lambda layout: layout.name)
def test_parts_are_all_bytes_of_an_entry(layout: MlaLayout | IndexerLayout) -> None:
    within, outside = entry_of(layout)[-2:]
    entry, footer = (sum(size for _, size in parts) for parts in (within, outside))
    assert entry + footer == layout.row * (1 if layout.packed else 2)
    assert footer == (layout.footer if isinstance(layout, MlaLayout) else 4)


def test_digests_name_what_differs() -> None:
    """Formats with as many bytes in a row, pages of other sizes, and vLLM's keys on Blackwell beside xmla's."""
    v32 = "format=v32;page=64;stride=41984;values=e4m3;scale=float32;tile=128;parts=latent:512,scales:16,rope:128"
    assert layouts.digest("v32", 64) == v32
    plain = layouts.digest("plain", 64, dtype="bfloat16")
    assert plain == "format=plain;page=64;stride=36864;values=bfloat16;parts=dims:1152"
    assert layouts.differences(plain, layouts.digest("plain", 64, dtype="float16")) == {
        "values": ("bfloat16", "float16")
    }  # fmt: skip
    dtypes = {each.name: None if each.packed else "bfloat16" for each in (*MLA_LAYOUTS, *INDEXER_LAYOUTS)}
    digests = [layouts.digest(name, 64, dtype=dtype) for name, dtype in dtypes.items()]
    assert len({*digests}) == len(digests)

    v4 = layouts.digest("v4", 64)
    assert v4.endswith(";parts=latent:448,rope:128|scales:7,pad:1")
    assert layouts.differences(v4, layouts.digest("v4", 64, page_stride=64 * 584)) == {"stride": ("37440", "37376")}
    assert layouts.differences(v32, v32) == {}
    assert layouts.differences(v32, layouts.digest("v32", 128)) == {"page": ("64", "128"), "stride": ("41984", "83968")}
    keys = (layouts.digest(name, 64) for name in ("indexer_fp8_d128", "indexer_fp8_ue8m0_d128"))
    assert layouts.differences(*keys) == {
        "format": ("indexer_fp8_d128", "indexer_fp8_ue8m0_d128"), "scale": ("float32", "ue8m0 four times")
    }  # fmt: skip
    places = (layouts.digest(name, 64) for name in ("v41", "v41_footer"))
    assert layouts.differences(*places)["parts"] == ("dims:512,scales:16", "dims:512|scales:16")
    assert layouts.differences(v32, plain)["scale"] == ("float32", "none")
    rotated, own, untold = (layouts.digest("indexer_fp8_d128", 64, hadamard=each) for each in (True, False, None))
    assert layouts.differences(rotated, own) == {"hadamard": ("yes", "no")}
    assert layouts.differences(untold, own) == {"hadamard": ("none", "no")}


def test_digest_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"^digest: cache_format is 'v33', expected one of v32, "):
        layouts.digest("v33", 64)
    with pytest.raises(ArgumentError, match=r"^digest: page_size is 0, expected at least 1$"):
        layouts.digest("v32", 0)
    with pytest.raises(ArgumentError, match=r"^digest: page_stride is 64, expected at least 41984 for 64 entries$"):
        layouts.digest("v32", 64, page_stride=64)
    with pytest.raises(ArgumentError, match=r"^digest: hadamard is False for 'v32', expected None: "):
        layouts.digest("v32", 64, hadamard=False)
    for name, dtype in (("plain", None), ("plain_v4", "float32")):
        message = rf"^digest: dtype is {dtype!r} for '{name}', expected bfloat16 or float16, which no name tells$"
        with pytest.raises(ArgumentError, match=message):
            layouts.digest(name, 64, dtype=dtype)
    with pytest.raises(ArgumentError, match=r"^digest: dtype is 'bfloat16' for 'v32', expected None: plain rows"):
        layouts.digest("v32", 64, dtype="bfloat16")
    with pytest.raises(ArgumentError, match=r"^differences: got 'v32', expected what `digest` returns$"):
        layouts.differences("v32", layouts.digest("v32", 64))
