from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import INDEXER_FORMATS, indexer_layouts
from xmla.core.op import BYTES, Op, Problem, Tensor
from xmla.core.ops.read_indexer_cache.cases import CASES
from xmla.core.ops.read_indexer_cache.plan import layouts_of, plan
from xmla.core.ops.read_indexer_cache.reference import reference
from xmla.core.ops.write_indexer_cache import check_indexer_pages
from xmla.core.spec import Spec


def read_indexer_cache(cache, slots, *, cache_format: str | None = None) -> Any:
    """Gather indexer keys from the paged cache, still quantised: what `indexer_logits` takes.

        fp8:    key = keys · key_scales
        mxfp4:  key = e2m1(keys) · 2 ** (byte d/32 of key_scales − 127) for dim d

    Args:
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, scales in the page's footer (`write_indexer_cache`). ROW is D+4
            (fp8) or D/2+4 (mxfp4), D of 32, 64 or 128. Any page size, pages start on multiples of 4 bytes.
        slots: [T] int32 or int64. A slot outside [0, P·R) gives a key and scales of zero bytes. Entries no slot names
            are never read.
        cache_format: "fp8" or "mxfp4". Needed where rows of both have ROW bytes: 36 and 68.

    Returns:
        keys: [T, D] float8_e4m3fn, or [T, D/2] uint8, two dims a byte, the even one in the low nibble.
        key_scales: [T] float32, or [T] int32, a UE8M0 byte a block of 32 dims, the first in the lowest byte: one word a
            row, as DeepGEMM takes them.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; both formats have rows of this size and none is given.
    """


def check(problem: Problem) -> None:
    row, form = problem["ROW"], problem.attrs["cache_format"]
    if form not in (None, *INDEXER_FORMATS):
        problem.refuse("cache_format", "value", repr(form), " or ".join(map(repr, INDEXER_FORMATS)))
    found = layouts_of(problem)
    if not found:
        expected = {None: "36, 68 or 132 (fp8: D + 4) or 20, 36 or 68 (mxfp4: D/2 + 4)",
                    "fp8": "36, 68 or 132 (fp8: D + 4)", "mxfp4": "20, 36 or 68 (mxfp4: D/2 + 4)"}[form]  # fmt: skip
        problem.refuse("cache", "axis ROW (axis 2)", row, expected)
    if len(found) > 1:
        choices = " or ".join(f"{layout.format!r} (D {layout.dim})" for layout in indexer_layouts(row))
        problem.refuse("cache_format", "value", None, f"{choices}: rows of {row} bytes are those of both")
    check_indexer_pages(problem)


OP = Op(
    prototype=read_indexer_cache,
    tensors={"cache": Tensor("P R ROW", BYTES), "slots": Tensor("T", ("int32", "int64"), index_of="P R")},
    outputs={
        "keys": lambda p: Spec((p["T"], layouts_of(p)[0].value_bytes), layouts_of(p)[0].dtypes[0]),
        "key_scales": lambda p: Spec((p["T"],), layouts_of(p)[0].dtypes[1]),
    },
    check=check,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
