"""The committed speeds, a line a claim; above 1 xmla is faster.

A cell is the median of all committed cases of a kind on a device, with the worst and the best in brackets.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from tools.report import engines
from tools.report.frameworks import in_turns
from tools.report.markdown import table
from tools.report.ratios import middle
from tools.report.results import Line, lines_of, read

Chosen = Callable[[str], bool]
Row = tuple[str, ...]  # the cells of HEAD
HEAD = "workload", "H200", "H100", "compared with", "more"
ANY: Chosen = lambda case: True
# Of attention: what is timed, and which cases that are.
ATTENTION: dict[str, Chosen] = {
    "decode, V3.2 over fp8 pages, 128 heads": lambda case: case.startswith("decode") and " h=128 " in case,
    "decode, V3.2 over fp8 pages, 16 to 64 heads": lambda case: case.startswith("decode") and " h=128 " not in case,
    "decode, V4 over fp8 pages": lambda case: case.startswith("M1-"),
    "prefill, bf16 rows": lambda case: "prefill bf16 rows" in case,
    "prefill, fp8 pages": lambda case: "prefill fp8 pages" in case,
}
FLASHMLA = {
    "decode, V3.2 over fp8 pages, 16 to 64 heads": "FlashMLA, which pads to 64 heads",
    "prefill, fp8 pages": "FlashMLA on rows already converted to bf16 (conversion not timed)",
}


def cell(ratios: Iterable[float]) -> str:
    ratios = [*ratios]
    return middle(ratios) if ratios else ""


def beside(lines: list[Line], peer: str, chosen: Chosen = ANY) -> list[float]:
    """Speeds as multiples of a peer's, of the cases whose names are chosen and where the peer is right."""
    return [
        ratio
        for line in lines
        for name, ratio in line.get("ratio_to_peer", {}).items()
        if name.startswith(peer) and chosen(line["case"]) and name not in line.get("wrong_peers", ())
    ]


def attention(h200: Path, frameworks: Path, h100: Path) -> list[Row]:
    """Beside FlashMLA. Both runs on an H200 count."""
    devices = lines_of(h200) + lines_of(frameworks), lines_of(h100)
    more = "[cases](docs/performance_cases.md#sparse_mla)"
    return [
        (what, *(cell(beside(lines, "FlashMLA", chosen)) for lines in devices), FLASHMLA.get(what, "FlashMLA"), more)
        for what, chosen in ATTENTION.items()
    ]


def derivative(h200: Path, h100: Path) -> list[Row]:
    """Beside cuDNN, which adds in any order."""
    runs, cudnn = (lines_of(h200), lines_of(h100)), "cuDNN, non-deterministic"
    more = "[cases](docs/performance_cases.md#sparse_mla_backward)"
    faster = [
        [times["cuDNN"] / times[ours] for times in map(medians, lines) for ours in times if ours.startswith("itself")]
        for lines in runs
    ]
    return [
        ("attention's derivative, the same bits in every run", *(cell(beside(lines, "cuDNN")) for lines in runs),
         cudnn, more),
        ("attention's derivative, non-deterministic", *map(cell, faster), cudnn, more),
    ]  # fmt: skip


def medians(line: Line) -> dict[str, float]:
    return {name: us for name, (us, *_) in line["us"].items()}


def selection(h200: Path, frameworks: Path, h100: Path, h200_blocks: Path, h100_blocks: Path) -> list[Row]:
    runs, blocks = (
        (lines_of(h200) + lines_of(frameworks), lines_of(h100)),
        (lines_of(h200_blocks), lines_of(h100_blocks)),
    )
    more, of_blocks = (f"[cases](docs/performance_cases.md#{op})" for op in ("select_topk", "indexer_block_topk"))
    scored: Chosen = lambda case: "×" in case  # vLLM is a peer of blocks too
    return [
        *(("exact top-k", *(cell(beside(lines, peer, scored)) for lines in runs), told, more)
          for peer, told in (("torch.topk", "torch.topk"), ("SGLang", "SGLang's topk_v2"), ("vLLM", "vLLM's kernel"))),
        ("selection in V4.1's blocks (H200: prefill, H100: decode)", *(cell(beside(lines, "vLLM")) for lines in blocks),
         "vLLM's kernels", of_blocks),
    ]  # fmt: skip


