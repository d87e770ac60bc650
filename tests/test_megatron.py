"""Megatron-Core's hooks as Megatron calls them, against its unfused formulas restated in float64."""

import inspect
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch

from xmla import UnsupportedError, megatron, supports

HEADS, INDEXER_HEADS, DIM, LATENT, ROPE, VALUES = 4, 2, 32, 512, 64, 8
SCALE, COEFF = 0.05, 0.7
# Two roundings to float16: an argument of a product, and the result.
ROUNDINGS = 2.0**-10
# Float32 roundings of scores up to 2**5 inside of a loss of order 1, a few of them.
LOSS = 2.0**-16

LAYOUT = {
    "use_local_indexer_varlen": False, "single_packed_thd_sequence": False, "local_packed_cp_rank": 0,
    "local_packed_cp_query_start": 0, "local_packed_cp_query_len": None, "packed_seq_params": None, "cp_size": 1,
}  # fmt: skip
HOOKS = {
    "run_fused_qk_topk": megatron.run_fused_qk_topk,
    "run_fused_qk_topk_with_loss": megatron.run_fused_qk_topk_with_loss,
    "run_fused_absorbed_sparse_attention": megatron.run_fused_absorbed_sparse_attention,
    "run_fused_dsa_attention": megatron.run_fused_dsa_attention,
}


@dataclass
class Group:
    """What Megatron's process group tells of itself; a rank's collectives are `exchanged`."""

    ranks: int = 1

    def size(self) -> int:
        return self.ranks


@dataclass
class Layer:
    """A call of the layer: leaves, and Megatron's settings by its names."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    up: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    topk: int = 3
    sparse: bool = True
    per_token: bool = False
    valid: torch.Tensor | None = None
    group: Group = field(default_factory=Group)

    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("q", "k", "weights", "query", "key", "up")}

    def moving(self, dtype: torch.dtype | None = None, device: str | None = None) -> "Layer":
        """A copy of the call whose tensors have gradients."""
        leaves = {n: t.detach().to(device, dtype, copy=True).requires_grad_() for n, t in self.leaves().items()}
        rest = {n: t for n, t in vars(self).items() if n not in leaves}
        return Layer(**leaves, **{n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in rest.items()})

    def of_heads(self, heads: slice, ranks: int) -> "Layer":
        """What a rank has that shares the heads."""
        return Layer(**vars(self) | {"query": self.query[:, :, heads], "up": self.up[heads], "group": Group(ranks)})


def draw(device: str, lengths: list[int], batch: int = 1, latent: int = LATENT, **settings: Any) -> Layer:
    """Documents of these lengths in each of `batch` sequences."""
    tokens, generator = sum(lengths), torch.Generator().manual_seed(sum(lengths) + batch)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    starts = torch.repeat_interleave(torch.tensor([0, *lengths]).cumsum(0)[:-1], torch.tensor(lengths))
    return Layer(
        of(tokens, batch, INDEXER_HEADS, DIM), of(tokens, batch, DIM), of(tokens, batch, INDEXER_HEADS) / 4,
        of(tokens, batch, HEADS, latent + ROPE) / 2, of(tokens, batch, 1, latent + ROPE) / 2,
        of(HEADS, VALUES, latent) / 20,
        starts.to(device), torch.arange(1, tokens + 1, device=device), **settings,
    )  # fmt: skip


def whole(layer: Layer, **other: Any) -> Any:
    """`run_fused_dsa_attention` as dsa.py calls it."""
    arguments = {
        "config": SimpleNamespace(), "query": layer.query, "key": layer.key, "value": None,
        "up_v_weight": layer.up, "q_indexer": layer.q, "k_indexer": layer.k, "indexer_weights": layer.weights,
        "indexer_topk": layer.topk, "softmax_scale": SCALE, "loss_coeff": COEFF, "sparse_loss": layer.sparse,
        "calculate_per_token_loss": layer.per_token, "absorbed_mla": True, "attn_mask_type": object(),
        "varlen_starts": layer.starts, "varlen_ends": layer.ends, "key_positions": None,
        "query_valid_rows": layer.valid, "varlen_is_plain_causal": False, "use_relu": True,
        "pg_collection": SimpleNamespace(tp=layer.group), **LAYOUT,
    }  # fmt: skip
    return megatron.run_fused_dsa_attention(**arguments | other)


def selection(layer: Layer, **other: Any) -> Any:
    """`run_fused_qk_topk` as dsa_kernels.py calls it."""
    arguments = {
        "q": layer.q, "k": layer.k, "weights": layer.weights, "index_topk": layer.topk, "starts": layer.starts.int(),
        "ends": layer.ends.int(), "block_size": 8192, "use_relu": True, **LAYOUT,
    }  # fmt: skip
    return megatron.run_fused_qk_topk(**arguments | other)


def selection_with_loss(layer: Layer, **other: Any) -> Any:
    """`run_fused_qk_topk_with_loss` as dsa_kernels.py calls it."""
    arguments = {
        "config": SimpleNamespace(), "q": layer.q, "k": layer.k, "weights": layer.weights,
        "index_topk": layer.topk, "starts": layer.starts.int(), "ends": layer.ends.int(), "block_size": 8192,
        "query": layer.query.detach(), "key": layer.key.detach(), "softmax_scale": SCALE, "loss_coeff": COEFF,
        "pg_collection": SimpleNamespace(tp=layer.group), "query_valid_rows": layer.valid,
        "calculate_per_token_loss": layer.per_token, "use_relu": True, **LAYOUT,
    }  # fmt: skip
    return megatron.run_fused_qk_topk_with_loss(**arguments | other)


def attention(layer: Layer, indices: torch.Tensor, length: torch.Tensor | None = None, **other: Any) -> Any:
    """`run_fused_absorbed_sparse_attention` as dsa_kernels.py calls it, by places."""
    query, key = ({"query": layer.query, "key": layer.key} | other).values()
    return megatron.run_fused_absorbed_sparse_attention(query, key, indices, SCALE, layer.up.shape[2], length)


def masked_softmax(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """0 where nothing is allowed. Megatron's own has 1e-10 below the sum, which is at least 1."""
    return logits.masked_fill(~allowed, -math.inf).softmax(-1).masked_fill(~allowed, 0.0)


