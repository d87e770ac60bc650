"""Hopper's attention kernel compiles for what it is written for; another constant fails to compile and says why."""

import ast
from pathlib import Path

import support_matrix

from xmla.core.formats.mla import MLA_LAYOUTS
from xmla.core.ops.sparse_mla.gluon_sm90 import kernel

SERVED = {64: {"v32", "v4", "plain", "plain_v4"}, 16: {"v32"}}  # layouts by the heads of a tile


def messages() -> set[str]:
    """Of every `static_assert` in the kernel's folder."""
    found = set()
    for file in Path(kernel.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "static_assert"
            ):
                found.add(ast.literal_eval(node.args[1]))
    return found


def test_the_kernel_refuses_what_it_is_not_written_for() -> None:
    lines = support_matrix.lines_of(Path(__file__).with_name("wrong_constants.py"))
    layouts = [line for line in lines if line.get("change") == {}]
    asked = {(line["layout"], line["heads"]) for line in layouts}
    assert asked == {(layout.name, heads) for layout in MLA_LAYOUTS for heads in SERVED}
    for line in layouts:
        assert (line["refusal"] is None) == (line["layout"] in SERVED[line["heads"]]), line
    changed = [line for line in lines if line not in layouts]
    assert changed and all(line["refusal"] for line in changed), changed
    assert {line["refusal"] for line in lines} - {None} == messages(), "an assertion that nothing shows to fail"
