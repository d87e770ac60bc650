"""Times of `xmla bench`, op by op, with those of another device beside them; ratios are speeds, above 1 faster than the
peer."""

from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin

# A run's name, of its device and commit, and its times by op and case.
Run = tuple[str, dict[tuple[str, str], Line]]


def device_of(head: Line) -> str:
    return head["versions"]["devices"][0].removeprefix("NVIDIA ").split()[0]


def name_of(head: Line) -> str:
    return f"{device_of(head)} at {head['commit'][:7]}"


def by_case(lines: list[Line]) -> dict[tuple[str, str], Line]:
    return {(line["op"], line["case"]): line for line in lines if "us" in line}


def cells(line: Line) -> dict[str, str]:
    """A case's time, rate, share of the ceiling and ratio to each peer, by column."""
    compute = line["ceiling"] != "copy"
    return {
        "µs": str(line["us"]["xmla"][0]),
        "rate": f"{line['tflop_per_s']:.0f} TFLOP/s" if compute else f"{line['gb_per_s']:.0f} GB/s",
        "share of ceiling": f"{line['share_of_ceiling']:.2f} {line['ceiling']}",
        **{f"beside {peer}": f"{ratio:.2f} ×" for peer, ratio in line["ratio_to_peer"].items()},
    }


def op_tables(op: str, runs: list[Run]) -> list[str]:
    """A table for the cases that the same runs have, beside the same peers."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for case in dict.fromkeys(case for _, lines in runs for of, case in lines if of == op):
        row = {"case": case}
        having = [(name, cells(lines[op, case])) for name, lines in runs if (op, case) in lines]
        for place, (name, columns) in enumerate(having):
            # Of a second device the rate follows from the first one's, and the table is wide.
            shown = {column: text for column, text in columns.items() if column != "rate" or place == 0}
            device = f"{name.split()[0]}: " if len(having) > 1 else ""
            row |= {f"{device}{column}": text for column, text in shown.items()}
        alike.setdefault((" and ".join(name for name, _ in having), *row), []).append([*row.values()])
    markdown = []
    for (names, *head), rows in alike.items():
        markdown += [f"{names}:", "", *table(head, rows), ""]
    return markdown


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


def run_table(heads: list[Line]) -> list[str]:
    """Where the figures come from, with the ceilings when each run began."""
    rows = []
    for head in heads:
        limits, versions = head["ceilings"], head["versions"]
        peers = [head[name] for name in ("flash_mla", "cudnn", "sglang", "vllm", "deep_gemm") if head.get(name)]
        packages = [f"torch {versions['torch']}", f"Triton {versions['triton']}", *peers]
        rates = [f"{limits[kind + '_flop_per_s'] / 1e12:.0f}" for kind in ("bf16", "fp8")]
        copy = f"{limits['copy_bytes_per_s'] / 1e12:.2f}"
        rows.append([name_of(head), origin(head), ", ".join(packages), copy, *rates])
    return table(["run", "of", "software", "copy, TB/s", "bf16, TFLOP/s", "fp8, TFLOP/s"], rows)


def report(file: Path, beside: Path, *further: Path) -> str:
    """Markdown: the runs, then each op's cases, a device's beside the other's; host times of the last run that has any.

    The last run `beside` is another device's, whose host times follow.
    """
    runs = read(file, *further)
    runs.insert(1, read(beside)[-1])
    hosts = [next(run for run in reversed(runs[:1] + runs[2:]) if host_table(run[1:])), runs[1]]
    timed = [(name_of(head), by_case(lines)) for head, *lines in runs]
    markdown = [*run_table([head for head, *_ in runs]), ""]
    for op in dict.fromkeys(op for _, lines in timed for op, _ in lines):
        markdown += [f"## `{op}`", ""]
        # The two of the devices together; the others' cases are of their own.
        markdown += op_tables(op, timed[:2])
        for run in timed[2:]:
            markdown += op_tables(op, [run])
    markdown += ["## The host's time", ""]
    for head, *lines in hosts:
        if host := host_table(lines):
            markdown += [f"{name_of(head)}:", *host, ""]
    return "\n".join(markdown[:-1]) + "\n"
