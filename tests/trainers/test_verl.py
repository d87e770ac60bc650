"""verl's own configuration of a model: two settings have it attend by xmla."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

from small_transformers import OF_TYPE, SIZES, text
from transformers import AutoModelForCausalLM, DeepseekV32Config
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config.model import HFModelConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own


def test_a_model_attends_by_xmla(device: str, tmp_path: Path) -> None:
    """Made of verl's config as its workers make it; xmla is imported by the setting alone."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(DeepseekV32Config(**SIZES | OF_TYPE["deepseek_v32"])).save_pretrained(tmp_path)
    config = HFModelConfig(
        path=str(tmp_path), external_lib="xmla.transformers", override_config={"attn_implementation": "xmla"},
        load_tokenizer=False,
    )  # fmt: skip
    model = get_hf_auto_model_class(config.hf_config).from_pretrained(
        pretrained_model_name_or_path=config.local_path, dtype=torch.bfloat16, config=config.hf_config
    )
    model = model.to(device)
    assert model.config._attn_implementation == "xmla"
    tokens = text(device)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.grad.any()
