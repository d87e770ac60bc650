"""The ops for PyTorch: functions, and `torch.ops.xmla.*` with fakes and out-variants.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  out: Preallocated results, a tensor or a tuple of them, dense and of the right shape and dtype; they are returned.
  workspace: With `out`, a dense uint8 tensor of at least `xmla.<op>.plan(...).workspace_bytes` to work in.
  implementation: None, the best tested kernels; "triton", the portable ones (interpreted for CPU tensors under
    TRITON_INTERPRET=1); "gluon", the kernels written by hand: None takes them on Hopper for `sparse_mla` and
    `dsa_attention` over plain rows, or with bfloat16 queries over V3.2 or V4 entries, and for the indexer's
    logits over fp8 keys, of pages of a multiple of 64; "reference", the NumPy float64 definition (copies to the host).
No op has a derivative. An argument that requires grad while grad mode is on, or has a tangent, is differentiated, and
the call raises UnsupportedError, eager, compiled (as the cause of dynamo's own error) and under `torch.func`. A model
that only runs calls the ops under `torch.no_grad()` or `torch.inference_mode()`.

The docstring of each function is the op's. Calls read no value, wait for nothing and allocate only the plan's buffers,
on the current stream.

`xmla.<op>.plan` takes the same arguments and returns the call's plan without running it.
`torch.ops.xmla.<op>` is the same without `out` and `workspace`; `torch.ops.xmla.<op>.out` takes the results as trailing
keyword arguments, which it writes. Ops that update a cache in place (`write_*`) have one form, which declares that.
"""

from xmla._frameworks import missing, needed

if missing("torch"):
    raise ImportError(needed("torch"))

from xmla.core import ops
from xmla.torch_api._ops import public

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
