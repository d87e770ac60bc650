"""The step of the demo's training in Flax NNX, whose second run has the bits of the first."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xmla.demo.in_jax import training
from xmla.demo.in_jax.model import Config, Model

TEXTS, TOKENS = 4, 256
# As the demo compiles it, without the products' tuning, which needs a GPU.
OPTIONS = training.IN_ONE_ORDER | {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": False}


def joint_step() -> tuple[Callable[..., Any], Any]:
    """A function of the model's weights and of texts: the gradients of everything; their shapes."""
    model = nnx.eval_shape(lambda: Model(Config(index_topk=32, dtype=jnp.float32), nnx.Rngs(0)))
    graph, weights = nnx.split(model)

    def step(weights: nnx.State, texts: jax.Array) -> nnx.State:
        attention = partial(training.attend, model.config, TEXTS, False)
        loss = partial(training.loss_of, batch=texts, attend=attention)
        return nnx.grad(loss, has_aux=True)(nnx.merge(graph, weights))[0]

    return step, (weights, jax.ShapeDtypeStruct((TEXTS, TOKENS + 1), jnp.int32))
