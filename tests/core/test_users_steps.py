"""Steps written as users write them, with torch's own tensors: warm-up lists every kernel that they launch.

tests/core/test_soak.py has steps as the models' classes make them, which a user's need not be.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from conftest import EVERYTHING

from xmla import ModelConfig, ModelConfigGlmFlash, ModelConfigMistralLarge4, ModelConfigV4, ModelConfigV41, torch_api
from xmla.core.compile import Specialization, specialize
from xmla.core.formats.mla import MLA_LAYOUTS
from xmla.core.models.base import Model
from xmla.core.registry import registry
from xmla.core.values import H200, L40S, RTX_PRO_6000, Device, assume_device
from xmla.torch_api._arrays import spec_of

empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
integers, floats, octets = (partial(empty, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.uint8))
MODELS: tuple[type[Model], ...] = (
    ModelConfig, ModelConfigV4, ModelConfigV41, ModelConfigGlmFlash, ModelConfigMistralLarge4,
)  # fmt: skip
SIZES: dict[str, Any] = {"next_n": (1, 3), "batches": (32,), "max_lens": (1 << 13,), "prefill_tokens": (700,)}

Arrays = tuple[torch.Tensor | None, ...]


@lru_cache
def kernels_of(config: Model, device: Device) -> frozenset[Specialization]:
    return frozenset(config.specializations(device))


def kernels(device: Device, name: str, arrays: Arrays, **attrs: Any) -> Iterator[Specialization]:
    """The kernels of a call of torch's."""
    op = registry()[name]
    with assume_device(device):
        plan = getattr(torch_api, name).plan(*arrays, **attrs)
    specs = {n: spec_of(array) for n, array in zip(op.tensors, arrays, strict=False) if array is not None}
    return (specialize(launch, plan, specs) for launch in plan.active)


def assert_listed(config: Model, device: Device, name: str, arrays: Arrays, **attrs: Any) -> None:
    listed = kernels_of(config, device)
    missing = [str(kernel) for kernel in kernels(device, name, arrays, **attrs) if kernel not in listed]
    assert not missing, f"{name} of {config}: {missing[0]}"


def test_latents_without_roped_dims() -> None:
    """torch has a stride of 1 for rows without elements, and that of the whole row for a part of it."""
    config, latent = ModelConfig(cache_format="nope", **SIZES), empty(7, 512)
    for rope in (empty(7, 0), latent[:, 512:]):
        arrays = latent, rope, integers(7), octets(9, 64, 528)
        assert_listed(config, H200, "write_mla_cache", arrays, cache_format="nope")


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (ModelConfig(**SIZES), "v32"), (ModelConfigGlmFlash(cache_format="plain_v4", **SIZES), "plain_v4"),
        (ModelConfigV4(dense_pages=True, **SIZES), "v4"),
    ],
    ids=["v32", "plain_v4", "v4"],
)  # fmt: skip
def test_latents_and_roped_dims_as_parts_of_one_row(config: Model, form: str) -> None:
    """As a projection gives them: the latents of rows without rope are split only for the write."""
    layout = next(layout for layout in MLA_LAYOUTS if layout.name == form)
    latent, rope = empty(7, layout.dims).split((layout.latent, layout.rope), dim=1)
    cache = empty(9, 64, layout.row, dtype=torch.uint8 if layout.packed else torch.bfloat16)
    assert_listed(config, H200, "write_mla_cache", (latent, rope, integers(7), cache), cache_format=form)
    behind = integers(8)[1:]  # of a prefill behind a decode
    assert_listed(config, H200, "write_mla_cache", (latent, rope, behind, cache), cache_format=form)


@pytest.mark.parametrize("pages", [16, 128], ids=["all", "selected"])
def test_a_step_of_parts_of_one_row(pages: int) -> None:
    """Other launches follow the write where a table has no more keys than are selected."""
    config = ModelConfig(**SIZES)
    latent, rope = empty(7, 576).split((512, 64), dim=1)
    pools = octets(200, 64, 656), octets(200, 64, 132)
    arrays = (
        latent, rope, empty(7, 128), integers(7), empty(7, 128, 576), empty(7, 64, 128), floats(7, 64), *pools,
        integers(7, pages), integers(7),
    )  # fmt: skip
    assert_listed(config, H200, "dsa_step", arrays, k=2048, softmax_scale=config.softmax_scale)


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (5, 8), (1, 126), (2, 129), (3, 200), (1, 516), (1, 700)], ids=str)
def test_positions_of_each_request_in_a_row(shape: tuple[int, int]) -> None:
    """Those of a decode, 1 or 8 of each request, and of prompts; with request ids each stands in a row of its own."""
    config, table = ModelConfig(**SIZES | {"next_n": (1, 3, 8)}), integers(shape[0], 77)
    assert_listed(config, H200, "map_slots", (integers(shape), table), page_size=64)
    flat = integers(shape).flatten()[:, None]
    assert_listed(config, H200, "map_slots", (flat, table, integers(len(flat))), page_size=64)


