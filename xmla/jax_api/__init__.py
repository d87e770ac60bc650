"""The ops for JAX, same names, arguments and bits as `xmla.torch_api`.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  implementation: None, the best tested kernels; "triton", the portable ones (on the CPU Triton's interpreter, behind
    `jax.pure_callback`); "gluon", the kernels written by hand: None takes them on Hopper for `sparse_mla` and
    `dsa_attention` over plain rows, or with bfloat16 queries over V3.2 or V4 entries, and for the indexer's
    logits over fp8 keys, of pages of a multiple of 64; "reference", the NumPy float64 definition behind
    `jax.pure_callback`.
NumPy arrays are taken as they are: one of 64 bits is of 64 bits, although JAX would make 32 of them.

All work under `jax.jit`, `jax.vmap` over any axis (one call with more rows; a cache with a batch axis is each element's
own) and `jax.shard_map`, and can be lowered ahead of time; a derivative is refused. Ops that update a cache take it as
a `jax.Ref` (`jax.new_ref`) and update it in place, or as an array and return the new one, which under `jit` with a
donated argument is updated in place too. Ops that read a cache take a Ref as well, and then read it where it lies:
`ref[...]` may copy the pool.

Several GPUs: `jit` of arrays with a NamedSharding keeps tokens (axis T) and heads (H) where they are, in one op or
many, with one mesh in the program: each device computes its own, nothing is exchanged, every other axis is replicated.
Replicated are also all axes of ops that update a cache, the tokens of requests without request_ids, everything in an
export and `implementation="reference"`; an export over an AbstractMesh needs a `shard_map` around the ops. A part of
the heads has the bits of the whole with `batch_invariant=True`. Requests shared out by pages: `xmla.jax_api.parallel`.

Importing this module needs neither a GPU nor PyTorch. To plan and lower for a GPU that is not there, use
`xmla.core.device.assume_device`; `jax.export.export(..., disabled_checks=EXPORT_CHECKS)` then serialises for it.
"""

from xmla._frameworks import missing, needed

if missing("jax"):
    raise ImportError(needed("jax"))

from jax import export as _export

from xmla.core import ops
from xmla.jax_api._ops import public

compress_kv = public(ops.compress_kv.OP)
convert_indexer_cache = public(ops.convert_indexer_cache.OP)
convert_mla_cache = public(ops.convert_mla_cache.OP)
dsa_attention = public(ops.dsa_attention.OP)
indexer_logits = public(ops.indexer_logits.OP)
indexer_logits_paged = public(ops.indexer_logits_paged.OP)
indexer_topk = public(ops.indexer_topk.OP)
indexer_topk_paged = public(ops.indexer_topk_paged.OP)
map_slots = public(ops.map_slots.OP)
merge_attention = public(ops.merge_attention.OP)
merge_topk = public(ops.merge_topk.OP)
quantize_indexer_query = public(ops.quantize_indexer_query.OP)
read_indexer_cache = public(ops.read_indexer_cache.OP)
read_mla_cache = public(ops.read_mla_cache.OP)
select_topk = public(ops.select_topk.OP)
sparse_mla = public(ops.sparse_mla.OP)
split_batch = public(ops.split_batch.OP)
window_slots = public(ops.window_slots.OP)
write_indexer_cache = public(ops.write_indexer_cache.OP)
write_mla_cache = public(ops.write_mla_cache.OP)

# jax.export has to be told that the custom call of the kernels is a stable one.
EXPORT_CHECKS = (_export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi"),)

__all__ = [
    "compress_kv",
    "convert_indexer_cache",
    "convert_mla_cache",
    "dsa_attention",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_topk",
    "indexer_topk_paged",
    "map_slots",
    "merge_attention",
    "merge_topk",
    "quantize_indexer_query",
    "read_indexer_cache",
    "read_mla_cache",
    "select_topk",
    "sparse_mla",
    "split_batch",
    "window_slots",
    "write_indexer_cache",
    "write_mla_cache",
]