def in_jax(file: Path) -> list[Row]:
    """A jitted step of eight layers: the newest of each case."""
    steps = [*{line["case"]: line for line in lines_of(file) if line["case"].startswith("step of")}.values()]
    what, more = "a jitted step of eight layers in JAX", "[both frameworks](docs/performance_frameworks.md)"
    waited = {"CUDA graph": [in_turns(line)[0] / line["jax"]["waited_us"] for line in steps],
              "calls": [line["torch"]["waited_us"] / line["jax"]["waited_us"] for line in steps]}  # fmt: skip
    return [
        (f"{what}, GPU time", cell(ours / by_jax for ours, by_jax in map(in_turns, steps)), "",
         "a CUDA graph of the same in PyTorch, GPU time", more),
        (f"{what}, each step waited for", cell(waited["CUDA graph"]), "", "the same graph, GPU time", more),
        (f"{what}, each step waited for", cell(waited["calls"]), "", "eager PyTorch, each step waited for", more),
    ]  # fmt: skip


def model_in_jax(file: Path) -> list[Row]:
    return [
        ("a decode step of a model in JAX, eight layers of V3.2, 16 and 128 heads, 1 to 64 requests",
         cell(line["torch_graph_ms"] / line["jax_ms"] for line in lines_of(file)), "",
         "a CUDA graph of transformers' model with xmla's ops, its other operations as PyTorch calls them",
         "[a model in JAX](docs/jax_model.md)"),
    ]  # fmt: skip


def peers_in_jax(file: Path) -> list[Row]:
    lines, more, by_xla = lines_of(file), "[log](benchmarks/log/jax.md)", "tokamax by XLA"
    return [
        (what, cell(beside(lines, peer)), "", told, more)
        for what, peer, told in (
            ("attention of V3.2 in JAX over bf16 rows: 64 tokens, with its derivative, 1024 tokens", "gather",
             "gather and softmax in `jax.numpy`"),
            ("attention of V4 in JAX, 1 and 8 decodes", "tokamax sparse_mla", by_xla),
            ("selection in JAX, 1 and 8 decodes", "tokamax lightning_indexer", by_xla),
            ("selection in JAX, 4096 causal tokens", "jax-linear-attention index_topk", "jax-linear-attention"),
            ("the indexer's loss and its derivative in JAX, 4096 causal tokens, 2048 keys",
             "jax-linear-attention selected_index_scores", "jax-linear-attention"),
        )
    ]  # fmt: skip


def fused_backend(runs: list[Line]) -> str:
    """How much faster than Megatron's backend in TileLang; `cudnn` was not timed."""
    ratios = cell(run["tilelang"]["ms"] / run["xmla"]["ms"] for run in runs if "ms" in run.get("tilelang", {}))
    return f"its `tilelang` {ratios}, its `cudnn` was not timed"


def trained(layer: Path, megatron: Path, tokens: int = 4096) -> list[Row]:
    line = next(line for line in lines_of(layer) if line["tokens"] == tokens)
    ours, dense = line["xmla"], line["dense"]
    runs = [run for run, *_ in read(megatron) if "none" in run]  # of long sequences xmla runs alone
    return [
        (f"a training step of a layer of V3.2, {tokens} tokens, without its projections",
         cell([dense["ms"] / ours["ms"]]), "",
         f"the dense layer in PyTorch ({ours['peak_gib']:.1f} instead of {dense['peak_gib']:.1f} GiB)",
         "[training](docs/training.md#time-and-memory-of-a-layer)"),
        (f"a step of Megatron-Core's own layer, {tokens} tokens, one GPU and two",
         cell(run["none"]["ms"] / run["xmla"]["ms"] for run in runs), "",
         f"its unfused PyTorch code (`none`); {fused_backend(runs)}",
         "[Megatron-Core](docs/megatron.md)"),
    ]  # fmt: skip


