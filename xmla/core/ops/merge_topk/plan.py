from xmla.core.device import INTERPRETER, Device
from xmla.core.op import Problem
from xmla.core.ops.merge_topk.kernels import merge_choose_kernel, merge_order_kernel, merge_sort_kernel
from xmla.core.plan import Launch, Plan, cdiv, most_registers, next_power_of_2
from xmla.core.spec import Spec

MAX_TILE = 8192  # candidates that one program holds in registers; 16384 spill
MAX_SORT = 4096  # winners that one program sorts


def plan(problem: Problem, device: Device) -> Plan:
    rows, k = problem["T"], problem.attrs["k"]
    block_k, block_n = (1024, 1024) if device == INTERPRETER else (128, 32)
    candidates = problem["W"] * problem["N"]
    tile = min(MAX_TILE, max(1024, next_power_of_2(max(candidates, 1))))
    values, indices = problem.specs["values"], problem.specs["indices"]
    workspace = {
        "chosen_values": Spec((rows, k), "float32"),
        "chosen": Spec((rows, k), "int32"),
        "counts": Spec((rows,), "int32"),
    }
    # Elsewhere 16 warps, and what registers the compiler would take, spill a few words.
    on_hopper = device.arch == 90
    choosing_warps = max(4, min(16, tile // 512)) if on_hopper else 8
    choose = Launch(
        merge_choose_kernel,
        grid=(rows,),
        inputs=("values", "indices"),
        sizes=(candidates,),
        outputs=tuple(workspace),
        constexprs=(
            ("VALUE_STRIDE_W", values.stride(0)),
            ("VALUE_STRIDE_T", values.stride(1)),
            ("INDEX_STRIDE_W", indices.stride(0)),
            ("INDEX_STRIDE_T", indices.stride(1)),
            ("N", problem["N"]),
            ("K", k),
            ("TILE", tile),
            ("ONE_TILE", candidates <= tile),
        ),
        num_warps=choosing_warps,
        max_registers=None if on_hopper else most_registers(choosing_warps),
    )
    order = Launch(
        merge_sort_kernel if k <= MAX_SORT else merge_order_kernel,
        grid=(rows if k <= MAX_SORT else rows * cdiv(k, block_k),),
        inputs=tuple(workspace),
        sizes=(),
        outputs=("top_values", "top_indices"),
        constexprs=(
            (("K", k), ("BLOCK_K", next_power_of_2(k)))
            if k <= MAX_SORT
            else (("K", k), ("BLOCK_K", block_k), ("BLOCK_N", block_n))
        ),
        num_warps=8 if k > 512 else 4,
    )
    return Plan((choose, order), workspace | problem.op.result_specs(problem), ("top_values", "top_indices"))
