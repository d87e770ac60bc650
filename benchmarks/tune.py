"""Time tile choices on this GPU and write the best: `core/ops/<op>/tuned/<device>.json`.

    python benchmarks/tune.py [--op OP] [--out FOLDER] [--commit COMMIT]

What is chosen are tiles of the portable kernels, also where a kernel by hand comes before them. A key's choice is the
candidate with the least product of times over its cases, if that beats the heuristic by 3 %; else the key is left to
the heuristic. All timings stand in the file. Kernels are compiled first, on all cores.
"""

import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.families import SCALE
from xmla.bench.provenance import provenance
from xmla.bench.timing import measure
from xmla.core import op as core_op
from xmla.core import tuned
from xmla.core.compile import compiled, specialize
from xmla.core.device import Device
from xmla.core.model import Call
from xmla.torch_api import _run
from xmla.torch_api._arrays import device_of, spec_of

Fields = Mapping[str, Any]
HEURISTIC: Fields = {}
PORTABLE = "triton"
GAIN = 0.97  # of the heuristic's time: two measurements of one kernel differ by 1 or 2 %
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Space:
    """Candidates of one key of an op's choices, and the calls by which they are judged."""

    key: str
    candidates: Sequence[Fields]
    cases: Mapping[str, tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]]  # arguments, attributes


def grid(**values: Sequence[Any]) -> list[Fields]:
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def select_topk() -> Iterator[Space]:
    segments_of = {1: (8, 16), 16: (4, 8, 16), 64: (2, 4, 8), 128: (1, 2), 256: (1, 2), 512: (1,), 2048: (1,)}
    for rows, segments in segments_of.items():
        logits = torch.randn(rows, 65536, device="cuda")
        ends = torch.full((rows,), 65536, dtype=torch.int32, device="cuda")
        candidates = grid(segments=segments, warps=(4, 8))
        case = {"logits": logits, "ends": ends}, {"k": 2048}
        yield Space(f"rows{rows}-columns65536-k2048", candidates, {f"{rows} × 65536": case})


def indexer_logits() -> Iterator[Space]:
    tokens, keys = 2048, 65536
    for heads in (64, 32):
        arguments = {
            "q8": problems.e4m3(tokens, heads, 128), "weights": torch.randn(tokens, heads, device="cuda"),
            "keys": problems.e4m3(keys, 128), "key_scales": torch.rand(keys, device="cuda"),
            "starts": torch.zeros(tokens, dtype=torch.int32, device="cuda"),
            "ends": torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device="cuda"),
        }  # fmt: skip
        candidates = [
            {"block_t": 128}, {"block_n": 256, "warps": 8, "max_registers": None},
            {"max_rows": 64, "max_registers": 128}, {"block_n": 64, "max_registers": 128}, {"stages": 4},
        ]  # fmt: skip
        yield Space(f"i{heads}-fp8", candidates, {f"{tokens} × {keys}": (arguments, {})})


def indexer_logits_paged() -> Iterator[Space]:
    requests, keys = 64, 65536
    pool = problems.indexer_pool(requests * keys)
    table = problems.block_table(requests, keys)
    for next_n in (1, 2, 4):
        tokens = requests * next_n
        arguments = {
            "q8": problems.e4m3(tokens, 64, 128), "weights": torch.randn(tokens, 64, device="cuda"), "cache": pool,
            "block_table": table, "lengths": torch.full((tokens,), keys, dtype=torch.int32, device="cuda"),
        }  # fmt: skip
        candidates = [
            {"block_n": 128, "warps": 4, "stages": 3, "programs_a_sm": 3, "max_registers": 168},
            {"block_n": 128, "warps": 4, "stages": 2, "programs_a_sm": 4, "max_registers": 128},
            {"block_n": 64, "warps": 4, "stages": 3, "programs_a_sm": 4, "max_registers": 128},
            {"block_n": 64, "warps": 4, "stages": 4, "programs_a_sm": 4, "max_registers": 128},
            {"block_n": 128, "warps": 8, "stages": 3, "programs_a_sm": 2, "max_registers": 128},
            {"block_n": 64, "warps": 8, "stages": 3, "programs_a_sm": 2, "max_registers": 128},
        ]
        yield Space(f"rows{64 * next_n}-fp8", candidates, {f"b={requests} next_n={next_n}": (arguments, {})})


def sparse_mla() -> Iterator[Space]:
    tokens, keys = 1024, 32768
    rows = torch.randn(keys, 1, 576, dtype=torch.bfloat16, device="cuda")
    for heads in (128, 64, 16):
        q = torch.randn(tokens, heads, 576, dtype=torch.bfloat16, device="cuda") * 0.3
        arguments = {"q": q, "cache": rows, "slots": problems.chosen_keys(tokens, keys, 2048)}
        candidates = grid(block_h=(16, 64), block_n=(32, 64), num_warps=(4, 8), num_stages=(2, 3))
        yield Space(f"h{heads}-plain", candidates, {f"{tokens} tokens": (arguments, {"softmax_scale": SCALE})})


