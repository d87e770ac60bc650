from dataclasses import dataclass, replace

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_logits.kernels import indexer_logits_kernel
from xmla.core.ops.indexer.shared import MAX_ROWS, Keys, Query, head_rows, keys_are_mxfp4
from xmla.core.plan import Constants, Implementation, Launch, Plan
from xmla.core.values import Device, cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Config:
    """A program has `block_n` keys and `block_t` tokens; a product takes as many tokens as fill `MAX_ROWS` rows."""

    block_t: int
    block_n: int
    warps: int
    stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits(Constants):
    """Constants of the portable kernel."""

    QUERY: Query
    KEYS: Keys
    KEY_STRIDE: int
    BLOCK_T: int  # tokens of a program
    GROUP: int  # tokens of a matrix product
    BLOCK_N: int  # keys of a program


def configure(problem: Problem, device: Device) -> Config:
    # Best of the tiles timed on an H200, 2026-11-21: 256 keys with 8 warps reach 0.93 of it; 939 against 851 TFLOP/s
    # at 2048 × 65536 with 168 registers, three programs per SM.
    mxfp4 = keys_are_mxfp4(problem)
    if device.arch >= 120:
        # Two programs of 64 fp8 keys fit an SM: 564 against 621 µs with 128 as its code on an H200, 1024 × 8192. With
        # MXFP4 one does in either case.
        config = Config(64, 128, 8, 3) if mxfp4 else Config(64, 64, 4, 3)
    else:
        warps = 8 if mxfp4 else 4  # 4 spill with MXFP4 on every architecture
        config = Config(64, 128, warps, 3, 168 if device.arch == 90 and not mxfp4 else None)
    return replace(config, block_t=min(config.block_t, next_power_of_2(max(problem["T"], 1))))


def tokens_a_program(problem: Problem, device: Device) -> int:
    return configure(problem, device).block_t


def plan(problem: Problem, device: Device) -> Plan:
    config = configure(problem, device)
    launch = Launch(
        indexer_logits_kernel,
        grid=(cdiv(problem["T"], config.block_t) * cdiv(problem["N"], config.block_n),),
        outputs=("logits",),
        sizes={"first_row": 0, "num_tokens": problem["T"], "num_keys": problem["N"]},
        constexprs={
            "C": Logits(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                KEY_STRIDE=problem.specs["keys"].stride(0),
                BLOCK_T=config.block_t,
                GROUP=min(config.block_t, MAX_ROWS // head_rows(problem)),
                BLOCK_N=config.block_n,
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    return Plan((launch,), problem.results, ("logits",))


IMPLEMENTATION = Implementation("triton", plan, tokens_a_program=tokens_a_program)
