"""Plans of other sizes by a template are those that are made anew, and few templates serve all sizes."""

import gc
import operator
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import kit
import pytest
from conftest import EVERYTHING
from hypothesis import strategies as st
from test_growing import at, axes_of

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import Case, Op, make_plan
from xmla.core.op.template import Specs, sizes_of, trace_call
from xmla.core.registry import registry
from xmla.core.values import (
    H200,
    INTERPRETER,
    KNOWN_DEVICES,
    Device,
    Families,
    Spec,
    Trace,
    arithmetic,
    cdiv,
    larger,
    log2_of,
    next_power_of_2,
    row_major,
    smaller,
    up_to,
)
from xmla.core.values.sizes import Branch

FIRST = [(op, op.cases[0]) for op in registry().values()]
SIZES = (100, 101, 104, 117, 127)


def dense(op: Op, specs: dict[str, Spec]) -> Specs:
    return tuple(specs[n] and replace(specs[n], strides=row_major(specs[n].shape)) if n in specs else None
                 for n in op.tensors)  # fmt: skip


def plan_by(op: Op, case: Case, specs: Specs, device: Device, implementation: str | None) -> Any:
    """The function that plans calls of other sizes as this one, with their results; None for another template."""
    template = trace_call(op, specs, op.attributes(**case.attrs), device, implementation)
    return template.at((template.plan, template.results, template.workspace, template.workspace_bytes))


def planned(op: Op, case: Case, specs: Specs, device: Device, implementation: str | None) -> Any:
    plan, results = make_plan(op, specs, op.attributes(**case.attrs), device, implementation)
    return replace(plan, choices=()), results, plan.workspace, plan.workspace_bytes


@pytest.mark.parametrize("device", [*KNOWN_DEVICES, INTERPRETER] if EVERYTHING else [H200], ids=lambda d: d.name)
@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_the_call_itself(op: Op, case: Case, device: Device) -> None:
    """Equal, and with numbers of Python's own: text of it is the same. Refused with the same words."""
    specs = dense(op, {name: Spec.of_numpy(array) for name, array in kit.make(case).items()})
    sizes = sizes_of(specs, op.attributes(**case.attrs))
    for implementation in (None, *op.choices):
        try:
            want = planned(op, case, specs, device, implementation)
        except (ArgumentError, UnsupportedError) as error:
            with pytest.raises(type(error)) as refused:
                plan_by(op, case, specs, device, implementation)
            assert str(refused.value) == str(error)
            continue
        got = plan_by(op, case, specs, device, implementation)(*sizes)
        assert got == want and repr(got) == repr(want)


@pytest.mark.parametrize(("op", "case"), kit.all_cases() if EVERYTHING else FIRST, ids=kit.case_id)
def test_other_sizes(op: Op, case: Case) -> None:
    given = {name: replace(Spec.of_numpy(array), strides=None) for name, array in kit.make(case).items()}
    for axis in axes_of(op, given):
        templates: list[Callable[..., Any]] = []
        launches = set()
        for size in SIZES:
            specs = dense(op, at(op, given, axis, size))
            try:
                want = planned(op, case, specs, H200, None)
            except UnsupportedError as error:
                assert "workspace_bytes value is" in str(error)  # too little for so many
                continue
            sizes = sizes_of(specs, op.attributes(**case.attrs))
            got = next(filter(None, (template(*sizes) for template in templates)), None)
            if got is None:
                templates.append(plan_by(op, case, specs, H200, None))
                got = templates[-1](*sizes)
            assert got == want and repr(got) == repr(want), (axis, size)
            launches.add(len(want[0].launches))
        # Of a call whose workspace is too small for all its tokens, the numbers of parts and of segments differ too.
        assert len(templates) <= (3 + len(launches) if "workspace_bytes" in case.attrs else 3), axis


def of_sizes(program: Callable[..., Any], *sizes: int) -> Callable[..., Any]:
    """The program with other sizes, None where one gives another answer."""
    trace = Trace()
    function = trace.function(program(*map(trace.input, sizes)))
    return lambda *others: function(*others)[1]


