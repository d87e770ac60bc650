from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import BYTES, Op, Problem, Tensor
from xmla.core.ops.read_indexer_cache.cases import CASES
from xmla.core.ops.read_indexer_cache.plan import plan
from xmla.core.ops.read_indexer_cache.reference import reference
from xmla.core.ops.write_indexer_cache import INDEXER_DIMS, check_indexer_pages
from xmla.core.spec import Spec


def read_indexer_cache(cache, slots) -> Any:
    """Gather indexer keys from the paged cache, still quantised: what `indexer_logits` takes. key = keys · key_scales.

    Args:
        cache: [P, R, D+4] uint8, int8 or float8_e4m3fn, D of 32, 64 or 128; scales in the page's footer
            (`write_indexer_cache`). Any page size, page stride a multiple of 4 bytes.
        slots: [T] int32 or int64. A slot outside [0, P·R) gives a key and a scale of zero. Entries no slot names are
            never read.

    Returns:
        keys: [T, D] float8_e4m3fn.
        key_scales: [T] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
    """


def check(problem: Problem) -> None:
    if problem["ROW"] - 4 not in INDEXER_DIMS:
        problem.refuse("cache", "axis ROW (axis 2)", problem["ROW"], "36, 68 or 132 (D + 4)")
    check_indexer_pages(problem)


OP = Op(
    prototype=read_indexer_cache,
    tensors={"cache": Tensor("P R ROW", BYTES), "slots": Tensor("T", ("int32", "int64"))},
    outputs={
        "keys": lambda p: Spec((p["T"], p["ROW"] - 4), "float8_e4m3fn"),
        "key_scales": lambda p: Spec((p["T"],), "float32"),
    },
    check=check,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