def in_transformers(file: Path) -> list[Row]:
    """A layer beside `sdpa`, where that has the memory."""
    of = "a layer of V3.2 in transformers"
    kinds = ((f"a prefill of {of}", "tokens", "prefill_ms"), (f"a training step of {of}", "trained", "step_ms"))
    return [
        (f"{what}, 4096 and 16384 tokens",
         cell(line["sdpa"][key] / line["xmla"][key] for line in lines_of(file)
              if having in line and key in line.get("sdpa", {})), "",
         "its own `sdpa`", "[transformers](docs/transformers.md#measured)")
        for what, having, key in kinds
    ]  # fmt: skip


def served(what: str, peer: str, more: str, *devices: Path, several: bool = False) -> list[Row]:
    """An engine's decode and prefill."""
    return [
        (f"{what}, {of}", *(
            cell(ratio for head, *lines in read(file) for ratio in engines.ratios(head, lines, key, several))
            for file in devices
        ), peer, more)
        for of, key in (("decode, a forward pass", "forward_us"), ("prefill", "prefill_tokens_per_s"))
    ]  # fmt: skip


def markdown(rows: Iterable[Row]) -> str:
    return "\n".join([*table(HEAD, rows), ""])


def report(
    h200: Path, frameworks: Path, h100: Path, h200_backward: Path, h100_backward: Path, jax_peers: Path, layer: Path,
    megatron: Path, transformers: Path, h200_vllm: Path, h100_vllm: Path,
) -> str:  # fmt: skip
    """Markdown of the README."""
    return markdown([
        *attention(h200, frameworks, h100),
        *derivative(h200_backward, h100_backward),
        *in_jax(frameworks),
        *peers_in_jax(jax_peers),
        *trained(layer, megatron),
        *in_transformers(transformers),
        *served("vLLM 0.33 on one GPU", "its own kernels", "[vLLM](docs/vllm_measured.md)", h200_vllm, h100_vllm),
    ])  # fmt: skip


def from_docs(rows: Iterable[Row]) -> list[Row]:
    """The rows, with links as a page of docs has them."""
    return [(*row[:-1], row[-1].replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")) for row in rows]


def ops(
    h200: Path, frameworks: Path, h100: Path, h200_backward: Path, h100_backward: Path, h200_blocks: Path,
    h100_blocks: Path,
) -> str:  # fmt: skip
    """Markdown: ops beside their best peers."""
    return markdown(from_docs([
        *attention(h200, frameworks, h100),
        *derivative(h200_backward, h100_backward),
        *selection(h200, frameworks, h100, h200_blocks, h100_blocks),
    ]))  # fmt: skip


def steps(
    frameworks: Path, model_step: Path, jax_peers: Path, layer: Path, megatron: Path, transformers: Path,
    h200_vllm: Path, h100_vllm: Path, h200_sglang: Path, h100_sglang: Path,
) -> str:  # fmt: skip
    """Markdown: layers, models and engines."""
    own, vllm, sglang = "its own kernels", "[vLLM](docs/vllm_measured.md)", "[SGLang](docs/sglang_measured.md)"
    return markdown(from_docs([
        *in_jax(frameworks),
        *model_in_jax(model_step),
        *peers_in_jax(jax_peers),
        *trained(layer, megatron),
        *in_transformers(transformers),
        *served("vLLM 0.33 on one GPU", own, vllm, h200_vllm, h100_vllm),
        *served("vLLM 0.33 on two and four GPUs", own, vllm, h200_vllm, h100_vllm, several=True),
        *served("SGLang 0.5.23 (H200: V4, H100: V3.2)", own, sglang, h200_sglang, h100_sglang),
    ]))  # fmt: skip
