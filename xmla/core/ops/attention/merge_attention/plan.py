from math import inf

from xmla.core.call import Problem
from xmla.core.ops.attention.merge_attention.kernels import merge_attention_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, cdiv, next_power_of_2

TILE = 2048  # elements of a program: 4 heads of 512


def plan(problem: Problem, device: Device) -> Plan:
    outs, lses = problem.specs["outs"], problem.specs["lses"]
    out_unit, lse_unit = outs.vector(outs.stride(0)), lses.vector(lses.stride(0))
    heads, latent = problem["H"], problem["L"]
    block_l = next_power_of_2(max(latent, 1))
    block_h = max(1, TILE // block_l)
    launch = Launch(
        merge_attention_kernel,
        grid=(problem["T"] * cdiv(heads, block_h),),
        outputs=("out", "lse"),
        arrays=problem.stand_ins(sink="lses"),
        sizes={
            "num_parts": problem["W"],
            "out_units_w": outs.stride(0) // out_unit,
            "lse_units_w": lses.stride(0) // lse_unit,
        },
        constexprs={
            "OUT_UNIT": out_unit,
            "LSE_UNIT": lse_unit,
            "OUT_STRIDE_T": outs.stride(1),
            "OUT_STRIDE_H": outs.stride(2),
            "LSE_STRIDE_T": lses.stride(1),
            "HEADS": heads,
            "LATENT": latent,
            "HAS_SINK": problem.has("sink"),
            "EMPTY_LSE": inf if problem.attrs.empty_lse == "+inf" else -inf,
            "BLOCK_H": block_h,
            "BLOCK_L": block_l,
        },
        num_warps=8 if device.arch >= 120 else 4,  # 4 warps spill a word there
    )
    return Plan((launch,), problem.results, ("out", "lse"))
