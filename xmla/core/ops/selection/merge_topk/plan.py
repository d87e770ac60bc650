from xmla.core.call import Problem
from xmla.core.ops.selection.merge_topk.kernels import merge_choose_kernel, merge_order_kernel, merge_sort_kernel
from xmla.core.plan import Launch, Plan, most_registers
from xmla.core.values import INTERPRETER, Device, Spec, cdiv, next_power_of_2

MAX_TILE = 8192  # candidates that one program holds in registers; 16384 spill
MAX_SORT = 4096  # winners that one program sorts


def plan(problem: Problem, device: Device) -> Plan:
    rows, k = problem["T"], problem.attrs.k
    candidates = problem["W"] * problem["N"]
    tile = min(MAX_TILE, max(1024, next_power_of_2(max(candidates, 1))))
    values, indices = problem.specs["values"], problem.specs["indices"]
    workspace = {
        "chosen_values": Spec((rows, k), "float32"),
        "chosen": Spec((rows, k), "int32"),
        "counts": Spec((rows,), "int32"),
    }
    # Elsewhere 16 warps spill a few words, and ptxas spills to raise occupancy.
    on_hopper = device.arch == 90
    choosing_warps = max(4, min(16, tile // 512)) if on_hopper else 8
    choose = Launch(
        merge_choose_kernel,
        grid=(rows,),
        outputs=tuple(workspace),
        sizes={"num_candidates": candidates, "value_stride_w": values.stride(0), "index_stride_w": indices.stride(0)},
        constexprs={
            "UNIT": values.vector(values.stride(0), indices.stride(0)),
            "VALUE_STRIDE_T": values.stride(1),
            "INDEX_STRIDE_T": indices.stride(1),
            "N": problem["N"],
            "K": k,
            "TILE": tile,
            "ONE_TILE": candidates <= tile,
        },
        num_warps=choosing_warps,
        max_registers=None if on_hopper else most_registers(choosing_warps),
    )
    results = problem.results
    return Plan((choose, order(rows, k, device)), {**workspace, **results}, tuple(results))


def order(rows: int, k: int, device: Device) -> Launch:
    """Winners by ascending index: one program sorts a row, or each winner's place is counted."""
    results = ("top_values", "top_indices")
    warps = 8 if k > 512 else 4
    if k <= MAX_SORT:
        blocks = {"K": k, "BLOCK_K": next_power_of_2(k)}
        return Launch(merge_sort_kernel, (rows,), results, constexprs=blocks, num_warps=warps)
    block_k, block_n = (1024, 1024) if device == INTERPRETER else (128, 32)
    blocks = {"K": k, "BLOCK_K": block_k, "BLOCK_N": block_n}
    return Launch(merge_order_kernel, (rows * cdiv(k, block_k),), results, constexprs=blocks, num_warps=warps)
