"""The indexer's training: scores and loss against autodiff in float64, the same bits in every way to differentiate."""

import math
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from xmla import UnsupportedError, jax_api, torch_api
from xmla.core.op import Case, Op
from xmla.core.ops.training.indexer_scores.reference import valid_columns
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
SCORES, SCORES_BACKWARD, LOSS = OPS["indexer_scores"], OPS["indexer_scores_backward"], OPS["indexer_loss"]
SCALE, COEFF = 0.125, 2.0
Given = dict[str, Any]


def columns_of(inputs: dict[str, np.ndarray], keys: str) -> Any:
    bounds = {name: inputs.get(name) for name in ("ends", "starts", "indices")}
    return valid_columns(len(next(iter(inputs.values()))), len(inputs[keys]), **bounds)


def doubles(inputs: dict[str, np.ndarray], leaves: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The floating arguments in float64, NaN as 0: it stands where nothing is read."""
    wide = {n: torch.from_numpy(a.astype(np.float64)).nan_to_num() for n, a in inputs.items() if a.dtype.kind != "i"}
    return {name: tensor.requires_grad_(name in leaves) for name, tensor in wide.items()}


def scores_of(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weights @ torch.relu(q @ k.T)


def assert_gradients(found: dict[str, np.ndarray], given: dict[str, torch.Tensor], leaves: tuple[str, ...]) -> None:
    for name in leaves:
        want = given[name].grad
        assert want is not None and bool(want.any())
        np.testing.assert_allclose(found[f"d{name}"], want.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("case", SCORES_BACKWARD.cases, ids=kit.case_id)
def test_the_derivative_of_scores_is_what_autodiff_finds(case: Case) -> None:
    inputs = kit.make(case)
    leaves = tuple(SCORES.gradients)
    given = doubles(inputs, leaves)
    total = torch.zeros((), dtype=torch.float64)
    for token, columns, keys in columns_of(inputs, "k"):
        scores = scores_of(given["q"][token], given["k"][keys], given["weights"][token])
        total = total + scores @ given["dscores"][token, columns]
    total.backward()
    found = SCORES_BACKWARD.reference(**inputs)
    assert_gradients(dict(zip(SCORES_BACKWARD.outputs, found, strict=True)), given, leaves)


@pytest.mark.parametrize("case", LOSS.cases, ids=kit.case_id)
def test_the_loss_and_its_gradients_are_what_autodiff_finds(case: Case) -> None:
    """The target's logarithm is bounded below, the prediction's is not."""
    inputs = kit.make(case)
    leaves = tuple(LOSS.gradients)
    given = doubles(inputs, leaves)
    total = torch.zeros((), dtype=torch.float64)
    for token, columns, keys in columns_of(inputs, "index_k"):
        if not len(keys):
            continue
        if "target" in given:
            target = given["target"][token, columns]
        else:
            logits = case.attrs["softmax_scale"] * given["q"][token] @ given["rows"][keys].T
            target = (logits - given["lse"][token][:, None]).exp().sum(0)
        target = target / target.sum()
        logs = scores_of(given["index_q"][token], given["index_k"][keys], given["index_weights"][token]).log_softmax(0)
        total = total + target @ (target.clamp(min=1e-10).log() - logs)
    total = total * case.attrs["coeff"] / len(inputs["index_q"])
    total.backward()
    loss, *gradients = LOSS.reference(**inputs, **case.attrs)
    np.testing.assert_allclose(loss, total.item(), rtol=1e-9)
    assert_gradients(dict(zip(list(LOSS.outputs)[1:], gradients, strict=True)), given, leaves)


def draw(device: str, tokens: int = 6, count: int = 24, chosen: int | None = 10, heads: int | None = None) -> Given:
    """A call in which every key is a number; the second document of a packed batch starts at key 10.

    Without indices it has so many heads by default that the loss multiplies all pairs.
    """
    rng = np.random.default_rng(5)
    heads = heads or (4 if chosen else 20)

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device, dtype)

    given: Given = {
        "index_q": of(tokens, heads, 32), "index_k": of(count, 32),
        "index_weights": of(tokens, heads, dtype=torch.float32) / 4,
        "q": of(tokens, 3, 64), "rows": of(count, 64),
    }  # fmt: skip
    starts, ends = np.where(np.arange(tokens) % 2, 10, 0), np.where(np.arange(tokens) % 2, count, 10)
    ends[-1] = 3 - starts[-1]  # a row without keys
    given |= {n: torch.from_numpy(a.astype(np.int32)).to(device) for n, a in (("ends", ends), ("starts", starts))}
    if chosen:
        given["indices"] = torch.from_numpy(rng.integers(-1, count + 1, (tokens, chosen)).astype(np.int32)).to(device)
    return with_lse(given)


def with_lse(given: Given) -> Given:
    q, rows = given["q"].double(), given["rows"].double()
    lse = q.new_full(q.shape[:2], -torch.inf)
    arrays = {name: tensor.cpu().numpy() for name, tensor in given.items() if name in ("ends", "starts", "indices")}
    for token, _, keys in valid_columns(len(q), len(rows), *(arrays.get(n) for n in ("ends", "starts", "indices"))):
        if len(keys):
            lse[token] = torch.logsumexp(SCALE * q[token] @ rows[keys].T, 1)
    return given | {"lse": lse.float()}


def by_loss(given: Given, *leaves: Any, api: Any = torch_api) -> Any:
    moved = given | dict(zip(LOSS.gradients, leaves, strict=True))
    return 3.0 * api.indexer_loss(**moved, softmax_scale=SCALE, coeff=COEFF)[0][0]


def by_scores(given: Given, *leaves: Any, api: Any = torch_api) -> Any:
    """A loss of the scores in valid columns, others are −inf."""
    scores = api.indexer_scores(*leaves, given["ends"], given["starts"], given.get("indices"))
    if isinstance(scores, torch.Tensor):
        return torch.where(scores.isfinite(), scores, 0.0).square().sum()
    return (jnp.where(jnp.isfinite(scores), scores, 0.0) ** 2).sum()


LOSSES = {"loss": by_loss, "scores": by_scores}
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
WAYS = pytest.mark.parametrize("chosen", [None, 10], ids=["dense", "selected"])


def leaves_of(given: Given) -> list[Any]:
    return [given[name] for name in LOSS.gradients]


def torch_gradients(function: Callable[..., Any], given: Given) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in leaves_of(given)]
    function(given, *leaves).backward()
    return [leaf.grad for leaf in leaves]


def assert_same(found: Any, wanted: list[torch.Tensor]) -> None:
    for name, got, want in zip(LOSS.gradients, found, wanted, strict=True):
        assert bool(want.any())
        kit.assert_bits_equal(name, kit.as_numpy(got), kit.as_numpy(want))


@losses
@WAYS
def test_torch_and_jax_however_they_differentiate(loss: Callable[..., Any], chosen: int | None, device: str) -> None:
    given = draw(device, chosen=chosen)
    wanted = torch_gradients(loss, given)

    def compiled(given: Given, *leaves: torch.Tensor) -> Any:
        torch._dynamo.reset()
        return torch.compile(partial(loss, given), fullgraph=True, backend="aot_eager")(*leaves)

    def checkpointed(given: Given, *leaves: torch.Tensor) -> Any:
        return checkpoint(partial(loss, given), *leaves, use_reentrant=False)

    def under_autocast(given: Given, *leaves: torch.Tensor) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(given, *leaves)

    for way in (compiled, checkpointed, under_autocast):
        assert_same(torch_gradients(way, given), wanted)
    assert_same(torch.func.grad(partial(loss, given), (0, 1, 2))(*leaves_of(given)), wanted)

    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}
    function = partial(loss, arrays, api=jax_api)
    gradient = jax.grad(function, (0, 1, 2))
    assert_same(gradient(*leaves_of(arrays)), wanted)
    assert_same(jax.jit(gradient)(*leaves_of(arrays)), wanted)
    assert_same(jax.grad(jax.checkpoint(function), (0, 1, 2))(*leaves_of(arrays)), wanted)
    value, found = jax.value_and_grad(function, (0, 1, 2))(*leaves_of(arrays))
    assert_same(found, wanted)
    again, pull = jax.vjp(function, *leaves_of(arrays))
    assert value == again
    assert_same(pull(jnp.ones_like(again)), wanted)
    stacked = [jnp.stack([leaf, leaf]) for leaf in leaves_of(arrays)]
    found = jax.jit(lambda *two: jax.lax.scan(lambda _, leaves: (None, gradient(*leaves)), None, two)[1])(*stacked)
    for layer in range(2):
        assert_same([array[layer] for array in found], wanted)


def test_a_scan_over_layers_is_differentiated(device: str) -> None:
    """The loss is summed in a scan's carry, the gradient taken through it."""
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in draw(device).items()}

    def total(weights: jax.Array) -> jax.Array:
        def layer(sum_: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return sum_ + by_loss(arrays, arrays["index_q"], arrays["index_k"], w, api=jax_api), None

        return jax.lax.scan(layer, jnp.zeros(()), weights)[0]

    weights = jnp.stack([arrays["index_weights"], 2 * arrays["index_weights"]])
    found = jax.jit(jax.grad(total))(weights)
    for layer in range(2):
        alone = jax.grad(partial(by_loss, arrays, arrays["index_q"], arrays["index_k"], api=jax_api))(weights[layer])
        assert bool(alone.any()) and bool(jnp.array_equal(found[layer], alone))


@losses
@WAYS
def test_gradcheck(loss: Callable[..., Any], chosen: int | None) -> None:
    """Finite differences of the reference through torch's own check; steps as large as float32 results need."""
    given = draw("cpu", tokens=3, count=14, chosen=chosen, heads=4)
    wide = {name: t.double() if t.dtype == torch.bfloat16 else t for name, t in given.items()}
    api = SimpleNamespace(
        indexer_loss=partial(torch_api.indexer_loss, implementation="reference"),
        indexer_scores=partial(torch_api.indexer_scores, implementation="reference"),
    )
    leaves = [wide[name].requires_grad_() for name in ("index_q", "index_k")]
    function = lambda q, k: loss(wide, q, k, wide["index_weights"], api=api).double()
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, eps=2**-12, atol=2e-3, rtol=2e-3)


