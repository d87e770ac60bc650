"""Plans say which implementation they take and why, and an architecture that is added finds its place."""

import re
from dataclasses import replace

import kit
import numpy as np
import pytest
from hopper import NEEDS_INLINE_PTX

from tools import tiles
from xmla.core.errors import UnsupportedError
from xmla.core.models.v32 import ModelConfig
from xmla.core.op import Op, plan_call
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.layer.dsa_attention.gluon_sm90.kernel import select_slots_cluster_sm90_kernel
from xmla.core.ops.layer.dsa_attention.kernels import select_slots_kernel, whole_slots_kernel
from xmla.core.ops.layer.dsa_attention.plan import FUSIONS
from xmla.core.ops.selection.select_topk.sample import Sample
from xmla.core.plan import Choice, Condition, Implementation, Launch, Plan, fuse
from xmla.core.registry import registry
from xmla.core.values import B200, H200, INTERPRETER, Attributes, Device, Spec

LOGITS = indexer_logits.OP


def of_case(op: Op) -> tuple[tuple[Spec | None, ...], Attributes]:
    case = op.cases[0]
    given = {name: Spec.of_numpy(array) for name, array in case.make(np.random.default_rng(0)).items()}
    return tuple(given.get(argument) for argument in op.tensors), op.attributes(**case.attrs)


def test_a_plan_says_which_implementation_it_takes_and_why() -> None:
    op = registry()["sparse_mla"]
    specs, attrs = of_case(op)
    half = tuple(
        spec and replace(spec, dtype="float16") if n == "q" else spec for n, spec in zip(op.tensors, specs, strict=True)
    )
    plan, _ = plan_call(op, half, attrs, H200)
    (choice,) = plan.choices
    assert (choice.op, choice.implementation) == ("sparse_mla", "triton")
    assert [name for name, _, _ in choice.passed_over] == ["gluon_unpacked", "gluon_sm120", "gluon_sm90"]
    line = "  skipped: gluon_sm90, which serves bfloat16 queries over packed entries; here for float16 queries"
    assert line in str(choice) and line in str(plan)
    asked, _ = plan_call(op, half, attrs, H200, "triton")
    assert asked.choices == (Choice("sparse_mla", "triton"),), "asked for, it is passed over for nothing"


def test_a_printed_plan_names_no_array_that_a_kernel_does_not_read() -> None:
    """A kernel gets some pointer where an argument is not given; in the whole of several ops, too."""
    op = registry()["sparse_mla"]
    plan, _ = plan_call(op, *of_case(op), H200)
    attention = next(call.plan(H200) for call in ModelConfig().decode(64, 1, 65536) if call.op == "dsa_attention")
    for of_call in (plan, attention):
        (launch,) = (launch for launch in of_call.launches if launch.name == "sparse_mla_sm90_kernel")
        assert launch.pointers["sink_ptr"] == launch.pointers["slots_ptr"]
        assert "slots_ptr=" in str(of_call) and "sink_ptr=" not in str(of_call)


def test_a_refusal_is_of_the_callers_own_entries() -> None:
    """Not of the plain rows to which they are unpacked first: those are not the caller's."""
    op = registry()["sparse_mla"]
    (case,) = (case for case in op.cases if case.name == "t90-h17-k40-page27-v32")
    given = kit.make(case)
    specs = tuple(Spec.of_numpy(given[name]) if name in given else None for name in op.tensors)
    with pytest.raises(UnsupportedError, match=r"'gluon' on Triton interpreter, supported: compute capability 9\.0"):
        plan_call(op, specs, op.attributes(**case.attrs), INTERPRETER, "gluon")


ROWS_OF_A_PROGRAM = "more rows than SMs, or more than 64 of at most 32768 columns"


