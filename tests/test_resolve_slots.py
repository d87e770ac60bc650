"""A cache of which the device holds a tenth: attention through the pool has the bits of attention over the cache."""

import jax
import kit
import numpy as np
import pytest
import torch

from xmla import jax_api, torch_api
from xmla.core.registry import registry

REQUESTS, NEXT_N, KEYS, PAGE, HEADS, STEPS = 2, 2, 24, 8, 3, 12
ENTRIES = 1280  # of a request: ten times as many as its places
PLACES = ENTRIES // 10
ROW = 656


def selections(rng: np.random.Generator) -> np.ndarray:
    """What the tokens of a step select: mostly entries of a part that moves, some of them together."""
    middle = rng.integers(0, ENTRIES, (REQUESTS, 1, 1))
    near = np.stack([rng.permutation(3 * PLACES)[:KEYS] for _ in range(REQUESTS * NEXT_N)])
    indices = (middle + near.reshape(REQUESTS, NEXT_N, KEYS)) % ENTRIES
    indices[rng.random(indices.shape) < 0.05] = -1
    return indices.reshape(-1, KEYS).astype(np.int32)


def tensors(device: str) -> tuple[torch.Tensor, ...]:
    """The whole cache, the pages of each request in it, the pool, and an empty list of places."""
    rng = np.random.default_rng(0)
    pages = REQUESTS * ENTRIES // PAGE
    cache = torch.full((pages, PAGE, ROW), 255, dtype=torch.uint8, device=device)
    latent, rope = (torch.from_numpy(rng.standard_normal((pages * PAGE, n), np.float32)) for n in (512, 64))
    every = torch.arange(pages * PAGE, dtype=torch.int32, device=device)
    torch_api.write_mla_cache(latent.to(device), rope.to(device), every, cache)
    table = torch.from_numpy(rng.permutation(pages).reshape(REQUESTS, -1).astype(np.int32)).to(device)
    pool = torch.full((REQUESTS * PLACES // PAGE, PAGE, ROW), 255, dtype=torch.uint8, device=device)
    slots = torch.from_numpy(rng.permutation(REQUESTS * PLACES).reshape(REQUESTS, PLACES).astype(np.int32)).to(device)
    return cache, table, pool, torch.full_like(slots, -1), slots


def queries(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((REQUESTS * NEXT_N, HEADS, 576), np.float32)


def step(
    q: torch.Tensor, indices: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, pool: torch.Tensor,
    held: torch.Tensor, slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    selected, missing, destinations, counts = torch_api.resolve_slots(indices, held, slots, num_entries=ENTRIES)
    sources, _ = torch_api.map_slots(missing, table, page_size=PAGE)
    torch_api.convert_mla_cache(cache, sources.flatten(), destinations.flatten(), pool)
    return torch_api.sparse_mla(q, pool, selected, softmax_scale=0.1)[0], counts


def attended(q: torch.Tensor, indices: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    whole, _ = torch_api.map_slots(indices, table, page_size=PAGE)
    return torch_api.sparse_mla(q, cache, whole, softmax_scale=0.1)[0]


def test_attention_through_a_pool_of_a_tenth_is_that_over_the_cache(device: str) -> None:
    cache, table, pool, held, slots = tensors(device)
    rng = np.random.default_rng(1)
    copies, named = [], []
    for _ in range(STEPS):
        q = torch.from_numpy(queries(rng)).to(device).bfloat16()
        indices = torch.from_numpy(selections(rng)).to(device)
        out, counts = step(q, indices, cache, table, pool, held, slots)
        kit.assert_bits_equal("out", out, attended(q, indices, cache, table))
        copies.append(int(counts.sum()))
        rows = indices.view(REQUESTS, -1)
        named.append(sum(len(row[row >= 0].unique()) for row in rows))
        for row, places in zip(rows.cpu().numpy(), held.cpu().numpy(), strict=True):
            assert set(row[row >= 0].tolist()) <= set(places.tolist())
            assert len(set(places[places >= 0].tolist())) == (places >= 0).sum()
        assert sorted(slots.reshape(-1).tolist()) == [*range(REQUESTS * PLACES)]
    assert copies[0] == named[0]  # nothing is held at first
    assert 0 < sum(copies) < sum(named) and sum(named) > 2 * REQUESTS * PLACES  # some are found, places are given again


def test_under_jax_the_same_bits_and_the_same_list(device: str) -> None:
    """A jitted step that donates pool and list."""
    cache, table, pool, held, slots = tensors(device)

    def jax_step(q, indices, whole, block_table, rows, held, slots):
        selected, missing, destinations, _, held, slots = jax_api.resolve_slots(
            indices, held, slots, num_entries=ENTRIES
        )
        sources, _ = jax_api.map_slots(missing, block_table, page_size=PAGE)
        rows = jax_api.convert_mla_cache(whole, sources.ravel(), destinations.ravel(), rows)
        return jax_api.sparse_mla(q, rows, selected, softmax_scale=0.1)[0], rows, held, slots

    jitted = jax.jit(jax_step, donate_argnums=(4, 5, 6))
    whole, block_table, *state = (kit.torch_to_jax(tensor) for tensor in (cache, table, pool, held, slots))
    rng = np.random.default_rng(2)
    for _ in range(3):
        q = torch.from_numpy(queries(rng)).to(device).bfloat16()
        indices = torch.from_numpy(selections(rng)).to(device)
        out, _ = step(q, indices, cache, table, pool, held, slots)
        theirs, *state = jitted(kit.torch_to_jax(q), kit.torch_to_jax(indices), whole, block_table, *state)
        kit.assert_bits_equal("out", theirs, out)
        for name, ours, array in zip(("pool", "held", "slots"), (pool, held, slots), state, strict=True):
            kit.assert_bits_equal(name, array, ours)


def test_what_is_given_up_was_named_least_recently(device: str) -> None:
    """Against a list kept in Python, one entry after the other."""
    rng = np.random.default_rng(3)
    places, entries = 6, 11
    held = torch.full((1, places), -1, dtype=torch.int32, device=device)
    slots = torch.arange(places, dtype=torch.int32, device=device)[None]
    recent: list[int] = []
    for _ in range(60):
        row = rng.permutation(entries)[: rng.integers(0, places + 1)].astype(np.int32)
        indices = torch.from_numpy(np.pad(row, (0, places - len(row)), constant_values=-1))[None].to(device)
        before = held[0].tolist()
        _, missing, _, counts = torch_api.resolve_slots(indices, held, slots, num_entries=entries)
        absent = [entry for entry in row.tolist() if entry not in recent]
        stay = [entry for entry in recent if entry not in row]
        room = places - len(recent)
        recent = stay[max(len(absent) - room, 0) :] + absent + [entry for entry in recent if entry in row]
        assert missing[0, : counts[0]].tolist() == absent
        assert [entry for entry in held[0].tolist() if entry >= 0] == recent, before


def test_the_entry_that_a_step_makes_is_named_in_a_column_of_its_own(device: str) -> None:
    """It is written to the slot that it gets, where later steps find it."""
    held = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    slots = torch.arange(4, dtype=torch.int32, device=device)[None]
    pool = torch.full((1, 4, ROW), 255, dtype=torch.uint8, device=device)
    for token in range(6):
        last = [max(token - back, -1) for back in range(3)]
        indices = torch.tensor([last], dtype=torch.int32, device=device)
        selected, missing, _, counts = torch_api.resolve_slots(indices, held, slots, num_entries=64)
        assert counts.tolist() == [1] and missing[0].tolist() == [token, -1, -1]
        latent = torch.full((1, 512), float(token + 1), device=device)
        torch_api.write_mla_cache(latent, latent[:, :64], selected[:, 0].contiguous(), pool)
        assert torch_api.read_mla_cache(pool, selected[0])[:, 0].tolist() == [float(entry + 1) for entry in last]


@pytest.mark.gpu
def test_steps_of_a_cuda_graph_go_on_from_the_list_that_the_last_one_left() -> None:
    cache, table, pool, held, slots = tensors("cuda")
    rng = np.random.default_rng(4)
    q = torch.from_numpy(queries(rng)).cuda().bfloat16()
    indices = torch.from_numpy(selections(rng)).cuda()
    step(q, indices, cache, table, pool, held, slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads
        out, counts = step(q, indices, cache, table, pool, held, slots)
    for _ in range(4 * STEPS):
        q.copy_(torch.from_numpy(queries(rng)))
        indices.copy_(torch.from_numpy(selections(rng)))
        inputs = {"indices": indices.cpu().numpy(), "held": held.cpu().numpy(), "slots": slots.cpu().numpy()}
        graph.replay()
        kit.assert_bits_equal("out", out, attended(q, indices, cache, table))
        *_, wanted = registry()["resolve_slots"].reference(**inputs, num_entries=ENTRIES)
        for name, got, want in (
            ("counts", counts, wanted), ("held", held, inputs["held"]), ("slots", slots, inputs["slots"])
        ):  # fmt: skip
            kit.assert_bits_equal(name, got, want)
