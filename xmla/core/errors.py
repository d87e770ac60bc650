"""The errors a caller sees. All are raised before any kernel is launched."""


class ArgumentError(ValueError):
    """An argument is wrong on every device: its dtype, rank, an axis, its strides or a value of an attribute."""


class UnsupportedError(NotImplementedError):
    """The arguments are right, but this implementation or device cannot serve them; the message names the condition."""


class CompileError(RuntimeError):
    """A kernel could not be compiled or stored on disk; the message says what failed. The call may be repeated."""
