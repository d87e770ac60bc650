"""What the lightning indexer's ops share: rules of the quantised query and the keys, grouping of tokens, work.

Device code that its kernels share is in `xmla.core.lang.indexer`.
"""

from dataclasses import dataclass
from typing import Any, Self

from xmla.core.call import (
    E4M3,
    Problem,
    Result,
    Tensor,
    Work,
    all_but_pools_once,
    check_indexer_dim,
    check_requests,
    tokens_a_request,
)
from xmla.core.formats.indexer import UE8M0_DIMS, IndexerLayout
from xmla.core.plan import ON_HOPPER, Condition, Constants
from xmla.core.values import LOGITS, Device, cdiv, larger, next_power_of_2, smaller

MAX_HEADS = 128
MAX_ROWS = 128  # rows of one matrix product: heads of the tokens that share a tile of keys
QUERY = Tensor("T I D", (*E4M3, "bfloat16"))


def logits_of(axes: str, **more: Any) -> Result:
    """Logits as a result, of the dtype that `logits_dtype` names."""
    return Result(axes, lambda problem: problem.attrs.logits_dtype, agreement=LOGITS, **more)


def check_logits_dtype(problem: Problem) -> None:
    dtype = problem.attrs.logits_dtype
    if dtype not in ("float32", "bfloat16"):
        problem.refuse("logits_dtype", "value", repr(dtype), "'float32' or 'bfloat16'")


def check_heads(problem: Problem, query: str, most: int = MAX_HEADS) -> None:
    """Refuse more than `most` heads, and none: their sum is 0, where a kernel makes NaN of a key that is NaN."""
    if problem["I"] < 1:
        problem.refuse(query, "axis I (axis 1)", problem["I"], "at least 1")
    if problem["I"] > most:
        problem.unsupported(query, "axis I (axis 1)", problem["I"], f"at most {most} indexer heads")


def check_keys(problem: Problem) -> None:
    """Rules of the query and of its keys."""
    if problem.has("cache"):
        _check_query(problem)
        check_requests(problem, "q8")
    else:
        _check_contiguous(problem)
        _check_query(problem)


def _check_query(problem: Problem) -> None:
    """Rules of the quantised query `q8`: only MXFP4 keys are multiplied in bfloat16."""
    check_indexer_dim(problem)
    check_heads(problem, "q8")
    if problem.specs["q8"].dtype not in E4M3 and not keys_are_mxfp4(problem):
        problem.refuse("q8", "dtype", problem.specs["q8"].dtype, "float8_e4m3fn for fp8 keys")


def _check_contiguous(problem: Problem) -> None:
    """Rules of contiguous keys, whose dtype determines their format."""
    check_indexer_dim(problem)
    form = key_format(problem)
    if form == "fp8_ue8m0" and problem["D"] not in UE8M0_DIMS:
        form = "fp8"
    layout = IndexerLayout(problem["D"], form)
    if problem["ROW"] != layout.value_bytes:
        width = f"{layout.value_bytes} ({'D/2' if layout.format == 'mxfp4' else 'D'})"
        problem.refuse("keys", "axis ROW (axis 1)", problem["ROW"], f"{width} of {problem.specs['keys'].dtype}")
    if problem.specs["key_scales"].dtype != layout.dtypes[1]:
        expected = f"{layout.dtypes[1]} beside keys of {problem.specs['keys'].dtype}"
        problem.refuse("key_scales", "dtype", problem.specs["key_scales"].dtype, expected)


def check_selection(problem: Problem) -> None:
    """Rules of a selection in bounded memory."""
    problem.require_count("k")
    if problem.attrs.workspace_bytes < 0:
        problem.refuse("workspace_bytes", "value", problem.attrs.workspace_bytes, "at least 0")


def key_format(problem: Problem) -> str:
    """The format of the keys: the cache's, or that of the dtypes of contiguous keys and their scales."""
    if problem.has("cache"):
        return problem.formats["cache"].format
    if problem.specs["keys"].dtype not in E4M3:
        return "mxfp4"
    return "fp8_ue8m0" if problem.specs["key_scales"].dtype == "int32" else "fp8"