NAMES = {by_loss: ("indexer_loss", "index_q"), by_scores: ("indexer_scores", "q")}


@losses
def test_a_second_derivative_and_forward_mode_are_refused(loss: Callable[..., Any], device: str) -> None:
    given = draw(device)
    leaves = [tensor.clone().requires_grad_() for tensor in leaves_of(given)]
    (first,) = torch.autograd.grad(loss(given, *leaves), leaves[0], create_graph=True)
    op, argument = NAMES[loss]
    message = f"{op}: a gradient is differentiated, supported: constants"
    with pytest.raises(UnsupportedError, match=message):
        first.float().sum().backward()
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}
    function = lambda q: loss(arrays, q, *leaves_of(arrays)[1:], api=jax_api)
    with pytest.raises(UnsupportedError, match=message):
        jax.grad(lambda q: jax.grad(function)(q).astype(jnp.float32).sum())(arrays["index_q"])
    for derive in (jax.jvp, lambda f, x, t: jax.linearize(f, *x)[1](*t)):
        with pytest.raises(UnsupportedError, match=f"{op}: {argument} is differentiated in forward mode, supported: "):
            derive(function, (arrays["index_q"],), (arrays["index_q"],))


def test_residuals_have_names(device: str) -> None:
    """A policy that keeps the loss's own gradients saves its second run."""
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in draw(device).items()}
    names = [f"indexer_loss_{name}" for name in LOSS.outputs]
    calls = []
    for policy in (None, jax.checkpoint_policies.save_only_these_names(*names)):
        function = jax.checkpoint(partial(by_loss, arrays, api=jax_api), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(*leaves_of(arrays)))
        assert all(name in text for name in names)
        calls.append(text.count("op=Op(indexer_loss)\n"))
    assert calls == [2, 1]


