"""The kernel of indexer_logits written by hand for Hopper: the portable kernel's bits, and the definition's values."""

import jax
import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from garbage import garbage_inputs
from hypothesis import given, settings

from xmla import jax_api, torch_api
from xmla.core.op import Case, registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]

OP = registry()["indexer_logits"]
CASES = [case for case in OP.cases if kit.make(case)["keys"].dtype == ml_dtypes.float8_e4m3fn]
by_case = pytest.mark.parametrize("case", CASES, ids=kit.case_id)


def logits(inputs: dict[str, np.ndarray]) -> torch.Tensor:
    return torch_api.indexer_logits(*kit.torch_inputs(OP, kit.copies(inputs), "cuda"), implementation="gluon")


def agrees(inputs: dict[str, np.ndarray]) -> None:
    got = logits(inputs)
    portable = torch_api.indexer_logits(*kit.torch_inputs(OP, kit.copies(inputs), "cuda"), implementation="triton")
    kit.assert_bits_equal("logits", got, portable)
    with np.errstate(all="ignore"):
        want = OP.reference(**inputs)
    for name, value in kit.results(OP, want):
        kit.assert_close(name, got, value, kit.tolerance_of(OP, name))


@by_case
def test_agrees_with_the_definition(case: Case) -> None:
    agrees(kit.make(case))


def ragged(tokens: int, heads: int, keys: int, dim: int) -> dict[str, np.ndarray]:
    """Values of one size, so that no sum of theirs passes float32; rows that want all keys."""
    rng = np.random.default_rng([tokens, heads, keys, dim])
    return {
        "q8": rng.standard_normal((tokens, heads, dim), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "weights": rng.standard_normal((tokens, heads), np.float32),
        "keys": rng.standard_normal((keys, dim), np.float32).astype(ml_dtypes.float8_e4m3fn),
        "key_scales": rng.random(keys, np.float32) + np.float32(0.1),
        "starts": np.zeros(tokens, np.int32),
        "ends": np.full(tokens, keys, np.int32),
    }


@pytest.mark.parametrize("rows", ["all", "causal", "apart", "anything"])
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "dim"),
    [(1, 64, 1, 128), (2, 64, 127, 128), (3, 64, 129, 128), (5, 32, 300, 64), (33, 40, 4097, 128), (17, 128, 700, 128),
     (9, 3, 1030, 32), (70, 64, 2050, 128), (20, 16, 1025, 64), (257, 64, 9000, 128)],
)  # fmt: skip
def test_tile_edges(tokens: int, heads: int, keys: int, dim: int, rows: str) -> None:
    inputs, rng = ragged(tokens, heads, keys, dim), np.random.default_rng(1)
    if rows == "causal":
        inputs["ends"] = np.arange(keys - tokens + 1, keys + 1, dtype=np.int32)
    elif rows == "apart":  # requests one after another, some of them empty
        inputs["starts"] = (np.arange(tokens, dtype=np.int32) // 3 * keys // tokens * 3).astype(np.int32)
        inputs["ends"] = inputs["starts"] + rng.integers(0, keys // tokens + 2, tokens, dtype=np.int32)
    elif rows == "anything":
        inputs["starts"] = rng.integers(-5, keys + 5, tokens, dtype=np.int32)
        inputs["ends"] = rng.integers(-5, keys + 5, tokens, dtype=np.int32)
    agrees(inputs)


def test_keys_that_no_row_wants_may_be_nan() -> None:
    inputs = ragged(40, 64, 3000, 128)
    inputs["starts"][:], inputs["ends"][:] = 700, 2001
    for name in ("keys", "key_scales"):
        inputs[name][:700] = inputs[name][2001:] = np.nan
    agrees(inputs)
    inputs["keys"][1000, 5] = np.nan
    got = logits(inputs)
    assert got[:, 1000].isnan().all() and got.isnan().sum() == 40


@given(garbage_inputs(OP).filter(lambda drawn: drawn[0]["keys"].dtype == ml_dtypes.float8_e4m3fn))
@settings(max_examples=30)
def test_garbage_integers_give_the_definition(drawn: tuple[dict[str, np.ndarray], dict[str, object]]) -> None:
    agrees(drawn[0])


@by_case
def test_jax_gives_the_same_bits(case: Case) -> None:
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    step = jax.jit(lambda *arrays: jax_api.indexer_logits(*arrays, implementation="gluon"))
    kit.assert_bits_equal("logits", logits(inputs), step(*kit.jax_inputs(OP, inputs)))


def test_repeated_calls_and_graph_replays_give_the_same_bits() -> None:
    inputs = kit.torch_inputs(OP, ragged(257, 64, 9000, 128), "cuda")
    want = torch_api.indexer_logits(*inputs, implementation="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_api.indexer_logits(*inputs, implementation="gluon")
    for _ in range(20):
        again = torch_api.indexer_logits(*inputs, implementation="gluon")
        graph.replay()
        kit.assert_bits_equal("logits", want, again)
        kit.assert_bits_equal("logits", want, captured)
