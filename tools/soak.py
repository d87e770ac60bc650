"""Random steps of a server within a configuration: no kernel that they launch may be missing from warm-up's list.

python -m tools.soak [--steps N] [--model NAME] [--framework NAME]    plans alone, for any GPU, without one
python -m tools.soak --gpu --seconds 60 [--framework NAME]            real calls on this GPU, with compiling forbidden
python -m tools.soak --rerun NAME/CONFIGURATION/STEP [...]            one step, with the other options as they were

A step has any number of requests and tokens and a table of any width, drafts where the configuration has them, prefills
alone or behind the decodes, whose arrays of tokens are then slices of the step's. A kernel that is not listed would be
compiled by the first call that launches it, in the middle of serving.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Annotated, Any

from tools import environment  # noqa: F401, chooses the interpreter where there is no GPU

# isort: split
import numpy as np
import typer
from rich.console import Console

from xmla import ModelConfig, ModelConfigGlmFlash, ModelConfigMistralLarge4, ModelConfigV4, ModelConfigV41, warmup
from xmla.core.compile import Specialization, begins_anywhere
from xmla.core.config import settings
from xmla.core.errors import UnsupportedError
from xmla.core.models.base import Model, split
from xmla.core.models.calls import Call
from xmla.core.models.v4 import V4Base
from xmla.core.registry import registry
from xmla.core.values import Device, Spec, alignment_of, find_device

MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (ModelConfig, ModelConfigV4, ModelConfigV41, ModelConfigGlmFlash, ModelConfigMistralLarge4)
}
STEPS = 20_000  # of a configuration
MOST_PAGES = 1 << 20  # of a pool; of one that is allocated fewer
ALLOCATED_PAGES = 1 << 10
FORMATS = {
    ModelConfig: [{"cache_format": name} for name in ("v32", "plain", "nope", "nvfp4")],
    ModelConfigV4: [
        {"cache_format": cache, "extra_format": extra}
        for cache, extra in (("v4", "v4"), ("v41", "v41_fp4"), ("plain_v4", "plain_v4"))
    ],
    ModelConfigV41: [
        {"cache_format": cache, "extra_format": extra}
        for cache, extra in (("v41", "v41_fp4"), ("v41_footer", "v41_fp4_footer"), ("v4", "v4"))
    ],
    ModelConfigGlmFlash: [{"cache_format": name} for name in ("nope", "plain", "plain_v4")],
    ModelConfigMistralLarge4: [
        {"cache_format": rope, "nope_format": nope} for rope, nope in (("v32", "nope"), ("plain", "plain_v4"))
    ],
}


def any_size(rng: np.random.Generator, most: int) -> int:
    """Each power of two as likely as another, and the numbers beside them likelier than others."""
    size = int(2 ** rng.uniform(0, np.log2(most + 1)))
    if rng.random() < 0.3:
        size = (1 << size.bit_length() - 1) + int(rng.integers(-1, 2))
    return int(np.clip(size, 1, most))


def configuration(model: type[Model], number: int, framework: str) -> Model:
    """The model as served: configuration 0 is by default, others are random."""
    sizes: dict[str, Any] = {"next_n": (1, 2, 4), "mixed": True}
    if issubclass(model, V4Base) and framework == "jax":
        sizes["dense_pages"] = True
    if number == 0:
        return model(**sizes)
    rng = np.random.default_rng(number)
    drafts = (1, *sorted({int(n) for n in rng.integers(2, 9, 2)}))
    sizes |= {
        "heads": int(rng.choice([8, 16, 32, 64, 128])), "index_heads": int(rng.choice([8, 16, 32, 64])),
        "index_format": str(rng.choice(["fp8", "mxfp4", "fp8_ue8m0"])), "k": int(rng.choice([128, 512, 2048, 4096])),
        "page_size": int(rng.choice([16, 32, 64, 128, 256])), "next_n": drafts[: int(rng.integers(1, 4))],
        "mixed": bool(rng.integers(2)), "batch_invariant": bool(rng.random() < 0.2), "batches": (any_size(rng, 1024),),
        "max_lens": (64 * any_size(rng, 1 << 14),),
        "prefill_tokens": (any_size(rng, 16384),) if rng.random() < 0.8 else (),
    }  # fmt: skip
    sizes |= FORMATS[model][int(rng.integers(len(FORMATS[model])))]
    if model is ModelConfig:
        sizes |= {"shared_selection": bool(rng.integers(2)), "sink": bool(rng.integers(2))}
        if framework == "torch":
            sizes["ranks"] = int(rng.choice([1, 1, 2, 8]))
    return model(**sizes)


def step(config: Model, seed: tuple[int, int], framework: str, most_pages: int = MOST_PAGES) -> Iterator[Call]:
    """The calls of one step within `config`: of decodes, of a prefill or of both."""
    rng = np.random.default_rng(seed)
    max_len, pages = any_size(rng, max(config.max_lens)), max(2, any_size(rng, most_pages))
    decodes = 0
    if config.batches and (rng.random() < 0.7 or not config.prefill_tokens):
        requests, next_n, most = any_size(rng, max(config.batches)), int(rng.choice(config.next_n)), max(config.next_n)
        decodes = requests * next_n
        if config.mixed and rng.random() < 0.5:
            decodes = int(rng.integers(requests, requests * most + 1))
            yield split(requests, most)
            calls = config.paged(decodes, 1, max_len, mixed=True)
        else:
            calls = config.decode(requests, next_n, max_len)
        yield from (call.with_pages(pages) for call in calls)
    if config.prefill_tokens and (not decodes or rng.random() < 0.5):
        tokens = any_size(rng, max(config.prefill_tokens))
        gathers, mixed = rng.random(2) < 0.5
        calls = config.prefill(tokens, max_len) if gathers else config.paged(1, tokens, max_len, bool(mixed))
        for call in calls:
            call = call.with_pages(pages)
            yield behind(call, decodes, rng) if framework == "torch" else call  # in JAX a slice is an array of its own


def behind(call: Call, first: int, rng: np.random.Generator) -> Call:
    """The call with some arrays of integers as slices from the row `first` on."""

    def part(name: str, spec: Spec) -> Spec:
        if not begins_anywhere(name, spec) or rng.random() < 0.5:
            return spec
        return replace(spec, alignment=alignment_of(first * spec.stride(0) * spec.itemsize))

    return replace(call, specs={name: part(name, spec) for name, spec in call.specs.items()})


def unlisted(calls: Iterator[Call], device: Device, listed: set[Specialization]) -> list[str]:
    """The kernels of these calls that are not listed."""
    return [f"{call.op}: {kernel}" for call in calls for kernel in call.specializations(device) if kernel not in listed]


def run(call: Call, framework: str) -> None:
    """Make the call on the GPU, of zeros."""
    op = registry()[call.op]
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        from xmla.jax_api._all_ops import JAX_OPS

        arrays = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in call.specs.items()}
        results = getattr(JAX_OPS, call.op)(*(arrays.get(name) for name in op.tensors), **call.attrs)
        jax.block_until_ready(results)
        return
    import torch

    from xmla.torch_api._all_ops import TORCH_OPS

    def zeros(spec: Spec) -> torch.Tensor:
        memory = torch.zeros(spec.span + 16, dtype=torch.uint8, device="cuda")[spec.alignment % 16 :]
        whole = memory[: spec.span].view(getattr(torch, spec.dtype))
        strides = spec.strides or tuple(spec.stride(axis) for axis in range(len(spec.shape)))
        return whole.as_strided(spec.shape, strides)

    tensors = {name: zeros(spec) for name, spec in call.specs.items()}
    getattr(TORCH_OPS, call.op)(*(tensors.get(name) for name in op.tensors), **call.attrs)


def refused(calls: Iterator[Call], framework: str) -> list[str]:
    """What these calls would compile, by calling."""
    messages = []
    for call in calls:
        try:
            run(call, framework)
        except UnsupportedError as error:
            messages.append(f"{call.op}: {error}")
    return messages


def main(
    steps: Annotated[int, typer.Option(help="Stop after so many steps of each model; 0: when the time is over.")] = 0,
    seconds: Annotated[float, typer.Option(help="Stop after so many seconds of each model.")] = 60,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these, of {', '.join(MODELS)}.")] = None,
    framework: Annotated[str, typer.Option(help="torch or jax: whose arrays.")] = "torch",
    device: Annotated[str, typer.Option(help="The GPU that is planned for.")] = "H200",
    gpu: Annotated[bool, typer.Option(help="Make the calls on this GPU, with XMLA_FORBID_JIT.")] = False,
    first: Annotated[int, typer.Option(help="First configuration; 0 is by default, others are random.")] = 0,
    rerun: Annotated[str, typer.Option(help="This one step: NAME/CONFIGURATION/STEP.")] = "",
) -> None:
    """Soak; print what ran and what is not listed, with the step's name. Exit 1 if anything is not."""
    console, missing, planned = Console(width=150, soft_wrap=True, markup=False), Counter[str](), find_device(device)
    names = [rerun.split("/")[0]] if rerun else model or list(MODELS)
    for name in names:
        done, took, began = 0, 0.0, time.monotonic()
        for number in [int(rerun.split("/")[1])] if rerun else count(first):
            config = configuration(MODELS[name], number, framework)
            if gpu:
                settings.forbid_jit = False
                listed = set(warmup(config, progress=False).specializations)
                settings.forbid_jit = True
            else:
                listed = set(config.specializations(planned))
            console.print(f"{name}/{number}: {len(listed)} kernels listed; {config}")
            begun = time.monotonic()
            for place in [int(rerun.split("/")[2])] if rerun else range(STEPS):
                calls = step(config, (number, place), framework, ALLOCATED_PAGES if gpu else MOST_PAGES)
                for message in refused(calls, framework) if gpu else unlisted(calls, planned, listed):
                    missing[message] += 1
                    if missing[message] == 1:
                        console.print(f"{name}/{number}/{place}: {message}")
                done += 1
                if (steps and done >= steps) or (not steps and took + time.monotonic() - begun >= seconds):
                    break
            took += time.monotonic() - begun
            if rerun or (steps and done >= steps) or (not steps and took >= seconds):
                break
        console.print(f"{name}: {done} steps, {len(missing)} not listed so far, {time.monotonic() - began:.0f} s")
    raise typer.Exit(code=int(bool(missing)))


if __name__ == "__main__":
    typer.run(main)
