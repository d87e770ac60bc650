"""`python serve.py MODEL OUT`: serve requests that join late with vLLM on xmla's ops.

Writes the tokens of each request, their log-probabilities, how often each op was called, the sizes of caches' entries
and how many blocks they have; with --beside also how far
V4.1's calls are apart from vLLM's own, in all layers for all tokens of the prompts, since these are asked for.
With --reference every op is its NumPy reference; with --gather all prefills attend to gathered rows; with --ranks
several processes share heads and keys, which --interleave counts, with --late only after the model is made. With
--invariant vLLM is asked for the same bits in any batch, and attention's scratch memory is that of 26 tokens; with
--alone each request comes when those before are done, whose prefixes are not kept. With --blocks the cache has so many
and each step a dummy batch before it, as of ranks of data parallelism that have no requests; --stages share layers.
With --sleep the engine sleeps at that level, wakes up, and serves the same requests again; with --offload it serves
them again over caches that lost all pages but those that vLLM's connector has copied. With --shared the second layer
has the selection of the first; with --apart each layer maps it itself. With --ampere the GPU has no e4m3. DSpark drafts
as many tokens as --dspark says, and with --adaptive those are verified that pay. With --record what requests select is
recorded, and saved in a folder beside OUT. Requests have the --adapter of this folder. --keys of the indexer are fp8 or
mxfp4. With --options, a JSON object, the engine has these arguments too.
"""

import json
import os
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import adaptive as verification
import interpreted_glm
import interpreted_v41
import own_v41
import sleeping
import torch
import typer
from recorded import call_of, unlisted

from benchmarks.engines.calls import CALLS
from benchmarks.engines.vllm.engines import OPS
from benchmarks.engines.vllm.workers import told
from xmla import torch_api as xt
from xmla.core.config import settings
from xmla.core.models.calls import Call
from xmla.core.values import KNOWN_DEVICES

MADE: dict[str, Call] = {}


def counted(name: str, implementation: str | None) -> Any:
    op = getattr(xt, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        made = call_of(name, args, kwargs)
        MADE[str(made)] = made
        return op(*args, implementation=implementation, **kwargs)

    call.plan = op.plan
    return call


# By the model's type: tokens on a page, and where the streams of the prompts begin.
PAGES = {"deepseek_v32": 64, "deepseek_v4": 256, "deepseek_v41": 64, "glm5_next_text": 128, "hy_v4": 64}
STARTS = {
    "deepseek_v32": (10, 21, 17, 6),
    "deepseek_v4": (22, 28, 18, 10),
    "deepseek_v41": (22, 28, 18, 11),
    "glm5_next_text": (22, 28, 19, 10),
    "hy_v4": (22, 28, 19, 10),
}


def prompts(kind: str) -> dict[str, list[int]]:
    """Requests by name: of several chunks of prefill, of fewer tokens than are selected, and with a page in common.

    The streams are those whose next tokens are not nearly tied in the model.
    """

    def stream(start: int, length: int) -> list[int]:
        return [(7 * i * i + 3 * i) % 250 + 2 for i in range(start, start + length)]

    page, (long, short, late, end) = PAGES[kind], STARTS[kind]
    return {
        "long": stream(long, page + 36),
        "short": stream(short, 7),
        "late": stream(late, 45),
        "prefix": stream(long, page + 6) + stream(end, 9),
    }


def preemptions() -> list[str]:
    """The requests whose pages the scheduler takes from now on, as it takes them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    return preempted


def forget(engine: Any) -> None:
    """Fill all caches with NaN."""
    for layer in engine.vllm_config.compilation_config.static_forward_context.values():
        if (cache := getattr(layer, "kv_cache", None)) is not None:
            torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage()).fill_(0x7F)


def save_selections(engine: Any, prompts: dict[str, list[int]], answers: dict[str, list[int]], folder: Path) -> None:
    """What each layer selected in each request: of all tokens but the last, which no step had."""
    for name, prompt in prompts.items():
        (folder / name).mkdir(parents=True)
        tokens = len(prompt) + len(answers[name]) - 1
        assert engine.collective_rpc("save_selections", args=(name, tokens, str(folder / name)))[0]


def pretend_ampere() -> None:
    """The platform of an A100, with the plugin's functions for GPUs without e4m3."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from xmla.vllm import patches

    type(current_platform).get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(8, 0))
    patches.apply_all(patches.E4M3_PATCHES, version("vllm"))


