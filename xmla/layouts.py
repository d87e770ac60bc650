"""Whole paged caches: infer the format of a pool from its bytes, convert a pool to another format, and compare layouts.

Formats are named as in `write_mla_cache`; those of `write_indexer_cache` have names such as `indexer_fp8_d128`.
`xmla.core.formats` defines their bytes.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from xmla.core.call import BYTES, HALVES
from xmla.core.errors import ArgumentError
from xmla.core.formats.indexer import INDEXER_LAYOUTS, IndexerLayout
from xmla.core.formats.mla import MLA_LAYOUTS, SCALE_FLOORS, MlaLayout, mla_layouts
from xmla.core.formats.parts import entry_of
from xmla.core.registry import registry
from xmla.core.values import Attr, Spec

if TYPE_CHECKING:
    import jax
    import torch

# Scales of keys lie well inside this range; other bytes read as scales do not.
USUAL_SCALES = 2.0**-40, 2.0**40
SAMPLED_PAGES = 64
Layout = MlaLayout | IndexerLayout
LAYOUTS: tuple[Layout, ...] = (*MLA_LAYOUTS, *INDEXER_LAYOUTS)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        format: The one format that fits, or None.
        power_of_two: Whether all scales read are powers of two, as FlashMLA's kernels for Blackwell need; None if the
            format is unknown or is not a latent format with float32 scales.
        reason: Each format of this row size and dtype, and the evidence for or against it.
    """

    format: str | None
    power_of_two: bool | None
    reason: str


def inspect(pool: "torch.Tensor | jax.Array | np.ndarray") -> Inspection:
    """Name the format of a latent or an indexer cache [P, R, ROW], a torch, JAX or NumPy array.

    The format is inferred from row size, dtype and bytes; up to 64 pages are read back. An entry whose bytes are all
    equal counts as never written. A format is ruled out if most of the written entries would have scales in it that no
    key has; one that no call infers, if none is written. If not exactly one format is left, none is named.

    Raises:
        ArgumentError: It is no such array, or has no three axes, or no values, as one that is traced.
    """
    spec = _spec_of(pool)
    if spec.dtype not in (*BYTES, *HALVES):
        known = " or ".join((*BYTES, *HALVES))
        return Inspection(None, None, f"no format has elements of {spec.dtype}; known are {known}")
    pages = np.linspace(0, spec.shape[0] - 1, SAMPLED_PAGES) if spec.shape[0] else np.zeros(0)
    sample = _to_host(pool, np.unique(pages.astype(np.int64)))
    fitting, reasons = [], []
    indexers = (layout for layout in INDEXER_LAYOUTS if spec.itemsize == 1 and layout.row == spec.shape[2])
    for layout in (*mla_layouts(spec), *indexers):
        fits, reason = _judge(layout, sample)
        fitting += [layout] * fits
        reasons.append(f"{layout.name}: {reason}")
    if not reasons:
        kind = "bytes" if spec.itemsize == 1 else "elements"
        rows = dict.fromkeys(layout.row for layout in LAYOUTS if layout.packed == (spec.itemsize == 1))
        known = ", ".join(map(str, rows))
        return Inspection(None, None, f"no format has rows of {spec.shape[2]} {kind}; known are {known}")
    if len(fitting) != 1:
        return Inspection(None, None, "; ".join(reasons))
    (layout,) = fitting
    power_of_two = None
    if isinstance(layout, MlaLayout) and layout.packed and layout.scale == "float32":
        scales = layout.used_scales(sample)
        power_of_two = bool((np.frexp(scales)[0] == 0.5).all())
    return Inspection(layout.name, power_of_two, "; ".join(reasons))


def _judge(layout: Layout, sample: np.ndarray) -> tuple[bool, str]:
    if not layout.packed:
        return True, f"rows of {layout.row} {sample.dtype.name}"
    scales = layout.used_scales(sample)
    if not len(scales):
        inferred = isinstance(layout, MlaLayout) or layout.inferred
        return inferred, "nothing is written in the pages read"
    low, high = USUAL_SCALES
    if isinstance(layout, MlaLayout) and layout.scale == "e4m3" and not layout.outer_scale:
        high = 416.0  # beside an outer scale the largest of an entry's is the one above, 448
    usual = int(((scales >= low) & (scales <= high)).all(axis=1).sum())
    return 2 * usual > len(scales), f"{usual} of {len(scales)} entries have usual scales"


