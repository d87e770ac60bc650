"""Steps over several GPUs, by `python -m benchmarks.parallel run`: a table per run."""

from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin


def run_table(head: Line, *lines: Line) -> str:
    versions, cases = head["versions"], {(line["ranks"], line["requests"], line["context"]): line for line in lines}
    *_, most = several = sorted({ranks for ranks, _, _ in cases if ranks > 1})
    columns = [column for ranks in several for column in (f"{ranks} GPUs", f"{ranks}, scattered")]
    columns += ["exchange", "bytes, predicted", "by NVLink"]
    told = f"{origin(head)}, torch {versions['torch']}, Triton {versions['triton']}, NCCL."
    rows = []
    for context, requests in sorted({(context, requests) for _, requests, context in cases}):
        alone = cases.get((1, requests, context))  # a run that was short of time has it on more ranks alone
        row = [f"{context:,}", str(requests), f"{alone['us']['one GPU']:.0f} µs" if alone else "not timed"]
        for count in several:
            times = cases[count, requests, context]["us"]
            row += [f"{times[kind]:.0f} µs" for kind in ("step", "step, scattered")]
        last = cases[most, requests, context]
        row += [f"{last['share_of_exchange']:.0%}", f"{sum(last['received_bytes'].values()) / 1e6:.2f} MB"]
        row.append(f"{last['nvlink_received_bytes'] / 1e6:.2f} MB" if "nvlink_received_bytes" in last else "")
        rows.append(row)
    return "\n".join([told, "", *table(["context", "requests", "1 GPU", *columns], rows)]) + "\n"


def report(file: Path) -> str:
    """Markdown: of each run where the figures come from, then a line per case."""
    return "\n".join(run_table(*run) for run in read(file))
