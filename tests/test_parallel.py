"""Attention over several ranks: torch processes under gloo (NCCL on GPUs), devices of one JAX process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from conftest import EVERYTHING, HAS_GPU, require_transformers
from jax.sharding import PartitionSpec as P

from xmla import ArgumentError
from xmla.core.parallel import Ownership, heads_of, query_format, received_bytes
from xmla.core.registry import registry
from xmla.core.values import Spec
from xmla.jax_api import _sharding

FOLDER = Path(__file__).parent / "parallel"


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    monkeypatch.setenv("LOCAL_RANK", "0")  # torch warns of a mesh before anything has chosen a GPU
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_ranks(tmp_path: Path, ranks: int, *checks: str, **environment: str) -> list[dict[str, object]]:
    """What each of `ranks` processes printed; none waits longer than the engine's timeout for another."""
    if HAS_GPU and visible_gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, str(FOLDER / "torch_ranks.py"), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *checks], env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(out.strip() for out, _ in said), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4] if EVERYTHING else [2])
def test_torch(ranks: int, tmp_path: Path) -> None:
    """DistributedDataParallel and fully_shard have the gradients of one process with the whole batch, too."""
    found = run_ranks(tmp_path, ranks, "context", "options", "writes", "heads", "bytes", "gradients")
    assert all(rank.get("ok") for rank in found), found
    assert set(found[0]["gradients"]) == {"DistributedDataParallel", "sharded"}
    assert all(rank["gradients"] == found[0]["gradients"] for rank in found), "ranks differ"
    assert all(rank["digests"] == found[0]["digests"] for rank in found), "ranks differ"
    for rank in found:
        assert rank["uneven"] == (
            f"tensor parallel: axis H is {2 * ranks + 1}, expected a multiple of {ranks} ranks: every rank runs the "
            "same kernel, so that its heads have the bits they have on one GPU"
        )
        if not HAS_GPU:  # NCCL's do not pass a socket
            for kind, (measured, predicted) in rank["bytes"].items():
                assert predicted <= measured <= 1.05 * predicted + 2000, (kind, measured, predicted)


@pytest.mark.slow
def test_training_of_transformers(tmp_path: Path) -> None:
    """fully_shard has the gradients of one process with the whole batch, but for rounding of parameters' gradients.

    Of models that score keys, and of those that select entries or pools.
    """
    require_transformers()
    found = run_ranks(tmp_path, 2, "transformers")
    assert all(rank.get("ok") for rank in found), found
    keyed, others = (found[0][check] for check in ("transformers", "entries_and_pools"))
    assert len(keyed) == 3 and max(keyed.values()) < 0.02, found
    # Either side is up to 0.04 from float32; an H200 has 0.058 between them.
    assert len(others) == 2 and max(others.values()) < 0.1, found
    assert len(found[0]["digests"]) == 5 and found[0]["digests"] == found[1]["digests"], "ranks differ"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4] if EVERYTHING else [2])
def test_a_rank_that_disagrees_on_shapes(ranks: int, tmp_path: Path) -> None:
    """On a shape that is new, and on one that the others have had: then both sides wait until the timeout."""
    for rank, found in enumerate(run_ranks(tmp_path, ranks, "shapes")):
        own, other, who = (8, 4, ranks - 1) if rank < ranks - 1 else (4, 8, 0)
        first, *later = found["messages"]
        named = f"merge_attention: all_gather of bfloat16[3, {own}, 512] on rank {rank}"
        assert first == (
            f"ArgumentError: {named}, expected the same on every rank: rank {who} has merge_attention: all_gather of "
            f"bfloat16[3, {other}, 512]"
        )
        assert [message.startswith(f"RuntimeError: {named}: ") for message in later] == ([] if HAS_GPU else [True])


@pytest.mark.skipif(HAS_GPU, reason="NCCL tells after its watchdog's timeout")
def test_a_rank_that_dies(tmp_path: Path) -> None:
    alive, dead = run_ranks(tmp_path, 2, "death")
    assert dead == {"died": True}
    assert alive["message"].startswith("merge_topk: all_gather of int32[2, 3, 48] on rank 0: "), alive
    assert "closed by peer" in alive["message"] or "reset by peer" in alive["message"]


@pytest.mark.slow
def test_jax() -> None:
    ranks = [n for n in ((2, 4, 8) if EVERYTHING else (4,)) if not HAS_GPU or n <= visible_gpus()]
    if not ranks:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "jax_ranks.py"), *map(str, ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["ranks"] for line in found] == ranks
    for line in found:
        assert line["uneven"].startswith(f"tensor parallel: axis H is {line['ranks'] + 1}, expected a multiple of")
        for kind in ("gathered", "scattered"):
            measured, predicted = line[kind]
            assert measured == predicted, (kind, line)


