"""torchtitan's own model of transformers, forward and backward, by its masks of all pairs and by the adapter.

`make trainers` installs it and runs this on the CPU.
"""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan: make trainers", allow_module_level=True)

import torchtitan_dsa
from small_transformers import OF_TYPE, SIZES, assert_as_near, distance
from torchtitan.experiments.transformers_modeling_backend import TitanModelConfig
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's own
LENGTHS = (14, 19)  # of documents
TOKENS = sum(LENGTHS)


def make(folder: Path, documents: bool, dtype: torch.dtype, device: str) -> Any:
    """The model as its trainer makes it, with the weights of transformers' in `folder`."""
    config = HFTransformerModel.Config(
        model_config=TitanModelConfig(attn_mask_type="block_causal" if documents else "causal")
    )
    asked = SimpleNamespace(
        training=SimpleNamespace(seq_len=TOKENS), parallelism=None, debug=SimpleNamespace(deterministic=False),
        loss=None, hf_model=str(folder),
    )  # fmt: skip
    model = config.update_from_config(config=asked).build().to(dtype).to(device)
    model.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    return model


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_outputs_and_gradients_are_torchtitans(
    kind: str, documents: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sequences, packed with documents or one context each although positions begin anew; all keys selected."""
    torch.manual_seed(0)
    sizes = SIZES | OF_TYPE[kind] | {"index_topk": 64}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes), dtype=torch.float32).save_pretrained(tmp_path)
    exact, own = (make(tmp_path, documents, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    for each in (exact, own):  # flex attention has no derivative on a CPU; torchtitan's mask stays
        assert each.model.config._attn_implementation == "flex_torchtitan"
        each.model.config._attn_implementation = "eager"
    for name in ("__init__", "get_attention_masks"):
        monkeypatch.setattr(HFTransformerModel, name, getattr(HFTransformerModel, name))  # and back again
    torchtitan_dsa.install()
    model = make(tmp_path, documents, torch.bfloat16, device)
    assert model.model.config._attn_implementation == "xmla"
    tokens = torch.randint(2, 64, (2, TOKENS), device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS]).expand(2, -1)
    results = [each(tokens, positions=positions).float() for each in (model, exact, own)]
    for result in results:
        result.square().sum().backward()
    assert_as_near(model, exact, own)
    errors = [distance(each, results[1], torch.ones_like(results[1]).bool()) for each in (results[0], results[2])]
    assert errors[0] < 1.5 * errors[1] + 0.005, errors


def test_a_model_without_selected_keys_stays_torchtitans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "get_attention_masks"):
        monkeypatch.setattr(HFTransformerModel, name, getattr(HFTransformerModel, name))
    torchtitan_dsa.install()
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = CONFIG_MAPPING["llama"](**sizes, num_attention_heads=4, num_key_value_heads=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = make(tmp_path, True, torch.float32, "cpu")
    assert model.model.config._attn_implementation == "flex_torchtitan"
    masks = model.get_attention_masks(torch.arange(TOKENS)[None])
    assert masks is not None and not isinstance(masks, torch.Tensor)