def convert[Pool: (torch.Tensor, jax.Array, np.ndarray)](
    pool: Pool, cache_format: str, *, source_format: str | None = None, scale_floor: str = "scale"
) -> Pool:
    """A new pool with the same pages and slots, in another format with the same dims.

    An entry is read exactly and rounded once, as in `write_mla_cache`; in one format and dtype its bytes are copied. A
    key is its values · scale in float32, rounded as in `write_indexer_cache`. `convert_mla_cache` takes some entries,
    by their slots.

    Args:
        pool: [P, R, ROW], a torch, JAX or NumPy array; the result is of the same kind and on the same device.
        cache_format: The name of the new format. In torch the page stride is the multiple that the format's allocators
            use. Plain rows are bfloat16.
        source_format: The format of `pool`. Default: the one that `inspect` finds.
        scale_floor: As in `write_mla_cache`; indexer keys have one rule.

    Raises:
        ArgumentError: A name is unknown, the formats hold different dims, or `inspect` finds no format.
    """
    spec = _spec_of(pool)
    layout = _named("cache_format", cache_format, LAYOUTS)
    if Attr("scale_floor", str, False, None).plain("convert", scale_floor) not in SCALE_FLOORS:
        raise ArgumentError(f"convert: scale_floor is {scale_floor!r}, expected 'scale' or 'amax'")
    if source_format is None:
        inspection = inspect(pool)
        if inspection.format is None:
            raise ArgumentError(f"convert: source_format is None, expected a name, because {inspection.reason}")
        source_format = inspection.format
    origin = _named("source_format", source_format, LAYOUTS)
    kind = _framework(pool)
    array: Any = pool  # a type checker cannot follow `kind`
    pages, entries, _ = spec.shape
    dtype = "uint8" if layout.packed else "bfloat16"
    if isinstance(layout, MlaLayout) and isinstance(origin, MlaLayout):
        name = "convert_mla_cache"
        attrs = {"source_format": origin.name, "cache_format": layout.name, "scale_floor": scale_floor}
    elif isinstance(layout, IndexerLayout) and isinstance(origin, IndexerLayout) and layout.dim == origin.dim:
        name = "convert_indexer_cache"
        attrs = {"source_format": origin.format, "cache_format": layout.format}
    else:
        raise ArgumentError(f"convert: cache_format is {layout.name!r}, expected one with the dims of {origin.name!r}")
    if kind == "torch":
        import torch

        from xmla.torch_api._all_ops import TORCH_OPS

        memory = array.new_zeros(pages, layout.page_stride(entries), dtype=getattr(torch, dtype))
        cache = memory[:, : entries * layout.row].view(pages, entries, layout.row)
        slots = torch.arange(pages * entries, device=array.device)
        getattr(TORCH_OPS, name)(array, slots, slots, cache, **attrs)
        return cache
    if kind == "jax":
        import jax.numpy as jnp

        from xmla.jax_api._all_ops import JAX_OPS

        slots = jnp.arange(pages * entries, dtype=jnp.int32)
        cache = jnp.zeros((pages, entries, layout.row), dtype)
        return getattr(JAX_OPS, name)(array, slots, slots, cache, **attrs)
    from xmla.core.values import DTYPES

    slots = np.arange(pages * entries)
    cache: Any = np.zeros((pages, entries, layout.row), DTYPES[dtype][0])
    op = registry()[name]
    specs = {name: Spec.of_numpy(a) for name, a in zip(op.tensors, (array, slots, slots, cache), strict=True)}
    op.bind(specs, op.attributes(**attrs))
    op.reference(array, slots, slots, cache, **attrs)
    return cache


