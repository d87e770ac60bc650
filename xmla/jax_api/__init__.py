"""The ops for JAX, same names, arguments and bits as `xmla.torch_api`.

Every name here is a function of the op's tensors (positional) and attributes (keyword), plus
  implementation: None, the best tested kernels; "triton", the portable kernels (on the CPU in Triton's interpreter,
    behind `jax.pure_callback`); "gluon", kernels for one architecture; "reference", NumPy in float64 behind
    `jax.pure_callback`. None selects the first of the op's implementations that serves the call; the op's docstring
    lists what each serves.
NumPy arrays keep their dtype: JAX's truncation of 64-bit arrays to 32 bits does not apply to them.

All ops work under `jax.jit`, `jax.vmap` over any axis (one call with more rows; with a batch axis on a cache each
element has its own) and `jax.shard_map`, and can be lowered ahead of time. Reverse mode (`jax.grad`, `jax.vjp`)
differentiates the arguments that an op's docstring names, once; everything else raises. The results of a call that is
differentiated are named `<op>_<result>` for the policies of `jax.checkpoint`.

An op that updates a cache takes it as an array and returns the new one, in place under `jit` with a donated argument,
or as a `jax.Ref` (`jax.new_ref`), which it updates in place. A jitted step that is called once per token takes donated
arrays: JAX calls a jitted function with Refs among its arguments by Python, at a cost for each Ref; Refs in a loop
inside one jitted function cost the host nothing. Ops that read a cache also take a Ref and read it without a copy;
`ref[...]` may copy the pool.

On a GPU a call is one custom call of XLA, `xmla_launch`, of a library that is built once per machine and needs a C++
compiler. A program that has been compiled names kernels of this process: one that is serialised is an export.

Several GPUs: `jit` of arrays with a NamedSharding keeps tokens (axis T) and heads (H) sharded as they are, through one
op or many, with one mesh in the program. Each device computes its own part, nothing is exchanged, and every other axis
is replicated. Also replicated are all axes of ops that update a cache, and everything in an export and with
`implementation="reference"`. An export over an AbstractMesh needs a `shard_map` around the ops. With
`batch_invariant=True` a part of the heads has the same bits as in a call with all heads. `xmla.jax_api.parallel`
divides requests by pages.

Importing this module needs neither a GPU nor PyTorch. To plan and lower for a GPU that is not present, use
`xmla.core.device.assume_device`; `jax.export.export(..., disabled_checks=EXPORT_CHECKS)` then serialises for it.
"""

from xmla._frameworks import missing, needed

if missing("jax"):
    raise ImportError(needed("jax"))

from jax import export as _export

from xmla.core.registry import registry
from xmla.jax_api._ops import public

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

# Tells jax.export that the custom call of the kernels is stable.
EXPORT_CHECKS = (_export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi"),)

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
