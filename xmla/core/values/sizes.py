"""Sizes as symbols: what is computed of them is recorded, and becomes a function of other sizes.

A `Trace` notes the arithmetic that is done with its sizes, and every answer that is taken from them: a comparison, a
key of a dict, the length of a loop. Where other sizes give the same answers everything else is arithmetic, which
`Trace.function` generates as one function.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache, wraps
from math import ceil
from operator import is_
from typing import Any

Number = int | float
EQUAL = "{} == {}"
NEUTRAL = {"{} + {}": 0, "{} * {}": 1}  # operands, on either side, that leave the other as it is


class Size:
    """A number that follows from a trace's sizes; `value` is that of the sizes it is traced with.

    Where Python needs a number of its own (`__index__`, `__hash__`, …) it gets the value, which is then fixed: an
    answer. Text has the value too, and is no answer: only messages have numbers in their text.
    """

    __slots__ = ("fixed", "form", "name", "operands", "trace", "value")

    def __init__(self, trace: "Trace", name: str, value: Any, form: str = "", operands: tuple[Any, ...] = ()) -> None:
        self.trace, self.name, self.value, self.form, self.operands = trace, name, value, form, operands
        self.fixed = False

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        return self.trace.fix(self)

    def __int__(self) -> int:
        return int(self.trace.fix(self))

    def __float__(self) -> float:
        return float(self.trace.fix(self))

    def __hash__(self) -> int:
        return hash(self.trace.fix(self))

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, specification: str) -> str:
        return format(self.value, specification)

    def __neg__(self) -> Any:
        return self.trace.compute("-{}", operator.neg, self)

    def __ceil__(self) -> Any:
        return self.trace.compute("ceil({})", ceil, self)

    def bit_length(self) -> Any:
        return self.trace.compute("{}.bit_length()", int.bit_length, self)


OPERANDS = Size, int, float


def _define(name: str, sign: str) -> None:
    """An operator of sizes."""
    form, function = f"{{}} {sign} {{}}", getattr(operator, name)

    def forward(self: Size, other: Any) -> Any:
        return self.trace.compute(form, function, self, other) if isinstance(other, OPERANDS) else NotImplemented

    def backward(self: Size, other: Any) -> Any:
        return self.trace.compute(form, function, other, self) if isinstance(other, OPERANDS) else NotImplemented

    def compare(self: Size, other: Any) -> Any:
        return self.trace.answer(form, function, self, other) if isinstance(other, OPERANDS) else NotImplemented

    if sign in ("==", "!=", "<", "<=", ">", ">="):
        setattr(Size, f"__{name}__", compare)
    else:
        setattr(Size, f"__{name}__", forward)
        setattr(Size, f"__r{name}__", backward)


for _name, _sign in {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**", "lshift": "<<",
    "rshift": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}.items():  # fmt: skip
    _define(_name, _sign)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Something taken from sizes that other sizes must give too: the value of `form` with these operands."""

    form: str
    operands: tuple[Any, ...]
    value: Any


