"""The committed speeds, a line a claim; above 1 xmla is faster. A range is of all cases of a kind, the worst first."""

from collections.abc import Callable
from pathlib import Path

from tools.report import engines
from tools.report.frameworks import in_turns
from tools.report.markdown import table
from tools.report.ratios import middle, span
from tools.report.results import Line, lines_of, read

Chosen = Callable[[str], bool]


def ratios(lines: list[Line], peer: str, chosen: Chosen) -> list[float]:
    """Speeds as multiples of a peer's, of the cases whose names are chosen."""
    return [
        ratio
        for line in lines
        for name, ratio in line.get("ratio_to_peer", {}).items()
        if name.startswith(peer) and chosen(line["case"])
    ]


def beside(lines: list[Line], peer: str, chosen: Chosen) -> str:
    return span(ratios(lines, peer, chosen))


def derivative_in_any_order(lines: list[Line]) -> str:
    """Speed of attention's derivative that adds in any order beside cuDNN's."""
    return span(in_any_order(lines))


def in_any_order(lines: list[Line]) -> list[float]:
    times = [{name.partition(",")[0]: us for name, (us, *_) in line["us"].items()} for line in lines]
    return [case["cuDNN"] / case["itself"] for case in times]


def steps_of(lines: list[Line]) -> list[Line]:
    """The newest of each case of a step of layers."""
    return [*{line["case"]: line for line in lines if line["case"].startswith("step of")}.values()]


def in_jax(lines: list[Line]) -> str:
    """Speed of a jitted step of layers beside the CUDA graph of PyTorch's."""
    return span(by_torch / by_jax for by_torch, by_jax in map(in_turns, steps_of(lines)))


def waited_in_jax(lines: list[Line]) -> str:
    """Speed of a jitted step of layers until its results are there, beside PyTorch's calls."""
    return span(line["torch"]["waited_us"] / line["jax"]["waited_us"] for line in steps_of(lines))


def model_in_jax(lines: list[Line]) -> str:
    """Speed of the JAX model's decode step beside the CUDA graph of transformers' model with xmla's ops."""
    return span(line["torch_graph_ms"] / line["jax_ms"] for line in lines)


def megatron(file: Path) -> str:
    runs = [run for run, *_ in read(file) if "none" in run]  # of long sequences xmla runs alone
    return span(run["none"]["ms"] / run["xmla"]["ms"] for run in runs)


def layer(file: Path, tokens: int) -> tuple[str, str]:
    """Speed of a layer's training step beside the dense one in PyTorch, and the memory of both."""
    line = next(line for line in lines_of(file) if line["tokens"] == tokens)
    ours, dense = line["xmla"], line["dense"]
    return f"{dense['ms'] / ours['ms']:.2f} ×", f"{ours['peak_gib']:.1f} instead of {dense['peak_gib']:.1f} GiB"


def beside_sdpa(file: Path, what: str, key: str) -> str:
    """Speed of a layer in transformers on xmla beside `sdpa`, where that has the memory."""
    lines = [line for line in lines_of(file) if what in line and key in line.get("sdpa", {})]
    return span(line["sdpa"][key] / line["xmla"][key] for line in lines)


def vllm(file: Path, key: str) -> str:
    """Speed of vLLM's engine on xmla beside its own kernels, by context and requests; key: of a time or a rate.

    Not of several GPUs, whose passes have waits for each other.
    """
    cases = [case for _, *lines in read(file) for case in engines.cases_of(lines).values()]
    pair = "xmla-graphs", "own-graphs"
    both = [engines.figures(case, pair, key) for case in cases if engines.pair_of(case) == pair]
    return span(theirs / ours if key.endswith("_us") else ours / theirs for ours, theirs in both)


