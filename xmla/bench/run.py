"""`xmla bench`: time ops at serving size beside peers and ceilings.

Every figure is a median of CUDA-graph replays over inputs rotated past the L2 cache. Before a case is timed its result
is compared with the peer's, or on sampled rows with the formula in plain torch, and a wrong one is not timed. Its
ceiling is timed right after it, since clocks fall while a GPU works: ceilings of the run's beginning would be those of
a cool one. PyTorch makes the inputs and times peers and ceilings. JAX, where it is asked for, makes the same calls on
the same arrays: its results are compared bit by bit, its GPU time stands beside PyTorch's, and apart from it the host's
part of a call by either.
Results are JSON lines: the first names command, commit, versions, device and ceilings, each further one is a case.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from xmla._frameworks import PACKAGES, missing, needed
from xmla._warmup import present_device
from xmla.bench import picture
from xmla.bench.cases import CASES, cases_of
from xmla.bench.provenance import provenance
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.registry import registry
from xmla.machine import environment

if TYPE_CHECKING:
    from xmla.bench.baselines import Ceiling
    from xmla.bench.benchmark import Benchmark
    from xmla.bench.timing import Timing

Line = dict[str, Any]
HOST = "host"  # the name of the host-time cases among the ops


def record(
    benchmark: "Benchmark", times: Mapping[str, "Timing"], error: float, peer_errors: Mapping[str, float],
    failures: Mapping[str, str], ceiling: float,
) -> Line:  # fmt: skip
    """A case's line: times, rates, its ratio to each peer (> 1: faster than the peer) and its share of the ceiling."""
    ours = times["xmla"]
    seconds = ours.median * 1e-6
    work = benchmark.bytes if benchmark.bound == "copy" else benchmark.flops
    wrong = [peer for peer, error in peer_errors.items() if not error <= benchmark.tolerance]
    return {
        "op": benchmark.op,
        "case": benchmark.case,
        "us": {name: timing.rounded() for name, timing in times.items()},
        "tflop_per_s": round(benchmark.flops / seconds / 1e12, 1),
        "gb_per_s": round(benchmark.bytes / seconds / 1e9, 1),
        "ceiling": benchmark.bound,
        "ceiling_per_s": float(f"{ceiling:.4g}"),
        "share_of_ceiling": round(work / seconds / ceiling, 3),
        "ratio_to_peer": {name: round(t.median / ours.median, 3) for name, t in times.items() if name != "xmla"},
        "relative_error": error,
        **({"relative_error_of_peer": dict(peer_errors)} if peer_errors else {}),
        **({"wrong_peers": wrong} if wrong else {}),
        **({"failed_peers": dict(failures)} if failures else {}),
    }


def beside_peers(benchmark: "Benchmark") -> tuple[dict[str, "Timing"], dict[str, float], dict[str, str]]:
    """Times by xmla and its peers, errors of peers, and why a peer failed, which the run outlives."""
    from xmla.bench.timing import measure

    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, check in benchmark.peer_checks.items():
        try:
            errors[name] = check()
        except Exception as failure:
            failures[name] = in_one_line(failure)
    peers = {name: call for name, call in benchmark.peers.items() if name not in failures}
    try:
        times = measure({"xmla": benchmark.ours, **peers}, len(benchmark.inputs))
    except Exception as failure:
        # Without peers there is nobody else to blame.
        if not peers:
            raise
        times = measure({"xmla": benchmark.ours}, len(benchmark.inputs))
        failures |= dict.fromkeys(peers, in_one_line(failure))
    return times, errors, failures