@NEEDS_INLINE_PTX
@pytest.mark.parametrize(
    ("rows", "columns", "k", "device", "reason"),
    [
        (133, 131072, 2048, H200, ""),
        (133, 8193, 2048, H200, ""),
        (65, 32768, 2048, H200, ""),
        (132, 32769, 2048, H200, f"with 132 rows of 32769 columns on 132 SMs, supported: {ROWS_OF_A_PROGRAM}"),
        (33, 65536, 2048, H200, f"with 33 rows of 65536 columns on 132 SMs, supported: {ROWS_OF_A_PROGRAM}"),
        (8192, 131073, 2048, H200, "with 131073 columns, supported: at most 131072 columns"),
        (8192, 262144, 2048, H200, "with 262144 columns, supported: at most 131072 columns"),
        (8192, 65536, 2049, H200, "with k of 2049, supported: a k of at most 2048"),
        (8192, 65536, 2048, B200, "on NVIDIA B200, supported: compute capability 9.0"),
    ],
)
def test_many_rows_are_selected_by_hoppers_own_kernel(
    rows: int, columns: int, k: int, device: Device, reason: str
) -> None:
    """Where it does not serve a call the portable kernels do, and it says why."""
    op = registry()["select_topk"]
    specs, attrs = (Spec((rows, columns), "float32"), Spec((rows,), "int32"), None), op.attributes(k=k)
    plan, _ = plan_call(op, specs, attrs, device)
    if not reason:
        assert [launch.name for launch in plan.launches] == ["topk_rows_sm90_kernel"]
        assert plan.launches[0].constants["CAPACITY"] <= 4096 and not plan.workspace_bytes
        return
    assert [launch.name for launch in plan.launches] == ["topk_candidates_kernel", "topk_select_kernel"]
    with pytest.raises(UnsupportedError, match=f"implementation value is 'gluon_sm90' {re.escape(reason)}"):
        plan_call(op, specs, attrs, device, "gluon_sm90")


@NEEDS_INLINE_PTX
def test_a_step_of_many_requests_selects_by_it() -> None:
    """Its rows are mapped to slots by a launch of their own; those of few by the one that selects."""
    attention = [c for c in ModelConfig().decode(256, 1, 32768) if c.op in ("dsa_attention", "dsa_step")]
    assert len(attention) == 2
    for call in attention:
        names = [launch.name for launch in call.plan(H200).launches]
        assert names[1:4] == ["indexer_logits_paged_sm90_kernel", "topk_rows_sm90_kernel", "map_slots_kernel"]


@pytest.mark.parametrize("k", [1, 64, 2048])
@pytest.mark.parametrize("columns", [1, 32768, 131072])
def test_candidates_of_a_row_fit_hoppers_kernel_of_many_rows(columns: int, k: int) -> None:
    assert Sample.of(columns, k).capacity <= 4096


@pytest.mark.parametrize("op", [op for op in registry().values() if len(op.choices) > 1], ids=lambda op: op.name)
@pytest.mark.parametrize("device", [H200, B200], ids=lambda device: device.name)
def test_every_choice_among_implementations_is_told(op: Op, device: Device) -> None:
    choices = kit.plan_of(op, op.cases[0], device).choices
    expected = {step.name for step in op.steps if len(step.implementations) > 1} or {op.name}
    assert expected <= {choice.op for choice in choices}
    for choice in choices:
        names = [each.name for each in registry()[choice.op].implementations if not each.by_name]
        passed = [name for name, _, _ in choice.passed_over]
        assert names[: len(passed)] == passed and names[len(passed)] == choice.implementation


def test_serving_calls_are_planned_as_before() -> None:
    """Of parts that are not here, too: tiles, bounds of registers, splits."""
    assert tiles.text() == tiles.FILE.read_text(), "if the plans are to change: python -m tools.tiles"


def test_implementations_have_names_of_their_own() -> None:
    for op in registry().values():
        names = [each.name for each in op.implementations]
        assert len(set(names)) == len(names), op


