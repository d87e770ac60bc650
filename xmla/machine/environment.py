"""Settings that must stand before Triton or JAX is imported."""

import os
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()


def prepare(interpret: bool = True) -> None:
    """Without a GPU interpret kernels, if wanted, and keep JAX off its CUDA plugin; with one leave torch its memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not HAS_GPU:
        if interpret:
            os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"
