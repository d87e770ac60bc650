"""Which entries of a pool slots name, as a bit each, by a map in the shared memory of every program.

Stores to marks in global memory meet in lines of the L2 cache, some ten a nanosecond; an SM stores to its own map two
orders of magnitude faster, all SMs together. A map needs no clearing by a launch before, and whoever reads the bits
combines those of all programs. Entries that do not fit in a map are divided into ranges, and programs among them.
"""

from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_let_next_start, gluon_wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of


@gluon.jit
def mark_entries_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    num_tokens,
    num_slots,
    num_keys,  # K
    slot_stride,
    chunk,  # entries of a range, a multiple of 32
    num_parts,  # programs of a range
    num_words,  # of all entries' bits
    marks_ptr,  # [num_parts, num_words] i32
    HAS_LENGTHS: gl.constexpr,
    BLOCK: gl.constexpr,  # slots at once
    BLOCK_K: gl.constexpr,  # of a token
    MAP: gl.constexpr,  # bytes, more than a range has entries
    WARPS: gl.constexpr,
    OVERLAP_LIMIT: gl.constexpr,
):
    gl.static_assert(MAP % (32 * 32 * WARPS) == 0, "a map is packed by blocks of a word a thread")
    gluon_let_next_start(OVERLAP_LIMIT)
    gluon_wait_for_earlier(OVERLAP_LIMIT)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    vectors: gl.constexpr = gl.BlockedLayout([16], [32], [WARPS], [0])
    words: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [WARPS, 1], [1, 0])
    part = gl.program_id(0) % num_parts
    first_entry = gl.program_id(0) // num_parts * chunk
    marks = gl.allocate_shared_memory(gl.int8, [MAP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    CLEARED: gl.constexpr = 16 * 32 * WARPS  # bytes at once
    for block in gl.static_range(MAP // CLEARED):
        if block * CLEARED < chunk:
            marks.slice(block * CLEARED, CLEARED).store(gl.zeros([CLEARED], gl.int8, vectors))
    gl.barrier()
    TOKENS: gl.constexpr = BLOCK // BLOCK_K
    offs = gl.arange(0, BLOCK, lanes)
    for some in range(part, gl.cdiv(num_tokens, TOKENS), num_parts):
        token = some * TOKENS + offs // BLOCK_K
        end = gl.full([BLOCK], 0, gl.int32, lanes)
        if HAS_LENGTHS:
            end = gl.load(lengths_ptr + token, mask=token < num_tokens, other=0)
            end = gl.minimum(end, num_keys)
        else:
            end = gl.where(token < num_tokens, num_keys, end)
        for first in range(0, num_keys, BLOCK_K):
            key = first + offs % BLOCK_K
            slot = gl.load(slots_ptr + gluon_offset_of(token, slot_stride) + key, mask=key < end, other=-1)
            place = slot - first_entry
            ok = (slot >= 0) & (slot < num_slots) & (place >= 0) & (place < chunk)
            # What is not of this range goes to the last byte, which is of none.
            marks.scatter(gl.full([BLOCK], 1, gl.int8, lanes), gl.where(ok, place, MAP - 1), 0)
    gl.barrier()
    ROWS: gl.constexpr = 32 * WARPS
    word = gl.arange(0, ROWS, gl.SliceLayout(1, words))
    bit = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, words)), 0)
    marks_ptr += gluon_offset_of(part, num_words) + first_entry // 32
    by_word = marks.reshape([MAP // 32, 32])
    for block in gl.static_range(MAP // (32 * ROWS)):
        if block * ROWS * 32 < chunk:
            marked = by_word.slice(block * ROWS, ROWS).load(words)
            bits = gl.sum(marked.to(gl.int32) << bit, 1)
            at = block * ROWS + word
            here = (at * 32 < chunk) & (first_entry // 32 + at < num_words)
            gl.store(marks_ptr + at, bits, mask=here)
