"""What an entry of a format is made of, by name and bytes.

Apart from the layouts' classes: kernels that have one as a constant are compiled anew where the class's text changes.
"""

from typing import NamedTuple

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import MlaLayout
from xmla.core.formats.numbers import MXFP4_BLOCK

Parts = tuple[tuple[str, int], ...]


class Entry(NamedTuple):
    """An entry of a format.

    Attributes:
        values: Element type of the dims.
        scale: Type of a scale.
        tile: Dims that share a scale.
        parts: What lies in the entry, in its order, each with its bytes.
        footer: What the entry has in the page's footer.
    """

    values: str
    scale: str
    tile: int
    parts: Parts
    footer: Parts


def entry_of(layout: MlaLayout | IndexerLayout) -> Entry:
    if isinstance(layout, IndexerLayout):
        scale = "ue8m0 four times" if layout.format == "fp8_ue8m0" else layout.scale
        tile = MXFP4_BLOCK if layout.format == "mxfp4" else layout.dim
        return Entry(layout.values, scale, tile, (("dims", layout.value_bytes),), (("scales", 4),))
    if not layout.packed:
        return Entry(layout.values, layout.scale, layout.tile, (("dims", 2 * layout.dims),), ())
    values = ("latent" if layout.rope_values != "quantized" else "dims", layout.quantized * layout.value_bits // 8)
    scales = ("interleaved scales" if layout.interleaved else "scales", layout.scales * layout.scale_bytes)
    places = [(0, values)]
    if layout.rope_values in ("bfloat16", "e4m3"):
        places.append((layout.rope_offset, ("rope", layout.rope * (2 if layout.rope_values == "bfloat16" else 1))))
    places += [
        (at, (name, 4)) for at, name in ((layout.outer_scale, "outer scale"), (layout.rope_scale, "rope scale")) if at
    ]
    footer: Parts = ()
    if layout.footer:
        pad = layout.footer - scales[1]
        footer = (scales, ("pad", pad)) if pad else (scales,)
    else:
        places.append((layout.scale_offset, scales))
    parts: list[tuple[str, int]] = []
    end = 0
    for offset, part in sorted(places):
        if offset > end:
            parts.append(("pad", offset - end))
        parts.append(part)
        end = offset + part[1]
    if layout.data > end:
        parts.append(("pad", layout.data - end))
    return Entry(layout.values, layout.scale, layout.tile, tuple(parts), footer)