@pytest.mark.parametrize("name", [name for name in LOSS.outputs if name not in LOSS.differentiable])
def test_a_derivative_of_the_losss_gradients_is_refused(name: str, device: str) -> None:
    """However it is asked for; beside the loss's own it would be left out silently. A detached result is a constant."""
    given = draw(device)
    place = list(LOSS.outputs).index(name)

    def penalised(weights: Any, given: Given = given, api: Any = torch_api) -> Any:
        results = api.indexer_loss(**given | {"index_weights": weights}, softmax_scale=SCALE)
        return results[0][0] + (results[place] ** 2).sum()

    def detached(weights: torch.Tensor) -> torch.Tensor:
        results = torch_api.indexer_loss(**given | {"index_weights": weights}, softmax_scale=SCALE)
        return results[0][0] + (results[place].detach() ** 2).sum()

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        weights = given["index_weights"].clone().requires_grad_()
        return torch.autograd.grad(function(weights), weights)[0]

    compiled = torch.compile(penalised, fullgraph=True, backend="aot_eager")
    arrays = {name: kit.torch_to_jax(tensor) for name, tensor in given.items()}
    under_jax = jax.grad(partial(penalised, given=arrays, api=jax_api))
    for refused in (
        lambda: gradient(penalised),
        lambda: gradient(lambda weights: penalised(weights) - by_loss(given, *leaves_of(given)[:2], weights)),
        lambda: torch.func.grad(penalised)(given["index_weights"]),
        lambda: under_jax(arrays["index_weights"]),
        lambda: jax.jit(under_jax)(arrays["index_weights"]),
    ):
        with pytest.raises(UnsupportedError, match=refused_result(name)):
            refused()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=refused_result(name)):
        gradient(compiled)
    torch._dynamo.reset()
    want = gradient(lambda weights: by_loss(given, *leaves_of(given)[:2], weights))
    for way in (detached, torch.compile(detached, fullgraph=True, backend="aot_eager")):
        np.testing.assert_allclose(gradient(way).cpu() * 3.0 * COEFF, want.cpu(), rtol=1e-6)


