"""Clause 4: memory that no valid index refers to cannot influence a result; an empty row gives 0 and −inf."""

from collections.abc import Iterator

import kit
import numpy as np
import pytest
import torch
from conftest import EVERYTHING
from garbage import DEVICE, OPS, integers, run

from xmla import torch_api
from xmla.core.op import Case, Op
from xmla.core.ops import cases
from xmla.torch_api._all_ops import TORCH_OPS

PAGED = [(op, name) for op in OPS.values() for name in op.pools if len(op.tensors[name].names) == 3]
READ = [(op, name) for op, name in PAGED if name not in op.mutates]
BYTES = (0x00, 0x7F)


@pytest.mark.parametrize(("op", "pool"), READ, ids=lambda value: getattr(value, "name", value))
def test_unreferenced_memory_does_not_matter(op: Op, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases' pools are NaN wherever nothing refers to; filled with any other byte they give the same bits."""
    for number, case in enumerate(kit.cases(op)):
        inputs = kit.make(case)
        if pool not in inputs:
            continue
        where = None
        if op.partial:
            where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
        want = [kit.as_numpy(result).copy() for result in run(op, kit.make(case), case.attrs)]
        for byte in BYTES if EVERYTHING else BYTES[number % 2 :][:1]:
            with monkeypatch.context() as context:
                context.setattr(cases, "POISON", byte)
                other = kit.make(case)[pool]
            changed = other.view(np.uint8) != inputs[pool].view(np.uint8)
            assert changed.any(), f"{case.name}: every entry is referred to"
            for a, b in zip(run(op, kit.make(case) | {pool: other}, case.attrs), want, strict=True):
                kit.assert_bits_equal(op.name, a, b, where)


@pytest.mark.parametrize("byte", [0x7E, 0xFF])
@pytest.mark.parametrize("name", ["select_topk", "indexer_block_topk"])
def test_what_the_workspace_held_does_not_matter(name: str, byte: int) -> None:
    """As candidates or logits: the greatest numbers, or NaN; of cases every other one, or by XMLA_ALL all."""
    op = OPS[name]
    for case in op.cases if EVERYTHING else op.cases[byte == 0xFF :: 2]:
        arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
        call = getattr(TORCH_OPS, name)
        size = call.plan(*arguments, **case.attrs).workspace_bytes
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=DEVICE)
        want = op.reference(**kit.make(case), **case.attrs)[0]
        out = torch.empty(want.shape, dtype=torch.int32, device=DEVICE)
        call(*arguments, **case.attrs, out=out, workspace=workspace)
        kit.assert_bits_equal(case.name, out, want.astype(np.int32))


def test_every_pool_that_is_read() -> None:
    """Each stands in a case; those left out belong to the ops that only write, or write and call `dsa_attention`."""
    assert {op.name for op, _ in PAGED} - {op.name for op, _ in READ} == {
        "write_mla_cache", "write_indexer_cache", "compress_kv", "pool_keys", "dsa_step",
    }  # fmt: skip
    assert all(any(pool in kit.make(case) for case in op.cases) for op, pool in READ)


def test_empty_rows() -> None:
    op = OPS["sparse_mla"]
    inputs = kit.make(op.cases[1])
    inputs["slots"][:] = -1
    for empty, value in (("-inf", -np.inf), ("+inf", np.inf)):
        out, lse = run(op, inputs, {"softmax_scale": 1.0, "empty_lse": empty})
        assert not kit.as_numpy(out).view(np.uint16).any() and (kit.as_numpy(lse) == value).all()


def test_an_empty_row_is_not_turned() -> None:
    """Angles of a padding row may be anything."""
    op = OPS["sparse_mla"]
    turned = [case for case in op.cases if "cos_sin" in kit.make(case)]
    assert turned
    for case in turned:
        inputs = kit.make(case)
        inputs["cos_sin"][:] = np.nan
        for name in {"slots", "extra_slots"} & set(inputs):
            inputs[name][:] = -1
        out, _ = run(op, inputs, case.attrs)
        assert not kit.as_numpy(out).view(np.uint16).any()


OF_REQUESTS = [op for op in OPS.values() if {"request_ids", "lengths"} <= op.tensors.keys()]


