"""A layer in transformers, by each attention, of the lines of `python -m benchmarks.transformers_layer`."""

from pathlib import Path
from typing import Any

from tools.report.markdown import table
from tools.report.results import read
from xmla.bench.provenance import origin

NAMES = "xmla", "eager", "sdpa"


def cell(line: dict[str, Any], name: str, *keys: str) -> str:
    """Milliseconds, and GiB where they are asked for."""
    measured = line.get(name, {"out_of_memory": True})
    if "out_of_memory" in measured:
        return "out of memory"
    return ", ".join(f"{measured[key]:.1f} {'GiB' if key.endswith('gib') else 'ms'}" for key in keys)


def report(file: Path) -> str:
    """Markdown: prefills and decoded tokens, then training steps."""
    (head, *lines) = read(file)[0]
    served = [line for line in lines if "tokens" in line]
    trained = [line for line in lines if "trained" in line]
    prefills = [
        (f"{line['tokens']:,}", *(cell(line, name, "prefill_ms", "peak_gib") for name in NAMES),
         f"{line['xmla']['prefill_ms'] / (line['xmla']['ops_ms'] + line['xmla']['rest_ms']):.2f}")
        for line in served
    ]  # fmt: skip
    decodes = [
        (
            f"{line['tokens']:,}",
            *(cell(line, name, "decode_ms") for name in NAMES),
            cell(line, "xmla", "decode_rest_ms"),
        )
        for line in served
    ]
    steps = [(f"{line['trained']:,}", *(cell(line, name, "step_ms", "peak_gib") for name in NAMES)) for line in trained]
    return "\n".join([
        f"{origin(head)}, torch {head['versions']['torch']}, transformers {head['versions']['transformers']}.", "",
        *table(("tokens of a prefill", *NAMES, "xmla ÷ (its ops + all else)"), prefills), "",
        *table(("a decoded token behind", *NAMES, "without xmla's ops"), decodes), "",
        *table(("tokens of a training step", *NAMES), steps), "",
    ])  # fmt: skip