def refused_result(name: str) -> str:
    return f"indexer_loss: the result {name} is differentiated, supported: derivatives of loss"


@WAYS
def test_attention_has_no_gradient(chosen: int | None, device: str) -> None:
    given = draw(device, chosen=chosen)
    for name in ("q", "rows", "lse"):
        with pytest.raises(
            UnsupportedError, match=f"indexer_loss: {name} is differentiated, supported: derivatives of"
        ):
            torch_api.indexer_loss(**given | {name: given[name].clone().requires_grad_()}, softmax_scale=SCALE)


def test_every_key_of_a_range_selected_is_the_dense_loss(device: str) -> None:
    dense = draw(device, chosen=None)
    count = len(dense["rows"])
    every = torch.arange(count, dtype=torch.int32, device=device).expand(len(dense["q"]), count).flip(1).contiguous()
    for name, a, b in zip(
        LOSS.outputs,
        torch_api.indexer_loss(**dense, softmax_scale=SCALE, coeff=COEFF),
        torch_api.indexer_loss(**dense, indices=every, softmax_scale=SCALE, coeff=COEFF),
        strict=True,
    ):
        assert bool(a.any())
        kit.assert_close(name, a.float(), kit.as_numpy(b.float()), LOSS.outputs[name].agreement)
    left, right = (
        torch_api.indexer_scores(*leaves_of(dense), dense["ends"], dense["starts"], indices)
        for indices in (None, every)
    )
    kit.assert_close("scores", left, kit.as_numpy(right.flip(1)), SCORES.outputs["scores"].agreement)


@pytest.mark.parametrize(
    ("op", "case"), [(op, c) for op in (SCORES_BACKWARD, LOSS) for c in op.cases], ids=kit.case_id
)  # fmt: skip
def test_the_order_of_tokens_does_not_change_a_bit_of_the_keys_gradients(op: Op, case: Case, device: str) -> None:
    """Where tokens are multiplied with their own columns; else a few roundings of float32."""
    found = []
    for step in (1, -1):
        inputs = {n: a[::step] if "T" in op.tensors[n].names else a for n, a in kit.make(case).items()}
        inputs = {n: a.copy() if step < 0 and "T" in op.tensors[n].names else a for n, a in inputs.items()}
        results = getattr(TORCH_OPS, op.name)(*kit.torch_inputs(op, inputs, device), **case.attrs)
        found.append({n: kit.as_numpy(r)[::step] if "T" in op.outputs[n].names else kit.as_numpy(r)
                      for n, r in zip(op.outputs, results, strict=True)})  # fmt: skip
    plan = getattr(TORCH_OPS, op.name).plan(*kit.torch_inputs(op, kit.make(case), device), **case.attrs)
    by_ranges = any(launch.name == "key_gradient_kernel" for launch in plan.launches)
    for name in op.outputs:
        if by_ranges and name == "dindex_k":
            kit.assert_close(name, found[1][name], found[0][name], op.outputs[name].agreement)
        elif name != "loss":  # a sum in the order of tokens
            np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize("case", [case for case in LOSS.cases if "workspace_bytes" in case.attrs], ids=kit.case_id)
