"""Settings that must stand before Triton or JAX is imported."""

import os
from pathlib import Path

from xmla.core.errors import UnsupportedError

HAS_GPU = Path("/dev/nvidiactl").exists()


def require_gpu(command: str, otherwise: str) -> None:
    """Raise UnsupportedError where there is no GPU, before anything slow is imported."""
    if not HAS_GPU:
        raise UnsupportedError(f"{command}: no GPU is present; {otherwise}")


def prepare(interpret: bool = True) -> None:
    """Without a GPU interpret kernels, if wanted, and keep JAX off its CUDA plugin; with one leave torch its memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not HAS_GPU:
        if interpret:
            os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"
