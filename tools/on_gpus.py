"""Evidence from a machine with GPUs: the whole suite, then fuzzer, demos and bench, each a line of the results.

python -m tools.on_gpus suite --out FOLDER [--commit SHA] [--part NAME …]
                                                              the suite in parts that run beside each other
python -m tools.on_gpus rest --out FOLDER [--commit SHA]      fuzzer and demos on the last GPU, bench on the first
                                                              (on one GPU: bench, then the others)
python -m tools.on_gpus sanitize --out FOLDER [--commit SHA] [--op NAME …]
                                                              the fuzzer under tools of compute-sanitizer
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).parent.parent
RANKS = ("tests/test_parallel.py", "tests/test_interop.py", "tests/test_failures.py", "tests/test_examples.py")
FAR = ("tests/contract/test_5_offsets.py",)  # 24 GiB a worker
LARGE = ("tests/gpu/test_large_pool.py", "tests/test_packed_documents.py")  # 66 and 30 GiB, so after those
FLASH = ("tests/gpu/test_flash_mla.py", "tests/gpu/test_flash_mla_v4.py")  # 1268 tests that mostly compile
# What else a folder has, and the tests beside the folders: these share their workers.
FOLDERS = {
    "contract": "tests/contract", "core": "tests/core", "gpu": "tests/gpu", "vllm": "tests/vllm_engine",
    "sglang": "tests/sglang_engine",
}  # fmt: skip
PARTS = ("ranks", "far", "large", "flash-mla", *FOLDERS, "front-ends")
# Not racecheck, which reports what orders Gluon's warpgroups (tools/handover.py). Triton asks the driver for an
# attribute that it may refuse.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "initcheck": (), "synccheck": ()}
DEMOS = {"v32": ("--model", "deepseek_v32"), "v4": ("--model", "deepseek_v4"), "train": ("--train",)}

Out = Annotated[Path, typer.Option(help="Folder of the JSON lines and logs.", file_okay=False)]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Parts = Annotated[list[str], typer.Option(help=f"Of {', '.join(PARTS)}.")]
Seconds = Annotated[int, typer.Option(min=1, help="The most that each part may take.")]
app = typer.Typer(add_completion=False)


def record(out: Path, file: str, log: str, commit: str | None, command: Sequence[str], **environment: str) -> bool:
    """Append a line on `command` to a file of results; whether it succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    recorder = [sys.executable, "-m", "xmla.bench.record", "--out", str(out / f"{file}.jsonl")]
    recorder += ["--lines", "80"]  # the fuzzer has one of each op, and nanobind adds to them
    recorder += ["--commit", commit] if commit else []
    # A process of its own keeps what it printed even if the time is over.
    with (out / f"{log}.log").open("w") as shown:
        done = subprocess.run(
            [*recorder, *command], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment, stdout=shown,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    last = (out / f"{log}.log").read_text().strip().splitlines()[-1:]
    print(f"{log}: exit status {done.returncode}: {' '.join(last)[-200:]}", flush=True)
    return done.returncode == 0


@app.command()
def suite(out: Out, commit: Commit = None, part: Parts = list(PARTS), seconds: Seconds = 3600) -> None:  # noqa: B006
    """The whole suite, or parts of it: ranks with all GPUs, far strides and the rest with a GPU a worker."""
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    # Every test is named as it ends, so that a run that is cut short tells what it has run; an interrupt also sums up.
    pytest = ["timeout", "-s", "INT", "-k", "20", str(seconds), "python3", "-m", "pytest", "-v", "-rfEs", "--tb=short"]
    pytest += ["--show-capture=no", "-p", "no:cacheprovider", "--durations=20"]
    workers = {"ranks": 2, "far": 2 * gpus}
    apart = [f"--ignore={file}" for file in (*RANKS, *FAR, *LARGE, *FLASH)]
    others = [FOLDERS[name] for name in part if name in FOLDERS]
    if "front-ends" in part:
        others = ["tests", *(f"--ignore={folder}" for name, folder in FOLDERS.items() if name not in part)]
    remaining = max(cores - sum(number for name, number in workers.items() if name in part), 1)
    commands = {
        "ranks": ["--dist", "loadgroup", "-n", str(workers["ranks"]), *RANKS],
        "far": ["--dist", "load", "-n", str(workers["far"]), *FAR],
        "large": ["-n", "1", *LARGE],
        "flash-mla": ["--dist", "loadgroup", "-n", str(remaining), *FLASH],
        "others": ["--dist", "loadgroup", "-n", str(remaining), *others, *apart],
    }

    def run(*names: str) -> bool:
        """Parts one after the other. But for those of ranks a worker has one GPU."""
        environments = [{} if name == "ranks" else {"XMLA_TEST_GPUS": visible} for name in names]
        succeeded = [
            record(out, "test", name, commit, [*pytest, *commands[name]], **environment)
            for name, environment in zip(names, environments, strict=True)
        ]
        return all(succeeded)

    lines = (("ranks",), ("far", "large"), ("others", "flash-mla"))
    chosen = [[name for name in line if name in part or (name == "others" and others)] for line in lines]
    with ThreadPoolExecutor() as threads:
        succeeded = list(threads.map(lambda names: run(*names), chosen))
    raise typer.Exit(code=int(not all(succeeded)))


@app.command()
def rest(out: Out, commit: Commit = None, seconds: Seconds = 3600, fuzz_seconds: Seconds = 180) -> None:
    """Fuzzer and demos on the last GPU beside `xmla bench` on the first, or after it if that is the same."""
    gpus = torch.cuda.device_count()
    last = str(gpus - 1)
    limited = ["timeout", str(seconds), "python3"]

    def check() -> bool:
        fuzz = [*limited, "-W", "ignore", "-m", "tools.fuzz", "--seconds", str(fuzz_seconds), "--workers", "10"]
        right = record(out, "contract", "fuzz", commit, fuzz, CUDA_VISIBLE_DEVICES=last)
        for name, options in DEMOS.items():
            demo = [*limited, "-m", "xmla", "demo", *options]
            right &= record(out, "demo", f"demo-{name}", commit, demo, CUDA_VISIBLE_DEVICES=last)
        return right

    bench = [*limited, "-m", "xmla", "bench", "--out", str(out / "bench.jsonl")]
    bench += ["--commit", commit] if commit else []

    def measure() -> bool:
        return record(out, "bench-run", "bench", commit, bench, CUDA_VISIBLE_DEVICES="0")

    with ThreadPoolExecutor(max_workers=min(gpus, 2)) as threads:
        succeeded = list(threads.map(lambda part: part(), (measure, check)))
    raise typer.Exit(code=int(not all(succeeded)))


@app.command()
def sanitize(
    out: Out, commit: Commit = None, seconds: Seconds = 150,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
) -> None:  # fmt: skip
    """The fuzzer for so long under each tool, beside each other."""
    fuzz = ["python3", "-W", "ignore", "-m", "tools.fuzz", "--workers", "0", "--seconds", str(seconds)]
    fuzz += [word for name in op or () for word in ("--op", name)]

    def run(tool: str) -> bool:
        command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--error-exitcode", "9", *fuzz]
        return record(out, "contract", tool, commit, command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    with ThreadPoolExecutor() as threads:
        succeeded = list(threads.map(run, TOOLS))
    raise typer.Exit(code=int(not all(succeeded)))


if __name__ == "__main__":
    app()
