from xmla.core.call import Problem
from xmla.core.ops.training.compress_rows.constants import Compressor, compressor_constants
from xmla.core.ops.training.compress_rows.kernels import compress_rows_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device


def angles(problem: Problem) -> int:
    """How many positions have an angle; 0 without a rotation, where no entry needs one."""
    return problem["S"] if problem.has("cos_sin") else 0


def plan(problem: Problem, device: Device) -> Plan:
    launch = Launch(
        compress_rows_kernel,
        grid=(problem["N"],),
        outputs=("rows",),
        arrays=problem.stand_ins(norm_weight="ape", cos_sin="ape"),
        sizes={"num_angles": angles(problem)},
        constexprs={"C": Compressor(**compressor_constants(problem))},
        num_warps=8,
    )
    return Plan((launch,), problem.results, ("rows",))
