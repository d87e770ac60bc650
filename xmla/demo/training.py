"""The training demo: a model of transformers trained by xmla and as shipped."""

from functools import partial

import torch

from xmla.demo import curves
from xmla.demo.curves import Sizes, Train, texts_of
from xmla.demo.trained import build_sharp, train

TITLE = "DeepSeek-V3.2 of transformers, trained by xmla"
STORY = {
    "model": "DeepSeek-V3.2 of transformers: two layers with its own head dims (latent 512, rope 64, indexer 128) and "
    "little else, random weights in float32 with sharp attention",
    "replaced": "each layer's attention and indexer, by sparse_mla, indexer_scores, select_topk and indexer_loss over "
    "bfloat16 rows",
    "beside it": "the same model as shipped (eager attention over the keys that xmla selected, the indexer's loss in "
    "PyTorch's own operations), in float32 and under autocast to bfloat16",
}
RUNS = ("xmla", "as shipped", "as shipped, autocast")
COMMAND = "xmla demo --train"


def prepare() -> tuple[Sizes, torch.nn.Module, Train]:
    """Sizes for this machine, the model, and what trains it on the texts of the sizes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = curves.SIZES[device]
    return sizes, build_sharp(device, sizes.topk), partial(train, batch=torch.tensor(texts_of(sizes), device=device))
