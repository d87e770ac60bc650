"""PyTorch and JAX side by side, by `xmla bench --framework torch,jax`: times of the GPU, the host and the best peer."""

from pathlib import Path

from tools.report.results import Line, read
from xmla.bench.provenance import origin


def in_turns(line: Line) -> tuple[float, float]:
    """Microseconds by PyTorch and by JAX. An older run has PyTorch's beside its peers alone."""
    return line["torch"].get("us", line["us"]["xmla"])[0], line["jax"]["us"][0]


def peer_of(line: Line) -> str:
    """The fastest other implementation, and its time."""
    peers = {name: times[0] for name, times in line["us"].items() if name != "xmla" and not name.startswith("itself")}
    if not peers:
        return ""
    name = min(peers, key=peers.__getitem__)
    return f"{peers[name]} {name}"


def gpu_rows(lines: list[Line]) -> list[str]:
    table = ["| op | case | PyTorch, µs | JAX, µs | PyTorch / JAX | best peer, µs |", "|---|---|---|---|---|---|"]
    for line in lines:
        ours, by_jax = in_turns(line)
        table.append(f"| `{line['op']}` | {line['case']} | {ours} | {by_jax} | {ours / by_jax:.2f} | {peer_of(line)} |")
    return table


def host_rows(lines: list[Line]) -> list[str]:
    head = "| op | case | PyTorch: call, with result, µs | jitted JAX: call, with result, µs | without work, µs |"
    table = [head, "|---|---|---|---|---|"]
    for line in lines:
        cells = [f"{line[name]['host_us']}, {line[name]['waited_us']}" for name in ("torch", "jax")]
        cells.append(str(line["jax"]["without_work_us"]))
        table.append(f"| `{line['op']}` | {line['case']} | {' | '.join(cells)} |")
    return table


def cache_rows(lines: list[Line]) -> list[str]:
    """What caches cost the host, as donated arrays and as Refs."""
    times = {line["case"]: line["host_us"] for line in lines if line["op"] == "jit"}
    counts = sorted({int(case.split()[0]) for case in times})
    if not counts:
        return []
    table = [
        "",
        "| caches of a jitted step that does next to nothing | donated arrays, µs | Refs, µs |",
        "|---|---|---|",
    ]
    return table + [f"| {n} | {times[f'{n} donated arrays']} | {times[f'{n} Refs']} |" for n in counts]


def report(file: Path) -> str:
    """Markdown: of each run where its figures come from and GPU times; then the host's times of steps, the last."""
    markdown, every = [], []
    for head, *lines in read(file):
        versions, timed = head["versions"], [line for line in lines if "us" in line.get("jax", {})]
        same = sum(line["jax"]["same_bits"] for line in timed)
        packages = ", ".join(f"{name} {versions[name.lower()]}" for name in ("torch", "Triton", "JAX"))
        markdown += [f"{origin(head)}, {packages}. The same bits by both in {same} of {len(timed)} cases.", ""]
        markdown += [*gpu_rows(timed), ""]
        every += lines
    steps = {line["case"]: line for line in every if line["op"] == "dsa_attention" and "us" in line}
    return "\n".join([*markdown, *host_rows([*steps.values()]), *cache_rows(every)]) + "\n"
