from xmla.core.call import Problem
from xmla.core.lang.scores import CHUNK as MULTIPLIED

MAX_HEADS = 128
CHUNK = MULTIPLIED.value  # kernels multiply so many dims at once


def check_attention(problem: Problem) -> None:
    """Rules of attention's queries and plain rows."""
    if problem["H"] > MAX_HEADS:
        problem.unsupported("q", "axis H (axis 1)", problem["H"], f"at most {MAX_HEADS} heads")
    if problem["L+E"] % CHUNK or problem["L+E"] == 0:
        problem.refuse("q", "axis L+E (axis 2)", problem["L+E"], f"a multiple of {CHUNK}, as 576 or 512")
    if problem.specs["rows"].dtype != problem.specs["q"].dtype:
        problem.refuse("rows", "dtype", problem.specs["rows"].dtype, f"{problem.specs['q'].dtype}, as q")