def in_one_line(failure: Exception) -> str:
    """An exception in one line, for a table."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:200]


def time_cases(
    names: Iterable[str], limits: Mapping[str, "Ceiling"], with_jax: bool, implementation: str | None = None
) -> Iterator[Line]:
    """A line per case, that the implementation serves if one is asked for; of a wrong one it tells the error alone."""
    import torch

    from xmla.bench.benchmark import with_implementation

    for name in names:
        for benchmark in cases_of(name):
            if implementation is None:
                yield time_case(benchmark, limits, with_jax)
            else:
                with suppress(UnsupportedError):
                    yield time_case(with_implementation(benchmark, implementation), limits, with_jax)
        torch.cuda.empty_cache()


def time_case(benchmark: "Benchmark", limits: Mapping[str, "Ceiling"], with_jax: bool) -> Line:
    from xmla.bench import baselines

    error = benchmark.check()
    if not error <= benchmark.tolerance:
        return {"op": benchmark.op, "case": benchmark.case, "relative_error": error, "wrong": True}
    times, peer_errors, failures = beside_peers(benchmark)
    (ceiling,) = baselines.rates({benchmark.bound: limits[benchmark.bound]}).values()
    line = record(benchmark, times, error, peer_errors, failures, ceiling)
    if not (with_jax and benchmark.by_jax):
        return line
    from xmla.bench.timing_jax import beside_torch

    try:
        timing = beside_torch(benchmark, times["xmla"].median)
    except Exception as failure:  # told at the end, after the other cases
        timing = {"jax": {"failed": in_one_line(failure)}}
    return line | timing | ({} if timing["jax"].get("same_bits") else {"wrong": True})


def table_of(lines: Iterable[Line], earlier: Mapping[tuple[str, str], Line]) -> Table:
    columns = "op", "case", "µs", "TFLOP/s", "GB/s", "share of ceiling", "× peer", "× earlier", "error", "µs by JAX"
    table = Table(*columns)
    for line in lines:
        if "us" not in line:
            cell = "[red]WRONG, not timed" if line.get("wrong") else f"{line['host_us']} of host time"
            table.add_row(line["op"], line["case"], cell)
            continue
        before = earlier.get((line["op"], line["case"]), {}).get("us", {}).get("xmla")
        table.add_row(
            line["op"], line["case"], str(line["us"]["xmla"][0]), str(line["tflop_per_s"]), str(line["gb_per_s"]),
            f"{line['share_of_ceiling']} {line['ceiling']}",
            ", ".join(
                [*(f"{ratio} {peer}{', which is WRONG' * (peer in line.get('wrong_peers', ()))}"
                   for peer, ratio in line["ratio_to_peer"].items()),
                 *(f"{peer} failed" for peer in line.get("failed_peers", ()))]
            ),
            f"{before[0] / line['us']['xmla'][0]:.2f}" if before else "", f"{line['relative_error']:.1e}", by_jax(line),
        )  # fmt: skip
    return table


def by_jax(line: Line) -> str:
    """JAX's GPU time of a case, or why there is none."""
    timing = line.get("jax")
    if timing is None:
        return ""
    if "failed" in timing:
        return f"[red]FAILED: {escape(timing['failed'])}"
    return str(timing["us"][0]) if timing["same_bits"] else "[red]OTHER BITS"


