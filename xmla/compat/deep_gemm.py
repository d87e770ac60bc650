"""DeepGEMM's indexer logits under the signatures of DeepGEMM 2.6 and 2.8 and of sgl-deep-gemm 0.2.

Any number of heads up to 128 and of tokens a request, any page size. There is no schedule: what stands for it is never
read; metadata of selected blocks has the blocks. Other names, such as the GEMMs, are DeepGEMM's own, if installed (in
vLLM's process also the copy that vLLM has).
"""

import inspect
import sys
from functools import partial
from typing import Any

import torch

from xmla.compat._published import INT32, NotReplacedError, Published, as_int32, check_axes, dense, serve
from xmla.core.errors import ArgumentError
from xmla.core.lang.blocks import GRANULARITIES
from xmla.core.values import cdiv
from xmla.torch_api._arrays import device_of

_package = Published("deep_gemm", *(["vllm.third_party.deep_gemm"] if "vllm" in sys.modules else []))
Tensor = torch.Tensor
Query = tuple[Tensor, Tensor | None]

ROW_MULTIPLE = 256  # elements from row to row of the logits, as DeepGEMM's consumers may assume of its results
SPARSE_ROW_MULTIPLE = 512  # the same of logits of selected blocks, which are bfloat16
DENSE_BYTES = 1 << 26  # of logits over all keys that compressed ones are gathered from, at a time
MXFP4_BLOCK = 32
# The arguments of functions over contiguous keys and over pages, by the ops' names of them.
RAGGED_NAMES = {
    "q8": "q", "keys": "kv[0]", "key_scales": "kv[1]", "starts": "cu_seq_len_k_start", "ends": "cu_seq_len_k_end",
}  # fmt: skip
PAGED_NAMES = {"q8": "q.flatten(0, 1)", "cache": "kv_cache[:, :, 0]", "lengths": "context_lens"}

_num_sms: int | None = None


def __getattr__(name: str) -> Any:
    return _package.attribute(name)


def get_num_sms() -> int:
    """DeepGEMM's number of multiprocessors, which xmla's ops do not read; without it what was set, or the device's."""
    if _package.module is not None:
        return _package.module.get_num_sms()
    if _num_sms is not None:
        return _num_sms
    return device_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).num_sms


