"""The Gluon attention kernel for SM12x against the reference: on the part, or by tools/stand_in.py."""

import kit
import numpy as np
import pytest
import torch

from xmla import torch_api
from xmla.core.formats.mla import NOPE, PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.attention.sparse_mla.cases import make_case
from xmla.core.registry import registry
from xmla.torch_api import _arrays

OP = registry()["sparse_mla"]
KEYS = (1, 31, 32, 33, 63, 64, 65, 129, 300)  # of a row: none to several tiles beside those that are copied ahead


def on_sm12x() -> bool:
    return torch.cuda.is_available() and _arrays.device_of(torch.device("cuda")).arch in (120, 121)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_sm12x(), reason="needs SM12x, or tools/stand_in.py")]


def one_source(layout: MlaLayout, heads: int, keys: int) -> Case:
    """Lengths of 0, below it and past the capacity; a row without a valid slot."""
    return make_case(
        5, heads, keys, 7, layout, with_lengths=True, with_sink=True, empty_lse="+inf", cache_format=layout.name
    )


def two_sources(layout: MlaLayout, heads: int, keys: int, extra: int) -> Case:
    """Attention over two sources of one format, of which a row has either or both."""
    return make_case(
        4, heads, keys, 64, layout, with_lengths=True, with_sink=True, extra=(layout, extra, 2),
        rotate=layout.rope_in_value, cache_format=layout.name, extra_cache_format=layout.name,
    )  # fmt: skip


ONE = [(layout, heads) for layout in (V32, NOPE, PLAIN) for heads in (5, 33)] + [(V32, 128)]
TWO = [(layout, heads) for layout in (V32, V4, PLAIN_V4) for heads in (3, 64)]
FULL = [(V32, 128, 0), (V32, 70, 100), (V4, 70, 100)]


def full(layout: MlaLayout, heads: int, extra: int) -> Case:
    """Several programs for every multiprocessor, none of which has a part of a row."""
    second = {"extra": (layout, extra, 64), "rotate": layout.rope_in_value} if extra else {}
    return make_case(600, heads, 130, 64, layout, with_lengths=True, with_sink=True, **second)


def agrees(case: Case) -> None:
    inputs = kit.make(case)
    got = torch_api.sparse_mla(*kit.torch_inputs(OP, kit.copies(inputs), "cuda"), **case.attrs, implementation="gluon")
    with np.errstate(invalid="ignore"):
        want = OP.reference(**inputs, **kit.attributes(OP, case))
    for (name, value), result in zip(kit.results(OP, want), got, strict=True):
        kit.assert_close(name, result, value, OP.outputs[name].agreement)


@pytest.mark.parametrize(("layout", "heads"), ONE, ids=str)
def test_tile_edges(layout: MlaLayout, heads: int) -> None:
    for keys in KEYS:
        agrees(one_source(layout, heads, keys))


@pytest.mark.parametrize(("layout", "heads"), TWO, ids=str)
def test_tile_edges_of_two_sources(layout: MlaLayout, heads: int) -> None:
    for keys, extra in zip(KEYS, reversed(KEYS), strict=True):
        agrees(two_sources(layout, heads, keys, extra))


@pytest.mark.parametrize(("layout", "heads", "extra"), FULL, ids=str)
def test_when_every_multiprocessor_has_several_programs(layout: MlaLayout, heads: int, extra: int) -> None:
    agrees(full(layout, heads, extra))