@pytest.mark.slow
def test_jax_gradients() -> None:
    """Under a shard_map they are those of one device; a cache that devices share, or gather, has the sum of theirs, and
    the indexer learns the sum of the devices' targets."""
    if HAS_GPU and visible_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "jax_gradients.py"), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["over"]: line["collectives"] for line in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"tokens", "heads", "context", "heads of the target", "tokens of the loss"}
    assert {"all-gather", "reduce-scatter"} <= set(found["context"])
    assert all({"all-reduce", "reduce-scatter"} & set(collectives) for collectives in found.values()), found


@pytest.mark.parametrize("way", ["step", "attention"])
def test_caches_and_selections_are_the_same_on_ranks_that_share_heads(way: str) -> None:
    """JAX knows it, so that a shard_map takes them as a scan's carry, and gives them as they came."""
    if HAS_GPU and visible_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "jax_heads.py"), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_mesh_axis_serves_one_axis() -> None:
    """Of heads over x and tokens over x the first that is met is shared out; the other is whole."""
    op = registry()["sparse_mla"]
    case = next(case for case in op.cases if {*kit.make(case)} == {"q", "cache", "slots"})
    specs = {name: Spec.of_numpy(array) for name, array in kit.make(case).items()}
    problem = op.bind(specs, op.attributes(**case.attrs))
    heads, tokens = P(None, "x"), P("x")
    for q, slots, results in (
        (heads, tokens, [P(None, "x", None), P(None, "x")]),
        (tokens, heads, [P("x", None, None), P("x", None)]),
        (heads, P("y"), [P("y", "x", None), P("y", "x")]),
        (heads, P(("x", "y")), [P(None, "x", None), P(None, "x")]),
    ):
        assert _sharding.result_specs(op, problem, [q, P(), slots]) == results, (q, slots)


@pytest.mark.slow
def test_jit() -> None:
    """Tokens and heads that are shared out stay so, with one device's bits and no exchange; the rest is replicated."""
    if HAS_GPU and visible_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    devices = "2" if HAS_GPU else "8"
    command = [sys.executable, str(FOLDER / "jax_jit.py"), devices]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line.pop("call"): line for line in map(json.loads, done.stdout.splitlines())}

    def spread(call: str, place: int, over: str) -> bool:
        specs = found[call]["specs"]
        return not found[call]["collectives"] and all(spec[place] == over for spec in specs[:2] if len(spec) > place)

    for op in registry().values():
        axes = {axis for tensor in op.tensors.values() for axis in tensor.names}
        for place, axis in enumerate("TH"):
            kept = any(axis in result.names for result in op.outputs.values())
            if axis in axes and kept and not op.mutates and not op.sums_over_tokens:
                assert spread(call := f"{op.name} over {axis}", place, "x"), found[call]
    for kind in ("auto", "explicit"):
        for call in (f"step, {kind}", f"shard_map, {kind}"):
            assert spread(call, 0, "tokens") and (devices == "2" or spread(call, 1, "heads")), found[call]
        assert all(spec[0] == "tokens" for spec in found[f"shard_map over tokens, {kind}"]["specs"])
        for op in ("window_slots", "indexer_logits_paged"):
            assert spread(call := f"{op} without ids, {kind}", 0, "x"), found[call]
    assert spread(call := "vmap over the tokens' mesh axis", 0, "tokens"), found[call]
    for call in ("write", "donated", "Ref"):
        assert not any(found[call]["specs"][-1]), found[call]


@pytest.mark.slow
def test_jit_of_gradients_and_vmap() -> None:
    """A gradient is sharded as its argument: each device computes its part, and of sums over tokens they are added."""
    devices = 4 if EVERYTHING and (not HAS_GPU or visible_gpus() >= 4) else 2
    if HAS_GPU and visible_gpus() < devices:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "jax_explicit.py"), str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line.pop("call"): line for line in map(json.loads, done.stdout.splitlines())}
    for kind in ("auto", "explicit"):
        for name, place in (("attention, tokens", 0), ("attention, heads", 1), ("scores, tokens", 0)):
            call = found[f"{name}: {kind}, {devices}"]
            assert call["collectives"] == ["all-reduce"] and call["specs"][0][place] == "x", (name, call)
    for op in registry().values():
        axes = {axis for tensor in op.tensors.values() for axis in tensor.names}
        own_keys = op.batch is not None  # whose calls are made one by one, or of pages
        if "T" in axes and not op.mutates and not op.sums_over_tokens and not own_keys:
            call = found[f"vmap of {op.name} over (None, 'x')"]
            assert all(spec[1] == "x" for spec in call["specs"]), (op.name, call)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["layers", "auto", "explicit"])