def reference(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which keys are selected [B, S, N], the layer's output and the loss, with autograd's gradients of all leaves."""
    places = torch.arange(len(layer.k), device=layer.k.device)
    visible = (places >= layer.starts[:, None]) & (places < layer.ends[:, None])
    scores = torch.einsum("sbid,nbd->bsin", layer.q, layer.k).relu()
    scores = torch.einsum("bsin,sbi->bsn", scores, layer.weights)
    # Megatron leaves open which of equal scores are taken, such as the zeros of the ReLU; xmla takes the first keys.
    values, order = scores.detach().masked_fill(~visible, -math.inf).sort(descending=True, stable=True)
    best = slice(min(layer.topk, len(places)))
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, order[..., best], values[..., best] > -math.inf)
    logits = torch.einsum("sbhd,nbd->bhsn", layer.query, layer.key[:, :, 0]) * SCALE
    probabilities = masked_softmax(logits, selected[:, None])
    latent = torch.einsum("bhsn,nbc->sbhc", probabilities, layer.key[:, :, 0, : layer.up.shape[2]])
    output = torch.einsum("sbhc,hvc->sbhv", latent, layer.up).flatten(2)

    allowed = selected if layer.sparse else visible.expand_as(selected)
    target = masked_softmax(logits.detach(), allowed[:, None]).sum(1)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-10)
    predicted = scores.masked_fill(~allowed, -math.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
    kl = (target * (target.clamp_min(1e-10).log() - predicted)).sum(-1)
    counted = torch.ones_like(kl) if layer.valid is None else layer.valid.expand_as(kl).to(kl)
    total = (kl * counted).sum() * COEFF
    return selected, output, total if layer.per_token else total / counted.sum()


def one_hot(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """[B, S, N] of indices [B, S, K], −1 dropped."""
    assert indices.dtype == torch.int32
    found = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(2, indices.long() % (keys + 1), True)[..., :keys]


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, bound: float = ROUNDINGS) -> None:
    got, want = got.detach().cpu().double(), want.detach().cpu()
    assert got.shape == want.shape and bool(want.any()), name
    error = float((got - want).norm() / want.norm())
    assert error <= bound, f"{name}: {error:.2e}"


def gradients(output: torch.Tensor, loss: torch.Tensor, layer: Layer) -> dict[str, torch.Tensor]:
    """Gradients of a sum of outputs whose factors alternate, and of three losses."""
    factors = torch.arange(output.numel(), device=output.device).view(output.shape) % 5 - 2
    ((output.to(torch.promote_types(output.dtype, torch.float32)) * factors).sum() + 3 * loss).backward()
    return {name: leaf.grad for name, leaf in layer.leaves().items() if leaf.grad is not None}


def check(layer: Layer, output: torch.Tensor, loss: torch.Tensor, moving: Layer) -> None:
    exact = layer.moving(torch.float64, "cpu")
    _, want_output, want_loss = reference(exact)
    assert output.dtype == torch.float16 and loss.dtype == torch.float32 and loss.shape == ()
    assert_close("output", output, want_output)
    assert_close("loss", loss, want_loss, LOSS)
    found, wanted = gradients(output, loss, moving), gradients(want_output, want_loss, exact)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float16
        assert_close(name, gradient, wanted[name])


CASES = {
    "causal": lambda device: draw(device, [6], 2),
    "packed": lambda device: draw(device, [5, 1, 3]),
    "padding": lambda device: draw(device, [5, 3], 2, valid=(torch.arange(16, device=device) % 3 > 0).view(2, 8)),
    "padded-end": lambda device: draw(device, [4, 3], valid=torch.arange(7, device=device) < 4, per_token=True),
    "448-latent": lambda device: draw(device, [5], latent=448),
    "few-keys": lambda device: draw(device, [3], 1, topk=8, per_token=True),
}
SPARSE = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


@SPARSE
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_layer(make: Any, sparse: bool, device: str) -> None:
    layer = make(device)
    layer.sparse = sparse
    moving = layer.moving()
    check(layer, *whole(moving), moving)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_hooks_one_by_one_have_the_bits_of_the_layer(make: Any, device: str) -> None:
    """As they are called when layers share a selection."""
    layer = make(device)
    moving, again = layer.moving(), layer.moving()
    output, loss = whole(moving)
    indices, no_length, own_loss = selection_with_loss(again)
    assert no_length is None and torch.equal(own_loss, loss)
    assert torch.equal(indices, selection(layer)[0]) and selection(layer)[1] is None
    assert indices.shape == (layer.q.shape[1], len(layer.q), min(layer.topk, len(layer.k)))
    selected, *_ = reference(layer.moving(torch.float64, "cpu"))
    assert torch.equal(one_hot(indices, len(layer.k)).cpu(), selected)
    values = torch.einsum("sbhc,hdc->sbhd", attention(again, indices), again.up).flatten(2)
    assert torch.equal(values, output)
    found, wanted = gradients(values, own_loss, again), gradients(output, loss, moving)
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name


@SPARSE
def test_where_the_indexer_is_sure_and_wrong(sparse: bool, device: str) -> None:
    """The loss is more than any whose predictions are at least 1e-10, Megatron's bound of the target."""
    layer = draw(device, [6], sparse=sparse)
    layer.weights = layer.weights * 32
    moving = layer.moving()
    output, loss = whole(moving)
    assert loss.item() > -COEFF * math.log(1e-10)
    check(layer, output, loss, moving)


def test_gradients_of_keys_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, asked = megatron.xt.sparse_mla, []

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return attend(*args, **options)

    monkeypatch.setattr(megatron.xt, "sparse_mla", noted)
    monkeypatch.setitem(megatron._options, "deterministic", False)
    layer = CASES["packed"](device)
    moving = layer.moving()
    check(layer, *whole(moving), moving)
    assert asked == [False]


def test_a_rank_with_some_tokens_of_all(device: str) -> None:
    """Context parallel: the rank's tokens stand anywhere among the gathered keys, as starts and ends say."""
    layer = draw(device, [8])
    mine = torch.tensor([0, 1, 6, 7], device=device)
    for name in ("q", "weights", "query", "starts", "ends"):
        setattr(layer, name, getattr(layer, name)[mine])
    for layer.sparse in (True, False):
        moving = layer.moving()
        check(layer, *whole(moving, cp_size=2), moving)


@contextmanager
def exchanged(monkeypatch: pytest.MonkeyPatch, others: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Collectives of one of two ranks: what it sent; and added to it, what the other did."""
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, group: Group) -> None:
        assert group.size() == 2
        sent.append(tensor.clone())
        if others is not None:
            tensor += others[len(sent) - 1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        yield sent


@SPARSE
def test_ranks_that_share_the_heads(sparse: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the loss of all heads; the dense one sends some tokens at a time."""
    layer = draw(device, [5, 4], 2, sparse=sparse, valid=(torch.arange(18, device=device) % 4 > 0).view(2, 9))
    monkeypatch.setattr(megatron, "SCRATCH", 4 * 4 * len(layer.k))
    one, two = (layer.of_heads(heads, 2).moving() for heads in (slice(0, 1), slice(1, HEADS)))
    with exchanged(monkeypatch, None) as others:
        whole(two)
    assert len(others) == (1 if sparse else 2 * 3)
    with exchanged(monkeypatch, others) as sent:
        output, loss = whole(one)
    if sparse:
        with exchanged(monkeypatch, others) as again:
            _, _, alone = selection_with_loss(one)
        assert torch.equal(alone, loss) and torch.equal(again[0], sent[0])
    exact = layer.moving(torch.float64, "cpu")
    _, want_output, want_loss = reference(exact)
    assert_close("loss", loss, want_loss, LOSS)
    assert_close("output", output, want_output[..., :VALUES])
    found, wanted = gradients(output, loss, one), gradients(want_output, want_loss, exact)
    for name in ("q", "k", "weights"):
        assert_close(name, found[name], wanted[name])


@SPARSE
def test_parts_change_nothing(sparse: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = draw(device, [6, 3], sparse=sparse)
    moving, again = layer.moving(), layer.moving()
    results = whole(moving)
    monkeypatch.setattr(megatron, "SCRATCH", 1)  # a token at a time
    for got, want in zip(whole(again), results, strict=True):
        assert torch.equal(got, want)
    found, wanted = gradients(*results, moving), gradients(*whole(again), again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@SPARSE
def test_what_is_kept_until_the_backward(sparse: bool, device: str) -> None:
    """No array of tokens by keys, and of the loss no array of tokens by selected keys."""
    layer = draw(device, [11, 2], sparse=sparse, topk=5).moving()
    shapes: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        whole(layer)
    assert len(shapes) > 3 and not [shape for shape in shapes if shape[-1] == 13]
    assert len([shape for shape in shapes if shape[-1] == 5]) == 1  # attention's slots


def test_without_a_loss(device: str) -> None:
    layer = draw(device, [6])
    with torch.no_grad():
        output, loss = whole(layer, loss_coeff=0.0)
    assert torch.equal(output, whole(layer)[0]) and loss.shape == () and float(loss) == 0


def test_indices_of_others(device: str) -> None:
    """A prefix counts; what is no key of a sequence is none, nor one of another sequence."""
    layer = draw(device, [4], 2)
    indices, _ = selection(layer)
    wide = torch.cat([indices, indices.new_tensor([4, 7, -5]).expand(2, 4, 3)], 2)
    want = attention(layer, indices)
    assert torch.equal(attention(layer, wide), want)
    assert torch.equal(attention(layer, wide.long()), want)
    length = torch.tensor([[1, 2, 0, 3]], device=device).expand(2, -1)
    places = torch.arange(3, device=device)
    cut = indices.masked_fill(places >= length[..., None], -1)
    assert torch.equal(attention(layer, indices, length), attention(layer, cut))
    assert not attention(layer, indices, length)[2].any()


def test_what_falls_back(device: str) -> None:
    """Before anything is computed: the tensors are not on a device that has kernels."""
    layer = draw(device, [4]).moving(device="meta")
    indices = torch.zeros(1, 4, 3, dtype=torch.int32, device="meta")
    wide = {"q": layer.q.float(), "k": layer.k.float()}
    indexer = {"relu": {"use_relu": False}, "float32": wide, "of two dtypes": {"k": layer.k.bfloat16()}}
    indexer["dims"] = {"q": layer.q[..., :16], "k": layer.k[..., :16]}
    indexer["heads"] = {"q": layer.q.repeat(1, 1, 33, 1), "weights": layer.weights.repeat(1, 1, 33)}
    indexer["tokens"] = {"q": layer.q[:0], "weights": layer.weights[:0]}
    indexer["keys"] = {"k": layer.k[:0]}
    absorbed = {
        "float32": {"query": layer.query.float(), "key": layer.key.float()},
        "of two dtypes": {"key": layer.key.bfloat16()},
        "keys with heads": {"key": layer.key.expand(-1, -1, HEADS, -1)},
        "dims": {"query": layer.query[..., :448], "key": layer.key[..., :448]},
        "heads": {"query": layer.query.repeat(1, 1, 33, 1)},
    }
    for reason, other in indexer.items():
        assert selection(layer, **other) is None, reason
        assert selection_with_loss(layer, **other) is None, reason
        renamed = {"q": "q_indexer", "k": "k_indexer", "weights": "indexer_weights"}
        assert whole(layer, **{renamed.get(name, name): value for name, value in other.items()}) is None, reason
    for reason, other in absorbed.items():
        assert selection_with_loss(layer, **other) is None, reason
        assert attention(layer, indices, **other) is None, reason
        assert whole(layer, **other) is None, reason
    for name, value in {
        "value": layer.key, "up_v_weight": None, "absorbed_mla": False, "varlen_starts": None, "varlen_ends": None,
        "key_positions": layer.ends,
    }.items():  # fmt: skip
        assert whole(layer, **{name: value}) is None, name
    latent = torch.zeros(HEADS, VALUES, 576, device="meta")
    assert whole(layer, up_v_weight=latent) is None
    assert megatron.run_fused_absorbed_sparse_attention(layer.query, layer.key, indices, SCALE, 576) is None


def test_what_is_served_is_what_the_ops_serve() -> None:
    for op, axis, most in (
        ("indexer_scores", "I", megatron.MAX_INDEXER_HEADS), ("indexer_loss", "I", megatron.MAX_INDEXER_HEADS),
        ("indexer_target", "H", megatron.MAX_HEADS), ("sparse_mla", "H", megatron.MAX_HEADS),
    ):  # fmt: skip
        assert supports(op, "H200", **{axis: most}) and not supports(op, "H200", **{axis: most + 1})
    for dims in megatron.INDEXER_DIMS:
        assert supports("indexer_loss", "H200", D=dims)


MODULES = {
    "kernels": "megatron.core.transformer.experimental_attention_variant.dsa_kernels",
    "utils": "megatron.core.utils",
    "config": "megatron.core.transformer.transformer_config",
}


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into what Megatron has: its table of modules, its names, and the type that arguments are made from."""
    modules = {name: ModuleType(path) for name, path in MODULES.items()}
    for path, module in zip(MODULES.values(), modules.values(), strict=True):
        monkeypatch.setitem(sys.modules, path, module)
    with pytest.raises(UnsupportedError) as caught:
        megatron.install()
    message = "xmla.megatron: no Megatron-Core with hooks for sparse attention, such as 0.19.2: "
    assert str(caught.value).startswith(message)

    @dataclass
    class TransformerConfig:
        dsa_kernel_backend: Literal["none", "tilelang"] = "none"

    vars(modules["kernels"])["_BACKEND_MODULE_NAME_BY_BACKEND"] = table = {"tilelang": "a.module"}
    vars(modules["utils"])["_VALID_DSA_KERNEL_BACKENDS"] = ("none", "tilelang")
    vars(modules["config"])["TransformerConfig"] = TransformerConfig
    monkeypatch.setattr(megatron, "_options", dict(megatron._options))
    for deterministic in (False, True):
        megatron.install(deterministic=deterministic)
        assert megatron._options == {"deterministic": deterministic}
        assert table == {"tilelang": "a.module", "xmla": "xmla.megatron"}
        assert vars(modules["utils"])["_VALID_DSA_KERNEL_BACKENDS"] == ("none", "tilelang", "xmla")
        choices = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"].type
        assert get_args(choices) == ("none", "tilelang", "xmla")


def test_a_script_runs_unchanged_after_install(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'a module beside the script'\n")
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys, beside, xmla.megatron\n"
        "from megatron.core import utils\n"
        "print(__name__, sys.argv, beside.NAME, utils._VALID_DSA_KERNEL_BACKENDS[-1])\n"
    )
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-m", "xmla.megatron", str(script), "--dsa-kernel-backend", "xmla"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = f"__main__ {[str(script), '--dsa-kernel-backend', 'xmla']} a module beside the script xmla\n"
    assert done.stdout == line


def test_signatures_are_those_of_the_installed_megatron() -> None:
    """And its dispatcher finds the hooks by the name that `install` gave them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "Megatron-Core 0.19 or newer is not installed"
        kernels = pytest.importorskip(MODULES["kernels"], reason=reason)
        megatron.install()
    config = SimpleNamespace(dsa_kernel_backend="xmla", attention_backend="auto")
    assert kernels.use_fused_dsa_kernels(config)
    for name, hook in HOOKS.items():
        assert kernels._resolve_fused_hook(config, name) is hook
        published, own = (inspect.signature(f).parameters for f in (getattr(kernels, name), hook))
        # The dispatcher gives some hooks its config, and calls one by places.
        assert {*published} - {"config"} == {*own} - {"config"}, name
    assert [*inspect.signature(kernels.run_fused_absorbed_sparse_attention).parameters][1:] == [
        *inspect.signature(megatron.run_fused_absorbed_sparse_attention).parameters
    ]
    layer = draw("meta", [4]).moving()
    given = {"packed_seq_params": None, "cp_size": 1, "use_relu": False}
    assert kernels.run_fused_qk_topk(
        config, layer.q, layer.k, layer.weights, 3, layer.starts, layer.ends, 8192, **given
    ) is None  # fmt: skip
