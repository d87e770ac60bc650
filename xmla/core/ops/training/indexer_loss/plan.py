from xmla.core.call import Problem
from xmla.core.ops.indexer.shared import Query
from xmla.core.ops.training.indexer_loss.all_pairs import plan as all_pairs
from xmla.core.ops.training.indexer_loss.constants import Gradient, Loss, Measurement
from xmla.core.ops.training.indexer_loss.kernels import bound_kernel, indexer_loss_kernel, measure_kernel
from xmla.core.ops.training.indexer_loss.parts import average, parts_of_tokens, target, target_stride
from xmla.core.ops.training.indexer_scores.backward.plan import clear_sums, round_sums, sums_workspace
from xmla.core.ops.training.indexer_scores.constants import Indexer, columns
from xmla.core.ops.training.indexer_scores.plan import column_sizes, num_columns
from xmla.core.plan import Launch, Plan, Rows, most_registers
from xmla.core.values import Device, Spec, log2_of

MEASURE_WARPS, MEASURE_BLOCK_N = 4, 64


def differentiating(device: Device, sparse: bool) -> tuple[int, int]:
    """Warps of a program that computes gradients, and the keys of its tile."""
    if device.arch == 90:
        # Two programs an SM: one multiplies while the other waits. 64 keys at indices spill their addresses.
        return 4, 32 if sparse else 64
    return 4 if device.has_tensor_memory else 8, 32


def plan(problem: Problem, device: Device) -> Plan:
    return all_pairs.plan(problem, device) if all_pairs.serves(problem, device) else _token_by_token(problem, device)


def _token_by_token(problem: Problem, device: Device) -> Plan:
    """The bounds of all summands first; then, in parts of tokens whose target fits the workspace, all that reads it."""
    tokens, sparse = problem["T"], problem.has("indices")
    workspace = sums_workspace(problem) | {name: Spec((tokens,), "float32") for name in ("total", "mass", "losses")}
    own_target = not problem.has("target")
    rows = {"own_target": num_columns(problem)} if own_target else {}
    parts = parts_of_tokens(problem, workspace, rows)
    workspace |= {name: Spec((parts[0].count, row), "float32") for name, row in rows.items()}
    stand_ins = problem.stand_ins(ends="index_q", starts="index_q", indices="index_q")
    reading = stand_ins | ({"target": "own_target"} if own_target else {})
    warps, block_n = differentiating(device, sparse)
    # The summands of one token add up to less than the bound, but for a target that is given.
    log2_parts = log2_of(tokens * (1 if own_target else problem["K"]))
    query = Query.of(problem, "index_q", "index_weights")
    indexer = Indexer.with_keys(problem, "index_q", "index_k", "index_weights")
    origin, stride, coeff = columns(problem), target_stride(problem), float(problem.attrs.coeff)
    sizes = column_sizes(problem)
    bound = Launch(
        bound_kernel,
        grid=(tokens,),
        outputs=("bounds",),
        arrays=stand_ins,
        sizes={"num_tokens": tokens, **sizes},
        constexprs={"C": Gradient(INDEXER=query, COLUMNS=origin, COEFF=coeff, BLOCK_N=1024)},
    )

    def measure(part: Rows) -> Launch:
        constants = Measurement(INDEXER=indexer, COLUMNS=origin, TARGET_STRIDE=stride, BLOCK_N=MEASURE_BLOCK_N)
        return Launch(
            measure_kernel,
            grid=(part.count,),
            outputs=("total", "mass"),
            arrays=reading,
            sizes={"first_token": part.first, **sizes},
            constexprs={"C": constants},
            num_warps=MEASURE_WARPS,
        )

    def differentiate(part: Rows) -> Launch:
        constants = Loss(INDEXER=indexer, COLUMNS=origin, TARGET_STRIDE=stride, COEFF=coeff, BLOCK_N=block_n)
        return Launch(
            indexer_loss_kernel,
            grid=(part.count,),
            outputs=("marks", "sums", "losses", "dindex_q", "dindex_weights"),
            arrays=reading,
            sizes={"first_token": part.first, "num_tokens": tokens, **sizes, "log2_parts": log2_parts},
            constexprs={"C": constants},
            num_warps=warps,
            num_stages=1,
            max_registers=most_registers(warps),
        )

    launches = [*clear_sums(problem), bound]
    for part in parts:
        launches += [*target(problem, part), measure(part), differentiate(part)]
    launches += [round_sums(problem, "dindex_k", log2_parts), average(problem)]
    results = problem.results
    return Plan(tuple(launches), {**workspace, **results}, tuple(results))
