from dataclasses import dataclass, replace

from xmla.core.device import Device
from xmla.core.layout import IndexerLayout
from xmla.core.op import E4M3, Problem
from xmla.core.ops.indexer_logits.gluon_sm90 import KEYS, ROWS, indexer_logits_sm90_kernel
from xmla.core.ops.indexer_logits.kernels import indexer_logits_kernel
from xmla.core.plan import Launch, Plan, cdiv, next_power_of_2

MAX_ROWS = 128  # rows of one matrix product: heads of the tokens that share a tile of keys
INPUTS = ("q8", "weights", "keys", "key_scales", "starts", "ends")
# Keys of a program of the Hopper kernel: 1902 µs with 1024, 2043 with 2048 at 2048 × 65536 (H200, 2026-11-22).
CHUNKS = (1024, 512, 256, 128)
PROGRAMS_A_SM = 3  # of the Hopper kernel
REGISTERS = 168  # so that they fit


@dataclass(frozen=True, slots=True)
class Config:
    """A program has `block_n` keys and `block_t` tokens, as many a product as `max_rows` rows of heads hold."""

    block_t: int
    block_n: int
    max_rows: int
    warps: int
    stages: int
    max_registers: int | None = None


def configure(mxfp4: bool, device: Device) -> Config:
    # Best of the tiles probed on an H200, 2026-11-21: 256 keys with 8 warps reach 0.93 of it; 939 against 851 TFLOP/s
    # at 2048 × 65536 with 168 registers, three programs an SM.
    warps = 8 if device.arch >= 120 or mxfp4 else 4  # with 4 it spills on sm_121, MXFP4 everywhere
    return Config(64, 128, MAX_ROWS, warps, 3, 168 if device.arch == 90 and not mxfp4 else None)


def keys_are_mxfp4(problem: Problem) -> bool:
    """The format of the paged or contiguous keys, told by the cache's row or by the keys' dtype."""
    if problem.has("cache"):
        return problem["ROW"] == IndexerLayout(problem["D"], "mxfp4").row
    return problem.specs["keys"].dtype not in E4M3


def query_constexprs(problem: Problem) -> tuple[tuple[str, int], ...]:
    """What every kernel that reads the quantised query knows of it."""
    q8, weights = problem.specs["q8"], problem.specs["weights"]
    return (
        ("Q_STRIDE_T", q8.stride(0)),
        ("Q_STRIDE_I", q8.stride(1)),
        ("WEIGHT_STRIDE", weights.stride(0)),
        ("HEADS", problem["I"]),
        ("D", problem["D"]),
    )


def plan(problem: Problem, device: Device) -> Plan:
    by_hand = problem.takes_by_hand(unmet_by_hand(problem, device))
    launch = launch_by_hand(problem, device) if by_hand else launch_portable(problem, device)
    return Plan((launch,), problem.op.result_specs(problem), ("logits",))


def unmet_by_hand(problem: Problem, device: Device) -> tuple[str, str] | None:
    """What the Hopper kernels are not written for, if the call has it, and what they support there."""
    if device.arch != 90 or keys_are_mxfp4(problem):
        keys = "MXFP4" if keys_are_mxfp4(problem) else "fp8"
        return f"on {device.name} over {keys} keys", "fp8 keys on compute capability 9.0"
    for name, axes in (("q8", (0, 1)), ("cache" if problem.has("cache") else "keys", (0,))):
        if not problem.specs[name].on_multiples(16, axes):
            return f"over rows of {name} between multiples of 16 bytes", "rows on multiples of 16 bytes"
    return None


def head_rows(problem: Problem) -> int:
    """Rows of a product that a token's heads take."""
    return max(16, next_power_of_2(problem["I"]))


def tokens_a_program(problem: Problem, device: Device) -> int:
    """Tokens of a program: a call of one more costs as much as one of so many more."""
    if problem.takes_by_hand(unmet_by_hand(problem, device)):
        return ROWS.value // head_rows(problem)
    return tile(problem, device).block_t


def launch_by_hand(problem: Problem, device: Device) -> Launch:
    groups = cdiv(problem["T"], tokens_a_program(problem, device))

    def steps(chunk: int) -> int:
        """Products in a row: as many as a program has, and about two for its queries, in each wave of programs."""
        programs = groups * cdiv(problem["N"], chunk)
        return cdiv(programs, PROGRAMS_A_SM * device.num_sms) * (chunk // KEYS.value + 2)

    chunk = min(CHUNKS, key=steps)
    return Launch(
        indexer_logits_sm90_kernel,
        grid=(groups * cdiv(problem["N"], chunk),),
        inputs=INPUTS,
        sizes=(0, problem["T"], problem["N"], chunk),
        outputs=("logits",),
        constexprs=(
            *query_constexprs(problem),
            ("KEY_STRIDE", problem.specs["keys"].stride(0)),
            ("BLOCK_I", head_rows(problem)),
        ),
        num_warps=4,
        num_stages=1,
        max_registers=REGISTERS,
    )


def tile(problem: Problem, device: Device) -> Config:
    """The portable kernel's."""
    mxfp4 = keys_are_mxfp4(problem)
    config = configure(mxfp4, device)
    return replace(config, block_t=min(config.block_t, next_power_of_2(max(problem["T"], 1))))


def launch_portable(problem: Problem, device: Device) -> Launch:
    block_i = head_rows(problem)
    config = tile(problem, device)
    return Launch(
        indexer_logits_kernel,
        grid=(cdiv(problem["T"], config.block_t) * cdiv(problem["N"], config.block_n),),
        inputs=INPUTS,
        sizes=(0, problem["T"], problem["N"]),
        outputs=("logits",),
        constexprs=(
            *query_constexprs(problem),
            ("MXFP4", keys_are_mxfp4(problem)),
            ("HOPPER_SUMS", device.arch == 90),
            ("KEY_STRIDE", problem.specs["keys"].stride(0)),
            ("BLOCK_T", config.block_t),
            ("GROUP", min(config.block_t, config.max_rows // block_i)),
            ("BLOCK_N", config.block_n),
            ("BLOCK_I", block_i),
        ),
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
