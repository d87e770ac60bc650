"""Functions of the package that are no ops, with arguments of every other kind: xmla's own words, never Python's."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xmla
from xmla import ArgumentError, UnsupportedError, interop, layouts, torch_api

pytestmark = pytest.mark.usefixtures("device")

POOL, DIGEST = np.zeros((2, 4, 656), np.uint8), layouts.digest("v32", 64)
SMALL = xmla.ModelConfig(max_lens=(64,), batches=(1,), next_n=(1,))
CONFIGS = [getattr(xmla, name) for name in dir(xmla) if name.startswith("ModelConfig")]
# By function: positional and keyword arguments of a right call.
CALLS: dict[Callable[..., Any], tuple[Sequence[Any], Mapping[str, Any]]] = {
    xmla.supports: (("sparse_mla", "H200"), {"H": 16, "cache": "plain"}),
    xmla.model_config: (("deepseek_v32",), {"tensor_parallel": 1, "k": 512}),
    xmla.warmup: ((SMALL, "H200"), {"workers": 1, "progress": False}),
    xmla.compiles: ((), {}),
    layouts.digest: (("v32", 64), {"page_stride": None}),
    layouts.differences: ((DIGEST, DIGEST), {}),
    layouts.convert: ((POOL, "plain"), {"source_format": "v32", "scale_floor": "scale"}),
    layouts.inspect: ((POOL,), {}),
    interop.to_jax: ((torch.zeros(3),), {}),
    interop.to_torch: ((jnp.zeros(3),), {}),
    interop.on_device: ((torch.zeros(3),), {}),
    **{kind: ((), {name: p.default for name, p in inspect.signature(kind).parameters.items()}) for kind in CONFIGS},
}
OTHERS = (None, 3, 2.5, "nothing", "64", b"x", [], {}, (), object(), torch_api.sparse_mla, np.zeros(3), torch.zeros(3))


def test_every_public_function_is_here() -> None:
    for module in (layouts, interop):
        functions = inspect.getmembers(module, lambda value: inspect.isfunction(value))
        own = {f for name, f in functions if f.__module__ == module.__name__ and not name.startswith("_")}
        assert own <= CALLS.keys()
    assert {getattr(xmla, name) for name in xmla._MODULES if name.islower()} <= CALLS.keys()


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_arguments_of_another_kind_are_refused(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cannot be meant; a warm-up is not begun."""
    monkeypatch.setattr("xmla._warmup.make_ready", lambda *_, **__: None)
    positional, named = CALLS[function]
    if function is not interop.on_device:  # which needs pinned memory
        function(*positional, **named)
    for place in [*range(len(positional)), *named]:
        for other in OTHERS:
            given = dict(enumerate(positional)) | dict(named) | {place: other}
            try:
                function(*(given[number] for number in range(len(positional))), **{name: given[name] for name in named})
            except (ArgumentError, UnsupportedError) as error:
                assert str(error)
            except Exception as error:
                pytest.fail(f"{function.__name__}: {place} is {other!r}: {type(error).__name__}: {error}")