def report(
    bench: Path, backward: Path, frameworks: Path, model_step: Path, jax_peers: Path, layer_steps: Path,
    megatron_steps: Path, engine: Path, in_transformers: Path,
) -> str:  # fmt: skip
    """Markdown: what, how fast, beside what and where all cases stand."""
    ops, derivative, steps, peers = map(lines_of, (bench, backward, frameworks, jax_peers))
    (faster, memory), tokens = layer(layer_steps, 4096), "4096 tokens"
    both = "[both frameworks](docs/performance_frameworks.md)"
    by_xla, log = "tokamax by XLA", "[log](benchmarks/log/jax.md)"
    hf = "its own `sdpa`"
    always: Callable[[str], bool] = lambda case: True
    performance, pages = "[cases](docs/performance_cases.md#sparse_mla)", "over fp8 pages"
    rows = [
        (f"decode of V3.2 {pages}, 128 heads, 1 to 128 requests",
         beside(ops, "FlashMLA", lambda case: case.startswith("decode") and " h=128 " in case), "FlashMLA",
         performance),
        (f"decode of V3.2 {pages}, 16 to 64 heads",
         beside(ops, "FlashMLA", lambda case: case.startswith("decode") and " h=128 " not in case),
         "FlashMLA, which pads to 64 heads", performance),
        (f"decode of V4 {pages}", beside(ops, "FlashMLA", lambda case: case.startswith("M1-")), "FlashMLA",
         performance),
        ("prefill over bf16 rows", beside(ops, "FlashMLA", lambda case: "prefill bf16 rows" in case), "FlashMLA",
         performance),
        (f"prefill {pages}", beside(ops, "FlashMLA", lambda case: "prefill fp8 pages" in case),
         "FlashMLA over bf16 rows, dequantised before", performance),
        ("attention's derivative on an H100, with the same bits in every run",
         beside(derivative, "cuDNN", always), "cuDNN, which adds in any order",
         "[log](benchmarks/log/training.md)"),
        ("the same in any order", derivative_in_any_order(derivative), "cuDNN", "[log](benchmarks/log/training.md)"),
        ("a jitted step of eight layers in JAX, the GPU's time", in_jax(steps),
         "a CUDA graph of the same in PyTorch", both),
        ("the same, waited for", waited_in_jax(steps), "the same in PyTorch, call by call", both),
        ("a decode step of a model in JAX, eight layers of V3.2, 16 and 128 heads, 1 to 64 requests",
         model_in_jax(lines_of(model_step)),
         "a CUDA graph of transformers' model with xmla's ops, its other operations as PyTorch calls them",
         "[a model in JAX](docs/jax_model.md)"),
        ("attention of V3.2 in JAX over bf16 rows, 64 and 1024 tokens", beside(peers, "gather", always),
         "gather and softmax in `jax.numpy`", log),
        ("attention of V4 in JAX, 1 and 8 decodes", beside(peers, "tokamax sparse_mla", always), by_xla, log),
        ("selection in JAX, 1 and 8 decodes", beside(peers, "tokamax lightning_indexer", always), by_xla, log),
        ("selection in JAX, 4096 causal tokens", beside(peers, "jax-linear-attention", always), "jax-linear-attention",
         log),
        (f"a training step of a layer of V3.2, {tokens}", faster, f"the dense one in PyTorch; {memory}",
         "[training](docs/training.md#time-and-memory-of-a-layer)"),
        (f"a step of Megatron-Core's own layer, {tokens}, one GPU and two", megatron(megatron_steps),
         "its PyTorch code", "[Megatron-Core](docs/megatron.md)"),
        ("a prefill of a layer of V3.2 in transformers, 4096 and 16384 tokens",
         beside_sdpa(in_transformers, "tokens", "prefill_ms"), hf, "[transformers](docs/transformers.md#measured)"),
        ("a training step of it, of as many tokens", beside_sdpa(in_transformers, "trained", "step_ms"), hf,
         "[transformers](docs/transformers.md#measured)"),
        ("vLLM 0.33's forward pass, decode of V3.2, V4, V4.1 and GLM-5.3-Flash, 4 or 5 layers",
         vllm(engine, "forward_us"), "its own kernels, with torch 2.11 and without CuTe DSL",
         "[vLLM](docs/vllm_measured.md)"),
        ("its prefill, tokens a second", vllm(engine, "prefill_tokens_per_s"), "the same",
         "[vLLM](docs/vllm_measured.md)"),
    ]  # fmt: skip
    return "\n".join([*table(("what", "speed", "beside", "more"), rows), ""])


# What of `xmla bench` is a line of its own: a name, the peer, and which cases.
OF_ATTENTION: tuple[tuple[str, str, Chosen], ...] = (
    ("decode, V3.2 over fp8 pages, 128 heads", "FlashMLA",
     lambda case: case.startswith("decode") and " h=128 " in case),
    ("decode, V3.2 over fp8 pages, 16 to 64 heads", "FlashMLA, which pads to 64 heads",
     lambda case: case.startswith("decode") and " h=128 " not in case),
    ("decode, V4 over fp8 pages", "FlashMLA", lambda case: case.startswith("M1-")),
    ("prefill, bf16 rows", "FlashMLA", lambda case: "prefill bf16 rows" in case),
    ("prefill, fp8 pages", "FlashMLA on rows already converted to bf16 (conversion not timed)",
     lambda case: "prefill fp8 pages" in case),
)  # fmt: skip


def glance(
    h200: Path, frameworks: Path, h100: Path, h200_backward: Path, h100_backward: Path, h200_blocks: Path,
    h100_blocks: Path,
) -> str:  # fmt: skip
    """Markdown: ops beside their best peers on both devices, each cell of all committed cases of the kind."""
    devices = lines_of(h200) + lines_of(frameworks), lines_of(h100)
    derivatives = lines_of(h200_backward), lines_of(h100_backward)
    blocks = lines_of(h200_blocks), lines_of(h100_blocks)
    always: Chosen = lambda case: True

    def row(what: str, peer: str, runs: tuple[list[Line], ...], chosen: Chosen, name: str = "") -> list[str]:
        found = [ratios(lines, name or peer.partition(",")[0].partition(" on ")[0], chosen) for lines in runs]
        return [what, *(middle(each) if each else "" for each in found), peer]

    rows = [row(what, peer, devices, chosen) for what, peer, chosen in OF_ATTENTION]
    cudnn = "cuDNN, which is non-deterministic"
    rows += [
        row("attention's derivative, the same bits in every run", cudnn, derivatives, always, "cuDNN"),
        ["attention's derivative, non-deterministic", "", middle(in_any_order(derivatives[1])), cudnn],
        *(row("`select_topk`", peer, devices, always) for peer in ("torch.topk", "SGLang topk_v2")),
        row("`select_topk`", "vLLM's kernel", devices, lambda case: "×" in case, "vLLM"),
        row("selection in V4.1's blocks (H200: prefill, H100: decode)", "vLLM's kernels", blocks, always, "vLLM"),
    ]  # fmt: skip
    return "\n".join([*table(("op", "H200", "H100", "beside"), rows), ""])
