"""Gluon kernels of attention, marks, the derivative, logits of sm_100 and of blocks, and selection refuse the rest."""

import ast
from pathlib import Path

from tools import support_matrix
from xmla.core.formats.mla import MLA_LAYOUTS
from xmla.core.ops.attention.sparse_mla import gluon_marks as marks
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90 import kernel as derivative
from xmla.core.ops.attention.sparse_mla.gluon_sm90 import kernel
from xmla.core.ops.attention.sparse_mla.gluon_sm100 import kernel as sm10x
from xmla.core.ops.attention.sparse_mla.gluon_sm120 import kernel as sm12x
from xmla.core.ops.blocks.indexer_block_logits.gluon_sm90 import kernel as in_blocks
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm100 import kernel as logits
from xmla.core.ops.selection.select_topk.gluon_sm90 import kernel as selection

PLAIN = {"plain", "plain_v4"}
SERVED = {
    "64 heads": {"v32", "v4", "nvfp4"} | PLAIN,
    "16 heads": {"v32"},
    "derivative": PLAIN,
    "in any order": PLAIN,
}  # layouts
SERVED |= {"SM12x": {"v32", "v4", "nope"} | PLAIN, "sm_100": {"v32", "v4"} | PLAIN}
MODULES = (kernel, sm10x, sm12x, derivative, logits, in_blocks, marks, selection)
FOLDERS = [Path(module.__file__).parent for module in MODULES]


def messages() -> set[str]:
    """The messages of every `static_assert` in the kernels' folders."""
    found = set()
    for file in (file for folder in FOLDERS for file in folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "static_assert"
            ):
                found.add(ast.literal_eval(node.args[1]))
    return found


def test_the_kernel_refuses_what_it_is_not_written_for() -> None:
    lines = support_matrix.lines_of(support_matrix.ROOT / "tools" / "wrong_constants.py")
    layouts = [line for line in lines if line.get("change") == {}]
    asked = {(line["layout"], line["of"]) for line in layouts}
    assert asked == {(layout.name, of) for layout in MLA_LAYOUTS for of in SERVED}
    for line in layouts:
        assert (line["refusal"] is None) == (line["layout"] in SERVED[line["of"]]), line
    changed = [line for line in lines if line not in layouts]
    assert changed and all(line["refusal"] for line in changed), changed
    assert {line["refusal"] for line in lines} - {None} == messages(), "an assertion that nothing shows to fail"
