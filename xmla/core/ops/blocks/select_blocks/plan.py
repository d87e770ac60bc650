from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.blocks.select_blocks.kernels import block_maxima_kernel
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Launch, Part, Plan
from xmla.core.values import Device, Spec, cdiv

COLUMNS, MAX_BLOCKS = 2048, 256  # of a program, at most


def plan(problem: Problem, device: Device) -> Plan:
    rows, columns, attrs = problem["T"], problem["N"], problem.attrs
    logits, granularity = problem.specs["logits"], attrs.granularity
    blocks, block_b = cdiv(columns, granularity), min(COLUMNS // granularity, MAX_BLOCKS)
    parts = cdiv(blocks, block_b)
    buffers = {"block_counts": Spec((rows,), "int32"), "maxima": Spec((rows, blocks), "float32")}
    maxima = Launch(
        block_maxima_kernel,
        grid=(rows * max(parts, 1),),
        outputs=tuple(buffers),
        arrays=problem.stand_ins(starts="ends"),
        sizes={
            "first_row": 0,
            "num_columns": columns,
            "row_stride": logits.stride(0),
            "k": attrs.k,
            "num_blocks": blocks,
            "parts": max(parts, 1),
        },
        constexprs={
            "HAS_STARTS": problem.has("starts"),
            "UNIT": 1 if problem.has("starts") else logits.vector(logits.stride(0)),
            "GRANULARITY": granularity,
            "NEWEST": attrs.newest,
            "BLOCK_B": block_b,
            "OVERLAP_LIMIT": device.overlap_limit,
        },
    )
    composition = Composition(problem, device)
    composition.add(Part("block_maxima", Plan((maxima,), buffers, tuple(buffers)), same_names(*buffers)))
    composition.call(select_topk.OP, {"logits": "maxima", "ends": "block_counts"}, k=attrs.k)
    return composition.plan()
