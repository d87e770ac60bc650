from collections.abc import Mapping
from dataclasses import dataclass, replace

from xmla.core.call import Problem
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.indexer_topk.kernels import indexer_topk_kernel
from xmla.core.ops.indexer.key_source import plan_by_logits
from xmla.core.ops.indexer.shared import MAX_ROWS, Keys, Query, head_rows, keys_are_mxfp4
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Constants, Launch, Plan, in_parts, most_registers
from xmla.core.values import INTERPRETER, Device, Spec, cdiv, next_power_of_2

BLOCKS = (2048, 1024, 512)  # keys that are scored before candidates are appended, best first
MAX_K = 8192  # one program selects among its candidates in registers
PROGRAMS_A_SM = 2
# The least tokens, or logits, of a part whose logits are stored: fewer do not pay for their selection (H200,
# 2026-11-22: it takes 13 µs for any row, the logits 35).
PART_TOKENS = 64
PART_LOGITS = 1 << 21


def capacity(k: int, block: int) -> int:
    """Candidates kept per token: at least k and a block, so that a block or more fits between two reductions to k."""
    return next_power_of_2(k + 2 * block)


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of scores: `block_n` keys against the rows of heads of a program's tokens."""

    block_n: int
    warps: int
    stages: int = 3
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topk(Constants):
    """Constants of every kernel that keeps candidates instead of logits."""

    QUERY: Query
    KEYS: Keys
    K: int
    GROUP: int  # tokens of a program
    CAPACITY: int  # candidates of a token
    BLOCK: int  # keys that are scored before candidates are appended
    BLOCK_N: int  # keys of a tile
    WARPS: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTopk(Topk):
    """Constants of the kernel over contiguous keys."""

    KEY_STRIDE: int
    BLOCK_K: int  # indices that are stored at once


def configure(mxfp4: bool, device: Device) -> Config:
    if device.arch in (INTERPRETER.arch, 90):
        return Config(128, 4)  # 4.0 against 5.0 ms with 8 warps at 2048 × 65536 (H200, 2026-11-21); elsewhere 4 spill
    # By mma.sync the compiler would spill for a second program on the SM.
    registers = None if device.has_tensor_memory else most_registers(8)
    if mxfp4 and not device.has_tensor_memory:  # accumulators in registers leave room for few 16-bit keys
        return Config(32 if device.arch >= 120 else 64, 8, 2, registers)
    return Config(128, 8, max_registers=registers)


def plan_in_parts(problem: Problem, device: Device) -> Plan | None:
    """The plan that stores the logits of as many tokens at a time as fit the workspace."""
    keys = problem["N"]
    together = indexer_logits.tokens_a_program(problem, device)

    def part(size: int) -> Plan:
        return plan_by_logits(problem, device, select_topk.OP, arrays_of_tokens(problem, size), k=problem.attrs.k)

    return in_parts(
        problem, part, 4 * max(keys, 1), together, lambda size: size >= PART_TOKENS or size * keys >= PART_LOGITS
    )


def arrays_of_tokens(problem: Problem, tokens: int) -> dict[str, Spec]:
    """The call's arrays of `tokens` of its tokens."""
    rows = {name: problem.specs[name] for name in ("q8", "weights", "starts", "ends")}
    return {name: replace(spec, shape=(tokens, *spec.shape[1:])) for name, spec in rows.items()}


def plan(problem: Problem, device: Device) -> Plan:
    whole = plan_by_logits(problem, device, select_topk.OP, k=problem.attrs.k)
    if whole.workspace_bytes <= problem.attrs.workspace_bytes:
        return whole
    return plan_in_parts(problem, device) or plan_by_candidates(problem, device)


def plan_by_candidates(problem: Problem, device: Device) -> Plan:
    """The plan whose programs keep candidates and no logits."""
    k = problem.attrs.k
    block_i = head_rows(problem)
    group = min(MAX_ROWS // block_i, next_power_of_2(max(problem["T"], 1)))
    groups = cdiv(problem["T"], group)

    def workspace(programs: int, block: int) -> dict[str, Spec]:
        return {
            "candidates": Spec((programs, group, capacity(k, block), 2), "int32"),
            "scores": Spec((programs, group, block), "float32"),
        }

    config = configure(keys_are_mxfp4(problem), device)
    given = problem.attrs.workspace_bytes
    require_room(problem, space(workspace(1, BLOCKS[-1])))
    wanted = max(1, min(groups, device.num_sms * PROGRAMS_A_SM))
    block = next((block for block in BLOCKS if space(workspace(wanted, block)) <= given), BLOCKS[-1])
    programs = min(wanted, given // space(workspace(1, block)))
    launch = Launch(
        indexer_topk_kernel,
        grid=(programs if groups else 0,),
        outputs=("indices", "candidates", "scores"),
        sizes={"num_tokens": problem["T"], "num_keys": problem["N"], "num_groups": groups},
        constexprs={
            "C": RaggedTopk(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                K=k,
                GROUP=group,
                CAPACITY=capacity(k, block),
                BLOCK=block,
                BLOCK_N=config.block_n,
                WARPS=config.warps,
                KEY_STRIDE=problem.specs["keys"].stride(0),
                BLOCK_K=min(2048, max(16, next_power_of_2(k))),
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    return Plan((launch,), {**problem.results, **workspace(programs, block)}, ("indices",))


def space(buffers: Mapping[str, Spec]) -> int:
    """Bytes of a workspace of these buffers."""
    return Plan((), buffers, ()).workspace_bytes


def require_portable(problem: Problem) -> None:
    """Refuse kernels of one architecture, asked for by name, where the logits do not fit."""
    if problem.implementation not in (None, "triton"):
        got = f"{problem.implementation!r} where the logits do not fit workspace_bytes"
        problem.unsupported("implementation", "value", got, "'triton', or more workspace_bytes")


def require_room(problem: Problem, needed: int) -> None:
    """Refuse what the kernels that store no logits do not support: a name, a k, a workspace below `needed` bytes."""
    k, given = problem.attrs.k, problem.attrs.workspace_bytes
    require_portable(problem)
    if k > MAX_K:
        problem.unsupported("k", "value", k, f"at most {MAX_K} where the logits do not fit workspace_bytes")
    if needed > given:
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
