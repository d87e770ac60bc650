"""A model in Flax NNX trained on a text by xmla's ops, then decoded, without PyTorch and without transformers.

python examples/flax_training.py [picture.png]

The indexers' warm-up comes first, then joint training over the selected keys; the trained model continues the text. On
a GPU its words come out in a few minutes.
"""

import os
import sys
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from flax import nnx

from xmla.demo.curves import JOINT, WARM_UP, Sizes, texts_of
from xmla.demo.in_jax.model import Config, Model
from xmla.demo.in_jax.serving import Caches, decode, prefill
from xmla.demo.in_jax.training import train

SIZES = Sizes(4, 256, 32, {WARM_UP: 60, JOINT: 600}) if GPU else Sizes(2, 8, 3, {WARM_UP: 2, JOINT: 3})
DECODED = 200 if GPU else 4  # tokens, which are bytes


def main() -> None:
    model = Model(Config(index_topk=SIZES.topk, dtype=jnp.float32), nnx.Rngs(0))
    batch = texts_of(SIZES)
    curves = {stage: train(model, stage, steps, batch=batch) for stage, steps in SIZES.steps.items()}
    warm_up, joint = curves.values()
    print(f"KL {warm_up.kl[0]:.4f} to {warm_up.kl[-1]:.4f}, loss {joint.loss[0]:.4f} to {joint.loss[-1]:.4f}")
    assert warm_up.kl[-1] < warm_up.kl[0] and joint.loss[-1] < joint.loss[0]

    prompts = jnp.asarray(batch[:1, : SIZES.tokens // 2], jnp.int32)
    tokens = prompts.shape[1] + DECODED
    first, *keys = jax.random.split(jax.random.key(0), DECODED)
    settings = jnp.array([tokens], jnp.int32), jnp.array([0.0])  # at most, and greedily
    token, *rest = prefill(model, prompts, Caches.empty(model.config, 1, tokens), *settings, first)
    out, *_ = decode(model, *rest, jnp.stack(keys))
    print(bytes([*prompts[0].tolist(), *token.tolist(), *out[0].tolist()]).decode(errors="replace"))
    print(f"out {out.shape} {out.dtype}")
    if sys.argv[1:]:
        from xmla.demo.picture import draw

        draw("A model in Flax NNX, trained by xmla", {"xmla": curves}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