def serve(
    model: Path, out: Path, reference: bool = False, cache: str = "fp8", drafts: int = 0, gather: bool = False,
    ranks: int = 1, interleave: int = 1, late: bool = False, beside: bool = False, invariant: bool = False,
    alone: bool = False, new: int = 5, blocks: int = 0, stages: int = 1, sleep: int = 0,
    offload: bool = False, shared: bool = False, apart: bool = False, ampere: bool = False, dspark: int = 0,
    adaptive: bool = False, record: bool = False, plain: str = "", adapter: str = "", keys: str = "auto",
    options: str = "{}",
) -> None:  # fmt: skip
    if invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if record:
        settings.selections_gib = 0.5
    for name in OPS:
        setattr(xt, name, counted(name, "reference" if reference else None))
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.config import KernelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.plugins import load_general_plugins

    from xmla.vllm.warmup import calls

    kind = json.loads((model / "config.json").read_text())["model_type"]
    own = own_v41.prepare() if beside else None
    if gather or invariant or apart or ampere or kind in ("deepseek_v41", "glm5_next_text"):
        load_general_plugins()
    if invariant:
        from xmla.core.models import memory

        memory.scratch_v32 = memory.scratch_v4 = lambda *_, **__: 26 << 10
        memory.invariant_scratch = lambda *_: 1 << 10
    if gather:
        from xmla.core.models import memory
        from xmla.vllm import gathered

        memory.MIN_REFERENCES, gathered.rows_are_faster = 1, lambda heads: True
        copy_async = gathered.copy_async

        def counted_copy(*args: Any) -> Any:
            CALLS["copies to the device"] += 1
            return copy_async(*args)

        gathered.copy_async = counted_copy
    arguments: dict[str, Any] = {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    if "enable_jit_warmup" in KernelConfig.__dataclass_fields__:  # of kernels that tests do without
        arguments["kernel_config"] = {"enable_jit_warmup": False}
    if kind == "deepseek_v41":
        interpreted_v41.prepare()
    if kind == "glm5_next_text":
        interpreted_glm.prepare()
    trimmed = verification.install() if adaptive else []
    compared = own_v41.install(own) if beside else None
    if apart:
        from xmla.vllm.backend import XmlaSparseImpl

        XmlaSparseImpl.memory_of_group = lambda *_: None
    if ampere:
        pretend_ampere()
    page = PAGES[kind]
    preempted = preemptions()
    if shared:
        arguments["hf_overrides"] = {"index_topk_pattern": "FS"}
    if plain:
        arguments["kv_cache_dtype_skip_layers"] = [plain]
    if blocks:
        arguments["num_gpu_blocks_override"] = blocks
    if stages > 1:
        arguments["pipeline_parallel_size"] = stages
    if sleep:
        arguments["enable_sleep_mode"] = True
    if offload:
        import offloading

        arguments["kv_transfer_config"] = offloading.connector(1 << 26)
    if late:  # as vLLM does for a connector that moves caches

        def adjust(config: Any, _: Any) -> None:
            config.parallel_config.cp_kv_cache_interleave_size = interleave

        VllmConfig.adjust_dcp_kv_cache_interleave_size = adjust
    else:
        arguments |= {"cp_kv_cache_interleave_size": interleave}
    if drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    if dspark:
        arguments["speculative_config"] = {
            "method": "dspark", "num_speculative_tokens": dspark, "enable_adaptive_verification": adaptive
        }  # fmt: skip
    if adapter:
        arguments |= {"enable_lora": True, "max_lora_rank": 8}
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    arguments = {
        "enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": page,
        "attention_config": {
            "sparse_mla_force_mqa": invariant or kind == "glm5_next_text", "indexer_kv_dtype": keys,
        },
    } | arguments | json.loads(options)  # fmt: skip
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=cache,
            max_model_len=2 * page + 128, enable_chunked_prefill=True, enable_prefix_caching=not alone,
            compilation_config={"custom_ops": ["none"]}, **arguments,
        )
    )  # fmt: skip
    parameters = SamplingParams(
        temperature=0, max_tokens=new, logprobs=1, prompt_logprobs=1 if beside else None, detokenize=False,
        ignore_eos=True,
    )  # fmt: skip

    # The step before which each comes.
    joins = (
        {"long": 0, "short": 20, "late": 40, "prefix": 60} if alone else {"long": 0, "short": 0, "late": 2, "prefix": 5}
    )

    steps: list[int] = []

    def ask() -> dict[str, Any]:
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        step = cached = 0
        while engine.has_unfinished_requests() or step <= max(joins.values()):
            for name, tokens_in in prompts(kind).items():
                if joins[name] == step:
                    engine.add_request(name, {"prompt_token_ids": tokens_in}, parameters, lora_request=lora)
            step += 1
            if blocks:
                engine.collective_rpc("execute_dummy_batch")
            for result in engine.step():
                if result.finished:
                    (answer,) = result.outputs
                    tokens[result.request_id] = list(answer.token_ids)
                    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                    logprobs[result.request_id] = [found[token].logprob for token, found in pairs]
                    cached += result.num_cached_tokens or 0
        steps.append(step)
        return {"tokens": tokens, "logprobs": logprobs, "cached": cached}

    answers = ask()
    if record:
        save_selections(engine, prompts(kind), answers["tokens"], out.parent / "selections")
    if offload:
        engine.reset_prefix_cache()
        forget(engine)
        answers |= {"again": ask(), "moved": offloading.MOVED["bytes"]}
    if sleep:
        engine.sleep(sleep)
        engine.wake_up(["weights"])
        if sleep == 2:
            engine.collective_rpc("reload_weights")
        engine.wake_up(["kv_cache"])
        answers |= {"again": ask(), "discarded": sleeping.MEMORY.discarded}
    answered: dict[str, Any] = {"beside": vars(compared)} if compared else {}
    answered |= answers | told(engine) | {"preempted": preempted, "steps": steps[0], "trimmed": trimmed}
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    caches = [cache for layer in layers if isinstance(cache := getattr(layer, "kv_cache", None), torch.Tensor)]
    answered["entries"] = sorted({cache.shape[-1] for cache in caches if cache.numel()})
    answered["blocks"] = engine.vllm_config.cache_config.num_gpu_blocks
    attention_calls = [call for call in MADE.values() if call.op == "sparse_mla"]
    answered["invariant"] = sorted({call.attrs.get("batch_invariant", False) for call in attention_calls})
    devices = [device for device in KNOWN_DEVICES if not (ampere and device.converts_e4m3)]
    missing = unlisted(MADE.values(), partial(calls, engine.vllm_config), devices)
    out.write_text(json.dumps(answered | {"unlisted": missing}))


if __name__ == "__main__":
    typer.run(serve)