def read_lines(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def earlier_times(file: Path) -> dict[tuple[str, str], Line]:
    """The cases of a file of one run or several, by op and case: of a case that several have the last.

    Raises:
        ArgumentError: The file has no times of `xmla bench`.
    """
    with suppress(ValueError, KeyError, TypeError):
        if times := {(line["op"], line["case"]): line for line in read_lines(file) if "us" in line}:
            return times
    raise ArgumentError(f"bench: compare is {file}, expected a file with times that xmla bench --out has written")


def host_lines() -> Iterator[Line]:
    """The host time of calls, by each framework that is installed."""
    if not missing("torch"):
        from xmla.bench import host

        yield from host.lines()
    if not missing("jax"):
        from xmla.bench import host_jax

        yield from host_jax.lines()


def run(
    ops: list[str] | None, out: Path | None, compare: Path | None, image: Path | None, commit: str | None,
    frameworks: Sequence[str] = tuple(PACKAGES), implementation: str | None = None, as_json: bool = False,
) -> bool:  # fmt: skip
    """Time, print, and write what is asked for; False if a result was wrong.

    With `as_json` the lines are printed, and all else is on stderr.

    Raises:
        ArgumentError: `compare` is no file of results.
        UnsupportedError: There is no GPU, no framework is installed, or none that can time an op that is asked for.
    """
    if unknown := set(frameworks) - set(PACKAGES):
        raise UnsupportedError(f"bench: no framework {min(unknown)}; there are {', '.join(PACKAGES)}")
    absent = [framework for framework in PACKAGES if missing(framework)]
    if len(absent) == len(PACKAGES):
        raise UnsupportedError(f"bench: {'; '.join(map(needed, absent))}")
    known = [HOST] if "torch" in absent else [*CASES, HOST]
    if implementation is not None:
        choices = {name: op.choices for name, op in registry().items() if name in known}
        if implementation not in chain(*choices.values()):
            names = ", ".join(sorted({*chain(*choices.values())}))
            raise UnsupportedError(f"bench: no implementation {implementation}; there are {names}")
        known = [name for name in choices if implementation in choices[name]]
    chosen = ops or known
    if unknown := set(chosen) - set(known):
        why = f", since {needed('torch')}" if "torch" in absent else ""
        raise UnsupportedError(f"bench: no op {min(unknown)}; there are {', '.join(known)}{why}")
    if image is not None and "torch" in absent:
        raise UnsupportedError(f"bench: a picture is of times by PyTorch, and {needed('torch')}")
    earlier = {} if compare is None else earlier_times(compare)  # before `out` grows, which may be the same file
    why = "times of interpreted kernels mean nothing"
    environment.require_gpu("bench", why)
    try:
        present_device()
    except UnsupportedError:  # the frameworks see none
        raise UnsupportedError(f"bench: no GPU is present; {why}") from None
    # What JAX allocates it keeps, so that it must not begin with most of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    limits: Mapping[str, Ceiling] = {}
    first: dict[str, float] = {}
    peers: Mapping[str, str | None] = {}
    if "torch" not in absent:
        import torch

        from xmla.bench import baselines

        torch.manual_seed(0)
        limits = baselines.ceilings()
        peers = baselines.peers()
        first = baselines.rates(limits)
    with_jax = "jax" in frameworks and "jax" not in absent
    words = [word for op in ops or () for word in ("--op", op)]
    if implementation is not None:
        words += ["--implementation", implementation]
    command = shlex.join(["xmla", "bench", "--framework", ",".join(frameworks), *words])
    head = provenance(command, commit) | {**peers, "ceilings": first}
    lines: list[Line] = []
    with (
        Progress(console=Console(stderr=True), transient=True) as bar,
        nullcontext() if out is None else out.open("a") as file,
    ):

        def keep(line: Line) -> None:
            """Write a line at once: a run that is cut short keeps what it has timed."""
            for into in (file, sys.stdout if as_json else None):
                if into is not None:
                    print(json.dumps(line), file=into, flush=True)

        keep(head)
        task = bar.add_task("timing", total=len(chosen))
        for line in chain(
            time_cases(chosen, limits, with_jax, implementation) if limits else (),
            host_lines() if HOST in chosen else (),
        ):
            keep(line)
            lines.append(line)
            begun = chosen.index(HOST if "host_us" in line else line["op"])
            bar.update(task, completed=begun, description=f"{line['op']} {line['case']}")
    if image is not None:
        picture.draw(head, lines, image)
    console = Console(width=190, stderr=as_json)
    console.print({name: f"{value:.3e}" for name, value in first.items()})
    console.print(table_of(lines, earlier))
    for framework in absent:
        console.print(f"left out: {framework}, since {needed(framework)}", markup=False, soft_wrap=True)
    if implementation is not None and not lines:
        console.print(f"{implementation} serves none of these cases on this GPU", style="red", markup=False)
        return False
    return not any(line.get("wrong") for line in lines)