@pytest.mark.parametrize("request_id", [-1, 2**31 - 1])
@pytest.mark.parametrize("op", OF_REQUESTS, ids=kit.case_id)
def test_a_token_whose_request_does_not_exist(op: Op, request_id: int) -> None:
    """No key is read for it; a selection has the first positions of its length, as among equal logits.

    Of cases every other one is looked at, where there are two, or by XMLA_ALL all.
    """
    given = [case for case in op.cases if "request_ids" in kit.make(case)]
    assert given
    if not EVERYTHING and len(given) > 1:
        given = given[request_id > 0 :: 2]
    for case in given:
        inputs = kit.make(case)
        inputs["request_ids"][:] = request_id
        results = run(op, kit.copies(inputs), case.attrs)[: len(op.outputs)]
        with np.errstate(all="ignore"):
            want = op.reference(**kit.copies(inputs), **kit.attributes(op, case))
        for (name, right), value in zip(kit.results(op, want), results, strict=True):
            found = kit.as_numpy(value)
            if name == "indices" and op.tensors.keys().isdisjoint({"blocks"}) and "newest" not in op.defaults:
                column = np.arange(found.shape[1])
                assert (found == np.where(column < inputs["lengths"][:, None], column, -1)).all()
            constant = {"out": 0, "lse": -np.inf, "slots": -1, "counts": 0}.get(name)
            assert constant is None or (found == constant).all(), name
            kit.assert_close(name, value, right, op.outputs[name].agreement, op.outputs[name].written(right))


@pytest.mark.parametrize("axis", ["T", "K"])
def test_empty_axes(axis: str) -> None:
    """No tokens or no keys: no launch reads anything, results are empty or those of empty rows."""
    tokens, keys = (0, 8) if axis == "T" else (3, 0)
    q = torch.zeros(tokens, 16, 576, device=DEVICE, dtype=torch.bfloat16)
    cache = torch.full((2, 64, 656), 255, device=DEVICE, dtype=torch.uint8)
    slots = torch.zeros(tokens, keys, device=DEVICE, dtype=torch.int32)
    out, lse = torch_api.sparse_mla(q, cache, slots, softmax_scale=1.0)
    assert out.shape == (tokens, 16, 512) and not out.any() and (lse == -torch.inf).all()
    ends = torch.full((tokens,), keys, device=DEVICE, dtype=torch.int32)
    assert (torch_api.select_topk(torch.zeros(tokens, keys, device=DEVICE), ends, k=4) <= 3).all()
    table = torch.zeros(1, 2, device=DEVICE, dtype=torch.int32)
    mapped, counts = torch_api.map_slots(slots, table, page_size=64)
    assert mapped.shape == (tokens, keys) and counts.shape == (tokens,) and not counts.any()


