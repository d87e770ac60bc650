from xmla.core.device import Device
from xmla.core.implementation import Implementation
from xmla.core.ops.indexer_scores.constants import Columns, Indexer, Scores
from xmla.core.ops.indexer_scores.kernels import indexer_scores_kernel
from xmla.core.plan import Launch, Plan, cdiv
from xmla.core.problem import Problem


def column_sizes(problem: Problem) -> dict[str, int]:
    return {"num_keys": problem["N"], "num_columns": num_columns(problem)}


def num_columns(problem: Problem) -> int:
    return problem["K" if problem.has("indices") else "N"]


def plan(problem: Problem, device: Device) -> Plan:
    block_n = 64
    launch = Launch(
        indexer_scores_kernel,
        grid=(problem["T"] * cdiv(num_columns(problem), block_n),),
        outputs=("scores",),
        arrays=problem.stand_ins(ends="q", starts="q", indices="q"),
        sizes=column_sizes(problem),
        constexprs={"C": Scores(INDEXER=Indexer.of(problem), COLUMNS=Columns.of(problem), BLOCK_N=block_n)},
    )
    return Plan((launch,), problem.results, ("scores",))


IMPLEMENTATION = Implementation("triton", plan)
