"""The only file that imports jax-triton and knows its versions (0.4.x, with JAX 0.11.x).

`import jax_triton` deletes TRITON_CACHE_DIR from the environment (0.3.1 sets it to ""); it is restored here.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax

from xmla.core.device import Device
from xmla.core.errors import UnsupportedError
from xmla.core.plan import COMPILE_OPTIONS, Launch
from xmla.core.spec import Spec


def _import() -> Any:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise UnsupportedError("GPU kernels under JAX need jax-triton 0.4.x: pip install 'xmla[jax]'") from error
    finally:
        if cache_dir is not None:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    return jax_triton


def launch(launch: Launch, inputs: Sequence[Any], outputs: Sequence[Spec], device: Device) -> list[jax.Array]:
    """One kernel launch inside a JAX computation; Refs among `inputs` are updated in place."""
    return _import().triton_call(
        *inputs,
        *launch.sizes,
        kernel=launch.kernel,
        out_type=[jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in outputs],
        grid=launch.grid,
        name=launch.name,
        compute_capability=device.arch,
        backend_options=dict(COMPILE_OPTIONS),
        **launch.options(),
        **dict(launch.constexprs),
    )
