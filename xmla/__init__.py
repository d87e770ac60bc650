"""DeepSeek sparse attention for PyTorch and JAX from one set of Triton kernels.

Import a front-end: ``from xmla import torch_api as xt`` or ``from xmla import jax_api as xj``. This module imports
neither framework. It imports Triton only when one of its names is used, so that the `xmla` command can choose Triton's
interpreter before that.

Glossary of axes, the same everywhere:
  T           query tokens, flat over all requests
  B           requests; B+1 for the starts of requests and the end of the last
  M           pages per request in a block table
  P, R        pages of a cache, entries per page; a slot is page · R + offset
  ROW         bytes, or elements of plain rows, per entry; of contiguous keys, per key
  H           query heads
  I           indexer heads
  K           selected keys per token (top-k), or slots per token
  N           keys of a prefill, and the tokens that they are of; columns of logits; candidates per part
  L           latent dims: the dims of an entry before the roped ones (512, in V4's formats 448)
  E           roped dims (64); L+E are all dims of an entry and of a query
  V           dims of a value and of attention's output (512)
  D           dims of an indexer head and of its keys; of a compressor, dims of the entry
  S           positions in a table of cosines and sines
  r           tokens per compressed entry
  C           series of D dims that a token gives a compressor (1 or 2); C·D dims per token, 2·C·D per state
  W           parts of a result, one per rank
  VALUES      elements of an indexer key as it is stored: D of fp8, D/2 bytes of MXFP4
  PLACES      places of a request in a pool that holds a part of its cache
  MISSES      the most of them that a step fills: T / B · K, the columns of a request
  WINDOW      entries of a sliding window (attribute `window`)
  BLOCKS      selected blocks per token; ENTRIES, the columns of their logits, are BLOCKS · granularity
  MAX_LEN     columns of paged logits (attribute `max_len`)
  COLUMNS     columns of an indexer's scores: K of selected keys, else N
  LOSS        the one element of a loss
  NUM_TOKENS  T of an op that has no argument with this axis (attribute `num_tokens`)
  COUNTS      the four counts that `split_batch` gives
A prefix names the array that an axis belongs to if an op has several of a kind. EXTRA_P, EXTRA_R, EXTRA_ROW and EXTRA_K
are of a second cache and its slots. SOURCE_P, SOURCE_R and SOURCE_ROW are of a cache that is converted. STATE_P,
STATE_R and STATE_M are of a compressor's states (R counts positions there) and their block table. INDEXER_ROW is of the
indexer's cache.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmla import layouts as layouts
    from xmla._warmup import Warmup as Warmup
    from xmla._warmup import warmup as warmup
    from xmla.core.compile import Compile as Compile
    from xmla.core.compile import compiles as compiles
    from xmla.core.errors import ArgumentError as ArgumentError
    from xmla.core.errors import CompileError as CompileError
    from xmla.core.errors import UnsupportedError as UnsupportedError
    from xmla.core.models.checkpoint import model_config as model_config
    from xmla.core.models.glm_flash import ModelConfigGlmFlash as ModelConfigGlmFlash
    from xmla.core.models.mistral_large4 import ModelConfigMistralLarge4 as ModelConfigMistralLarge4
    from xmla.core.models.v4 import ModelConfigV4 as ModelConfigV4
    from xmla.core.models.v32 import ModelConfig as ModelConfig
    from xmla.core.models.v41 import ModelConfigV41 as ModelConfigV41
    from xmla.core.support import Support as Support
    from xmla.core.support import supports as supports
    from xmla.core.values import Device as Device

__version__ = "0.3.0"

_MODULES = {
    "ArgumentError": "core.errors",
    "Compile": "core.compile",
    "CompileError": "core.errors",
    "Device": "core.values",
    "ModelConfig": "core.models.v32",
    "ModelConfigGlmFlash": "core.models.glm_flash",
    "ModelConfigMistralLarge4": "core.models.mistral_large4",
    "ModelConfigV4": "core.models.v4",
    "ModelConfigV41": "core.models.v41",
    "Support": "core.support",
    "UnsupportedError": "core.errors",
    "Warmup": "_warmup",
    "compiles": "core.compile",
    "model_config": "core.models.checkpoint",
    "supports": "core.support",
    "warmup": "_warmup",
}


if not TYPE_CHECKING:  # with it a type checker would accept every name

    def __getattr__(name):
        if name == "layouts":
            return import_module("xmla.layouts")
        if name not in _MODULES:
            raise AttributeError(f"module 'xmla' has no attribute {name!r}; ops are in xmla.torch_api and xmla.jax_api")
        value = globals()[name] = getattr(import_module(f"xmla.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "layouts"})
