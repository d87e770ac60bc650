"""Settings that must stand before Triton or JAX is imported."""

import os
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()


def prepare() -> None:
    """Without a GPU interpret kernels and keep JAX off its CUDA plugin; with one leave torch its memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not HAS_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["JAX_PLATFORMS"] = "cpu"
