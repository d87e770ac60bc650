"""Times of `xmla bench`, with those of another device beside them; ratios are speeds, above 1 faster than the peer."""

from collections.abc import Sequence
from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin


def cells(line: Line) -> tuple[str, str, str, str]:
    """A case's time, rate, share of the ceiling and ratios to peers."""
    rate = f"{line['tflop_per_s']:.0f} TFLOP/s" if line["ceiling"] != "copy" else f"{line['gb_per_s']:.0f} GB/s"
    against = ", ".join(f"{ratio:.2f} × {peer}" for peer, ratio in line["ratio_to_peer"].items())
    return str(line["us"]["xmla"][0]), rate, f"{line['share_of_ceiling']:.2f} {line['ceiling']}", against


def by_case(lines: Sequence[Line]) -> dict[tuple[str, str], Line]:
    return {(line["op"], line["case"]): line for line in lines if "us" in line}


def case_table(lines: list[Line], others: Sequence[Line] = (), device: str = "") -> list[str]:
    """A run's cases; the `others`, of another `device`, in columns beside them, and its further cases below."""
    head, own, beside = ["op", "case", "µs", "rate", "share of ceiling", "against"], by_case(lines), by_case(others)
    if beside:
        head += [f"{device}: µs", "share of ceiling", "against"]
    cases = []
    for op, case in own | beside:
        row = [f"`{op}`", case, *(cells(own[op, case]) if (op, case) in own else [""] * 4)]
        if beside:
            us, _, share, against = cells(beside[op, case]) if (op, case) in beside else [""] * 4
            row += [us, share, against]
        cases.append(row)
    return table(head, cases)


def host_table(lines: list[Line]) -> list[str]:
    calls = [line for line in lines if "torch_add_us" in line]
    if not calls:
        return []
    names = "launches", "allocations", "host_us"
    rows = [
        [f"`{line['op']}`", *(str(line[name]) for name in names), str(line.get("host_us_out_workspace", ""))]
        for line in calls
    ]
    head = "host time of an eager torch call", "launches", "allocations", "µs", "with `out` and `workspace`"
    markdown = ["", *table(head, rows), f"| `torch.add` | 1 | 1 | {calls[0]['torch_add_us']} | |"]
    for line in (line for line in lines if "jitted_addition_us" in line):
        addition = f"a jitted addition takes {line['jitted_addition_us']} µs"
        markdown += ["", f"Dispatch of a jitted JAX `{line['op']}`: {line['host_us']} µs; {addition}."]
    return markdown


def beginning(head: Line) -> str:
    """Where the figures of one file come from, with the ceilings then."""
    limits, versions = head["ceilings"], head["versions"]
    peers = [head[name] for name in ("flash_mla", "cudnn", "sglang", "vllm", "deep_gemm") if head.get(name)]
    packages = [f"torch {versions['torch']}", f"Triton {versions['triton']}", *peers]
    return (
        f"{origin(head)}, {', '.join(packages)}. "
        f"Ceilings when the run began: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 {limits['bf16_flop_per_s'] / 1e12:.0f} and fp8 {limits['fp8_flop_per_s'] / 1e12:.0f} TFLOP/s."
    )


def report(file: Path, beside: Path, *further: Path) -> str:
    """Markdown of each run: where its figures come from, then a line per case; host times of the last that has any.

    The last run `beside` is another device's: its cases stand beside the first run's, and its host times follow.
    """
    (first, *cases), *more = runs = read(file, *further)
    head, *others = read(beside)[-1]
    device = head["versions"]["devices"][0].removeprefix("NVIDIA ").split()[0]
    markdown = [beginning(first), "", f"{device}: {beginning(head)}", "", *case_table(cases, others, device)]
    hosts = [next(run for run in reversed(runs) if host_table(run[1:]))]
    hosts += [[head, *others]] if host_table(others) else []
    for head, *lines in more:
        markdown += ["", beginning(head), "", *case_table(lines)] if by_case(lines) else []
    for head, *lines in hosts:
        markdown += ["", *([beginning(head)] if head is not first else []), *host_table(lines)]
    return "\n".join(markdown) + "\n"
