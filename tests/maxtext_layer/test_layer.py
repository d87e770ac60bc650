"""MaxText's own layer of DeepSeek-V3.2, forward and backward with the indexer's loss, by its code and by xmla.

`make maxtext` installs it and runs this on the CPU. All of the layer is the published one, projections included.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if find_spec("maxtext") is None:
    pytest.skip("needs MaxText: make maxtext", allow_module_level=True)

import xmla.maxtext
from benchmarks import maxtext
from xmla import UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore"),  # MaxText's own
]

# Roundings of scores, probabilities, their gradients and results to bfloat16.
BOUND = 2.0**-6
COUNT = 14
SIZES = maxtext.Sizes(
    tokens=COUNT, batch=2, heads=2, hidden=32, q_latent=32, keys=16, values=16, positions=4096, index_heads=4,
    index_dims=64, k=5,
)  # fmt: skip
# Two documents and padding, and one document.
SEGMENTS = jnp.array([[1] * 5 + [2] * 7 + [0] * 2, [1] * COUNT])


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly() -> Iterator[None]:
    """XLA's optimisations take most of the time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def installed() -> Iterator[None]:
    xmla.maxtext.install()
    yield
    xmla.maxtext.uninstall()


@cache
def layer_of(sparse: bool, devices: int) -> Any:
    config = maxtext.configure(SIZES, indexer_sparse_training=sparse)
    with maxtext.over(config, devices) as mesh:
        return maxtext.build(config, mesh)


@cache
def run(way: str, sparse: bool, devices: int = 1, remat: bool = False) -> tuple[dict[str, np.ndarray], str]:
    """A step's results, and its compiled program."""
    layer = layer_of(sparse, devices)
    if way == "xmla":
        xmla.maxtext.install()
    with maxtext.over(layer.config, devices), pytest.MonkeyPatch.context() as patch:
        patch.setattr(xmla.maxtext, "SCRATCH", 4 * COUNT * 4)  # four tokens at a time, the last two alone
        step = maxtext.Step(layer, SEGMENTS, remat)
        step.step = step.step.lower(step.parameters, step.x).compile()
        found = {name: np.asarray(value, np.float64) for name, value in step().items()}
    xmla.maxtext.uninstall()
    return found, step.step.as_text()


@pytest.mark.parametrize("sparse", [True, False])
def test_outputs_and_gradients_are_maxtexts(sparse: bool) -> None:
    (own, own_program), (ours, program) = (run(way, sparse) for way in maxtext.WAYS)
    weights = {"wq_a.kernel", "wkv_b.kernel", "out.kernel", "indexer.wk.kernel", "indexer.k_norm.bias"}
    assert {"out", "loss", "x"} | weights <= own.keys() == ours.keys() and len(own) == 15
    assert all(value.any() for value in own.values())
    apart = maxtext.difference(ours, own)
    assert all(error < BOUND for error in apart.values()), apart
    # Nothing has as many elements as tokens by keys.
    pairs = f"{COUNT},{COUNT}]"
    assert pairs in own_program and pairs not in program


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices: JAX_NUM_CPU_DEVICES=2")
def test_two_devices_that_compute_their_sequences_twice_have_the_results_of_one() -> None:
    (one, _), (two, program) = run("xmla", True), run("xmla", True, devices=2, remat=True)
    apart = maxtext.difference(two, one)
    assert all(error < BOUND for error in apart.values()), apart
    assert f"{COUNT},{COUNT}]" not in program


@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_a_tokens_keys_are_those_of_maxtexts_mask(segments: jax.Array | None) -> None:
    op = layer_of(True, 1).attention_op
    arrays = [jnp.zeros((2, COUNT, 1, 1))] * 2
    mask = jnp.broadcast_to(op.generate_attention_mask(*arrays, segments, "train"), (2, 1, 1, COUNT, COUNT))
    starts, ends = xmla.maxtext._ranges(segments, 2, COUNT)
    keys = jnp.arange(COUNT)
    np.testing.assert_array_equal(mask[:, 0, 0] == 0, (starts[..., None] <= keys) & (keys < ends[..., None]))


@pytest.mark.usefixtures("installed")
def test_a_model_that_is_not_served_is_refused_when_it_is_made() -> None:
    config = maxtext.configure(SIZES, use_qk_clip=True)
    with maxtext.over(config) as mesh, pytest.raises(UnsupportedError, match="use_qk_clip=True is given"):
        maxtext.build(config, mesh)


@pytest.mark.usefixtures("installed")
def test_decoding_is_refused() -> None:
    layer = layer_of(True, 1)
    x = jnp.zeros((2, COUNT, SIZES.hidden), jnp.bfloat16)
    with maxtext.over(layer.config), pytest.raises(UnsupportedError, match="model_mode=prefill is given"):
        jax.eval_shape(lambda: layer.indexer(x, x, x, model_mode="prefill"))


def test_every_option_that_decides_is_one_of_maxtexts() -> None:
    config = layer_of(True, 1).config
    assert all(getattr(config, name) in served for name, served in xmla.maxtext.SERVED.items())
    assert all(getattr(config, name) <= most for name, most in xmla.maxtext.MAX_HEADS.items())


@pytest.mark.parametrize("remat", [False, True])
def test_a_replayed_selection_has_the_bits_of_the_same_one(remat: bool) -> None:
    """Output, the indexer's loss and all gradients; nothing is selected."""
    layer = layer_of(True, 1)
    xmla.maxtext.install()
    rows: list[jax.Array] = []
    select = xmla.maxtext._select

    def noted(*args: Any) -> jax.Array:
        chosen = select(*args)
        jax.debug.callback(
            lambda *each: rows.append(np.where(each[0] < 0, -1, each[0] - each[1])), chosen, args[3][..., None]
        )
        return chosen

    with maxtext.over(layer.config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(xmla.maxtext, "_select", noted)
        own = maxtext.Step(layer, SEGMENTS, remat)()
        patch.setattr(xmla.maxtext, "_select", None)
        with xmla.maxtext.replay({0: jnp.asarray(rows[0])}):
            again = maxtext.Step(layer, SEGMENTS, remat)()
    xmla.maxtext.uninstall()
    xmla.maxtext.check_selections({0: rows[0]}, SEGMENTS)
    assert own.keys() == again.keys() and all(np.array_equal(again[name], value) for name, value in own.items())
