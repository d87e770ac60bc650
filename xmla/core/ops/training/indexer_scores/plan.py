from collections.abc import Mapping
from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.shared import Keys, head_rows
from xmla.core.ops.training.indexer_scores.constants import Indexer, Products, Ranges, Scores, columns
from xmla.core.ops.training.indexer_scores.kernels import indexer_scores_kernel, selected_scores_kernel
from xmla.core.plan import Launch, Plan, Rows
from xmla.core.values import Device, cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Config:
    """A program has `block_n` keys and `block_t` tokens; a product takes as many tokens as fill `rows` rows."""

    block_t: int
    block_n: int
    rows: int
    warps: int
    stages: int


def configure(device: Device) -> Config:
    if device.has_tensor_memory:
        # Of four warps each has whole rows of a product, whose heads a thread then adds alone.
        return Config(64, 128, 128, 4, 2)
    if device.arch == 90:
        # Two programs an SM, by shared memory and registers: one adds heads while another multiplies.
        return Config(64, 128, 128, 8, 2)
    return Config(64, 128, 64, 8, 3)


def column_sizes(problem: Problem) -> dict[str, int]:
    return {"num_keys": problem["N"], "num_columns": num_columns(problem)}


def num_columns(problem: Problem) -> int:
    return problem["K" if problem.has("indices") else "N"]


def plan(problem: Problem, device: Device) -> Plan:
    if problem.has("indices"):
        launch = _selected(problem)
    else:
        whole, arrays = Rows(0, problem["T"]), problem.stand_ins(ends="q", starts="q")
        launch = score_ranges(problem, device, Indexer.with_keys(problem), Ranges.of(problem), whole, arrays)
    return Plan((launch,), problem.results, ("scores",))


def score_ranges(
    problem: Problem, device: Device, indexer: Indexer, ranges: Ranges, tokens: Rows, arrays: Mapping[str, str]
) -> Launch:
    """Write the scores of these tokens over ranges, −inf beyond, to the array `scores`."""
    config = configure(device)
    block_t = min(config.block_t, next_power_of_2(max(tokens.count, 1)))
    constants = Scores(
        INDEXER=indexer,
        COLUMNS=ranges,
        KEYS=Keys.plain(problem, device),
        BLOCK_T=block_t,
        GROUP=min(block_t, max(config.rows // head_rows(problem), 1)),
        BLOCK_N=config.block_n,
    )
    return Launch(
        indexer_scores_kernel,
        grid=(cdiv(tokens.count, block_t) * cdiv(problem["N"], config.block_n),),
        outputs=("scores",),
        arrays=arrays,
        sizes={"first_token": tokens.first, "num_rows": tokens.count, "num_keys": problem["N"]},
        constexprs={"C": constants},
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _selected(problem: Problem) -> Launch:
    block_n = 64
    constants = Products(INDEXER=Indexer.with_keys(problem), COLUMNS=columns(problem), BLOCK_N=block_n)
    return Launch(
        selected_scores_kernel,
        grid=(problem["T"] * cdiv(problem["K"], block_n),),
        outputs=("scores",),
        arrays=problem.stand_ins(ends="q", starts="q"),
        sizes=column_sizes(problem),
        constexprs={"C": constants},
    )