def digest(
    cache_format: str, page_size: int, *, page_stride: int | None = None, hadamard: bool | None = None,
    dtype: str | None = None,
) -> str:  # fmt: skip
    """Name all that decides which byte of a page is what: two caches can be moved as bytes if their digests are equal.

    A connector compares it with the other side's before it moves pages, and tells `differences`.

    Args:
        cache_format: A format's name, as `inspect` gives it.
        page_size: Entries of a page, R.
        page_stride: Elements from page to page: bytes, or of plain rows 16-bit elements. Default: that of the format's
            allocators, which pad a page of some formats.
        hadamard: Whether a Hadamard transform has rotated an indexer's keys, as in DeepSeek-V4's reference and in
            SGLang, not in vLLM. No byte tells, so the digest has a field of it only if it is given.
        dtype: "bfloat16" or "float16", of plain rows and no others.

    Returns:
        Fields by name, as in `format=v32;page=64;stride=41984;values=e4m3;scale=float32;tile=128;
        parts=latent:512,scales:16,rope:128`. Parts of an entry are in their order with their bytes; those behind `|`
        are in the page's footer.

    Raises:
        ArgumentError: The name is unknown, a page is smaller than its entries, or `hadamard` is given for attention's.
            Or `dtype` is not, for plain rows, or is for others.
    """
    layout = _named("cache_format", cache_format, LAYOUTS, "digest")
    page_size = Attr("page_size", int, False, None).plain("digest", page_size)
    page_stride = Attr("page_stride", int, True, None).plain("digest", page_stride)
    if page_size < 1:
        raise ArgumentError(f"digest: page_size is {page_size}, expected at least 1")
    least, stride = page_size * layout.row, page_stride
    stride = layout.page_stride(page_size) if stride is None else stride
    if stride < least:
        raise ArgumentError(f"digest: page_stride is {stride}, expected at least {least} for {page_size} entries")
    dtype = Attr("dtype", str, True, None).plain("digest", dtype)
    if layout.packed and dtype is not None:
        raise ArgumentError(f"digest: dtype is {dtype!r} for {layout.name!r}, expected None: plain rows alone have it")
    if not layout.packed and dtype not in HALVES:
        expected = f"{' or '.join(HALVES)}, which no name tells"
        raise ArgumentError(f"digest: dtype is {dtype!r} for {layout.name!r}, expected {expected}")
    entry = entry_of(layout)
    scales = {"scale": entry.scale, "tile": entry.tile} if layout.packed else {}
    fields = {"format": layout.name, "page": page_size, "stride": stride, "values": dtype or entry.values} | scales
    if (hadamard := Attr("hadamard", bool, True, None).plain("digest", hadamard)) is not None:
        if not isinstance(layout, IndexerLayout):
            raise ArgumentError(
                f"digest: hadamard is {hadamard} for {layout.name!r}, expected None: keys alone have it"
            )
        fields["hadamard"] = "yes" if hadamard else "no"
    both = (",".join(f"{part}:{size}" for part, size in parts) for parts in (entry.parts, entry.footer) if parts)
    parts = "|".join(both)
    return ";".join(f"{field}={value}" for field, value in (fields | {"parts": parts}).items())


def differences(first: str, second: str) -> dict[str, tuple[str, str]]:
    """Compare two digests: the fields in which they differ, each with both values; "none" for one that is not there.

    Raises:
        ArgumentError: One is no digest.
    """
    ours, theirs = _fields("first", first), _fields("second", second)
    both = ((field, ours.get(field, "none"), theirs.get(field, "none")) for field in ours | theirs)
    return {field: (a, b) for field, a, b in both if a != b}


def _fields(argument: str, text: str) -> dict[str, str]:
    text = Attr(argument, str, False, None).plain("differences", text)
    fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    if "format" not in fields or "parts" not in fields:
        raise ArgumentError(f"differences: got {text!r}, expected what `digest` returns")
    return fields


def _named(argument: str, name: str, layouts: tuple[Layout, ...], function: str = "convert") -> Layout:
    name = Attr(argument, str, False, None).plain(function, name)
    layout = next((each for each in layouts if each.name == name), None)
    if layout is None:
        known = ", ".join(known.name for known in layouts)
        raise ArgumentError(f"{function}: {argument} is {name!r}, expected one of {known}")
    return layout


def _framework(pool: Any) -> str:
    """The package of its class, or of the one that a user's class is derived from."""
    packages = [each.__module__.partition(".")[0].replace("jaxlib", "jax") for each in type(pool).__mro__]
    return next((package for package in packages if package in ("torch", "jax", "numpy")), packages[0])


def _spec_of(pool: Any) -> Spec:
    if _framework(pool) == "torch":
        if (layout := str(pool.layout).removeprefix("torch.")) != "strided":
            raise ArgumentError(f"pool layout is {layout}, expected strided")
        spec = import_module("xmla.torch_api._arrays").spec_of(pool)
    elif not hasattr(pool, "shape") or not hasattr(pool, "dtype"):
        raise ArgumentError(f"pool is {type(pool).__name__}, expected a torch, JAX or NumPy array")
    else:
        spec = Spec(tuple(pool.shape), np.dtype(pool.dtype).name)
    if len(spec.shape) != 3:
        raise ArgumentError(f"pool rank is {len(spec.shape)}, expected 3 (P, R, ROW)")
    return spec


def _to_host(pool: Any, pages: np.ndarray) -> np.ndarray:
    try:
        if _framework(pool) == "torch":
            import torch

            to_numpy = import_module("xmla.torch_api._arrays").to_numpy
            return to_numpy(pool[torch.from_numpy(pages).to(pool.device)].cpu())
        return np.asarray(pool[pages])
    except (NotImplementedError, RuntimeError, TypeError) as error:  # no memory, or deleted; jax.jit's
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"pool cannot be read, expected an array with values: {reason}") from error