class Trace:
    """What is done with sizes, in order."""

    def __init__(self) -> None:
        self.inputs: list[Size] = []
        self._steps: list[Size | Answer] = []
        self._known: dict[Any, Any] = {}  # by what they are computed of
        self._lines: tuple[tuple[str | None, str, tuple[str, ...]], ...] | None = None  # name, text, names in it
        self._names: tuple[str, ...] = ()
        self._scope: dict[str, Any] = {"ceil": ceil}

    def input(self, value: int) -> Any:
        """The next size."""
        self.inputs.append(Size(self, f"s{len(self.inputs)}", value))
        return self.inputs[-1]

    def compute(self, form: str, function: Callable[..., Any], *operands: Any) -> Any:
        """The number that `function` gives for the operands, as a size if one of them is."""
        values, free, key = _read(form, operands)
        if key is None:
            return function(*values)
        if form in NEUTRAL:
            for neutral, other in (free, free[::-1]):
                if type(neutral) is int and neutral == NEUTRAL[form]:
                    return other
        size = self._known.get(key)
        if size is None:
            size = self._known[key] = Size(self, f"n{len(self._steps)}", function(*values), form, tuple(free))
            self._add(size)
        return size.value if size.fixed else size

    def answer(self, form: str, function: Callable[..., Any], *operands: Any) -> Any:
        """What `function` gives for the operands, which is an answer if one of them is a size."""
        values, free, key = _read(form, operands)
        if key is None or (len(free) == 2 and free[0] is free[1]):
            return function(*values)
        if key not in self._known:
            self._known[key] = value = function(*values)
            self._add(Answer(form, tuple(free), value))
            if value is True and form == EQUAL and not isinstance(free[1], Size):
                free[0].fixed = True
        return self._known[key]

    def fix(self, size: Size) -> Any:
        """The value of a size, which is an answer."""
        if not size.fixed:
            size.fixed = True
            self._add(Answer("{}", (size,), size.value))
        return size.value

    def fix_all(self, sizes: Sequence[Size]) -> None:
        """Sizes that are constants whatever is asked later: their values are one answer."""
        for size in sizes:
            size.fixed = True
        self._add(Answer(f"({'{}, ' * len(sizes)})", tuple(sizes), tuple(size.value for size in sizes)))

    def equate(self, pairs: Sequence[tuple[Size, Size]]) -> None:
        """Sizes that are others, whatever is asked later: that they are equal is one answer."""
        if pairs:
            sides = (f"({'{}, ' * len(pairs)})",) * 2
            self._add(Answer(EQUAL.format(*sides), (*(one for one, _ in pairs), *(other for _, other in pairs)), True))

    def call(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """What a function of sizes gives: a size if it is a number, else an answer."""
        value = function(*(operand.value if isinstance(operand, Size) else operand for operand in operands))
        form = f"{{}}({', '.join(['{}'] * len(operands))})"
        take = self.compute if type(value) in (int, float) else self.answer
        return take(form, lambda *_: value, function, *operands)

    def _add(self, step: Size | Answer) -> None:
        if self._lines is not None:
            raise RuntimeError(f"the trace has ended: {step.form} is asked of {step.operands}")
        self._steps.append(step)

    def function(self, result: Any) -> Callable[..., tuple[Any, Any]]:
        """The function of other sizes, in the order of `inputs`: None and `result` of them, if all answers are these.

        Else the first answer that differs, by its place and what it is instead, and None: sizes of equal answers up to
        some place are asked the same there (`Families`).

        `result` is a tuple or list, of such and of sizes and other values, which stay as they are. The first function
        ends the trace, which was one thread's until then: what is asked of its sizes later would be no part of it.
        """
        if self._lines is None:
            self._close()
        lines, needed, scope = [], {size.name for size in sizes_in(result) if not size.fixed}, dict(self._scope)
        for name, text, operands in reversed(self._lines or ()):
            if name is None or name in needed:
                lines.append(text)
                needed.update(operands)
        head = f"def sized({', '.join(self._names)}):"
        text = "\n    ".join([head, *reversed(lines), f"return None, {_text(result, scope)}"])
        exec(text, scope)
        return scope.pop("sized")  # which has the scope: without a circle nothing waits for a collection

    def _close(self) -> None:
        """Keep the steps as text, at which a collection of garbage does not look; sizes know the trace, it no size."""
        lines: list[tuple[str | None, str, tuple[str, ...]]] = []
        for place, step in enumerate(self._steps):
            free = tuple(operand.name for operand in step.operands if type(operand) is Size)
            # One that is fixed was none when it was asked: a constant in its place would change the order of answers.
            texts = [each.name if type(each) is Size else _text(each, self._scope) for each in step.operands]
            text = step.form.format(*texts)
            if type(step) is Size:
                lines.append((step.name, f"{step.name} = {text}", free))
            elif isinstance(step.value, bool):
                lines.append(
                    (None, f"if {'not ' * step.value}({text}): return ({place}, {not step.value}), None", free)
                )
            else:
                lines.append(
                    (None, f"if (v := {text}) != {_text(step.value, self._scope)}: return ({place}, v), None", free)
                )
        for size in [*self.inputs, *(step for step in self._steps if isinstance(step, Size))]:
            size.operands = ()
        self._names = tuple(size.name for size in self.inputs)
        self.inputs.clear()
        self._steps.clear()
        self._known.clear()
        self._lines = tuple(lines)


@dataclass(slots=True, eq=False)
class Branch[T]:
    """Sizes with certain answers, and what others are looked for by: the first answer that differs."""

    function: Callable[..., tuple[Any, Any]]  # of `Trace.function`
    value: T
    others: dict[Any, "Branch[T]"] = field(default_factory=dict)


class Families[T]:
    """Values by the answers that sizes give, of traces that do the same with theirs as long as the answers are equal.

    A search runs the functions of a few families, however many there are: of those alone that have the answers so far.
    """

    __slots__ = ("count", "first")

    def __init__(self) -> None:
        self.first: dict[None, Branch[T]] = {}  # one at most
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def find(self, sizes: Iterable[int]) -> tuple[Branch[T], Any] | None:
        """Where the value for these sizes is, and what its function gives for them."""
        branch = self.first.get(None)
        while branch is not None:
            difference, result = branch.function(*sizes)
            if difference is None:
                return branch, result
            branch = branch.others.get(difference)
        return None

    def add(self, sizes: Iterable[int], function: Callable[..., tuple[Any, Any]], value: T) -> Branch[T]:
        """Keep a value for all sizes with the answers of these, if there is none yet; where theirs is.

        Threads may add at once.
        """
        new = Branch(function, value)
        branch = self.first.setdefault(None, new)
        while branch is not new:
            difference, _ = branch.function(*sizes)
            if difference is None:
                return branch
            branch = branch.others.setdefault(difference, new)
        self.count += 1
        return branch


def _read(form: str, operands: tuple[Any, ...]) -> tuple[list[Any], list[Any], tuple[Any, ...] | None]:
    """Values of operands, the operands with values for sizes that are fixed, and a key of what they compute.

    None for the key, if no operand is a size.
    """
    values: list[Any] = []
    free: list[Any] = []
    key: list[Any] = [form]
    of_sizes = False
    for operand in operands:
        if type(operand) is Size:
            value = operand.value
            if not operand.fixed:
                of_sizes = True
                values.append(value)
                free.append(operand)
                key.append(operand.name)
                continue
        else:
            value = operand
        values.append(value)
        free.append(value)
        key.append(value if type(value) is int else (type(value), value))  # True is not 1, nor is 1.0
    return values, free, tuple(key) if of_sizes else None


def _text(value: Any, scope: dict[str, Any]) -> str:
    """A value in the text of a function; what has no text is a name in its scope."""
    if type(value) is int:
        return f"({value})"
    if isinstance(value, Size):
        return _text(value.value, scope) if value.fixed else value.name
    if type(value) is tuple:
        return f"({''.join(f'{_text(each, scope)}, ' for each in value)})"
    if type(value) is list:
        return f"[{', '.join(_text(each, scope) for each in value)}]"
    if value is None or type(value) in (bool, str):
        return f"({value!r})"
    name = f"c{len(scope)}"
    scope[name] = value
    return name


def arithmetic[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Lets a pure function of sizes be one step of a trace, whatever it asks of them. Other operands can be hashed."""

    @wraps(function)
    def of_sizes(*operands: P.args, **named: P.kwargs) -> Any:
        sizes = tuple([operand for operand in operands if type(operand) is Size])
        if not sizes:
            return function(*operands, **named)
        others = tuple((place, type(each), each) for place, each in enumerate(operands) if type(each) is not Size)
        return sizes[0].trace.call(_of_numbers(function, len(operands), others, tuple(named.items())), sizes)

    return of_sizes


@lru_cache(maxsize=1 << 10)
def _of_numbers(
    function: Callable[..., Any],
    count: int,
    others: tuple[tuple[int, type, Any], ...],
    named: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """A function of `count` operands as one of those alone that are no `others`.

    It is called before launches, of sizes that differ seldom in what it asks: its results are kept.
    """
    at = {place: other for place, _, other in others}

    @lru_cache(maxsize=1 << 12)
    def of_numbers(*numbers: int) -> Any:
        rest = iter(numbers)
        return function(*[at[place] if place in at else next(rest) for place in range(count)], **dict(named))

    return of_numbers


def step(form: str, function: Callable[..., Any], *operands: Any) -> Any:
    """What `function` gives for the operands; of sizes it is one step of their trace, whose text is `form`."""
    for operand in operands:
        if type(operand) is Size:
            return operand.trace.compute(form, function, *operands)
    return function(*operands)


def sizes_in(value: Any) -> Iterator[Size]:
    """The sizes in tuples, lists, mappings' values and dataclasses."""
    if type(value) is Size:
        yield value
    else:
        for part in _parts(value):
            if type(part) not in PLAIN:
                yield from sizes_in(part)


def with_numbers(value: Any, number: Callable[[Size], Any]) -> Any:
    """A value with a number in place of each of its sizes; the same one if it has none."""
    if type(value) is Size:
        return number(value)
    parts = _parts(value)
    changed = [part if type(part) in PLAIN else with_numbers(part, number) for part in parts]
    if all(map(is_, changed, parts)):
        return value
    if isinstance(value, Mapping):
        return dict(zip(value, changed, strict=True))
    if isinstance(value, list | tuple):
        return type(value)(changed)
    return replace(value, **dict(zip(_fields(type(value)), changed, strict=True)))


PLAIN = frozenset({int, float, bool, str, type(None)})  # what most values are, which have no sizes


def _parts(value: Any) -> Collection[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return [getattr(value, name) for name in _fields(kind)]


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(each.name for each in fields(kind) if each.init) if is_dataclass(kind) else ()
