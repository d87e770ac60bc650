from xmla.core.call import Problem

DIMS = (32, 64, 128, 512)


def dims_of(problem: Problem) -> int:
    """The dims of a row."""
    return problem["D"] if problem.has("norm_weight") else problem["C·D"]


def check_rows(problem: Problem) -> None:
    """Check what `compress_rows` and its derivative take alike."""
    width, dims = problem["C·D"], dims_of(problem)
    if dims not in DIMS:
        argument, axis = ("norm_weight", "D (axis 0)") if problem.has("norm_weight") else ("kv", "C·D (axis 1)")
        problem.refuse(argument, f"axis {axis}", dims, "32, 64, 128 or 512")
    if width not in (dims, 2 * dims):
        problem.refuse("kv", "axis C·D (axis 1)", width, f"{dims} or {2 * dims}, once or twice the D of norm_weight")
    if not problem["r"]:
        problem.refuse("ape", "axis r (axis 0)", 0, "at least 1")
    if problem.has("cos_sin") and (problem["E"] % 2 or problem["E"] > dims):
        problem.refuse("cos_sin", "axis E (axis 1)", problem["E"], f"even and at most {dims}")
