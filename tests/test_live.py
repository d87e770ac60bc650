"""Checks of live calls: XMLA_CHECK and XMLA_SHADOW, the files that they write, `xmla replay`."""

import json
import logging
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from typer.testing import CliRunner

from xmla import ArgumentError, UnsupportedError, __version__, jax_api, torch_api
from xmla.command import app
from xmla.core import config
from xmla.core.config import settings
from xmla.core.debug import checks, reproducer, shadow
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import DTYPES, Spec
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setattr(settings, "reproducer_dir", tmp_path / "calls")
    caplog.set_level(logging.INFO, "xmla")
    return tmp_path / "calls"


def take(array: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    return array if places is None else array[places]


def result_rows(op: Op, arrays: dict[str, np.ndarray], attrs: dict[str, object], rows: np.ndarray) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        return [np.asarray(value)[rows] for value in kit.as_tuple(op.reference(**arrays, **attrs))]


ROWS = [(op, case) for op, case in kit.all_cases()
        if op.outputs and not op.mutates and not op.sums_over_tokens
        and "T" in {t.names[0] for t in op.tensors.values()}]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), ROWS, ids=kit.case_id)
def test_a_shrunk_call_gives_the_rows_of_the_whole_one(op: Op, case: Case) -> None:
    arrays, attrs = kit.make(case), kit.attributes(op, case)
    tokens = next(a.shape[0] for n, a in arrays.items() if reproducer.has_tokens(op, n))
    for wanted in ([0], [tokens - 1], list(range(tokens))[::2]):
        small, rows = reproducer.shrink(op, arrays, np.array(wanted), take)
        assert set(wanted) <= set(rows.tolist())
        whole, part = result_rows(op, arrays, attrs, rows), result_rows(op, small, attrs, np.arange(len(rows)))
        for a, b in zip(whole, part, strict=True):
            if op.name == "map_slots":  # renumbered pages; as many
                a, b = a >= 0, b >= 0
            if not op.partial:
                assert np.array_equal(a, b, equal_nan=True)
            else:  # columns past the lengths are not defined
                assert np.array_equal(a[..., : b.shape[-1]], b, equal_nan=True)
        for name, array in small.items():
            assert array.nbytes <= arrays[name].nbytes


@pytest.mark.parametrize("op", registry().values(), ids=kit.case_id)
def test_every_index_has_its_limits(op: Op) -> None:
    """Of what XMLA_CHECK looks at: places by their declaration, and bounds."""
    given, limited = set(), set()
    for case in op.cases:
        arrays = kit.make(case)
        given |= set(arrays)
        problem = op.bind({name: Spec.of_numpy(array) for name, array in arrays.items()}, op.attributes(**case.attrs))
        limited |= {limit.argument for limit in op.limits(problem, arrays)}
    assert {name for name in given if op.tensors[name].index_of or op.tensors[name].bound_of} <= limited


WRITERS = [op for op in registry().values() if any(tensor.distinct for tensor in op.tensors.values())]


