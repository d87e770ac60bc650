import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.ops.cache.write_indexer_cache.kernels import write_keys
from xmla.core.ops.cache.write_mla_cache.kernels import write_entries
from xmla.core.ops.indexer.quantize_indexer_query.kernels import quantize_rows


@triton.jit
def write_both(
    program, latent_ptr, rope_ptr, index_k_ptr, entry_slots_ptr, mla_cache_ptr, indexer_cache_ptr, num_tokens,
    num_slots, C: tl.constexpr,
):  # fmt: skip
    """Write some tokens' entries, and after the last of these some tokens' keys; parameters as in the kernels below."""
    ENTRIES: tl.constexpr = C.ENTRIES
    KEYS: tl.constexpr = C.KEYS
    entry_programs = tl.cdiv(num_tokens, ENTRIES.BLOCK_T)
    if program < entry_programs:
        write_entries(program, latent_ptr, rope_ptr, entry_slots_ptr, mla_cache_ptr, num_tokens, num_slots, ENTRIES)
    else:
        write_keys(
            program - entry_programs, index_k_ptr, entry_slots_ptr, indexer_cache_ptr, num_tokens, num_slots, KEYS
        )


@triton.jit
def write_both_kernel(
    latent_ptr,  # [T, L]
    rope_ptr,  # [T, E]
    index_k_ptr,  # [T, D]
    entry_slots_ptr,  # [T] i32 | i64
    mla_cache_ptr,  # [P, R, ROW], updated in place
    indexer_cache_ptr,  # [P, R, INDEXER_ROW], updated in place
    num_tokens,
    num_slots,
    C: tl.constexpr,  # Writes
):
    """`write_mla_cache_kernel` and `write_indexer_cache_kernel`, each by programs of its own."""
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    write_both(
        tl.program_id(0), latent_ptr, rope_ptr, index_k_ptr, entry_slots_ptr, mla_cache_ptr, indexer_cache_ptr,
        num_tokens, num_slots, C,
    )  # fmt: skip


@triton.jit
def prepare_step_kernel(
    latent_ptr,  # [T, L]
    rope_ptr,  # [T, E]
    index_k_ptr,  # [T, D]
    entry_slots_ptr,  # [T] i32 | i64
    mla_cache_ptr,  # [P, R, ROW], updated in place
    indexer_cache_ptr,  # [P, R, INDEXER_ROW], updated in place
    index_q_ptr,  # [T, I, D]
    index_weights_ptr,  # [T, I]
    num_tokens,
    num_slots,
    num_rows,  # T · I
    q8_ptr,  # [T, I, D] e4m3 | bf16
    folded_weights_ptr,  # [T, I] f32
    C: tl.constexpr,  # Preparation
):
    """`write_both_kernel` and `quantize_indexer_query_kernel`, whose programs come first, since they take longest."""
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    QUERY: tl.constexpr = C.QUERY
    program = tl.program_id(0)
    query_programs = tl.cdiv(num_rows, QUERY.BLOCK)
    if program < query_programs:
        quantize_rows(program, index_q_ptr, index_weights_ptr, num_rows, q8_ptr, folded_weights_ptr, QUERY)
    else:
        write_both(
            program - query_programs, latent_ptr, rope_ptr, index_k_ptr, entry_slots_ptr, mla_cache_ptr,
            indexer_cache_ptr, num_tokens, num_slots, C,
        )  # fmt: skip
