"""What an op may declare, and what follows: its plan, once for all calls alike, its composition, its derivative."""

from xmla.core.op.composition import Composition, same_names
from xmla.core.op.derivative import check_derivative, derivative_call, refuse_forward_mode, refuse_second_derivative
from xmla.core.op.functions import op_function
from xmla.core.op.memo import make_plan, plan_call
from xmla.core.op.memory import Pair, check_overlap, disjoint_check, spaces
from xmla.core.op.op import Case, Op, Updated
from xmla.core.op.template import Calls, Form, Sizes, Start, Template, kind_of, sizes_of, trace_call

__all__ = [
    "Calls",
    "Case",
    "Composition",
    "Form",
    "Op",
    "Pair",
    "Sizes",
    "Start",
    "Template",
    "Updated",
    "check_derivative",
    "check_overlap",
    "derivative_call",
    "disjoint_check",
    "kind_of",
    "make_plan",
    "op_function",
    "plan_call",
    "refuse_forward_mode",
    "refuse_second_derivative",
    "same_names",
    "sizes_of",
    "spaces",
    "trace_call",
]
