"""The docstrings of the front-ends' functions: an op's own, with its example and keywords as a front-end's users write.

In the example of an op's declaration `ops` is the front-end and `xp` its array module. It assigns the arrays that the
op updates, as `cache = ops.write_mla_cache(latent, rope, slots, cache)`: true where a call returns them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill, indent

from xmla.core.op.op import Op

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Style:
    """How a front-end's users write.

    Attributes:
        package: The front-end. Its docstring explains the keywords of every op: `implementation`, and `preallocated`.
        preallocated: The keywords that take memory for the results of an op that has some.
        ops, arrays: What users call the front-end and its array module.
        returns_updated: Whether a call returns the arrays that it updates.
        updates: What happens to these arrays, `{}`.
        beside_results: The same of an op that has results, too.
    """

    package: str
    preallocated: tuple[str, ...]
    ops: str
    arrays: str
    returns_updated: bool
    updates: str
    beside_results: str


TORCH = Style(
    "xmla.torch_api",
    ("out", "workspace"),
    "xt",
    "torch",
    returns_updated=False,
    updates="Updates {} in place and returns None.",
    beside_results="Updates {} in place.",
)
JAX = Style(
    "xmla.jax_api",
    (),
    "xj",
    "jnp",
    returns_updated=True,
    updates="Arrays do not change: returns the new {}, and without the result nothing is written. Given a `jax.Ref`, "
    "updates it in place and returns None.",
    beside_results="Arrays do not change: returns the new {} after the results, and without them nothing is written. A "
    "`jax.Ref` is updated in place and not returned.",
)


NEW = (  # what JAX returns of an array that an op updates
    "The new array; the one given does not change, and without the result nothing is written. A `jax.Ref` is updated "
    "in place and not returned."
)


def updates(op: Op, style: Style) -> str:
    """What a call does with the arrays that the op updates, if it updates any."""
    sentence = style.beside_results if op.outputs else style.updates
    return sentence.format(" and ".join(f"`{name}`" for name in op.mutates)) if op.mutates else ""


def document(op: Op, style: Style) -> str:
    """The docstring of the op's function in a front-end, indented as in source."""
    lines = []
    for line in op.doc.splitlines():
        if re.match(r"\s*(>>>|\.\.\.) ", line):
            if op.mutates and not style.returns_updated:
                line = re.sub(rf"(\w+(?:, )?){{{len(op.mutates)}}} = (?=ops\.{op.name}\()", "", line)
                line = re.sub(rf", (?=ops\.{op.name}\()", " = ", line)
            line = re.sub(r"\bops\.", f"{style.ops}.", line)
            line = re.sub(r"\bxp\.", f"{style.arrays}.", line)
        lines.append(line)
    text = "\n".join(lines)
    if op.mutates and style.returns_updated:
        text = re.sub(r",?\s+in place\b", "", text)
        heading = "\n" if op.outputs else "\n\n    Returns:\n"
        returns = f"{heading}{_entries(dict.fromkeys(op.mutates, NEW))}\n\n    Raises:\n"
        text = text.replace("\n\n    Raises:\n", returns)
    elif op.mutates:
        note = fill(updates(op, style), WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        text = text.replace("    Example:\n", f"{note}\n\n    Example:\n")
    keywords = ", ".join([*(style.preallocated if op.outputs else ()), "implementation"])
    before, heading, rest = text.partition("    Args:\n")
    arguments, gap, after = rest.partition("\n\n")
    return f"{before}{heading}{arguments}\n        {keywords}: As in every op, see `help({style.package})`.{gap}{after}"


def _entries(descriptions: Mapping[str, str]) -> str:
    """A section of a docstring: what is told of each name."""
    entries = [
        fill(f"{name}: {what}", WIDTH - 8, subsequent_indent="    ", break_on_hyphens=False)
        for name, what in descriptions.items()
    ]
    return indent("\n".join(entries), "        ")