def test_ops_whose_slots_must_be_distinct_say_so() -> None:
    told = [op for op in registry().values() if "Valid slots must be distinct" in " ".join(op.doc.split())]
    assert told == WRITERS


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("op", WRITERS, ids=kit.case_id)
def test_entries_that_are_written_twice_are_told(
    op: Op, framework: str, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check, and by what repeats the call; −1 may stand several times, and skipped tokens do not count."""
    (name,) = [name for name, tensor in op.tensors.items() if tensor.distinct]
    case = next(case for case in op.cases if (kit.make(case)[name] >= 0).sum() > 2)
    inputs, attrs = kit.make(case), op.attributes(**case.attrs)
    problem = op.bind({n: Spec.of_numpy(array) for n, array in inputs.items()}, attrs)
    for limit in op.limits(problem, inputs):
        array = inputs[limit.argument]
        array[limit.violated(array)] = limit.low
    places = np.flatnonzero(np.all([inputs[n] >= 0 for n in (name, "source_slots") if n in inputs], axis=0))
    first, second = places[:2]
    inputs[name][np.delete(np.arange(len(inputs[name])), [first, second])] = -1
    assert checks.find_violation(op, inputs, attrs) is None
    inputs[name][second] = inputs[name][first]
    if "source_slots" in inputs:
        skipped = inputs | {"source_slots": np.where(np.arange(len(inputs[name])) == first, -1, inputs["source_slots"])}
        assert checks.find_violation(op, skipped, attrs) is None
    monkeypatch.setattr(settings, "check", True)
    told = f"expected distinct ones (1 of {len(inputs[name])} elements repeat an earlier one)"
    with pytest.raises(ArgumentError, match=re.escape(f"{op.name}: {name}[{second}] is {inputs[name][first]}, {told}")):
        if framework == "torch":
            getattr(TORCH_OPS, op.name)(*kit.torch_inputs(op, inputs, device), **case.attrs)
        else:
            getattr(JAX_OPS, op.name)(*kit.jax_inputs(op, inputs), **case.attrs)
    (file,) = folder.iterdir()
    again = CliRunner().invoke(app, ["replay", str(file)])
    assert again.exit_code == 1 and "expected distinct ones" in again.output


def test_only_used_pages_leave_the_device() -> None:
    op = registry()["sparse_mla"]
    arrays = kit.make(op.cases[1])  # pages of 2 entries
    small, _ = reproducer.shrink(op, arrays, np.array([0]), take)
    assert small["q"].shape[0] == 1 and small["cache"].shape[0] < arrays["cache"].shape[0]
    used = small["slots"][(small["slots"] >= 0) & (small["slots"] < small["cache"].shape[0] * 2)]
    assert set(used // 2) == set(range(small["cache"].shape[0]))


def test_shadow_leaves_traced_calls_of_values_alone(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A jitted function, or the body of a loop, that closes over its arrays and Refs."""
    monkeypatch.setattr(settings, "shadow", 1.0)
    logits, ends = jnp.asarray([[1.0, 3.0, 2.0]]), jnp.asarray([3], dtype=jnp.int32)
    ref, slots = jax.new_ref(jnp.zeros((2, 4, 132), jnp.uint8)), jnp.arange(3, dtype=jnp.int32)

    def body(carry: int, _: None) -> tuple[int, jax.Array]:
        jax_api.write_indexer_cache(jnp.ones((3, 128)), slots, ref)
        return carry, jax_api.select_topk(logits, ends, k=2)

    assert jax.jit(lambda: jax_api.select_topk(logits, ends, k=2))().tolist() == [[1, 2]]
    assert jax.lax.scan(body, 0, None, length=2)[1].tolist() == [[[1, 2]]] * 2
    assert ref[...].any() and "shadow" not in caplog.text
    assert jax_api.select_topk(logits, ends, k=2).tolist() == [[1, 2]] and "shadow select_topk" in caplog.text


@pytest.mark.parametrize("name", sorted(registry()))
def test_shadow_finds_nothing_where_nothing_is_wrong(
    name: str, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "shadow", 1.0)
    op = registry()[name]
    for case in op.cases[:2]:
        plain = kit.as_tuple(getattr(TORCH_OPS, name)(*kit.torch_inputs(op, kit.make(case), device), **case.attrs))
        getattr(JAX_OPS, name)(*kit.jax_inputs(op, kit.make(case)), **case.attrs)
        if op.outputs and not op.partial:  # watching changes nothing
            monkeypatch.setattr(settings, "shadow", 0.0)
            again = kit.as_tuple(getattr(TORCH_OPS, name)(*kit.torch_inputs(op, kit.make(case), device), **case.attrs))
            monkeypatch.setattr(settings, "shadow", 1.0)
            for a, b in zip(plain, again, strict=True):
                kit.assert_bits_equal(name, a, b)
    lines = [r for r in caplog.records if r.message.startswith(f"shadow {name}:")]
    assert len(lines) == 4 and all(r.levelno == logging.INFO for r in lines), caplog.text
    assert not folder.exists()


def test_shadow_takes_any_bits_where_nothing_is_defined() -> None:
    op = registry()["indexer_logits_paged"]
    case = op.cases[0]
    inputs, attrs = kit.make(case), kit.attributes(op, case)
    logits = np.asarray(op.reference(**inputs, **attrs)[0], np.float32)
    undefined = np.isnan(logits)
    assert undefined.any() and not undefined.all()
    logits.view(np.uint32)[undefined] = 0x7F800001  # a signalling NaN
    (drift,) = shadow.drifts(op, inputs, attrs, {"logits": logits})
    assert drift.ok, drift


def test_shadow_reports_a_wrong_result(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = registry()["sparse_mla"]
    case = op.cases[1]
    right = op.reference

    def wrong(**arguments: object) -> tuple[np.ndarray, np.ndarray]:
        out, lse = right(**arguments)
        return out * 1.1, lse

    monkeypatch.setattr(settings, "shadow", 1.0)
    object.__setattr__(op, "reference", wrong)
    try:
        torch_api.sparse_mla(*kit.torch_inputs(op, kit.make(case), device), **case.attrs)
        (error,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
        (file,) = folder.iterdir()
        assert error.startswith("shadow sparse_mla: out: cosine drift 0.0045") and error.endswith(f"xmla replay {file}")
        again = CliRunner().invoke(app, ["replay", str(file)])
        assert again.exit_code == 1 and "out: cosine drift 0.0045" in again.output
    finally:
        object.__setattr__(op, "reference", right)
    repeated = CliRunner().invoke(app, ["replay", str(file)])
    assert repeated.exit_code == 0, repeated.output
    assert repeated.output.endswith("the call does not fail here: its results are within limits\n")
    head = json.loads(file.read_bytes().split(b"\n")[0])
    assert list(head) == ["op", "by", "failure", "attrs", "device", "versions", "arrays"]
    assert head["op"] == "sparse_mla"
    call = reproducer.load(file)
    assert [s // a.itemsize for a in [call.arrays["q"]] for s in a.strides] == head["arrays"][0]["strides"]


def test_drift_is_bounded_by_one_rounding_but_after_a_swap() -> None:
    """A factor of 1.0064 is a drift of 2e-5. Where another key was selected attention may differ more."""
    for name, bound in (("sparse_mla", 5e-6), ("dsa_attention", 1e-3)):
        op = registry()[name]
        (case,) = [case for case in op.cases if case is op.cases[1]]
        inputs, attrs = kit.make(case), kit.attributes(op, case)
        with np.errstate(all="ignore"):
            right = dict(zip(op.outputs, map(np.asarray, op.reference(**inputs, **attrs)), strict=True))
        wrong = right | {"out": right["out"] * 1.0064}
        if "indices" in right:
            (drift,) = [drift for drift in shadow.drifts(op, inputs, attrs, wrong) if drift.result == "out"]
            assert drift.bound == 5e-6 and not drift.ok, "the same keys"
            wrong["indices"] = right["indices"].copy()
            wrong["indices"][0, 0] += 1
        (drift,) = [drift for drift in shadow.drifts(op, inputs, attrs, wrong) if drift.result == "out"]
        assert (drift.bound, drift.ok) == (bound, bound > 2e-5)
        assert drift.value == pytest.approx(2e-5, rel=0.03)


def test_a_factor_that_the_cosine_passes_is_told() -> None:
    """1.003 is a cosine drift of 4e-6, as a wrong scale is; where another key was selected it may be that key's."""
    for name in ("sparse_mla", "dsa_attention"):
        op = registry()[name]
        inputs, attrs = kit.make(op.cases[1]), kit.attributes(op, op.cases[1])
        with np.errstate(all="ignore"):
            right = dict(zip(op.outputs, map(np.asarray, op.reference(**inputs, **attrs)), strict=True))
        for factor, told in ((1.003, True), (0.997, True), (1.0005, False)):
            found = shadow.drifts(op, inputs, attrs, right | {"out": right["out"] * factor})
            (drift,) = [drift for drift in found if drift.result == "out"]
            assert (drift.ok, drift.kind) == ((False, "factor beside 1") if told else (True, "cosine drift"))
            if told:
                assert drift.value == pytest.approx(0.003, rel=1e-3) and 1e-3 <= drift.bound < 0.003
        if "indices" in right:
            other = right["indices"].copy()
            other[0, 0] += 1
            found = shadow.drifts(op, inputs, attrs, right | {"out": right["out"] * 1.003, "indices": other})
            assert [(drift.kind, drift.ok) for drift in found if drift.result == "out"] == [("cosine drift", True)]


def test_drift_of_infinities_is_infinite_but_in_their_places() -> None:
    op = registry()["sparse_mla"]
    inputs, attrs = kit.make(op.cases[1]), kit.attributes(op, op.cases[1])
    with np.errstate(all="ignore"):
        out, lse = map(np.asarray, op.reference(**inputs, **attrs))
    empty = np.isneginf(lse)
    assert empty.any() and not empty.all()
    for wrong in (np.where(empty, 0.0, lse), np.where(empty, np.inf, lse), np.where(empty, lse, -np.inf)):
        (drift,) = [d for d in shadow.drifts(op, inputs, attrs, {"out": out, "lse": wrong}) if d.result == "lse"]
        assert drift.value == np.inf and not drift.ok


def test_a_reference_that_fails_is_told_not_raised(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = registry()["map_slots"]
    monkeypatch.setattr(settings, "shadow", 1.0)
    right = op.reference
    object.__setattr__(op, "reference", lambda **_: [][0])
    try:
        slots = torch.zeros(2, 3, dtype=torch.int32, device=device)
        found, _ = torch_api.map_slots(slots, slots[:, :1] + 2, page_size=4)
    finally:
        object.__setattr__(op, "reference", right)
    (error,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    (file,) = folder.iterdir()
    assert (
        error == f"shadow map_slots: the reference raised {IndexError('list index out of range')!r}; xmla replay {file}"
    )
    assert found.tolist() == [[8] * 3] * 2


def test_shadow_takes_the_share_it_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry()["quantize_indexer_query"]
    case = op.cases[2]  # 5 rows
    counted: list[int] = []
    real = shadow.compare
    monkeypatch.setattr(shadow, "compare", lambda taken, *rest: counted.append(len(taken.rows)) or real(taken, *rest))
    monkeypatch.setattr(shadow, "_random", np.random.default_rng(5))
    monkeypatch.setattr(settings, "shadow", 0.1)
    arguments = kit.torch_inputs(op, kit.make(case), device)
    for _ in range(40):
        torch_api.quantize_indexer_query(*arguments, **case.attrs)
    assert 8 < sum(counted) < 40 and len(counted) < 40


def test_no_shadow_under_jit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(settings, "shadow", 1.0)
    op = registry()["map_slots"]
    case = op.cases[0]
    jax.jit(lambda *a: jax_api.map_slots(*a, **case.attrs))(*kit.jax_inputs(op, kit.make(case)))
    assert not [r for r in caplog.records if "shadow" in r.message]


def test_a_failed_check_leaves_a_small_file(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "check", True)
    op = registry()["sparse_mla"]
    case = op.cases[1]
    inputs = kit.make(case)
    inputs["slots"][:] = np.clip(inputs["slots"], -1, 10)
    inputs["slots"][2, 3] = 10**6
    inputs["lengths"][:] = 40
    with pytest.raises(ArgumentError, match=r"slots\[2, 3\] is 1000000, limit .*; xmla replay ") as raised:
        torch_api.sparse_mla(*kit.torch_inputs(op, inputs, device), **case.attrs)
    file = Path(str(raised.value).rpartition(" ")[2])
    call = reproducer.load(file)
    assert call.arrays["q"].shape[0] == 1 and call.arrays["slots"][0, 3] == 10**6
    assert file.stat().st_size < sum(a.nbytes for a in inputs.values()) / 2
    monkeypatch.setattr(settings, "check", False)
    again = CliRunner().invoke(app, ["replay", str(file)])
    assert again.exit_code == 1 and "slots[0, 3] is 1000000" in again.output
    assert again.output.endswith("the call FAILS here: the lines in red\n")


def saved(by: str = "XMLA_CHECK", **attrs: object) -> str:
    """What `save` returns of a call of map_slots without arrays, which is told by its attributes."""
    return reproducer.save(by, "map_slots", {}, attrs, "x", {}, "a GPU")


def test_a_folder_that_cannot_be_written_is_told(folder: Path) -> None:
    folder.write_text("a file")
    assert saved().startswith("no reproducer: ")
    folder.unlink()
    folder.mkdir()
    for i in range(reproducer.MAX_FILES):
        assert saved(page_size=i).startswith("xmla replay ")
    assert "holds 16 already" in saved(page_size=-1)
    assert saved(page_size=3).startswith("xmla replay ")  # one of the 16


def test_files_are_nobody_elses(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold users' activations: nobody else reads them, makes their folder or leads them elsewhere by a link."""
    before = os.umask(0)
    try:
        file = Path(saved().split()[-1])
    finally:
        os.umask(before)
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    content, elsewhere = file.read_bytes(), tmp_path / "elsewhere"
    file.unlink()
    file.symlink_to(elsewhere)
    assert saved() == f"xmla replay {file}" and not file.is_symlink() and not elsewhere.exists()
    assert file.read_bytes() == content and os.listdir(folder) == [file.name]
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setattr(settings, "reproducer_dir", tmp_path / "link")
    assert saved(page_size=1) == f"no reproducer: {tmp_path}/link is a link, expected a folder"
    monkeypatch.setattr(settings, "reproducer_dir", folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    owner = folder.stat().st_uid
    assert saved(page_size=1) == f"no reproducer: {folder} belongs to user {owner}, expected one's own"
    assert os.listdir(folder) == [file.name]
    assert str(config.Settings().reproducer_dir).endswith(f"/xmla-reproducers-{os.getuid()}")


def test_a_file_that_is_not_written_whole_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    assert saved() == "no reproducer: [Errno 28] No space left on device" and not os.listdir(folder)


def test_a_file_names_the_machine(folder: Path) -> None:
    call = reproducer.load(reproduce("select_topk", 0, "some GPU"))
    assert call.device == "some GPU"
    assert call.versions["xmla"] == __version__ and call.versions["torch"] == version("torch")
    assert {"python", "triton", "numpy", "jax", "jaxlib"} < call.versions.keys()


def reproduce(name: str, case: int = 0, device: str = "a GPU") -> Path:
    """The file of a case's call."""
    op = registry()[name]
    arrays, attrs = kit.make(op.cases[case]), kit.attributes(op, op.cases[case])
    strides = {argument: Spec.of_numpy(array).strides for argument, array in arrays.items()}
    small = {argument: np.ascontiguousarray(array) for argument, array in arrays.items()}
    return Path(reproducer.save("XMLA_CHECK", name, small, attrs, "x", strides, device).split(maxsplit=2)[-1])


def edited(file: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A file with another first line."""
    head, _, content = file.read_bytes().partition(b"\n")
    facts = json.loads(head)
    edit(facts)
    other = file.parent / "edited.xmla"
    other.write_bytes(json.dumps(facts).encode() + b"\n" + content)
    return other


def test_what_is_no_reproducer(folder: Path) -> None:
    """The message names what of a file is wrong."""
    file = reproduce("select_topk")
    ends = next(place for place, entry in enumerate(json.loads(file.read_bytes().partition(b"\n")[0])["arrays"])
                if entry["name"] == "ends")  # fmt: skip
    of_arrays = lambda key, value: lambda facts: facts["arrays"][ends].update({key: value})
    head = "its first line is {}, expected a JSON object of what XMLA_CHECK or XMLA_SHADOW saw"
    known = ", ".join(registry()["select_topk"].tensors)
    for edit, message in (
        (lambda facts: facts.pop("failure"), "failure is None, expected printable text"),
        (lambda facts: facts.update(failure="a\x1b]0;b\x07"), r"failure is 'a\x1b]0;b\x07', expected printable text"),
        (lambda facts: facts.update(by=[1]), "by is [1], expected printable text"),
        (lambda facts: facts.update(by="me"), "by is 'me', expected XMLA_CHECK or XMLA_SHADOW"),
        (lambda facts: facts.update(op=3), "op is 3, expected printable text"),
        (lambda facts: facts.update(device=None), "device is None, expected printable text"),
        (lambda facts: facts.update(attrs=[1]), "attrs is [1], expected an object"),
        (lambda facts: facts["attrs"].update(zz=1), "a name in attrs is 'zz', expected one of select_topk: k"),
        (lambda facts: facts.update(versions=[1]), "versions is [1], expected an object"),
        (lambda facts: facts["versions"].update(torch=2), "versions torch is 2, expected printable text"),
        (lambda facts: facts.update(arrays={}), "arrays is {}, expected a list"),
        (lambda facts: facts["arrays"].append(1), "an entry of arrays is 1, expected an object"),
        (of_arrays("name", 3), "a name in arrays is 3, expected printable text"),
        (of_arrays("name", "zz"), f"a name in arrays is 'zz', expected one of select_topk: {known}"),
        (lambda facts: facts["arrays"].append(facts["arrays"][ends]),
         "arrays is 'two of ends', expected one of each name"),
        (of_arrays("dtype", "int99"), f"ends dtype is 'int99', expected {' or '.join(DTYPES)}"),
        (of_arrays("dtype", [1]), f"ends dtype is [1], expected {' or '.join(DTYPES)}"),
        (of_arrays("shape", [1, 1]), "ends shape is [1, 1], expected 1 numbers from 0 to 2**63 - 1"),
        (of_arrays("shape", [-1]), "ends shape is [-1], expected 1 numbers from 0 to 2**63 - 1"),
        (of_arrays("shape", [True]), "ends shape is [True], expected 1 numbers from 0 to 2**63 - 1"),
        (of_arrays("strides", None), "ends strides is None, expected 1 numbers from 0 to 2**63 - 1"),
        (of_arrays("strides", [1.0]), "ends strides is [1.0], expected 1 numbers from 0 to 2**63 - 1"),
        (of_arrays("shape", [2**62]), f"what is left for ends is '4 bytes', expected {2**64} of its shape"),
        (of_arrays("shape", [0]), "what follows the arrays is '4 bytes', expected nothing"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as raised:
            reproducer.load(edited(file, edit))
        assert str(raised.value) == f"replay: {folder}/edited.xmla is no reproducer: {message}"
    for content in (b"", b"\x93NUMPY", b"[1]", b'{"a":' + b"[" * 100000, b"\xff\n", b"1" * 9999):
        file.write_bytes(content)
        with pytest.raises(ArgumentError) as raised:
            reproducer.load(file)
        got = shortened([1] if content == b"[1]" else content.strip(b"\n"))
        assert str(raised.value) == f"replay: {file} is no reproducer: {head.format(got)}"
    with pytest.raises(ArgumentError, match=r"replay: .*nowhere cannot be read: No such file or directory$"):
        reproducer.load(folder / "nowhere")
    with pytest.raises(ArgumentError, match=r"^replay: op is 'select_top', expected .*; did you mean select_topk"):
        reproducer.load(edited(reproduce("select_topk"), lambda facts: facts.update(op="select_top")))


ODD = (None, True, -1, 2**70, 10**4000, 1.5, "", "[/red]", "\x1b[2J", [], [1], {}, {"a": 1}, [[0]])


def damage(rng: np.random.Generator, facts: Any) -> Any:
    """A value somewhere in it is another, taken away, or there once more under another name."""
    if not isinstance(facts, dict | list) or not facts or rng.random() < 0.15:
        return ODD[rng.integers(len(ODD))]
    places = list(facts) if isinstance(facts, dict) else list(range(len(facts)))
    place = places[rng.integers(len(places))]
    kind = rng.random()
    if kind < 0.1:
        del facts[place]
    elif kind < 0.2 and isinstance(facts, dict):
        facts["[/red]"] = facts[place]
    elif kind < 0.2:
        facts.append(facts[place])
    else:
        facts[place] = damage(rng, facts[place])
    return facts


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_refused_or_replayed(seed: int, folder: Path) -> None:
    """Whatever is wrong, in the first line or in the bytes, the error is one of xmla."""
    rng, messages = np.random.default_rng(seed), set()
    for name in sorted(registry()):
        content = reproduce(name).read_bytes()
        head, _, bytes_of_arrays = content.partition(b"\n")
        for turn in range(24):
            if turn % 3:
                other = json.dumps(damage(rng, json.loads(head))).encode() + b"\n" + bytes_of_arrays
            else:
                other = bytearray(content if turn % 2 else head)
                for place in rng.integers(len(other), size=rng.integers(1, 6)):
                    other[place] = rng.integers(256)
                other = other[: rng.integers(len(other)) if turn % 4 == 0 else None]
            file = folder / "damaged"
            file.write_bytes(other)
            try:
                call = reproducer.load(file)
                specs = {argument: Spec.of_numpy(array) for argument, array in call.arrays.items()}
                call.op.bind(specs, call.op.attributes(**call.attrs))
            except (ArgumentError, UnsupportedError) as error:
                messages.add(str(error))
        for file in folder.iterdir():
            file.unlink()
    assert len(messages) > 200


@pytest.mark.usefixtures("device")
def test_replay_takes_names_for_what_they_are(folder: Path) -> None:
    """Square brackets are no colours."""
    file = edited(reproduce("select_topk"), lambda facts: facts["versions"].update({"[/red]": "[bold]"}))
    done = CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 0 and "[/red]" in done.output and "[bold]" in done.output and "a GPU" in done.output


@pytest.mark.parametrize("value", ["2", "-1", "half"])
def test_a_share_is_a_number_from_0_to_1(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMLA_SHADOW", value)
    with pytest.raises(ArgumentError, match=f"XMLA_SHADOW is '{value}', expected a number from 0 to 1"):
        config.Settings()


def test_one_flag_tells_a_call_whether_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings.live
    for name, on in (("check", True), ("shadow", 0.5)):
        monkeypatch.setattr(settings, name, on)
        assert settings.live
        monkeypatch.setattr(settings, name, type(on)(0))
        assert not settings.live


@pytest.mark.gpu
def test_shadow_stays_out_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert HAS_GPU
    op = registry()["map_slots"]
    case = op.cases[0]
    arguments = kit.torch_inputs(op, kit.make(case), "cuda")
    torch_api.map_slots(*arguments, **case.attrs)
    monkeypatch.setattr(settings, "shadow", 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads
        slots, _ = torch_api.map_slots(*arguments, **case.attrs)
    graph.replay()
    kit.assert_bits_equal("slots", slots, op.reference(**kit.make(case), **kit.attributes(op, case))[0])
