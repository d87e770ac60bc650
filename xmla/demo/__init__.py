"""`xmla demo`: a model of transformers with its attention replaced by xmla, and how far the two agree."""

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.version import Version

from xmla._frameworks import missing, needed
from xmla.core.versions import installed


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
        release = installed("transformers")
        return release if release is not None and Version(release) < Version(self.since) else None


def run(model: Model, details: bool = False, train: bool = False, picture: Path | None = None) -> list[dict[str, Any]]:
    """Run the model's demo, tell it and return its figures; each says whether it keeps its bound.

    With `train` the model is trained, and `picture` gets the curves.

    Raises:
        ArgumentError: A picture of a demo that does not train.
        UnsupportedError: PyTorch is missing, or transformers is missing or too old for the model; only deepseek_v32 is
            trained.
    """
    from xmla.core.errors import ArgumentError, UnsupportedError

    if picture is not None and not train:
        raise ArgumentError("demo: --picture is given without --train, expected with it: it is of curves")
    if train and model is not Model.V32:
        raise UnsupportedError(f"demo: --train of --model {model}, supported is {Model.V32}")
    if missing("torch"):
        raise UnsupportedError(f"demo: the model is one of PyTorch, and {needed('torch')}")
    install = f"pip install 'transformers>={model.since}'"
    if model.too_old:
        raise UnsupportedError(f"demo: transformers {model.too_old} is too old for {model}: {install}")
    try:
        module: Any = import_module(f"xmla.demo.{model}")
    except ImportError as error:
        if "transformers" not in str(error):
            raise
        raise UnsupportedError(f"demo: {error}: {install}") from None
    from xmla.demo.shell import show, show_training

    return show_training(details, picture) if train else show(module, details)
