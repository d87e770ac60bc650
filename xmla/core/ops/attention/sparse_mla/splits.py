"""What the plans of all attention kernels share: splits of the keys, the launch, the combination of the splits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from xmla.core.call import LARGEST_SIZE, Problem
from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.ops.attention.sparse_mla.constants import Attention, Combination, Epilogue, Source
from xmla.core.ops.attention.sparse_mla.kernels import combine_splits_kernel
from xmla.core.plan import Kernel, Launch, Plan, most_registers, overlap_limit
from xmla.core.values import Device, Spec, arithmetic, cdiv, larger, next_power_of_2, smaller

INVARIANT_SPLIT_KEYS = 512
# Splits of a row up to which programs are dealt out by lengths. Of more, finding them costs what it saves: 8 requests
# of V4's M1-4 with 33 to 1000 keys take 20.8 µs dealt out and 23.1 otherwise, 4 of them 18.0 and 18.7, 2 of 26 and 226
# keys 13.7 and 12.7 (H200, 2026-11-30).
MOST_DEALT = 4
MOST_SPLITS = 4096  # more cost the combination more than they save


@dataclass(frozen=True, slots=True)
class Config:
    """A program's tile: `block_h` heads against `block_n` keys, software-pipelined over `num_stages`.

    `programs`: the occupancy, in programs per SM.
    `powers`: so many groups of a split's dims are float16 over a power of two each; 0 if they are float32.
    `alone`: whether an SM never holds two programs, so that they may start as early as they like (`Launch.spreads`).
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1
    powers: int = 0
    alone: bool = False


@arithmetic
@lru_cache(maxsize=1 << 12)  # families that differ elsewhere ask the same
def count_splits(programs: int, keys: int, config: Config, device: Device) -> int:
    """The number of key splits with the fewest sequential tile steps: full waves, but a split costs about four tiles.

    Combining them costs four more, and one per 50 programs, whose partial results are written and read, or per 100 with
    float16 results (H200, 2026-11-21 and 2026-11-24: 13.2 against 14.6 µs for two tokens of 128 heads).
    """
    tiles = cdiv(keys, config.block_n)
    programs_a_tile = 100 if config.powers else 50

    def steps(splits: int) -> float:
        waves = cdiv(programs * splits, device.num_sms * config.programs)
        shared = programs * splits > device.num_sms and config.programs > 1
        step = 1.3 if shared else 1.0  # two programs on an SM, H200, 2026-11-21
        return waves * step * (cdiv(tiles, splits) + 4) + (4 + programs * splits / programs_a_tile if splits > 1 else 0)

    return min(split_counts(tiles), key=steps)


@lru_cache(maxsize=1 << 10)
def split_counts(tiles: int) -> tuple[int, ...]:
    """The fewest splits for each number of tiles that a split may have: more of them only cost more."""
    counts = [1]
    while counts[-1] < min(tiles, MOST_SPLITS):
        counts.append(cdiv(tiles, cdiv(tiles, counts[-1]) - 1))
    return tuple(count for count in counts if count <= MOST_SPLITS)


def count_keys(problem: Problem, config: Config) -> int:
    """Keys that a token's programs divide: a second cache's keys start a new tile after the first's last tile."""
    if not problem.has("extra_cache"):
        return problem["K"]
    keys = cdiv(problem["K"], config.block_n) * config.block_n + problem["EXTRA_K"]
    if keys > LARGEST_SIZE:
        problem.unsupported("slots", "K + EXTRA_K", problem["K"] + problem["EXTRA_K"], f"up to {LARGEST_SIZE}")
    return keys


@arithmetic
def warps_of_combination(splits: int, rows: int, config: Config, device: Device) -> int:
    """Warps of a program that combines the splits of a row.

    Of many splits two programs of eight warps on an SM: 4.4 against 6.9 µs for two tokens' 16 (H200, 2026-11-22); in
    more waves four warps: a call for four tokens takes 16.8 against 17.3 µs (2026-11-24). Of few splits two warps, so
    that all programs run at once: a step of 32 requests takes 112.6 against 114.5 µs (2026-11-30).
    """
    if splits > 8 and rows <= 2 * device.num_sms:
        return 8
    return 2 if splits <= 4 and config.powers and device.arch == 90 else 4


