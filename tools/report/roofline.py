"""Times of `xmla bench` on an H200 beside those of the roofline model."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from tools.report.markdown import table
from tools.report.results import Line, lines_of
from xmla.core.models.calls import Call
from xmla.core.values import H200, Spec

SCALE = 0.1352


@dataclass(frozen=True)
class Estimate:
    op: str
    case: str
    measured: float
    model: float  # both in µs

    @property
    def ratio(self) -> float:
        return self.measured / self.model


# How the cases begin that `call_of` reads.
MODELLED = {
    "sparse_mla": r"decode b=|prefill (bf16 rows|fp8 pages) s_q=", "select_topk": r"\d+ × \d+ k=\d+$",
    "dsa_attention": "b=", "indexer_logits": "i=", "indexer_logits_paged": "b=", "indexer_topk": "i=",
}  # fmt: skip


def call_of(op: str, case: str) -> tuple[Call, float | None]:
    """The call that a benchmark's case names, and the keys of a token where they are fewer than there are."""
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", case)}
    if op == "sparse_mla":
        tokens = sizes.get("b", 1) * sizes["s_q"]
        entries = sizes.get("s_kv", 1 << 22)
        rows, pages = Spec((entries, 1, 576), "bfloat16"), Spec((entries // 64, 64, 656), "uint8")
        cache = rows if "bf16 rows" in case else pages
        q, slots = Spec((tokens, sizes["h"], 576), "bfloat16"), Spec((tokens, sizes["k"]), "int32")
        return Call(op, {"q": q, "cache": cache, "slots": slots}, {"softmax_scale": SCALE}), None
    if op == "select_topk":
        rows, columns = map(int, re.findall(r"\d+", case)[:2])
        logits, ends = Spec((rows, columns), "float32"), Spec((rows,), "int32")
        return Call(op, {"logits": logits, "ends": ends}, {"k": sizes["k"]}), None
    if op == "dsa_attention":
        tokens, keys = sizes["b"], sizes["context"]
        specs = {
            "q": Spec((tokens, sizes["h"], 576), "bfloat16"), "index_q": Spec((tokens, 64, 128), "bfloat16"),
            "index_weights": Spec((tokens, 64), "float32"), "mla_cache": Spec((1 << 16, 64, 656), "uint8"),
            "indexer_cache": Spec((1 << 16, 64, 132), "uint8"), "lengths": Spec((tokens,), "int32"),
            "block_table": Spec((tokens, sizes.get("max_len", keys) // 64), "int32"),
        }  # fmt: skip
        return Call(op, specs, {"k": sizes.get("k", 2048), "softmax_scale": SCALE}), keys
    tokens = sizes["s_q"] if "s_q" in sizes else sizes["b"] * sizes["next_n"]
    heads, rows = sizes.get("i", 64), Spec((tokens,), "int32")
    query = {"q8": Spec((tokens, heads, 128), "float8_e4m3fn"), "weights": Spec((tokens, heads), "float32")}
    if op == "indexer_logits_paged":
        table = Spec((sizes["b"], 65536 // 64), "int32")
        paged = {"cache": Spec((1 << 16, 64, 132), "uint8"), "block_table": table, "lengths": rows}
        return Call(op, query | paged, {}), sizes["keys"]
    keys = sizes["s_kv"]
    ragged = {"keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32")}
    attrs = {}
    if op == "indexer_topk":
        mib = int(re.findall(r"in (\d+) MiB", case)[0])
        attrs = {"k": sizes["k"], "workspace_bytes": mib << 20}
    return Call(op, query | ragged | {"starts": rows, "ends": rows}, attrs), keys - (tokens - 1) / 2  # causal


def estimates(lines: Iterable[Line]) -> Iterator[Estimate]:
    """Every timed case of a result that the model knows."""
    for line in lines:
        if "us" in line and re.match(MODELLED.get(line["op"], "$^"), line["case"]):
            call, keys = call_of(line["op"], line["case"])
            least = call.estimate(H200, keys)
            assert least is not None  # checked by bind
            yield Estimate(line["op"], line["case"], line["us"]["xmla"][0], least * 1e6)


def report(file: Path) -> str:
    """Markdown: the ratios of each op, then a line per case."""
    all_estimates = list(estimates(lines_of(file)))
    ops = []
    for op in dict.fromkeys(estimate.op for estimate in all_estimates):
        ratios = [estimate.ratio for estimate in all_estimates if estimate.op == op]
        figures = (f"{ratio:.2f}" for ratio in (geometric_mean(ratios), min(ratios), max(ratios)))
        ops.append([f"`{op}`", str(len(ratios)), *figures])
    cases = [
        [f"`{each.op}`", each.case, f"{each.measured:.1f}", f"{each.model:.1f}", f"{each.ratio:.2f}"]
        for each in all_estimates
    ]
    of_ops = table(["op", "cases", "measured / model, geometric mean", "least", "most"], ops)
    of_cases = table(["op", "case", "measured, µs", "model, µs", "measured / model"], cases)
    return "\n".join([*of_ops, "", *of_cases]) + "\n"
