"""The demo of the Flax model: requests prefilled and decoded by xmla, beside the reference and beside jax.numpy."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress

from xmla.demo.figures import Figure, equal, figure, relative_error
from xmla.demo.in_jax import dense
from xmla.demo.in_jax.model import Config, Model
from xmla.demo.in_jax.serving import Caches, Implementation, decode, jitted, prefill, run
from xmla.demo.telling import tell, tell_figures, tell_verdict, worst

TITLE = "DeepSeek-V3.2 in Flax NNX, decoded by xmla"
STORY = {
    "model": "DeepSeek-V3.2 in Flax NNX: two layers, in a scan, with its own head dims (latent 512, rope 64, indexer "
    "128) and little else, random weights in bfloat16; neither PyTorch nor transformers",
    "by xmla": "a layer's step, dsa_step, over shuffled pages of fp8 entries; the caches of all layers are one array "
    "each, donated",
}
KINDS = {
    "same step": "xmla against the float64 reference of each op, in the same program: the kernels' share",
    "dense": "xmla over fp8 entries against float32 over all pairs of tokens in jax.numpy: mostly the share of fp8",
    "decode": "all steps in one jitted function, against one call a step",
}
PROMPTS = 120, 70, 20  # tokens
DECODED = 8
FEWER = 3  # tokens that the second request may have

# As the demo of transformers' model (deepseek_v32.py) bounds the like.
BOUNDS = {"logits, same step": 5e-2, "logits, dense": 0.2}


def prompts_of(lengths: Sequence[int]) -> np.ndarray:
    """Passages of Moby Dick by bytes, one for each length: [B, N], −1 after the last token."""
    text = np.array(list(files("xmla.demo").joinpath("moby_dick.txt").read_bytes()), np.int32)
    prompts = np.full((len(lengths), max(lengths)), -1, np.int32)
    for row, length in zip(prompts, lengths, strict=True):
        row[:length], text = text[:length], text[length:]
    return prompts


def logits_of(
    model: Model, prompts: np.ndarray, tokens: np.ndarray, implementation: Implementation = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] of prefill and of decode, of all requests in turn, over the tokens [B, steps] that they decoded."""
    forward = jitted(run, static_argnames="implementation")
    count, steps = (prompts >= 0).sum(1), tokens.shape[1]
    caches = Caches.empty(model.config, len(prompts), prompts.shape[1] + steps)
    logits = []
    for step, new in enumerate([prompts, *tokens.T[:, :, None]]):
        place = count[:, None] + step - 1 if step else np.arange(prompts.shape[1])
        positions = np.where(new < 0, -1, place).astype(np.int32)
        x, caches = forward(model, new, positions, caches, implementation=implementation)
        logits.append(np.asarray(model.logits(x)))
    return logits[0][prompts >= 0], np.concatenate(logits[1:], axis=1)[tokens >= 0]


@jax.default_matmul_precision("float32")  # on a GPU it would be TF32
def dense_logits(model: Model, prompts: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of prefill and of decode by jax.numpy, each request's whole text at once."""
    prefills, decodes = [], []
    for prompt, more in zip(prompts, tokens, strict=True):
        text = np.concatenate([prompt[prompt >= 0], more[more >= 0]])
        attend = partial(dense.attend, model.config, 1, False, jnp.float32)
        x, *_ = model(jnp.asarray(text), jnp.arange(len(text)), attend, (), None)
        prefill, decode = np.split(np.asarray(model.logits(x)), [(prompt >= 0).sum()])
        prefills.append(prefill)
        decodes.append(decode)
    return np.concatenate(prefills), np.concatenate(decodes)


def compare(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], how: str) -> Iterator[Figure]:
    for phase, mine, other in zip(("prefill", "decode"), ours, theirs, strict=True):
        yield figure(f"logits, {how}", phase, relative_error(mine, other), BOUNDS)


def in_words(tokens: Mapping[str, np.ndarray]) -> str:
    return "; ".join(f"{name}: {' '.join(str(t) for t in row if t >= 0)}" for name, row in tokens.items())


def show(console: Console, details: bool = False) -> list[Figure]:
    """Prefill and decode, print it, with `details` all figures, and return them."""
    prompts = prompts_of(PROMPTS)
    tell(console, {
        **STORY,
        "text": f"{' + '.join(map(str, PROMPTS))} tokens of Moby Dick prefilled at once, then {DECODED} of each "
        f"decoded: greedily, greedily but {FEWER} at most, and at temperature 1"
    })  # fmt: skip
    longest = max(PROMPTS) + DECODED
    end = jnp.array([longest, PROMPTS[1] + FEWER, longest], jnp.int32)
    temperature = jnp.array([0.0, 0.0, 1.0], jnp.float32)
    key, *keys = jax.random.split(jax.random.key(0), DECODED)
    keys = jnp.stack(keys)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=4)

        def begin(part: str) -> None:
            bar.update(task, advance=1, description=part)
            if not console.is_terminal:  # where no bar is drawn
                tell(console, {"now": part})

        begin("xmla")
        model = Model(Config(), nnx.Rngs(0))
        caches = Caches.empty(model.config, len(prompts), longest)
        first, requests, caches = prefill(model, prompts, caches, end, temperature, key)
        again = requests, jax.tree.map(jnp.copy, caches)
        decoded, *_ = decode(model, requests, caches, keys)
        begin("one call a step")
        steps = []
        for place in range(len(keys)):
            step, *again = decode(model, *again, keys[place : place + 1])
            steps.append(step)
        same = bool((jnp.concatenate(steps, axis=1) == decoded).all())
        figures = [equal("decode, tokens", "", same)]
        tokens = np.concatenate([np.asarray(first)[:, None], np.asarray(decoded)], axis=1)
        begin("reference")
        ours = logits_of(model, prompts, tokens)
        figures += compare(ours, logits_of(model, prompts, tokens, "reference"), "same step")
        begin("dense")
        theirs = dense_logits(model, prompts, tokens)
        figures += compare(ours, theirs, "dense")
    tell_verdict(console, figures)
    for kind, meaning in KINDS.items():
        tell(console, {kind: f"{', '.join(worst([each for each in figures if kind in each['name']]))}; {meaning}"})
    most = [(mine.argmax(-1) == other.argmax(-1)).mean() for mine, other in zip(ours, theirs, strict=True)]
    tell(console, {
        "next token": f"the dense model's most likely one for {most[0]:.0%} of the prompts' tokens: fp8 rounds each "
        "key and with it the selection, and random weights leave the best tokens nearly as likely",
        "decoded": in_words(dict(zip(("greedy", f"{FEWER} at most", "temperature 1"), tokens, strict=True))),
    })  # fmt: skip
    tell_figures(console, TITLE, figures, details, "xmla demo --framework jax --details")
    return figures
