"""Sizes that change from step to step are runtime values: a kernel is not compiled again for each of them."""

from dataclasses import replace

import kit
import pytest
from conftest import EVERYTHING

from xmla.core.call import GROWING
from xmla.core.compile import Specialization
from xmla.core.errors import UnsupportedError
from xmla.core.models.calls import Call
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import H200, RTX_PRO_6000, Device, Spec

SIZES = range(100, 128)  # between two powers of two, which tiles are
FOLLOWING = {"B+1", "COLUMNS"}  # from others
# As many candidates as each rank selects: the attribute k of that call, which is a constant as here.
# A training step's selection is as wide in every step; as a size its row stride costs the kernels of gradients vectors.
CONSTANT = {("merge_topk", "N"), ("sparse_mla_backward", "K"), ("sparse_mla_backward", "EXTRA_K")}
CONSTANT |= {("indexer_scores_backward", "N")} | {
    (name, "K") for name in ("indexer_scores", "indexer_scores_backward", "indexer_target", "indexer_loss")
}
ATTRIBUTES = {
    "max_len": "indexer_logits_paged",
    "num_tokens": "split_batch",
    "k": "select_topk",
    "window": "window_slots",
    "num_entries": "resolve_slots",
}


def axes_of(op: Op, specs: dict[str, Spec]) -> list[str]:
    axes = dict.fromkeys(axis for name in specs for axis in op.tensors[name].names)
    return [axis for axis in axes if axis in GROWING - FOLLOWING and (op.name, axis) not in CONSTANT]


def at(op: Op, specs: dict[str, Spec], axis: str, size: int) -> dict[str, Spec]:
    """The arrays with `axis` of `size`; without request ids each request of the batch has as many tokens."""
    sizes = {a: n for name, spec in specs.items() for a, n in zip(op.tensors[name].names, spec.shape, strict=True)}
    grown = {axis: size}
    if "B" in sizes and "T" in sizes and "request_ids" not in specs:
        grown = {"T": size * sizes["B"]} if axis == "T" else grown
        grown |= {"T": size * (sizes["T"] // sizes["B"])} if axis == "B" else {}
    if axis == "B":
        grown["B+1"] = size + 1
    if "PLACES" in sizes:  # room for all that the columns of a request name
        grown["PLACES"] = 2**20 + size
    if axis == ("K" if "indices" in specs else "N"):
        grown["COLUMNS"] = size
    return {
        name: replace(
            spec, shape=tuple(grown.get(a, n) for a, n in zip(op.tensors[name].names, spec.shape, strict=True))
        )
        for name, spec in specs.items()
    }


def by_name(found: set[Specialization]) -> dict[str, list[str]]:
    names = {specialization.kernel.__name__ for specialization in found}
    return {name: [str(s) for s in found if s.kernel.__name__ == name] for name in names}


@pytest.mark.parametrize("device", [H200, RTX_PRO_6000] if EVERYTHING else [H200], ids=lambda device: device.name)
@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_axes_that_grow(op: Op, case: Case, device: Device) -> None:
    """A size gives at most two kernels: of whole vectors of 16 bytes, and of any elements."""
    specs = {name: replace(Spec.of_numpy(array), strides=None) for name, array in kit.make(case).items()}
    for axis in axes_of(op, specs):
        # With its launch's place in the plan: some plans launch one kernel for arrays of several shapes.
        found: set[tuple[int, Specialization]] = set()
        for size in SIZES:
            try:
                call = Call(op.name, at(op, specs, axis, size), case.attrs)
                found.update(enumerate(call.specializations(device)))
            except UnsupportedError as error:
                assert "workspace_bytes value is" in str(error)  # too little for so many
        for place in {place for place, _ in found}:
            for name, variants in by_name({s for where, s in found if where == place}).items():
                assert len(variants) <= 2, (axis, name, variants[:3])


@pytest.mark.parametrize(("attribute", "name"), ATTRIBUTES.items())
def test_attributes_that_grow(attribute: str, name: str) -> None:
    op = registry()[name]
    case = op.cases[0]
    specs = {argument: Spec.of_numpy(array) for argument, array in kit.make(case).items()}
    calls = (Call(name, specs, {**case.attrs, attribute: size}) for size in SIZES)
    found = {specialization for call in calls for specialization in call.specializations(H200)}
    assert all(len(variants) <= 2 for variants in by_name(found).values())


@pytest.mark.parametrize("device", [H200, RTX_PRO_6000], ids=lambda device: device.name)
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("row", [656, 584])
def test_a_growing_sequence(device: Device, tokens: int, row: int) -> None:
    """min(top-k, length) columns of indices at each step: new kernels are of larger tiles alone."""
    q = Spec((tokens, 128, 576 if row == 656 else 512), "bfloat16")
    pool, lengths = Spec((1000, 64, row), "uint8"), Spec((tokens,), "int32")
    first: dict[Specialization, int] = {}
    for length in range(1, 2049):
        slots = Spec((tokens, length), "int32")
        table = Spec((tokens, -(-length // 64)), "int32")
        for call in (
            Call("select_topk", {"logits": Spec((tokens, length), "float32"), "ends": lengths}, {"k": length}),
            Call("map_slots", {"indices": slots, "block_table": table}, {"page_size": 64}),
            Call("sparse_mla", {"q": q, "cache": pool, "slots": slots, "lengths": lengths}, {"softmax_scale": 0.1}),
        ):
            for specialization in call.specializations(device):
                first.setdefault(specialization, length)
    names = [specialization.kernel.__name__ for specialization in first]
    assert names.count("topk_candidates_kernel") <= 6 and names.count("topk_select_kernel") <= 6
    assert names.count("map_slots_kernel") == 6  # three tiles, of whole vectors or not
    assert sum(name.startswith("sparse_mla") for name in names) <= 2  # whole, and in splits
    assert names.count("combine_splits_kernel") <= 4  # each of twice as many splits
    # A long time without any, as a real sequence has it.
    assert not [length for length in first.values() if 5 <= length <= 128 or length >= 1448]


def test_a_row_of_slots_may_start_anywhere() -> None:
    """Columns of a wider table, whose rows lie as far apart as those of the table."""
    found = set()
    for width in (2048, 2049, 2304):
        slots = Spec((64, 1000), "int32", (width, 1))
        specs = {"q": Spec((64, 16, 576), "bfloat16"), "cache": Spec((9, 64, 656), "uint8"), "slots": slots}
        found.update(Call("sparse_mla", specs, {"softmax_scale": 0.1}).specializations(H200))
    assert [len(variants) for variants in by_name(found).values()] == [1, 1]


def test_sizes_of_vectors() -> None:
    words, halves = Spec((3, 5), "int32"), Spec((3, 5), "bfloat16")
    assert words.vector(8, 12) == 4 and words.vector(8, 10) == 1 and words.vector() == 4
    assert halves.vector(8) == 8 and halves.vector(12) == 1
