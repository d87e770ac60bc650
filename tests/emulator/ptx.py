"""The PTX of `gl.inline_asm_elementwise`: an instruction at a time, on arrays of all threads' registers.

Registers hold bits, unsigned; predicates hold booleans. Branches go forward, to a label; up to there, threads that have
taken one have no effects. Where lanes count, arrays are of all threads in order.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

I8, U8, U16, U32, U64 = (np.dtype(name) for name in ("i1", "u1", "u2", "u4", "u8"))
I32, I64, F32 = (np.dtype(name) for name in ("i4", "i8", "f4"))
BOOL = np.dtype(bool)
WARP = 32
HALF, BRAIN, E4M3 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def _parts(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Registers as vectors of a narrower dtype, the lowest first."""
    return np.ascontiguousarray(x)[..., None].view(dtype)


def _whole(parts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(parts).view(dtype)[..., 0]


def _pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _whole(np.stack([low.astype(HALF), high.astype(HALF)], -1), U32)


def _brain_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _whole(np.stack([low.astype(BRAIN), high.astype(BRAIN)], -1), U32)


def _multiply_pairs(dtype: np.dtype) -> Callable[..., np.ndarray]:
    return lambda a, b: _whole(_parts(a, dtype) * _parts(b, dtype), U32)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(F32)


def _fma_pair(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return _whole(_fma(*(_parts(x, F32) for x in (a, b, c))), U64)


def _exp2_flushed(x: np.ndarray) -> np.ndarray:
    result = np.exp2(x)
    return np.where(result < np.float32(2.0**-126), np.float32(0), result)


def _floor(x: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num(np.floor(x.astype(np.float64))), -(2**31), 2**31 - 1).astype(I32)


def _of_other_lanes(x: np.ndarray, mask: np.ndarray, clamp: np.ndarray, members: np.ndarray) -> np.ndarray:
    if (clamp != WARP - 1).any() or (members != 2**WARP - 1).any():
        raise NotImplementedError("shuffles of a part of a warp")
    return np.take_along_axis(x.reshape(-1, WARP), (_lanes(x) ^ mask).reshape(-1, WARP).astype(np.int64), 1).reshape(-1)


def _of_lane(x: np.ndarray, lane: np.ndarray, clamp: np.ndarray, members: np.ndarray) -> np.ndarray:
    if (clamp != WARP - 1).any() or (members != 2**WARP - 1).any():
        raise NotImplementedError("shuffles of a part of a warp")
    return np.take_along_axis(x.reshape(-1, WARP), lane.reshape(-1, WARP).astype(np.int64), 1).reshape(-1)


def _of_lane_before(
    x: np.ndarray, distance: np.ndarray, clamp: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The register of the lane `distance` before, and whether there is one; the lane's own if not."""
    if clamp.any() or (members != 2**WARP - 1).any():
        raise NotImplementedError("shuffles of a part of a warp")
    there = _lanes(x) >= distance
    lane = np.where(there, _lanes(x) - distance, _lanes(x)).reshape(-1, WARP).astype(np.int64)
    return np.take_along_axis(x.reshape(-1, WARP), lane, 1).reshape(-1), there


def _lanes(x: np.ndarray) -> np.ndarray:
    return (np.arange(x.size) % WARP).astype(U32)


def _chosen(x: np.ndarray, y: np.ndarray, first: np.ndarray) -> np.ndarray:
    return np.where(first, x, y)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    if (selector & 0x8888).any():
        raise NotImplementedError("replicated signs")
    pool = np.concatenate(np.broadcast_arrays(_parts(a, U8), _parts(b, U8)), -1)
    chosen = (selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 7
    return _whole(np.take_along_axis(pool, chosen.astype(np.int64), -1), U32)


def _mad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(c.dtype) * b.astype(c.dtype) + c


def _dot_of_bytes(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    return (_parts(a, U8).astype(U32) * _parts(b, U8)).sum(-1, dtype=U32) + c


def _add_down(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two floats, rounded towards −∞; float64 has it exactly where the parts are not too far apart."""
    exact = a.astype(np.float64) + b
    rounded = exact.astype(F32)
    return np.where(rounded > exact, np.nextafter(rounded, F32.type(-np.inf)), rounded)


# Of each instruction the dtypes as which it takes its sources, and what it computes of them.
INSTRUCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "mov.b32": ((U32,), lambda a: a),
    "mov.u32": ((U32,), lambda a: a),
    "mov.b64": ((U64,), lambda a: a),
    "cvt.rn.f16x2.e4m3x2": ((U16,), lambda a: _whole(_parts(a, E4M3).astype(F32).astype(HALF), U32)),
    "cvt.rn.f16x2.f32": ((F32, F32), _pair),
    "cvt.rn.bf16x2.f32": ((F32, F32), _brain_pair),
    "cvt.f32.f16": ((HALF,), lambda a: a.astype(F32)),
    "cvt.rmi.s32.f32": ((F32,), _floor),
    "cvt.s32.s8": ((U32,), lambda a: a.astype(I8).astype(I32)),
    "cvt.u16.u32": ((U32,), lambda a: a.astype(U16)),
    "cvt.u32.u16": ((U16,), lambda a: a.astype(U32)),
    "cvt.s64.s32": ((I32,), lambda a: a.astype(I64)),
    "prmt.b32": ((U32, U32, U32), _permuted),
    "mul.f16x2": ((U32, U32), _multiply_pairs(HALF)),
    "mul.bf16x2": ((U32, U32), _multiply_pairs(BRAIN)),
    "mul.f32": ((F32, F32), np.multiply),
    "add.f32": ((F32, F32), np.add),
    "add.rm.f32": ((F32, F32), _add_down),
    "fma.rn.f32": ((F32, F32, F32), _fma),
    "fma.rn.f32x2": ((U64, U64, U64), _fma_pair),
    "abs.f32": ((F32,), np.abs),
    "max.f32": ((F32, F32), np.fmax),
    "ex2.approx.ftz.f32": ((F32,), _exp2_flushed),
    "and.b32": ((U32, U32), np.bitwise_and),
    "or.b32": ((U32, U32), np.bitwise_or),
    "shl.b32": ((U32, U32), lambda a, b: np.where(b < 32, a << (b & 31), np.uint32(0))),
    "shr.s32": ((I32, U32), lambda a, b: a >> np.minimum(b, np.uint32(31)).astype(I32)),
    "shr.u32": ((U32, U32), lambda a, b: np.where(b < 32, a >> (b & 31), np.uint32(0))),
    "bfe.u32": ((U32, U32, U32), lambda a, first, count: (a >> first) & ((np.uint32(1) << count) - 1)),
    "add.s32": ((I32, I32), np.add),
    "add.s64": ((I64, I64), np.add),
    "add.u32": ((U32, U32), np.add),
    "sub.u32": ((U32, U32), np.subtract),
    "mad.lo.u32": ((U32, U32, U32), _mad),
    "dp4a.u32.u32": ((U32, U32, U32), _dot_of_bytes),
    "popc.b32": ((U32,), lambda a: np.bitwise_count(a).astype(U32)),
    "clz.b32": ((U32,), lambda a: (WARP - np.frexp(a.astype(np.float64))[1]).astype(U32)),
    "neg.s32": ((I32,), np.negative),
    "mad.wide.s32": ((I32, I32, I64), _mad),
    "mad.wide.u32": ((U32, U32, U64), _mad),
    "setp.ne.s32": ((I32, I32), np.not_equal),
    "setp.ne.b32": ((U32, U32), np.not_equal),
    "setp.ne.b64": ((U64, U64), np.not_equal),
    "setp.lt.u32": ((U32, U32), np.less),
    "setp.gt.u32": ((U32, U32), np.greater),
    "setp.eq.u32": ((U32, U32), np.equal),
    "setp.gt.f32": ((F32, F32), np.greater),
    "setp.lt.f32": ((F32, F32), np.less),
    "setp.lt.and.f32": ((F32, F32, BOOL), lambda a, b, c: (a < b) & c),
    "setp.ge.s32": ((I32, I32), np.greater_equal),
    "setp.lt.s32": ((I32, I32), np.less),
    "setp.ne.u32": ((U32, U32), np.not_equal),
    "setp.eq.or.u32": ((U32, U32, BOOL), lambda a, b, c: (a == b) | c),
    "setp.le.s32": ((I32, I32), np.less_equal),
    "setp.eq.and.f32": ((F32, F32, BOOL), lambda a, b, c: (a == b) & c),
    "setp.gt.or.f32": ((F32, F32, BOOL), lambda a, b, c: (a > b) | c),
    "setp.eq.f32": ((F32, F32), np.equal),
    "setp.num.f32": ((F32, F32), lambda a, b: ~np.isnan(a) & ~np.isnan(b)),
    "setp.ge.or.f32": ((F32, F32, BOOL), lambda a, b, c: (a >= b) | c),
    "setp.geu.or.f32": ((F32, F32, BOOL), lambda a, b, c: ~(a < b) | c),
    "selp.b16": ((U16, U16, BOOL), _chosen),
    "selp.b32": ((U32, U32, BOOL), _chosen),
    "selp.f32": ((U32, U32, BOOL), _chosen),
    "selp.b64": ((U64, U64, BOOL), _chosen),
    "shfl.sync.bfly.b32": ((U32, U32, U32, U32), _of_other_lanes),
    "shfl.sync.idx.b32": ((U32, U32, U32, U32), _of_lane),
    "shfl.sync.up.b32": ((U32, U32, U32, U32), _of_lane_before),
    "createpolicy.fractional.L2::evict_last.b64": ((), lambda: np.zeros(1, U64)),
}
STATEMENT = re.compile(r"(?:@(!?)(\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
CACHE_HINT = ".L2::cache_hint"  # what it asks for concerns time alone
SOURCE = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class _Statement(NamedTuple):
    label: str  # before it, or ""
    negated: bool
    guard: str | None
    opcode: str
    arguments: list[str]


@cache
def _statements(asm: str) -> list[_Statement]:
    found = []
    body = asm.strip()
    for text in body[1:-1].split(";") if body.startswith("{") else body.split(";"):
        label, _, after = text.strip().rpartition(":\n")
        statement = after.strip()
        if not statement or statement.startswith(".reg") or statement.endswith(":"):
            continue
        negated, guard, opcode, rest = STATEMENT.fullmatch(statement).groups()
        arguments = [part.strip() for part in SOURCE.findall(rest)]
        found.append(_Statement(label, bool(negated), guard, opcode.replace(CACHE_HINT, ""), arguments))
    return found


class _Thread:
    """The registers of all threads."""

    def __init__(self, operands: dict[str, np.ndarray]) -> None:
        self.registers: dict[str, np.ndarray] = dict(operands)
        self.numbers: dict[tuple[str, np.dtype], np.ndarray] = {}
        self.shape = np.broadcast_shapes(*(x.shape for x in operands.values()))

    def read(self, text: str, dtype: np.dtype) -> np.ndarray:
        if text == "%laneid":
            return _lanes(np.empty(self.shape))
        if text in self.registers:
            value = self.registers[text]
            return value if dtype.kind == "b" else value.view(dtype)
        if text.startswith("{"):
            parts = [self.read(part.strip(), np.dtype(f"u{dtype.itemsize // 2}")) for part in text[1:-1].split(",")]
            return _whole(np.stack(np.broadcast_arrays(*parts), -1), dtype)
        if (text, dtype) not in self.numbers:
            number = int(text[2:], 16) if text.startswith("0f") else int(text, 0) % 2 ** (8 * dtype.itemsize)
            self.numbers[text, dtype] = np.full(self.shape, number, f"u{dtype.itemsize}").view(dtype)
        return self.numbers[text, dtype]

    def write(self, text: str, value: Any, affected: np.ndarray | None = None) -> None:
        """Write a register, or two of them as `a|b`; those of `affected` threads alone, if that is given."""
        if "|" in text:
            for name, part in zip(text.split("|"), value, strict=True):
                self.write(name, part, affected)
            return
        if value.shape != self.shape:
            value = np.broadcast_to(value, self.shape)
        names = [name.strip() for name in text[1:-1].split(",")] if text.startswith("{") else [text]
        if affected is not None and all(name in self.registers for name in names):
            value = np.where(affected, value, self.read(text, value.dtype))
        if text.startswith("{"):
            halves = _parts(value, np.dtype(f"u{value.dtype.itemsize // 2}"))
            self.registers |= {name: halves[..., i] for i, name in enumerate(names)}
        else:
            self.registers[text] = value if value.dtype.kind == "b" else value.view(f"u{value.dtype.itemsize}")

    def address(self, text: str, dtype: np.dtype = I64) -> np.ndarray:
        name, _, offset = text[1:-1].partition("+")
        return self.read(name.strip(), dtype) + dtype.type(int(offset or 0))


class SharedMemory(Protocol):
    """Shared memory as instructions access it: words of 32 bits at addresses in bytes, a thread after the other."""

    def put(self, addresses: np.ndarray, words: np.ndarray) -> None: ...
    def add(self, addresses: np.ndarray, words: np.ndarray) -> np.ndarray: ...
    def fence(self) -> None: ...


def run(
    asm: str, outputs: int, operands: Sequence[np.ndarray], add: Callable[[np.ndarray, np.ndarray], None],
    shared: SharedMemory | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """The output registers of `asm`; `operands` are the bits of the inputs. `add` adds values at global addresses."""
    threads = _Thread({f"${outputs + i}": value for i, value in enumerate(operands)})
    active = np.ones(threads.shape, bool)
    some = everybody = True  # whether any thread, and whether each of them is active
    jumped: dict[str, np.ndarray] = {}
    for label, negated, guard, opcode, arguments in _statements(asm):
        if label:
            active = active | jumped.pop(label, False)
            some, everybody = active.any(), active.all()
        if not some:
            continue
        affected = active
        if guard:
            affected = active & (threads.read(guard, BOOL) ^ negated)
        if opcode == "bra":
            (target,) = arguments
            jumped[target] = jumped.get(target, False) | affected
            active = active & ~affected
            some, everybody = active.any(), active.all()
        elif opcode == "red.relaxed.gpu.global.add.u64":
            add(threads.address(arguments[0])[affected], threads.read(arguments[1], U64)[affected])
        elif opcode == "red.relaxed.gpu.global.add.u32":
            add(threads.address(arguments[0])[affected], threads.read(arguments[1], U32)[affected])
        elif opcode == "red.relaxed.gpu.global.add.v4.f32":
            addresses, names = threads.address(arguments[0])[affected], arguments[1][1:-1].split(",")
            if (addresses % 16).any():
                raise ValueError(f"{opcode}: addresses between multiples of 16 bytes")
            for i, name in enumerate(names):
                add(addresses + 4 * i, threads.read(name.strip(), F32)[affected])
        elif opcode in ("st.shared.b32", "st.shared.v2.b32"):
            addresses, names = threads.address(arguments[0], U32)[affected], arguments[1].strip("{}").split(",")
            for i, name in enumerate(names):
                shared.put(addresses + np.uint32(4 * i), threads.read(name.strip(), U32)[affected])
        elif opcode == "atom.shared.add.u32":
            old = np.zeros(threads.shape, U32)
            old[affected] = shared.add(
                threads.address(arguments[1], U32)[affected], threads.read(arguments[2], U32)[affected]
            )
            threads.write(arguments[0], old, affected)
        elif opcode == "fence.release.sync_restrict::shared::cta.cluster":
            shared.fence()
        elif opcode != "prefetch.global.L2":
            dtypes, compute = INSTRUCTIONS[opcode]
            sources = [threads.read(text, dtype) for text, dtype in zip(arguments[1:], dtypes, strict=True)]
            threads.write(arguments[0], compute(*sources), affected if guard or not everybody else None)
    return [threads.registers[f"${i}"] for i in range(outputs)]
