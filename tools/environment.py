"""Chooses the interpreter where there is no GPU: imported before NumPy, Triton, JAX and torch are."""

import os
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
# Whether tests take every case: on a GPU, and by `make test ALL=1`. Elsewhere some take of several alike one.
EVERYTHING = HAS_GPU or bool(os.environ.get("XMLA_ALL"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs are small and run once: XLA's time is that of its optimiser.
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
# Tiles are small: a second thread of BLAS mostly spins, on a core that another worker needs, and the fuzzer takes the
# processor time of 64 of them for a call that hangs.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
