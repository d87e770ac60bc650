import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import PLAIN_V4, V4, V4_MXFP4, V4_NVFP4, V41, V41_FOOTER, V41_FP4, V41_FP4_FOOTER, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, naming, normal

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def angles(positions: int, rope: int = 64) -> np.ndarray:
    """Cosines and sines [S, E] of a rope."""
    angle = np.arange(positions)[:, None] * 160000.0 ** (-np.arange(rope // 2) / (rope // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def make_case(
    starts: tuple[int, ...], new: int, ratio: int, layout: MlaLayout | IndexerLayout, entries: int, state_entries: int,
    dtype: np.dtype = BF16, padding: int = 0, with_ids: bool = False, ring: bool = False, rope: int = 64,
    series: int | None = None, known: int | None = None, **attrs: object,
) -> Case:  # fmt: skip
    """Requests that have `starts` tokens each and get `new` more; by default two series at ratio 4 and below.

    `known`: positions that have angles, by default all. The entry that begins past them is not written.
    """
    packed = isinstance(layout, IndexerLayout) or layout.packed
    dim = layout.dim if isinstance(layout, IndexerLayout) else layout.dims
    series = series or (2 if ratio <= 4 else 1)

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        requests, width, longest = len(starts), series * dim, max(starts) + new
        columns = -(-longest // state_entries)
        owned = -(-(new + series * ratio - 1) // state_entries) if ring else columns
        own = rng.permutation(requests * owned + 2)[: requests * owned].reshape(requests, owned)
        state_table = np.ascontiguousarray(own[:, np.arange(columns) % owned], np.int32)
        # Only what a window can reach holds states: the tokens before the new ones.
        state = empty_pages(requests * owned + 2, state_entries, 2 * width, F32, padding)
        for row, start in zip(state_table, starts, strict=True):
            past = np.arange(max(0, start - series * ratio + 1), start)
            state[row[past // state_entries], past % state_entries] = normal(rng, len(past), 2 * width, dtype=F32)
        pages = -(-(longest // ratio) // entries) + 1
        block_table = rng.permutation(requests * pages + 1)[: requests * pages].reshape(requests, pages)
        order = rng.permutation(requests * new) if with_ids else np.arange(requests * new)
        positions = np.array(starts).repeat(new)[order] + order % new
        owners = order // new
        if with_ids:  # two tokens of padding
            positions, owners = np.append(positions, [-1, 3]), np.append(owners, [0, -1])
        inputs = {
            "kv": normal(rng, len(positions), width, dtype=dtype, scale=0.5),
            "score": normal(rng, len(positions), width, dtype=dtype, scale=2.0),
            "ape": normal(rng, ratio, width, dtype=F32),
            "norm_weight": normal(rng, dim, dtype=dtype, scale=0.3) + dtype.type(1),
            "cos_sin": angles(known or longest, rope).astype(F32 if rope == 64 else dtype),
            "positions": positions.astype(np.int32),
            "state": state,
            "state_table": state_table,
            "cache": empty_pages(
                requests * pages + 1, entries, layout.row, np.dtype(np.uint8) if packed else BF16, padding
            ),
            "block_table": block_table.astype(np.int32),
        }
        if with_ids:
            inputs["request_ids"] = owners.astype(np.int32)
        if len(starts) > 1:
            state_table[0, 0], inputs["block_table"][-1, -1] = requests * owned + 2, -1
        return inputs

    name = layout.name if isinstance(layout, MlaLayout) else f"keys{dim}-{layout.format}"
    kind = "ring" if ring else "pages"
    least = "" if known is None else f"-angles{known}"
    named = naming(layout) if isinstance(layout, IndexerLayout) else {}
    return Case(f"{name}-b{len(starts)}-new{new}-ratio{ratio}-page{entries}-{kind}{least}", make, named | attrs)


CASES = (
    make_case((0,), 9, 4, V4, 64, 4),
    make_case((7, 0, 30), 9, 4, V4, 3, 8, padding=64, with_ids=True, scale_floor="scale"),
    make_case((130, 250), 8, 128, V4, 2, 8, dtype=F16, ring=True),
    make_case((11, 6), 2, 4, IndexerLayout(128), 64, 4, padding=4, eps=1e-3),
    make_case((3, 17), 7, 4, IndexerLayout(64), 5, 4, dtype=F16, rope=32, with_ids=True),
    make_case((5, 2), 7, 4, IndexerLayout(128, "mxfp4"), 3, 4, padding=8),
    make_case((4, 3), 4, 4, V41, 61, 4, ring=True, cache_format="v41"),
    make_case((6,), 6, 5, V41_FP4, 2, 3, padding=16, cache_format="v41_fp4"),
    make_case((3,), 3, 2, V41_FOOTER, 3, 2, padding=5, cache_format="v41_footer"),
    make_case((4,), 3, 2, V41_FP4_FOOTER, 53, 2, cache_format="v41_fp4_footer"),
    make_case((5,), 5, 4, V4_NVFP4, 5, 4, padding=2),
    make_case((4,), 5, 4, V4_MXFP4, 5, 3, cache_format="v4_mxfp4"),
    make_case((2, 1), 3, 2, PLAIN_V4, 53, 1, dtype=F32, padding=8),
    make_case((1,), 7, 4, V4, 3, 4, known=4),
    make_case((3, 17), 7, 4, IndexerLayout(64), 5, 4, rope=32, known=20),
    make_case((5, 2), 7, 4, IndexerLayout(128, "fp8_ue8m0"), 3, 4),
    make_case((11, 6), 6, 4, IndexerLayout(128), 64, 4, padding=4, hadamard=True),
    make_case((7,), 9, 3, IndexerLayout(64), 5, 4, rope=32, with_ids=True, hadamard=True),
    make_case((3, 4), 5, 2, IndexerLayout(32, "mxfp4"), 3, 4, dtype=F16, rope=16, hadamard=True),
    make_case((0,), 257, 128, IndexerLayout(128, "mxfp4"), 1, 4, hadamard=True),
)
