"""`xmla demo`: a model of transformers with its attention replaced by xmla, or one in Flax, and how far each agrees."""

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from xmla._frameworks import install, missing, needed
from xmla.core.versions import older


class Framework(StrEnum):
    """What the model is written in; with JAX it needs neither PyTorch nor transformers."""

    TORCH = "torch"
    JAX = "jax"


class Model(StrEnum):
    """Models of transformers that the demo runs; each has a module of this name here."""

    V32 = "deepseek_v32"
    V4 = "deepseek_v4"
    GLM = "glm5_next"

    @property
    def since(self) -> str:
        """The first release of transformers that has it."""
        return "5.24" if self is Model.GLM else "5.17"

    @property
    def too_old(self) -> str | None:
        """The installed release of transformers if the model came, or got its layers' names, after it."""
        return older("transformers", self.since)


def run(
    model: Model, details: bool = False, train: bool = False, picture: Path | None = None,
    framework: Framework = Framework.TORCH, as_json: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the model's demo, print it and return its figures; each says whether it keeps its bound.

    With `train` the model is trained, and `picture` gets the curves. With `as_json` all else is printed on stderr.

    Raises:
        ArgumentError: A picture of a demo that does not train.
        UnsupportedError: A package is missing, or transformers is too old for the model; only deepseek_v32 is trained,
            and written in Flax.
    """
    from xmla.core.errors import ArgumentError, UnsupportedError

    if picture is not None and not train:
        raise ArgumentError("demo: --picture is given without --train, expected with it: it is of curves")
    for option, asked in (("--train", train), ("--framework jax", framework is Framework.JAX)):
        if asked and model is not Model.V32:
            raise UnsupportedError(f"demo: {option} of --model {model}, supported is {Model.V32}")
    if missing(framework):
        what, other = "", ""
        if framework is Framework.TORCH:
            what = "the model is one of PyTorch, and "
            other = "; --framework jax has a model in Flax" if model is Model.V32 and not missing("jax") else ""
        raise UnsupportedError(f"demo: {what}{needed(framework)}{other}")
    package, way_out = "transformers", install("demo")
    if framework is Framework.JAX:
        package, way_out = "flax", "pip install 'flax>=0.12'"
    elif model.too_old:
        raise UnsupportedError(f"demo: transformers {model.too_old} is too old for {model}: {way_out}")
    try:
        module: Any = import_module(f"xmla.demo.{module_of(model, framework, train)}")
    except ImportError as error:
        if package not in str(error):
            raise
        raise UnsupportedError(f"demo: {error}: {way_out}") from None
    console = Console(stderr=as_json)
    if train:
        from xmla.demo.telling import show_training

        return show_training(module, console, details, picture)
    if framework is Framework.JAX:
        return module.show(console, details)
    from xmla.demo.shell import show

    return show(module, console, details)


def module_of(model: Model, framework: Framework, train: bool) -> str:
    """The module of a demo."""
    if framework is Framework.JAX:
        return f"in_jax.{'training' if train else 'decoding'}"
    return "training" if train else str(model)