def test_parts_of_indexer_topk_are_rounded_to_the_programs_of_a_new_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose implementation stands first, as CONTRIBUTING says: nothing else knows of it."""
    topk = registry()["indexer_topk"]
    tokens, keys = 4096, 1 << 18
    specs = {
        "q8": Spec((tokens, 64, 128), "float8_e4m3fn"),
        "weights": Spec((tokens, 64), "float32"),
        "keys": Spec((keys, 128), "float8_e4m3fn"),
        "key_scales": Spec((keys,), "float32"),
        "starts": Spec((tokens,), "int32"),
        "ends": Spec((tokens,), "int32"),
    }

    def part(op: Op) -> int:
        problem = op.bind(specs, op.attributes(k=2048, workspace_bytes=1 << 30))
        plan: Plan = op.plan(problem, B200)
        return sorted({launch.sizes["first_row"] for launch in plan.launches})[1]  # of the second part

    assert part(topk) % 64 == 0 and part(topk) % 37 != 0
    theirs = Implementation(
        "gluon_sm100",
        indexer_logits.portable.plan,
        (Condition("compute capability 10.0", lambda problem, device: None if device.arch == 100 else "elsewhere"),),
        "gluon",
        lambda problem, device: 37,
    )
    monkeypatch.setitem(LOGITS.__dict__, "implementations", (theirs, *LOGITS.implementations))
    assert part(topk) % 37 == 0
    monkeypatch.setitem(LOGITS.__dict__, "implementations", (replace(theirs, tokens_a_program=None),))
    with pytest.raises(RuntimeError, match="indexer_logits: gluon_sm100 does not say how many tokens a program has"):
        part(topk)


def selection_and_mapping(rows: int, columns: int, k: int) -> tuple[Launch, Launch]:
    """The launch that selects, and the one that maps what it has selected."""
    select, mapping = registry()["select_topk"], registry()["map_slots"]
    logits, ends = Spec((rows, columns), "float32"), Spec((rows,), "int32")
    plan, _ = plan_call(select, (logits, ends, None), select.attributes(k=k), H200)
    specs = (Spec((rows, k), "int32"), Spec((1, 4), "int32"), None, None)
    (mapped,) = plan_call(mapping, specs, mapping.attributes(page_size=64), H200)[0].launches
    return plan.launches[-1], mapped


def test_no_kernel_is_hashed_to_find_what_joins_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's hash is of its source, which Triton 3.7 cannot read of each: no call of a layer would be planned."""

    def fail(kernel: object) -> int:
        raise AssertionError(f"{kernel} is hashed")

    launches = selection_and_mapping(3, 4096, 64)
    for kernel in {type(each.kernel) for each in launches}:
        monkeypatch.setattr(kernel, "__hash__", fail)
    assert len(fuse(launches, FUSIONS)) == 1


@NEEDS_INLINE_PTX
@pytest.mark.parametrize(
    ("rows", "columns", "kernel"),
    [
        (3, 64, whole_slots_kernel),
        (3, 4096, select_slots_cluster_sm90_kernel),
        (133, 8192, select_slots_cluster_sm90_kernel),
        (64, 32768, select_slots_cluster_sm90_kernel),
        (65, 32768, None),
        (32, 65536, select_slots_cluster_sm90_kernel),
        (33, 65536, select_slots_kernel),
        (9, 131072, select_slots_kernel),
        (133, 8193, None),
    ],
)
def test_programs_that_select_rows_whole_or_of_few_also_map_them(rows: int, columns: int, kernel: object) -> None:
    select, mapping = selection_and_mapping(rows, columns, 64)
    first, *others = fuse((select, mapping), FUSIONS)
    if kernel is None:
        assert (first, *others) == (select, mapping)
    else:
        assert not others and first.kernel is kernel and first.constexprs["C"] == select.constexprs["C"]
        assert first.sizes == select.sizes | {
            name: mapping.sizes[name] for name in first.sizes if name in mapping.sizes
        }
        with pytest.raises(RuntimeError, match=f"{first.name} maps whole rows of k indices"):
            fuse((select, mapping.with_sizes(index_stride=65)), FUSIONS)
