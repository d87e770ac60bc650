from collections.abc import Hashable
from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_loss.all_pairs.kernels import (
    FINITE_KEYS,
    add_chains_kernel,
    compare_columns_kernel,
    compare_ranges_kernel,
    extent_kernel,
    finite_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from xmla.core.ops.training.indexer_loss.constants import Gradient
from xmla.core.ops.training.indexer_loss.parts import average, parts_of_tokens, target, target_stride
from xmla.core.ops.training.indexer_scores.constants import Indexer, Products, Ranges, columns
from xmla.core.ops.training.indexer_scores.plan import column_sizes, num_columns, score_ranges
from xmla.core.plan import Launch, Plan, Rows, most_registers
from xmla.core.values import INTERPRETER, Device, Spec, StandIn, cdiv, larger, smaller

# Of as many tokens as keys, where half of the pairs count: the most keys for each that a token selects.
MOST_KEYS_OF_A_COLUMN = 6
FEWEST_HEADS = 17  # measured with 32 and 64
COMPARED = 1024  # columns of a tile that are compared with the target at once
ADDED = 1024  # numbers of a program that adds chains
SEGMENT = 64  # tokens whose products are one sum
CHAIN_KEYS = 65536  # of all chains, at most 34 MB of sums
# Keys of a tile, warps and stages of the kernels of queries' and of keys' gradients.
QUERY_TILE, KEY_TILE = (64, 4, 3), (64, 4, 3)


def serves(problem: Problem, device: Device) -> bool:
    """Whether products of all pairs take less time than products of each token with its own columns."""
    if problem.specs["index_q"].dtype != "bfloat16" or device.arch not in (90, INTERPRETER.arch):
        return False
    if problem["I"] < FEWEST_HEADS:
        return False
    # Keys that a token sees on average, twice, if tokens are the last of the keys.
    twice_seen = 2 * problem["N"] - smaller(problem["T"], problem["N"])
    return not problem.has("indices") or twice_seen <= MOST_KEYS_OF_A_COLUMN * problem["K"]


def plan(problem: Problem, device: Device) -> Plan:
    """Parts of tokens whose pairs fit the workspace: target, loss and gradients of each, then the sum of all chains."""
    tokens, keys, dim, indexed = problem["T"], problem["N"], problem["D"], problem.has("indices")
    most = larger(CHAIN_KEYS // larger(keys, 1), 1)
    chain_tokens = larger(cdiv(cdiv(tokens, most), SEGMENT), 1) * SEGMENT
    num_chains = cdiv(tokens, chain_tokens)
    workspace = {"losses": Spec((tokens,), "float32"), "mass": Spec((tokens,), "float32")}
    workspace["finite"] = Spec((tokens,), "int8")
    workspace["chains"] = Spec((num_chains, keys, dim), "float32")
    rows = {"pairs": keys}
    if indexed:
        rows["columns"] = problem["K"]
        workspace |= {name: Spec((tokens,), "int32") for name in ("firsts", "lasts")}
        workspace["finite_keys"] = Spec((cdiv(keys, FINITE_KEYS.value),), "int8")
    if not problem.has("target"):
        rows["own_target"] = num_columns(problem)
    parts = parts_of_tokens(problem, workspace, rows, SEGMENT)
    workspace |= {name: Spec((parts[0].count, row), "float32") for name, row in rows.items()}
    given = problem.stand_ins(ends="index_q", starts="index_q")
    indexer, coeff = Indexer.with_keys(problem, "index_q", "index_k", "index_weights"), float(problem.attrs.coeff)
    origin = columns(problem)
    if indexed:
        ranges, pair_ranges = {"starts": "firsts", "ends": "lasts"}, Ranges(HAS_ENDS=True, HAS_STARTS=True)
    else:
        ranges, pair_ranges = given, origin
    own_target = {} if problem.has("target") else {"target": "own_target"}

    def prepare() -> list[Launch]:
        extent = Launch(
            extent_kernel,
            grid=(tokens,),
            outputs=("firsts", "lasts"),
            arrays=given,
            sizes=column_sizes(problem),
            constexprs={"COLUMNS": origin, "BLOCK_N": COMPARED},
        )
        finite = Launch(
            finite_kernel,
            grid=(cdiv(keys, FINITE_KEYS.value),),
            outputs=("finite_keys",),
            sizes={"num_keys": keys},
            constexprs={"K_STRIDE": indexer.K_STRIDE, "D": dim},
        )
        return [extent, finite]

    def score(part: Rows) -> Launch:
        arrays = {"q": "index_q", "k": "index_k", "weights": "index_weights", "scores": "pairs"}
        return score_ranges(problem, device, indexer, pair_ranges, part, ranges | arrays)

    def compare(part: Rows) -> Launch:
        sizes = {"first_token": part.first, "num_keys": keys}
        constexprs: dict[str, Hashable] = {"COLUMNS": origin, "BLOCK_N": COMPARED}
        if indexed:
            sizes |= {"num_columns": problem["K"], "first_target": part.first if problem.has("target") else 0}
            constexprs["TARGET_STRIDE"] = target_stride(problem)
        return Launch(
            compare_columns_kernel if indexed else compare_ranges_kernel,
            grid=(part.count,),
            outputs=("pairs", "columns", "losses", "mass") if indexed else ("pairs", "losses", "mass"),
            arrays=given | own_target,
            sizes=sizes,
            constexprs=constexprs,
        )

    def differentiate_queries(part: Rows, masked: bool) -> Launch:
        block_n, warps, stages = QUERY_TILE
        # The rows of a wgmma are 64.
        wide = replace(indexer, BLOCK_I=max(indexer.BLOCK_I, 64 if device.arch == 90 else 0))
        constants = Gradient(INDEXER=wide, COLUMNS=pair_ranges, COEFF=coeff, BLOCK_N=block_n)
        return Launch(
            query_gradient_kernel,
            grid=(part.count,),
            outputs=("dindex_q", "dindex_weights", "finite"),
            arrays=ranges | ({} if indexed else {"finite_keys": StandIn("index_q")}),
            sizes={"first_token": part.first, "num_rows": part.count, "num_tokens": tokens, "num_keys": keys},
            constexprs={"C": constants, "SELECTED": indexed, "MASKED": masked},
            num_warps=warps,
            num_stages=stages,
            max_registers=most_registers(warps),
        )

    def differentiate_keys(part: Rows) -> Launch:
        block_n, warps, stages = KEY_TILE
        constants = Products(INDEXER=indexer, COLUMNS=pair_ranges, BLOCK_N=block_n)
        chains = (part.first + part.count - 1) // chain_tokens - part.first // chain_tokens + 1
        return Launch(
            key_gradient_kernel,
            grid=(cdiv(keys, block_n) * chains,),
            outputs=("chains",),
            arrays=ranges,
            sizes={"first_token": part.first, "num_rows": part.count, "chain_tokens": chain_tokens, "num_keys": keys},
            constexprs={"C": constants, "SEGMENT": SEGMENT},
            num_warps=warps,
            num_stages=stages,
            max_registers=most_registers(warps),
        )

    launches = prepare() if indexed else []
    for part in parts:
        launches += [*target(problem, part), score(part), compare(part)]
        launches += [differentiate_queries(part, masked) for masked in ((False, True) if indexed else (False,))]
        launches += [differentiate_keys(part)]
    add = Launch(
        add_chains_kernel,
        grid=(cdiv(keys * dim, ADDED),),
        outputs=("dindex_k",),
        sizes={"num_tokens": tokens, "num_elements": keys * dim, "num_chains": num_chains},
        constexprs={"COEFF": coeff, "BLOCK": ADDED},
    )
    launches += [add, average(problem)]
    results = problem.results
    return Plan(tuple(launches), {**workspace, **results}, tuple(results))
