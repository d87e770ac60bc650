"""DeepSeek sparse attention for PyTorch and JAX from one set of Triton kernels.

Import a front-end: ``xmla.torch_api`` or ``xmla.jax_api``. This module imports neither framework.
"""

from xmla import layouts as layouts
from xmla.core.device import Device as Device
from xmla.core.errors import ArgumentError as ArgumentError
from xmla.core.errors import CompileError as CompileError
from xmla.core.errors import UnsupportedError as UnsupportedError
from xmla.core.model import ModelConfig as ModelConfig
from xmla.core.model_v4 import ModelConfigV4 as ModelConfigV4
from xmla.core.support import Support as Support
from xmla.core.support import supports as supports
from xmla.warmup import Warmup as Warmup
from xmla.warmup import warmup as warmup

__version__ = "0.1.0"
