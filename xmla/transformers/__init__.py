"""DeepSeek sparse attention of transformers' models by xmla: `attn_implementation="xmla"`.

    import xmla.transformers

    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="xmla", dtype=torch.bfloat16)

Importing this package makes the name known. Models of `SERVED` then select keys by `indexer_scores` and `select_topk`
and attend by `sparse_mla`, over the latents as they are cached: neither scores of all indexer heads, nor keys and
values of all heads, nor a mask of tokens by keys are made. DeepSeek-V4's keys are rows already, of a window and of
entries; `compress_rows` makes these, and the keys of GLM-5.3-Flash's pools. Other models are refused by name when they
are called.
`LatentCache` holds latents as the kernels read them, in 16 bits or fp8. `IndexerLoss` trains the indexers, and
`Selections` of a rollout stand in the place of the indexers' own.

Raises, on import:
    ImportError: torch or transformers is not installed.
    UnsupportedError: transformers is older than the models that are served.
"""

from xmla._frameworks import install, missing, needed
from xmla.core.errors import UnsupportedError
from xmla.core.versions import TRANSFORMERS, older

if missing("torch"):
    raise ImportError(needed("torch"))
# Before the imports below, which need what an older release lacks.
if release := older("transformers", TRANSFORMERS):
    raise UnsupportedError(
        f"xmla.transformers: transformers {release} is installed, expected {TRANSFORMERS} or later: "
        f"{install('transformers')}"
    )

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    raise ImportError(f"xmla.transformers needs {error.name}: {install('transformers')}") from error

from xmla.transformers.cache import LatentCache
from xmla.transformers.learning import IndexerLoss
from xmla.transformers.models import NAME, SERVED, attend, mask, serve
from xmla.transformers.replay import Selections

__all__ = ["NAME", "SERVED", "IndexerLoss", "LatentCache", "Selections"]

AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
serve()