def test_arithmetic_is_done_again_and_answers_are_compared() -> None:
    def program(a: Any, b: Any) -> Any:
        shorter = a if a < b else b
        return (-(-shorter // 8), [a * b % 7, 2**a - (b << 1)], "text", (a - 1).bit_length(), None)

    function = of_sizes(program, 5, 9)
    for a, b in ((5, 9), (1, 2), (40, 41)):
        assert function(a, b) == program(a, b)
    assert function(9, 5) is None and function(5, 5) is None


def test_arithmetic_of_numbers() -> None:
    assert [log2_of(n) for n in (-1, 0, 1, 2, 3, 4, 5)] == [0, 0, 0, 1, 2, 2, 3]
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [up_to(4, n, 8, 16) for n in (3, 4, 5)] == [8, 8, 16]


def test_a_trace_and_its_functions_need_no_collection() -> None:
    """What is dropped is freed at once: sizes know their trace, which knows none of them after its end."""
    gc.collect()
    gc.disable()
    try:
        trace = Trace()
        size = trace.input(5)
        function, known = trace.function((size + 1,)), weakref.ref(size.trace)
        assert function(6) == (None, (7,))
        dropped = weakref.ref(function)
        del trace, size, function
        assert known() is None and dropped() is None
    finally:
        gc.enable()


def test_functions_of_sizes_are_steps_where_python_would_ask() -> None:
    def program(a: Any, b: Any) -> Any:
        chosen = up_to(5, a, 8, b)
        return (smaller(a, b), larger(a, 7), cdiv(a, b), next_power_of_2(a), log2_of(b), chosen)

    trace = Trace()
    traced = program(*map(trace.input, (5, 9)))
    assert tuple(size.value for size in traced) == program(5, 9)  # of which answers are
    function = trace.function(traced)
    for a, b in ((5, 9), (9, 5), (1, 1), (64, 3)):
        assert function(a, b) == (None, program(a, b))


@pytest.mark.parametrize(
    "ask",
    [operator.index, int, float, hash, range, lambda a: {a: 1}, lambda a: a == 5, lambda a: a in (4, 5),
     lambda a: [0] * a, lambda a: f"{a}" and bool(a - 5)],
)  # fmt: skip
def test_what_python_asks_of_a_size_is_an_answer(ask: Callable[[Any], Any]) -> None:
    def program(a: Any, b: Any) -> Any:
        ask(a)
        return (a + b,)

    function = of_sizes(program, 5, 9)
    assert function(5, 7) == (12,) and function(6, 7) is None


def test_a_function_of_sizes_is_one_step() -> None:
    asked: list[tuple[Any, ...]] = []

    @arithmetic
    def half(a: int, kind: type) -> Any:
        asked.append((a, kind))
        return kind(a // 2)

    function = of_sizes(lambda a: (half(a, int) + 1, half(a, str)), 5)
    assert function(4) == (3, "2") and function(5) == (3, "2") and function(6) is None
    assert all(type(a) is int for a, _ in asked)


def test_an_answer_after_the_end_would_be_lost() -> None:
    trace = Trace()
    size = trace.input(5)
    trace.function((size,))
    with pytest.raises(RuntimeError, match="the trace has ended"):
        bool(size < 3)


def test_an_attribute_may_be_a_size() -> None:
    op = registry()["map_slots"]
    specs = Spec((3, 8), "int32", (8, 1)), Spec((3, 4), "int32", (4, 1)), None, None
    template = trace_call(op, specs, op.attributes(page_size=64), H200, None)
    assert any(size.value == 64 for size in template.trace.inputs)


def programs(a: Any, b: Any, c: Any) -> Any:
    """Asks most of what plans ask, in an order that follows from answers."""
    if a > 10:
        b = b + cdiv(a, 8)
        if b == 7:
            return (b, a)
    kind = "even" if c % 2 == 0 else "odd"
    blocks = operator.index(smaller(b, 3))
    if c == 5 or (a > c and b * 2 > a):
        return (kind, [a * b] * blocks)
    return (kind, larger(a, b) - c, blocks)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=60))
def test_what_is_found_is_what_is_computed(drawn: list[tuple[int, int, int]]) -> None:
    """Of sizes in any order; and no two functions are made for sizes with the same answers."""
    families: Families[int] = Families()
    for sizes in drawn * 2:
        found = families.find(sizes)
        if found is None:
            trace = Trace()
            function = trace.function(programs(*map(trace.input, sizes)))
            assert all(branch.function(*sizes)[0] is not None for branch in every(families.first.get(None)))
            families.add(sizes, function, len(families))
            found = families.find(sizes)
        assert found is not None and found[1] == programs(*sizes)
    assert sorted(branch.value for branch in every(families.first.get(None))) == [*range(len(families))]


def every(branch: Branch[int] | None) -> list[Branch[int]]:
    return [] if branch is None else [branch, *(each for other in branch.others.values() for each in every(other))]
