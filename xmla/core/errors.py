"""The errors a caller sees. All are raised before any kernel is launched."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message that refuses a name: those of `known` that may have been meant, if there are any."""
    by_case = {each.lower(): each for each in known}
    near = [by_case[match] for match in get_close_matches(name.lower(), by_case, n=3)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


class ArgumentError(ValueError):
    """An argument is wrong on every device: its dtype, rank, an axis, its strides or a value of an attribute."""


class UnsupportedError(NotImplementedError):
    """The arguments are right, but this implementation or device cannot serve them; the message names the condition."""


class CompileError(RuntimeError):
    """A kernel could not be compiled or stored on disk; the message says what failed. The call may be repeated."""