def attention_plan(
    problem: Problem, device: Device, kernel: Kernel, config: Config, constants: Callable[..., Attention] = Attention,
    early: tuple[str, ...] = (), dealt: bool | None = None,
) -> Plan:  # fmt: skip
    """The launches of `kernel` over splits of the keys and of their combination.

    `constants` makes the kernel's, which reads the arguments `early` before it waits for earlier launches. `dealt`:
    whether programs of split keys are dealt out among the tokens by their lengths; None of a kernel that cannot.
    """
    specs, attrs = problem.specs, problem.attrs
    tokens, heads = problem["T"], problem["H"]
    head_blocks = cdiv(heads, config.block_h)
    keys = count_keys(problem, config)
    if attrs.batch_invariant:
        splits = max(cdiv(keys, INVARIANT_SPLIT_KEYS), 1)
    else:
        splits = count_splits(tokens * head_blocks, keys, config, device)
    # Whole tiles per split; rounding up may leave fewer splits than asked for.
    split_keys = max(cdiv(cdiv(keys, splits), config.block_n), 1) * config.block_n
    splits = max(cdiv(keys, split_keys), 1)

    programs, usual = tokens * splits, splits  # of each block of heads; of a row
    deals = bool(dealt) and 1 < splits <= MOST_DEALT
    if deals:
        tiles = cdiv(keys, config.block_n)
        programs = larger(programs, smaller(device.num_sms * config.programs // head_blocks, tokens * tiles))
        splits = smaller(tiles, 2 * splits)

    extra, rotate = problem.has("extra_cache"), problem.has("cos_sin")
    workspace: dict[str, Spec] = {}
    if splits > 1:
        workspace = {
            "split_out": Spec((tokens, splits, heads, VALUE_DIMS), "float16" if config.powers else "float32"),
            "split_lse": Spec((tokens, splits, 1 + config.powers, heads), "float32"),
        }
    stand_ins = problem.stand_ins(
        lengths="slots", sink="slots", extra_cache="cache", extra_slots="slots", extra_lengths="slots", cos_sin="slots",
        positions="slots",
    )  # fmt: skip
    attention = constants(
        HEADS=heads,
        Q_STRIDE_T=specs["q"].stride(0),
        Q_STRIDE_H=specs["q"].stride(1),
        SOURCE=Source.with_lengths(problem),
        EXTRA=Source.with_lengths(problem, "extra_") if extra else None,
        SCALE=float(attrs.softmax_scale),
        SPLIT=splits > 1,
        EPILOGUE=Epilogue.of(problem),
        BLOCK_H=config.block_h,
        OVERLAP_LIMIT=overlap_limit(problem, device, *early),
        **({} if dealt is None else {"DEALT": deals}),
    )
    launch = Launch(
        kernel,
        grid=(head_blocks * programs,),
        outputs=("out", "lse"),
        arrays={**stand_ins, **({"out": "split_out", "lse": "split_lse"} if splits > 1 else {})},
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "slot_stride": specs["slots"].stride(0),
            "num_extra_slots": problem["EXTRA_P"] * problem["EXTRA_R"] if extra else 0,
            "num_extra_keys": problem["EXTRA_K"] if extra else 0,
            "extra_slot_stride": specs["extra_slots"].stride(0) if extra else 0,
            "num_positions": problem["S"] if rotate else 0,
            "num_splits": splits,
            "split_keys": split_keys,
            **({} if dealt is None else {"num_tokens": tokens}),
        },
        constexprs={"C": attention},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        spreads=config.alone,
        # With 99 KB of shared memory, and before sm_90, the compiler would spill for a second program on the SM.
        max_registers=most_registers(config.num_warps) if device.arch < 90 or device.arch >= 120 else None,
    )
    results = problem.results
    if splits == 1:
        return Plan((launch,), results, ("out", "lse"))
    # A head's dims are shared among programs where these leave SMs idle. The order of additions follows the parts and
    # the warps: with batch_invariant neither follows the rows.
    alone = not attrs.batch_invariant
    parts = 4 if alone and 4 * tokens * heads <= device.num_sms else 1
    combination = Combination(
        HEADS=heads,
        EPILOGUE=attention.EPILOGUE,
        PARTS=parts,
        POWERS=config.powers,
        SKIP=attention.HAS_LENGTHS,
        MAX_SPLITS=next_power_of_2(splits),
        AT_ONCE=next_power_of_2(usual),
        OVERLAP_LIMIT=device.overlap_limit,
    )
    combine = Launch(
        combine_splits_kernel,
        grid=(tokens * heads * parts,),
        outputs=("out", "lse"),
        arrays=problem.stand_ins(sink="split_lse", cos_sin="split_lse", positions="slots"),
        sizes={"num_splits": splits, "num_positions": problem["S"] if rotate else 0},
        constexprs={"C": combination},
        num_warps=warps_of_combination(usual, tokens * heads, config, device) if alone else 4,
    )
    return Plan((launch, combine), {**workspace, **results}, ("out", "lse"))