@pytest.mark.parametrize("width", [1, 2, 3, 32, 64])
def test_entries_of_every_context_of_v4(width: int) -> None:
    """A layer of ratio 128 may attend to as many entries as its longest request has, not as a table has room for."""
    config = ModelConfigV4(entry_pages=(64, 64), **SIZES)
    arrays = integers(5, 1), integers(5), None
    assert_listed(config, H200, "window_slots", arrays, window=width, page_size=64, ratio=128)


def test_tables_of_a_few_more_entries_than_are_selected() -> None:
    """Of k = 4096, they are searched by one program a row; tables of twice as many by two."""
    config = ModelConfig(k=4096, page_size=128, **SIZES)
    for pages in (32, 33, 47, 64):
        q, pools = empty(5, 128, 576), (octets(64, 128, 656), octets(64, 128, 132))
        arrays = q, empty(5, 64, 128), floats(5, 64), *pools, integers(5, pages), integers(5)
        assert_listed(config, RTX_PRO_6000, "dsa_attention", arrays, k=4096, softmax_scale=config.softmax_scale)


def test_tables_a_whole_vector_wider_than_a_power_of_two() -> None:
    """Pages of two entries: a page more is no whole vector, and clusters select in no wider rows."""
    sizes = SIZES | {"max_lens": (1 << 18,), "batches": (2,), "prefill_tokens": ()}
    config = ModelConfig(heads=16, index_heads=32, index_format="mxfp4", k=1000, page_size=2, **sizes)
    for pages in ((1 << 16) + 1, (1 << 16) + 2, 97424):
        pools = octets(8, 2, 656), octets(8, 2, 68)
        arrays = empty(2, 16, 576), empty(2, 32, 128), floats(2, 32), *pools, integers(2, pages), integers(2)
        assert_listed(config, H200, "dsa_attention", arrays, k=1000, softmax_scale=config.softmax_scale)


def test_selections_of_an_earlier_layer_over_a_small_pool() -> None:
    """Its entries are dequantised first, in calls that do not tell how many keys a token has."""
    config = ModelConfig(heads=8, k=100, shared_selection=True, **SIZES | {"batches": (128,), "prefill_tokens": ()})
    arrays = empty(98, 8, 576), octets(2, 64, 656), integers(98, 100), integers(98, 1), integers(98)
    assert_listed(config, RTX_PRO_6000, "sparse_mla_paged", arrays, softmax_scale=config.softmax_scale)


def test_prompts_whose_keys_are_more_than_a_context() -> None:
    """Keys of several prompts are gathered after one another; a selection's last part has few tokens."""
    most = 8192 if EVERYTHING else 4096  # whose list takes a minute, or a sixth of one
    config = ModelConfig(k=2048, workspace_bytes=1 << 23, **SIZES | {"max_lens": (100,), "prefill_tokens": (most,)})
    for tokens in range(2049, most, 37):
        keys = empty(tokens, 128, dtype=torch.float8_e4m3fn)
        arrays = (
            empty(tokens, 64, 128, dtype=keys.dtype), floats(tokens, 64), keys, floats(tokens), integers(tokens),
            integers(tokens),
        )  # fmt: skip
        assert_listed(config, RTX_PRO_6000, "indexer_topk", arrays, k=2048, workspace_bytes=1 << 23)


def test_drafts_whose_logits_do_not_fit_the_workspace() -> None:
    """Tokens of a request share a program: as many programs share a row as there are requests, not tokens, for."""
    sizes = SIZES | {"next_n": (7,), "batches": (1024,), "max_lens": (77546,), "prefill_tokens": ()}
    config = ModelConfig(heads=96, index_heads=1, k=1000, page_size=16, **sizes)
    for requests in (248, 256, 283, 284):
        tokens = 7 * requests
        pools = octets(9, 16, 656), octets(9, 16, 132)
        arrays = (
            empty(tokens, 96, 576), empty(tokens, 1, 128), floats(tokens, 1), *pools, integers(requests, 4847),
            integers(tokens),
        )  # fmt: skip
        assert_listed(config, L40S, "dsa_attention", arrays, k=1000, softmax_scale=config.softmax_scale)


@pytest.mark.parametrize("model", MODELS)
def test_keys_whose_scales_are_powers_of_two(model: type[Model]) -> None:
    """Rows do not tell the format, so every call names it."""
    for kernel in model(index_format="fp8_ue8m0", **SIZES | {"max_lens": (1000,)}).specializations(H200):
        formats = {value for name, value in kernel.constants.items() if name.endswith("FORMAT")}
        assert formats <= {"fp8_ue8m0"} or kernel.op == "compress_kv", kernel


@pytest.mark.parametrize("model", MODELS[:4])
def test_batch_invariant_attention(model: type[Model]) -> None:
    sizes = SIZES | {"max_lens": (1000,)}
    config = model(batch_invariant=True, **sizes)
    attention = [
        call for _, calls in config.steps() for call in calls if "batch_invariant" in registry()[call.op].defaults
    ]
    assert attention and all(call.attrs.get("batch_invariant") is True for call in attention)
    assert set(config.specializations(H200)) != set(model(**sizes).specializations(H200))