def test_the_workspace_does_not_change_a_bit(case: Case, device: str) -> None:
    """All tokens at a time, and as many as fit."""
    arguments = kit.torch_inputs(LOSS, kit.make(case), device)
    attrs = {name: value for name, value in case.attrs.items() if name != "workspace_bytes"}
    whole = torch_api.indexer_loss(*arguments, **attrs)
    assert all(bool(result.any()) for result in whole)
    with pytest.raises(
        UnsupportedError, match=r"workspace_bytes value is 0, supported: at least \d+ for these"
    ) as raised:
        torch_api.indexer_loss(*arguments, **attrs, workspace_bytes=0)
    least = int(re.findall(r"at least (\d+)", str(raised.value))[0])
    found = set()
    for workspace_bytes in range(least, least + 8192, 256):
        given = attrs | {"workspace_bytes": workspace_bytes}
        plan = torch_api.indexer_loss.plan(*arguments, **given)
        assert plan.workspace_bytes <= workspace_bytes
        parts = sum(launch.name in ("measure_kernel", "key_gradient_kernel") for launch in plan.launches)
        if parts in found:
            continue
        found.add(parts)
        for name, a, b in zip(LOSS.outputs, whole, torch_api.indexer_loss(*arguments, **given), strict=True):
            kit.assert_bits_equal(name, b, a)
    assert found == {1, 2, 3, 5} if len(arguments[0]) == 5 else found == {1, 2}
    with pytest.raises(UnsupportedError, match=f"supported: at least {least} for these sizes"):
        torch_api.indexer_loss(*arguments, **attrs, workspace_bytes=least - 1)


@WAYS
def test_documents_of_a_packed_batch_are_apart(chosen: int | None, device: str) -> None:
    """A batch's loss is that of its documents, and what another document holds does not matter."""
    given = draw(device, chosen=chosen)
    first = given["starts"] == 0
    whole = torch_api.indexer_loss(**given, softmax_scale=SCALE, coeff=COEFF)
    parts = torch.zeros(1, device=device)
    for document, keys in ((first, slice(0, 10)), (~first, slice(10, None))):
        alone = {n: t if n in ("index_k", "rows") else t[document].contiguous() for n, t in given.items()}
        for name in ("index_k", "rows"):
            alone[name] = torch.full_like(given[name], torch.nan)
            alone[name][keys] = given[name][keys]
        results = torch_api.indexer_loss(**alone, softmax_scale=SCALE, coeff=COEFF * int(document.sum()) / 6)
        parts += results[0]
        assert torch.equal(results[1], whole[1][document])
    torch.testing.assert_close(parts, whole[0])


def test_targets_of_ranks_add_up(device: str) -> None:
    """Two ranks with one and two of attention's heads: the loss of all three."""
    given = draw(device)
    want = torch_api.indexer_loss(**given, softmax_scale=SCALE, coeff=COEFF)
    names = ("indices", "ends", "starts")
    target = sum(
        torch_api.indexer_target(
            given["q"][:, heads], given["rows"], given["lse"][:, heads].contiguous(), *(given[n] for n in names),
            softmax_scale=SCALE,
        )
        for heads in (slice(0, 1), slice(1, 3))
    )  # fmt: skip
    shared = {name: given[name] for name in (*LOSS.gradients, *names)}
    found = torch_api.indexer_loss(**shared, target=target, coeff=COEFF)
    for name, a, b in zip(LOSS.outputs, found, want, strict=True):
        assert bool(b.any())
        kit.assert_close(name, a.float(), kit.as_numpy(b.float()), LOSS.outputs[name].agreement)


def test_rows_without_keys_and_the_plateau(device: str) -> None:
    """No token has a key: no loss and no gradient. Every product is 0: a uniform prediction, no gradient."""
    given = draw(device)
    for empty in (
        {"ends": given["starts"]}, {"indices": torch.full_like(given["indices"], -1)},
        {"lse": torch.full_like(given["lse"], -torch.inf)},
    ):  # fmt: skip
        results = torch_api.indexer_loss(**given | empty, softmax_scale=SCALE)
        assert not any(bool(result.any()) for result in results)
    flat = given | {"index_q": torch.zeros_like(given["index_q"])}
    loss, *gradients = torch_api.indexer_loss(**flat, softmax_scale=SCALE)
    assert loss.item() > 0 and not any(bool(gradient.any()) for gradient in gradients)