def set_num_sms(num_sms: int) -> None:
    """Set what `get_num_sms` returns and DeepGEMM's GEMMs use."""
    global _num_sms
    if _package.module is not None:
        _package.module.set_num_sms(num_sms)
    else:
        _num_sms = num_sms


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """[num_sms + 1, 2] int32, all 0, in the place of a schedule."""
    return context_lens.new_zeros((num_sms + 1, 2), dtype=torch.int32)


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor,
    clean_logits: bool = True, max_seqlen_k: int = 0,
) -> Tensor:  # fmt: skip
    """`fp8_fp4_mqa_logits` of fp8 queries and keys, float32."""
    here = "fp8_mqa_logits"
    return _ragged(here, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


@_package.otherwise()
def fp8_fp4_mqa_logits(
    q: Query, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor,
    clean_logits: bool = True, max_seqlen_k: int = 0, logits_dtype: torch.dtype = torch.float32,
    *, schedule_meta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Indexer logits of ragged queries over contiguous keys, as `indexer_logits` has them.

    Args:
        q: fp8: ([M, H, D] float8_e4m3fn, None). MXFP4: ([M, H, D/2] int8, [M, H] int32), read as bfloat16.
        kv: As `indexer_logits`' keys and key_scales.
        weights: [M, H] float32 or bfloat16.
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, the range of keys of each row.
        clean_logits: Whether columns outside a row's range are −inf; else they are −inf or hold anything. An int in
            this place that is no bool is `max_seqlen_k` without cleaning: DeepGEMM 2.8 has it there.
        max_seqlen_k: 0, or compressed logits of this many columns: a row's first key is in its first column.
        logits_dtype: float32 or bfloat16.
        schedule_meta: Not read.

    Returns:
        The logits [M, N], or [M, max_seqlen_k], with rows a multiple of 256 elements apart.

    Compressed logits are gathered from logits over all N keys, 64 MiB of them at a time. MXFP8, e4m3 queries with
    scales, is DeepGEMM's.
    """
    here = "fp8_fp4_mqa_logits"
    return _ragged(here, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype)


def _ragged(
    here: str, q: Query | Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor, clean_logits: bool, max_seqlen_k: int, logits_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Logits over a range of keys for each token, for the function `here`, which errors name."""
    if not isinstance(clean_logits, bool):
        clean_logits, max_seqlen_k = False, clean_logits
    query = _query(here, q)
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        raise ArgumentError(f"{here}: kv is {type(kv).__name__}, expected a pair: keys [N, D], scales [N]")
    keys, scales = kv
    check_axes(here, {
        "q": (query, "M H D"), "kv[0]": (keys, "N ROW"), "kv[1]": (scales, "N"), "weights": (weights, "M H"),
        "cu_seq_len_k_start": (cu_seq_len_k_start, "M"), "cu_seq_len_k_end": (cu_seq_len_k_end, "M"),
    })  # fmt: skip
    starts = as_int32(here, "cu_seq_len_k_start", cu_seq_len_k_start)
    ends = as_int32(here, "cu_seq_len_k_end", cu_seq_len_k_end)
    if max_seqlen_k < 0:
        raise ArgumentError(f"{here}: max_seqlen_k is {max_seqlen_k}, expected at least 0")
    if logits_dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError(f"{here}: logits_dtype is {logits_dtype}, expected torch.float32 or torch.bfloat16")
    query, weights, keys, scales, count = dense(query), dense(weights.float()), dense(keys), dense(scales), len(keys)
    logits_of = partial(serve, here, "indexer_logits", RAGGED_NAMES)
    if max_seqlen_k == 0:
        keys, scales = _more_rows(keys), _more_rows(scales)
        return logits_of(query, weights, keys, scales, starts, ends, logits_dtype=_name(logits_dtype))[:, :count]
    logits = weights.new_empty((len(query), row_stride(max_seqlen_k)), dtype=logits_dtype)[:, :max_seqlen_k]
    column = torch.arange(max_seqlen_k, device=query.device)
    step = max(1, DENSE_BYTES // (4 * max(1, count)))
    for first in range(0, len(query) if count else 0, step):
        rows = slice(first, first + step)
        every = logits_of(query[rows], weights[rows], keys, scales, starts[rows], ends[rows])
        logits[rows] = every.gather(1, (starts[rows, None] + column).clamp(0, count - 1))
    seen = ends.clamp(max=count) - starts
    return logits.masked_fill_(column >= seen[:, None], -torch.inf) if clean_logits else logits


def fp8_paged_mqa_logits(
    q: Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, schedule_meta: Tensor,
    max_context_len: int, clean_logits: bool = False, indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`fp8_fp4_paged_mqa_logits` of fp8 queries and keys, float32."""
    here = "fp8_paged_mqa_logits"
    return _paged(here, q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def _with_its_schedule(package: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of paged logits with a schedule that DeepGEMM made."""
    arguments = inspect.signature(fp8_fp4_paged_mqa_logits).bind(*args, **kwargs).arguments
    empty = arguments["schedule_meta"]
    indices = {} if arguments.get("indices") is None else {"indices": arguments["indices"]}
    schedule = package.get_paged_mqa_logits_metadata(
        arguments["context_lens"], arguments["kv_cache"].shape[1], len(empty) - 1, **indices
    )  # fmt: skip
    swap = lambda value: schedule if value is empty else value
    return tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}


@_package.otherwise(_with_its_schedule)
def fp8_fp4_paged_mqa_logits(
    q: Query, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, schedule_meta: Tensor,
    max_context_len: int, clean_logits: bool = False, logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Indexer logits over the paged indexer cache, as `indexer_logits_paged` has them.

    Args:
        q: fp8: ([B, next_n, H, D] float8_e4m3fn, None). MXFP4: ([B, next_n, H, D/2] int8, [B, next_n, H] int32), read
            as bfloat16.
        kv_cache: [P, R, 1, D+4] for fp8 keys, [P, R, 1, D/2+4] for MXFP4's, as `indexer_logits_paged`' cache.
        weights: [B · next_n, H] float32 or bfloat16.
        context_lens: int32. [B, next_n]: the keys of each token. [B]: of a request's last token; each earlier one has
            one less.
        block_table: [B, M] int32.
        max_context_len: Columns of the result.
        clean_logits: Whether columns at or past a token's length are −inf; else they are not written.
        logits_dtype: float32 or bfloat16.
        schedule_meta: Not read.
        indices: Not read: which rows are of one request, for DeepGEMM's schedule alone.

    Returns:
        The logits [B · next_n, max_context_len], with rows a multiple of 256 elements apart.

    MXFP8, e4m3 queries with scales, is DeepGEMM's.
    """
    here = "fp8_fp4_paged_mqa_logits"
    return _paged(here, q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, logits_dtype)


def _paged(
    here: str, q: Query | Tensor, kv_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor,
    max_context_len: int, clean_logits: bool, logits_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Logits over a paged cache, for the function `here`, which errors name."""
    query = _query(here, q)
    check_axes(here, {
        "q": (query, "B next_n H D"), "kv_cache": (kv_cache, "P R 1 ROW"), "weights": (weights, "B·next_n H"),
        "context_lens": (context_lens, "B" if getattr(context_lens, "ndim", 2) == 1 else "B next_n"),
        "block_table": (block_table, "B M"),
    })  # fmt: skip
    next_n = query.shape[1]
    lengths = as_int32(here, "context_lens", context_lens)
    if lengths.dim() == 1:
        lengths = lengths[:, None] + torch.arange(1 - next_n, 1, device=lengths.device, dtype=torch.int32)
    lengths, cache = dense(lengths.reshape(-1)), kv_cache[:, :, 0]
    logits = serve(
        here, "indexer_logits_paged", PAGED_NAMES, dense(query.flatten(0, 1)), dense(weights.float()), cache,
        as_int32(here, "block_table", block_table), lengths, max_len=row_stride(max_context_len),
        logits_dtype=_name(logits_dtype),
    )[:, :max_context_len]  # fmt: skip
    if not clean_logits:
        return logits
    column = torch.arange(max_context_len, device=lengths.device)
    seen = lengths.clamp(max=min(block_table.shape[1] * cache.shape[1], INT32.max))
    return logits.masked_fill_(column >= seen[:, None], -torch.inf)


@_package.otherwise()
def get_sparse_mqa_logits_metadata(
    cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor, num_kv_tokens: int, sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype, sparse_block_kv: int, use_unaligned_ks: bool = False,
) -> Tensor:  # fmt: skip
    """What `fp8_fp4_sparse_mqa_logits` reads of each row's range of keys and selected blocks.

    Args:
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, the range of keys of each row.
        num_kv_tokens: N, where ranges end at the latest.
        sparse_kv_block_indices: [M, S] int32. Block b of a row starts at key b · g + start mod g, g = sparse_block_kv,
            so that its first block is start div g. Read are the first min(S, ⌈keys of the range / g⌉) blocks of a row.
        qk_dtype: int8 for MXFP4. float8_e4m3fn, which is MXFP8, is DeepGEMM's.
        sparse_block_kv: g, a power of two up to 128.
        use_unaligned_ks: Not read: DeepGEMM asks for it where a start is no multiple of g.

    Returns:
        [M · (S + 2) · 4] uint8, for that function of this module alone.
    """
    here = "get_sparse_mqa_logits_metadata"
    _check_blocks(here, qk_dtype, sparse_block_kv)
    check_axes(here, {
        "sparse_kv_block_indices": (sparse_kv_block_indices, "M S"), "cu_seq_len_k_start": (cu_seq_len_k_start, "M"),
        "cu_seq_len_k_end": (cu_seq_len_k_end, "M"),
    })  # fmt: skip
    starts = as_int32(here, "cu_seq_len_k_start", cu_seq_len_k_start).clamp(0, num_kv_tokens)
    ends = torch.maximum(as_int32(here, "cu_seq_len_k_end", cu_seq_len_k_end).clamp(max=num_kv_tokens), starts)
    blocks = as_int32(here, "sparse_kv_block_indices", sparse_kv_block_indices) - (starts // sparse_block_kv)[:, None]
    return _packed(_first_blocks(blocks, ends - starts, sparse_block_kv), starts, ends)


@_package.otherwise()
def fp8_fp4_sparse_mqa_logits(
    q: Query, kv: tuple[Tensor, Tensor], weights: Tensor, metadata: Tensor, num_max_sparse_blocks: int,
    sparse_block_kv: int, use_unaligned_ks: bool = False,
) -> Tensor:  # fmt: skip
    """Indexer logits of contiguous keys in each row's selected blocks, as `indexer_block_topk` has them.

    Args:
        q: MXFP4: ([M, H, D/2] int8, [M, H] int32), read as bfloat16.
        kv: As `indexer_block_topk`'s keys and key_scales of MXFP4.
        weights: [M, H] bfloat16 or float32.
        metadata: Of `get_sparse_mqa_logits_metadata`.
        num_max_sparse_blocks: S.
        sparse_block_kv: Keys of a block, the same as the metadata's.
        use_unaligned_ks: Not read.

    Returns:
        The logits [M, S · sparse_block_kv] bfloat16, with rows a multiple of 512 elements apart. Column c is of key
        c mod g of block c div g, −inf where the range or the row's blocks have no such key.

    MXFP8, e4m3 queries with scales, is DeepGEMM's.
    """
    here = "fp8_fp4_sparse_mqa_logits"
    query = _mxfp4_query(here, q)
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        raise ArgumentError(f"{here}: kv is {type(kv).__name__}, expected a pair: keys [N, D], scales [N]")
    keys, scales = kv
    check_axes(here, {
        "q": (query, "M H D"), "kv[0]": (keys, "N ROW"), "kv[1]": (scales, "N"), "weights": (weights, "M H"),
    })  # fmt: skip
    blocks, starts, ends = _unpacked(here, metadata, len(query), num_max_sparse_blocks, 2)
    logits, _ = serve(
        here, "indexer_block_logits", RAGGED_NAMES, query, dense(weights.float()), dense(keys), dense(scales), starts,
        ends, blocks, granularity=sparse_block_kv, logits_dtype="bfloat16",
    )  # fmt: skip
    return _as_sparse_rows(logits)


@_package.otherwise()
def get_paged_sparse_mqa_logits_metadata(
    context_lens: Tensor, block_table: Tensor, indices: Tensor, page_kv: int, sparse_kv_block_indices: Tensor,
    qk_dtype: torch.dtype, sparse_block_kv: int,
) -> Tensor:  # fmt: skip
    """What `fp8_fp4_paged_sparse_mqa_logits` reads of each row's selected blocks: their places in the cache.

    Args:
        context_lens: [T] or [T, 1] int32, the keys of each row.
        block_table: [T, M] int32, the page ids of each row's request.
        indices: [T] int32. Not read: which rows are of one request, for DeepGEMM's schedule alone.
        page_kv: R, entries of a page, a multiple of sparse_block_kv.
        sparse_kv_block_indices: [T, S] int32, strictly ascending blocks of sparse_block_kv keys within the request.
            Read are the first min(S, ⌈length / sparse_block_kv⌉) of a row.
        qk_dtype: int8 for MXFP4. float8_e4m3fn, which is MXFP8, is DeepGEMM's.
        sparse_block_kv: A power of two up to 128.

    Returns:
        [T · (S + 1) · 4] uint8, for that function of this module alone.
    """
    here = "get_paged_sparse_mqa_logits_metadata"
    _check_blocks(here, qk_dtype, sparse_block_kv, page_kv)
    check_axes(here, {
        "sparse_kv_block_indices": (sparse_kv_block_indices, "T S"), "block_table": (block_table, "T M"),
        "context_lens": (context_lens, "T" if getattr(context_lens, "ndim", 2) == 1 else "T 1"),
        "indices": (indices, "T"),
    })  # fmt: skip
    lengths = as_int32(here, "context_lens", context_lens).flatten()
    lengths = lengths.clamp(0, min(block_table.shape[1] * page_kv, INT32.max))
    blocks = _first_blocks(as_int32(here, "sparse_kv_block_indices", sparse_kv_block_indices), lengths, sparse_block_kv)
    entries = (lengths[:, None] - blocks * sparse_block_kv).clamp(0, sparse_block_kv).masked_fill(blocks < 0, 0)
    table = as_int32(here, "block_table", block_table)
    places, _ = serve(here, "map_slots", {}, blocks, table, page_size=page_kv // sparse_block_kv)
    return _packed(places, entries.sum(1, dtype=torch.int32))


@_package.otherwise()
def fp8_fp4_paged_sparse_mqa_logits(
    q: Query, kv_cache: Tensor, weights: Tensor, metadata: Tensor, num_max_sparse_blocks: int, sparse_block_kv: int,
) -> Tensor:  # fmt: skip
    """Indexer logits of paged keys in each row's selected blocks, as `indexer_block_topk_paged` has them.

    Args:
        q: MXFP4: ([T, 1, H, D/2] int8, [T, 1, H] int32), read as bfloat16.
        kv_cache: [P, R, 1, D/2+4], as `indexer_block_topk_paged`'s cache of MXFP4.
        weights: [T, H] bfloat16 or float32.
        metadata: Of `get_paged_sparse_mqa_logits_metadata`.
        num_max_sparse_blocks: S.
        sparse_block_kv: Keys of a block, the same as the metadata's.

    Returns:
        The logits [T, S · sparse_block_kv] bfloat16, with rows a multiple of 512 elements apart. Column c is of key
        c mod g of block c div g, −inf where the row's length or its blocks have no such key.

    MXFP8, e4m3 queries with scales, is DeepGEMM's.
    """
    here = "fp8_fp4_paged_sparse_mqa_logits"
    query = _mxfp4_query(here, q)
    check_axes(
        here, {"q": (query, "T 1 H D"), "kv_cache": (kv_cache, "P R 1 ROW"), "weights": (weights, "T H")}
    )  # fmt: skip
    places, widths = _unpacked(here, metadata, len(query), num_max_sparse_blocks, 1)
    pages, page = kv_cache.shape[:2]
    if pages * page > INT32.max:
        raise NotReplacedError(f"{here}: kv_cache has {pages * page} keys, supported: at most {INT32.max}")
    # Blocks by their places in the cache are those of one request, which has all pages in order.
    block_table, lengths = torch.arange(pages, device=query.device, dtype=torch.int32), pages * page
    logits, _ = serve(
        here, "indexer_block_logits_paged", PAGED_NAMES, query[:, 0], dense(weights.float()), kv_cache[:, :, 0],
        block_table[None], torch.full_like(widths, lengths), places, granularity=sparse_block_kv,
        logits_dtype="bfloat16",
    )  # fmt: skip
    columns = torch.arange(logits.shape[1], device=logits.device)
    return _as_sparse_rows(logits.masked_fill_(columns >= widths[:, None], -torch.inf))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_blocks(here: str, qk_dtype: torch.dtype, granularity: int, page: int | None = None) -> None:
    if qk_dtype == torch.float8_e4m3fn:
        raise NotReplacedError(f"{here}: qk_dtype is torch.float8_e4m3fn, supported: torch.int8 (MXFP4)")
    if qk_dtype != torch.int8:
        raise ArgumentError(f"{here}: qk_dtype is {qk_dtype}, expected torch.int8 or torch.float8_e4m3fn")
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"{here}: sparse_block_kv is {granularity}, expected a power of two, at most 128")
    if page is not None and (page < 1 or page % granularity):
        raise ArgumentError(f"{here}: page_kv is {page}, expected a multiple of sparse_block_kv = {granularity}")


def _first_blocks(blocks: Tensor, lengths: Tensor, granularity: int) -> Tensor:
    """The blocks, with −1 in columns past a row's number of blocks and for a block that the row cannot have."""
    counts = ((lengths + granularity - 1) // granularity)[:, None]
    place = torch.arange(blocks.shape[1], device=blocks.device)
    return blocks.masked_fill((place >= counts) | (blocks >= counts), -1)


def _packed(blocks: Tensor, *numbers: Tensor) -> Tensor:
    """Rows of the blocks and some numbers, int32, as bytes in one axis, as DeepGEMM's metadata are."""
    return torch.cat([blocks, *(number[:, None] for number in numbers)], dim=1).flatten().view(torch.uint8)


def _unpacked(here: str, metadata: Tensor, rows: int, blocks: int, numbers: int) -> tuple[Tensor, ...]:
    """The blocks and the numbers of `_packed`."""
    check_axes(here, {"metadata": (metadata, "BYTES")})
    expected = rows * (blocks + numbers) * 4
    if metadata.dtype != torch.uint8 or len(metadata) != expected:
        made_by = here.replace("fp8_fp4", "get") + "_metadata"
        raise ArgumentError(
            f"{here}: metadata is {metadata.dtype} [{len(metadata)}], expected torch.uint8 [{expected}] of {made_by} "
            f"for {rows} queries and {blocks} blocks"
        )
    metadata = metadata.contiguous()
    if not torch.compiler.is_compiling() and metadata.storage_offset() % 4:  # a trace knows no offset
        metadata = metadata.clone()
    integers = metadata.view(torch.int32).view(rows, blocks + numbers)
    return integers[:, :blocks], *integers[:, blocks:].t().contiguous()


def _mxfp4_query(here: str, q: Query | Tensor) -> Tensor:
    values, scales = (q, None) if isinstance(q, Tensor) else q
    if scales is None or values.dtype == torch.float8_e4m3fn:
        scaled = "without" if scales is None else "with"
        raise NotReplacedError(
            f"{here}: q is {values.dtype} {scaled} scales, supported: torch.int8 with scales (MXFP4)"
        )
    return _query(here, q)


def _as_sparse_rows(logits: Tensor) -> Tensor:
    """bfloat16 logits with rows a multiple of SPARSE_ROW_MULTIPLE elements apart."""
    rows, columns = logits.shape
    return logits.new_empty((rows, row_stride(columns, SPARSE_ROW_MULTIPLE)), dtype=torch.bfloat16)[:, :columns].copy_(
        logits
    )


def _query(here: str, q: Query | Tensor) -> Tensor:
    """e4m3 values as they are; MXFP4 [..., D/2], with a UE8M0 byte for each 32 dims in [...] int32, as bfloat16."""
    values, scales = (q, None) if isinstance(q, Tensor) else q
    if scales is None:
        return values
    if values.dtype == torch.float8_e4m3fn:
        raise NotReplacedError(f"{here}: q is MXFP8 (e4m3 with scales), supported: e4m3 without scales, and MXFP4")
    packed = values.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int16)  # even dims are low
    magnitude = codes & 7  # 0, 0.5, 1, 1.5, 2, 3, 4, 6: from 1 on, its bits are an exponent's and the first fraction's
    half = 126 << 7  # the bits of 0.5 in bfloat16
    bits = torch.where(magnitude > 1, half + (magnitude << 6), half * magnitude) | (codes & 8) << 12
    exponents = scales.contiguous().view(torch.uint8).unflatten(-1, (scales.shape[-1], 4))
    factors = exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)[..., : codes.shape[-1] // MXFP4_BLOCK, None]
    return (bits.view(torch.bfloat16).unflatten(-1, (-1, MXFP4_BLOCK)) * factors).flatten(-2)


def row_stride(columns: int, multiple: int = ROW_MULTIPLE) -> int:
    """Elements from row to row of logits with so many columns."""
    return cdiv(columns, multiple) * multiple


def _more_rows(keys: Tensor) -> Tensor:
    """Keys [N, ...] with zeros behind them, up to a multiple of ROW_MULTIPLE, for the row stride of their logits."""
    missing = row_stride(len(keys)) - len(keys)
    if not missing:
        return keys
    zeros = keys.new_empty((missing, *keys.shape[1:])).view(torch.uint8).zero_().view(keys.dtype)
    return torch.cat([keys, zeros])
