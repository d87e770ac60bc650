"""torchtitan's backend of transformers, whose models of DeepSeek sparse attention attend by xmla.

    torchtitan_dsa.install()  # before the model is made

Such a model has a mask of all pairs of tokens otherwise. Other models, and all but attention, stay torchtitan's.
"""

from typing import Any

import torch
from torchtitan.experiments.transformers_modeling_backend.model import HFTransformerModel

from xmla.transformers import NAME, SERVED


def install() -> None:
    make, masks = HFTransformerModel.__init__, HFTransformerModel.get_attention_masks

    def __init__(self: HFTransformerModel, config: Any) -> None:
        if config.model_type in SERVED:
            config._attn_implementation = NAME
        make(self, config)

    def get_attention_masks(self: HFTransformerModel, positions: torch.Tensor) -> Any:
        """None where documents begin at position 0, as xmla finds them itself; else a mask of tokens that are there."""
        if self.model.config._attn_implementation != NAME:
            return masks(self, positions)
        packed = getattr(self.model.config, "attn_mask_type", "causal") == "block_causal"
        return None if packed else torch.ones_like(positions)

    HFTransformerModel.__init__, HFTransformerModel.get_attention_masks = __init__, get_attention_masks
