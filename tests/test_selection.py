"""One selection for rollout and training: however a call is divided it is the same, and it can be given back."""

from dataclasses import dataclass

import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch

from xmla import jax_api, torch_api

REQUESTS, NEXT_N, CONTEXT, PAGE, K = 2, 2, 40, 8, 12
HEADS, INDEX_HEADS, INDEX_DIM = 2, 4, 32
SCALE = 0.1


@dataclass(frozen=True)
class Step:
    """A step of decoding whose scores are mostly equal: zeros of the ReLU, and keys that stand several times."""

    arrays: dict[str, torch.Tensor]

    @staticmethod
    def draw(seed: int, device: str) -> "Step":
        rng = np.random.default_rng(seed)
        tokens, pages = REQUESTS * NEXT_N, REQUESTS * CONTEXT // PAGE
        few = rng.integers(-1, 2, (6, INDEX_DIM)).astype(np.float32)
        keys = few[rng.integers(0, len(few), pages * PAGE)]
        index_q = rng.integers(-1, 2, (tokens, INDEX_HEADS, INDEX_DIM)).astype(np.float32)
        index_q[::2] = np.where(rng.random((len(index_q[::2]), INDEX_HEADS, 1)) < 0.7, 0, index_q[::2])
        lengths = rng.integers(K + 5, CONTEXT + 1, tokens)
        arrays = {
            "q": rng.standard_normal((tokens, HEADS, 512)),
            "index_q": index_q,
            "index_weights": rng.choice([-0.5, 0.5, 1.0], (tokens, INDEX_HEADS)).astype(np.float32),
            "mla_cache": rng.standard_normal((pages, PAGE, 512)),
            "block_table": rng.permutation(pages).reshape(REQUESTS, -1).astype(np.int32),
            "lengths": lengths.astype(np.int32),
        }
        step = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        step |= {name: step[name].bfloat16() for name in ("q", "mla_cache")}
        step["indexer_cache"] = torch.zeros(pages, PAGE, INDEX_DIM + 4, dtype=torch.uint8, device=device)
        slots = torch.arange(pages * PAGE, dtype=torch.int32, device=device)
        torch_api.write_indexer_cache(torch.from_numpy(keys).to(device), slots, step["indexer_cache"])
        return Step(step)

    def attend(self, requests: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """`dsa_attention` of some of the requests."""
        first, last, _ = requests.indices(REQUESTS)
        tokens = slice(first * NEXT_N, last * NEXT_N)
        rows = {name: self.arrays[name][tokens] for name in ("q", "index_q", "index_weights", "lengths")}
        table = {"block_table": self.arrays["block_table"][requests]}
        return torch_api.dsa_attention(**self.arrays | rows | table, k=K, softmax_scale=SCALE)

    def alone(self, token: int) -> torch.Tensor:
        """The selection of a token in a call of its own."""
        rows = {n: self.arrays[n][token : token + 1] for n in ("q", "index_q", "index_weights", "lengths")}
        table = {"block_table": self.arrays["block_table"][token // NEXT_N : token // NEXT_N + 1]}
        return torch_api.dsa_attention(**self.arrays | rows | table, k=K, softmax_scale=SCALE)[2]

    def contiguous(self, request: int) -> torch.Tensor:
        """The selection of a request over keys that are gathered first, as in prefill."""
        pages = self.arrays["block_table"][request]
        tokens = slice(request * NEXT_N, (request + 1) * NEXT_N)
        q8, weights = torch_api.quantize_indexer_query(self.arrays["index_q"], self.arrays["index_weights"])
        offsets = torch.arange(PAGE, dtype=torch.int32, device=pages.device)
        slots = (pages[:, None] * PAGE + offsets).flatten()
        keys, scales = torch_api.read_indexer_cache(self.arrays["indexer_cache"], slots, cache_format="fp8")
        ends = self.arrays["lengths"][tokens]
        return torch_api.indexer_topk(q8[tokens], weights[tokens], keys, scales, torch.zeros_like(ends), ends, k=K)


@pytest.mark.slow
def test_however_a_call_is_divided_the_selection_is_the_same(device: str) -> None:
    for seed in range(25):
        step = Step.draw(seed, device)
        indices = step.attend()[2]
        if seed % 2:
            kit.assert_bits_equal(f"chunked, seed {seed}", step.attend(slice(1, None))[2], indices[NEXT_N:])
        else:
            token = seed // 2 % len(indices)
            kit.assert_bits_equal(f"alone, seed {seed}", step.alone(token), indices[token : token + 1])
            request = token // NEXT_N
            wanted = indices[request * NEXT_N : (request + 1) * NEXT_N]
            kit.assert_bits_equal(f"contiguous, seed {seed}", step.contiguous(request), wanted)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_selection_of_all_keys_has_the_bits_of_one_by_logits(device: str, batch_invariant: bool) -> None:
    """Beside the same call with one more page a request, which nobody has: it could have more than k keys.

    The table without that column is a view of the one with it.
    """
    arrays = Step.draw(3, device).arrays
    arrays["lengths"][:2] = torch.tensor([0, CONTEXT])
    arrays["block_table"][1, 1] = -1  # a page that is not there
    more = arrays | {"block_table": torch.nn.functional.pad(arrays["block_table"], (0, 1))}
    arrays["block_table"] = more["block_table"][:, : CONTEXT // PAGE]
    attrs = {"k": CONTEXT, "softmax_scale": SCALE, "batch_invariant": batch_invariant}
    plan, by_logits = (torch_api.dsa_attention.plan(**each, **attrs) for each in (arrays, more))
    assert plan.left_out == ("quantize_indexer_query", "indexer_logits_paged") and not by_logits.left_out
    assert len(plan.launches) < len(by_logits.launches) and "indexer_logits_paged is left out" in str(plan)
    wanted = torch_api.dsa_attention(**more, **attrs)
    got = torch_api.dsa_attention(**arrays, **attrs)
    in_jax = jax_api.dsa_attention(**{name: jnp.asarray(kit.as_numpy(each)) for name, each in arrays.items()}, **attrs)
    for name, want, torchs, jaxs in zip(("out", "lse", "indices"), wanted, got, in_jax, strict=True):
        kit.assert_bits_equal(name, torchs, want)
        kit.assert_bits_equal(name, jaxs, want)


def test_keys_of_equal_scores_are_taken_by_position(device: str) -> None:
    step = Step.draw(0, device)
    step.arrays["index_q"].zero_()
    assert (step.attend()[2] == torch.arange(K, device=device)).all()


def test_a_selection_given_back_gives_the_same_bits(device: str) -> None:
    step = Step.draw(1, device)
    out, lse, indices = step.attend()
    given = (step.arrays["q"], step.arrays["mla_cache"], indices, step.arrays["block_table"], step.arrays["lengths"])
    again = torch_api.sparse_mla_paged(*given, softmax_scale=SCALE)
    in_jax = jax_api.sparse_mla_paged(*map(jnp.asarray, map(kit.as_numpy, given)), softmax_scale=SCALE)
    for name, want, torchs, jaxs in zip(("out", "lse"), (out, lse), again, in_jax, strict=True):
        kit.assert_bits_equal(name, torchs, want)
        kit.assert_bits_equal(name, jaxs, want)


def test_a_selection_given_back_trains(device: str) -> None:
    """Slots of the rollout's indices: gradients flow to queries and rows, and the selection is a constant."""
    step = Step.draw(2, device)
    indices = step.attend()[2]
    slots, counts = torch_api.map_slots(
        indices, step.arrays["block_table"], lengths=step.arrays["lengths"], page_size=PAGE
    )
    assert (counts == (indices >= 0).sum(1)).all()
    q, rows = (step.arrays[name].clone().requires_grad_() for name in ("q", "mla_cache"))
    torch_api.sparse_mla(q, rows, slots, softmax_scale=SCALE)[0].float().square().sum().backward()
    assert q.grad is not None and rows.grad is not None and bool(q.grad.any())
    used = torch.zeros(rows.shape[:2], dtype=torch.bool, device=device).flatten()
    used[slots[slots >= 0].long()] = True
    assert bool(rows.grad.flatten(0, 1)[used].any(-1).all()) and not rows.grad.flatten(0, 1)[~used].any()


@pytest.mark.parametrize("entries", ["plain", "v32_fp8"])
def test_attention_at_a_rollouts_keys_has_its_bits(entries: str, device: str) -> None:
    """An engine's steps beside other requests, over pages, and a trainer's one call over rows, in both frameworks.

    More keys than a split has. Over quantised entries the trainer attends to the same bytes, and differentiates by the
    rows that they were written from.
    """
    tokens, keys, k, page = 6, 600, 1100, 64
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    q, rows, beside = draw(tokens, HEADS, 576) / 4, draw(keys, 576), draw(2, HEADS, 576)
    pages = torch.randperm(2 * (keys // page + 1), generator=generator).int().to(device)
    tables = pages.view(2, -1)  # of another request, and of this one
    row = 656 if entries == "v32_fp8" else 576
    pool = torch.zeros(len(pages), page, row, dtype=torch.uint8 if row == 656 else torch.bfloat16, device=device)
    place = torch.arange(keys, dtype=torch.int32, device=device)
    for table in tables:
        slots = torch_api.map_slots(place[None], table[None], page_size=page)[0][0]
        torch_api.write_mla_cache(rows[:, :512], rows[:, 512:], slots, pool)
    recorded = torch.full((tokens, k), -1, dtype=torch.int32)
    for token in range(tokens):  # a token sees all keys up to its own, and leaves some out
        seen = keys - tokens + token + 1
        chosen = torch.randperm(seen, generator=generator)[: seen - 7].sort().values
        recorded[token, : len(chosen)] = chosen
    recorded = recorded.to(device)
    options = {"softmax_scale": SCALE, "batch_invariant": True}

    def step(first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Tokens of this request behind those of another, as the engines' plugins call the ops."""
        selected = torch.cat([recorded[:2].flip(0), recorded[first:last]])
        requests = torch.tensor([0, 0, *[1] * (last - first)], dtype=torch.int32, device=device)
        slots, lengths = torch_api.map_slots(selected, tables, requests, page_size=page)
        found = torch_api.sparse_mla(torch.cat([beside, q[first:last]]), pool, slots, lengths, **options)
        return tuple(each[2:] for each in found)

    out, lse = (torch.cat(parts) for parts in zip(step(0, 3), step(3, 4), step(4, 5), step(5, 6), strict=True))
    own, given = rows[:, None].clone().requires_grad_(), {}
    if row == 656:
        own, given = pool.new_zeros(keys, 1, row), {"rows": rows[:, None].clone().requires_grad_()}
        torch_api.write_mla_cache(rows[:, :512], rows[:, 512:], place, own)
    trained = torch_api.sparse_mla(q.clone().requires_grad_(), own, recorded, **given, **options)
    call = [jnp.asarray(kit.as_numpy(each.detach())) for each in (q, own, recorded)]
    in_jax = jax_api.sparse_mla(*call, **options)
    for name, want, torchs, jaxs in zip(("out", "lse"), (out, lse), trained, in_jax, strict=True):
        kit.assert_bits_equal(name, torchs.detach(), want)
        kit.assert_bits_equal(name, jaxs, want)
    trained[0].float().square().sum().backward()
    assert bool(given.get("rows", own).grad.any())
