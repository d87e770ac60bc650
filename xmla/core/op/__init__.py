"""What an op may declare, and what follows: its plan, once for all calls alike, its composition, its derivative."""

from xmla.core.op.composition import Composition, same_names
from xmla.core.op.derivative import check_derivative, derivative_call, refuse_derivative
from xmla.core.op.functions import op_function
from xmla.core.op.memo import make_plan, plan_call
from xmla.core.op.op import Case, Op, Updated
from xmla.core.op.template import Sizes, Template, kind_of, sizes_of, trace_call

__all__ = [
    "Case",
    "Composition",
    "Op",
    "Sizes",
    "Template",
    "Updated",
    "check_derivative",
    "derivative_call",
    "kind_of",
    "make_plan",
    "op_function",
    "plan_call",
    "refuse_derivative",
    "same_names",
    "sizes_of",
    "trace_call",
]
