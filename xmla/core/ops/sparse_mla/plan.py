from dataclasses import dataclass
from math import inf, log

from xmla.core.device import INTERPRETER, Device
from xmla.core.layout import PLAIN, PLAIN_V4, V4, V32, VALUE_DIMS, MlaLayout, mla_layout
from xmla.core.op import LARGEST_SIZE, Problem
from xmla.core.ops.sparse_mla.gluon_sm90.kernel import sparse_mla_sm90_kernel
from xmla.core.ops.sparse_mla.kernels import combine_splits_kernel, sparse_mla_kernel
from xmla.core.ops.sparse_mla.unpack import unpacking
from xmla.core.plan import Kernel, Launch, Plan, cdiv, join, most_registers, next_power_of_2
from xmla.core.spec import Spec

INVARIANT_SPLIT_KEYS = 512
MAX_HEADS = 128
# References an entry of the pool from which on entries are unpacked first: it would pay from 16 on, 4.9 against 6.4 ms
# (H200, 2026-11-21); the rows take 36 bytes a reference at most, as queries and outputs of 32 heads do.
REUSE = 32


@dataclass(frozen=True, slots=True)
class Config:
    """A program's tile: `block_h` heads against `block_n` keys, software-pipelined over `num_stages`.

    `hoist`: what does not change from tile to tile, mostly descriptors of operands, may wait in registers.
    `programs`: as many are to share an SM.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    hoist: bool = False
    programs: int = 1


# Shapes of the Hopper kernel's tiles, which are written into it; the warps of its first partition.
SM90 = Config(64, 64, 4, 1)
SM90_FEW_HEADS = Config(16, 64, 4, 1, programs=2)


def configure(heads: int, query: str, layout: MlaLayout, extra: MlaLayout | None, device: Device) -> Config:
    """The tile for this many heads and queries of this dtype: as wide as registers and shared memory allow."""
    if device.smem_bytes < 128 << 10:
        # SM12x, 99 KB: 87 KB fp8, 55 KB plain. In two stages V4's would take 100 KB; so would 32 keys of two sources.
        if layout.rope_in_value:
            return Config(16, 32, 8, 1)
        return Config(16, 32, 8, 2) if extra is None else Config(16, 16, 8, 2)
    # These are measured on an H200 as they are; all else spills with it, on sm_90 and on sm_100.
    hoist = device.arch == 90 and extra is None and query == "bfloat16" and (layout == V32 or not layout.packed)
    if heads <= 16:
        if device.arch == 90 and extra is None and not layout.packed:
            return Config(16, 64, 4, 2, hoist)  # 496 against 911 µs with 8 warps, 3 stages (H200, 2026-11-21)
        return Config(16, 64, 8, 3 if extra is None else 2, hoist)
    if device.arch >= 100:  # accumulators in tensor memory; 64 keys of plain rows pass 227 KB
        return Config(64, 32, 8, 2)
    if extra is not None or (layout.packed and layout != V32):  # 64 keys spill
        return Config(64, 32, 8, 3)
    # sm_90: 206 TFLOP/s on an H200, 2026-11-21. Tiles of 32 heads spill and miss wgmma; plain rows take 72 KB a stage.
    return Config(64, 64, 8, 3 if layout.packed else 2, hoist)


def count_splits(programs: int, keys: int, config: Config, device: Device) -> int:
    """Splits of the keys that give the fewest tile steps in a row: full waves, but a split costs about four tiles.

    Combining them costs four, and one for 50 programs, whose partial results are written and read (H200, 2026-11-21).
    """
    tiles = cdiv(keys, config.block_n)

    def steps(splits: int) -> float:
        waves = cdiv(programs * splits, device.num_sms * config.programs)
        shared = programs * splits > device.num_sms and config.programs > 1
        step = 1.3 if shared else 1.0  # two programs on an SM, H200, 2026-11-21
        return waves * step * (cdiv(tiles, splits) + 4) + (4 + programs * splits / 50 if splits > 1 else 0)

    return min(range(1, max(tiles, 1) + 1), key=steps)


def plan(problem: Problem, device: Device) -> Plan:
    specs, attrs = problem.specs, problem.attrs
    layout = mla_layout(problem)
    extra = mla_layout(problem, "extra_cache") if problem.has("extra_cache") else None
    tokens, heads, keys = problem["T"], problem["H"], problem["K"]
    if (rows := over_rows(problem, layout, extra, device)) is not None:
        return join([(unpacking(problem, rows), {}), (plan(rows, device), {"cache": "rows"})], ("out", "lse"))
    by_hand = problem.takes_by_hand(unmet_by_hand(problem, layout, extra, device))
    if by_hand:
        config = SM90_FEW_HEADS if few_heads(problem, layout) else SM90
    else:
        # A head's bits depend on its tile: tensor-parallel ranks take that of all heads.
        tile_heads = MAX_HEADS if attrs["batch_invariant"] else heads
        config = configure(tile_heads, specs["q"].dtype, layout, extra, device)
    head_blocks = cdiv(heads, config.block_h)
    if extra is not None:  # tiles do not mix sources
        keys = cdiv(keys, config.block_n) * config.block_n + problem["EXTRA_K"]
        if keys > LARGEST_SIZE:
            problem.unsupported("slots", "K + EXTRA_K", problem["K"] + problem["EXTRA_K"], f"up to {LARGEST_SIZE}")
    if attrs["batch_invariant"]:
        splits = max(cdiv(keys, INVARIANT_SPLIT_KEYS), 1)
    else:
        splits = count_splits(tokens * head_blocks, keys, config, device)
    # Whole tiles a split; rounding up may leave fewer splits than asked for.
    split_keys = max(cdiv(cdiv(keys, splits), config.block_n), 1) * config.block_n
    splits = max(cdiv(keys, split_keys), 1)

    out, lse = ("out", "lse") if splits == 1 else ("split_out", "split_lse")
    sink = (("HAS_SINK", problem.has("sink")),)
    rotate = problem.has("cos_sin")
    rotation = (("ROTATE", rotate), ("COS_SIN_STRIDE", specs["cos_sin"].stride(0) if rotate else 0))
    empty = (("EMPTY_LSE", inf if attrs["empty_lse"] == "+inf" else -inf),)
    units = (("LSE_UNIT", 1.0 if attrs["lse_base"] == "2" else log(2)), ("LSE_SINK", attrs["lse_sink"]))
    inputs = ["q", "cache", "slots", problem.either("lengths", "slots"), problem.either("sink", "slots")]
    inputs += [problem.either(f"extra_{name}", name) for name in ("cache", "slots")]
    inputs += [problem.either(name, "slots") for name in ("extra_lengths", "cos_sin", "positions")]
    sizes = [problem["P"] * problem["R"], problem["K"]]
    sizes += [0, 0] if extra is None else [problem["EXTRA_P"] * problem["EXTRA_R"], problem["EXTRA_K"]]
    sizes.append(problem["S"] if rotate else 0)
    constexprs = (
        ("Q_STRIDE_T", specs["q"].stride(0)),
        ("Q_STRIDE_H", specs["q"].stride(1)),
        ("SLOT_STRIDE", specs["slots"].stride(0)),
        ("PAGE_STRIDE", specs["cache"].stride(0)),
        ("PAGE_SIZE", problem["R"]),
        ("LAYOUT", layout),
        ("EXTRA_SLOT_STRIDE", 0 if extra is None else specs["extra_slots"].stride(0)),
        ("EXTRA_PAGE_STRIDE", 0 if extra is None else specs["extra_cache"].stride(0)),
        ("EXTRA_PAGE_SIZE", 1 if extra is None else problem["EXTRA_R"]),
        ("EXTRA_LAYOUT", extra),
        ("HEADS", heads),
        ("HAS_LENGTHS", problem.has("lengths")),
        ("HAS_EXTRA_LENGTHS", problem.has("extra_lengths")),
        *sink,
        ("SCALE", float(attrs["softmax_scale"])),
        *empty,
        *units,
        ("SPLIT", splits > 1),
        *rotation,
        ("BLOCK_H", config.block_h),
    )
    kernel: Kernel = sparse_mla_sm90_kernel
    if not by_hand:
        kernel = sparse_mla_kernel
        constexprs += (("BLOCK_N", config.block_n), ("HOIST", config.hoist))
    attend = Launch(
        kernel,
        grid=(tokens * head_blocks * splits,),
        inputs=tuple(inputs),
        sizes=(*sizes, splits, split_keys),
        outputs=(out, lse),
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Before sm_90 the compiler would spill for a second program on the SM.
        max_registers=most_registers(config.num_warps) if device.arch < 90 else None,
    )
    results = problem.op.result_specs(problem)
    if splits == 1:
        return Plan((attend,), results, ("out", "lse"))
    workspace = {
        "split_out": Spec((tokens, splits, heads, VALUE_DIMS), "float32"),
        "split_lse": Spec((tokens, splits, heads), "float32"),
    }
    most_splits = next_power_of_2(splits)
    combine = Launch(
        combine_splits_kernel,
        grid=(tokens * heads,),
        inputs=(
            "split_out",
            "split_lse",
            problem.either("sink", "split_lse"),
            problem.either("cos_sin", "split_lse"),
            problem.either("positions", "slots"),
        ),
        sizes=(splits, problem["S"] if rotate else 0),
        outputs=("out", "lse"),
        constexprs=(
            ("HEADS", heads),
            *sink,
            rotation[0],
            ("ROPE", layout.rope),
            rotation[1],
            *empty,
            *units,
            ("MAX_SPLITS", most_splits),
        ),
        num_warps=8 if most_splits > 8 else 4,  # 4.4 against 6.9 µs for two tokens' 16 splits (H200, 2026-11-22)
    )
    return Plan((attend, combine), workspace | results, ("out", "lse"))


def over_rows(problem: Problem, layout: MlaLayout, extra: MlaLayout | None, device: Device) -> Problem | None:
    """The call over rows of q's dtype, to which its entries are unpacked first, if each is referred to often enough.

    The tile of 16 heads converts beside its products at no cost: it keeps the entries as they are. The interpreter
    unpacks as well, so that it runs the kernels for it.
    """
    if device.arch not in (INTERPRETER.arch, 90) or layout not in (V32, V4) or extra is not None:
        return None
    if problem.implementation == "triton" or problem.attrs["batch_invariant"] or few_heads(problem, layout):
        return None
    entries = problem["P"] * problem["R"]
    if not 0 < REUSE * entries <= problem["T"] * min(problem["K"], entries):
        return None
    cache = Spec((problem["P"], problem["R"], layout.dims), problem.specs["q"].dtype)
    attrs = {**problem.attrs, "cache_format": None}
    rows = problem.op.bind({**problem.specs, "cache": cache}, attrs, problem.implementation)
    return None if device.arch == 90 and unmet_by_hand(rows, mla_layout(rows), None, device) else rows


def few_heads(problem: Problem, layout: MlaLayout) -> bool:
    """Whether the Hopper kernel has a tile of 16 heads for the call. It copies entries by 16 bytes."""
    if problem["H"] > SM90_FEW_HEADS.block_h or layout != V32 or problem.attrs["batch_invariant"]:
        return False  # a head's bits depend on its tile: tensor-parallel ranks take that of all heads
    return problem.specs["cache"].on_multiples(16, (0,))


def unmet_by_hand(
    problem: Problem, layout: MlaLayout, extra: MlaLayout | None, device: Device
) -> tuple[str, str] | None:
    """What the Hopper kernel is not written for, if the call has it, and what it supports there."""
    if device.arch != 90 or layout not in (V32, V4, PLAIN, PLAIN_V4):
        known = "'v32', 'v4', 'plain' or 'plain_v4' entries on compute capability 9.0"
        return f"on {device.name} over {layout.name!r} entries", known
    if layout.packed and problem.specs["q"].dtype != "bfloat16":
        return f"for {problem.specs['q'].dtype} queries", "bfloat16"
    if extra is not None and (extra != layout or layout == V32):
        return f"with {extra.name!r} entries beside {layout.name!r} ones", "one source, or two of one format but 'v32'"
    # Copies are of 16 bytes. V3.2's entries are read by words, which every reader of them needs, and so are queries
    # that are converted on their way.
    units = {"q": 4 if layout.packed else 16} | ({} if layout == V32 else {"cache": 16, "extra_cache": 16})
    for name, unit in units.items():
        if problem.has(name) and not problem.specs[name].on_multiples(unit, (0, 1) if name == "q" else (0,)):
            return f"over rows of {name} between multiples of {unit} bytes", f"rows on multiples of {unit} bytes"
    return None
