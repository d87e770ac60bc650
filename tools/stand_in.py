"""Another part's plans and code on a Hopper GPU: whether they are right, how long they take beside ceilings and peers.

python -m tools.stand_in verify [--op NAME …] [--out FILE]      every op's cases by PyTorch against the references
python -m tools.stand_in test                                   tests/gpu/test_gluon_sm120.py
python -m tools.stand_in bench [--only TEXT …] [--out FILE]     serving sizes, as `xmla bench` tells them

Before these words `--part sm_80` or another of `PARTS` may stand instead of SM12x, which the rest is told of.

Kernels are planned for sm_120 with the SMs that are present. Triton's passes run as for sm_120 down to LLVM's dialect:
layouts of mma.sync, asynchronous copies, shared memory. Only LLVM and ptxas then generate for sm_90a, since LLVM's PTX
for sm_120 has instructions that Hopper lacks. Of attention the two cubins have the same counts of HMMA, LDSM, LDS, STS
and LDGSTS, and registers within a few. Imposed besides: 99 KB of shared memory a program, and as many programs on an SM
as one of SM12x holds. What is not SM12x's: the rates of tensor cores, memory and L2 cache, so that times are told as
shares of ceilings that were compiled likewise and measured in the same run; and products of e4m3, one instruction there
and two of float16 with conversions here, so that times of fp8 logits are upper bounds.

sm_80 has no e4m3: what its conversions in integers cost, sm_89's code with an A100's shared memory tells, which has the
same tiles of attention.

Peers are SGLang's Triton kernels, where its package is installed.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import triton
import triton.language as tl
import typer
from rich.console import Console
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from tools.resources import programs_a_sm
from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.bench.cases import logits, selection, steps
from xmla.bench.cases.attention import KEYS, SCALE, V4_KEYS, V4_SCALE, V4_WINDOW, K
from xmla.bench.errors import attention_error, relative_error
from xmla.bench.provenance import provenance
from xmla.bench.run import table_of, time_case
from xmla.cli.verify import compare
from xmla.core.formats.mla import V4, V32, MlaLayout
from xmla.core.registry import registry
from xmla.core.values import A100, L40S, RTX_PRO_6000, Device
from xmla.machine import calls
from xmla.torch_api import _arrays, _prepared, _run
from xmla.torch_api._all_ops import TORCH_OPS

PARTS = {
    "sm_120": RTX_PRO_6000, "sm_80": A100,
    "sm_89": replace(L40S, name="sm_89 with an A100's memory", smem_bytes=A100.smem_bytes),
}  # fmt: skip
PART = "XMLA_STAND_IN"  # the environment variable by which processes know it
TARGET = 90
HOPPER_BYTES, HOPPER_WARPS, HOPPER_PROGRAMS = 228 << 10, 64, 32  # of an SM

app = typer.Typer(add_completion=False)


def part() -> Device:
    return PARTS[os.environ.get(PART, "sm_120")]


@app.callback()
def choose(part: Annotated[str, typer.Option(help="One of PARTS.")] = "sm_120") -> None:
    """Another part's plans and code on a Hopper GPU."""
    os.environ[PART] = part


