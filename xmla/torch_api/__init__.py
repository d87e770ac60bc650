"""The ops for PyTorch: functions, and `torch.ops.xmla.*` with fakes and out-variants.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  out: Preallocated results, a tensor or a tuple of them, dense and of the right shape and dtype; they are returned.
  workspace: With `out`, a dense uint8 tensor of at least `<op>.plan(...).workspace_bytes` as scratch memory.
  implementation: None, the best tested kernels; "triton", the portable kernels (interpreted for CPU tensors under
    TRITON_INTERPRET=1); "gluon", kernels for one architecture; "reference", NumPy in float64 (copies to the host).
    None selects the first of the op's implementations that serves the call; the op's docstring lists what each serves.
An op's docstring names the arguments that have a gradient, which autograd, `torch.func` and compiled code compute
alike, once: a second derivative raises. An argument is differentiated if it requires grad while grad mode is on, or
if it has a tangent. If it has no gradient, or `out` is given, the call raises UnsupportedError, in eager mode, in
compiled code (as the cause of dynamo's own error) and under `torch.func`. A model that only runs inference calls the
ops under `torch.no_grad()` or `torch.inference_mode()`.

The docstring of each function is the op's. A call reads no values, waits for nothing and allocates only the plan's
buffers, on the current stream.

`<op>.plan` takes the same arguments and returns the call's plan without running it.
`torch.ops.xmla.<op>` is the same op without `out` and `workspace`. `torch.ops.xmla.<op>.out` takes the results as
trailing keyword arguments and writes them. Ops that update a cache in place (`write_*`) have one overload, which
declares the mutation.
"""

from xmla._frameworks import missing, needed

if missing("torch"):
    raise ImportError(needed("torch"))

from xmla.core.registry import registry
from xmla.torch_api._ops import public

_declared = registry()
compress_kv = public(_declared["compress_kv"])
convert_indexer_cache = public(_declared["convert_indexer_cache"])
convert_mla_cache = public(_declared["convert_mla_cache"])
dsa_attention = public(_declared["dsa_attention"])
indexer_logits = public(_declared["indexer_logits"])
indexer_logits_paged = public(_declared["indexer_logits_paged"])
indexer_loss = public(_declared["indexer_loss"])
indexer_loss_backward = public(_declared["indexer_loss_backward"])
indexer_scores = public(_declared["indexer_scores"])
indexer_scores_backward = public(_declared["indexer_scores_backward"])
indexer_target = public(_declared["indexer_target"])
indexer_topk = public(_declared["indexer_topk"])
indexer_topk_paged = public(_declared["indexer_topk_paged"])
map_slots = public(_declared["map_slots"])
merge_attention = public(_declared["merge_attention"])
merge_topk = public(_declared["merge_topk"])
quantize_indexer_query = public(_declared["quantize_indexer_query"])
read_indexer_cache = public(_declared["read_indexer_cache"])
read_mla_cache = public(_declared["read_mla_cache"])
select_topk = public(_declared["select_topk"])
sparse_mla = public(_declared["sparse_mla"])
sparse_mla_backward = public(_declared["sparse_mla_backward"])
sparse_mla_paged = public(_declared["sparse_mla_paged"])
split_batch = public(_declared["split_batch"])
window_slots = public(_declared["window_slots"])
write_indexer_cache = public(_declared["write_indexer_cache"])
write_mla_cache = public(_declared["write_mla_cache"])

__all__ = [
    "compress_kv",
    "convert_indexer_cache",
    "convert_mla_cache",
    "dsa_attention",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_loss",
    "indexer_loss_backward",
    "indexer_scores",
    "indexer_scores_backward",
    "indexer_target",
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
    "sparse_mla_backward",
    "sparse_mla_paged",
    "split_batch",
    "window_slots",
    "write_indexer_cache",
    "write_mla_cache",
]