def keys_are_mxfp4(problem: Problem) -> bool:
    return key_format(problem) == "mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query(Constants):
    """Constants of every kernel that reads the query."""

    HEADS: int
    D: int
    Q_STRIDE_T: int
    Q_STRIDE_I: int
    WEIGHT_STRIDE: int
    BLOCK_I: int  # rows of a product, of a token's heads

    @classmethod
    def of(cls, problem: Problem, q: str = "q8", weights: str = "weights", **keys: int) -> Self:
        specs = problem.specs
        return cls(
            HEADS=problem["I"],
            D=problem["D"],
            Q_STRIDE_T=specs[q].stride(0),
            Q_STRIDE_I=specs[q].stride(1),
            WEIGHT_STRIDE=specs[weights].stride(0),
            BLOCK_I=head_rows(problem),
            **keys,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys(Constants):
    """Constants of every Triton kernel that multiplies keys, except their addresses."""

    FORMAT: str  # of INDEXER_FORMATS, or "16-bit"
    HIDE_BYTES: bool  # lang.numbers.hidden
    HOPPER_SUMS: bool  # lang.indexer.head_scores
    RUN: int  # lang.indexer.heads_of_tile

    @classmethod
    def of(cls, problem: Problem, device: Device) -> "Keys":
        form, mxfp4 = key_format(problem), keys_are_mxfp4(problem)
        # Rows of a product are keys; with tensor memory tiles have 64 or more.
        hide = (mxfp4 or not device.converts_e4m3) and device.hides_bytes(64)
        # Eight warps divide tiles of MXFP4, often into four parts along the heads, four those of fp8 into two.
        return cls(FORMAT=form, HIDE_BYTES=hide, **_order_of_sums(problem, device, 32 if mxfp4 else 16, divided=mxfp4))

    @classmethod
    def plain(cls, problem: Problem, device: Device) -> "Keys":
        """Constants for 16-bit keys, which eight warps multiply."""
        return cls(FORMAT="16-bit", HIDE_BYTES=False, **_order_of_sums(problem, device, 32))


def _order_of_sums(problem: Problem, device: Device, run: int, divided: bool = False) -> dict[str, Any]:
    """How kernels add heads, with runs of at most `run` heads where warps divide them.

    With tensor memory a thread has all heads of a key up to 64, unless they are `divided` among eight warps.
    """
    rows = head_rows(problem)
    own_order = device.arch == 90 or (device.has_tensor_memory and rows <= 64 and not divided)
    return {"HOPPER_SUMS": device.arch == 90, "RUN": 0 if own_order else min(run, rows)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages(Constants):
    """Constants of every kernel that reads paged keys: pages and requests."""

    PAGE_STRIDE: int
    PAGE_SIZE: int
    HAS_REQUEST_IDS: bool

    @classmethod
    def of(cls, problem: Problem) -> "Pages":
        return cls(
            PAGE_STRIDE=problem.specs["cache"].stride(0),
            PAGE_SIZE=problem.page_size(),
            HAS_REQUEST_IDS=problem.has("request_ids"),
        )


def head_rows(problem: Problem) -> int:
    """Rows of a matrix product that the heads of one token take."""
    return max(16, next_power_of_2(problem["I"]))


@dataclass(frozen=True, slots=True)
class Grouping:
    """How flat tokens share tiles of keys: `group` adjacent tokens of a request, `block_i` rows of heads each."""

    next_n: int
    block_i: int
    group: int
    groups_a_request: int
    groups: int


def group_tokens(problem: Problem, max_rows: int) -> Grouping:
    """Group as many tokens of a request as a product of `max_rows` takes; with request ids each token is a group."""
    next_n = tokens_a_request(problem)
    block_i = head_rows(problem)
    group = smaller(next_power_of_2(next_n), larger(1, max_rows // block_i))
    groups_a_request = cdiv(next_n, group)
    return Grouping(next_n, block_i, group, groups_a_request, problem["T"] // next_n * groups_a_request)


def _has_ue8m0(problem: Problem) -> bool:
    return key_format(problem) == "fp8_ue8m0"


def _between_rows(problem: Problem, device: Device) -> str | None:
    for name, axes in (("q8", (0, 1)), ("cache" if problem.has("cache") else "keys", (0,))):
        if not problem.specs[name].on_multiples(16, axes):
            return f"over rows of {problem.called(name)} between multiples of 16 bytes"
    return None


# Conditions of the Gluon kernels for Hopper, over pages and over contiguous keys.
SM90_CONDITIONS = (
    ON_HOPPER,
    Condition("fp8 keys", lambda problem, device: "over MXFP4 keys" if keys_are_mxfp4(problem) else None),
    Condition("float32 scales", lambda problem, device: "over keys with UE8M0 scales" if _has_ue8m0(problem) else None),
    Condition("rows on multiples of 16 bytes", _between_rows),
)


def capacity_of(problem: Problem) -> int:
    """The most keys of a request, paged, or of all requests."""
    return problem["M"] * problem["R"] if problem.has("block_table") else problem["N"]


def logits_work(problem: Problem, keys: float | None) -> Work:
    """The scores, and every logit and other array once."""
    logits = problem["T"] * (keys or capacity_of(problem)) * problem.results["logits"].itemsize
    return scoring_work(problem, keys) + Work(logits + problem.bytes_besides_pools)


def scoring_work(problem: Problem, keys: float | None) -> Work:
    """Keys read once per request, and their products."""
    pool = problem.specs[next(name for name in ("cache", "indexer_cache", "keys") if problem.has(name))]
    count = keys or capacity_of(problem)
    read = count * (problem["B"] if problem.has("block_table") else 1) * pool.shape[-1] * pool.itemsize
    return Work(read, fp8_flops=2.0 * problem["T"] * count * problem["I"] * problem["D"])


def selection_work(problem: Problem, keys: float | None) -> Work:
    """The scores, and every other array once."""
    return scoring_work(problem, keys) + all_but_pools_once(problem)


def topk_work(problem: Problem, keys: float | None) -> Work:
    """The work of selecting single keys, which need no scores where all of them are selected."""
    if capacity_of(problem) > problem.attrs.k:
        return selection_work(problem, keys)
    lengths, indices = problem.specs["lengths" if problem.has("lengths") else "ends"], problem.results["indices"]
    return Work(lengths.nbytes + indices.nbytes)