def test_jax_stacks(way: str) -> None:
    """Parts of stacks have the bits of arrays of their own on one device; GPUs launch what their calls launch.

    Without XMLA_ALL each op takes every form in one of the ways; those that update have every way.
    """
    if HAS_GPU and visible_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "jax_stacks.py"), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["op"]: line["launches"] for line in map(json.loads, done.stdout.splitlines())}
    assert {op.name for op in registry().values() if op.mutates} <= found.keys()
    assert all(found.values())
    assert not EVERYTHING or all("looped, donated" in found[name] for name in found if registry()[name].mutates)


@pytest.mark.usefixtures("device", "one_rank")
@pytest.mark.parametrize(("index_format", "at_once"), [("fp8", None), ("mxfp4", None), ("fp8", 5)])
def test_the_model_lists_the_calls_of_a_step(
    index_format: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `xmla plan --ranks` prints and `warmup` compiles is what a step calls, strides included.

    Also where logits of so many tokens fit the workspace at once: parts of four, which begin on whole vectors.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sys.path.insert(0, str(FOLDER))
    from problem import PAGE, SCALE, K, make
    from torch_ranks import DEVICE, attend

    from xmla import ModelConfig
    from xmla.core.models import v32
    from xmla.core.op import Op
    from xmla.core.parallel import parts
    from xmla.core.values import Attributes, Spec, row_major
    from xmla.torch_api import _prepared, parallel

    def key(op: str, specs: list[Spec | None], attrs: Attributes) -> tuple[object, ...]:
        def strides(spec: Spec) -> list[int]:  # that of an axis of one element means nothing
            real = spec.strides or row_major(spec.shape)
            return [stride for size, stride in zip(spec.shape, real, strict=True) if size > 1]

        named = attrs._asdict()
        named.pop("cache_format", None)  # the model names the format that the call infers
        return op, [s and (s.shape, s.dtype, strides(s)) for s in specs], named

    called = []
    real = _prepared.prepare

    def prepare(op: Op, tensors: list, attrs: tuple, *rest: object) -> object:
        assert all(t is None or t.data_ptr() % 16 == 0 for t in tensors), op.name
        called.append(key(op.name, [t if t is None else _prepared.spec_of(t) for t in tensors], op.attributes(*attrs)))
        return real(op, tensors, attrs, *rest)

    monkeypatch.setattr(_prepared, "prepare", prepare)
    monkeypatch.setattr(_prepared, "call_cache", _prepared.CallCache())
    next_n = 1 if at_once is None else 3
    problem = make(Ownership(1, PAGE), (31, 17), next_n, index_format=index_format)
    pages, width = len(problem.ranks[0]["mla_cache"]), problem.whole["block_table"].shape[1]
    if at_once is not None:
        nbytes = 4 * width * PAGE * at_once
        for place in (v32, parallel):
            monkeypatch.setattr(place, "parts", lambda tokens, columns, workspace_bytes: parts(tokens, columns, nbytes))
    attend(parallel.ContextParallel(init_device_mesh(DEVICE, (1,)), problem.ownership), problem, 0)
    model = ModelConfig(
        heads=8, index_heads=4, k=K, page_size=PAGE, softmax_scale=SCALE, sink=True, index_format=index_format
    )
    listed = []
    for call in model.shared(2 * next_n, 2, width * PAGE, mixed=False):
        if call.alternative:  # of ranks that divide a token's heads
            continue
        op = registry()[call.op]
        specs = [call.specs.get(name) for name in op.tensors]
        specs = [s and Spec((pages, *s.shape[1:]), s.dtype) if n.endswith("cache") else s
                 for n, s in zip(op.tensors, specs, strict=True)]  # fmt: skip
        listed.append(key(call.op, specs, op.attributes(**call.attrs)))
    assert listed == called
    rows = [specs[0][0][0] for op, specs, _ in called if op == "select_topk"]
    assert rows == ([2] if at_once is None else [4, 2])


@pytest.mark.usefixtures("device", "one_rank")
def test_every_rank_has_a_table_as_wide() -> None:
    """Where ranks have other numbers of pages too, so that the kernels of all are the same."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from xmla.torch_api import parallel

    mesh = init_device_mesh("cuda" if HAS_GPU else "cpu", (1,))
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    tables = []
    for rank in range(4):
        of_all = parallel.ContextParallel(mesh, Ownership(1, 64))
        object.__setattr__(of_all, "ownership", Ownership(4, 64, block_pages=2))
        object.__setattr__(of_all, "rank", rank)
        tables.append(of_all.batch(table, torch.tensor([320, 1], dtype=torch.int32)).own_table)
    assert [table[0].tolist() for table in tables] == [[0, 1], [2, 3], [4, -1], [-1, -1]]
    assert all(table.is_contiguous() for table in tables)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("api", ["torch", "jax"])
def test_an_idle_step(api: str, request: pytest.FixtureRequest) -> None:
    """No token of no request, as a data-parallel rank has while the others work."""
    sys.path.insert(0, str(FOLDER))
    from problem import PAGE, SCALE, K, make

    problem = make(Ownership(1, PAGE), (31, 17), 1)
    whole = {name: array if name == "sink" else array[:0] for name, array in problem.whole.items()}
    own = problem.ranks[0] | {"block_table": problem.ranks[0]["block_table"][:0]}
    if api == "torch":
        from torch.distributed.device_mesh import init_device_mesh
        from torch_ranks import DEVICE, attend

        from xmla.torch_api.parallel import ContextParallel

        request.getfixturevalue("one_rank")
        parallel = ContextParallel(init_device_mesh(DEVICE, (1,)), problem.ownership)
        found = attend(parallel, replace(problem, whole=whole, ranks=[own]), 0)
    else:
        import jax
        from jax.sharding import Mesh
        from jax.sharding import PartitionSpec as P

        from xmla.jax_api.parallel import ContextParallel

        parallel = ContextParallel("context", problem.ownership)

        def step() -> tuple[jax.Array, ...]:
            batch = parallel.batch(own["block_table"], jax.numpy.asarray(whole["lengths"]))
            queries = (whole[name] for name in ("q", "index_q", "index_weights"))
            return parallel.dsa_attention(
                *queries, own["mla_cache"], own["indexer_cache"], batch, k=K, softmax_scale=SCALE
            )

        mesh = Mesh(np.array(jax.devices()[:1]), ("context",))
        found = jax.shard_map(step, mesh=mesh, in_specs=(), out_specs=(P(), P(), P()), check_vma=False)()
    assert [tuple(result.shape) for result in found] == [(0, 8, 512), (0, 8), (0, K)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("workspace_bytes", [1, 1 << 29], ids=["a token at a time", "whole"])
@pytest.mark.parametrize("api", ["torch", "jax"])
def test_a_batch_of_other_tokens_is_refused(
    api: str, workspace_bytes: int, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    """Also where logits are stored for some tokens at a time, whose slices do not show it."""
    sys.path.insert(0, str(FOLDER))
    from problem import PAGE, K, make

    problem = make(Ownership(1, PAGE), (31, 17), 2)
    arrays = problem.whole | problem.ranks[0]
    if api == "torch":
        import kit
        from torch.distributed.device_mesh import init_device_mesh
        from torch_ranks import DEVICE

        from xmla.torch_api.parallel import ContextParallel

        request.getfixturevalue("one_rank")
        arrays = {name: kit.to_torch(array, DEVICE) for name, array in arrays.items()}
        parallel = ContextParallel(init_device_mesh(DEVICE, (1,)), problem.ownership)

        def select(tokens: int, table: Any, lengths: Any, ids: Any = None) -> None:
            batch = parallel.batch(table, lengths, ids)
            queries = (arrays[name][:tokens] for name in ("index_q", "index_weights"))
            parallel.select(*queries, arrays["indexer_cache"], batch, k=K, workspace_bytes=workspace_bytes)
    else:
        import jax
        from jax.sharding import Mesh
        from jax.sharding import PartitionSpec as P

        from xmla.jax_api.parallel import ContextParallel

        arrays = {name: jax.numpy.asarray(array) for name, array in arrays.items()}
        parallel = ContextParallel("context", problem.ownership)

        def select(tokens: int, table: Any, lengths: Any, ids: Any = None) -> None:
            def step() -> jax.Array:
                batch = parallel.batch(table, lengths, ids)
                queries = (arrays[name][:tokens] for name in ("index_q", "index_weights"))
                return parallel.select(*queries, arrays["indexer_cache"], batch, k=K, workspace_bytes=workspace_bytes)

            mesh = Mesh(np.array(jax.devices()[:1]), ("context",))
            jax.shard_map(step, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()

    table, lengths = arrays["block_table"], arrays["lengths"]
    with pytest.raises(
        ArgumentError, match=r"ContextParallel: index_q axis T \(axis 0\) is 3, expected a multiple of B"
    ):
        select(3, table, lengths[:3])
    with pytest.raises(ArgumentError, match=r"index_q axis T \(axis 0\) is 4, expected a multiple of B = 0"):
        select(4, table[:0], lengths)
    with pytest.raises(ArgumentError, match=r"lengths axis T \(axis 0\) is 4, expected 2, as index_q"):
        select(2, table, lengths)
    with pytest.raises(ArgumentError, match=r"request_ids axis T \(axis 0\) is 4, expected 2, as index_q"):
        select(2, table, lengths[:2], lengths)
    with pytest.raises(ArgumentError, match=r"block_table axis M \(axis 1\) is 0, expected at least 1"):
        select(4, table[:, :0], lengths)
    parallel = type(parallel)(getattr(parallel, "mesh", "context"), Ownership(1, 2 * PAGE))
    with pytest.raises(ArgumentError, match=r"indexer_cache axis R \(axis 1\) is 16, expected 32, as its Ownership"):
        select(4, table, lengths)
    with pytest.raises(ArgumentError, match=r"mla_cache axis R \(axis 1\) is 16, expected 32, as its Ownership"):
        parallel.dsa_attention(
            *(arrays[name] for name in ("q", "index_q", "index_weights", "mla_cache", "indexer_cache")), None, k=K,
            softmax_scale=1.0,
        )  # fmt: skip


@pytest.mark.usefixtures("device", "one_rank")
def test_an_lse_that_is_not_of_the_rows_is_refused() -> None:
    """One with as many bytes would be read as another."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from xmla.torch_api.parallel import ContextParallel

    device = "cuda" if HAS_GPU else "cpu"
    parallel = ContextParallel(init_device_mesh(device, (1,)), Ownership(1, 16))
    out = torch.zeros(2, 8, 512, dtype=torch.bfloat16, device=device)
    for lse, got in ((out[..., 0], r"bfloat16\[2, 8\]"), (torch.zeros(8, 2, device=device), r"float32\[8, 2\]")):
        with pytest.raises(ArgumentError, match=rf"ContextParallel: lse is {got}, expected float32\[2, 8\], as out"):
            parallel.merge(out, lse)


@pytest.mark.parametrize(
    "own", [Ownership(1, 4), Ownership(3, 4), Ownership(2, 5, 3), Ownership.contiguous(4, 2, 9)], ids=str
)
def test_every_key_has_one_owner_and_one_place(own: Ownership) -> None:
    length = 4 * own.ranks * own.block + 3
    position = np.arange(length)
    places = [own.position(np.arange(own.count(length, rank)), rank) for rank in range(own.ranks)]
    assert np.array_equal(np.sort(np.concatenate(places)), position)
    for rank, place in enumerate(places):
        assert (own.owner(place) == rank).all() and (np.diff(place) > 0).all()
        assert own.position(np.array([-1]), rank)[0] < 0
        for end in (0, 1, own.block, own.block + 1, length):
            assert own.count(end, rank) == (place < end).sum()
        assert own.count(np.array([-5, -(2**31)]), rank).tolist() == [0, 0]
        pages = own.own_pages(13, rank)
        assert len(pages) <= own.own_width(13) and (own.owner(np.array(pages) * own.page_size) == rank).all()


def test_contiguous_shares_are_runs() -> None:
    own = Ownership.contiguous(4, 64, 10)
    assert [own.own_pages(10, rank) for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_queries_have_the_format_of_the_keys() -> None:
    """Where rows of 68 bytes are those of both formats, the query's dims tell which."""
    assert [query_format(132, 128), query_format(68, 128), query_format(68, 64)] == ["fp8", "mxfp4", "fp8"]


def test_received_bytes() -> None:
    assert received_bytes(64, 128, 2048, 4) == {
        "candidates": 3 * 64 * 2048 * 8, "partial attention": 3 * 64 * 128 * (512 * 2 + 4),
    }  # fmt: skip
    assert received_bytes(64, 128, 2048, 4, scatter_heads=True)["partial attention"] == 3 * 64 * 32 * 1028
    assert sum(received_bytes(64, 128, 2048, 1).values()) == 0


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Ownership: ranks is 0, expected at least 1"):
        Ownership(0, 64)
    with pytest.raises(ArgumentError, match="mesh has 3 ranks, expected 2, as its Ownership"):
        Ownership(2, 64).check_ranks(3, "mesh")
    with pytest.raises(
        ArgumentError, match=r"indexer_cache axis ROW \(axis 2\) is 100, expected 132 \(fp8: D \+ 4\) or"
    ):
        query_format(100, 128)
    with pytest.raises(ArgumentError, match="axis H is 40, expected a multiple of 16 ranks"):
        heads_of(40, 16)
