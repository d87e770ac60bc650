from xmla.core.call import Problem
from xmla.core.ops.training.compress_rows.backward.kernels import (
    differentiate_entries_kernel,
    differentiate_tokens_kernel,
    sum_places_kernel,
    sum_weights_kernel,
)
from xmla.core.ops.training.compress_rows.check import dims_of
from xmla.core.ops.training.compress_rows.constants import (
    EntryDerivative,
    TokenDerivative,
    compressor_constants,
    token_constants,
)
from xmla.core.ops.training.compress_rows.plan import angles
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, Spec, cdiv

BLOCK_T, BLOCK_D = 32, 32  # a tile of tokens by dims


def plan(problem: Problem, device: Device) -> Plan:
    """The windows' softmax and gradients first; each element of kv and score stands in one window, or in none."""
    tokens, width, dims = problem["N"], problem["C·D"], dims_of(problem)
    tile = {"BLOCK_T": BLOCK_T, "BLOCK_D": BLOCK_D}
    constants = TokenDerivative(**token_constants(problem), **tile)
    sizes = {"num_tokens": tokens, "num_angles": angles(problem)}
    entries = Launch(
        differentiate_entries_kernel,
        grid=(tokens,),
        outputs=("lse", "pooled", "dpooled", "dweights"),
        arrays=problem.stand_ins(norm_weight="ape", cos_sin="ape"),
        sizes={"num_angles": angles(problem)},
        constexprs={
            "C": EntryDerivative(**compressor_constants(problem), DROW_STRIDE=problem.specs["drows"].stride(0))
        },
        num_warps=8,
    )
    launches = [
        entries,
        Launch(
            differentiate_tokens_kernel,
            grid=(cdiv(tokens, BLOCK_T) * (width // BLOCK_D),),
            outputs=("dkv", "dscore"),
            sizes=sizes,
            constexprs={"C": constants},
        ),
        Launch(
            sum_places_kernel,
            grid=(problem["r"] * (width // BLOCK_D),),
            outputs=("dape",),
            sizes=sizes,
            constexprs={"C": constants},
        ),
    ]
    has_norm = problem.has("norm_weight")
    if has_norm:
        grid, sizes = (dims // BLOCK_D,), {"num_tokens": tokens}
        launches.append(Launch(sum_weights_kernel, grid, ("dnorm_weight",), sizes, {"D": dims, **tile}))
    of_dims = Spec((tokens, dims), "float32")
    workspace = {"lse": of_dims, "pooled": of_dims, "dpooled": of_dims}
    workspace["dweights"] = of_dims if has_norm else Spec((0,), "float32")
    return Plan(tuple(launches), {**workspace, **problem.results}, tuple(problem.results))
