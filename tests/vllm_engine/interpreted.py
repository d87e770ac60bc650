"""A platform of vLLM for tests: its CPU worker, with sparse attention by xmla's kernels in Triton's interpreter.

The wheels of vLLM for CUDA have no CPU kernels; what the worker calls of them is here, in torch.
"""

import os
from importlib.metadata import version
from typing import Any

import interpreted_glm
import interpreted_v4
import interpreted_v41
import sleeping
import torch
from packaging.version import Version

from xmla.vllm.refusals import has_fp4_entries, has_fp4_keys, is_batch_invariant

V4 = {
    "DeepseekV4ForCausalLM": interpreted_v4,
    "DeepseekV41ForCausalLM": interpreted_v41,
    "Glm5NextForCausalLM": interpreted_glm,
}


def platform() -> str | None:
    """The entry point in the group `vllm.platform_plugins`."""
    return f"{__name__}.InterpretedPlatform" if os.environ.get("TRITON_INTERPRET") == "1" else None


def __getattr__(name: str) -> Any:
    """The classes, made when vLLM asks for them: its platforms cannot be imported while it looks for one."""
    if name not in ("InterpretedPlatform", "Worker"):
        raise AttributeError(name)
    made = make_platform() if name == "InterpretedPlatform" else make_worker()
    globals()[name] = made
    return made


def make_platform() -> type:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class InterpretedPlatform(CpuPlatform):
        @classmethod
        def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            return AttentionBackendEnum.CUSTOM.get_path()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(8, 9)  # for which vLLM has no dense attention of prefills: all of it is sparse

        def is_sleep_mode_available(self) -> bool:
            return True

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """What vLLM takes from MLA on a CPU is given back: chunked prefill, prefix caching and the block size."""
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            chunked, tokens, prefixes, block = (
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
                cache.block_size,
            )
            super().check_and_update_config(vllm_config)
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, tokens
            cache.enable_prefix_caching, cache.block_size = prefixes, max(block, 64)
            vllm_config.parallel_config.worker_cls = f"{__name__}.Worker"

    return InterpretedPlatform


def make_worker() -> type:
    define("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    define("silu_and_mul(Tensor(a!) out, Tensor input) -> ()", silu_and_mul)
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.model_executor.layers import utils as layers
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import workspace
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import block_table
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    from xmla.vllm import patches, recording

    topk_topp_sampler.HAS_TRITON = False  # its kernel would run in the interpreter
    layers.dispatch_cpu_unquantized_gemm = linear
    sparse_attn_indexer.SparseAttnIndexer.forward_cpu = sparse_attn_indexer.SparseAttnIndexer.forward_cuda
    sparse_attn_indexer.SparseAttnIndexer.forward_native = sparse_attn_indexer.SparseAttnIndexer.forward_cuda
    torch.accelerator.empty_cache = lambda: None  # the workspace calls it when it grows
    if Version(version("vllm")) >= Version("0.33"):
        from vllm.v1.attention.ops import dcp

        dcp.CorrectAttnCPOutKernel.kernel.constexprs = ["HEAD_DIM", "N_ROUNDED", "IS_BASE_E"]  # as of one compiled
    if is_batch_invariant():  # vLLM's own kernel for bfloat16 is not one for the interpreter
        from vllm.model_executor.determinism import batch_invariant

        batch_invariant.bmm_batch_invariant = batch_invariant.bmm_out_batch_invariant = exact_bmm
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", product, "CPU")  # of stand-ins
        LIBRARIES.append(library)
    block_table.BlockTables.compute_slot_mappings = slots_of_rank(block_table.BlockTables.compute_slot_mappings)

    recording.record_in(CPUWorker)

    class Worker(CPUWorker):
        sleep, wake_up = GpuWorker.sleep, GpuWorker.wake_up
        _maybe_get_memory_pool_context = sleeping.pool

        def init_device(self) -> None:
            super().init_device()
            within: dict[str, Any] = {}
            drafts = self.speculative_config
            if drafts is not None and drafts.use_dspark():
                within["num_lanes"] = 2  # as the worker for GPUs
            if self.model_config.enable_sleep_mode:
                sleeping.install()
                within["alloc_context"] = lambda: sleeping.pool(self, "workspace")
            workspace.init_workspace_manager(torch.device("cpu"), **within)
            if has_fp4_keys(self.vllm_config):
                patches.apply_all(patches.FP4_KEY_PATCHES, version("vllm"))
            if has_fp4_entries(self.vllm_config):
                patches.apply_all(patches.FP4_PATCHES, version("vllm"))
            if self.vllm_config.lora_config is not None:
                patches.apply_all(patches.LORA_PATCHES, version("vllm"))
            for architecture, replaced in V4.items():
                if architecture in self.model_config.architectures:
                    for schema, function in replaced.kernels().items():
                        define(schema, function)
                    replaced.install()

    return Worker


def define(schema: str, function: Any) -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(schema)
    library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    LIBRARIES.append(library)


LIBRARIES: list[Any] = []  # a library's ops live as long as it


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, value = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * value)


def slots_of_rank(compute: Any) -> Any:
    """`compute_slot_mappings` in torch where Triton's interpreter refuses its kernel's mask: with several ranks."""

    def compute_slot_mappings(
        self: Any, requests: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        ranks, run = self.cp_size, self.cp_interleave
        if ranks == 1:
            return compute(self, requests, starts, positions, num_tokens_padded, out)
        found = self.slot_mappings if out is None else out
        (table,), (page,) = self.block_tables, self.block_sizes
        tokens = int(starts[len(requests)])
        row = requests.repeat_interleave(starts[: len(requests) + 1].diff(), output_size=tokens)
        block, offset = positions[:tokens] // (page * ranks), positions[:tokens] % (page * ranks)
        slots = table.gpu[row, block].long() * page + offset // (run * ranks) * run + offset % run
        found.fill_(-1)
        found[0, :tokens] = torch.where(offset // run % ranks == self.cp_rank, slots, -1)
        return found[:, :num_tokens_padded]

    return compute_slot_mappings


def linear(layer: Any, remove_weight: bool = False) -> None:
    layer.cpu_linear = exact_linear if is_batch_invariant() else torch.nn.functional.linear


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product by NumPy in float64: rounded, it shows no order of sums, which on a CPU follows the number of rows."""
    return torch.from_numpy(a.double().numpy() @ b.double().numpy()).to(a.dtype)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert bias is None
    return product(x, weight.T)


def exact_bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return product(a, b) if out is None else out.copy_(product(a, b))