SCORES_AND_TARGETS = {
    "underflow": ([0.0, 200.0, 0.0, -300.0], [0.25, 0.0, 0.5, 0.25]),
    "target-below-its-bound": ([0.0, -(2.0**45), 0.0, 0.0], [0.0, 2.0**-40, 1.0, 0.0]),
    "score-overflows": ([0.0, -(2.0**130), 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]),
    "masked": ([0.0, -200.0, 200.0, -200.0], [1.0, math.nan, math.nan, 2.0]),
}


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(("scores", "target"), SCORES_AND_TARGETS.values(), ids=SCORES_AND_TARGETS)
def test_a_prediction_of_0_has_its_logarithm(
    scores: list[float], target: list[float], implementation: Any, device: str
) -> None:
    """It is finite if the scores are. A key without target adds 0 all the same; NaN stands where a key is masked."""
    score, wanted = torch.tensor(scores, dtype=torch.float64), torch.tensor([target])
    valid = ~wanted[0].isnan()
    q, k = torch.zeros(1, 2, 32), torch.zeros(len(scores), 32)
    q[0, 0, 0] = q[0, 1, 1] = 1
    # A head for each sign, so that products are finite where a score is not.
    k[:, 0], k[:, 1] = score.clamp(min=0), -score.clamp(max=0) * 2.0**-60
    k[~valid] = math.nan
    weights, indices = torch.tensor([[1, -(2.0**60)]]), torch.arange(len(scores)).where(valid, -1).int()[None]
    arrays = [a.to(device) for a in (q.bfloat16(), k.bfloat16(), weights)]
    loss, *gradients = torch_api.indexer_loss(
        *arrays, indices=indices.to(device), target=wanted.to(device), implementation=implementation
    )
    share = wanted[0, valid].double() / wanted[0, valid].double().sum()
    want = share @ (share.clamp(min=1e-10).log() - score[valid].log_softmax(0))
    kit.assert_close("loss", loss, want[None].numpy(), LOSS.outputs["loss"].agreement)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@WAYS
def test_the_loss_falls(chosen: int | None, device: str) -> None:
    """Thirty steps of SGD on a small indexer, whose keys and queries are projections of attention's inputs."""
    given = draw(device, chosen=chosen)
    generator = torch.Generator().manual_seed(0)
    to_q, to_k = (torch.nn.Parameter(torch.randn(64, n, generator=generator).to(device) / 8) for n in (4 * 32, 32))
    weights = torch.nn.Parameter(torch.full((3 * 64, 4), 0.02, device=device))
    optimizer = torch.optim.SGD([to_q, to_k, weights], lr=0.02)
    history = []
    for _ in range(30):
        queries = given["q"].flatten(1).float()
        leaves = {
            "index_q": (given["q"].float().mean(1) @ to_q).view(-1, 4, 32).bfloat16(),
            "index_k": (given["rows"].float() @ to_k).bfloat16(),
            "index_weights": queries @ weights / 4,
        }
        loss = torch_api.indexer_loss(**given | leaves, softmax_scale=SCALE)[0]
        history.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert history[-1] < 0.7 * history[0], history


def test_vmap_over_sequences(device: str) -> None:
    """Each element has its own keys, or all share them."""
    for chosen in (None, 10):
        arrays = {name: kit.torch_to_jax(tensor) for name, tensor in draw(device, chosen=chosen).items()}
        many = [jnp.stack([leaf, leaf[::-1]]) for leaf in leaves_of(arrays)]
        for axes in ((0, 0, 0), (0, None, 0)):
            operands = [a if at == 0 else a[0] for a, at in zip(many, axes, strict=True)]
            for loss in (by_loss, by_scores):
                function = jax.grad(partial(loss, arrays, api=jax_api), (0, 1, 2))
                found = jax.vmap(function, axes)(*operands)
                for element in range(2):
                    alone = function(*[a[element] if at == 0 else a for a, at in zip(operands, axes, strict=True)])
                    for got, want in zip(found, alone, strict=True):
                        assert bool(jnp.array_equal(got[element], want))
