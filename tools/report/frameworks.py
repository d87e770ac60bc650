"""PyTorch and JAX side by side, by `xmla bench --framework torch,jax`: times of the GPU, the host and the best peer."""

from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin


def in_turns(line: Line) -> tuple[float, float]:
    """Microseconds by PyTorch and by JAX. An older run has PyTorch's beside its peers alone."""
    return line["torch"].get("us", line["us"]["xmla"])[0], line["jax"]["us"][0]


def peer_of(line: Line) -> str:
    """The fastest other implementation with its time, and xmla's in turns with it."""
    peers = {name: times[0] for name, times in line["us"].items() if name != "xmla" and not name.startswith("itself")}
    if not peers:
        return ""
    name = min(peers, key=peers.__getitem__)
    return f"{peers[name]} {name} ({line['us']['xmla'][0]})"


def gpu_table(lines: list[Line]) -> list[str]:
    rows = []
    for line in lines:
        ours, by_jax = in_turns(line)
        ratio = f"{ours / by_jax:.2f}"
        rows.append([f"`{line['op']}`", line["case"], str(ours), str(by_jax), ratio, peer_of(line)])
    return table(["op", "case", "PyTorch, µs", "JAX, µs", "PyTorch / JAX", "best peer, µs (xmla beside it)"], rows)


def host_table(lines: list[Line]) -> list[str]:
    rows = []
    for line in lines:
        times = [f"{line[name]['host_us']}, {line[name]['waited_us']}" for name in ("torch", "jax")]
        rows.append([f"`{line['op']}`", line["case"], *times, str(line["jax"]["without_work_us"])])
    columns = "PyTorch: call, with result, µs", "jitted JAX: call, with result, µs", "without work, µs"
    return table(["op", "case", *columns], rows)


def cache_table(lines: list[Line]) -> list[str]:
    """What caches cost the host, as donated arrays and as Refs."""
    times = {line["case"]: line["host_us"] for line in lines if line["op"] == "jit"}
    counts = sorted({int(case.split()[0]) for case in times})
    kinds = "donated arrays", "Refs"
    head = ["caches of a jitted step that does next to nothing", *(f"{kind}, µs" for kind in kinds)]
    rows = [[str(count), *(str(times[f"{count} {kind}"]) for kind in kinds)] for count in counts]
    return ["", *table(head, rows)] if rows else []


def report(file: Path) -> str:
    """Markdown: of each run where its figures come from and GPU times; then the host's times of steps, the last."""
    markdown, every = [], []
    for head, *lines in read(file):
        versions, timed = head["versions"], [line for line in lines if "us" in line.get("jax", {})]
        same = sum(line["jax"]["same_bits"] for line in timed)
        packages = ", ".join(f"{name} {versions[name.lower()]}" for name in ("torch", "Triton", "JAX"))
        markdown += [f"{origin(head)}, {packages}. The same bits by both in {same} of {len(timed)} cases.", ""]
        markdown += [*gpu_table(timed), ""]
        every += lines
    steps = {line["case"]: line for line in every if line["op"] == "dsa_attention" and "us" in line}
    return "\n".join([*markdown, *host_table([*steps.values()]), *cache_table(every)]) + "\n"