def test_a_broken_key_behind_a_valid_slot_past_the_length() -> None:
    """A slot at or past a row's length may name an entry that is NaN: it is not read."""
    op = OPS["sparse_mla"]
    case = next(c for c in op.cases if kit.make(c)["cache"].dtype == np.uint8)
    inputs = kit.make(case)
    tokens, keys = inputs["slots"].shape
    pages, entries, row = inputs["cache"].shape
    inputs["slots"][(inputs["slots"] < 0) | (inputs["slots"] >= pages * entries)] = -1  # they would name the new page
    inputs["lengths"] = np.full(tokens, keys // 2, np.int32)
    want = run(op, inputs, case.attrs)
    broken = np.concatenate([inputs["cache"], np.full((1, entries, row), 0xFF, np.uint8)])
    inputs["slots"][:, keys // 2 :] = pages * entries
    for a, b in zip(run(op, inputs | {"cache": broken}, case.attrs), want, strict=True):
        kit.assert_bits_equal("row", a, b)


@pytest.mark.parametrize("byte", BYTES)
def test_states_outside_the_windows_do_not_matter(byte: int) -> None:
    """The cases' states are NaN where no window reaches; other bytes there, each case's own, give the same entries."""
    op = OPS["compress_kv"]
    for case in op.cases if EVERYTHING else op.cases[byte != 0 :: 2]:
        inputs = kit.make(case)
        untouched = np.isnan(inputs["state"]).all(axis=2)
        assert untouched.any()
        _, want = run(op, inputs, case.attrs)
        other = kit.make(case)
        other["state"].view(np.uint32)[untouched] = byte * 0x01010101
        kit.assert_bits_equal("cache", run(op, other, case.attrs)[1], want)


FORWARD = {op.derivative.name: op for op in OPS.values() if op.derivative is not None}
NOTHING = {"starts": 2**31 - 1}  # any other integer of a token that is −1 leaves it nothing
Place = tuple[object, ...]


def floats(op: Op, inputs: dict[str, np.ndarray], axis: str) -> list[str]:
    """The arguments of floats that have the axis, but for results of an earlier call."""
    wide = [name for name in inputs if inputs[name].dtype.kind not in "iu" and not name.startswith("forward_")]
    return [name for name in wide if axis in op.tensors[name].names]


def at_last(op: Op, name: str, axis: str) -> Place:
    return (..., -1, *[slice(None)] * (len(op.tensors[name].names) - 1 - op.tensors[name].names.index(axis)))


def without_keys(op: Op, inputs: dict[str, np.ndarray]) -> dict[str, Place]:
    """Leave the last token nothing to see and nothing to write; where its floats stand, which do not matter then."""
    named = [name for name in integers(op) if name in inputs and "T" in op.tensors[name].names]
    for name in named:
        inputs[name][at_last(op, name, "T")] = NOTHING.get(name, -1)
    return {name: at_last(op, name, "T") for name in floats(op, inputs, "T")} if named else {}


def without_a_column(op: Op, inputs: dict[str, np.ndarray]) -> dict[str, Place]:
    """Leave the last of a token's indices out; where other arguments' columns of it stand."""
    places: dict[str, Place] = {}
    for name in integers(op):
        if name in inputs and inputs[name].ndim > 1 and "T" in op.tensors[name].names:
            inputs[name][..., -1] = -1
            columns = floats(op, inputs, op.tensors[name].names[-1]) + floats(op, inputs, "COLUMNS")
            places |= {n: (..., -1) for n in columns if inputs[n].shape == inputs[name].shape}
    return places


def without_a_key(op: Op, inputs: dict[str, np.ndarray]) -> dict[str, Place]:
    """Leave the last key to no token; where it and its columns stand."""
    bounds = [name for name in inputs if op.tensors[name].bound_of == "N" or name == "ends"]
    named = [name for name in inputs if op.tensors[name].index_of == "N"]
    places = {name: at_last(op, name, "N") for name in floats(op, inputs, "N")}
    if not places or not ("ends" in bounds or named):
        return {}
    (count,) = {inputs[name].shape[op.tensors[name].names.index("N")] for name in places}
    for name in bounds:
        inputs[name][...] = np.minimum(inputs[name], count - 1)
    for name in named:
        inputs[name][inputs[name] >= count - 1] = -1
    return places | {name: (..., -1) for name in floats(op, inputs, "COLUMNS") if inputs[name].shape[-1] == count}


def without_a_part(op: Op, inputs: dict[str, np.ndarray]) -> dict[str, Place]:
    """Leave heads, or parts of keys, without any by their lse."""
    places: dict[str, Place] = {}
    for marks, marked in (("lse", "q"), ("lses", "outs")):
        if marks in inputs and marked in inputs and op.tensors[marks].names == op.tensors[marked].names[:-1]:
            inputs[marks][..., -1] = -np.inf
            places[marked] = (..., -1, slice(None))
    return places


MASKS = {"row": without_keys, "column": without_a_column, "key": without_a_key, "part": without_a_part}


def masked(op: Op, mask: str) -> Iterator[tuple[Case, dict[str, np.ndarray], dict[str, Place]]]:
    """Cases of a mask, their inputs, and where these do not matter."""
    for case in kit.cases(op):
        inputs = kit.make(case)
        places = MASKS[mask](op, inputs)
        if places and (forward := FORWARD.get(op.name)) and "forward_out" in inputs:
            arguments = {name: inputs[name] for name in forward.tensors if name in inputs}
            for name, result in zip(forward.outputs, forward.reference(**arguments, **case.attrs), strict=True):
                inputs[f"forward_{name}"][...] = result
        if case.attrs.get("lse_sink"):
            places.pop("dlse", None)  # the lse of a row without keys is the sink
        if places:
            yield case, inputs, places


MASKED = [(mask, op) for mask in MASKS for op in OPS.values() if any(True for _ in masked(op, mask))]


@pytest.mark.parametrize(("mask", "op"), MASKED, ids=lambda value: getattr(value, "name", value))
def test_floats_without_effect_may_be_nan_or_infinite(mask: str, op: Op) -> None:
    """No result has other bits, nor has the reference; in derivatives no sum over tokens, either.

    NaN and infinity take turns with the cases; where there is one case, or by XMLA_ALL, each has both.
    """
    cases = [*masked(op, mask)]
    for number, (case, inputs, places) in enumerate(cases):
        attrs = kit.attributes(op, case)
        defined = op.reference(**kit.copies(inputs), **attrs)
        where = kit.written(op, defined) if op.partial else None
        want = run(op, kit.copies(inputs), case.attrs)
        values = (np.nan, np.inf) if EVERYTHING or len(cases) == 1 else (np.inf if number % 2 else np.nan,)
        for value in values:
            broken = kit.copies(inputs)
            for name, place in places.items():
                broken[name][place] = value  # of e4m3, which has no infinity, NaN
            words = f"{case.name}: {value} in {', '.join(places)}"
            with np.errstate(all="ignore"):
                found = op.reference(**kit.copies(broken), **attrs)
            for a, b in zip(found, defined, strict=True):
                assert np.array_equal(a, b, equal_nan=True), f"reference of {words}"
            for a, b in zip(run(op, broken, case.attrs), want, strict=True):
                kit.assert_bits_equal(words, a, b, where)


def test_every_op_with_floats_of_a_token_is_masked() -> None:
    """All of the others' floats have an effect."""
    with_floats = {op.name for op in OPS.values() for case in op.cases if floats(op, kit.make(case), "T")}
    assert with_floats - {op.name for _, op in MASKED} == {"quantize_indexer_query"}