def registers(cubin: bytes) -> int:
    """Registers a thread: the most of EIATTR_REGCOUNT in section .nv.info."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers + index * size) for index in range(count)]
    found = [0]
    for name, _, _, _, at, length, *_ in sections:
        first = sections[names][4] + name
        if cubin[first : cubin.index(b"\0", first)] == b".nv.info":
            end = at + length
            while at < end:
                form, attribute, size = struct.unpack_from("<BBH", cubin, at)
                if (form, attribute) == (4, 0x2F):
                    found.append(struct.unpack_from("<II", cubin, at + 4)[1])
                at += 4 + (size if form == 4 else 0)
    return max(found)


def stages_of(self: Any = None, stages: Any = None, options: Any = None, *_: Any) -> tuple[str, str] | None:
    """Triton's hook into the stages of a compilation; called without arguments, the key of its cache on disk."""
    if stages is None:
        key = f"stand-in {part()} {TARGET}"
        return key, key
    if self.target.arch == part().arch:
        stages["ptx"] = lambda source, metadata: self.make_ptx(source, metadata, options, TARGET)

        def cubin(source: Any, metadata: dict[str, Any]) -> bytes:
            shared, warps = metadata["shared"], metadata["num_warps"]
            if shared > part().smem_bytes:
                raise OutOfResources(shared, part().smem_bytes, "shared memory")
            made = self.make_cubin(source, metadata, options, TARGET)
            programs = max(programs_a_sm(part(), shared, warps, registers(made)), 1)
            if min(HOPPER_BYTES // (shared + 1024), HOPPER_WARPS // warps, HOPPER_PROGRAMS) > programs:
                metadata["shared"] = max(shared, (HOPPER_BYTES // programs - 1024) // 128 * 128)
            return made

        stages["cubin"] = cubin
    return None


def install() -> None:
    """Plan and compile for the part in this process, by PyTorch's front-end and by Triton's own launcher."""
    knobs.runtime.add_stages_inspection_hook = stages_of
    own_arch, own_device = nvidia.sm_arch_from_capability, _arrays.device_of
    nvidia.sm_arch_from_capability = lambda arch: f"sm_{TARGET}a" if arch == part().arch else own_arch(arch)
    driver.active.get_current_target = lambda: GPUTarget("cuda", part().arch, 32)

    def device_of(device: torch.device) -> Device:
        found = own_device(device)
        return found if device.type == "cpu" else replace(part(), name=f"stand-in: {found.name}", num_sms=found.num_sms)

    _arrays.device_of = _prepared.device_of = _run.device_of = device_of


def in_processes(tell: Callable[[Any], Any], items: list[Any], jobs: int) -> Iterator[tuple[Any, Any]]:
    """Each item with what `tell` says of it, or with what it raised, as they come; most of the time they compile."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=install) as pool:
        futures: dict[Future[Any], Any] = {pool.submit(tell, item): item for item in items}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], future.result() if error is None else error


# Ceilings: products compiled like the rest.


@triton.jit
def product_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [N, K]
    out_ptr,  # [M, N] bf16
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs on eight rows of blocks are neighbours.
    BAND: tl.constexpr = 8 * (N // BLOCK_N)
    pid = tl.program_id(0)
    rows = ((pid // BAND) * 8 + pid % 8) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid % BAND // 8 * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    a = a_ptr + rows[:, None] * K + dims[None, :]
    b = b_ptr + columns[None, :] * K + dims[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        sums = tl.dot(tl.load(a + first), tl.load(b + first), sums)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], sums.to(tl.bfloat16))


PRODUCTS = (
    (128, 128, 32, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 256, 32, 8, 3),
)  # block, of K in pairs of bytes, warps, stages


def ceilings() -> dict[str, baselines.Ceiling]:
    """Copies, and the best tile of products by mma.sync; without e4m3 its products are those of bfloat16."""
    size, found = 8192, {"copy": baselines.ceilings()["copy"]}
    out = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        if dtype == torch.float8_e4m3fn and not part().converts_e4m3:
            found[name] = found["bf16"]
            continue
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        tiles = {}
        for m, n, k, warps, stages in PRODUCTS:
            grid, block = (size // m * (size // n),), (m, n, k * 2 // dtype.itemsize)

            def call(
                _: int, grid: Any = grid, block: Any = block, a: Any = a, b: Any = b, more: Any = (warps, stages)
            ) -> None:
                product_kernel[grid](a, b, out, size, size, size, *block, num_warps=more[0], num_stages=more[1])

            call(0)
            if relative_error(out[:8].float(), a[:8].float() @ b.float().T) < 1e-2:
                tiles[m, n, k, warps] = baselines.Ceiling("flop", 2 * size**3, call)
        rates = baselines.rates(tiles)  # type: ignore[arg-type]
        found[name] = tiles[max(tiles, key=lambda tile: rates[f"{tile}_flop_per_s"])]
    return found


# Peers.


def sglang(module: str) -> Any:
    """A module of SGLang's attention kernels, or None where it is not installed; as on the part."""
    try:
        found = import_module(f"sglang.kernels.ops.attention.{module}")
        base = import_module("sglang.kernels.ops.attention.dsa.triton_sparse_mla")
    except ImportError:
        return None
    base._max_shared_memory = lambda device: part().smem_bytes
    return found


def over_rows(q: Any, rows: torch.Tensor, slots: Any, prefill: bool, scale: float) -> dict[str, Callable[[int], Any]]:
    """SGLang's attention over plain rows of V3.2, of the input set's `q` and `slots`."""
    package = sglang("dsa.triton_sparse_mla_prefill" if prefill else "dsa.triton_sparse_mla_decode")
    if package is None:
        return {}
    if prefill:
        tile = package._PINNED[12, 0]
        return {"SGLang on bf16 rows": lambda i: package.sparse_mla_prefill(q[i], rows, slots[i], scale, config=tile)}

    def decode(i: int) -> Any:
        return package.triton_sparse_mla_decode(q[i][:, :, :512], q[i][:, :, 512:], rows, slots[i][:, None], scale)[0]

    return {"SGLang on bf16 rows": decode}


# Cases.


def queries(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.3


def of_requests(requests: int, entries: int, k: int, sets: int) -> list[torch.Tensor]:
    """Slots of each input set: `k` of each request, among `entries` of its own."""
    owner = torch.arange(requests, device="cuda", dtype=torch.int32)[:, None] * entries
    return [problems.chosen_keys(requests, entries, k) + owner for _ in range(sets)]


def rows_of(pool: torch.Tensor) -> torch.Tensor:
    """The pool's entries as plain rows [N, 1, L+E]."""
    slots = torch.arange(pool.shape[0] * pool.shape[1], device="cuda", dtype=torch.int32)
    rows = torch_api.read_mla_cache(pool, slots[:1]).new_empty(
        len(slots), 1, V32.dims if pool.shape[2] == V32.row else V4.dims
    )
    for part in slots.split(1 << 18):
        rows[part[0] : part[-1] + 1, 0] = torch_api.read_mla_cache(pool, part)
    return rows


def attention_case(
    case: str, inputs: list[Any], sources: Any, scale: float, flops: float, moved: float, **more: Any
) -> Benchmark:
    """Attention beside peers; `sources` are the caches and slots of the first set of inputs."""

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.sparse_mla(*arrays, softmax_scale=scale)[0]

    q, _, _, *rest = inputs[0]
    sink = rest[1] if rest else None
    error = lambda out: attention_error(out, q, sources, scale, sink)
    peers = more.get("peers", {})
    return Benchmark(
        op="sparse_mla", case=case, call=call, inputs=inputs, check=lambda: error(call(TORCH_OPS, *inputs[0])),
        peer_checks={name: lambda peer=peer: error(peer(0)) for name, peer in peers.items()}, flops=flops, bytes=moved,
        bound="bf16", **more,
    )  # fmt: skip


def decode(requests: int, heads: int, plain: bool = False) -> Benchmark:
    """V3.2's, over pages or over the same entries as plain rows."""
    pool = problems.latent_pool(requests * KEYS)
    rows, sets = rows_of(pool), range(rotation(requests * K * V32.row))
    q, slots = queries(len(sets), requests, heads, V32.dims), of_requests(requests, KEYS, K, len(sets))
    by_rows = lambda i: torch_api.sparse_mla(q[i], rows, slots[i], softmax_scale=SCALE)[0]
    peers = over_rows(q, rows, slots, False, SCALE) | ({} if plain else {"itself on bf16 rows": by_rows})
    return attention_case(
        f"V3.2 decode {'rows' if plain else 'pages'} b={requests} h={heads} k={K}",
        [(q[i], rows if plain else pool, slots[i]) for i in sets], [(pool, slots[0], None)], SCALE,
        2 * requests * heads * K * (V32.dims + 512), requests * K * V32.row, peers=peers,
    )  # fmt: skip


def decode_v4(requests: int, heads: int, extra_k: int) -> Benchmark:
    """V4's over two sources, with a sink."""
    k = V4_WINDOW, extra_k
    pools = [problems.latent_pool(requests * V4_KEYS, 64, V4) for _ in k]
    sets = range(rotation(requests * sum(k) * V4.row))
    q, sink = queries(len(sets), requests, heads, V4.dims), torch.randn(heads, device="cuda")
    first, second = (of_requests(requests, V4_KEYS, count, len(sets)) for count in k)
    return attention_case(
        f"V4 decode b={requests} h={heads} k={V4_WINDOW}+{extra_k}",
        [(q[i], pools[0], first[i], None, sink, pools[1], second[i]) for i in sets],
        [(pools[0], first[0], None), (pools[1], second[0], None)], V4_SCALE,
        2 * requests * heads * sum(k) * (V4.dims + 512), requests * sum(k) * V4.row,
    )  # fmt: skip


def prefill(layout: MlaLayout, heads: int, k: int, plain: bool, tokens: int = 1024) -> Benchmark:
    """A case of attention in the prefill of one prompt, over pages or plain rows."""
    scale = SCALE if layout == V32 else V4_SCALE
    pool = problems.latent_pool(KEYS, layout=layout)
    rows = rows_of(pool)
    q, slots = queries(tokens, heads, layout.dims), problems.chosen_keys(tokens, KEYS, k)
    by_rows = lambda _: torch_api.sparse_mla(q, rows, slots, softmax_scale=scale)[0]
    peers = over_rows([q], rows, [slots], True, scale) if layout == V32 else {}
    return attention_case(
        f"{layout.name} prefill {'rows' if plain else 'pages'} s_q={tokens} h={heads} k={k} s_kv={KEYS}",
        [(q, rows if plain else pool, slots)], [(pool, slots, None)], scale,
        2 * tokens * heads * k * (layout.dims + 512), tokens * k * layout.row,
        peers=peers | ({} if plain else {"itself on bf16 rows": by_rows}),
    )  # fmt: skip


def paged_logits(requests: int, next_n: int, keys: int) -> Benchmark:
    return logits.paged_case(problems.indexer_pool(64 * logits.WIDEST), requests, next_n, keys)


def step(requests: int) -> Benchmark:
    pools = problems.latent_pool(64 * steps.CONTEXT), problems.indexer_pool(64 * steps.CONTEXT)
    return steps.one_layer_case(*pools, requests)


Case = Callable[[], Benchmark]
CASES: tuple[Case, ...] = (
    *(partial(decode, requests, heads) for requests in (1, 8, 64) for heads in (16, 64, 128)),
    *(partial(decode, requests, heads, True) for requests, heads in ((1, 128), (64, 64), (64, 128))),
    *(partial(decode_v4, requests, *sizes) for requests in (1, 64) for sizes in ((16, 512), (64, 512), (128, 1024))),
    *(partial(prefill, V32, heads, 2048, plain) for plain in (True, False) for heads in (16, 64, 128)),
    partial(prefill, V4, 64, 512, False),
    *(partial(paged_logits, *sizes) for sizes in ((64, 1, 8192), (64, 2, 8192), (64, 1, 65536))),
    partial(logits.ragged_case, 64, 1024, 8192),
    *(partial(selection.topk_case, *sizes) for sizes in ((1, 131072), (64, 65536))),
    *(partial(step, requests) for requests in (1, 64)),
)


def told_of(case: Case) -> str:
    """The sizes that a case is made of, without making it."""
    return f"{case.func.__name__} {' '.join(str(getattr(value, 'name', value)) for value in case.args)}"  # type: ignore[attr-defined]


def compile_case(case: Case) -> None:
    """Compile what a case and its peers launch, into Triton's cache on disk."""
    made = case()
    made.ours(0)
    for peer in made.peers.values():
        with suppress(Exception):  # told when the case is timed
            peer(0)


def check_case(key: tuple[str, str]) -> dict[str, object]:
    """An op's case by PyTorch against the reference."""
    op = registry()[key[0]]
    case = next(case for case in op.cases if case.name == key[1])
    error, right, _ = compare(op, case, {"torch": calls.by_torch})
    return {"op": op.name, "case": case.name, "relative_error": error, "right": right}


Out = Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Jobs = Annotated[int, typer.Option(help="Processes that compile.")]


def keep(out: Path | None, line: dict[str, Any]) -> None:
    if out is not None:
        with out.open("a") as file:
            print(json.dumps(line), file=file, flush=True)


@app.command()
def verify(
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None, out: Out = None,
    commit: Commit = None, jobs: Jobs = 8,
) -> None:  # fmt: skip
    """Every op's cases against the references; exit 1 if one differs or fails."""
    names = list(registry())
    items = [(name, case.name) for name in op or names for case in registry()[name].cases]
    asked = "".join(f" --op {name}" for name in op or ())
    keep(out, provenance(f"python -m tools.stand_in --part {os.environ[PART]} verify{asked}", commit))
    wrong, worst = 0, dict.fromkeys(op or names, 0.0)
    for (name, case), told in in_processes(check_case, items, jobs):
        failed = isinstance(told, BaseException)
        line = {"op": name, "case": case, "right": False, "failed": repr(told)[:300]} if failed else told
        keep(out, line)
        if not line["right"]:
            wrong += 1
            print("DIFFERS:", json.dumps(line), flush=True)
        else:
            worst[name] = max(worst[name], line["relative_error"])
    print({name: float(f"{error:.1e}") for name, error in worst.items()})
    print(f"{len(items) - wrong} of {len(items)} cases of {len(worst)} ops agree with the reference")
    raise typer.Exit(code=wrong > 0)


@app.command()
def test() -> None:
    """The tests of the Gluon kernel for SM12x."""
    install()
    raise typer.Exit(
        code=pytest.main(["-q", "-n", "0", str(Path(__file__).parents[1] / "tests" / "gpu" / "test_gluon_sm120.py")])
    )


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option(help="Cases whose sizes contain this.")] = None, out: Out = None,
    commit: Commit = None, jobs: Jobs = 8,
) -> None:  # fmt: skip
    """Time serving sizes; exit 1 if a result is wrong."""
    cases = [case for case in CASES if any(text in told_of(case) for text in only or [""])]
    for case, told in in_processes(compile_case, cases, jobs):
        if isinstance(told, BaseException):
            print("FAILED:", told_of(case), repr(told)[:300], flush=True)
            cases.remove(case)
    install()
    torch.manual_seed(0)
    limits = ceilings()
    asked = "".join(f" --only {text!r}" for text in only or ())
    head = provenance(f"python -m tools.stand_in --part {os.environ[PART]} bench{asked}", commit)
    first = baselines.rates(limits)
    keep(out, head | {"stand_in": os.environ[PART], "ceilings": first})
    lines = []
    for case in cases:
        line = time_case(case(), limits, with_jax=False)
        keep(out, line)
        lines.append(line)
        torch.cuda.empty_cache()
    console = Console(width=190)
    console.print({name: f"{value:.3e}" for name, value in first.items()})
    console.print(table_of(lines, {}))
    raise typer.Exit(code=any(line.get("wrong") for line in lines))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    app()