SPACES: Mapping[str, Callable[[], Iterator[Space]]] = {
    "select_topk": select_topk,
    "indexer_logits": indexer_logits,
    "indexer_logits_paged": indexer_logits_paged,
    "sparse_mla": sparse_mla,
}


@contextmanager
def forced(op: str, device_name: str, key: str, fields: Fields) -> Iterator[None]:
    """Plans made inside have these fields for `key`, and the heuristic for every other."""
    before = tuned.OPS
    with tempfile.TemporaryDirectory() as folder:
        tuned.OPS = Path(folder)
        file = tuned.built_in(op, device_name)
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"choices": {key: dict(fields)}}))
        _forget()
        try:
            yield
        finally:
            tuned.OPS = before
            _forget()


def _forget() -> None:
    tuned._read.cache_clear()
    core_op._plan_call.cache_clear()
    _run._prepared.clear()


def compile_candidate(call: Call, device: Device, key: str, fields: Fields) -> str | None:
    """Fill the compiler's cache; what is wrong with the candidate, if something is."""
    try:
        with forced(call.op, device.name, key, fields):
            plan = call.plan(device, PORTABLE)
            for launch in plan.active:
                kernel = compiled(specialize(launch, plan, call.specs), device.arch)
                if kernel.metadata.shared > device.smem_bytes:
                    return f"{kernel.metadata.shared} bytes of shared memory"
    except Exception as error:  # a candidate that cannot be is no choice
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def told(fields: Fields) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "heuristic"


def judge(op: str, space: Space, device: Device, pool: ProcessPoolExecutor) -> tuple[Fields, dict[str, Any]]:
    """The best candidate, and every candidate's microseconds by case or what is wrong with it."""
    candidates = [HEURISTIC, *space.candidates]
    first, attrs = next(iter(space.cases.values()))
    call = Call(op, {name: spec_of(tensor) for name, tensor in first.items()}, attrs)
    count = len(candidates)
    faults = list(pool.map(compile_candidate, [call] * count, [device] * count, [space.key] * count, candidates))
    shown: dict[str, Any] = {told(c): f for c, f in zip(candidates, faults, strict=True) if f}
    able = {told(c): c for c, fault in zip(candidates, faults, strict=True) if not fault}
    scores = dict.fromkeys(able, 0.0)
    for case, (arguments, attrs) in space.cases.items():

        def run(fields: Fields, arguments: Any = arguments, attrs: Any = attrs) -> Any:
            with forced(op, device.name, space.key, fields):
                return getattr(torch_api, op)(**arguments, **attrs, implementation=PORTABLE)

        want = run(HEURISTIC)
        for name, fields in list(able.items()):
            if not agrees(run(fields), want):
                shown[name] = "another result than the heuristic's"
                del able[name], scores[name]
        times = measure({name: lambda _, f=fields: run(f) for name, fields in able.items()}, 1)
        for name, timing in times.items():
            shown.setdefault(name, {})[case] = round(timing.median, 2)
            scores[name] += math.log(timing.median / times["heuristic"].median)
    best = min(scores, key=lambda name: scores[name])
    return (able[best] if scores[best] < math.log(GAIN) else HEURISTIC), shown


def agrees(got: Any, want: Any) -> bool:
    """Tiles change the order of sums, and nothing else."""
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else ((got, want),)
    for ours, theirs in pairs:
        if ours.dtype == torch.int32:
            if not torch.equal(ours, theirs):
                return False
        else:
            finite = theirs.isfinite()
            if not torch.equal(ours.isfinite(), finite):
                return False
            wrong = (ours[finite].double() - theirs[finite].double()).norm()
            if wrong > TOLERANCE * theirs[finite].double().norm():
                return False
    return True


def main(
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of the ops.")] = tuned.OPS,
    commit: Annotated[str | None, typer.Option(help="Where the tree is not a git checkout.")] = None,
) -> None:
    """Time every candidate of every key and write the files."""
    device = device_of(torch.device("cuda", 0))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn) as pool:
        for name in op or SPACES:
            file = out / name / "tuned" / tuned.file_name(device.name)
            earlier = json.loads(file.read_text()) if file.exists() else {}
            choices, timings = earlier.get("choices", {}), earlier.get("microseconds", {})
            for space in SPACES[name]():
                best, timings[space.key] = judge(name, space, device, pool)
                choices.pop(space.key, None)
                if best:
                    choices[space.key] = dict(best)
                print(f"{name} {space.key}: {told(best)}", flush=True)
                torch.cuda.empty_cache()
            command = "python benchmarks/tune.py" + "".join(f" --op {chosen}" for chosen in op or ())
            content = {"measured": provenance(command, commit), "choices": choices, "microseconds": timings}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
