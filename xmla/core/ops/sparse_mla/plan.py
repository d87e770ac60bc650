from dataclasses import dataclass
from math import inf

from xmla.core.device import Device
from xmla.core.layout import mla_layout
from xmla.core.op import Problem
from xmla.core.ops.sparse_mla.gluon_sm90 import sparse_mla_sm90_kernel
from xmla.core.ops.sparse_mla.kernels import combine_splits_kernel, sparse_mla_kernel
from xmla.core.plan import Kernel, Launch, Plan, cdiv
from xmla.core.spec import Spec
from xmla.core.tuned import tuned

INVARIANT_SPLIT_KEYS = 512
COMBINE_HEADS = 4


@dataclass(frozen=True, slots=True)
class Config:
    """A program's tile: `block_h` heads against `block_n` keys, software-pipelined over `num_stages`."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


# The shape of the Hopper kernel's tile, which is written into it.
SM90 = Config(64, 64, 8, 1)


def configure(heads: int, packed: bool, device: Device) -> Config:
    """The tile for this many heads: as wide as registers and shared memory of the architecture allow."""
    if device.smem_bytes < (128 << 10):  # SM12x, 99 KB: 87 KB fp8, 55 KB plain
        return Config(16, 32, 8, 2)
    if heads <= 16:
        return Config(16, 64, 8, 3)
    if device.arch >= 100:  # accumulators in tensor memory; 64 keys of plain rows pass 227 KB
        return Config(64, 32, 8, 2)
    # sm_90: 206 TFLOP/s on an H200, 2026-11-21. Tiles of 32 heads spill and miss wgmma; plain rows take 72 KB a stage.
    return Config(64, 64, 8, 3 if packed else 2)


def count_splits(programs: int, keys: int, config: Config, device: Device) -> int:
    """Splits of the keys that give the fewest tile steps in a row: full waves, but a split costs about four tiles."""
    tiles = cdiv(keys, config.block_n)

    def steps(splits: int) -> int:
        waves = cdiv(programs * splits, device.num_sms)
        return waves * (cdiv(tiles, splits) + 4) + (4 if splits > 1 else 0)

    return min(range(1, max(tiles, 1) + 1), key=steps)


def plan(problem: Problem, device: Device) -> Plan:
    specs, attrs = problem.specs, problem.attrs
    layout = mla_layout(specs["cache"])
    assert layout is not None  # checked by bind
    tokens, heads, keys = problem["T"], problem["H"], problem["K"]
    kind = "packed" if layout.packed else "plain"
    config = tuned("sparse_mla", device, f"h{heads}-{kind}", configure(heads, layout.packed, device))
    by_hand = problem.implementation == "gluon"
    if by_hand:
        if device.arch != 90 or not layout.packed:
            got = f"'gluon' on {device.name} over {layout.name} entries"
            problem.unsupported("implementation", "value", got, "packed entries on compute capability 9.0")
        config = SM90
    head_blocks = cdiv(heads, config.block_h)
    if attrs["batch_invariant"]:
        splits = max(cdiv(keys, INVARIANT_SPLIT_KEYS), 1)
    else:
        splits = count_splits(tokens * head_blocks, keys, config, device)
    # Whole tiles a split; rounding up may leave fewer splits than asked for.
    split_keys = max(cdiv(cdiv(keys, splits), config.block_n), 1) * config.block_n
    splits = max(cdiv(keys, split_keys), 1)

    out, lse = ("out", "lse") if splits == 1 else ("split_out", "split_lse")
    ending = (
        ("HAS_SINK", problem.has("sink")),
        ("EMPTY_LSE", inf if attrs["empty_lse"] == "+inf" else -inf),
    )
    strides = (
        ("Q_STRIDE_T", specs["q"].stride(0)),
        ("Q_STRIDE_H", specs["q"].stride(1)),
        ("SLOT_STRIDE", specs["slots"].stride(0)),
        ("PAGE_STRIDE", specs["cache"].stride(0)),
        ("PAGE_SIZE", problem["R"]),
        ("ROW", layout.row),
    )
    shape = (("SCALE_OFFSET", layout.scale_offset), ("ROPE_OFFSET", layout.rope_offset), ("HEADS", heads))
    inputs = (("HAS_LENGTHS", problem.has("lengths")), *ending[:1], ("SCALE", float(attrs["softmax_scale"])))
    last = (*ending[1:], ("SPLIT", splits > 1))
    kernel: Kernel
    if by_hand:
        kernel, constexprs = sparse_mla_sm90_kernel, (*strides, *shape, *inputs, *last)
    else:
        sizes = (("PACKED", layout.packed), ("LATENT", layout.latent), ("ROPE", layout.rope), ("TILE", layout.tile))
        tile = (("BLOCK_H", config.block_h), ("BLOCK_N", config.block_n))
        kernel, constexprs = sparse_mla_kernel, (*strides, *sizes, *shape, *inputs, *last, *tile)
    attend = Launch(
        kernel,
        grid=(tokens * head_blocks * splits,),
        inputs=("q", "cache", "slots", problem.either("lengths", "slots"), problem.either("sink", "slots")),
        sizes=(problem["P"] * problem["R"], keys, splits, split_keys),
        outputs=(out, lse),
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    results = problem.op.result_specs(problem)
    if splits == 1:
        return Plan((attend,), results, ("out", "lse"))
    workspace = {
        "split_out": Spec((tokens, splits, heads, layout.latent), "float32"),
        "split_lse": Spec((tokens, splits, heads), "float32"),
    }
    combine = Launch(
        combine_splits_kernel,
        grid=(tokens * cdiv(heads, COMBINE_HEADS),),
        inputs=("split_out", "split_lse", problem.either("sink", "split_lse")),
        sizes=(splits,),
        outputs=("out", "lse"),
        constexprs=(
            ("HEADS", heads),
            ("LATENT", layout.latent),
            *ending,
            ("BLOCK_H", COMBINE_HEADS),
        ),
    )
    return Plan((attend, combine), workspace | results, ("out", "lse"))
