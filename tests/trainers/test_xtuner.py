"""XTuner's own layer of GLM-5, forward and backward, by its PyTorch code and by the adapter.

It needs an XTuner that has the layer, `xtuner.v1.ops.sparse_mla`, as its repository has it and no wheel yet.
"""

import copy
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("xtuner") is None or find_spec("xtuner.v1") is None:
    pytest.skip("needs XTuner from its repository", allow_module_level=True)

import xtuner_glm
from small_transformers import assert_as_near, distance
from xtuner.v1.data_proto import SequenceContext
from xtuner.v1.module.attention import DSAMLAConfig, dsa_mla
from xtuner.v1.ops.sparse_mla import torch_dsa_topk_indices, torch_sparse_mla

pytestmark = pytest.mark.filterwarnings("ignore")  # XTuner's own
LENGTHS = (14, 19)  # of sequences
TOKENS = sum(LENGTHS)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_sparse_mla", "get_dsa_topk_indices", "ensure_tilelang_runtime_available"):
        monkeypatch.setattr(dsa_mla, name, getattr(dsa_mla, name))  # and back again
    xtuner_glm.install()


def packed(device: str) -> Any:
    return SequenceContext.from_input_ids(
        tuple(torch.zeros(1, length, dtype=torch.long, device=device) for length in LENGTHS), device=device
    )


def layer_of(backend: str, topk: int, device: str) -> Any:
    torch.manual_seed(0)
    layer = DSAMLAConfig(
        num_attention_heads=4, head_dim=96, kv_lora_rank=512, q_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=64,
        v_head_dim=32, index_topk=topk, index_head_dim=128, index_n_heads=4, sparse_mla_backend=backend,
    ).build(hidden_size=64)  # fmt: skip
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return layer.to(device, torch.bfloat16)


def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(length, device=x.device) for length in LENGTHS])[:, None].float()
    angles = (positions / 10000.0 ** (torch.arange(32, device=x.device) / 32)).repeat(1, 2)[None]
    embeddings = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return layer(hidden_states=x, position_embeddings=embeddings, seq_ctx=packed(str(x.device)))["projected_output"]


def test_outputs_and_gradients_are_xtuners(installed: None, device: str) -> None:
    """Of packed sequences, with all keys selected."""
    layer, own = layer_of("tilelang", 64, device), layer_of("torch", 64, device)
    exact = copy.deepcopy(own).float()
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, 64, device=device).bfloat16()
    results = [run(layer, x), run(exact, x.float()), run(own, x)]
    for result in results:
        result.float().square().sum().backward()
    assert_as_near(layer, exact, own)
    errors = [distance(each.float(), results[1], torch.ones_like(results[1]).bool()) for each in results[::2]]
    assert errors[0] < 1.5 * errors[1] + 0.005


def test_both_functions_are_xtuners(installed: None, device: str) -> None:
    """At a selection of fewer keys, and of which keys it is; the lse too."""
    torch.manual_seed(2)
    index_q, index_k = torch.randn(1, TOKENS, 4, 128, device=device), torch.randn(1, TOKENS, 128, device=device)
    weights, sequences = torch.randn(1, TOKENS, 4, device=device), packed(device)
    given = index_q.bfloat16(), index_k.bfloat16(), weights, sequences
    ours = xtuner_glm.select(*given, index_head_dim=128, index_topk=8)
    theirs = torch_dsa_topk_indices(*given, index_head_dim=128, index_topk=8)
    pairs = zip(ours[:, 0].tolist(), theirs[:, 0].tolist(), strict=True)
    assert ours.dtype == torch.int32
    shares = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairs]
    assert sum(shares) / TOKENS > 0.99, "but for ties: scores of heads that are all negative are 0"
    q, kv = torch.randn(TOKENS, 4, 576, device=device).bfloat16(), torch.randn(TOKENS, 1, 576, device=device).bfloat16()
    found = []
    for attend in (xtuner_glm.attend, torch_sparse_mla):
        leaves = [each.clone().requires_grad_() for each in (q, kv)]
        out, lse = attend(*leaves, ours, 0.05, value_dim=512)
        (out.float().square().sum() + lse.sum()).backward()
        found.append([out, lse, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert distance(ours.float(), theirs.float(), torch.ones_like(theirs).bool()) < 0.01


def test_other_backends_stay(installed: None) -> None:
    assert dsa_mla.get_sparse_mla("torch") is torch_sparse_mla
    assert "tilelang" not in sys.modules
